/* SPDX-License-Identifier: Apache-2.0
 *
 * Host functions and stream callbacks. There is no thread to run them, so they run in whatever call of this
 * process comes next once their turn has come: in the very call that adds them when the stream is idle.
 *
 * Invariant: of one stream, they run in the order in which they were added, one at a time, and never from
 * within another one.
 */
#include <sched.h>
#include <stdlib.h>

#include "cuda_capture.h"
#include "cuda_graph.h"
#include "cuda_parts.h"
#include "cuda_time.h"

struct callback {
	struct callback *next;
	struct CUstream_st *stream;
	uint64_t number;
	uint64_t floor_ns;
	CUhostFn function;
	CUstreamCallback callback;
	void *data;
	int running;
};

uint32_t cu_callbacks_waiting;
static struct callback *first;
static __thread int inside;

void cu_callbacks_forget(void)
{
	first = NULL;
	cu_callbacks_waiting = 0;
}

static int is_due(const struct callback *callback)
{
	uint64_t end;

	if (callback->number != 0 &&
	    !fg_engine_is_done((uint32_t)callback->stream->context->seat, callback->number, &end))
		return 0;
	return callback->floor_ns == 0 || fg_now_ns() >= callback->floor_ns;
}

/* The first callback whose turn has come. Needs cu_lock. */
static struct callback *find_due(void)
{
	for (struct callback *one = first; one != NULL; one = one->next) {
		const struct callback *earlier = first;

		while (earlier != one && earlier->stream != one->stream)
			earlier = earlier->next;
		if (earlier == one && !one->running && is_due(one))
			return one;
	}
	return NULL;
}

static void drop(struct callback *gone)
{
	for (struct callback **link = &first; *link != NULL; link = &(*link)->next)
		if (*link == gone) {
			*link = gone->next;
			break;
		}
	gone->stream->callbacks--;
	__atomic_fetch_sub(&cu_callbacks_waiting, 1, __ATOMIC_RELAXED);
	free(gone);
}

void cu_callbacks_run(void)
{
	struct callback *one;
	int ran = 0;

	if (inside)
		return;
	cu_lock();
	while ((one = find_due()) != NULL) {
		one->running = 1;
		cu_unlock();
		inside = 1;
		if (one->function != NULL)
			one->function(one->data);
		else
			one->callback(one->stream, CUDA_SUCCESS, one->data);
		inside = 0;
		ran = 1;
		cu_lock();
		drop(one);
	}
	cu_unlock();
	if (!ran)
		sched_yield(); /* another thread runs one, or its time has not come */
}

CUresult cu_callback_add(struct CUstream_st *stream, CUhostFn function, CUstreamCallback callback, void *data)
{
	struct callback *one = calloc(1, sizeof *one), **link = &first;

	if (one == NULL)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*one = (struct callback){.stream = stream,
				 .number = cu_stream_number(stream),
				 .floor_ns = stream->floor_ns,
				 .function = function,
				 .callback = callback,
				 .data = data};
	cu_lock();
	while (*link != NULL)
		link = &(*link)->next;
	*link = one;
	stream->callbacks++;
	__atomic_fetch_add(&cu_callbacks_waiting, 1, __ATOMIC_RELAXED);
	int due = is_due(one);

	cu_unlock();
	if (due)
		cu_callbacks_run();
	return CUDA_SUCCESS;
}

static CUresult launch(const char *name, int per_thread, CUstream hStream, CUhostFn fn, void *userData)
{
	CU_ENTER_AS(name, "stream=%p userData=%p", (void *)hStream, userData);
	CU_STREAM(stream, context, hStream, per_thread);
	CU_NEEDS(fn != NULL && context != NULL);
	if (inside)
		return CUDA_ERROR_NOT_PERMITTED;
	if (stream->capture != NULL)
		return cu_capture_add_host(stream, fn, userData);
	return cu_callback_add(stream, fn, NULL, userData);
}
CU_TWINS(cuLaunchHostFunc, cuLaunchHostFunc_ptsz, launch, (CUstream hStream, CUhostFn fn, void *userData),
	 hStream, fn, userData)

static CUresult launch_2(const char *name, int per_thread, CUstream hStream, CUhostFn fn, void *userData,
			 unsigned int syncMode)
{
	CU_NEEDS(syncMode <= 1);
	return launch(name, per_thread, hStream, fn, userData);
}
CU_TWINS(cuLaunchHostFunc_v2, cuLaunchHostFunc_v2_ptsz, launch_2,
	 (CUstream hStream, CUhostFn fn, void *userData, unsigned int syncMode), hStream, fn, userData,
	 syncMode)

static CUresult add(const char *name, int per_thread, CUstream hStream, CUstreamCallback callback,
		    void *userData, unsigned int flags)
{
	CU_ENTER_AS(name, "stream=%p userData=%p flags=%u", (void *)hStream, userData, flags);
	CU_STREAM(stream, context, hStream, per_thread);
	CU_NEEDS(callback != NULL && flags == 0 && context != NULL);
	if (stream->capture != NULL)
		return cu_capture_break(stream, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	return cu_callback_add(stream, NULL, callback, userData);
}
CU_TWINS(cuStreamAddCallback, cuStreamAddCallback_ptsz, add,
	 (CUstream hStream, CUstreamCallback callback, void *userData, unsigned int flags), hStream, callback,
	 userData, flags)
