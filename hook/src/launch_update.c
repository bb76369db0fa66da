/* SPDX-License-Identifier: Apache-2.0
 *
 * Changes of an executable graph: the driver is asked, and what was known of the graph's length is not true
 * any more.
 */
/* Small before quick: nothing in here is on a hot path, and every process of a container maps it. */
#pragma GCC optimize("Os")

#include "limiter.h"
#include "resolve.h"

#define UPDATE(name, parameters, arguments)             \
	HOOK(CUresult, name, parameters)                \
	{                                               \
		CUresult result = REAL(name) arguments; \
		if (result == CUDA_SUCCESS)             \
			aq_limiter_forget(exec);        \
		return result;                          \
	}

UPDATE(cuGraphExecUpdate, (CUgraphExec exec, CUgraph graph, CUgraphNode *error, void *outcome),
       (exec, graph, error, outcome))
UPDATE(cuGraphExecUpdate_v2, (CUgraphExec exec, CUgraph graph, void *outcome), (exec, graph, outcome))
UPDATE(cuGraphExecKernelNodeSetParams, (CUgraphExec exec, CUgraphNode node, const void *params),
       (exec, node, params))
UPDATE(cuGraphExecKernelNodeSetParams_v2, (CUgraphExec exec, CUgraphNode node, const void *params),
       (exec, node, params))
UPDATE(cuGraphExecNodeSetParams, (CUgraphExec exec, CUgraphNode node, void *params), (exec, node, params))
UPDATE(cuGraphExecChildGraphNodeSetParams, (CUgraphExec exec, CUgraphNode node, CUgraph child),
       (exec, node, child))
UPDATE(cuGraphNodeSetEnabled, (CUgraphExec exec, CUgraphNode node, unsigned enabled), (exec, node, enabled))
