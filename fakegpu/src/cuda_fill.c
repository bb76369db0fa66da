/* SPDX-License-Identifier: Apache-2.0
 *
 * Fills (cuMemset…), in all their names.
 */
#include "cuda_graph.h"
#include "cuda_memory.h"
#include "cuda_parts.h"
#include "cuda_time.h"

CUresult cu_run_fill(const CUDA_MEMSET_NODE_PARAMS *fill)
{
	size_t row, extent, pitch = fill->height > 1 ? fill->pitch : 0;

	CU_NEEDS(fill->elementSize == 1 || fill->elementSize == 2 || fill->elementSize == 4);
	if (fill->width == 0 || fill->height == 0)
		return CUDA_SUCCESS;
	CU_NEEDS(!__builtin_mul_overflow(fill->width, fill->elementSize, &row));
	CU_NEEDS(fill->height == 1 || pitch >= row);
	CU_NEEDS(!__builtin_mul_overflow(fill->height - 1, pitch, &extent) && extent + row >= row);
	CU_NEEDS(fill->dst != 0 && fill->dst % fill->elementSize == 0 &&
		 cu_range_check(fill->dst, extent + row, 0) == 0);
	if (fill->height == 1 || pitch == row) {
		cu_fill_bytes(fill->dst, fill->value, fill->elementSize, row * fill->height);
		return CUDA_SUCCESS;
	}
	for (size_t y = 0; y < fill->height; y++)
		cu_fill_bytes(fill->dst + y * pitch, fill->value, fill->elementSize, row);
	return CUDA_SUCCESS;
}

static CUresult fill(const char *name, int per_thread, int waits, CUdeviceptr dst, size_t pitch,
		     unsigned int value, unsigned int element, size_t width, size_t height, CUstream hStream)
{
	CU_ENTER_AS(name, "dst=%#llx pitch=%zu value=%#x width=%zu height=%zu stream=%p", dst, pitch, value,
		    width, height, (void *)hStream);
	CU_STREAM(stream, context, hStream, per_thread);
	const CUDA_MEMSET_NODE_PARAMS params = {.dst = dst,
						.pitch = pitch,
						.value = value,
						.elementSize = element,
						.width = width,
						.height = height};
	CUresult result;

	if (waits)
		CU_UNSAFE_IN_CAPTURE(context);
	if (stream->capture != NULL)
		return waits ? cu_capture_break(stream, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
			     : cu_capture_add_fill(stream, &params);
	result = cu_run_fill(&params);
	/* A fill of device memory never waits for the device. */
	if (result == CUDA_SUCCESS)
		cu_stream_copy(stream, width * element * height);
	return result;
}

#define SETS(bits, type, element)                                                                         \
	static CUresult set_##bits(const char *name, int per_thread, CUdeviceptr dst, type value,         \
				   size_t count)                                                          \
	{                                                                                                 \
		return fill(name, per_thread, 1, dst, 0, value, element, count, 1, NULL);                 \
	}                                                                                                 \
	static CUresult set_##bits##_later(const char *name, int per_thread, CUdeviceptr dst, type value, \
					   size_t count, CUstream stream)                                 \
	{                                                                                                 \
		return fill(name, per_thread, 0, dst, 0, value, element, count, 1, stream);               \
	}                                                                                                 \
	static CUresult set_2d_##bits(const char *name, int per_thread, CUdeviceptr dst, size_t pitch,    \
				      type value, size_t width, size_t height)                            \
	{                                                                                                 \
		return fill(name, per_thread, 1, dst, pitch, value, element, width, height, NULL);        \
	}                                                                                                 \
	static CUresult set_2d_##bits##_later(const char *name, int per_thread, CUdeviceptr dst,          \
					      size_t pitch, type value, size_t width, size_t height,      \
					      CUstream stream)                                            \
	{                                                                                                 \
		return fill(name, per_thread, 0, dst, pitch, value, element, width, height, stream);      \
	}                                                                                                 \
	CU_TWINS(cuMemsetD##bits##_v2, cuMemsetD##bits##_v2_ptds, set_##bits,                             \
		 (CUdeviceptr dstDevice, type value, size_t N), dstDevice, value, N)                      \
	CU_TWINS(cuMemsetD##bits##Async, cuMemsetD##bits##Async_ptsz, set_##bits##_later,                 \
		 (CUdeviceptr dstDevice, type value, size_t N, CUstream hStream), dstDevice, value, N,    \
		 hStream)                                                                                 \
	CU_TWINS(cuMemsetD2D##bits##_v2, cuMemsetD2D##bits##_v2_ptds, set_2d_##bits,                      \
		 (CUdeviceptr dstDevice, size_t dstPitch, type value, size_t Width, size_t Height),       \
		 dstDevice, dstPitch, value, Width, Height)                                               \
	CU_TWINS(cuMemsetD2D##bits##Async, cuMemsetD2D##bits##Async_ptsz, set_2d_##bits##_later,          \
		 (CUdeviceptr dstDevice, size_t dstPitch, type value, size_t Width, size_t Height,        \
		  CUstream hStream),                                                                      \
		 dstDevice, dstPitch, value, Width, Height, hStream)                                      \
	CUresult CUDAAPI cuMemsetD##bits(CUdeviceptr_v1 dstDevice, type value, unsigned int N)            \
	{                                                                                                 \
		return set_##bits(__func__, 0, dstDevice, value, N);                                      \
	}                                                                                                 \
	CUresult CUDAAPI cuMemsetD2D##bits(CUdeviceptr_v1 dstDevice, unsigned int dstPitch, type value,   \
					   unsigned int Width, unsigned int Height)                       \
	{                                                                                                 \
		return set_2d_##bits(__func__, 0, dstDevice, dstPitch, value, Width, Height);             \
	}

SETS(8, unsigned char, 1)
SETS(16, unsigned short, 2)
SETS(32, unsigned int, 4)
