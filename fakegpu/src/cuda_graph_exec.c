/* SPDX-License-Identifier: Apache-2.0
 *
 * Executable graphs: made from a graph, updated, and changed node by node. Running them stands in
 * cuda_graph_run.c.
 */
#include <stdlib.h>
#include <string.h>

#include "cuda_graph.h"
#include "cuda_module.h"
#include "cuda_parts.h"

/* ---- order -------------------------------------------------------------------------------------------- */

/* Fills `order` so that every node stands behind what it depends on; 0 when the graph has a circle. */
static int sort(struct CUgraph_st *graph, CUgraphNode *order)
{
	size_t done = 0, before;

	for (struct CUgraphNode_st *node = graph->first; node != NULL; node = node->next)
		node->mark = 0;
	do {
		before = done;
		for (struct CUgraphNode_st *node = graph->first; node != NULL; node = node->next) {
			size_t ready = 0;

			if (node->mark)
				continue;
			while (ready < node->after_count && node->after[ready]->mark)
				ready++;
			if (ready == node->after_count) {
				node->mark = 1;
				order[done++] = node;
			}
		}
	} while (done > before);
	return done == graph->count;
}

/* ---- making and ending -------------------------------------------------------------------------------- */

/* The executable form of a node's parameters: children become executable, memory gets one more holder. */
static CUresult take_params(const struct CUgraphNode_st *node, struct cu_exec_node *into)
{
	into->node = (struct CUgraphNode_st *)(uintptr_t)node;
	into->enabled = 1;
	into->params = node->params;
	switch (node->params.type) {
	case CU_GRAPH_NODE_TYPE_GRAPH:
		return cu_exec_make(node->params.u.child, 0, &into->params.u.child_exec);
	case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
		node->params.u.memory.alloc->flags++;
		return CUDA_SUCCESS;
	case CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL:
	case CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT:
	case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
		return cu_node_prepare(node->graph, &into->params);
	default:
		return CUDA_SUCCESS;
	}
}

static void give_params(struct cu_exec_node *node)
{
	if (node->params.type == CU_GRAPH_NODE_TYPE_GRAPH) {
		if (node->params.u.child_exec != NULL)
			cu_exec_end(node->params.u.child_exec);
	} else {
		cu_node_release(&node->params);
	}
}

CUresult cu_exec_make(struct CUgraph_st *graph, unsigned long long flags, struct CUgraphExec_st **made)
{
	struct CUgraphExec_st *exec = cu_object_make(CU_KIND_EXEC, sizeof *exec);
	CUgraphNode *order = calloc(graph->count + 1, sizeof *order);
	CUresult result = CUDA_SUCCESS;

	*made = NULL;
	if (exec == NULL || order == NULL) {
		free(order);
		if (exec != NULL)
			cu_object_end(exec);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	exec->id = (uint32_t)cu_next_id();
	exec->flags = flags;
	exec->from = graph;
	exec->context = cu_thread()->current;
	exec->node = calloc(graph->count + 1, sizeof *exec->node);
	if (exec->node == NULL)
		result = CUDA_ERROR_OUT_OF_MEMORY;
	else if (!sort(graph, order))
		result = CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < graph->count && result == CUDA_SUCCESS; i++) {
		result = take_params(order[i], &exec->node[i]);
		if (result == CUDA_SUCCESS)
			exec->count++;
	}
	free(order);
	if (result != CUDA_SUCCESS) {
		cu_exec_end(exec);
		return result;
	}
	exec->user_objects = cu_user_references_copy(graph->user_objects);
	*made = exec;
	return CUDA_SUCCESS;
}

void cu_exec_end(struct CUgraphExec_st *exec)
{
	for (size_t i = 0; i < exec->count; i++)
		give_params(&exec->node[i]);
	free(exec->node);
	cu_user_references_end(exec->user_objects);
	cu_object_end(exec);
}

struct cu_exec_node *cu_exec_node_of(struct CUgraphExec_st *exec, CUgraphNode node)
{
	for (size_t i = 0; i < exec->count; i++) {
		if (exec->node[i].node == node)
			return &exec->node[i];
		if (exec->node[i].params.type == CU_GRAPH_NODE_TYPE_GRAPH) {
			struct cu_exec_node *found = cu_exec_node_of(exec->node[i].params.u.child_exec, node);

			if (found != NULL)
				return found;
		}
	}
	return NULL;
}

#define ALL_FLAGS                                                                               \
	(CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH | CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD | \
	 CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH | CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY)

static CUresult instantiate(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
	CUresult result;

	CU_NEEDS(exec != NULL && cu_is(graph, CU_KIND_GRAPH) &&
		 (flags & ~(unsigned long long)ALL_FLAGS) == 0);
	if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH)
		return CUDA_ERROR_NOT_SUPPORTED;
	cu_lock();
	result = cu_exec_make(graph, flags, exec);
	cu_unlock();
	return result;
}

CUresult CUDAAPI cuGraphInstantiateWithFlags(CUgraphExec *phGraphExec, CUgraph hGraph,
					     unsigned long long flags)
{
	CU_ENTER("exec=%p graph=%p flags=%#llx", (void *)phGraphExec, (void *)hGraph, flags);
	return instantiate(phGraphExec, hGraph, flags);
}

static CUresult with_log(CUgraphExec *exec, CUgraph graph, CUgraphNode *error_node, char *log, size_t size)
{
	CUresult result = instantiate(exec, graph, 0);

	if (error_node != NULL)
		*error_node = NULL;
	if (log != NULL && size > 0)
		log[0] = '\0';
	return result;
}

CUresult CUDAAPI cuGraphInstantiate(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode,
				    char *logBuffer, size_t bufferSize)
{
	CU_ENTER("exec=%p graph=%p", (void *)phGraphExec, (void *)hGraph);
	return with_log(phGraphExec, hGraph, phErrorNode, logBuffer, bufferSize);
}

CUresult CUDAAPI cuGraphInstantiate_v2(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode,
				       char *logBuffer, size_t bufferSize)
{
	CU_ENTER("exec=%p graph=%p", (void *)phGraphExec, (void *)hGraph);
	return with_log(phGraphExec, hGraph, phErrorNode, logBuffer, bufferSize);
}

static CUresult with_params(const char *name, int per_thread, CUgraphExec *exec, CUgraph graph,
			    CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
	CU_ENTER_AS(name, "exec=%p graph=%p params=%p", (void *)exec, (void *)graph, (void *)params);
	CUresult result;

	CU_NEEDS(params != NULL && per_thread <= 1);
	result = instantiate(exec, graph, params->flags);
	params->hErrNode_out = NULL;
	params->result_out = result == CUDA_SUCCESS               ? CUDA_GRAPH_INSTANTIATE_SUCCESS
			     : result == CUDA_ERROR_INVALID_VALUE ? CUDA_GRAPH_INSTANTIATE_INVALID_STRUCTURE
								  : CUDA_GRAPH_INSTANTIATE_ERROR;
	return result;
}
CU_TWINS(cuGraphInstantiateWithParams, cuGraphInstantiateWithParams_ptsz, with_params,
	 (CUgraphExec * phGraphExec, CUgraph hGraph, CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams),
	 phGraphExec, hGraph, instantiateParams)

CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec hGraphExec)
{
	CU_ENTER("exec=%p", (void *)hGraphExec);
	CU_NEEDS(cu_is(hGraphExec, CU_KIND_EXEC));
	cu_lock();
	cu_exec_end(hGraphExec);
	cu_unlock();
	cu_user_objects_destroy_pending();
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphExecGetFlags(CUgraphExec hGraphExec, cuuint64_t *flags)
{
	CU_ENTER("exec=%p flags=%p", (void *)hGraphExec, (void *)flags);
	CU_NEEDS(cu_is(hGraphExec, CU_KIND_EXEC) && flags != NULL);
	*flags = hGraphExec->flags;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphExecGetId(CUgraphExec hGraphExec, unsigned int *graphId)
{
	CU_ENTER("exec=%p id=%p", (void *)hGraphExec, (void *)graphId);
	CU_NEEDS(cu_is(hGraphExec, CU_KIND_EXEC) && graphId != NULL);
	*graphId = hGraphExec->id;
	return CUDA_SUCCESS;
}

/* ---- updating ----------------------------------------------------------------------------------------- */

static CUresult update(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *info)
{
	CUgraphNode *order;
	CUresult result = CUDA_SUCCESS;

	*info = (CUgraphExecUpdateResultInfo){.result = CU_GRAPH_EXEC_UPDATE_SUCCESS};
	CU_NEEDS(cu_is(exec, CU_KIND_EXEC) && cu_is(graph, CU_KIND_GRAPH));
	cu_lock();
	order = calloc(graph->count + 1, sizeof *order);
	if (order == NULL) {
		cu_unlock();
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	if (graph->count != exec->count || !sort(graph, order)) {
		info->result = CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
	} else {
		for (size_t i = 0; i < exec->count && info->result == CU_GRAPH_EXEC_UPDATE_SUCCESS; i++) {
			info->errorNode = order[i];
			if (exec->node[i].params.type != order[i]->params.type)
				info->result = CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
			else if (!cu_params_may_follow(&exec->node[i].params, &order[i]->params))
				info->result = CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED;
		}
		if (info->result == CU_GRAPH_EXEC_UPDATE_SUCCESS)
			info->errorNode = NULL;
	}
	for (size_t i = 0;
	     i < exec->count && info->result == CU_GRAPH_EXEC_UPDATE_SUCCESS && result == CUDA_SUCCESS; i++) {
		struct cu_exec_node fresh;

		result = take_params(order[i], &fresh);
		if (result != CUDA_SUCCESS)
			break;
		/* The node keeps its name: later changes go by the graph that it was first made from. */
		fresh.node = exec->node[i].node;
		fresh.enabled = exec->node[i].enabled;
		give_params(&exec->node[i]);
		exec->node[i] = fresh;
	}
	free(order);
	cu_unlock();
	if (result != CUDA_SUCCESS)
		return result;
	return info->result == CU_GRAPH_EXEC_UPDATE_SUCCESS ? CUDA_SUCCESS
							    : CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
}

CUresult CUDAAPI cuGraphExecUpdate_v2(CUgraphExec hGraphExec, CUgraph hGraph,
				      CUgraphExecUpdateResultInfo *resultInfo)
{
	CU_ENTER("exec=%p graph=%p", (void *)hGraphExec, (void *)hGraph);
	CU_NEEDS(resultInfo != NULL);
	return update(hGraphExec, hGraph, resultInfo);
}

CUresult CUDAAPI cuGraphExecUpdate(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode *hErrorNode_out,
				   CUgraphExecUpdateResult *updateResult_out)
{
	CU_ENTER("exec=%p graph=%p", (void *)hGraphExec, (void *)hGraph);
	CUgraphExecUpdateResultInfo info;
	CUresult result = update(hGraphExec, hGraph, &info);

	if (hErrorNode_out != NULL)
		*hErrorNode_out = info.errorNode;
	if (updateResult_out != NULL)
		*updateResult_out = info.result;
	return result;
}
