/* SPDX-License-Identifier: Apache-2.0
 *
 * Events: what they remember, and how long it is between two. See cuda_time.h.
 */
#include "cuda_capture.h"
#include "cuda_mempool.h"
#include "cuda_parts.h"
#include "cuda_time.h"

struct CUevent_st *cu_events_open;

void cu_event_forget(void)
{
	cu_events_open = NULL;
}

static void close_event(struct CUevent_st *event)
{
	if (event->previous_open != NULL)
		event->previous_open->next_open = event->next_open;
	else if (cu_events_open == event)
		cu_events_open = event->next_open;
	if (event->next_open != NULL)
		event->next_open->previous_open = event->previous_open;
	event->next_open = event->previous_open = NULL;
}

static void open_event(struct CUevent_st *event)
{
	event->previous_open = NULL;
	event->next_open = cu_events_open;
	if (event->next_open != NULL)
		event->next_open->previous_open = event;
	cu_events_open = event;
}

/* 1 when the event is done; then its time is exact. Needs cu_lock. */
static int settle(struct CUevent_st *event)
{
	uint64_t end;

	if (event->settled || !event->recorded)
		return 1;
	if (event->number != 0 && !fg_engine_is_done((uint32_t)event->seat, event->number, &end))
		return 0;
	if (event->number != 0 && end > event->time_ns)
		event->time_ns = end;
	event->settled = 1;
	close_event(event);
	return 1;
}

void cu_events_settle(int seat, uint64_t next)
{
	uint64_t unfinished;

	do {
		unfinished = 0;
		cu_lock();
		for (struct CUevent_st *event = cu_events_open, *after; event != NULL; event = after) {
			after = event->next_open;
			/* The queue is about to use the entry of the kernel this event waits for again. When
			 * that is now and the kernel still runs, the launch would have to wait for it all the
			 * same. */
			if (event->seat == seat && event->number != 0 &&
			    event->number + FG_QUEUE_ENTRIES - 1 <= next && !settle(event) &&
			    event->number + FG_QUEUE_ENTRIES <= next)
				unfinished = event->number;
		}
		cu_unlock();
		if (unfinished != 0)
			fg_engine_wait((uint32_t)seat, unfinished, 0);
	} while (unfinished != 0);
}

static void share(struct CUevent_st *event)
{
	struct fg_shared_event *shared = &fg_state->shared_event[event->shared];
	uint64_t end = event->time_ns;

	if (event->number != 0 && !event->settled) {
		uint64_t estimate = fg_engine_estimate((uint32_t)event->seat, event->number);

		if (estimate > end)
			end = estimate;
	}
	__atomic_store_n(&shared->end_ns, end, __ATOMIC_RELEASE);
	__atomic_store_n(&shared->recorded, 1, __ATOMIC_RELEASE);
}

void cu_event_mark(struct CUevent_st *event, struct CUstream_st *stream)
{
	uint64_t number = cu_stream_number(stream), end;
	uint64_t now = event->flags & CU_EVENT_DISABLE_TIMING ? 0 : fg_now_ns();

	cu_lock();
	if (event->recorded && !event->settled)
		close_event(event);
	event->capture = NULL;
	event->seat = stream->context->seat;
	event->number = number;
	event->time_ns = stream->floor_ns > now ? stream->floor_ns : now;
	event->recorded = 1;
	event->settled = 0;
	if (number == 0 || fg_engine_is_done((uint32_t)event->seat, number, &end)) {
		/* It may have ended since `now` was read. */
		if (number != 0 && now != 0 && end > event->time_ns)
			event->time_ns = end;
		event->settled = 1;
	} else {
		open_event(event);
	}
	if (event->shared >= 0)
		share(event);
	cu_unlock();
}

void cu_event_hold(struct CUevent_st *event, struct CUstream_st *stream)
{
	uint64_t end;

	if (event->shared >= 0 && event->imported) {
		end = __atomic_load_n(&fg_state->shared_event[event->shared].end_ns, __ATOMIC_ACQUIRE);
		if (end > stream->floor_ns)
			stream->floor_ns = end;
		return;
	}
	if (!event->recorded || event->settled)
		return;
	if (event->seat == stream->context->seat) {
		/* One queue for both: later work comes later anyhow. */
		if (event->number > stream->number)
			stream->number = event->number;
		return;
	}
	end = fg_engine_estimate((uint32_t)event->seat, event->number);
	if (end > stream->floor_ns)
		stream->floor_ns = end;
}

int cu_event_is_done(struct CUevent_st *event)
{
	int done;

	if (event->imported)
		return !fg_state->shared_event[event->shared].recorded ||
		       fg_now_ns() >=
			   __atomic_load_n(&fg_state->shared_event[event->shared].end_ns, __ATOMIC_ACQUIRE);
	cu_lock();
	done = settle(event) && (!event->recorded || (event->flags & CU_EVENT_DISABLE_TIMING) != 0 ||
				 event->time_ns <= fg_now_ns());
	cu_unlock();
	return done;
}

/* ---- the API ------------------------------------------------------------------------------------------ */

CUresult CUDAAPI cuEventCreate(CUevent *phEvent, unsigned int Flags)
{
	CU_ENTER("phEvent=%p Flags=%u", (void *)phEvent, Flags);
	CU_CONTEXT(context);
	struct CUevent_st *event;

	CU_NEEDS(phEvent != NULL && (Flags & ~7u) == 0);
	CU_NEEDS((Flags & CU_EVENT_INTERPROCESS) == 0 || (Flags & CU_EVENT_DISABLE_TIMING) != 0);
	cu_lock();
	event = cu_object_make(CU_KIND_EVENT, sizeof *event);
	if (event != NULL) {
		event->flags = Flags;
		event->context = context;
		event->shared = -1;
	}
	cu_unlock();
	if (event == NULL)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*phEvent = event;
	return CUDA_SUCCESS;
}

static CUresult destroy(CUevent hEvent)
{
	if (!cu_is(hEvent, CU_KIND_EVENT))
		return CUDA_ERROR_INVALID_HANDLE;
	cu_lock();
	if (hEvent->recorded && !hEvent->settled)
		close_event(hEvent);
	if (hEvent->capture != NULL)
		cu_capture_place_free(hEvent->capture);
	if (hEvent->shared >= 0 && !hEvent->imported)
		__atomic_store_n(&fg_state->shared_event[hEvent->shared].in_use, 0, __ATOMIC_RELEASE);
	cu_object_end(hEvent);
	cu_unlock();
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventDestroy_v2(CUevent hEvent)
{
	CU_ENTER("event=%p", (void *)hEvent);
	return destroy(hEvent);
}

CUresult CUDAAPI cuEventDestroy(CUevent hEvent)
{
	CU_ENTER("event=%p", (void *)hEvent);
	return destroy(hEvent);
}

static CUresult record(const char *name, int per_thread, CUevent hEvent, CUstream hStream, unsigned int flags)
{
	CU_ENTER_AS(name, "event=%p stream=%p flags=%u", (void *)hEvent, (void *)hStream, flags);
	CU_STREAM(stream, context, hStream, per_thread);
	CU_NEEDS((flags & ~(unsigned int)CU_EVENT_RECORD_EXTERNAL) == 0);
	if (!cu_is(hEvent, CU_KIND_EVENT) || hEvent->context != context)
		return CUDA_ERROR_INVALID_HANDLE;
	if (stream->capture != NULL)
		return flags & CU_EVENT_RECORD_EXTERNAL ? cu_capture_record_node(stream, hEvent)
							: cu_capture_record(stream, hEvent);
	cu_event_mark(hEvent, stream);
	return CUDA_SUCCESS;
}

static CUresult record_plain(const char *name, int per_thread, CUevent hEvent, CUstream hStream)
{
	return record(name, per_thread, hEvent, hStream, 0);
}
CU_TWINS(cuEventRecord, cuEventRecord_ptsz, record_plain, (CUevent hEvent, CUstream hStream), hEvent, hStream)
CU_TWINS(cuEventRecordWithFlags, cuEventRecordWithFlags_ptsz, record,
	 (CUevent hEvent, CUstream hStream, unsigned int flags), hEvent, hStream, flags)

CUresult CUDAAPI cuEventQuery(CUevent hEvent)
{
	CU_ENTER("event=%p", (void *)hEvent);
	if (!cu_is(hEvent, CU_KIND_EVENT))
		return CUDA_ERROR_INVALID_HANDLE;
	CUresult trouble = cu_context_check(hEvent->context);

	if (trouble != CUDA_SUCCESS)
		return trouble;
	if (hEvent->capture != NULL)
		return CUDA_ERROR_CAPTURED_EVENT;
	return cu_event_is_done(hEvent) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult CUDAAPI cuEventSynchronize(CUevent hEvent)
{
	CU_ENTER("event=%p", (void *)hEvent);
	if (!cu_is(hEvent, CU_KIND_EVENT))
		return CUDA_ERROR_INVALID_HANDLE;
	CUresult trouble = cu_context_check(hEvent->context);
	int may_spin = (hEvent->flags & CU_EVENT_BLOCKING_SYNC) == 0;

	if (trouble != CUDA_SUCCESS)
		return trouble;
	CU_FORBIDDEN_IN_CAPTURE();
	if (hEvent->capture != NULL)
		return CUDA_ERROR_CAPTURED_EVENT;
	while (!cu_event_is_done(hEvent)) {
		uint64_t until =
		    hEvent->imported ? fg_state->shared_event[hEvent->shared].end_ns : hEvent->time_ns;

		if (!hEvent->imported && hEvent->number != 0 && !hEvent->settled) {
			uint64_t estimate = fg_engine_estimate((uint32_t)hEvent->seat, hEvent->number);

			until = estimate > until ? estimate : until;
		}
		fg_sleep_until(until, may_spin);
	}
	if (cu_pools_loose)
		cu_pools_settle(hEvent->context->device);
	return cu_context_check(hEvent->context);
}

static CUresult elapsed(float *milliseconds, CUevent start, CUevent end)
{
	CU_NEEDS(milliseconds != NULL);
	if (!cu_is(start, CU_KIND_EVENT) || !cu_is(end, CU_KIND_EVENT))
		return CUDA_ERROR_INVALID_HANDLE;
	if (!start->recorded || !end->recorded ||
	    ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) != 0 ||
	    start->context->device != end->context->device)
		return CUDA_ERROR_INVALID_HANDLE;
	if (!cu_event_is_done(start) || !cu_event_is_done(end))
		return CUDA_ERROR_NOT_READY;
	*milliseconds = (float)((double)((int64_t)(end->time_ns - start->time_ns)) / 1e6);
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventElapsedTime(float *pMilliseconds, CUevent hStart, CUevent hEnd)
{
	CU_ENTER("ms=%p start=%p end=%p", (void *)pMilliseconds, (void *)hStart, (void *)hEnd);
	return elapsed(pMilliseconds, hStart, hEnd);
}

CUresult CUDAAPI cuEventElapsedTime_v2(float *pMilliseconds, CUevent hStart, CUevent hEnd)
{
	CU_ENTER("ms=%p start=%p end=%p", (void *)pMilliseconds, (void *)hStart, (void *)hEnd);
	return elapsed(pMilliseconds, hStart, hEnd);
}
