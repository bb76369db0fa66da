/* SPDX-License-Identifier: Apache-2.0
 *
 * Graphs: nodes, edges, and what a launch does with them.
 *
 * An executable graph is a copy: its nodes in an order that keeps every edge, each remembering the node it
 * was made from. A launch puts the sum of the kernels into the stream, does copies and fills at once, and
 * hands host functions to the stream. Memory of allocation nodes has its address from the beginning and its
 * charge from launch to free.
 */
#ifndef FAKEGPU_CUDA_GRAPH_H
#define FAKEGPU_CUDA_GRAPH_H

#include "cuda_capture.h"
#include "cuda_core.h"
#include "cuda_space.h"
#include "cuda_time.h"

#define CU_NODE_ATTRIBUTES 16

struct cu_node_params {
	CUgraphNodeType type;
	union {
		CUDA_KERNEL_NODE_PARAMS kernel;
		struct {
			CUDA_MEMCPY3D copy;
			struct CUctx_st *context;
		} copy;
		struct {
			CUDA_MEMSET_NODE_PARAMS fill;
			struct CUctx_st *context;
		} fill;
		CUDA_HOST_NODE_PARAMS host;
		struct CUgraph_st *child;
		struct CUgraphExec_st *child_exec; /* in an executable graph */
		CUevent event;
		CUDA_EXT_SEM_SIGNAL_NODE_PARAMS signal;
		CUDA_EXT_SEM_WAIT_NODE_PARAMS wait;
		CUDA_BATCH_MEM_OP_NODE_PARAMS ops;
		struct {
			CUDA_MEM_ALLOC_NODE_PARAMS params;
			struct cu_alloc *alloc; /* NULL once it cannot come again */
		} memory;
		CUdeviceptr freed;
	} u;
	CUkernelNodeAttrValue attribute[CU_NODE_ATTRIBUTES]; /* of kernels, by id */
};

struct CUgraphNode_st {
	struct cu_object object;
	uint32_t number; /* within its graph */
	struct CUgraph_st *graph;
	struct CUgraphNode_st *next, *previous;
	struct CUgraphNode_st *original; /* in the graph this one's was cloned from */
	CUgraphNode *after; /* dependencies */
	CUgraphEdgeData *edge; /* of each */
	size_t after_count, after_room;
	struct cu_node_params params;
	uint64_t id;
	uint32_t mark; /* for walks */
};

struct CUgraph_st {
	struct cu_object object;
	uint32_t id;
	struct CUgraphNode_st *first, *last;
	size_t count;
	uint32_t last_number;
	struct CUgraph_st *original; /* this is a clone of */
	struct CUgraphNode_st *owner; /* the child-graph node this belongs to */
	struct cu_user_reference *user_objects;
	uint32_t has_memory;
	uint32_t given_up; /* destroyed by the program while a capture or node holds it */
};

struct cu_exec_node {
	struct CUgraphNode_st *node; /* in the graph it was made from; only compared, never followed */
	struct cu_node_params params;
	uint32_t enabled;
};

struct CUgraphExec_st {
	struct cu_object object;
	uint32_t id;
	unsigned long long flags;
	struct CUctx_st *context;
	struct CUgraph_st *from; /* only compared */
	struct cu_exec_node *node;
	size_t count;
	struct cu_user_reference *user_objects;
};

/* ---- building (cuda_graph.c). Need cu_lock ------------------------------------------------------------ */

struct CUgraph_st *cu_graph_make(void);
void cu_graph_end(struct CUgraph_st *graph);
/* A copy; NULL: out of memory. */
struct CUgraph_st *cu_graph_copy(struct CUgraph_st *graph);
/* A node that depends on `after`; takes the params as they are. */
CUresult cu_graph_add(struct CUgraph_st *graph, const CUgraphNode *after, const CUgraphEdgeData *edge,
		      size_t count, const struct cu_node_params *params, CUgraphNode *made);
void cu_node_end(struct CUgraphNode_st *node);
/* One dependency more; CUDA_ERROR_INVALID_VALUE when it is there. One fewer; the same when it is not. */
CUresult cu_node_depend(struct CUgraphNode_st *node, CUgraphNode after, const CUgraphEdgeData *edge);
CUresult cu_node_independ(struct CUgraphNode_st *node, CUgraphNode after);
/* What a node of this kind needs when it is made or copied (child graphs are copied, memory is given an
 * address). */
CUresult cu_node_prepare(struct CUgraph_st *graph, struct cu_node_params *params);
void cu_node_release(struct cu_node_params *params);

/* ---- user objects (cuda_user_object.c) ---------------------------------------------------------------- */

struct cu_user_reference {
	struct cu_user_reference *next;
	CUuserObject object;
	unsigned int count;
};
void cu_user_references_end(struct cu_user_reference *list);
struct cu_user_reference *cu_user_references_copy(const struct cu_user_reference *list);
/* Calls the destructors of what lost its last reference. Takes cu_lock. */
void cu_user_objects_destroy_pending(void);

/* ---- params of all kinds (cuda_graph_params.c) -------------------------------------------------------- */

/* From the one struct that cuGraphAddNode takes; and back. */
CUresult cu_params_from_any(const CUgraphNodeParams *any, struct cu_node_params *params);
CUresult cu_params_to_any(const struct cu_node_params *params, CUgraphNodeParams *any);
/* 1 when an executable node of `old` may become `fresh` by an update. */
int cu_params_may_follow(const struct cu_node_params *old, const struct cu_node_params *fresh);

/* ---- executing (cuda_graph_exec.c, cuda_graph_run.c) -------------------------------------------------- */

CUresult cu_exec_make(struct CUgraph_st *graph, unsigned long long flags, struct CUgraphExec_st **made);
void cu_exec_end(struct CUgraphExec_st *exec);
struct cu_exec_node *cu_exec_node_of(struct CUgraphExec_st *exec, CUgraphNode node);
CUresult cu_exec_run(struct CUgraphExec_st *exec, struct CUstream_st *stream);
/* One node's work, outside any graph: copies and fills of captured calls. */
CUresult cu_run_copy(const CUDA_MEMCPY3D *copy);
CUresult cu_run_fill(const CUDA_MEMSET_NODE_PARAMS *fill);

/* ---- captured calls (cuda_capture_calls.c) ------------------------------------------------------------ */

CUresult cu_capture_add(struct CUstream_st *stream, struct cu_node_params *params, CUgraphNode *made);
CUresult cu_capture_add_kernel(struct CUstream_st *stream, const CUDA_KERNEL_NODE_PARAMS *kernel);
CUresult cu_capture_add_host(struct CUstream_st *stream, CUhostFn function, void *data);
CUresult cu_capture_add_copy(struct CUstream_st *stream, const CUDA_MEMCPY3D *copy);
CUresult cu_capture_add_fill(struct CUstream_st *stream, const CUDA_MEMSET_NODE_PARAMS *fill);
/* cuMemAllocAsync and cuMemFreeAsync in a capture. */
CUresult cu_capture_add_alloc(struct CUstream_st *stream, size_t size, struct cu_device *device,
			      CUdeviceptr *made);
CUresult cu_capture_add_free(struct CUstream_st *stream, CUdeviceptr address);

#endif
