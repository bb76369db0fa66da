/* SPDX-License-Identifier: Apache-2.0
 *
 * Stream-ordered memory, out of a device's pool or one of the program's own, and the calls after which a pool
 * may be smaller. A call on a stream that is being captured allocates nothing: it adds a node to a graph.
 */
#include "charge.h"
#include "place.h"
#include "pool.h"
#include "resolve.h"
#include "wait.h"

static bool capturing(CUstream stream)
{
	int status = 0;
	return HAS(cuStreamIsCapturing) && REAL(cuStreamIsCapturing)(stream, &status) == CUDA_SUCCESS &&
	       status != 0;
}

/* CUDA_SUCCESS: call the driver. */
static CUresult begin(struct aq_pool_request *request, CUmemoryPool handle, size_t bytes, CUstream stream)
{
	struct aq_place place;
	*request = (struct aq_pool_request){NULL, 0, 0};
	if (bytes == 0)
		return CUDA_SUCCESS;
	enum aq_verdict verdict = aq_place_stream(stream, &place);
	if (verdict == AQ_REFUSE)
		return CUDA_ERROR_NOT_PERMITTED;
	if (verdict == AQ_PASS || capturing(stream) ||
	    (handle == NULL && REAL(cuDeviceGetMemPool)(&handle, place.ordinal) != CUDA_SUCCESS))
		return CUDA_SUCCESS;
	struct aq_pool *pool = aq_pool_find(handle, place.ordinal);
	if (pool == NULL)
		return CUDA_SUCCESS;
	return aq_pool_begin(request, pool, aq_units_of(bytes)) == 0 ? CUDA_SUCCESS
								     : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult end(struct aq_pool_request *request, CUresult result, const CUdeviceptr *address,
		    CUstream stream, __typeof__(&hook_cuMemFreeAsync) free_again)
{
	if (request->pool == NULL)
		return result;
	/* The card itself is full: pools cannot move to managed memory. */
	if (result == CUDA_ERROR_OUT_OF_MEMORY)
		aq_refused((unsigned)request->pool->card, AQ_REFUSED_ASYNC);
	if (aq_pool_end(request) == 0 || result != CUDA_SUCCESS)
		return result;
	/* The pool grew by more than was foreseen, and past the limit. */
	free_again(*address, stream);
	REAL(cuMemPoolTrimTo)(request->pool->handle, 0);
	aq_pool_sync(request->pool);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

/* The driver's answer, asked again while others fill the card and the program would rather wait. */
#define ASK(request, result, call) \
	do                         \
		result = call;     \
	while (full_for_now(&request, result, &wait))

static bool full_for_now(const struct aq_pool_request *request, CUresult result, struct aq_wait *wait)
{
	return __builtin_expect(result == CUDA_ERROR_OUT_OF_MEMORY, 0) && request->pool &&
	       aq_wait_more((unsigned)request->pool->card, wait);
}

HOOK(CUresult, cuMemAllocAsync, (CUdeviceptr * address, size_t bytes, CUstream stream))
{
	struct aq_pool_request request;
	CUresult result = begin(&request, NULL, bytes, stream);
	if (result != CUDA_SUCCESS)
		return result;
	struct aq_wait wait = {0};
	ASK(request, result, REAL(cuMemAllocAsync)(address, bytes, stream));
	return end(&request, result, address, stream, REAL(cuMemFreeAsync));
}

HOOK(CUresult, cuMemAllocAsync_ptsz, (CUdeviceptr * address, size_t bytes, CUstream stream))
{
	struct aq_pool_request request;
	CUresult result = begin(&request, NULL, bytes, stream);
	if (result != CUDA_SUCCESS)
		return result;
	struct aq_wait wait = {0};
	ASK(request, result, REAL(cuMemAllocAsync_ptsz)(address, bytes, stream));
	return end(&request, result, address, stream, REAL(cuMemFreeAsync_ptsz));
}

HOOK(CUresult, cuMemAllocFromPoolAsync,
     (CUdeviceptr * address, size_t bytes, CUmemoryPool pool, CUstream stream))
{
	struct aq_pool_request request = {NULL, 0, 0};
	CUresult result = pool ? begin(&request, pool, bytes, stream) : CUDA_SUCCESS;
	if (result != CUDA_SUCCESS)
		return result;
	struct aq_wait wait = {0};
	ASK(request, result, REAL(cuMemAllocFromPoolAsync)(address, bytes, pool, stream));
	return end(&request, result, address, stream, REAL(cuMemFreeAsync));
}

HOOK(CUresult, cuMemAllocFromPoolAsync_ptsz,
     (CUdeviceptr * address, size_t bytes, CUmemoryPool pool, CUstream stream))
{
	struct aq_pool_request request = {NULL, 0, 0};
	CUresult result = pool ? begin(&request, pool, bytes, stream) : CUDA_SUCCESS;
	if (result != CUDA_SUCCESS)
		return result;
	struct aq_wait wait = {0};
	ASK(request, result, REAL(cuMemAllocFromPoolAsync_ptsz)(address, bytes, pool, stream));
	return end(&request, result, address, stream, REAL(cuMemFreeAsync_ptsz));
}

/* ---- pools as such ------------------------------------------------------------------------------ */

HOOK(CUresult, cuMemPoolCreate, (CUmemoryPool * pool, const CUmemPoolProps *properties))
{
	struct aq_place place;
	bool device = properties && properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
	if (device && aq_place_device(properties->location.id, &place) == AQ_REFUSE)
		return CUDA_ERROR_NOT_PERMITTED;
	CUresult result = REAL(cuMemPoolCreate)(pool, properties);
	if (result == CUDA_SUCCESS && device && aq_active())
		aq_pool_enter(*pool, properties->location.id);
	return result;
}

HOOK(CUresult, cuMemPoolDestroy, (CUmemoryPool handle))
{
	struct aq_pool *pool = aq_pool_known(handle);
	/* Destroyed once already, as far as the program knows. */
	if (pool && pool->ending)
		return CUDA_ERROR_INVALID_VALUE;
	return pool ? aq_pool_destroy(pool) : REAL(cuMemPoolDestroy)(handle);
}

HOOK(CUresult, cuMemPoolTrimTo, (CUmemoryPool handle, size_t keep))
{
	CUresult result = REAL(cuMemPoolTrimTo)(handle, keep);
	struct aq_pool *pool = aq_pool_known(handle);
	if (result == CUDA_SUCCESS && pool)
		aq_pool_sync(pool);
	return result;
}

/* ---- points at which pools give back ------------------------------------------------------------ */

static CUresult synchronised(CUresult result)
{
	if (result == CUDA_SUCCESS)
		aq_pools_freed();
	return result;
}

HOOK(CUresult, cuStreamSynchronize, (CUstream stream))
{
	return synchronised(REAL(cuStreamSynchronize)(stream));
}

HOOK(CUresult, cuStreamSynchronize_ptsz, (CUstream stream))
{
	return synchronised(REAL(cuStreamSynchronize_ptsz)(stream));
}

HOOK(CUresult, cuEventSynchronize, (CUevent event))
{
	return synchronised(REAL(cuEventSynchronize)(event));
}

HOOK(CUresult, cuCtxSynchronize, (void))
{
	return synchronised(REAL(cuCtxSynchronize)());
}

HOOK(CUresult, cuCtxSynchronize_v2, (CUcontext context))
{
	return synchronised(REAL(cuCtxSynchronize_v2)(context));
}
