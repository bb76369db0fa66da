/* SPDX-License-Identifier: Apache-2.0
 *
 * Copies between memory and one-dimensional arrays, in all their names.
 */
#include "cuda_array.h"
#include "cuda_copy.h"
#include "cuda_parts.h"

/* One end: an array and an offset, or an address. */
struct end {
	CUmemorytype type;
	CUarray array;
	size_t offset;
	CUdeviceptr address;
};

static struct end of_array(CUarray array, size_t offset)
{
	return (struct end){CU_MEMORYTYPE_ARRAY, array, offset, 0};
}

static struct end of_device(CUdeviceptr address)
{
	return (struct end){CU_MEMORYTYPE_DEVICE, NULL, 0, address};
}

static struct end of_host(const void *host)
{
	return (struct end){CU_MEMORYTYPE_HOST, NULL, 0, (CUdeviceptr)(uintptr_t)host};
}

static CUresult copy(const char *name, int per_thread, int waits, struct end to, struct end from,
		     size_t bytes, CUstream hStream)
{
	CU_ENTER_AS(name, "dst=%p/%#llx src=%p/%#llx bytes=%zu stream=%p", (void *)to.array, to.address,
		    (void *)from.array, from.address, bytes, (void *)hStream);
	CU_STREAM(stream, context, hStream, per_thread);
	const CUDA_MEMCPY3D box = {.srcMemoryType = from.type,
				   .srcArray = from.array,
				   .srcXInBytes = from.offset,
				   .srcHost = (const void *)(uintptr_t)from.address,
				   .srcDevice = from.address,
				   .dstMemoryType = to.type,
				   .dstArray = to.array,
				   .dstXInBytes = to.offset,
				   .dstHost = (void *)(uintptr_t)to.address,
				   .dstDevice = to.address,
				   .WidthInBytes = bytes,
				   .Height = 1,
				   .Depth = 1};

	return context != NULL ? cu_copy_box(stream, waits, &box) : CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult now(const char *name, int per_thread, struct end to, struct end from, size_t bytes)
{
	return copy(name, per_thread, 1, to, from, bytes, NULL);
}

static CUresult later(const char *name, int per_thread, struct end to, struct end from, size_t bytes,
		      CUstream hStream)
{
	return copy(name, per_thread, 0, to, from, bytes, hStream);
}

CU_TWINS(cuMemcpyDtoA_v2, cuMemcpyDtoA_v2_ptds, now,
	 (CUarray dstArray, size_t dstOffset, CUdeviceptr srcDevice, size_t ByteCount),
	 of_array(dstArray, dstOffset), of_device(srcDevice), ByteCount)
CU_TWINS(cuMemcpyAtoD_v2, cuMemcpyAtoD_v2_ptds, now,
	 (CUdeviceptr dstDevice, CUarray srcArray, size_t srcOffset, size_t ByteCount), of_device(dstDevice),
	 of_array(srcArray, srcOffset), ByteCount)
CU_TWINS(cuMemcpyHtoA_v2, cuMemcpyHtoA_v2_ptds, now,
	 (CUarray dstArray, size_t dstOffset, const void *srcHost, size_t ByteCount),
	 of_array(dstArray, dstOffset), of_host(srcHost), ByteCount)
CU_TWINS(cuMemcpyAtoH_v2, cuMemcpyAtoH_v2_ptds, now,
	 (void *dstHost, CUarray srcArray, size_t srcOffset, size_t ByteCount), of_host(dstHost),
	 of_array(srcArray, srcOffset), ByteCount)
CU_TWINS(cuMemcpyAtoA_v2, cuMemcpyAtoA_v2_ptds, now,
	 (CUarray dstArray, size_t dstOffset, CUarray srcArray, size_t srcOffset, size_t ByteCount),
	 of_array(dstArray, dstOffset), of_array(srcArray, srcOffset), ByteCount)
CU_TWINS(cuMemcpyHtoAAsync_v2, cuMemcpyHtoAAsync_v2_ptsz, later,
	 (CUarray dstArray, size_t dstOffset, const void *srcHost, size_t ByteCount, CUstream hStream),
	 of_array(dstArray, dstOffset), of_host(srcHost), ByteCount, hStream)
CU_TWINS(cuMemcpyAtoHAsync_v2, cuMemcpyAtoHAsync_v2_ptsz, later,
	 (void *dstHost, CUarray srcArray, size_t srcOffset, size_t ByteCount, CUstream hStream),
	 of_host(dstHost), of_array(srcArray, srcOffset), ByteCount, hStream)

CUresult CUDAAPI cuMemcpyDtoA(CUarray dstArray, unsigned int dstOffset, CUdeviceptr_v1 srcDevice,
			      unsigned int ByteCount)
{
	return now(__func__, 0, of_array(dstArray, dstOffset), of_device(srcDevice), ByteCount);
}

CUresult CUDAAPI cuMemcpyAtoD(CUdeviceptr_v1 dstDevice, CUarray srcArray, unsigned int srcOffset,
			      unsigned int ByteCount)
{
	return now(__func__, 0, of_device(dstDevice), of_array(srcArray, srcOffset), ByteCount);
}

CUresult CUDAAPI cuMemcpyHtoA(CUarray dstArray, unsigned int dstOffset, const void *srcHost,
			      unsigned int ByteCount)
{
	return now(__func__, 0, of_array(dstArray, dstOffset), of_host(srcHost), ByteCount);
}

CUresult CUDAAPI cuMemcpyAtoH(void *dstHost, CUarray srcArray, unsigned int srcOffset, unsigned int ByteCount)
{
	return now(__func__, 0, of_host(dstHost), of_array(srcArray, srcOffset), ByteCount);
}

CUresult CUDAAPI cuMemcpyAtoA(CUarray dstArray, unsigned int dstOffset, CUarray srcArray,
			      unsigned int srcOffset, unsigned int ByteCount)
{
	return now(__func__, 0, of_array(dstArray, dstOffset), of_array(srcArray, srcOffset), ByteCount);
}

CUresult CUDAAPI cuMemcpyHtoAAsync(CUarray dstArray, unsigned int dstOffset, const void *srcHost,
				   unsigned int ByteCount, CUstream hStream)
{
	return later(__func__, 0, of_array(dstArray, dstOffset), of_host(srcHost), ByteCount, hStream);
}

CUresult CUDAAPI cuMemcpyAtoHAsync(void *dstHost, CUarray srcArray, unsigned int srcOffset,
				   unsigned int ByteCount, CUstream hStream)
{
	return later(__func__, 0, of_host(dstHost), of_array(srcArray, srcOffset), ByteCount, hStream);
}
