/* SPDX-License-Identifier: Apache-2.0
 *
 * Between our parameters of a node and the one struct of cuGraphAddNode. Pure.
 */
#include <string.h>

#include "cuda_graph.h"
#include "cuda_module.h"

CUresult cu_params_from_any(const CUgraphNodeParams *any, struct cu_node_params *params)
{
	CU_NEEDS(any != NULL);
	*params = (struct cu_node_params){.type = any->type};
	switch (any->type) {
	case CU_GRAPH_NODE_TYPE_KERNEL:
		memcpy(&params->u.kernel, &any->kernel, sizeof params->u.kernel);
		return CUDA_SUCCESS;
	case CU_GRAPH_NODE_TYPE_MEMCPY:
		params->u.copy.copy = any->memcpy.copyParams;
		params->u.copy.context = any->memcpy.copyCtx;
		return CUDA_SUCCESS;
	case CU_GRAPH_NODE_TYPE_MEMSET:
		memcpy(&params->u.fill.fill, &any->memset, sizeof params->u.fill.fill);
		params->u.fill.context = any->memset.ctx;
		return CUDA_SUCCESS;
	case CU_GRAPH_NODE_TYPE_HOST:
		CU_NEEDS(any->host.fn != NULL);
		params->u.host = (CUDA_HOST_NODE_PARAMS){any->host.fn, any->host.userData};
		return CUDA_SUCCESS;
	case CU_GRAPH_NODE_TYPE_GRAPH:
		CU_NEEDS(cu_is(any->graph.graph, CU_KIND_GRAPH));
		params->u.child = any->graph.graph;
		return CUDA_SUCCESS;
	case CU_GRAPH_NODE_TYPE_EMPTY:
		return CUDA_SUCCESS;
	case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
		CU_NEEDS(cu_is(any->eventWait.event, CU_KIND_EVENT));
		params->u.event = any->eventWait.event;
		return CUDA_SUCCESS;
	case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
		CU_NEEDS(cu_is(any->eventRecord.event, CU_KIND_EVENT));
		params->u.event = any->eventRecord.event;
		return CUDA_SUCCESS;
	case CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL:
		params->u.signal = (CUDA_EXT_SEM_SIGNAL_NODE_PARAMS){any->extSemSignal.extSemArray,
								     any->extSemSignal.paramsArray,
								     any->extSemSignal.numExtSems};
		return CUDA_SUCCESS;
	case CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT:
		params->u.wait = (CUDA_EXT_SEM_WAIT_NODE_PARAMS){
		    any->extSemWait.extSemArray, any->extSemWait.paramsArray, any->extSemWait.numExtSems};
		return CUDA_SUCCESS;
	case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
		memcpy(&params->u.memory.params, &any->alloc, sizeof params->u.memory.params);
		return CUDA_SUCCESS;
	case CU_GRAPH_NODE_TYPE_MEM_FREE:
		CU_NEEDS(any->free.dptr != 0);
		params->u.freed = any->free.dptr;
		return CUDA_SUCCESS;
	case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
		params->u.ops = (CUDA_BATCH_MEM_OP_NODE_PARAMS){any->memOp.ctx, any->memOp.count,
								any->memOp.paramArray, any->memOp.flags};
		return CUDA_SUCCESS;
	default:
		return CUDA_ERROR_NOT_SUPPORTED; /* conditional nodes, which kernels that compute nothing
						    cannot steer */
	}
}

CUresult cu_params_to_any(const struct cu_node_params *params, CUgraphNodeParams *any)
{
	memset(any, 0, sizeof *any);
	any->type = params->type;
	switch (params->type) {
	case CU_GRAPH_NODE_TYPE_KERNEL:
		memcpy(&any->kernel, &params->u.kernel, sizeof params->u.kernel);
		break;
	case CU_GRAPH_NODE_TYPE_MEMCPY:
		any->memcpy.copyParams = params->u.copy.copy;
		any->memcpy.copyCtx = params->u.copy.context;
		break;
	case CU_GRAPH_NODE_TYPE_MEMSET:
		memcpy(&any->memset, &params->u.fill.fill, sizeof params->u.fill.fill);
		any->memset.ctx = params->u.fill.context;
		break;
	case CU_GRAPH_NODE_TYPE_HOST:
		any->host.fn = params->u.host.fn;
		any->host.userData = params->u.host.userData;
		break;
	case CU_GRAPH_NODE_TYPE_GRAPH:
		any->graph.graph = params->u.child;
		break;
	case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
		any->eventWait.event = params->u.event;
		break;
	case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
		any->eventRecord.event = params->u.event;
		break;
	case CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL:
		any->extSemSignal.extSemArray = params->u.signal.extSemArray;
		any->extSemSignal.paramsArray = params->u.signal.paramsArray;
		any->extSemSignal.numExtSems = params->u.signal.numExtSems;
		break;
	case CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT:
		any->extSemWait.extSemArray = params->u.wait.extSemArray;
		any->extSemWait.paramsArray = params->u.wait.paramsArray;
		any->extSemWait.numExtSems = params->u.wait.numExtSems;
		break;
	case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
		memcpy(&any->alloc, &params->u.memory.params, sizeof params->u.memory.params);
		break;
	case CU_GRAPH_NODE_TYPE_MEM_FREE:
		any->free.dptr = params->u.freed;
		break;
	case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
		any->memOp.ctx = params->u.ops.ctx;
		any->memOp.count = params->u.ops.count;
		any->memOp.paramArray = params->u.ops.paramArray;
		any->memOp.flags = params->u.ops.flags;
		break;
	default:
		break;
	}
	return CUDA_SUCCESS;
}

int cu_params_may_follow(const struct cu_node_params *old, const struct cu_node_params *fresh)
{
	if (old->type != fresh->type)
		return 0;
	switch (old->type) {
	case CU_GRAPH_NODE_TYPE_KERNEL:
		/* Another function is fine, one of another context is not. */
		return old->u.kernel.ctx == fresh->u.kernel.ctx;
	case CU_GRAPH_NODE_TYPE_MEMCPY:
		return old->u.copy.copy.srcMemoryType == fresh->u.copy.copy.srcMemoryType &&
		       old->u.copy.copy.dstMemoryType == fresh->u.copy.copy.dstMemoryType;
	case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
	case CU_GRAPH_NODE_TYPE_MEM_FREE:
		return 0;
	case CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL:
		return old->u.signal.numExtSems == fresh->u.signal.numExtSems;
	case CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT:
		return old->u.wait.numExtSems == fresh->u.wait.numExtSems;
	default:
		return 1;
	}
}
