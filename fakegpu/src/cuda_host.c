/* SPDX-License-Identifier: Apache-2.0
 *
 * Page-locked host memory, allocated or registered. Charged on no card.
 */
#include <stdlib.h>
#include <string.h>

#include "cuda_memory.h"
#include "cuda_parts.h"

static struct cu_registered *registered;

void cu_host_forget(void)
{
	registered = NULL;
}

struct cu_registered *cu_registered_find(const void *address)
{
	for (struct cu_registered *one = registered; one != NULL; one = one->next)
		if ((const char *)address >= one->start && (const char *)address < one->start + one->size)
			return one;
	return NULL;
}

static CUresult allocate(void **pp, size_t bytes, unsigned int flags)
{
	CU_CONTEXT(context);
	CU_UNSAFE_IN_CAPTURE(context);
	struct cu_alloc *alloc;
	CUresult result;

	CU_NEEDS(pp != NULL && bytes > 0);
	CU_NEEDS((flags & ~(unsigned)(CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP |
				      CU_MEMHOSTALLOC_WRITECOMBINED)) == 0);
	result = cu_memory_make(context->device, context, bytes, 0, CU_ALLOC_HOST, &alloc);
	if (result != CUDA_SUCCESS)
		return result;
	alloc->flags = flags | CU_MEMHOSTALLOC_DEVICEMAP; /* with unified addressing all of it is mapped */
	alloc->touched = 1;
	*pp = alloc->data;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAllocHost_v2(void **pp, size_t bytesize)
{
	CU_ENTER("pp=%p bytesize=%zu", (void *)pp, bytesize);
	return allocate(pp, bytesize, 0);
}

CUresult CUDAAPI cuMemAllocHost(void **pp, unsigned int bytesize)
{
	CU_ENTER("pp=%p bytesize=%u", (void *)pp, bytesize);
	return allocate(pp, bytesize, 0);
}

CUresult CUDAAPI cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags)
{
	CU_ENTER("pp=%p bytesize=%zu Flags=%u", (void *)pp, bytesize, Flags);
	return allocate(pp, bytesize, Flags);
}

CUresult CUDAAPI cuMemFreeHost(void *p)
{
	CU_ENTER("p=%p", p);
	CU_CONTEXT(context);
	CUresult result = CUDA_ERROR_INVALID_VALUE;
	struct cu_alloc *alloc;

	if (p == NULL)
		return CUDA_ERROR_INVALID_VALUE;
	cu_lock();
	alloc = cu_space_find((CUdeviceptr)(uintptr_t)p);
	if (alloc != NULL && alloc->kind == CU_ALLOC_HOST && alloc->data == p && context != NULL) {
		cu_memory_end(alloc);
		result = CUDA_SUCCESS;
	}
	cu_unlock();
	return result;
}

static CUresult register_host(void *p, size_t bytes, unsigned int flags)
{
	CU_CONTEXT(context);
	struct cu_registered *one;

	CU_NEEDS(p != NULL && bytes > 0 && (flags & ~15u) == 0);
	CU_NEEDS((char *)p + bytes > (char *)p);
	one = malloc(sizeof *one);
	if (one == NULL)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*one = (struct cu_registered){p, bytes, flags, context, cu_next_id(), NULL};
	cu_lock();
	for (const struct cu_registered *other = registered; other != NULL; other = other->next)
		if (other->start < one->start + bytes && one->start < other->start + other->size) {
			cu_unlock();
			free(one);
			return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
		}
	one->next = registered;
	registered = one;
	cu_unlock();
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemHostRegister_v2(void *p, size_t bytesize, unsigned int Flags)
{
	CU_ENTER("p=%p bytesize=%zu Flags=%u", p, bytesize, Flags);
	return register_host(p, bytesize, Flags);
}

CUresult CUDAAPI cuMemHostRegister(void *p, size_t bytesize, unsigned int Flags)
{
	CU_ENTER("p=%p bytesize=%zu Flags=%u", p, bytesize, Flags);
	return register_host(p, bytesize, Flags);
}

CUresult CUDAAPI cuMemHostUnregister(void *p)
{
	CU_ENTER("p=%p", p);
	CU_CONTEXT(context);
	CUresult result = CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;

	CU_NEEDS(p != NULL && context != NULL);
	cu_lock();
	for (struct cu_registered **link = &registered; *link != NULL; link = &(*link)->next)
		if ((*link)->start == p) {
			struct cu_registered *gone = *link;

			*link = gone->next;
			free(gone);
			result = CUDA_SUCCESS;
			break;
		}
	cu_unlock();
	return result;
}

/* The address a device uses is the host's own. */
static CUresult device_pointer(CUdeviceptr *pdptr, const void *p, unsigned int flags)
{
	CU_CONTEXT(context);
	CU_NEEDS(pdptr != NULL && flags == 0 && context != NULL);
	cu_lock();
	const struct cu_alloc *alloc = cu_space_find((CUdeviceptr)(uintptr_t)p);
	int known = (alloc != NULL && alloc->kind == CU_ALLOC_HOST) || cu_registered_find(p) != NULL;

	cu_unlock();
	CU_NEEDS(known);
	*pdptr = (CUdeviceptr)(uintptr_t)p;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemHostGetDevicePointer_v2(CUdeviceptr *pdptr, void *p, unsigned int Flags)
{
	CU_ENTER("pdptr=%p p=%p Flags=%u", (void *)pdptr, p, Flags);
	return device_pointer(pdptr, p, Flags);
}

CUresult CUDAAPI cuMemHostGetDevicePointer(CUdeviceptr_v1 *pdptr, void *p, unsigned int Flags)
{
	CU_ENTER("pdptr=%p p=%p Flags=%u", (void *)pdptr, p, Flags);
	CUdeviceptr address;
	CUresult result = device_pointer(pdptr != NULL ? &address : NULL, p, Flags);

	if (result == CUDA_SUCCESS && address > UINT32_MAX)
		return CUDA_ERROR_INVALID_VALUE; /* no 32-bit address on a 64-bit system */
	if (result == CUDA_SUCCESS)
		*pdptr = (CUdeviceptr_v1)address;
	return result;
}

CUresult CUDAAPI cuMemHostGetFlags(unsigned int *pFlags, void *p)
{
	CU_ENTER("pFlags=%p p=%p", (void *)pFlags, p);
	CU_CONTEXT(context);
	CUresult result = CUDA_ERROR_INVALID_VALUE;

	CU_NEEDS(pFlags != NULL && context != NULL);
	cu_lock();
	const struct cu_alloc *alloc = cu_space_find((CUdeviceptr)(uintptr_t)p);
	const struct cu_registered *one = cu_registered_find(p);

	if (alloc != NULL && alloc->kind == CU_ALLOC_HOST)
		*pFlags = alloc->flags;
	else if (one != NULL)
		*pFlags = one->flags;
	if ((alloc != NULL && alloc->kind == CU_ALLOC_HOST) || one != NULL)
		result = CUDA_SUCCESS;
	cu_unlock();
	return result;
}
