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

struct sum {
	uint64_t bytes;
	CUdevice device; /* of the first node that allocates */
};

static void add_node(CUgraphNode node, struct sum *sum, unsigned depth);

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
	sum->bytes = sum->bytes > UINT64_MAX - params.bytesize ? UINT64_MAX : sum->bytes + params.bytesize;
	if (sum->device < 0)
		sum->device = params.poolProps.location.id;
}

/* Marks an entry whose graph gives back at each launch what the one before took. */
#define AUTO_FREE (1ull << 50)

static void note(CUgraphExec exec, CUgraph graph, cuuint64_t flags)
{
	struct sum sum = {0, -1};
	struct aq_place place;
	if (!aq_active())
		return;
	add_graph(graph, &sum, 0);
	if (sum.bytes == 0 || aq_place_device(sum.device, &place) != AQ_CHARGE)
		return;
	struct aq_process *process = aq_process();
	struct aq_pool *pool = &process->card[place.card].graph;
	pool->card = (int16_t)place.card;
	pool->ordinal = (int16_t)sum.device;
	uint64_t units = aq_units_of(sum.bytes);
	uint64_t entry =
	    aq_entry(units < AQ_WORD_UNIT_MASK ? units : AQ_WORD_UNIT_MASK, place.card, AQ_NO_CONTEXT);
	if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)
		entry |= AUTO_FREE;
	aq_table_put(&process->graph_execs, (uintptr_t)exec, entry);
	__atomic_store_n(&process->graphs, 1, __ATOMIC_RELEASE);
}

CUresult aq_graph_begin_slowly(CUgraphExec exec, struct aq_graph_request *request)
{
	struct aq_process *process = aq_process();
	uint64_t entry, reserved = 0, used = 0;
	if (!aq_table_get(&process->graph_execs, (uintptr_t)exec, &entry))
		return CUDA_SUCCESS;
	struct aq_pool *pool = &process->card[aq_entry_card(entry)].graph;
	uint64_t need = aq_entry_units(entry);
	if (REAL(cuDeviceGetGraphMemAttribute)(pool->ordinal, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT,
					       &reserved) == CUDA_SUCCESS &&
	    REAL(cuDeviceGetGraphMemAttribute)(pool->ordinal, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, &used) ==
		CUDA_SUCCESS) {
		uint64_t spare = reserved > used ? (reserved - used) >> AQ_UNIT_SHIFT : 0;
		if ((entry & AUTO_FREE) && spare < need)
			spare = reserved >> AQ_UNIT_SHIFT;
		need = need > spare ? need - spare : 0;
	}
	if (need > 0 && aq_charge((unsigned)pool->card, need, AQ_REFUSED_GRAPH) < 0)
		return CUDA_ERROR_OUT_OF_MEMORY;
	__atomic_add_fetch(&pool->pending, need, __ATOMIC_SEQ_CST);
	__atomic_add_fetch(&pool->charged, need, __ATOMIC_SEQ_CST);
	request->pool = pool;
	request->units = need;
	return CUDA_SUCCESS;
}

void aq_graph_end(const struct aq_graph_request *request)
{
	if (request->pool == NULL)
		return;
	__atomic_sub_fetch(&request->pool->pending, request->units, __ATOMIC_SEQ_CST);
	aq_pool_sync(request->pool);
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
	struct sum sum = {0, -1};
	struct aq_place place;
	uint64_t units = 0;
	if ((flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) && aq_active()) {
		add_graph(graph, &sum, 0);
		if (sum.bytes > 0 && aq_place_device(sum.device, &place) == AQ_CHARGE) {
			units = aq_units_of(sum.bytes);
			if (aq_charge(place.card, units, AQ_REFUSED_GRAPH) < 0)
				return CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	CUresult result = instantiated(real(exec, graph, params), exec, graph, flags);
	if (units > 0) {
		if (result == CUDA_SUCCESS)
			aq_pool_sync(&aq_process()->card[place.card].graph);
		aq_uncharge(place.card, units);
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
	uint64_t entry = 0;
	bool ours = aq_table_take(&process->graph_execs, (uintptr_t)exec, &entry);
	CUresult result = REAL(cuGraphExecDestroy)(exec);
	if (result == CUDA_SUCCESS)
		aq_limiter_forget(exec);
	if (ours && result != CUDA_SUCCESS)
		aq_table_put(&process->graph_execs, (uintptr_t)exec, entry);
	else if (ours)
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
