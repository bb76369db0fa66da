/* SPDX-License-Identifier: Apache-2.0
 *
 * Plain device memory: cuMemAlloc and cuMemFree in their forms, and what is free. See cuda_memory.h.
 */
#include "cuda_memory.h"

#include "cuda_mempool.h"
#include "cuda_parts.h"
#include "cuda_time.h"
#include "engine.h"
#include "shared_file.h"

void cu_memory_delay(void)
{
	if (__builtin_expect(fg_state->driver.alloc_ns > 0, 0))
		fg_sleep_until(fg_now_ns() + fg_state->driver.alloc_ns, 1);
}

static void link_to(struct cu_alloc *alloc, struct CUctx_st *context)
{
	alloc->context = context;
	alloc->next = context->allocs;
	if (alloc->next != NULL)
		alloc->next->previous = alloc;
	context->allocs = alloc;
}

static void unlink_from(struct cu_alloc *alloc)
{
	if (alloc->previous != NULL)
		alloc->previous->next = alloc->next;
	else
		alloc->context->allocs = alloc->next;
	if (alloc->next != NULL)
		alloc->next->previous = alloc->previous;
}

CUresult cu_memory_make(struct cu_device *device, struct CUctx_st *context, size_t size, uint64_t charge,
			enum cu_alloc_kind kind, struct cu_alloc **made)
{
	int seat = charge > 0 ? cu_seat(device) : -1;
	struct cu_alloc *alloc;

	if (charge > 0 && (seat < 0 || fg_account_take((uint32_t)seat, charge) != 0))
		return CUDA_ERROR_OUT_OF_MEMORY;
	cu_lock();
	alloc = cu_space_take(size, kind == CU_ALLOC_MANAGED || kind == CU_ALLOC_HOST);
	if (alloc != NULL) {
		alloc->kind = (uint32_t)kind;
		alloc->device = device;
		alloc->charged = charge;
		alloc->seat = seat;
		if (context != NULL)
			link_to(alloc, context);
	}
	cu_unlock();
	if (alloc == NULL) {
		if (charge > 0)
			fg_account_give((uint32_t)seat, charge);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*made = alloc;
	return CUDA_SUCCESS;
}

void cu_memory_end(struct cu_alloc *alloc)
{
	int seat = alloc->seat;
	uint64_t charged = alloc->charged;

	if (alloc->kind == CU_ALLOC_MANAGED)
		cu_managed_leave(alloc);
	if (alloc->context != NULL)
		unlink_from(alloc);
	if (__builtin_expect(alloc->shared_number != 0, 0)) {
		uint32_t self = (uint32_t)fg_process_self();

		fg_shared_file_remove(self, fg_process_at(self)->generation, alloc->shared_number);
	}
	if (__builtin_expect(alloc->foreign, 0))
		cu_ipc_unmap(alloc);
	cu_space_give(alloc);
	if (charged > 0)
		fg_account_give((uint32_t)seat, charged);
}

static CUresult allocate(CUdeviceptr *dptr, size_t bytes)
{
	CU_CONTEXT(context);
	CU_UNSAFE_IN_CAPTURE(context);
	CU_NEEDS(dptr != NULL && bytes > 0);
	uint64_t charge = cu_round(bytes, fg_state->driver.plain_round);
	struct cu_alloc *alloc;
	CUresult result;

	fg_control_follow(fg_coarse_ns());
	cu_memory_delay();
	if (charge < bytes)
		return CUDA_ERROR_OUT_OF_MEMORY;
	result = cu_memory_make(context->device, context, bytes, charge, CU_ALLOC_LINEAR, &alloc);
	if (result == CUDA_SUCCESS)
		*dptr = alloc->base;
	return result;
}

CUresult CUDAAPI cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
{
	CU_ENTER("dptr=%p bytesize=%zu", (void *)dptr, bytesize);
	return allocate(dptr, bytesize);
}

/* Addresses of today do not fit into the 32 bits of the first form: on a 64-bit system it only ever failed.
 */
static CUresult narrow(CUresult result, CUdeviceptr address, CUdeviceptr_v1 *dptr)
{
	if (result != CUDA_SUCCESS)
		return result;
	if (address > UINT32_MAX) {
		cu_lock();
		cu_memory_end(cu_space_find(address));
		cu_unlock();
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*dptr = (CUdeviceptr_v1)address;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAlloc(CUdeviceptr_v1 *dptr, unsigned int bytesize)
{
	CU_ENTER("dptr=%p bytesize=%u", (void *)dptr, bytesize);
	CUdeviceptr address = 0;
	CUresult result = allocate(dptr != NULL ? &address : NULL, bytesize);

	return narrow(result, address, dptr);
}

static CUresult allocate_pitch(CUdeviceptr *dptr, size_t *pitch, size_t width, size_t height,
			       unsigned int element)
{
	size_t step = fg_state->driver.pitch_align, row = cu_round(width, step), bytes;
	CUresult result;

	CU_NEEDS(dptr != NULL && pitch != NULL && width > 0 && height > 0);
	CU_NEEDS(element == 4 || element == 8 || element == 16);
	if (row < width || __builtin_mul_overflow(row, height, &bytes))
		return CUDA_ERROR_OUT_OF_MEMORY;
	result = allocate(dptr, bytes);
	if (result == CUDA_SUCCESS)
		*pitch = row;
	return result;
}

CUresult CUDAAPI cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height,
				    unsigned int ElementSizeBytes)
{
	CU_ENTER("dptr=%p width=%zu height=%zu element=%u", (void *)dptr, WidthInBytes, Height,
		 ElementSizeBytes);
	return allocate_pitch(dptr, pPitch, WidthInBytes, Height, ElementSizeBytes);
}

CUresult CUDAAPI cuMemAllocPitch(CUdeviceptr_v1 *dptr, unsigned int *pPitch, unsigned int WidthInBytes,
				 unsigned int Height, unsigned int ElementSizeBytes)
{
	CU_ENTER("dptr=%p width=%u height=%u element=%u", (void *)dptr, WidthInBytes, Height,
		 ElementSizeBytes);
	CUdeviceptr address = 0;
	size_t pitch = 0;
	CUresult result = allocate_pitch(dptr != NULL ? &address : NULL, pPitch != NULL ? &pitch : NULL,
					 WidthInBytes, Height, ElementSizeBytes);

	if (result == CUDA_SUCCESS && pitch <= UINT32_MAX)
		*pPitch = (unsigned int)pitch;
	return narrow(result, address, dptr);
}

static CUresult release(CUdeviceptr dptr)
{
	CU_CONTEXT(context);
	struct cu_alloc *alloc;
	CUresult result = CUDA_ERROR_INVALID_VALUE;

	if (dptr == 0)
		return CUDA_SUCCESS;
	CU_UNSAFE_IN_CAPTURE(context);
	/* Work that may still use it is waited for. */
	cu_context_drain(context);
	cu_memory_delay();
	cu_lock();
	alloc = cu_space_find(dptr);
	if (alloc != NULL && alloc->base == dptr)
		switch (alloc->kind) {
		case CU_ALLOC_LINEAR:
		case CU_ALLOC_MANAGED:
		case CU_ALLOC_EXTERNAL:
			cu_memory_end(alloc);
			result = CUDA_SUCCESS;
			break;
		case CU_ALLOC_POOL:
		case CU_ALLOC_POOL_IMPORT:
		case CU_ALLOC_GRAPH:
			result = cu_pool_free(alloc);
			break;
		default:
			break;
		}
	cu_unlock();
	return result;
}

CUresult CUDAAPI cuMemFree_v2(CUdeviceptr dptr)
{
	CU_ENTER("dptr=%#llx", dptr);
	return release(dptr);
}

CUresult CUDAAPI cuMemFree(CUdeviceptr_v1 dptr)
{
	CU_ENTER("dptr=%#x", dptr);
	return release(dptr);
}

static CUresult look(uint64_t *free_bytes, uint64_t *total_bytes)
{
	CU_CONTEXT(context);
	CU_FORBIDDEN_IN_CAPTURE();
	fg_control_follow(fg_coarse_ns());
	fg_account_look(context->device->card, context->device->gi, free_bytes, total_bytes);
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemGetInfo_v2(size_t *free, size_t *total)
{
	CU_ENTER("free=%p total=%p", (void *)free, (void *)total);
	uint64_t free_bytes, total_bytes;
	CUresult result = look(&free_bytes, &total_bytes);

	if (result != CUDA_SUCCESS)
		return result;
	if (free != NULL)
		*free = free_bytes;
	if (total != NULL)
		*total = total_bytes;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemGetInfo(unsigned int *free, unsigned int *total)
{
	CU_ENTER("free=%p total=%p", (void *)free, (void *)total);
	uint64_t free_bytes, total_bytes;
	CUresult result = look(&free_bytes, &total_bytes);

	if (result != CUDA_SUCCESS)
		return result;
	if (free != NULL)
		*free = free_bytes > UINT32_MAX ? UINT32_MAX : (unsigned int)free_bytes;
	if (total != NULL)
		*total = total_bytes > UINT32_MAX ? UINT32_MAX : (unsigned int)total_bytes;
	return CUDA_SUCCESS;
}
