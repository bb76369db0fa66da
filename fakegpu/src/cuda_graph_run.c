/* SPDX-License-Identifier: Apache-2.0
 *
 * Launching executable graphs.
 *
 * Memory is taken first, for all allocation nodes together, so that a launch that does not fit changes
 * nothing. Kernels that follow each other go into the stream as one piece of work as long as they are
 * together.
 */
#include "cuda_capture.h"
#include "cuda_graph.h"
#include "cuda_memop.h"
#include "cuda_memory.h"
#include "cuda_mempool.h"
#include "cuda_module.h"
#include "cuda_parts.h"

static uint64_t rounded(const struct cu_alloc *alloc)
{
	return cu_round(alloc->size, fg_state->driver.plain_round);
}

/* Needs cu_lock. */
static CUresult take_memory(struct CUgraphExec_st *exec)
{
	CUresult result = CUDA_SUCCESS;
	size_t taken;

	for (size_t i = 0; i < exec->count; i++) {
		struct cu_alloc *alloc = exec->node[i].params.u.memory.alloc;

		if (exec->node[i].params.type != CU_GRAPH_NODE_TYPE_MEM_ALLOC || !alloc->resident)
			continue;
		/* Left over from the launch before. */
		if ((exec->flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH) == 0)
			return CUDA_ERROR_INVALID_VALUE;
		cu_pool_free(alloc);
	}
	for (taken = 0; taken < exec->count && result == CUDA_SUCCESS; taken++) {
		struct cu_alloc *alloc = exec->node[taken].params.u.memory.alloc;

		if (exec->node[taken].params.type != CU_GRAPH_NODE_TYPE_MEM_ALLOC)
			continue;
		result = cu_pool_reserve(cu_pool_graph(alloc->device), rounded(alloc));
		if (result == CUDA_SUCCESS)
			alloc->resident = 1;
	}
	if (result == CUDA_SUCCESS)
		return result;
	for (size_t i = 0; i < taken; i++) {
		struct cu_alloc *alloc = exec->node[i].params.u.memory.alloc;

		if (exec->node[i].params.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && alloc->resident)
			cu_pool_free(alloc);
	}
	return result;
}

static CUresult free_memory(CUdeviceptr address)
{
	CUresult result = CUDA_ERROR_INVALID_VALUE;

	cu_lock();
	struct cu_alloc *alloc = cu_space_find(address);

	if (alloc != NULL && alloc->base == address &&
	    (alloc->kind == CU_ALLOC_GRAPH || alloc->kind == CU_ALLOC_POOL ||
	     alloc->kind == CU_ALLOC_POOL_IMPORT))
		result = cu_pool_free(alloc);
	cu_unlock();
	return result;
}

static uint64_t kernel_ns(const struct cu_node_params *params, struct CUctx_st *context)
{
	const struct CUfunc_st *function = cu_function_of(
	    params->u.kernel.func, params->u.kernel.ctx != NULL ? params->u.kernel.ctx : context);

	return function != NULL ? cu_duration(function->work_ns) : 0;
}

static CUresult run_node(const struct cu_exec_node *node, struct CUstream_st *stream)
{
	const struct cu_node_params *params = &node->params;

	switch (params->type) {
	case CU_GRAPH_NODE_TYPE_MEMCPY:
		return node->enabled ? cu_run_copy(&params->u.copy.copy) : CUDA_SUCCESS;
	case CU_GRAPH_NODE_TYPE_MEMSET:
		return node->enabled ? cu_run_fill(&params->u.fill.fill) : CUDA_SUCCESS;
	case CU_GRAPH_NODE_TYPE_HOST:
		return cu_callback_add(stream, params->u.host.fn, NULL, params->u.host.userData);
	case CU_GRAPH_NODE_TYPE_GRAPH:
		return cu_exec_run(params->u.child_exec, stream);
	case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
		if (cu_is(params->u.event, CU_KIND_EVENT))
			cu_event_mark(params->u.event, stream);
		return CUDA_SUCCESS;
	case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
		if (cu_is(params->u.event, CU_KIND_EVENT))
			cu_event_hold(params->u.event, stream);
		return CUDA_SUCCESS;
	case CU_GRAPH_NODE_TYPE_MEM_FREE:
		return free_memory(params->u.freed);
	case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
		return cu_memops_run(params->u.ops.paramArray, params->u.ops.count);
	default:
		return CUDA_SUCCESS;
	}
}

CUresult cu_exec_run(struct CUgraphExec_st *exec, struct CUstream_st *stream)
{
	CUresult result;
	uint64_t work_ns = 0;

	cu_lock();
	result = take_memory(exec);
	cu_unlock();
	for (size_t i = 0; i < exec->count && result == CUDA_SUCCESS; i++) {
		const struct cu_exec_node *node = &exec->node[i];

		if (node->params.type == CU_GRAPH_NODE_TYPE_KERNEL) {
			if (node->enabled)
				work_ns += kernel_ns(&node->params, stream->context);
			continue;
		}
		/* What the node does comes behind the kernels before it. */
		if (work_ns > 0 && node->params.type != CU_GRAPH_NODE_TYPE_EMPTY) {
			cu_stream_push(stream, work_ns);
			work_ns = 0;
		}
		result = run_node(node, stream);
	}
	cu_stream_push(stream, work_ns);
	return result;
}

static CUresult launch(const char *name, int per_thread, CUgraphExec hGraph, CUstream hStream)
{
	CU_ENTER_AS(name, "exec=%p stream=%p", (void *)hGraph, (void *)hStream);
	CU_STREAM(stream, context, hStream, per_thread);
	CU_NEEDS(cu_is(hGraph, CU_KIND_EXEC) && context != NULL);
	if (stream->capture != NULL)
		return cu_capture_break(stream, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	fg_control_follow(fg_coarse_ns());
	return cu_exec_run(hGraph, stream);
}
CU_TWINS(cuGraphLaunch, cuGraphLaunch_ptsz, launch, (CUgraphExec hGraph, CUstream hStream), hGraph, hStream)

static CUresult upload(const char *name, int per_thread, CUgraphExec hGraph, CUstream hStream)
{
	CU_ENTER_AS(name, "exec=%p stream=%p", (void *)hGraph, (void *)hStream);
	CU_STREAM(stream, context, hStream, per_thread);
	CU_NEEDS(cu_is(hGraph, CU_KIND_EXEC) && stream != NULL && context != NULL);
	return CUDA_SUCCESS;
}
CU_TWINS(cuGraphUpload, cuGraphUpload_ptsz, upload, (CUgraphExec hGraph, CUstream hStream), hGraph, hStream)
