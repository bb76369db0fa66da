/* SPDX-License-Identifier: Apache-2.0
 *
 * A graph with memory nodes takes its memory when it is launched or uploaded, out of a pool that each device
 * keeps for graphs. What its nodes allocate together is noted when it is instantiated; at a launch the part
 * that the pool does not have yet is charged beforehand, and afterwards the charge becomes what the driver
 * says.
 */
#include "graph.h"

#include "charge.h"
#include "entry.h"
#include "limiter.h"
#include "pages.h"
#include "place.h"
#include "pool.h"
#include "resolve.h"

#define NODES_AT_ONCE 64u
#define DEEPEST       8u

/* Physical memory comes in steps of this. */
#define STEP_BYTES (2ull << 20)

/* What the nodes of a graph allocate together, by device. */
struct sum {
	uint32_t count;
	struct {
		CUdevice device;
		uint64_t bytes;
	} of[AQ_GRAPH_DEVICES];
};

static void add_node(CUgraphNode node, struct sum *sum, unsigned depth);

static void add_bytes(struct sum *sum, CUdevice device, uint64_t bytes)
{
	uint32_t i = 0;
	while (i < sum->count && sum->of[i].device != device)
		i++;
	if (i == AQ_GRAPH_DEVICES)
		i--; /* more devices than anybody has in one graph: too much is charged on the last */
	if (i == sum->count) {
		sum->of[sum->count].device = device;
		sum->of[sum->count++].bytes = 0;
	}
	/* The allocator's own unit, node by node. */
	bytes = aq_units_of(bytes) << AQ_UNIT_SHIFT;
	sum->of[i].bytes = sum->of[i].bytes > UINT64_MAX / 2 || bytes > UINT64_MAX / 2
			       ? UINT64_MAX / 2
			       : sum->of[i].bytes + bytes;
}

static void add_graph(CUgraph graph, struct sum *sum, unsigned depth)
{
	CUgraphNode few[NODES_AT_ONCE];
	size_t count = 0;
	if (depth > DEEPEST || REAL(cuGraphGetNodes)(graph, NULL, &count) != CUDA_SUCCESS || count == 0)
		return;
	CUgraphNode *nodes = few;
	size_t size = count * sizeof(*nodes);
	if (count > NODES_AT_ONCE)
		nodes = aq_pages(size);
	if (nodes == NULL)
		return;
	if (REAL(cuGraphGetNodes)(graph, nodes, &count) == CUDA_SUCCESS)
		for (size_t i = 0; i < count; i++)
			add_node(nodes[i], sum, depth);
	if (nodes != few)
		aq_pages_give(nodes, size);
}

static void add_node(CUgraphNode node, struct sum *sum, unsigned depth)
{
	int type = -1;
	CUgraph child;
	CUDA_MEM_ALLOC_NODE_PARAMS params;
	if (REAL(cuGraphNodeGetType)(node, &type) != CUDA_SUCCESS)
		return;
	if (type == CU_GRAPH_NODE_TYPE_GRAPH &&
	    REAL(cuGraphChildGraphNodeGetGraph)(node, &child) == CUDA_SUCCESS)
		add_graph(child, sum, depth + 1);
	if (type != CU_GRAPH_NODE_TYPE_MEM_ALLOC ||
	    REAL(cuGraphMemAllocNodeGetParams)(node, &params) != CUDA_SUCCESS)
		return;
	if (params.poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
		return;
	add_bytes(sum, params.poolProps.location.id, params.bytesize);
}

/* Marks an entry whose graph gives back at each launch what the one before took. */
#define AUTO_FREE (1ull << 50)

static struct aq_pool *graph_pool(unsigned card, CUdevice device)
{
	struct aq_pool *pool = &aq_process()->card[card].graph;
	pool->card = (int16_t)card;
	pool->ordinal = (int16_t)device;
	return pool;
}

/* Handles are addresses of aligned things, so the parts of one graph stand under that and the next few
 * numbers. */
static uint64_t key_of(CUgraphExec exec, uint32_t part)
{
	return (uintptr_t)exec + part;
}

static void note(CUgraphExec exec, CUgraph graph, cuuint64_t flags)
{
	struct aq_process *process = aq_process();
	struct sum sum = {0};
	struct aq_place place;
	uint32_t parts = 0;
	if (!aq_active())
		return;
	add_graph(graph, &sum, 0);
	for (uint32_t i = 0; i < sum.count; i++) {
		if (aq_place_device(sum.of[i].device, &place) != AQ_CHARGE)
			continue;
		graph_pool(place.card, sum.of[i].device);
		uint64_t units = aq_units_of(sum.of[i].bytes);
		uint64_t entry = aq_entry(units < AQ_WORD_UNIT_MASK ? units : AQ_WORD_UNIT_MASK, place.card,
					  AQ_NO_CONTEXT);
		if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)
			entry |= AUTO_FREE;
		aq_table_put(&process->graph_execs, key_of(exec, parts++), entry);
	}
	if (parts > 0)
		__atomic_store_n(&process->graphs, 1, __ATOMIC_RELEASE);
}

/* What the device's graph memory may grow by when this is launched. */
static uint64_t growth(const struct aq_pool *pool, uint64_t entry)
{
	uint64_t need = aq_entry_units(entry), reserved = 0, used = 0;
	if (REAL(cuDeviceGetGraphMemAttribute)(pool->ordinal, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT,
					       &reserved) == CUDA_SUCCESS &&
	    REAL(cuDeviceGetGraphMemAttribute)(pool->ordinal, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, &used) ==
		CUDA_SUCCESS) {
		uint64_t spare = reserved > used ? (reserved - used) >> AQ_UNIT_SHIFT : 0;
		if ((entry & AUTO_FREE) && spare < need)
			spare = reserved >> AQ_UNIT_SHIFT;
		need = need > spare ? need - spare : 0;
	}
	const uint64_t step = STEP_BYTES >> AQ_UNIT_SHIFT;
	return (need + step - 1) / step * step;
}

static void give_back(const struct aq_graph_request *request)
{
	for (uint32_t i = 0; i < request->count; i++) {
		__atomic_sub_fetch(&request->part[i].pool->pending, request->part[i].units, __ATOMIC_SEQ_CST);
		aq_pool_sync(request->part[i].pool);
	}
}

CUresult aq_graph_begin_slowly(CUgraphExec exec, struct aq_graph_request *request)
{
	struct aq_process *process = aq_process();
	uint64_t entry;
	for (uint32_t i = 0;
	     i < AQ_GRAPH_DEVICES && aq_table_get(&process->graph_execs, key_of(exec, i), &entry); i++) {
		struct aq_pool *pool = &process->card[aq_entry_card(entry)].graph;
		uint64_t need = growth(pool, entry);
		if (need > 0 && aq_charge((unsigned)pool->card, need, AQ_REFUSED_GRAPH) < 0) {
			give_back(request);
			request->count = 0;
			return CUDA_ERROR_OUT_OF_MEMORY;
		}
		__atomic_add_fetch(&pool->pending, need, __ATOMIC_SEQ_CST);
		__atomic_add_fetch(&pool->charged, need, __ATOMIC_SEQ_CST);
		request->part[request->count].pool = pool;
		request->part[request->count++].units = need;
	}
	return CUDA_SUCCESS;
}

void aq_graph_end(const struct aq_graph_request *request)
{
	give_back(request);
}

static CUresult instantiated(CUresult result, const CUgraphExec *exec, CUgraph graph, cuuint64_t flags)
{
	if (result == CUDA_SUCCESS && exec)
		note(*exec, graph, flags);
	return result;
}

HOOK(CUresult, cuGraphInstantiate,
     (CUgraphExec * exec, CUgraph graph, CUgraphNode *error_node, char *log, size_t size))
{
	return instantiated(REAL(cuGraphInstantiate)(exec, graph, error_node, log, size), exec, graph, 0);
}

HOOK(CUresult, cuGraphInstantiate_v2,
     (CUgraphExec * exec, CUgraph graph, CUgraphNode *error_node, char *log, size_t size))
{
	return instantiated(REAL(cuGraphInstantiate_v2)(exec, graph, error_node, log, size), exec, graph, 0);
}

HOOK(CUresult, cuGraphInstantiateWithFlags, (CUgraphExec * exec, CUgraph graph, unsigned long long flags))
{
	return instantiated(REAL(cuGraphInstantiateWithFlags)(exec, graph, flags), exec, graph, flags);
}

/* With the flag that uploads, the memory comes at once, so it has to be there before. */
static CUresult with_params(__typeof__(&hook_cuGraphInstantiateWithParams) real, CUgraphExec *exec,
			    CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
	cuuint64_t flags = params ? params->flags : 0;
	struct sum sum = {0};
	struct aq_place place;
	unsigned card[AQ_GRAPH_DEVICES];
	uint64_t units[AQ_GRAPH_DEVICES];
	uint32_t held = 0;
	CUresult result = CUDA_SUCCESS;
	if ((flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) && aq_active())
		add_graph(graph, &sum, 0);
	for (uint32_t i = 0; i < sum.count && result == CUDA_SUCCESS; i++) {
		if (aq_place_device(sum.of[i].device, &place) != AQ_CHARGE)
			continue;
		units[held] = aq_units_of(sum.of[i].bytes + STEP_BYTES - 1);
		card[held] = place.card;
		if (aq_charge(place.card, units[held], AQ_REFUSED_GRAPH) < 0)
			result = CUDA_ERROR_OUT_OF_MEMORY;
		else
			held++;
	}
	if (result == CUDA_SUCCESS)
		result = instantiated(real(exec, graph, params), exec, graph, flags);
	while (held-- > 0) {
		aq_uncharge(card[held], units[held]);
		aq_pools_sync(card[held]);
	}
	return result;
}

HOOK(CUresult, cuGraphInstantiateWithParams,
     (CUgraphExec * exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params))
{
	return with_params(REAL(cuGraphInstantiateWithParams), exec, graph, params);
}

HOOK(CUresult, cuGraphInstantiateWithParams_ptsz,
     (CUgraphExec * exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params))
{
	return with_params(REAL(cuGraphInstantiateWithParams_ptsz), exec, graph, params);
}

HOOK(CUresult, cuGraphUpload, (CUgraphExec exec, CUstream stream))
{
	struct aq_graph_request request;
	CUresult result = aq_graph_begin(exec, &request);
	if (result == CUDA_SUCCESS) {
		result = REAL(cuGraphUpload)(exec, stream);
		aq_graph_end(&request);
	}
	return result;
}

HOOK(CUresult, cuGraphUpload_ptsz, (CUgraphExec exec, CUstream stream))
{
	struct aq_graph_request request;
	CUresult result = aq_graph_begin(exec, &request);
	if (result == CUDA_SUCCESS) {
		result = REAL(cuGraphUpload_ptsz)(exec, stream);
		aq_graph_end(&request);
	}
	return result;
}

HOOK(CUresult, cuGraphExecDestroy, (CUgraphExec exec))
{
	struct aq_process *process = aq_process();
	uint64_t entry[AQ_GRAPH_DEVICES];
	uint32_t parts = 0;
	while (parts < AQ_GRAPH_DEVICES &&
	       aq_table_take(&process->graph_execs, key_of(exec, parts), &entry[parts]))
		parts++;
	CUresult result = REAL(cuGraphExecDestroy)(exec);
	if (result == CUDA_SUCCESS)
		aq_limiter_forget(exec);
	for (uint32_t i = 0; i < parts && result != CUDA_SUCCESS; i++)
		aq_table_put(&process->graph_execs, key_of(exec, i), entry[i]);
	if (parts > 0 && result == CUDA_SUCCESS)
		aq_pools_freed();
	return result;
}

HOOK(CUresult, cuDeviceGraphMemTrim, (CUdevice device))
{
	CUresult result = REAL(cuDeviceGraphMemTrim)(device);
	if (result == CUDA_SUCCESS)
		aq_pools_freed();
	return result;
}
