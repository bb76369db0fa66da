/* SPDX-License-Identifier: Apache-2.0
 *
 * The rarer kinds of nodes: events, semaphores, memory, memory operations.
 */
#include <string.h>

#include "cuda_graph.h"
#include "cuda_parts.h"

static CUresult add(CUgraphNode *made, CUgraph graph, const CUgraphNode *after, size_t count,
		    const struct cu_node_params *params)
{
	CUresult result;

	CU_NEEDS(made != NULL && (count == 0 || after != NULL) && cu_is(graph, CU_KIND_GRAPH));
	cu_lock();
	result = cu_graph_add(graph, after, NULL, count, params, made);
	cu_unlock();
	return result;
}

static struct cu_node_params *params_of(CUgraphNode node, CUgraphNodeType type)
{
	return cu_is(node, CU_KIND_NODE) && node->params.type == type ? &node->params : NULL;
}

static CUresult replace(CUgraphNode node, struct cu_node_params *fresh)
{
	CUresult result;

	CU_NEEDS(params_of(node, fresh->type) != NULL);
	cu_lock();
	result = cu_node_prepare(node->graph, fresh);
	if (result == CUDA_SUCCESS) {
		cu_node_release(&node->params);
		node->params = *fresh;
	}
	cu_unlock();
	return result;
}

#define ADD_ENTER() \
	CU_ENTER("node=%p graph=%p dependencies=%zu", (void *)phGraphNode, (void *)hGraph, numDependencies);

/* ---- events ------------------------------------------------------------------------------------------- */

static CUresult get_event(CUgraphNode node, CUgraphNodeType type, CUevent *event)
{
	const struct cu_node_params *params = params_of(node, type);

	CU_NEEDS(params != NULL && event != NULL);
	*event = params->u.event;
	return CUDA_SUCCESS;
}

static CUresult set_event(CUgraphNode node, CUgraphNodeType type, CUevent event)
{
	struct cu_node_params *params = params_of(node, type);

	CU_NEEDS(params != NULL && cu_is(event, CU_KIND_EVENT));
	params->u.event = event;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphAddEventRecordNode(CUgraphNode *phGraphNode, CUgraph hGraph,
					   const CUgraphNode *dependencies, size_t numDependencies,
					   CUevent event)
{
	ADD_ENTER();
	CU_NEEDS(cu_is(event, CU_KIND_EVENT));
	const struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_EVENT_RECORD, .u.event = event};

	return add(phGraphNode, hGraph, dependencies, numDependencies, &params);
}

CUresult CUDAAPI cuGraphAddEventWaitNode(CUgraphNode *phGraphNode, CUgraph hGraph,
					 const CUgraphNode *dependencies, size_t numDependencies,
					 CUevent event)
{
	ADD_ENTER();
	CU_NEEDS(cu_is(event, CU_KIND_EVENT));
	const struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_WAIT_EVENT, .u.event = event};

	return add(phGraphNode, hGraph, dependencies, numDependencies, &params);
}

CUresult CUDAAPI cuGraphEventRecordNodeGetEvent(CUgraphNode hNode, CUevent *event_out)
{
	CU_ENTER("node=%p event=%p", (void *)hNode, (void *)event_out);
	return get_event(hNode, CU_GRAPH_NODE_TYPE_EVENT_RECORD, event_out);
}

CUresult CUDAAPI cuGraphEventWaitNodeGetEvent(CUgraphNode hNode, CUevent *event_out)
{
	CU_ENTER("node=%p event=%p", (void *)hNode, (void *)event_out);
	return get_event(hNode, CU_GRAPH_NODE_TYPE_WAIT_EVENT, event_out);
}

CUresult CUDAAPI cuGraphEventRecordNodeSetEvent(CUgraphNode hNode, CUevent event)
{
	CU_ENTER("node=%p event=%p", (void *)hNode, (void *)event);
	return set_event(hNode, CU_GRAPH_NODE_TYPE_EVENT_RECORD, event);
}

CUresult CUDAAPI cuGraphEventWaitNodeSetEvent(CUgraphNode hNode, CUevent event)
{
	CU_ENTER("node=%p event=%p", (void *)hNode, (void *)event);
	return set_event(hNode, CU_GRAPH_NODE_TYPE_WAIT_EVENT, event);
}

/* ---- semaphores --------------------------------------------------------------------------------------- */

CUresult CUDAAPI cuGraphAddExternalSemaphoresSignalNode(CUgraphNode *phGraphNode, CUgraph hGraph,
							const CUgraphNode *dependencies,
							size_t numDependencies,
							const CUDA_EXT_SEM_SIGNAL_NODE_PARAMS *nodeParams)
{
	ADD_ENTER();
	CU_NEEDS(nodeParams != NULL && nodeParams->extSemArray != NULL && nodeParams->paramsArray != NULL);
	const struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL,
					      .u.signal = *nodeParams};

	return add(phGraphNode, hGraph, dependencies, numDependencies, &params);
}

CUresult CUDAAPI cuGraphAddExternalSemaphoresWaitNode(CUgraphNode *phGraphNode, CUgraph hGraph,
						      const CUgraphNode *dependencies, size_t numDependencies,
						      const CUDA_EXT_SEM_WAIT_NODE_PARAMS *nodeParams)
{
	ADD_ENTER();
	CU_NEEDS(nodeParams != NULL && nodeParams->extSemArray != NULL && nodeParams->paramsArray != NULL);
	const struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT,
					      .u.wait = *nodeParams};

	return add(phGraphNode, hGraph, dependencies, numDependencies, &params);
}

CUresult CUDAAPI cuGraphExternalSemaphoresSignalNodeGetParams(CUgraphNode hNode,
							      CUDA_EXT_SEM_SIGNAL_NODE_PARAMS *params_out)
{
	CU_ENTER("node=%p params=%p", (void *)hNode, (void *)params_out);
	const struct cu_node_params *params = params_of(hNode, CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL);

	CU_NEEDS(params != NULL && params_out != NULL);
	*params_out = params->u.signal;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphExternalSemaphoresWaitNodeGetParams(CUgraphNode hNode,
							    CUDA_EXT_SEM_WAIT_NODE_PARAMS *params_out)
{
	CU_ENTER("node=%p params=%p", (void *)hNode, (void *)params_out);
	const struct cu_node_params *params = params_of(hNode, CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT);

	CU_NEEDS(params != NULL && params_out != NULL);
	*params_out = params->u.wait;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphExternalSemaphoresSignalNodeSetParams(
    CUgraphNode hNode, const CUDA_EXT_SEM_SIGNAL_NODE_PARAMS *nodeParams)
{
	CU_ENTER("node=%p params=%p", (void *)hNode, (const void *)nodeParams);
	CU_NEEDS(nodeParams != NULL);
	struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL, .u.signal = *nodeParams};

	return replace(hNode, &params);
}

CUresult CUDAAPI cuGraphExternalSemaphoresWaitNodeSetParams(CUgraphNode hNode,
							    const CUDA_EXT_SEM_WAIT_NODE_PARAMS *nodeParams)
{
	CU_ENTER("node=%p params=%p", (void *)hNode, (const void *)nodeParams);
	CU_NEEDS(nodeParams != NULL);
	struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT, .u.wait = *nodeParams};

	return replace(hNode, &params);
}

/* ---- memory ------------------------------------------------------------------------------------------- */

CUresult CUDAAPI cuGraphAddMemAllocNode(CUgraphNode *phGraphNode, CUgraph hGraph,
					const CUgraphNode *dependencies, size_t numDependencies,
					CUDA_MEM_ALLOC_NODE_PARAMS *nodeParams)
{
	ADD_ENTER();
	CU_NEEDS(nodeParams != NULL);
	const struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC,
					      .u.memory.params = *nodeParams};
	CUresult result = add(phGraphNode, hGraph, dependencies, numDependencies, &params);

	if (result == CUDA_SUCCESS)
		nodeParams->dptr = (*phGraphNode)->params.u.memory.params.dptr;
	return result;
}

CUresult CUDAAPI cuGraphMemAllocNodeGetParams(CUgraphNode hNode, CUDA_MEM_ALLOC_NODE_PARAMS *params_out)
{
	CU_ENTER("node=%p params=%p", (void *)hNode, (void *)params_out);
	const struct cu_node_params *params = params_of(hNode, CU_GRAPH_NODE_TYPE_MEM_ALLOC);

	CU_NEEDS(params != NULL && params_out != NULL);
	*params_out = params->u.memory.params;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphAddMemFreeNode(CUgraphNode *phGraphNode, CUgraph hGraph,
				       const CUgraphNode *dependencies, size_t numDependencies,
				       CUdeviceptr dptr)
{
	ADD_ENTER();
	const struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_MEM_FREE, .u.freed = dptr};

	CU_NEEDS(dptr != 0);
	return add(phGraphNode, hGraph, dependencies, numDependencies, &params);
}

CUresult CUDAAPI cuGraphMemFreeNodeGetParams(CUgraphNode hNode, CUdeviceptr *dptr_out)
{
	CU_ENTER("node=%p dptr=%p", (void *)hNode, (void *)dptr_out);
	const struct cu_node_params *params = params_of(hNode, CU_GRAPH_NODE_TYPE_MEM_FREE);

	CU_NEEDS(params != NULL && dptr_out != NULL);
	*dptr_out = params->u.freed;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphAddBatchMemOpNode(CUgraphNode *phGraphNode, CUgraph hGraph,
					  const CUgraphNode *dependencies, size_t numDependencies,
					  const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams)
{
	ADD_ENTER();
	CU_NEEDS(nodeParams != NULL && nodeParams->count > 0 && nodeParams->paramArray != NULL);
	const struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, .u.ops = *nodeParams};

	return add(phGraphNode, hGraph, dependencies, numDependencies, &params);
}

CUresult CUDAAPI cuGraphBatchMemOpNodeGetParams(CUgraphNode hNode,
						CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams_out)
{
	CU_ENTER("node=%p params=%p", (void *)hNode, (void *)nodeParams_out);
	const struct cu_node_params *params = params_of(hNode, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP);

	CU_NEEDS(params != NULL && nodeParams_out != NULL);
	*nodeParams_out = params->u.ops;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphBatchMemOpNodeSetParams(CUgraphNode hNode,
						const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams)
{
	CU_ENTER("node=%p params=%p", (void *)hNode, (const void *)nodeParams);
	CU_NEEDS(nodeParams != NULL && nodeParams->count > 0 && nodeParams->paramArray != NULL);
	struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, .u.ops = *nodeParams};

	return replace(hNode, &params);
}
