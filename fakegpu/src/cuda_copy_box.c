/* SPDX-License-Identifier: Apache-2.0
 *
 * Copies of boxes: two and three dimensions, arrays and memory in any pairing. See cuda_copy.h.
 */
#include <string.h>

#include "cuda_array.h"
#include "cuda_copy.h"
#include "cuda_graph.h"
#include "cuda_memory.h"
#include "cuda_parts.h"

/* Where one end of a box begins and how far apart its rows and layers are; either an address or bytes. */
struct side {
	CUdeviceptr address; /* 0: `bytes` holds */
	char *bytes;
	size_t pitch, layer;
	struct cu_alloc *alloc; /* of an array */
};

static CUresult find_side(struct side *side, CUmemorytype type, const void *host, CUdeviceptr device,
			  CUarray array, size_t pitch, size_t height, size_t x, size_t y, size_t z,
			  const CUDA_MEMCPY3D *copy)
{
	if (type == CU_MEMORYTYPE_ARRAY) {
		if (!cu_is(array, CU_KIND_ARRAY))
			return CUDA_ERROR_INVALID_HANDLE;
		const CUDA_ARRAY3D_DESCRIPTOR *shape = &array->descriptor;
		size_t rows = shape->Height > 0 ? shape->Height : 1,
		       layers = shape->Depth > 0 ? shape->Depth : 1;

		CU_NEEDS(x % array->element == 0 && x + copy->WidthInBytes <= shape->Width * array->element &&
			 y + copy->Height <= rows && z + copy->Depth <= layers);
		*side = (struct side){0, array->bytes + (z * rows + y) * array->pitch + x, array->pitch,
				      array->pitch * rows, array->alloc};
		return CUDA_SUCCESS;
	}
	CU_NEEDS(type == CU_MEMORYTYPE_HOST || type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_UNIFIED);
	CUdeviceptr base = type == CU_MEMORYTYPE_HOST ? (CUdeviceptr)(uintptr_t)host : device;

	/* A pitch of 0 stands for rows that follow each other. */
	if (pitch == 0)
		pitch = x + copy->WidthInBytes;
	if (height == 0)
		height = y + copy->Height;
	CU_NEEDS(base != 0 && pitch >= copy->WidthInBytes + x &&
		 (copy->Depth <= 1 || height >= copy->Height + y));
	*side = (struct side){base + (z * height + y) * pitch + x, NULL, pitch, pitch * height, NULL};
	size_t extent = (copy->Depth - 1) * side->layer + (copy->Height - 1) * pitch + copy->WidthInBytes;

	return cu_range_check(side->address, extent, type != CU_MEMORYTYPE_DEVICE) == 0
		   ? CUDA_SUCCESS
		   : CUDA_ERROR_INVALID_VALUE;
}

static void copy_row(const struct side *to, const struct side *from, size_t y, size_t z, size_t bytes)
{
	size_t to_offset = z * to->layer + y * to->pitch, from_offset = z * from->layer + y * from->pitch;
	struct cu_span span;

	if (to->bytes == NULL && from->bytes == NULL) {
		cu_copy_bytes(to->address + to_offset, from->address + from_offset, bytes);
		return;
	}
	/* One end is an array, whose bytes are known; the other is walked span by span. */
	if (to->bytes != NULL)
		to->alloc->touched = 1;
	if (to->bytes != NULL && from->bytes != NULL) {
		memmove(to->bytes + to_offset, from->bytes + from_offset, bytes);
		return;
	}
	CUdeviceptr address = to->bytes == NULL ? to->address + to_offset : from->address + from_offset;
	char *bytes_at = to->bytes != NULL ? to->bytes + to_offset : from->bytes + from_offset;

	while (bytes > 0) {
		size_t part = bytes;

		if (cu_span_at(address, &span) != 0)
			span = (struct cu_span){(char *)(uintptr_t)address, bytes, NULL};
		if (span.length < part)
			part = span.length;
		if (to->bytes != NULL) {
			memmove(bytes_at, span.bytes, part);
		} else {
			memmove(span.bytes, bytes_at, part);
			if (span.alloc != NULL)
				span.alloc->touched = 1;
		}
		bytes_at += part;
		address += part;
		bytes -= part;
	}
}

CUresult cu_run_copy(const CUDA_MEMCPY3D *copy)
{
	struct side to, from;
	CUresult result;

	if (copy->WidthInBytes == 0 || copy->Height == 0 || copy->Depth == 0)
		return CUDA_SUCCESS;
	CU_NEEDS(copy->srcLOD == 0 && copy->dstLOD == 0);
	result = find_side(&from, copy->srcMemoryType, copy->srcHost, copy->srcDevice, copy->srcArray,
			   copy->srcPitch, copy->srcHeight, copy->srcXInBytes, copy->srcY, copy->srcZ, copy);
	if (result == CUDA_SUCCESS)
		result = find_side(&to, copy->dstMemoryType, copy->dstHost, copy->dstDevice, copy->dstArray,
				   copy->dstPitch, copy->dstHeight, copy->dstXInBytes, copy->dstY, copy->dstZ,
				   copy);
	if (result != CUDA_SUCCESS)
		return result;
	for (size_t z = 0; z < copy->Depth; z++)
		for (size_t y = 0; y < copy->Height; y++)
			copy_row(&to, &from, y, z, copy->WidthInBytes);
	return CUDA_SUCCESS;
}

CUresult cu_copy_box(struct CUstream_st *stream, int waits, const CUDA_MEMCPY3D *copy)
{
	CUresult result;

	if (waits)
		CU_UNSAFE_IN_CAPTURE(stream->context);
	if (stream->capture != NULL)
		return waits ? cu_capture_break(stream, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
			     : cu_capture_add_copy(stream, copy);
	if (waits)
		cu_stream_drain(stream);
	result = cu_run_copy(copy);
	if (result != CUDA_SUCCESS)
		return result;
	cu_stream_copy(stream, copy->WidthInBytes * copy->Height * copy->Depth);
	if (waits)
		cu_stream_drain(stream);
	return CUDA_SUCCESS;
}

/* ---- two dimensions, and their first forms ------------------------------------------------------------ */

#define FLAT(from)                                              \
	(CUDA_MEMCPY3D){.srcXInBytes = (from)->srcXInBytes,     \
			.srcY = (from)->srcY,                   \
			.srcMemoryType = (from)->srcMemoryType, \
			.srcHost = (from)->srcHost,             \
			.srcDevice = (from)->srcDevice,         \
			.srcArray = (from)->srcArray,           \
			.srcPitch = (from)->srcPitch,           \
			.dstXInBytes = (from)->dstXInBytes,     \
			.dstY = (from)->dstY,                   \
			.dstMemoryType = (from)->dstMemoryType, \
			.dstHost = (from)->dstHost,             \
			.dstDevice = (from)->dstDevice,         \
			.dstArray = (from)->dstArray,           \
			.dstPitch = (from)->dstPitch,           \
			.WidthInBytes = (from)->WidthInBytes,   \
			.Height = (from)->Height,               \
			.Depth = 1}

static CUresult box(const char *name, int per_thread, int waits, const CUDA_MEMCPY3D *copy, CUstream hStream)
{
	CU_ENTER_AS(name, "width=%zu height=%zu depth=%zu stream=%p", copy != NULL ? copy->WidthInBytes : 0,
		    copy != NULL ? copy->Height : 0, copy != NULL ? copy->Depth : 0, (void *)hStream);
	CU_STREAM(stream, context, hStream, per_thread);
	CU_NEEDS(copy != NULL && context != NULL);
	return cu_copy_box(stream, waits, copy);
}

static CUresult flat_now(const char *name, int per_thread, const CUDA_MEMCPY2D *copy)
{
	if (copy == NULL)
		return box(name, per_thread, 1, NULL, NULL);
	return box(name, per_thread, 1, &FLAT(copy), NULL);
}
CU_TWINS(cuMemcpy2D_v2, cuMemcpy2D_v2_ptds, flat_now, (const CUDA_MEMCPY2D *pCopy), pCopy)
CU_TWINS(cuMemcpy2DUnaligned_v2, cuMemcpy2DUnaligned_v2_ptds, flat_now, (const CUDA_MEMCPY2D *pCopy), pCopy)

static CUresult flat_later(const char *name, int per_thread, const CUDA_MEMCPY2D *copy, CUstream hStream)
{
	if (copy == NULL)
		return box(name, per_thread, 0, NULL, hStream);
	return box(name, per_thread, 0, &FLAT(copy), hStream);
}
CU_TWINS(cuMemcpy2DAsync_v2, cuMemcpy2DAsync_v2_ptsz, flat_later,
	 (const CUDA_MEMCPY2D *pCopy, CUstream hStream), pCopy, hStream)

CUresult CUDAAPI cuMemcpy2D(const CUDA_MEMCPY2D_v1 *pCopy)
{
	return pCopy == NULL ? box(__func__, 0, 1, NULL, NULL) : box(__func__, 0, 1, &FLAT(pCopy), NULL);
}

CUresult CUDAAPI cuMemcpy2DUnaligned(const CUDA_MEMCPY2D_v1 *pCopy)
{
	return pCopy == NULL ? box(__func__, 0, 1, NULL, NULL) : box(__func__, 0, 1, &FLAT(pCopy), NULL);
}

CUresult CUDAAPI cuMemcpy2DAsync(const CUDA_MEMCPY2D_v1 *pCopy, CUstream hStream)
{
	return pCopy == NULL ? box(__func__, 0, 0, NULL, hStream)
			     : box(__func__, 0, 0, &FLAT(pCopy), hStream);
}

/* ---- three dimensions --------------------------------------------------------------------------------- */

static CUresult box_now(const char *name, int per_thread, const CUDA_MEMCPY3D *copy)
{
	return box(name, per_thread, 1, copy, NULL);
}
CU_TWINS(cuMemcpy3D_v2, cuMemcpy3D_v2_ptds, box_now, (const CUDA_MEMCPY3D *pCopy), pCopy)

static CUresult box_later(const char *name, int per_thread, const CUDA_MEMCPY3D *copy, CUstream hStream)
{
	return box(name, per_thread, 0, copy, hStream);
}
CU_TWINS(cuMemcpy3DAsync_v2, cuMemcpy3DAsync_v2_ptsz, box_later,
	 (const CUDA_MEMCPY3D *pCopy, CUstream hStream), pCopy, hStream)

static CUDA_MEMCPY3D from_first(const CUDA_MEMCPY3D_v1 *copy)
{
	CUDA_MEMCPY3D made = FLAT(copy);

	made.srcZ = copy->srcZ;
	made.srcLOD = copy->srcLOD;
	made.srcHeight = copy->srcHeight;
	made.dstZ = copy->dstZ;
	made.dstLOD = copy->dstLOD;
	made.dstHeight = copy->dstHeight;
	made.Depth = copy->Depth;
	return made;
}

static CUDA_MEMCPY3D from_peer(const CUDA_MEMCPY3D_PEER *copy)
{
	CUDA_MEMCPY3D made = FLAT(copy);

	made.srcZ = copy->srcZ;
	made.srcLOD = copy->srcLOD;
	made.srcHeight = copy->srcHeight;
	made.dstZ = copy->dstZ;
	made.dstLOD = copy->dstLOD;
	made.dstHeight = copy->dstHeight;
	made.Depth = copy->Depth;
	return made;
}

CUresult CUDAAPI cuMemcpy3D(const CUDA_MEMCPY3D_v1 *pCopy)
{
	CUDA_MEMCPY3D copy = {0};

	if (pCopy != NULL)
		copy = from_first(pCopy);
	return box(__func__, 0, 1, pCopy != NULL ? &copy : NULL, NULL);
}

CUresult CUDAAPI cuMemcpy3DAsync(const CUDA_MEMCPY3D_v1 *pCopy, CUstream hStream)
{
	CUDA_MEMCPY3D copy = {0};

	if (pCopy != NULL)
		copy = from_first(pCopy);
	return box(__func__, 0, 0, pCopy != NULL ? &copy : NULL, hStream);
}

static CUresult peer_now(const char *name, int per_thread, const CUDA_MEMCPY3D_PEER *peer)
{
	CUDA_MEMCPY3D copy = {0};

	if (peer != NULL)
		copy = from_peer(peer);
	return box(name, per_thread, 1, peer != NULL ? &copy : NULL, NULL);
}
CU_TWINS(cuMemcpy3DPeer, cuMemcpy3DPeer_ptds, peer_now, (const CUDA_MEMCPY3D_PEER *pCopy), pCopy)

static CUresult peer_later(const char *name, int per_thread, const CUDA_MEMCPY3D_PEER *peer, CUstream hStream)
{
	CUDA_MEMCPY3D copy = {0};

	if (peer != NULL)
		copy = from_peer(peer);
	return box(name, per_thread, 0, peer != NULL ? &copy : NULL, hStream);
}
CU_TWINS(cuMemcpy3DPeerAsync, cuMemcpy3DPeerAsync_ptsz, peer_later,
	 (const CUDA_MEMCPY3D_PEER *pCopy, CUstream hStream), pCopy, hStream)
