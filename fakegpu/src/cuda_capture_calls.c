/* SPDX-License-Identifier: Apache-2.0
 *
 * What each captured call becomes in the graph.
 */
#include "cuda_capture.h"
#include "cuda_graph.h"
#include "cuda_mempool.h"

CUresult cu_capture_add(struct CUstream_st *stream, struct cu_node_params *params, CUgraphNode *made)
{
	CUresult result;
	struct cu_capture_place *place = cu_capture_of(stream, &result);

	if (place == NULL)
		return result;
	cu_lock();
	result = cu_graph_add(place->capture->graph, place->after, NULL, place->count, params, made);
	if (result == CUDA_SUCCESS)
		result = cu_capture_advance(place, *made);
	cu_unlock();
	return result;
}

CUresult cu_capture_add_kernel(struct CUstream_st *stream, const CUDA_KERNEL_NODE_PARAMS *kernel)
{
	struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_KERNEL, .u.kernel = *kernel};
	CUgraphNode made;

	return cu_capture_add(stream, &params, &made);
}

CUresult cu_capture_add_host(struct CUstream_st *stream, CUhostFn function, void *data)
{
	struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_HOST, .u.host = {function, data}};
	CUgraphNode made;

	return cu_capture_add(stream, &params, &made);
}

CUresult cu_capture_add_copy(struct CUstream_st *stream, const CUDA_MEMCPY3D *copy)
{
	struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_MEMCPY,
					.u.copy = {*copy, stream->context}};
	CUgraphNode made;

	return cu_capture_add(stream, &params, &made);
}

CUresult cu_capture_add_fill(struct CUstream_st *stream, const CUDA_MEMSET_NODE_PARAMS *fill)
{
	struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_MEMSET,
					.u.fill = {*fill, stream->context}};
	CUgraphNode made;

	return cu_capture_add(stream, &params, &made);
}

CUresult cu_capture_record_node(struct CUstream_st *stream, struct CUevent_st *event)
{
	struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_EVENT_RECORD, .u.event = event};
	CUgraphNode made;

	return cu_capture_add(stream, &params, &made);
}

CUresult cu_capture_add_alloc(struct CUstream_st *stream, size_t size, struct cu_device *device,
			      CUdeviceptr *address)
{
	struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC};
	CUgraphNode made = NULL;
	CUresult result;

	params.u.memory.params.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
	params.u.memory.params.poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	params.u.memory.params.poolProps.location.id = device->ordinal;
	params.u.memory.params.bytesize = size;
	result = cu_capture_add(stream, &params, &made);
	if (result == CUDA_SUCCESS && made != NULL)
		*address = made->params.u.memory.params.dptr;
	return result;
}

CUresult cu_capture_add_free(struct CUstream_st *stream, CUdeviceptr address)
{
	struct cu_node_params params = {.type = CU_GRAPH_NODE_TYPE_MEM_FREE, .u.freed = address};
	CUgraphNode made;

	return cu_capture_add(stream, &params, &made);
}
