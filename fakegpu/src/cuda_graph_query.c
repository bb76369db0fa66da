/* SPDX-License-Identifier: Apache-2.0
 *
 * Graphs as wholes, and questions about their shape.
 */
#include <stdio.h>
#include <string.h>

#include "cuda_graph.h"
#include "cuda_parts.h"

#define GRAPH(graph) CU_NEEDS(cu_is(graph, CU_KIND_GRAPH))
#define NODE(node)   CU_NEEDS(cu_is(node, CU_KIND_NODE))

CUresult CUDAAPI cuGraphCreate(CUgraph *phGraph, unsigned int flags)
{
	CU_ENTER("graph=%p flags=%u", (void *)phGraph, flags);
	CU_NEEDS(phGraph != NULL && flags == 0);
	cu_lock();
	*phGraph = cu_graph_make();
	cu_unlock();
	return *phGraph != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult CUDAAPI cuGraphDestroy(CUgraph hGraph)
{
	CU_ENTER("graph=%p", (void *)hGraph);
	GRAPH(hGraph);
	CU_NEEDS(hGraph->owner == NULL);
	cu_lock();
	cu_graph_end(hGraph);
	cu_unlock();
	cu_user_objects_destroy_pending();
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphClone(CUgraph *phGraphClone, CUgraph originalGraph)
{
	CU_ENTER("clone=%p graph=%p", (void *)phGraphClone, (void *)originalGraph);
	CU_NEEDS(phGraphClone != NULL);
	GRAPH(originalGraph);
	if (originalGraph->has_memory)
		return CUDA_ERROR_NOT_SUPPORTED;
	cu_lock();
	*phGraphClone = cu_graph_copy(originalGraph);
	cu_unlock();
	return *phGraphClone != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult CUDAAPI cuGraphDestroyNode(CUgraphNode hNode)
{
	CU_ENTER("node=%p", (void *)hNode);
	NODE(hNode);
	if (hNode->graph->has_memory)
		return CUDA_ERROR_NOT_SUPPORTED;
	cu_lock();
	cu_node_end(hNode);
	cu_unlock();
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphNodeFindInClone(CUgraphNode *phNode, CUgraphNode hOriginalNode, CUgraph hClonedGraph)
{
	CU_ENTER("node=%p original=%p clone=%p", (void *)phNode, (void *)hOriginalNode, (void *)hClonedGraph);
	CU_NEEDS(phNode != NULL);
	NODE(hOriginalNode);
	GRAPH(hClonedGraph);
	for (struct CUgraphNode_st *node = hClonedGraph->first; node != NULL; node = node->next)
		if (node->original == hOriginalNode) {
			*phNode = node;
			return CUDA_SUCCESS;
		}
	return CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuGraphNodeGetType(CUgraphNode hNode, CUgraphNodeType *type)
{
	CU_ENTER("node=%p type=%p", (void *)hNode, (void *)type);
	NODE(hNode);
	CU_NEEDS(type != NULL);
	*type = hNode->params.type;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphGetId(CUgraph hGraph, unsigned int *graphId)
{
	CU_ENTER("graph=%p id=%p", (void *)hGraph, (void *)graphId);
	GRAPH(hGraph);
	CU_NEEDS(graphId != NULL);
	*graphId = hGraph->id;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphNodeGetContainingGraph(CUgraphNode hNode, CUgraph *phGraph)
{
	CU_ENTER("node=%p graph=%p", (void *)hNode, (void *)phGraph);
	NODE(hNode);
	CU_NEEDS(phGraph != NULL);
	*phGraph = hNode->graph;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphNodeGetLocalId(CUgraphNode hNode, unsigned int *nodeId)
{
	CU_ENTER("node=%p id=%p", (void *)hNode, (void *)nodeId);
	NODE(hNode);
	CU_NEEDS(nodeId != NULL);
	*nodeId = hNode->number;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphNodeGetToolsId(CUgraphNode hNode, unsigned long long *toolsNodeId)
{
	CU_ENTER("node=%p id=%p", (void *)hNode, (void *)toolsNodeId);
	NODE(hNode);
	CU_NEEDS(toolsNodeId != NULL);
	*toolsNodeId = hNode->id;
	return CUDA_SUCCESS;
}

/* ---- lists: NULL asks for the count; a longer buffer is told how much of it was used ------------------- */

struct list {
	CUgraphNode *node, *other;
	CUgraphEdgeData *edge;
	size_t room, found;
};

static void put(struct list *list, CUgraphNode node, CUgraphNode other, const CUgraphEdgeData *edge)
{
	if (list->found < list->room) {
		list->node[list->found] = node;
		if (list->other != NULL)
			list->other[list->found] = other;
		if (list->edge != NULL)
			list->edge[list->found] = *edge;
	}
	list->found++;
}

static CUresult finish(struct list *list, size_t *count, int lossy)
{
	size_t room = list->room;

	if (list->node == NULL) {
		*count = list->found;
		return CUDA_SUCCESS;
	}
	for (size_t i = list->found; i < room; i++)
		list->node[i] = NULL;
	*count = list->found < room ? list->found : room;
	return lossy ? CUDA_ERROR_LOSSY_QUERY : CUDA_SUCCESS;
}

static int has_data(const CUgraphEdgeData *edge)
{
	static const CUgraphEdgeData plain;

	return memcmp(edge, &plain, sizeof plain) != 0;
}

CUresult CUDAAPI cuGraphGetNodes(CUgraph hGraph, CUgraphNode *nodes, size_t *numNodes)
{
	CU_ENTER("graph=%p nodes=%p n=%p", (void *)hGraph, (void *)nodes, (void *)numNodes);
	GRAPH(hGraph);
	CU_NEEDS(numNodes != NULL);
	struct list list = {nodes, NULL, NULL, nodes != NULL ? *numNodes : 0, 0};

	cu_lock();
	for (struct CUgraphNode_st *node = hGraph->first; node != NULL; node = node->next)
		put(&list, node, NULL, NULL);
	cu_unlock();
	return finish(&list, numNodes, 0);
}

CUresult CUDAAPI cuGraphGetRootNodes(CUgraph hGraph, CUgraphNode *rootNodes, size_t *numRootNodes)
{
	CU_ENTER("graph=%p nodes=%p n=%p", (void *)hGraph, (void *)rootNodes, (void *)numRootNodes);
	GRAPH(hGraph);
	CU_NEEDS(numRootNodes != NULL);
	struct list list = {rootNodes, NULL, NULL, rootNodes != NULL ? *numRootNodes : 0, 0};

	cu_lock();
	for (struct CUgraphNode_st *node = hGraph->first; node != NULL; node = node->next)
		if (node->after_count == 0)
			put(&list, node, NULL, NULL);
	cu_unlock();
	return finish(&list, numRootNodes, 0);
}

static CUresult edges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *edge, size_t *count,
		      int told)
{
	GRAPH(graph);
	CU_NEEDS(count != NULL && (from != NULL) == (to != NULL));
	struct list list = {from, to, edge, from != NULL ? *count : 0, 0};
	int lossy = 0;

	cu_lock();
	for (struct CUgraphNode_st *node = graph->first; node != NULL; node = node->next)
		for (size_t i = 0; i < node->after_count; i++) {
			put(&list, node->after[i], node, &node->edge[i]);
			lossy |= !told && has_data(&node->edge[i]);
		}
	cu_unlock();
	return finish(&list, count, lossy && from != NULL);
}

CUresult CUDAAPI cuGraphGetEdges(CUgraph hGraph, CUgraphNode *from, CUgraphNode *to, size_t *numEdges)
{
	CU_ENTER("graph=%p from=%p to=%p n=%p", (void *)hGraph, (void *)from, (void *)to, (void *)numEdges);
	return edges(hGraph, from, to, NULL, numEdges, 0);
}

CUresult CUDAAPI cuGraphGetEdges_v2(CUgraph hGraph, CUgraphNode *from, CUgraphNode *to,
				    CUgraphEdgeData *edgeData, size_t *numEdges)
{
	CU_ENTER("graph=%p from=%p to=%p n=%p", (void *)hGraph, (void *)from, (void *)to, (void *)numEdges);
	return edges(hGraph, from, to, edgeData, numEdges, edgeData != NULL);
}

static CUresult dependencies_of(CUgraphNode node, CUgraphNode *after, CUgraphEdgeData *edge, size_t *count,
				int told)
{
	NODE(node);
	CU_NEEDS(count != NULL);
	struct list list = {after, NULL, edge, after != NULL ? *count : 0, 0};
	int lossy = 0;

	cu_lock();
	for (size_t i = 0; i < node->after_count; i++) {
		put(&list, node->after[i], NULL, &node->edge[i]);
		lossy |= !told && has_data(&node->edge[i]);
	}
	cu_unlock();
	return finish(&list, count, lossy && after != NULL);
}

CUresult CUDAAPI cuGraphNodeGetDependencies(CUgraphNode hNode, CUgraphNode *dependencies,
					    size_t *numDependencies)
{
	CU_ENTER("node=%p list=%p n=%p", (void *)hNode, (void *)dependencies, (void *)numDependencies);
	return dependencies_of(hNode, dependencies, NULL, numDependencies, 0);
}

CUresult CUDAAPI cuGraphNodeGetDependencies_v2(CUgraphNode hNode, CUgraphNode *dependencies,
					       CUgraphEdgeData *edgeData, size_t *numDependencies)
{
	CU_ENTER("node=%p list=%p n=%p", (void *)hNode, (void *)dependencies, (void *)numDependencies);
	return dependencies_of(hNode, dependencies, edgeData, numDependencies, edgeData != NULL);
}

static CUresult dependents_of(CUgraphNode node, CUgraphNode *found, CUgraphEdgeData *edge, size_t *count,
			      int told)
{
	NODE(node);
	CU_NEEDS(count != NULL);
	struct list list = {found, NULL, edge, found != NULL ? *count : 0, 0};
	int lossy = 0;

	cu_lock();
	for (struct CUgraphNode_st *other = node->graph->first; other != NULL; other = other->next)
		for (size_t i = 0; i < other->after_count; i++)
			if (other->after[i] == node) {
				put(&list, other, NULL, &other->edge[i]);
				lossy |= !told && has_data(&other->edge[i]);
			}
	cu_unlock();
	return finish(&list, count, lossy && found != NULL);
}

CUresult CUDAAPI cuGraphNodeGetDependentNodes(CUgraphNode hNode, CUgraphNode *dependentNodes,
					      size_t *numDependentNodes)
{
	CU_ENTER("node=%p list=%p n=%p", (void *)hNode, (void *)dependentNodes, (void *)numDependentNodes);
	return dependents_of(hNode, dependentNodes, NULL, numDependentNodes, 0);
}

CUresult CUDAAPI cuGraphNodeGetDependentNodes_v2(CUgraphNode hNode, CUgraphNode *dependentNodes,
						 CUgraphEdgeData *edgeData, size_t *numDependentNodes)
{
	CU_ENTER("node=%p list=%p n=%p", (void *)hNode, (void *)dependentNodes, (void *)numDependentNodes);
	return dependents_of(hNode, dependentNodes, edgeData, numDependentNodes, edgeData != NULL);
}

/* ---- edges -------------------------------------------------------------------------------------------- */

static CUresult change_edges(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to,
			     const CUgraphEdgeData *edge, size_t count, int more)
{
	CUresult result = CUDA_SUCCESS;

	GRAPH(graph);
	CU_NEEDS(count == 0 || (from != NULL && to != NULL));
	cu_lock();
	for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++) {
		if (!cu_is(from[i], CU_KIND_NODE) || !cu_is(to[i], CU_KIND_NODE) || from[i]->graph != graph ||
		    to[i]->graph != graph || from[i] == to[i])
			result = CUDA_ERROR_INVALID_VALUE;
		else
			result = more ? cu_node_depend(to[i], from[i], edge != NULL ? &edge[i] : NULL)
				      : cu_node_independ(to[i], from[i]);
	}
	cu_unlock();
	return result;
}

CUresult CUDAAPI cuGraphAddDependencies(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to,
					size_t numDependencies)
{
	CU_ENTER("graph=%p n=%zu", (void *)hGraph, numDependencies);
	return change_edges(hGraph, from, to, NULL, numDependencies, 1);
}

CUresult CUDAAPI cuGraphAddDependencies_v2(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to,
					   const CUgraphEdgeData *edgeData, size_t numDependencies)
{
	CU_ENTER("graph=%p n=%zu", (void *)hGraph, numDependencies);
	return change_edges(hGraph, from, to, edgeData, numDependencies, 1);
}

CUresult CUDAAPI cuGraphRemoveDependencies(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to,
					   size_t numDependencies)
{
	CU_ENTER("graph=%p n=%zu", (void *)hGraph, numDependencies);
	return change_edges(hGraph, from, to, NULL, numDependencies, 0);
}

CUresult CUDAAPI cuGraphRemoveDependencies_v2(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to,
					      const CUgraphEdgeData *edgeData, size_t numDependencies)
{
	CU_ENTER("graph=%p n=%zu", (void *)hGraph, numDependencies);
	return change_edges(hGraph, from, to, edgeData, numDependencies, 0);
}

CUresult CUDAAPI cuGraphDebugDotPrint(CUgraph hGraph, const char *path, unsigned int flags)
{
	CU_ENTER("graph=%p path=%s flags=%u", (void *)hGraph, path != NULL ? path : "(null)", flags);
	FILE *file;

	GRAPH(hGraph);
	CU_NEEDS(path != NULL);
	file = fopen(path, "we");
	if (file == NULL)
		return CUDA_ERROR_OPERATING_SYSTEM;
	fprintf(file, "digraph \"graph_%u\" {\n", hGraph->id);
	cu_lock();
	for (const struct CUgraphNode_st *node = hGraph->first; node != NULL; node = node->next) {
		fprintf(file, "\"node_%u\" [label=\"type %d\"];\n", node->number, (int)node->params.type);
		for (size_t i = 0; i < node->after_count; i++)
			fprintf(file, "\"node_%u\" -> \"node_%u\";\n", node->after[i]->number, node->number);
	}
	cu_unlock();
	fprintf(file, "}\n");
	return fclose(file) == 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}
