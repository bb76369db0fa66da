/* SPDX-License-Identifier: Apache-2.0
 *
 * Stream capture: work becomes nodes of a graph instead of being done.
 *
 * A capture begins in one stream and spreads along events. Every stream in it has a place: the nodes that its
 * next node will depend on. Invariant: a stream's place belongs to exactly one capture, and a capture that
 * went wrong stays wrong until it is ended.
 */
#ifndef FAKEGPU_CUDA_CAPTURE_H
#define FAKEGPU_CUDA_CAPTURE_H

#include "cuda_core.h"

struct cu_capture {
	struct CUgraph_st *graph;
	struct CUstream_st *origin;
	uint64_t id;
	uint64_t thread; /* that began it */
	CUstreamCaptureMode mode;
	uint32_t invalid;
	uint32_t graph_given; /* cuStreamBeginCaptureToGraph: the graph is the caller's */
	struct cu_capture *next;
};

struct cu_capture_place {
	struct cu_capture *capture;
	CUgraphNode *after; /* what the next node depends on */
	size_t count, room;
};

/* Captures under way in this process: 0 lets every check fall through. */
extern uint32_t cu_captures_active;

/* For calls that real captures refuse ("potentially unsafe"): breaks captures they concern. */
CUresult cu_capture_unsafe(void);
/* For calls that only `forbid_in_capture` of the control file refuses. */
CUresult cu_capture_forbidden(void);

#define CU_UNSAFE_IN_CAPTURE(context)                                                                   \
	do {                                                                                            \
		(void)(context);                                                                        \
		if (__builtin_expect(__atomic_load_n(&cu_captures_active, __ATOMIC_RELAXED) != 0, 0)) { \
			CUresult unsafe_ = cu_capture_unsafe();                                         \
			if (unsafe_ != CUDA_SUCCESS)                                                    \
				return unsafe_;                                                         \
		}                                                                                       \
	} while (0)

#define CU_FORBIDDEN_IN_CAPTURE()                                                                       \
	do {                                                                                            \
		if (__builtin_expect(__atomic_load_n(&cu_captures_active, __ATOMIC_RELAXED) != 0, 0)) { \
			CUresult forbidden_ = cu_capture_forbidden();                                   \
			if (forbidden_ != CUDA_SUCCESS)                                                 \
				return forbidden_;                                                      \
		}                                                                                       \
	} while (0)

/* Breaks the capture a stream is in; returns the error to report. */
CUresult cu_capture_break(struct CUstream_st *stream, CUresult error);
/* The graph a capturing stream adds to and its place; NULL with *error when the capture is broken. */
struct cu_capture_place *cu_capture_of(struct CUstream_st *stream, CUresult *error);
/* A node was added for this stream: the next one depends on it alone. */
CUresult cu_capture_advance(struct cu_capture_place *place, CUgraphNode node);
/* cuEventRecord and cuStreamWaitEvent while capturing. */
CUresult cu_capture_record(struct CUstream_st *stream, struct CUevent_st *event);
/* cuEventRecordWithFlags(…, CU_EVENT_RECORD_EXTERNAL): a node that records. */
CUresult cu_capture_record_node(struct CUstream_st *stream, struct CUevent_st *event);
CUresult cu_capture_wait(struct CUstream_st *stream, struct CUevent_st *event);
void cu_capture_place_free(struct cu_capture_place *place);

#endif
