/* SPDX-License-Identifier: Apache-2.0
 *
 * Linear copies, in all their names. See cuda_copy.h.
 */
#include "cuda_copy.h"

#include "cuda_graph.h"
#include "cuda_memory.h"
#include "cuda_parts.h"

static CUmemorytype memory_type(enum cu_end end)
{
	return end == CU_END_DEVICE ? CU_MEMORYTYPE_DEVICE
	       : end == CU_END_HOST ? CU_MEMORYTYPE_HOST
				    : CU_MEMORYTYPE_UNIFIED;
}

static CUresult check_end(CUdeviceptr address, enum cu_end end, size_t bytes)
{
	if (end == CU_END_HOST)
		return address != 0 &&
			       (!cu_space_is_reserved(address) || cu_range_check(address, bytes, 0) == 0)
			   ? CUDA_SUCCESS
			   : CUDA_ERROR_INVALID_VALUE;
	return address != 0 && cu_range_check(address, bytes, end == CU_END_ANY) == 0
		   ? CUDA_SUCCESS
		   : CUDA_ERROR_INVALID_VALUE;
}

static CUresult capture(struct CUstream_st *stream, CUdeviceptr to, enum cu_end to_end, CUdeviceptr from,
			enum cu_end from_end, size_t bytes)
{
	const CUDA_MEMCPY3D copy = {.srcMemoryType = memory_type(from_end),
				    .srcHost = from_end == CU_END_HOST ? (const void *)(uintptr_t)from : NULL,
				    .srcDevice = from_end == CU_END_HOST ? 0 : from,
				    .dstMemoryType = memory_type(to_end),
				    .dstHost = to_end == CU_END_HOST ? (void *)(uintptr_t)to : NULL,
				    .dstDevice = to_end == CU_END_HOST ? 0 : to,
				    .WidthInBytes = bytes,
				    .Height = 1,
				    .Depth = 1};

	return cu_capture_add_copy(stream, &copy);
}

CUresult cu_copy_linear(struct CUstream_st *stream, int waits, CUdeviceptr to, enum cu_end to_end,
			CUdeviceptr from, enum cu_end from_end, size_t bytes)
{
	if (waits)
		CU_UNSAFE_IN_CAPTURE(stream->context);
	if (bytes == 0)
		return CUDA_SUCCESS;
	if (check_end(to, to_end, bytes) != CUDA_SUCCESS || check_end(from, from_end, bytes) != CUDA_SUCCESS)
		return CUDA_ERROR_INVALID_VALUE;
	if (stream->capture != NULL)
		return waits ? cu_capture_break(stream, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
			     : capture(stream, to, to_end, from, from_end, bytes);
	if (waits)
		cu_stream_drain(stream);
	cu_copy_bytes(to, from, bytes);
	cu_stream_copy(stream, bytes);
	if (waits)
		cu_stream_drain(stream);
	return CUDA_SUCCESS;
}

#define HOST(pointer) ((CUdeviceptr)(uintptr_t)(pointer))

/* A copy in the default stream that waits for it. */
static CUresult now(const char *name, int per_thread, CUdeviceptr to, enum cu_end to_end, CUdeviceptr from,
		    enum cu_end from_end, size_t bytes)
{
	CU_ENTER_AS(name, "dst=%#llx src=%#llx bytes=%zu", to, from, bytes);
	CU_STREAM(stream, context, NULL, per_thread);
	return context != NULL ? cu_copy_linear(stream, 1, to, to_end, from, from_end, bytes)
			       : CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult later(const char *name, int per_thread, CUdeviceptr to, enum cu_end to_end, CUdeviceptr from,
		      enum cu_end from_end, size_t bytes, CUstream hStream)
{
	CU_ENTER_AS(name, "dst=%#llx src=%#llx bytes=%zu stream=%p", to, from, bytes, (void *)hStream);
	CU_STREAM(stream, context, hStream, per_thread);
	return context != NULL ? cu_copy_linear(stream, 0, to, to_end, from, from_end, bytes)
			       : CUDA_ERROR_INVALID_CONTEXT;
}

CU_TWINS(cuMemcpy, cuMemcpy_ptds, now, (CUdeviceptr dst, CUdeviceptr src, size_t ByteCount), dst, CU_END_ANY,
	 src, CU_END_ANY, ByteCount)
CU_TWINS(cuMemcpyAsync, cuMemcpyAsync_ptsz, later,
	 (CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream), dst, CU_END_ANY, src,
	 CU_END_ANY, ByteCount, hStream)

CU_TWINS(cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds, now,
	 (CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount), dstDevice, CU_END_DEVICE,
	 HOST(srcHost), CU_END_HOST, ByteCount)
CU_TWINS(cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds, now, (void *dstHost, CUdeviceptr srcDevice, size_t ByteCount),
	 HOST(dstHost), CU_END_HOST, srcDevice, CU_END_DEVICE, ByteCount)
CU_TWINS(cuMemcpyDtoD_v2, cuMemcpyDtoD_v2_ptds, now,
	 (CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount), dstDevice, CU_END_DEVICE,
	 srcDevice, CU_END_DEVICE, ByteCount)

CU_TWINS(cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2_ptsz, later,
	 (CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount, CUstream hStream), dstDevice,
	 CU_END_DEVICE, HOST(srcHost), CU_END_HOST, ByteCount, hStream)
CU_TWINS(cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2_ptsz, later,
	 (void *dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream), HOST(dstHost),
	 CU_END_HOST, srcDevice, CU_END_DEVICE, ByteCount, hStream)
CU_TWINS(cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync_v2_ptsz, later,
	 (CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream), dstDevice,
	 CU_END_DEVICE, srcDevice, CU_END_DEVICE, ByteCount, hStream)

/* ---- the first forms, with addresses of 32 bits ------------------------------------------------------- */

CUresult CUDAAPI cuMemcpyHtoD(CUdeviceptr_v1 dstDevice, const void *srcHost, unsigned int ByteCount)
{
	return now(__func__, 0, dstDevice, CU_END_DEVICE, HOST(srcHost), CU_END_HOST, ByteCount);
}

CUresult CUDAAPI cuMemcpyDtoH(void *dstHost, CUdeviceptr_v1 srcDevice, unsigned int ByteCount)
{
	return now(__func__, 0, HOST(dstHost), CU_END_HOST, srcDevice, CU_END_DEVICE, ByteCount);
}

CUresult CUDAAPI cuMemcpyDtoD(CUdeviceptr_v1 dstDevice, CUdeviceptr_v1 srcDevice, unsigned int ByteCount)
{
	return now(__func__, 0, dstDevice, CU_END_DEVICE, srcDevice, CU_END_DEVICE, ByteCount);
}

CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr_v1 dstDevice, const void *srcHost, unsigned int ByteCount,
				   CUstream hStream)
{
	return later(__func__, 0, dstDevice, CU_END_DEVICE, HOST(srcHost), CU_END_HOST, ByteCount, hStream);
}

CUresult CUDAAPI cuMemcpyDtoHAsync(void *dstHost, CUdeviceptr_v1 srcDevice, unsigned int ByteCount,
				   CUstream hStream)
{
	return later(__func__, 0, HOST(dstHost), CU_END_HOST, srcDevice, CU_END_DEVICE, ByteCount, hStream);
}

CUresult CUDAAPI cuMemcpyDtoDAsync(CUdeviceptr_v1 dstDevice, CUdeviceptr_v1 srcDevice, unsigned int ByteCount,
				   CUstream hStream)
{
	return later(__func__, 0, dstDevice, CU_END_DEVICE, srcDevice, CU_END_DEVICE, ByteCount, hStream);
}

/* ---- between contexts --------------------------------------------------------------------------------- */

static CUresult check_peers(CUcontext one, CUcontext other)
{
	return cu_is(one, CU_KIND_CONTEXT) && cu_is(other, CU_KIND_CONTEXT) ? CUDA_SUCCESS
									    : CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult peer(const char *name, int per_thread, CUdeviceptr dstDevice, CUcontext dstContext,
		     CUdeviceptr srcDevice, CUcontext srcContext, size_t bytes)
{
	CUresult result = now(name, per_thread, dstDevice, CU_END_DEVICE, srcDevice, CU_END_DEVICE,
			      check_peers(dstContext, srcContext) == CUDA_SUCCESS ? bytes : 0);

	return result != CUDA_SUCCESS ? result : check_peers(dstContext, srcContext);
}
CU_TWINS(cuMemcpyPeer, cuMemcpyPeer_ptds, peer,
	 (CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext,
	  size_t ByteCount),
	 dstDevice, dstContext, srcDevice, srcContext, ByteCount)

static CUresult peer_later(const char *name, int per_thread, CUdeviceptr dstDevice, CUcontext dstContext,
			   CUdeviceptr srcDevice, CUcontext srcContext, size_t bytes, CUstream hStream)
{
	CUresult result = later(name, per_thread, dstDevice, CU_END_DEVICE, srcDevice, CU_END_DEVICE,
				check_peers(dstContext, srcContext) == CUDA_SUCCESS ? bytes : 0, hStream);

	return result != CUDA_SUCCESS ? result : check_peers(dstContext, srcContext);
}
CU_TWINS(cuMemcpyPeerAsync, cuMemcpyPeerAsync_ptsz, peer_later,
	 (CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext,
	  size_t ByteCount, CUstream hStream),
	 dstDevice, dstContext, srcDevice, srcContext, ByteCount, hStream)

/* ---- many at once ------------------------------------------------------------------------------------- */

static CUresult batch(const char *name, int per_thread, CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes,
		      size_t count, size_t *failIdx, CUstream hStream)
{
	CU_ENTER_AS(name, "count=%zu stream=%p", count, (void *)hStream);
	CU_STREAM(stream, context, hStream, per_thread);
	/* The batch calls take no default stream. */
	CU_NEEDS(dsts != NULL && srcs != NULL && sizes != NULL && count > 0 && hStream != NULL &&
		 context != NULL);
	if (failIdx != NULL)
		*failIdx = SIZE_MAX;
	for (size_t i = 0; i < count; i++) {
		CUresult result =
		    cu_copy_linear(stream, 0, dsts[i], CU_END_ANY, srcs[i], CU_END_ANY, sizes[i]);

		if (result != CUDA_SUCCESS) {
			if (failIdx != NULL)
				*failIdx = i;
			return result;
		}
	}
	return CUDA_SUCCESS;
}

CU_TWINS(cuMemcpyBatchAsync, cuMemcpyBatchAsync_ptsz, batch,
	 (CUdeviceptr * dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs,
	  size_t *attrsIdxs, size_t numAttrs, size_t *failIdx, CUstream hStream),
	 dsts, srcs, sizes, (attrs != NULL && attrsIdxs != NULL) || numAttrs == 0 ? count : 0, failIdx,
	 hStream)

CU_TWINS(cuMemcpyBatchAsync_v2, cuMemcpyBatchAsync_v2_ptsz, batch,
	 (CUdeviceptr * dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs,
	  size_t *attrsIdxs, size_t numAttrs, CUstream hStream),
	 dsts, srcs, sizes, (attrs != NULL && attrsIdxs != NULL) || numAttrs == 0 ? count : 0, NULL, hStream)

CU_TWINS(cuMemcpyWithAttributesAsync, cuMemcpyWithAttributesAsync_ptsz, later,
	 (CUdeviceptr dst, CUdeviceptr src, size_t size, CUmemcpyAttributes *attr, CUstream hStream), dst,
	 CU_END_ANY, src, CU_END_ANY, attr != NULL ? size : 0, hStream)
