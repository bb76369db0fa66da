/* SPDX-License-Identifier: Apache-2.0
 *
 * Adding nodes of every kind, and reading and changing what they do. The kinds differ in their parameters
 * only.
 */
#include <string.h>

#include "cuda_graph.h"
#include "cuda_module.h"
#include "cuda_parts.h"

static CUresult add(CUgraphNode *made, CUgraph graph, const CUgraphNode *after, const CUgraphEdgeData *edge,
		    size_t count, const struct cu_node_params *params)
{
	CUresult result;

	CU_NEEDS(made != NULL && (count == 0 || after != NULL));
	if (!cu_is(graph, CU_KIND_GRAPH))
		return CUDA_ERROR_INVALID_VALUE;
	cu_lock();
	result = cu_graph_add(graph, after, edge, count, params, made);
	cu_unlock();
	return result;
}

/* The node, when it is one of that type. */
static struct cu_node_params *params_of(CUgraphNode node, CUgraphNodeType type)
{
	return cu_is(node, CU_KIND_NODE) && node->params.type == type ? &node->params : NULL;
}

static CUresult replace(CUgraphNode node, const struct cu_node_params *fresh)
{
	struct cu_node_params prepared = *fresh;
	CUresult result;

	if (!cu_is(node, CU_KIND_NODE))
		return CUDA_ERROR_INVALID_VALUE;
	CU_NEEDS(node->params.type == fresh->type);
	cu_lock();
	memcpy(prepared.attribute, node->params.attribute, sizeof prepared.attribute);
	result = cu_node_prepare(node->graph, &prepared);
	if (result == CUDA_SUCCESS) {
		cu_node_release(&node->params);
		node->params = prepared;
	}
	cu_unlock();
	return result;
}

#define ADD_ENTER() \
	CU_ENTER("node=%p graph=%p dependencies=%zu", (void *)phGraphNode, (void *)hGraph, numDependencies);

/* ---- kernels ------------------------------------------------------------------------------------------ */

static CUresult kernel_params(struct cu_node_params *params, const CUDA_KERNEL_NODE_PARAMS *from)
{
	CU_NEEDS(from != NULL);
	*params = (struct cu_node_params){.type = CU_GRAPH_NODE_TYPE_KERNEL};
	params->u.kernel = *from;
	if (from->func == NULL)
		params->u.kernel.func = (CUfunction)(void *)from->kern;
	if (params->u.kernel.ctx == NULL)
		params->u.kernel.ctx = cu_thread()->current;
	const struct CUfunc_st *function =
	    params->u.kernel.ctx != NULL || cu_is(params->u.kernel.func, CU_KIND_FUNCTION)
		? cu_function_of(params->u.kernel.func, params->u.kernel.ctx)
		: NULL;

	CU_NEEDS(function != NULL && (from->kernelParams == NULL || from->extra == NULL));
	CU_NEEDS(from->gridDimX > 0 && from->gridDimY > 0 && from->gridDimZ > 0 && from->blockDimX > 0 &&
		 from->blockDimY > 0 && from->blockDimZ > 0);
	return CUDA_SUCCESS;
}

static CUDA_KERNEL_NODE_PARAMS from_first(const CUDA_KERNEL_NODE_PARAMS_v1 *first)
{
	return (CUDA_KERNEL_NODE_PARAMS){.func = first->func,
					 .gridDimX = first->gridDimX,
					 .gridDimY = first->gridDimY,
					 .gridDimZ = first->gridDimZ,
					 .blockDimX = first->blockDimX,
					 .blockDimY = first->blockDimY,
					 .blockDimZ = first->blockDimZ,
					 .sharedMemBytes = first->sharedMemBytes,
					 .kernelParams = first->kernelParams,
					 .extra = first->extra};
}

CUresult CUDAAPI cuGraphAddKernelNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph,
					 const CUgraphNode *dependencies, size_t numDependencies,
					 const CUDA_KERNEL_NODE_PARAMS *nodeParams)
{
	ADD_ENTER();
	struct cu_node_params params;
	CUresult result = kernel_params(&params, nodeParams);

	return result == CUDA_SUCCESS ? add(phGraphNode, hGraph, dependencies, NULL, numDependencies, &params)
				      : result;
}

CUresult CUDAAPI cuGraphAddKernelNode(CUgraphNode *phGraphNode, CUgraph hGraph,
				      const CUgraphNode *dependencies, size_t numDependencies,
				      const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
	ADD_ENTER();
	CU_NEEDS(nodeParams != NULL);
	const CUDA_KERNEL_NODE_PARAMS kernel = from_first(nodeParams);
	struct cu_node_params params;
	CUresult result = kernel_params(&params, &kernel);

	return result == CUDA_SUCCESS ? add(phGraphNode, hGraph, dependencies, NULL, numDependencies, &params)
				      : result;
}

CUresult CUDAAPI cuGraphKernelNodeGetParams_v2(CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS *nodeParams)
{
	CU_ENTER("node=%p params=%p", (void *)hNode, (void *)nodeParams);
	const struct cu_node_params *params = params_of(hNode, CU_GRAPH_NODE_TYPE_KERNEL);

	CU_NEEDS(params != NULL && nodeParams != NULL);
	*nodeParams = params->u.kernel;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphKernelNodeGetParams(CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
	CU_ENTER("node=%p params=%p", (void *)hNode, (void *)nodeParams);
	const struct cu_node_params *params = params_of(hNode, CU_GRAPH_NODE_TYPE_KERNEL);

	CU_NEEDS(params != NULL && nodeParams != NULL);
	/* The second form only added members at the end. */
	memcpy(nodeParams, &params->u.kernel, sizeof *nodeParams);
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphKernelNodeSetParams_v2(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS *nodeParams)
{
	CU_ENTER("node=%p params=%p", (void *)hNode, (const void *)nodeParams);
	struct cu_node_params params;
	CUresult result = kernel_params(&params, nodeParams);

	return result == CUDA_SUCCESS ? replace(hNode, &params) : result;
}

CUresult CUDAAPI cuGraphKernelNodeSetParams(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
	CU_ENTER("node=%p params=%p", (void *)hNode, (const void *)nodeParams);
	CU_NEEDS(nodeParams != NULL);
	const CUDA_KERNEL_NODE_PARAMS kernel = from_first(nodeParams);
	struct cu_node_params params;
	CUresult result = kernel_params(&params, &kernel);

	return result == CUDA_SUCCESS ? replace(hNode, &params) : result;
}

CUresult CUDAAPI cuGraphKernelNodeGetAttribute(CUgraphNode hNode, CUkernelNodeAttrID attr,
					       CUkernelNodeAttrValue *value_out)
{
	CU_ENTER("node=%p attr=%d value=%p", (void *)hNode, (int)attr, (void *)value_out);
	const struct cu_node_params *params = params_of(hNode, CU_GRAPH_NODE_TYPE_KERNEL);

	CU_NEEDS(params != NULL && value_out != NULL && (unsigned)attr < CU_NODE_ATTRIBUTES);
	*value_out = params->attribute[attr];
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphKernelNodeSetAttribute(CUgraphNode hNode, CUkernelNodeAttrID attr,
					       const CUkernelNodeAttrValue *value)
{
	CU_ENTER("node=%p attr=%d value=%p", (void *)hNode, (int)attr, (const void *)value);
	struct cu_node_params *params = params_of(hNode, CU_GRAPH_NODE_TYPE_KERNEL);

	CU_NEEDS(params != NULL && value != NULL && (unsigned)attr < CU_NODE_ATTRIBUTES);
	params->attribute[attr] = *value;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphKernelNodeCopyAttributes(CUgraphNode dst, CUgraphNode src)
{
	CU_ENTER("dst=%p src=%p", (void *)dst, (void *)src);
	struct cu_node_params *to = params_of(dst, CU_GRAPH_NODE_TYPE_KERNEL);
	const struct cu_node_params *from = params_of(src, CU_GRAPH_NODE_TYPE_KERNEL);

	CU_NEEDS(to != NULL && from != NULL);
	memmove(to->attribute, from->attribute, sizeof to->attribute);
	return CUDA_SUCCESS;
}

/* ---- copies and fills --------------------------------------------------------------------------------- */

CUresult CUDAAPI cuGraphAddMemcpyNode(CUgraphNode *phGraphNode, CUgraph hGraph,
				      const CUgraphNode *dependencies, size_t numDependencies,
				      const CUDA_MEMCPY3D *copyParams, CUcontext ctx)
{
	ADD_ENTER();
	CU_NEEDS(copyParams != NULL && (ctx == NULL || cu_is(ctx, CU_KIND_CONTEXT)));
	const struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_MEMCPY,
					      .u.copy = {*copyParams, ctx}};

	return add(phGraphNode, hGraph, dependencies, NULL, numDependencies, &params);
}

CUresult CUDAAPI cuGraphMemcpyNodeGetParams(CUgraphNode hNode, CUDA_MEMCPY3D *nodeParams)
{
	CU_ENTER("node=%p params=%p", (void *)hNode, (void *)nodeParams);
	const struct cu_node_params *params = params_of(hNode, CU_GRAPH_NODE_TYPE_MEMCPY);

	CU_NEEDS(params != NULL && nodeParams != NULL);
	*nodeParams = params->u.copy.copy;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphMemcpyNodeSetParams(CUgraphNode hNode, const CUDA_MEMCPY3D *nodeParams)
{
	CU_ENTER("node=%p params=%p", (void *)hNode, (const void *)nodeParams);
	struct cu_node_params *params = params_of(hNode, CU_GRAPH_NODE_TYPE_MEMCPY);

	CU_NEEDS(params != NULL && nodeParams != NULL);
	params->u.copy.copy = *nodeParams;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphAddMemsetNode(CUgraphNode *phGraphNode, CUgraph hGraph,
				      const CUgraphNode *dependencies, size_t numDependencies,
				      const CUDA_MEMSET_NODE_PARAMS *memsetParams, CUcontext ctx)
{
	ADD_ENTER();
	CU_NEEDS(memsetParams != NULL && (ctx == NULL || cu_is(ctx, CU_KIND_CONTEXT)));
	const struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_MEMSET,
					      .u.fill = {*memsetParams, ctx}};

	return add(phGraphNode, hGraph, dependencies, NULL, numDependencies, &params);
}

CUresult CUDAAPI cuGraphMemsetNodeGetParams(CUgraphNode hNode, CUDA_MEMSET_NODE_PARAMS *nodeParams)
{
	CU_ENTER("node=%p params=%p", (void *)hNode, (void *)nodeParams);
	const struct cu_node_params *params = params_of(hNode, CU_GRAPH_NODE_TYPE_MEMSET);

	CU_NEEDS(params != NULL && nodeParams != NULL);
	*nodeParams = params->u.fill.fill;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphMemsetNodeSetParams(CUgraphNode hNode, const CUDA_MEMSET_NODE_PARAMS *nodeParams)
{
	CU_ENTER("node=%p params=%p", (void *)hNode, (const void *)nodeParams);
	struct cu_node_params *params = params_of(hNode, CU_GRAPH_NODE_TYPE_MEMSET);

	CU_NEEDS(params != NULL && nodeParams != NULL);
	params->u.fill.fill = *nodeParams;
	return CUDA_SUCCESS;
}

/* ---- host functions, children, nothing ---------------------------------------------------------------- */

CUresult CUDAAPI cuGraphAddHostNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				    size_t numDependencies, const CUDA_HOST_NODE_PARAMS *nodeParams)
{
	ADD_ENTER();
	CU_NEEDS(nodeParams != NULL && nodeParams->fn != NULL);
	const struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_HOST, .u.host = *nodeParams};

	return add(phGraphNode, hGraph, dependencies, NULL, numDependencies, &params);
}

CUresult CUDAAPI cuGraphHostNodeGetParams(CUgraphNode hNode, CUDA_HOST_NODE_PARAMS *nodeParams)
{
	CU_ENTER("node=%p params=%p", (void *)hNode, (void *)nodeParams);
	const struct cu_node_params *params = params_of(hNode, CU_GRAPH_NODE_TYPE_HOST);

	CU_NEEDS(params != NULL && nodeParams != NULL);
	*nodeParams = params->u.host;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphHostNodeSetParams(CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS *nodeParams)
{
	CU_ENTER("node=%p params=%p", (void *)hNode, (const void *)nodeParams);
	struct cu_node_params *params = params_of(hNode, CU_GRAPH_NODE_TYPE_HOST);

	CU_NEEDS(params != NULL && nodeParams != NULL && nodeParams->fn != NULL);
	params->u.host = *nodeParams;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphAddChildGraphNode(CUgraphNode *phGraphNode, CUgraph hGraph,
					  const CUgraphNode *dependencies, size_t numDependencies,
					  CUgraph childGraph)
{
	ADD_ENTER();
	CU_NEEDS(cu_is(childGraph, CU_KIND_GRAPH) && childGraph != hGraph);
	const struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_GRAPH, .u.child = childGraph};

	return add(phGraphNode, hGraph, dependencies, NULL, numDependencies, &params);
}

CUresult CUDAAPI cuGraphChildGraphNodeGetGraph(CUgraphNode hNode, CUgraph *phGraph)
{
	CU_ENTER("node=%p graph=%p", (void *)hNode, (void *)phGraph);
	const struct cu_node_params *params = params_of(hNode, CU_GRAPH_NODE_TYPE_GRAPH);

	CU_NEEDS(params != NULL && phGraph != NULL);
	*phGraph = params->u.child;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphAddEmptyNode(CUgraphNode *phGraphNode, CUgraph hGraph,
				     const CUgraphNode *dependencies, size_t numDependencies)
{
	ADD_ENTER();
	const struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_EMPTY};

	return add(phGraphNode, hGraph, dependencies, NULL, numDependencies, &params);
}

/* ---- the one form for all kinds ----------------------------------------------------------------------- */

static CUresult add_any(CUgraphNode *made, CUgraph graph, const CUgraphNode *after,
			const CUgraphEdgeData *edge, size_t count, CUgraphNodeParams *any)
{
	struct cu_node_params params;
	CUresult result = cu_params_from_any(any, &params);

	if (result == CUDA_SUCCESS && params.type == CU_GRAPH_NODE_TYPE_KERNEL) {
		const CUDA_KERNEL_NODE_PARAMS kernel = params.u.kernel;

		result = kernel_params(&params, &kernel);
	}
	if (result == CUDA_SUCCESS)
		result = add(made, graph, after, edge, count, &params);
	if (result == CUDA_SUCCESS && params.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
		any->alloc.dptr = (*made)->params.u.memory.params.dptr;
	if (result == CUDA_SUCCESS && params.type == CU_GRAPH_NODE_TYPE_GRAPH)
		any->graph.graph = (*made)->params.u.child;
	return result;
}

CUresult CUDAAPI cuGraphAddNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				size_t numDependencies, CUgraphNodeParams *nodeParams)
{
	ADD_ENTER();
	return add_any(phGraphNode, hGraph, dependencies, NULL, numDependencies, nodeParams);
}

CUresult CUDAAPI cuGraphAddNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				   const CUgraphEdgeData *dependencyData, size_t numDependencies,
				   CUgraphNodeParams *nodeParams)
{
	ADD_ENTER();
	return add_any(phGraphNode, hGraph, dependencies, dependencyData, numDependencies, nodeParams);
}

CUresult CUDAAPI cuGraphAddNode_v3(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				   const CUgraphEdgeData *dependencyData, size_t numDependencies,
				   CUgraphNodeParams *nodeParams)
{
	ADD_ENTER();
	return add_any(phGraphNode, hGraph, dependencies, dependencyData, numDependencies, nodeParams);
}

static CUresult set_any(CUgraphNode node, const CUgraphNodeParams *any)
{
	struct cu_node_params params;
	CUresult result = cu_params_from_any(any, &params);

	if (result == CUDA_SUCCESS && params.type == CU_GRAPH_NODE_TYPE_KERNEL) {
		const CUDA_KERNEL_NODE_PARAMS kernel = params.u.kernel;

		result = kernel_params(&params, &kernel);
	}
	CU_NEEDS(result != CUDA_SUCCESS ||
		 (params.type != CU_GRAPH_NODE_TYPE_MEM_ALLOC && params.type != CU_GRAPH_NODE_TYPE_MEM_FREE));
	return result == CUDA_SUCCESS ? replace(node, &params) : result;
}

CUresult CUDAAPI cuGraphNodeSetParams(CUgraphNode hNode, CUgraphNodeParams *nodeParams)
{
	CU_ENTER("node=%p params=%p", (void *)hNode, (void *)nodeParams);
	return set_any(hNode, nodeParams);
}

CUresult CUDAAPI cuGraphNodeSetParams_v2(CUgraphNode hNode, CUgraphNodeParams *nodeParams)
{
	CU_ENTER("node=%p params=%p", (void *)hNode, (void *)nodeParams);
	return set_any(hNode, nodeParams);
}

CUresult CUDAAPI cuGraphNodeGetParams(CUgraphNode hNode, CUgraphNodeParams *nodeParams)
{
	CU_ENTER("node=%p params=%p", (void *)hNode, (void *)nodeParams);
	CU_NEEDS(cu_is(hNode, CU_KIND_NODE) && nodeParams != NULL);
	return cu_params_to_any(&hNode->params, nodeParams);
}
