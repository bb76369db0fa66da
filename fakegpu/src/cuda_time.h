/* SPDX-License-Identifier: Apache-2.0
 *
 * Streams and events: order, and when things are done.
 *
 * All work of a process on a device goes through one queue (its seat), in the order of the calls, so a stream
 * needs to remember only its newest kernel, and an event only which kernel was newest when it was recorded.
 * Copies and fills happen at once, in the call. Invariant: what a stream or event remembers is never newer
 * than what was launched.
 */
#ifndef FAKEGPU_CUDA_TIME_H
#define FAKEGPU_CUDA_TIME_H

#include "cuda_core.h"
#include "engine.h"

struct cu_capture;
struct cu_capture_place;

struct CUstream_st {
	struct cu_object object;
	uint32_t flags;
	struct CUctx_st *context;
	struct CUstream_st *next; /* of the same context */
	int priority;
	uint32_t is_legacy;
	uint64_t thread; /* whose per-thread stream this is; 0: none */
	uint64_t id;
	uint64_t number; /* its newest kernel in the context's seat */
	uint64_t floor_ns; /* nothing of it begins before this (work of other devices) */
	uint32_t callbacks; /* waiting */
	uint32_t ended;
	struct cu_capture_place *capture; /* NULL: does not capture */
	CUstreamAttrValue attribute[16];
};

struct CUevent_st {
	struct cu_object object;
	uint32_t flags;
	struct CUctx_st *context;
	uint64_t number; /* kernel of `seat` that must be done; 0: none */
	uint64_t time_ns; /* done not before; exact once `settled` */
	int seat;
	uint32_t recorded;
	uint32_t settled; /* time_ns is when it was done */
	int32_t shared; /* index of fg_state->shared_event[]; -1: private */
	uint32_t imported;
	struct CUevent_st *next_open, *previous_open; /* recorded and not settled */
	struct cu_capture_place *capture; /* recorded in a capture: where */
	uint64_t capture_id;
};

/* ---- streams ------------------------------------------------------------------------------------------ */

/* What a handle stands for in the current context; `per_thread`: NULL is the per-thread stream. NULL:
 * invalid. */
struct CUstream_st *cu_stream_of(CUstream handle, int per_thread, struct CUctx_st *context);
static inline struct CUctx_st *cu_stream_context(const struct CUstream_st *stream)
{
	return stream->context;
}
/* Declares `stream` and its `context`, checked. */
#define CU_STREAM(stream, context, handle, per_thread)                                    \
	CU_CONTEXT(current_##context);                                                    \
	struct CUstream_st *stream = cu_stream_of(handle, per_thread, current_##context); \
	if (__builtin_expect(stream == NULL, 0))                                          \
		return cu_stream_trouble(handle);                                         \
	struct CUctx_st *context = cu_stream_context(stream);                             \
	do {                                                                              \
		CUresult stream_trouble_ = cu_context_check(context);                     \
		if (__builtin_expect(stream_trouble_ != CUDA_SUCCESS, 0))                 \
			return stream_trouble_;                                           \
	} while (0)
/* Which error a handle that is no stream gets. */
CUresult cu_stream_trouble(CUstream handle);
CUresult cu_stream_make(struct CUctx_st *context, unsigned int flags, int priority,
			struct CUstream_st **made);
/* Needs cu_lock. */
void cu_stream_end(struct CUstream_st *stream);

/* Puts a kernel of that length into the stream; 0 ns: done as soon as what came before. */
void cu_stream_push(struct CUstream_st *stream, uint64_t work_ns);
/* A copy of `bytes`, which takes as long as the configuration says. */
void cu_stream_copy(struct CUstream_st *stream, uint64_t bytes);
/* The kernel that a stream has to wait for now (the legacy stream waits for others). */
uint64_t cu_stream_number(const struct CUstream_st *stream);
int cu_stream_is_done(struct CUstream_st *stream);
/* Waits for all of it, runs its callbacks, lets pools shrink. */
void cu_stream_wait(struct CUstream_st *stream);

static inline int cu_may_spin(const struct CUctx_st *context)
{
	return (context->flags & CU_CTX_SCHED_MASK) != CU_CTX_SCHED_BLOCKING_SYNC;
}

/* Waits until nothing of the context runs. */
void cu_context_wait(struct CUctx_st *context);
/* The same, at no cost when nothing does. */
static inline void cu_context_drain(struct CUctx_st *context)
{
	if (__builtin_expect(context->last_number != 0 &&
				 __atomic_load_n(&fg_seat_at((uint32_t)context->seat)->done,
						 __ATOMIC_ACQUIRE) < context->last_number,
			     0))
		cu_context_wait(context);
}
/* Before a copy that is synchronous with the host: waits for the stream. */
static inline void cu_stream_drain(struct CUstream_st *stream)
{
	uint64_t number = stream->is_legacy ? stream->context->blocking_number : stream->number;

	if (__builtin_expect(number != 0 &&
				 __atomic_load_n(&fg_seat_at((uint32_t)stream->context->seat)->done,
						 __ATOMIC_ACQUIRE) < number,
			     0))
		cu_stream_wait(stream);
}

/* ---- events ------------------------------------------------------------------------------------------- */

int cu_event_is_done(struct CUevent_st *event);
/* Fixes the times of events before the queue forgets them: called before kernel `next` is launched in `seat`.
 */
void cu_events_settle(int seat, uint64_t next);
extern struct CUevent_st *cu_events_open;
/* Records in a stream that does not capture. */
void cu_event_mark(struct CUevent_st *event, struct CUstream_st *stream);
/* Makes the stream wait for the event. */
void cu_event_hold(struct CUevent_st *event, struct CUstream_st *stream);

/* ---- callbacks (cuda_host_function.c) ----------------------------------------------------------------- */

/* Runs `function` (or `callback`) when the stream gets there, in the next call of this process. */
CUresult cu_callback_add(struct CUstream_st *stream, CUhostFn function, CUstreamCallback callback,
			 void *data);

/* ---- durations (cuda_duration.c) ---------------------------------------------------------------------- */

#define CU_DURATION_DEFAULT UINT64_MAX
/* How long a kernel of this name takes; CU_DURATION_DEFAULT when the name says nothing. */
uint64_t cu_duration_of_name(const char *name);
/* In ns, for a kernel's own duration or CU_DURATION_DEFAULT. */
uint64_t cu_duration(uint64_t own);

#endif
