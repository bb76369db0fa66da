/* SPDX-License-Identifier: Apache-2.0
 *
 * Building graphs: nodes, dependencies, copies. See cuda_graph.h. Everything here needs cu_lock.
 */
#include "cuda_graph.h"

#include <stdlib.h>
#include <string.h>

#include "cuda_memory.h"
#include "cuda_parts.h"

struct CUgraph_st *cu_graph_make(void)
{
	struct CUgraph_st *graph = cu_object_make(CU_KIND_GRAPH, sizeof *graph);

	if (graph != NULL)
		graph->id = (uint32_t)cu_next_id();
	return graph;
}

/* ---- what a node holds beside its numbers ------------------------------------------------------------- */

static void *copy_array(const void *from, size_t bytes)
{
	void *made = malloc(bytes > 0 ? bytes : 1);

	if (made != NULL)
		memcpy(made, from, bytes);
	return made;
}

static CUresult prepare_alloc(struct CUgraph_st *graph, struct cu_node_params *params)
{
	CUDA_MEM_ALLOC_NODE_PARAMS *wanted = &params->u.memory.params;
	struct cu_device *device = cu_device_at(wanted->poolProps.location.id);
	struct cu_alloc *alloc;

	CU_NEEDS(wanted->bytesize > 0 && wanted->poolProps.location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
		 wanted->poolProps.allocType == CU_MEM_ALLOCATION_TYPE_PINNED &&
		 wanted->poolProps.handleTypes == CU_MEM_HANDLE_TYPE_NONE);
	if (device == NULL)
		return CUDA_ERROR_INVALID_DEVICE;
	alloc = cu_space_take(wanted->bytesize, 0);
	if (alloc == NULL)
		return CUDA_ERROR_OUT_OF_MEMORY;
	alloc->kind = CU_ALLOC_GRAPH;
	alloc->device = device;
	alloc->owner = graph;
	alloc->flags = 1; /* graphs and executable graphs that name it */
	wanted->dptr = alloc->base;
	wanted->accessDescs = NULL;
	wanted->accessDescCount = 0;
	params->u.memory.alloc = alloc;
	graph->has_memory = 1;
	return CUDA_SUCCESS;
}

CUresult cu_node_prepare(struct CUgraph_st *graph, struct cu_node_params *params)
{
	void *one = NULL, *other = NULL;

	switch (params->type) {
	case CU_GRAPH_NODE_TYPE_GRAPH:
		if (params->u.child->has_memory)
			return CUDA_ERROR_NOT_SUPPORTED;
		params->u.child = cu_graph_copy(params->u.child);
		return params->u.child != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
	case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
		return prepare_alloc(graph, params);
	case CU_GRAPH_NODE_TYPE_MEM_FREE:
		graph->has_memory = 1;
		return CUDA_SUCCESS;
	case CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL:
		one = copy_array(params->u.signal.extSemArray,
				 params->u.signal.numExtSems * sizeof *params->u.signal.extSemArray);
		other = copy_array(params->u.signal.paramsArray,
				   params->u.signal.numExtSems * sizeof *params->u.signal.paramsArray);
		params->u.signal.extSemArray = one;
		params->u.signal.paramsArray = other;
		return one != NULL && other != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
	case CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT:
		one = copy_array(params->u.wait.extSemArray,
				 params->u.wait.numExtSems * sizeof *params->u.wait.extSemArray);
		other = copy_array(params->u.wait.paramsArray,
				   params->u.wait.numExtSems * sizeof *params->u.wait.paramsArray);
		params->u.wait.extSemArray = one;
		params->u.wait.paramsArray = other;
		return one != NULL && other != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
	case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
		params->u.ops.paramArray = copy_array(params->u.ops.paramArray,
						      params->u.ops.count * sizeof *params->u.ops.paramArray);
		return params->u.ops.paramArray != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
	default:
		return CUDA_SUCCESS;
	}
}

static void release_alloc(struct cu_alloc *alloc)
{
	if (alloc == NULL || --alloc->flags > 0)
		return;
	/* Memory that a launch left behind goes with its own free. */
	alloc->owner = NULL;
	if (!alloc->resident)
		cu_memory_end(alloc);
}

void cu_node_release(struct cu_node_params *params)
{
	switch (params->type) {
	case CU_GRAPH_NODE_TYPE_GRAPH:
		if (params->u.child != NULL)
			cu_graph_end(params->u.child);
		break;
	case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
		release_alloc(params->u.memory.alloc);
		break;
	case CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL:
		free(params->u.signal.extSemArray);
		free((void *)(uintptr_t)params->u.signal.paramsArray);
		break;
	case CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT:
		free(params->u.wait.extSemArray);
		free((void *)(uintptr_t)params->u.wait.paramsArray);
		break;
	case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
		free(params->u.ops.paramArray);
		break;
	default:
		break;
	}
}

/* ---- nodes -------------------------------------------------------------------------------------------- */

CUresult cu_node_depend(struct CUgraphNode_st *node, CUgraphNode after, const CUgraphEdgeData *edge)
{
	for (size_t i = 0; i < node->after_count; i++)
		CU_NEEDS(node->after[i] != after);
	if (node->after_count == node->after_room) {
		size_t room = node->after_room > 0 ? 2 * node->after_room : 4;
		CUgraphNode *more = realloc(node->after, room * sizeof *more);

		if (more == NULL)
			return CUDA_ERROR_OUT_OF_MEMORY;
		node->after = more;
		CUgraphEdgeData *edges = realloc(node->edge, room * sizeof *edges);

		if (edges == NULL)
			return CUDA_ERROR_OUT_OF_MEMORY;
		node->edge = edges;
		node->after_room = room;
	}
	node->after[node->after_count] = after;
	memset(&node->edge[node->after_count], 0, sizeof *node->edge);
	if (edge != NULL)
		node->edge[node->after_count] = *edge;
	node->after_count++;
	return CUDA_SUCCESS;
}

static void unlink_node(struct CUgraphNode_st *node)
{
	struct CUgraph_st *graph = node->graph;

	*(node->previous != NULL ? &node->previous->next : &graph->first) = node->next;
	*(node->next != NULL ? &node->next->previous : &graph->last) = node->previous;
	graph->count--;
}

static void free_node(struct CUgraphNode_st *node)
{
	cu_node_release(&node->params);
	free(node->after);
	free(node->edge);
	cu_object_end(node);
}

CUresult cu_graph_add(struct CUgraph_st *graph, const CUgraphNode *after, const CUgraphEdgeData *edge,
		      size_t count, const struct cu_node_params *params, CUgraphNode *made)
{
	struct CUgraphNode_st *node;
	CUresult result = CUDA_SUCCESS;

	for (size_t i = 0; i < count; i++)
		CU_NEEDS(cu_is(after[i], CU_KIND_NODE) && after[i]->graph == graph);
	node = cu_object_make(CU_KIND_NODE, sizeof *node);
	if (node == NULL)
		return CUDA_ERROR_OUT_OF_MEMORY;
	node->graph = graph;
	node->params = *params;
	for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++)
		result = cu_node_depend(node, after[i], edge != NULL ? &edge[i] : NULL);
	if (result == CUDA_SUCCESS)
		result = cu_node_prepare(graph, &node->params);
	if (result != CUDA_SUCCESS) {
		node->params.type = CU_GRAPH_NODE_TYPE_EMPTY;
		free_node(node);
		return result;
	}
	if (node->params.type == CU_GRAPH_NODE_TYPE_GRAPH)
		node->params.u.child->owner = node;
	node->number = graph->last_number++;
	node->id = cu_next_id();
	node->previous = graph->last;
	*(graph->last != NULL ? &graph->last->next : &graph->first) = node;
	graph->last = node;
	graph->count++;
	*made = node;
	return CUDA_SUCCESS;
}

static void forget_dependency(struct CUgraphNode_st *node, const struct CUgraphNode_st *gone)
{
	for (size_t i = 0; i < node->after_count; i++)
		if (node->after[i] == gone) {
			node->after_count--;
			memmove(&node->after[i], &node->after[i + 1],
				(node->after_count - i) * sizeof *node->after);
			memmove(&node->edge[i], &node->edge[i + 1],
				(node->after_count - i) * sizeof *node->edge);
			return;
		}
}

void cu_node_end(struct CUgraphNode_st *node)
{
	for (struct CUgraphNode_st *other = node->graph->first; other != NULL; other = other->next)
		forget_dependency(other, node);
	unlink_node(node);
	free_node(node);
}

CUresult cu_node_independ(struct CUgraphNode_st *node, CUgraphNode after)
{
	size_t before = node->after_count;

	forget_dependency(node, after);
	return node->after_count < before ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- whole graphs ------------------------------------------------------------------------------------- */

void cu_graph_end(struct CUgraph_st *graph)
{
	while (graph->last != NULL) {
		struct CUgraphNode_st *node = graph->last;

		unlink_node(node);
		free_node(node);
	}
	cu_user_references_end(graph->user_objects);
	cu_object_end(graph);
}

static CUgraphNode copy_of(const struct CUgraph_st *copy, const struct CUgraphNode_st *original)
{
	for (struct CUgraphNode_st *node = copy->first; node != NULL; node = node->next)
		if (node->original == original)
			return node;
	return NULL;
}

struct CUgraph_st *cu_graph_copy(struct CUgraph_st *graph)
{
	struct CUgraph_st *copy = cu_graph_make();
	CUresult result = CUDA_SUCCESS;

	if (copy == NULL)
		return NULL;
	copy->original = graph;
	copy->user_objects = cu_user_references_copy(graph->user_objects);
	for (const struct CUgraphNode_st *node = graph->first; node != NULL && result == CUDA_SUCCESS;
	     node = node->next) {
		CUgraphNode made;

		result = cu_graph_add(copy, NULL, NULL, 0, &node->params, &made);
		if (result == CUDA_SUCCESS)
			made->original = (struct CUgraphNode_st *)(uintptr_t)node;
	}
	for (const struct CUgraphNode_st *node = graph->first; node != NULL && result == CUDA_SUCCESS;
	     node = node->next)
		for (size_t i = 0; i < node->after_count && result == CUDA_SUCCESS; i++)
			result = cu_node_depend(copy_of(copy, node), copy_of(copy, node->after[i]),
						&node->edge[i]);
	if (result != CUDA_SUCCESS) {
		cu_graph_end(copy);
		return NULL;
	}
	return copy;
}
