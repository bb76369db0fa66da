/* SPDX-License-Identifier: Apache-2.0
 *
 * Stream capture: beginning, spreading, breaking, ending. See cuda_capture.h.
 */
#include "cuda_capture.h"

#include <stdlib.h>
#include <string.h>

#include "cuda_graph.h"
#include "cuda_parts.h"
#include "cuda_time.h"

uint32_t cu_captures_active;
static struct cu_capture *captures;

void cu_capture_forget(void)
{
	captures = NULL;
	cu_captures_active = 0;
}

/* ---- places ------------------------------------------------------------------------------------------- */

void cu_capture_place_free(struct cu_capture_place *place)
{
	free(place->after);
	free(place);
}

static struct cu_capture_place *make_place(struct cu_capture *capture)
{
	struct cu_capture_place *place = calloc(1, sizeof *place);

	if (place != NULL)
		place->capture = capture;
	return place;
}

static CUresult put_after(struct cu_capture_place *place, CUgraphNode node)
{
	for (size_t i = 0; i < place->count; i++)
		if (place->after[i] == node)
			return CUDA_SUCCESS;
	if (place->count == place->room) {
		size_t room = place->room > 0 ? 2 * place->room : 4;
		CUgraphNode *more = realloc(place->after, room * sizeof *more);

		if (more == NULL)
			return CUDA_ERROR_OUT_OF_MEMORY;
		place->after = more;
		place->room = room;
	}
	place->after[place->count++] = node;
	return CUDA_SUCCESS;
}

static CUresult merge(struct cu_capture_place *place, const struct cu_capture_place *from)
{
	CUresult result = CUDA_SUCCESS;

	for (size_t i = 0; i < from->count && result == CUDA_SUCCESS; i++)
		result = put_after(place, from->after[i]);
	return result;
}

CUresult cu_capture_advance(struct cu_capture_place *place, CUgraphNode node)
{
	place->count = 0;
	return put_after(place, node);
}

/* ---- breaking ----------------------------------------------------------------------------------------- */

CUresult cu_capture_break(struct CUstream_st *stream, CUresult error)
{
	if (stream->capture != NULL)
		stream->capture->capture->invalid = 1;
	return error;
}

/* A call that real captures refuse: those in global mode, wherever they run, and this thread's own. */
CUresult cu_capture_unsafe(void)
{
	const struct cu_thread *thread = cu_thread();
	CUresult result = CUDA_SUCCESS;

	if (thread->capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
		return CUDA_SUCCESS;
	cu_lock();
	for (struct cu_capture *capture = captures; capture != NULL; capture = capture->next)
		if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED &&
		    (capture->thread == thread->id ||
		     (capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
		      thread->capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL))) {
			capture->invalid = 1;
			result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
		}
	cu_unlock();
	return result;
}

CUresult cu_capture_forbidden(void)
{
	if (!fg_control_now()->forbid_in_capture)
		return CUDA_SUCCESS;
	cu_lock();
	for (struct cu_capture *capture = captures; capture != NULL; capture = capture->next)
		capture->invalid = 1;
	cu_unlock();
	return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

struct cu_capture_place *cu_capture_of(struct CUstream_st *stream, CUresult *error)
{
	*error = stream->capture->capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
	return *error == CUDA_SUCCESS ? stream->capture : NULL;
}

/* ---- beginning and ending ----------------------------------------------------------------------------- */

static CUresult begin(struct CUstream_st *stream, CUstreamCaptureMode mode, CUgraph graph,
		      const CUgraphNode *after, size_t count)
{
	struct cu_capture *capture;
	struct cu_capture_place *place;
	CUresult result = CUDA_SUCCESS;

	CU_NEEDS(mode <= CU_STREAM_CAPTURE_MODE_RELAXED);
	if (stream->is_legacy)
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	if (stream->capture != NULL)
		return CUDA_ERROR_ILLEGAL_STATE;
	capture = calloc(1, sizeof *capture);
	place = capture != NULL ? make_place(capture) : NULL;
	cu_lock();
	if (place == NULL || (graph == NULL && (capture->graph = cu_graph_make()) == NULL)) {
		cu_unlock();
		free(place);
		free(capture);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	if (graph != NULL) {
		capture->graph = graph;
		capture->graph_given = 1;
	}
	for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++)
		result = cu_is(after[i], CU_KIND_NODE) && after[i]->graph == graph
			     ? put_after(place, after[i])
			     : CUDA_ERROR_INVALID_VALUE;
	if (result != CUDA_SUCCESS) {
		cu_unlock();
		cu_capture_place_free(place);
		free(capture);
		return result;
	}
	capture->origin = stream;
	capture->id = cu_next_id();
	capture->thread = cu_thread()->id;
	capture->mode = mode;
	capture->next = captures;
	captures = capture;
	stream->capture = place;
	__atomic_fetch_add(&cu_captures_active, 1, __ATOMIC_RELEASE);
	cu_unlock();
	return CUDA_SUCCESS;
}

static CUresult begin_first(const char *name, int per_thread, CUstream hStream)
{
	CU_ENTER_AS(name, "stream=%p", (void *)hStream);
	CU_STREAM(stream, context, hStream, per_thread);
	return context != NULL ? begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL, NULL, NULL, 0)
			       : CUDA_ERROR_INVALID_CONTEXT;
}
CU_TWINS(cuStreamBeginCapture, cuStreamBeginCapture_ptsz, begin_first, (CUstream hStream), hStream)

static CUresult begin_mode(const char *name, int per_thread, CUstream hStream, CUstreamCaptureMode mode)
{
	CU_ENTER_AS(name, "stream=%p mode=%d", (void *)hStream, (int)mode);
	CU_STREAM(stream, context, hStream, per_thread);
	return context != NULL ? begin(stream, mode, NULL, NULL, 0) : CUDA_ERROR_INVALID_CONTEXT;
}
CU_TWINS(cuStreamBeginCapture_v2, cuStreamBeginCapture_v2_ptsz, begin_mode,
	 (CUstream hStream, CUstreamCaptureMode mode), hStream, mode)

static CUresult begin_graph(const char *name, int per_thread, CUstream hStream, CUgraph hGraph,
			    const CUgraphNode *dependencies, size_t count, CUstreamCaptureMode mode)
{
	CU_ENTER_AS(name, "stream=%p graph=%p mode=%d", (void *)hStream, (void *)hGraph, (int)mode);
	CU_STREAM(stream, context, hStream, per_thread);
	CU_NEEDS(cu_is(hGraph, CU_KIND_GRAPH) && (count == 0 || dependencies != NULL) && context != NULL);
	return begin(stream, mode, hGraph, dependencies, count);
}
CU_TWINS(cuStreamBeginCaptureToGraph, cuStreamBeginCaptureToGraph_ptsz, begin_graph,
	 (CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies,
	  const CUgraphEdgeData *dependencyData, size_t numDependencies, CUstreamCaptureMode mode),
	 hStream, hGraph, dependencies, dependencyData == NULL || numDependencies > 0 ? numDependencies : 0,
	 mode)

/* Streams that joined and whose last node nothing depends on were not joined back. */
static int has_unjoined(const struct cu_capture *capture)
{
	for (const struct CUctx_st *context = cu_contexts; context != NULL; context = context->next)
		for (const struct CUstream_st *stream = context->streams; stream != NULL;
		     stream = stream->next) {
			if (stream->capture == NULL || stream->capture->capture != capture ||
			    stream == capture->origin)
				continue;
			for (size_t i = 0; i < stream->capture->count; i++) {
				int used = 0;

				for (const struct CUgraphNode_st *node = capture->graph->first; node != NULL;
				     node = node->next)
					for (size_t j = 0; j < node->after_count; j++)
						used |= node->after[j] == stream->capture->after[i];
				for (size_t j = 0; j < capture->origin->capture->count; j++)
					used |=
					    capture->origin->capture->after[j] == stream->capture->after[i];
				if (!used)
					return 1;
			}
		}
	return 0;
}

static void leave_all(const struct cu_capture *capture)
{
	for (struct CUctx_st *context = cu_contexts; context != NULL; context = context->next)
		for (struct CUstream_st *stream = context->streams; stream != NULL; stream = stream->next)
			if (stream->capture != NULL && stream->capture->capture == capture) {
				cu_capture_place_free(stream->capture);
				stream->capture = NULL;
			}
}

static CUresult end(const char *name, int per_thread, CUstream hStream, CUgraph *phGraph)
{
	CU_ENTER_AS(name, "stream=%p graph=%p", (void *)hStream, (void *)phGraph);
	CU_STREAM(stream, context, hStream, per_thread);
	struct cu_capture *capture;
	CUresult result = CUDA_SUCCESS;

	if (stream->capture == NULL || context == NULL)
		return CUDA_ERROR_ILLEGAL_STATE;
	capture = stream->capture->capture;
	if (capture->origin != stream)
		return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
	if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != cu_thread()->id)
		return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
	cu_lock();
	if (capture->invalid)
		result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	else if (has_unjoined(capture))
		result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
	leave_all(capture);
	for (struct cu_capture **link = &captures; *link != NULL; link = &(*link)->next)
		if (*link == capture) {
			*link = capture->next;
			break;
		}
	__atomic_fetch_sub(&cu_captures_active, 1, __ATOMIC_RELEASE);
	if (result != CUDA_SUCCESS && !capture->graph_given) {
		cu_graph_end(capture->graph);
		capture->graph = NULL;
	}
	cu_unlock();
	if (phGraph != NULL)
		*phGraph = result == CUDA_SUCCESS ? capture->graph : NULL;
	free(capture);
	return result;
}
CU_TWINS(cuStreamEndCapture, cuStreamEndCapture_ptsz, end, (CUstream hStream, CUgraph *phGraph), hStream,
	 phGraph)

/* ---- events carry a capture from stream to stream ----------------------------------------------------- */

/* Where a capture stands that is still under way; NULL otherwise. Needs cu_lock. */
static struct cu_capture *alive(const struct CUevent_st *event)
{
	for (struct cu_capture *capture = captures; capture != NULL; capture = capture->next)
		if (capture == event->capture->capture && capture->id == event->capture_id)
			return capture;
	return NULL;
}

CUresult cu_capture_record(struct CUstream_st *stream, struct CUevent_st *event)
{
	CUresult error;
	struct cu_capture_place *place = cu_capture_of(stream, &error), *copy;

	if (place == NULL)
		return error;
	copy = make_place(place->capture);
	if (copy == NULL || merge(copy, place) != CUDA_SUCCESS)
		return CUDA_ERROR_OUT_OF_MEMORY;
	cu_lock();
	if (event->capture != NULL)
		cu_capture_place_free(event->capture);
	event->capture = copy;
	event->capture_id = place->capture->id;
	cu_unlock();
	return CUDA_SUCCESS;
}

CUresult cu_capture_wait(struct CUstream_st *stream, struct CUevent_st *event)
{
	struct cu_capture *capture;
	CUresult result = CUDA_SUCCESS;

	if (event->capture == NULL) {
		/* An event from outside: work that is not in the graph. */
		if (!event->recorded)
			return CUDA_SUCCESS;
		return cu_capture_break(stream, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
	}
	cu_lock();
	capture = alive(event);
	if (capture == NULL)
		result = CUDA_ERROR_CAPTURED_EVENT;
	else if (stream->is_legacy)
		result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
	else if (stream->capture != NULL && stream->capture->capture != capture)
		result = CUDA_ERROR_STREAM_CAPTURE_MERGE;
	else if (stream->capture == NULL && (stream->capture = make_place(capture)) == NULL)
		result = CUDA_ERROR_OUT_OF_MEMORY;
	if (result == CUDA_SUCCESS)
		result = merge(stream->capture, event->capture);
	else if (capture != NULL)
		capture->invalid = 1;
	cu_unlock();
	return result;
}

/* ---- questions ---------------------------------------------------------------------------------------- */

static CUstreamCaptureStatus status_of(const struct CUstream_st *stream)
{
	if (stream->capture == NULL)
		return CU_STREAM_CAPTURE_STATUS_NONE;
	return stream->capture->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
						 : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

static CUresult is_capturing(const char *name, int per_thread, CUstream hStream,
			     CUstreamCaptureStatus *status)
{
	CU_ENTER_AS(name, "stream=%p status=%p", (void *)hStream, (void *)status);
	CU_STREAM(stream, context, hStream, per_thread);
	CU_NEEDS(status != NULL && context != NULL);
	if (stream->is_legacy && cu_captures_active != 0)
		return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
	*status = status_of(stream);
	return CUDA_SUCCESS;
}
CU_TWINS(cuStreamIsCapturing, cuStreamIsCapturing_ptsz, is_capturing,
	 (CUstream hStream, CUstreamCaptureStatus *captureStatus), hStream, captureStatus)

static CUresult info(const char *name, int per_thread, CUstream hStream, CUstreamCaptureStatus *status,
		     cuuint64_t *id, CUgraph *graph, const CUgraphNode **after, const CUgraphEdgeData **edges,
		     size_t *count)
{
	CU_ENTER_AS(name, "stream=%p status=%p", (void *)hStream, (void *)status);
	CU_STREAM(stream, context, hStream, per_thread);
	CU_NEEDS(status != NULL && context != NULL);
	if (stream->is_legacy && cu_captures_active != 0)
		return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
	*status = status_of(stream);
	if (*status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
		return CUDA_SUCCESS;
	if (id != NULL)
		*id = stream->capture->capture->id;
	if (graph != NULL)
		*graph = stream->capture->capture->graph;
	if (after != NULL)
		*after = stream->capture->after;
	if (edges != NULL)
		*edges = NULL; /* no edge of a capture has data */
	if (count != NULL)
		*count = stream->capture->count;
	return CUDA_SUCCESS;
}
CU_TWINS(cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_ptsz, info,
	 (CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out), hStream,
	 captureStatus_out, id_out, NULL, NULL, NULL, NULL)
CU_TWINS(cuStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo_v2_ptsz, info,
	 (CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out, CUgraph *graph_out,
	  const CUgraphNode **dependencies_out, size_t *numDependencies_out),
	 hStream, captureStatus_out, id_out, graph_out, dependencies_out, NULL, numDependencies_out)
CU_TWINS(cuStreamGetCaptureInfo_v3, cuStreamGetCaptureInfo_v3_ptsz, info,
	 (CUstream hStream, CUstreamCaptureStatus *captureStatus_out, cuuint64_t *id_out, CUgraph *graph_out,
	  const CUgraphNode **dependencies_out, const CUgraphEdgeData **edgeData_out,
	  size_t *numDependencies_out),
	 hStream, captureStatus_out, id_out, graph_out, dependencies_out, edgeData_out, numDependencies_out)

static CUresult update(const char *name, int per_thread, CUstream hStream, CUgraphNode *dependencies,
		       size_t count, unsigned int flags)
{
	CU_ENTER_AS(name, "stream=%p n=%zu flags=%u", (void *)hStream, count, flags);
	CU_STREAM(stream, context, hStream, per_thread);
	CUresult result = CUDA_SUCCESS;

	CU_NEEDS(flags <= CU_STREAM_SET_CAPTURE_DEPENDENCIES && (count == 0 || dependencies != NULL) &&
		 context != NULL);
	if (stream->capture == NULL)
		return CUDA_ERROR_ILLEGAL_STATE;
	for (size_t i = 0; i < count; i++)
		CU_NEEDS(cu_is(dependencies[i], CU_KIND_NODE) &&
			 dependencies[i]->graph == stream->capture->capture->graph);
	cu_lock();
	if (flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES)
		stream->capture->count = 0;
	for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++)
		result = put_after(stream->capture, dependencies[i]);
	cu_unlock();
	return result;
}
CU_TWINS(cuStreamUpdateCaptureDependencies, cuStreamUpdateCaptureDependencies_ptsz, update,
	 (CUstream hStream, CUgraphNode *dependencies, size_t numDependencies, unsigned int flags), hStream,
	 dependencies, numDependencies, flags)
CU_TWINS(cuStreamUpdateCaptureDependencies_v2, cuStreamUpdateCaptureDependencies_v2_ptsz, update,
	 (CUstream hStream, CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData,
	  size_t numDependencies, unsigned int flags),
	 hStream, dependencies, dependencyData == NULL || numDependencies > 0 ? numDependencies : 0, flags)

CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
	CU_ENTER("mode=%p", (void *)mode);
	struct cu_thread *thread = cu_thread();

	CU_NEEDS(mode != NULL && *mode <= CU_STREAM_CAPTURE_MODE_RELAXED);
	CUstreamCaptureMode before = thread->capture_mode;

	thread->capture_mode = *mode;
	*mode = before;
	return CUDA_SUCCESS;
}
