/* SPDX-License-Identifier: Apache-2.0
 *
 * Streams. See cuda_time.h.
 */
#include "cuda_memory.h"
#include "cuda_mempool.h"
#include "cuda_parts.h"
#include "cuda_time.h"

/* ---- handles ------------------------------------------------------------------------------------------ */

static struct CUstream_st *thread_stream(struct CUctx_st *context)
{
	uint64_t thread = cu_thread()->id;
	struct CUstream_st *stream;

	cu_lock();
	for (stream = context->streams; stream != NULL; stream = stream->next)
		if (stream->thread == thread)
			break;
	cu_unlock();
	if (stream != NULL)
		return stream;
	/* Like a stream made with no flags: it waits for the legacy stream and the other way round. */
	if (cu_stream_make(context, CU_STREAM_DEFAULT, 0, &stream) != CUDA_SUCCESS)
		return NULL;
	stream->thread = thread;
	return stream;
}

struct CUstream_st *cu_stream_of(CUstream handle, int per_thread, struct CUctx_st *context)
{
	if (handle == NULL)
		return per_thread ? thread_stream(context) : context->legacy;
	if (handle == CU_STREAM_LEGACY)
		return context->legacy;
	if (handle == CU_STREAM_PER_THREAD)
		return thread_stream(context);
	return cu_is(handle, CU_KIND_STREAM) ? handle : NULL;
}

CUresult cu_stream_trouble(CUstream handle)
{
	(void)handle;
	return CUDA_ERROR_INVALID_HANDLE;
}

CUresult cu_stream_make(struct CUctx_st *context, unsigned int flags, int priority, struct CUstream_st **made)
{
	struct CUstream_st *stream;

	cu_lock();
	stream = cu_object_make(CU_KIND_STREAM, sizeof *stream);
	if (stream != NULL) {
		stream->flags = flags;
		stream->context = context;
		stream->priority = priority;
		stream->id = cu_next_id();
		stream->next = context->streams;
		context->streams = stream;
	}
	cu_unlock();
	*made = stream;
	return stream != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void cu_stream_end(struct CUstream_st *stream)
{
	for (struct CUstream_st **link = &stream->context->streams; *link != NULL; link = &(*link)->next)
		if (*link == stream) {
			*link = stream->next;
			break;
		}
	if (stream->capture != NULL)
		cu_capture_place_free(stream->capture);
	cu_object_end(stream);
}

/* ---- order and time ----------------------------------------------------------------------------------- */

static void raise_to(uint64_t *word, uint64_t number)
{
	uint64_t old = __atomic_load_n(word, __ATOMIC_RELAXED);

	while (old < number &&
	       !__atomic_compare_exchange_n(word, &old, number, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
		;
}

uint64_t cu_stream_number(const struct CUstream_st *stream)
{
	const struct CUctx_st *context = stream->context;
	uint64_t number = __atomic_load_n(&stream->number, __ATOMIC_RELAXED);

	/* The legacy stream stands behind everything in blocking streams, and they behind it. */
	if (stream->is_legacy)
		return __atomic_load_n(&context->blocking_number, __ATOMIC_RELAXED);
	if ((stream->flags & CU_STREAM_NON_BLOCKING) == 0 && context->legacy->number > number)
		return context->legacy->number;
	return number;
}

void cu_stream_push(struct CUstream_st *stream, uint64_t work_ns)
{
	struct CUctx_st *context = stream->context;
	uint64_t number;

	if (work_ns == 0) {
		/* Nothing to run, but done only after what the stream waits for. */
		if (stream->is_legacy)
			raise_to(&stream->number, context->blocking_number);
		return;
	}
	if (__builtin_expect(cu_events_open != NULL, 0))
		cu_events_settle(context->seat, fg_seat_at((uint32_t)context->seat)->head + 1);
	number = fg_engine_launch((uint32_t)context->seat, work_ns, stream->floor_ns);
	raise_to(&stream->number, number);
	raise_to(&context->last_number, number);
	if (stream->is_legacy || (stream->flags & CU_STREAM_NON_BLOCKING) == 0)
		raise_to(&context->blocking_number, number);
}

void cu_stream_copy(struct CUstream_st *stream, uint64_t bytes)
{
	uint64_t rate = fg_state->driver.copy_bytes_per_second;

	if (__builtin_expect(rate != 0, 0) && bytes > 0)
		cu_stream_push(stream, (uint64_t)((double)bytes / (double)rate * 1e9) + 1);
}

int cu_stream_is_done(struct CUstream_st *stream)
{
	uint64_t number = cu_stream_number(stream), end;

	if (number != 0 && !fg_engine_is_done((uint32_t)stream->context->seat, number, &end))
		return 0;
	if (stream->floor_ns != 0 && fg_now_ns() < stream->floor_ns)
		return 0;
	if (stream->callbacks > 0)
		cu_callbacks_run();
	return stream->callbacks == 0;
}

void cu_stream_wait(struct CUstream_st *stream)
{
	struct CUctx_st *context = stream->context;
	int may_spin = cu_may_spin(context);

	do {
		uint64_t number = cu_stream_number(stream);

		if (number != 0)
			fg_engine_wait((uint32_t)context->seat, number, may_spin);
		if (stream->floor_ns != 0)
			fg_sleep_until(stream->floor_ns, may_spin);
		if (stream->callbacks > 0)
			cu_callbacks_run();
	} while (stream->callbacks > 0);
	if (cu_pools_loose)
		cu_pools_settle(context->device);
}

void cu_context_wait(struct CUctx_st *context)
{
	int may_spin = cu_may_spin(context);

	if (context->last_number != 0)
		fg_engine_wait((uint32_t)context->seat, context->last_number, may_spin);
	for (;;) {
		uint64_t floor_ns = 0;
		uint32_t callbacks = 0;

		/* Other threads make and end streams meanwhile. */
		cu_lock();
		for (const struct CUstream_st *stream = context->streams; stream != NULL;
		     stream = stream->next) {
			floor_ns = stream->floor_ns > floor_ns ? stream->floor_ns : floor_ns;
			callbacks += stream->callbacks;
		}
		cu_unlock();
		if (floor_ns != 0)
			fg_sleep_until(floor_ns, may_spin);
		if (callbacks == 0)
			break;
		cu_callbacks_run();
	}
	if (cu_pools_loose)
		cu_pools_settle(context->device);
}

/* ---- the API ------------------------------------------------------------------------------------------ */

static CUresult create(CUstream *phStream, unsigned int flags, int priority)
{
	CU_CONTEXT(context);
	struct CUstream_st *stream;
	CUresult result;

	CU_NEEDS(phStream != NULL && (flags & ~(unsigned int)CU_STREAM_NON_BLOCKING) == 0);
	priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
	result = cu_stream_make(context, flags, priority, &stream);
	if (result == CUDA_SUCCESS)
		*phStream = stream;
	return result;
}

CUresult CUDAAPI cuStreamCreate(CUstream *phStream, unsigned int Flags)
{
	CU_ENTER("phStream=%p Flags=%u", (void *)phStream, Flags);
	return create(phStream, Flags, 0);
}

CUresult CUDAAPI cuStreamCreateWithPriority(CUstream *phStream, unsigned int flags, int priority)
{
	CU_ENTER("phStream=%p flags=%u priority=%d", (void *)phStream, flags, priority);
	return create(phStream, flags, priority);
}

static CUresult destroy(CUstream hStream)
{
	if (hStream == NULL || hStream == CU_STREAM_LEGACY || hStream == CU_STREAM_PER_THREAD ||
	    !cu_is(hStream, CU_KIND_STREAM) || hStream->is_legacy || hStream->thread != 0)
		return CUDA_ERROR_INVALID_HANDLE;
	if (hStream->capture != NULL)
		cu_capture_break(hStream, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
	/* What it has taken in is still done; callbacks need it to the end. */
	if (hStream->callbacks > 0)
		cu_stream_wait(hStream);
	cu_lock();
	cu_stream_end(hStream);
	cu_unlock();
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamDestroy_v2(CUstream hStream)
{
	CU_ENTER("stream=%p", (void *)hStream);
	return destroy(hStream);
}

CUresult CUDAAPI cuStreamDestroy(CUstream hStream)
{
	CU_ENTER("stream=%p", (void *)hStream);
	return destroy(hStream);
}

static CUresult synchronize(const char *name, int per_thread, CUstream hStream)
{
	CU_ENTER_AS(name, "stream=%p", (void *)hStream);
	CU_STREAM(stream, context, hStream, per_thread);
	CU_FORBIDDEN_IN_CAPTURE();
	if (stream->capture != NULL)
		return cu_capture_break(stream, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	if (stream->is_legacy)
		CU_UNSAFE_IN_CAPTURE(context);
	cu_stream_wait(stream);
	return cu_context_check(context);
}
CU_TWINS(cuStreamSynchronize, cuStreamSynchronize_ptsz, synchronize, (CUstream hStream), hStream)

static CUresult query(const char *name, int per_thread, CUstream hStream)
{
	CU_ENTER_AS(name, "stream=%p", (void *)hStream);
	CU_STREAM(stream, context, hStream, per_thread);
	if (stream->capture != NULL)
		return cu_capture_break(stream, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	return cu_stream_is_done(stream) && context != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
CU_TWINS(cuStreamQuery, cuStreamQuery_ptsz, query, (CUstream hStream), hStream)

static CUresult wait_event(const char *name, int per_thread, CUstream hStream, CUevent hEvent,
			   unsigned int flags)
{
	CU_ENTER_AS(name, "stream=%p event=%p flags=%u", (void *)hStream, (void *)hEvent, flags);
	CU_STREAM(stream, context, hStream, per_thread);
	if (!cu_is(hEvent, CU_KIND_EVENT) || context == NULL)
		return CUDA_ERROR_INVALID_HANDLE;
	if (stream->capture != NULL || hEvent->capture != NULL)
		return cu_capture_wait(stream, hEvent);
	cu_event_hold(hEvent, stream);
	return CUDA_SUCCESS;
}
CU_TWINS(cuStreamWaitEvent, cuStreamWaitEvent_ptsz, wait_event,
	 (CUstream hStream, CUevent hEvent, unsigned int Flags), hStream, hEvent, Flags)
