/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory that graphs allocate by themselves.
 */
#ifndef ALIQUOT_GRAPH_H
#define ALIQUOT_GRAPH_H

#include "process.h"

struct aq_graph_request {
	struct aq_pool *pool; /* NULL: the graph has no memory of its own */
	uint64_t units;
};

/* Before a graph is launched or uploaded: charges what it may add. CUDA_SUCCESS: call the driver. */
CUresult aq_graph_begin_slowly(CUgraphExec exec, struct aq_graph_request *request);

static inline CUresult aq_graph_begin(CUgraphExec exec, struct aq_graph_request *request)
{
	request->pool = NULL;
	if (__builtin_expect(__atomic_load_n(&aq_process()->graphs, __ATOMIC_RELAXED) == 0, 1))
		return CUDA_SUCCESS;
	return aq_graph_begin_slowly(exec, request);
}

/* After it. */
void aq_graph_end(const struct aq_graph_request *request);

#endif
