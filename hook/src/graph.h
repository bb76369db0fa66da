/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory that graphs allocate by themselves.
 */
#ifndef ALIQUOT_GRAPH_H
#define ALIQUOT_GRAPH_H

#include "process.h"

/* A graph may allocate on several devices. */
#define AQ_GRAPH_DEVICES 8u

struct aq_graph_request {
	uint32_t count; /* 0: the graph has no memory of its own */
	struct {
		struct aq_pool *pool;
		uint64_t units;
	} part[AQ_GRAPH_DEVICES];
};

/* Before a graph is launched or uploaded: charges what it may add. CUDA_SUCCESS: call the driver. */
CUresult aq_graph_begin_slowly(CUgraphExec exec, struct aq_graph_request *request);

static inline CUresult aq_graph_begin(CUgraphExec exec, struct aq_graph_request *request)
{
	request->count = 0;
	if (__builtin_expect(__atomic_load_n(&aq_process()->graphs, __ATOMIC_RELAXED) == 0, 1))
		return CUDA_SUCCESS;
	return aq_graph_begin_slowly(exec, request);
}

/* After it. */
void aq_graph_end(const struct aq_graph_request *request);

#endif
