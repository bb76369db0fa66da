/* SPDX-License-Identifier: Apache-2.0
 *
 * Changing single nodes of an executable graph.
 */
#include <string.h>

#include "cuda_graph.h"
#include "cuda_module.h"
#include "cuda_parts.h"

static CUresult set(CUgraphExec exec, CUgraphNode node, struct cu_node_params *fresh)
{
	struct cu_exec_node *found;
	CUresult result = CUDA_ERROR_INVALID_VALUE;

	CU_NEEDS(cu_is(exec, CU_KIND_EXEC) && node != NULL);
	cu_lock();
	found = cu_exec_node_of(exec, node);
	if (found != NULL && cu_params_may_follow(&found->params, fresh)) {
		memcpy(fresh->attribute, found->params.attribute, sizeof fresh->attribute);
		result = CUDA_SUCCESS;
		if (fresh->type == CU_GRAPH_NODE_TYPE_GRAPH) {
			struct CUgraphExec_st *child;

			result = cu_exec_make(fresh->u.child, 0, &child);
			if (result == CUDA_SUCCESS) {
				cu_exec_end(found->params.u.child_exec);
				found->params.u.child_exec = child;
			}
		} else {
			if (fresh->type == CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL ||
			    fresh->type == CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT ||
			    fresh->type == CU_GRAPH_NODE_TYPE_BATCH_MEM_OP)
				result = cu_node_prepare(NULL, fresh);
			if (result == CUDA_SUCCESS) {
				cu_node_release(&found->params);
				found->params = *fresh;
			}
		}
	}
	cu_unlock();
	return result;
}

static CUresult set_kernel(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *kernel)
{
	struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_KERNEL, .u.kernel = *kernel};
	const struct cu_exec_node *found;

	CU_NEEDS(cu_is(exec, CU_KIND_EXEC));
	found = cu_exec_node_of(exec, node);
	CU_NEEDS(found != NULL && found->params.type == CU_GRAPH_NODE_TYPE_KERNEL);
	if (params.u.kernel.func == NULL)
		params.u.kernel.func = (CUfunction)(void *)params.u.kernel.kern;
	if (params.u.kernel.ctx == NULL)
		params.u.kernel.ctx = found->params.u.kernel.ctx;
	CU_NEEDS(cu_function_of(params.u.kernel.func, params.u.kernel.ctx) != NULL);
	return set(exec, node, &params);
}

CUresult CUDAAPI cuGraphExecKernelNodeSetParams_v2(CUgraphExec hGraphExec, CUgraphNode hNode,
						   const CUDA_KERNEL_NODE_PARAMS *nodeParams)
{
	CU_ENTER("exec=%p node=%p", (void *)hGraphExec, (void *)hNode);
	CU_NEEDS(nodeParams != NULL);
	return set_kernel(hGraphExec, hNode, nodeParams);
}

CUresult CUDAAPI cuGraphExecKernelNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
						const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
	CU_ENTER("exec=%p node=%p", (void *)hGraphExec, (void *)hNode);
	CUDA_KERNEL_NODE_PARAMS kernel = {0};

	CU_NEEDS(nodeParams != NULL);
	memcpy(&kernel, nodeParams, sizeof *nodeParams);
	return set_kernel(hGraphExec, hNode, &kernel);
}

CUresult CUDAAPI cuGraphExecMemcpyNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
						const CUDA_MEMCPY3D *copyParams, CUcontext ctx)
{
	CU_ENTER("exec=%p node=%p", (void *)hGraphExec, (void *)hNode);
	CU_NEEDS(copyParams != NULL);
	struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_MEMCPY, .u.copy = {*copyParams, ctx}};

	return set(hGraphExec, hNode, &params);
}

CUresult CUDAAPI cuGraphExecMemsetNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
						const CUDA_MEMSET_NODE_PARAMS *memsetParams, CUcontext ctx)
{
	CU_ENTER("exec=%p node=%p", (void *)hGraphExec, (void *)hNode);
	CU_NEEDS(memsetParams != NULL);
	struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_MEMSET, .u.fill = {*memsetParams, ctx}};

	return set(hGraphExec, hNode, &params);
}

CUresult CUDAAPI cuGraphExecHostNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
					      const CUDA_HOST_NODE_PARAMS *nodeParams)
{
	CU_ENTER("exec=%p node=%p", (void *)hGraphExec, (void *)hNode);
	CU_NEEDS(nodeParams != NULL && nodeParams->fn != NULL);
	struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_HOST, .u.host = *nodeParams};

	return set(hGraphExec, hNode, &params);
}

CUresult CUDAAPI cuGraphExecChildGraphNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
						    CUgraph childGraph)
{
	CU_ENTER("exec=%p node=%p child=%p", (void *)hGraphExec, (void *)hNode, (void *)childGraph);
	CU_NEEDS(cu_is(childGraph, CU_KIND_GRAPH));
	struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_GRAPH, .u.child = childGraph};

	return set(hGraphExec, hNode, &params);
}

static CUresult set_event(CUgraphExec exec, CUgraphNode node, CUgraphNodeType type, CUevent event)
{
	struct cu_node_params params = {.type = type, .u.event = event};

	CU_NEEDS(cu_is(event, CU_KIND_EVENT));
	return set(exec, node, &params);
}

CUresult CUDAAPI cuGraphExecEventRecordNodeSetEvent(CUgraphExec hGraphExec, CUgraphNode hNode, CUevent event)
{
	CU_ENTER("exec=%p node=%p event=%p", (void *)hGraphExec, (void *)hNode, (void *)event);
	return set_event(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_EVENT_RECORD, event);
}

CUresult CUDAAPI cuGraphExecEventWaitNodeSetEvent(CUgraphExec hGraphExec, CUgraphNode hNode, CUevent event)
{
	CU_ENTER("exec=%p node=%p event=%p", (void *)hGraphExec, (void *)hNode, (void *)event);
	return set_event(hGraphExec, hNode, CU_GRAPH_NODE_TYPE_WAIT_EVENT, event);
}

CUresult CUDAAPI cuGraphExecExternalSemaphoresSignalNodeSetParams(
    CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_EXT_SEM_SIGNAL_NODE_PARAMS *nodeParams)
{
	CU_ENTER("exec=%p node=%p", (void *)hGraphExec, (void *)hNode);
	CU_NEEDS(nodeParams != NULL);
	struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL, .u.signal = *nodeParams};

	return set(hGraphExec, hNode, &params);
}

CUresult CUDAAPI cuGraphExecExternalSemaphoresWaitNodeSetParams(
    CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_EXT_SEM_WAIT_NODE_PARAMS *nodeParams)
{
	CU_ENTER("exec=%p node=%p", (void *)hGraphExec, (void *)hNode);
	CU_NEEDS(nodeParams != NULL);
	struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT, .u.wait = *nodeParams};

	return set(hGraphExec, hNode, &params);
}

CUresult CUDAAPI cuGraphExecBatchMemOpNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
						    const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams)
{
	CU_ENTER("exec=%p node=%p", (void *)hGraphExec, (void *)hNode);
	CU_NEEDS(nodeParams != NULL && nodeParams->paramArray != NULL);
	struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, .u.ops = *nodeParams};

	return set(hGraphExec, hNode, &params);
}

CUresult CUDAAPI cuGraphExecNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
					  CUgraphNodeParams *nodeParams)
{
	CU_ENTER("exec=%p node=%p", (void *)hGraphExec, (void *)hNode);
	struct cu_node_params params;
	CUresult result = cu_params_from_any(nodeParams, &params);

	if (result != CUDA_SUCCESS)
		return result;
	if (params.type == CU_GRAPH_NODE_TYPE_KERNEL)
		return set_kernel(hGraphExec, hNode, &params.u.kernel);
	return set(hGraphExec, hNode, &params);
}

static struct cu_exec_node *can_be_off(CUgraphExec exec, CUgraphNode node)
{
	struct cu_exec_node *found = cu_is(exec, CU_KIND_EXEC) ? cu_exec_node_of(exec, node) : NULL;

	return found != NULL && (found->params.type == CU_GRAPH_NODE_TYPE_KERNEL ||
				 found->params.type == CU_GRAPH_NODE_TYPE_MEMSET ||
				 found->params.type == CU_GRAPH_NODE_TYPE_MEMCPY)
		   ? found
		   : NULL;
}

CUresult CUDAAPI cuGraphNodeSetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int isEnabled)
{
	CU_ENTER("exec=%p node=%p enabled=%u", (void *)hGraphExec, (void *)hNode, isEnabled);
	struct cu_exec_node *found = can_be_off(hGraphExec, hNode);

	CU_NEEDS(found != NULL);
	found->enabled = isEnabled != 0;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphNodeGetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int *isEnabled)
{
	CU_ENTER("exec=%p node=%p enabled=%p", (void *)hGraphExec, (void *)hNode, (void *)isEnabled);
	const struct cu_exec_node *found = can_be_off(hGraphExec, hNode);

	CU_NEEDS(found != NULL && isEnabled != NULL);
	*isEnabled = found->enabled;
	return CUDA_SUCCESS;
}
