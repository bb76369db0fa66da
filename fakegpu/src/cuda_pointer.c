/* SPDX-License-Identifier: Apache-2.0
 *
 * What the driver says about an address.
 */
#include <string.h>

#include "cuda_memory.h"
#include "cuda_mempool.h"
#include "cuda_parts.h"
#include "cuda_vmm.h"

/* All that is known of an address, whatever kind of memory it lies in. */
struct known {
	CUmemorytype type; /* 0: the driver knows nothing of it */
	struct CUctx_st *context;
	struct cu_device *device;
	CUdeviceptr start;
	size_t size;
	uint64_t id;
	struct cu_alloc *alloc;
	struct cu_physical *physical;
	int host_visible;
	unsigned int handle_types;
};

/* Needs cu_lock. */
static void look_up(CUdeviceptr address, struct known *known)
{
	struct cu_alloc *alloc = cu_space_find(address);
	const struct cu_registered *registered;

	*known = (struct known){0};
	if (alloc != NULL && alloc->kind != CU_ALLOC_ARRAY) {
		known->alloc = alloc;
		known->type = alloc->kind == CU_ALLOC_HOST ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
		known->host_visible = alloc->kind == CU_ALLOC_HOST || alloc->kind == CU_ALLOC_MANAGED;
		known->context = alloc->context;
		known->device = alloc->device;
		known->start = alloc->base;
		known->size = alloc->size;
		known->id = alloc->id;
		if (alloc->kind == CU_ALLOC_POOL)
			known->handle_types =
			    (unsigned)((struct CUmemPoolHandle_st *)alloc->owner)->handle_types;
	} else if (cu_vmm_mapping(address, &known->start, &known->size, &known->physical)) {
		known->type = known->physical->device != NULL ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
		known->device = known->physical->device;
		known->id = known->physical->object.serial | (uint64_t)(uintptr_t)known->physical << 8;
		known->handle_types = (unsigned)known->physical->prop.requestedHandleTypes;
	} else if ((registered = cu_registered_find((const void *)(uintptr_t)address)) != NULL) {
		known->type = CU_MEMORYTYPE_HOST;
		known->host_visible = 1;
		known->context = registered->context;
		known->device = registered->context->device;
		known->start = (CUdeviceptr)(uintptr_t)registered->start;
		known->size = registered->size;
		known->id = registered->id;
	}
}

static void put_int(void *data, int value)
{
	memcpy(data, &value, sizeof value);
}

static void put_bool(void *data, int value)
{
	*(unsigned char *)data = value != 0;
}

static void put_long(void *data, unsigned long long value)
{
	memcpy(data, &value, sizeof value);
}

/* Attributes that make sense for every address: of a range that is reserved and not mapped, too. */
static int tell_anywhere(void *data, CUpointer_attribute attribute, CUdeviceptr address,
			 const struct known *known)
{
	CUdeviceptr base = known->start;
	size_t size = known->size;

	if (attribute == CU_POINTER_ATTRIBUTE_MAPPED) {
		put_bool(data, known->type != 0);
		return 1;
	}
	if (attribute != CU_POINTER_ATTRIBUTE_RANGE_START_ADDR &&
	    attribute != CU_POINTER_ATTRIBUTE_RANGE_SIZE)
		return 0;
	if (known->type == 0 || known->physical != NULL)
		if (!cu_vmm_range(address, &base, &size))
			return 0;
	put_long(data, attribute == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR ? base : size);
	return 1;
}

/* -1: nothing to tell about this address. */
static int tell(void *data, CUpointer_attribute attribute, CUdeviceptr address, const struct known *known)
{
	const struct cu_alloc *alloc = known->alloc;

	switch (attribute) {
	case CU_POINTER_ATTRIBUTE_CONTEXT:
		if (known->context == NULL)
			return -1;
		memcpy(data, &known->context, sizeof known->context);
		return 0;
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
		put_int(data, (int)known->type);
		return 0;
	case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
		put_long(data, address);
		return 0;
	case CU_POINTER_ATTRIBUTE_HOST_POINTER:
		if (!known->host_visible)
			return -1;
		put_long(data, address);
		return 0;
	case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
		put_bool(data, alloc != NULL && alloc->sync_memops);
		return 0;
	case CU_POINTER_ATTRIBUTE_BUFFER_ID:
	case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
		put_long(data, known->id);
		return 0;
	case CU_POINTER_ATTRIBUTE_IS_MANAGED:
		put_bool(data, alloc != NULL && alloc->kind == CU_ALLOC_MANAGED);
		return 0;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
		put_int(data, known->device != NULL ? known->device->ordinal : (int)CU_DEVICE_CPU);
		return 0;
	case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
		put_bool(data, alloc != NULL && alloc->kind == CU_ALLOC_LINEAR);
		return 0;
	case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
		put_long(data, known->handle_types);
		return 0;
	case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
	case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
		put_bool(data, 0);
		return 0;
	case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
		put_int(data, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
		return 0;
	case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: {
		void *pool = alloc != NULL && alloc->kind == CU_ALLOC_POOL ? alloc->owner : NULL;

		memcpy(data, &pool, sizeof pool);
		return 0;
	}
	case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
		put_long(data, known->size);
		return 0;
	case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
		put_long(data, known->start);
		return 0;
	default:
		return -1;
	}
}

/* What cuPointerGetAttributes writes when there is nothing to tell. */
static void tell_nothing(void *data, CUpointer_attribute attribute)
{
	switch (attribute) {
	case CU_POINTER_ATTRIBUTE_CONTEXT:
	case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
	case CU_POINTER_ATTRIBUTE_HOST_POINTER:
	case CU_POINTER_ATTRIBUTE_BUFFER_ID:
	case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
	case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
	case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
	case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
	case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
	case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
	case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
		put_long(data, 0);
		break;
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
	case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
		put_int(data, 0);
		break;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
		put_int(data, CU_DEVICE_INVALID);
		break;
	default:
		put_bool(data, 0);
	}
}

static int is_attribute(CUpointer_attribute attribute)
{
	return attribute >= CU_POINTER_ATTRIBUTE_CONTEXT &&
	       attribute <= CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE &&
	       attribute != CU_POINTER_ATTRIBUTE_P2P_TOKENS;
}

CUresult CUDAAPI cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
{
	CU_ENTER("data=%p attribute=%d ptr=%#llx", data, (int)attribute, ptr);
	struct known known;
	CUresult result = CUDA_ERROR_INVALID_VALUE;

	CU_NEEDS(data != NULL && is_attribute(attribute));
	cu_lock();
	look_up(ptr, &known);
	if (tell_anywhere(data, attribute, ptr, &known) ||
	    (known.type != 0 && tell(data, attribute, ptr, &known) == 0))
		result = CUDA_SUCCESS;
	cu_unlock();
	return result;
}

CUresult CUDAAPI cuPointerGetAttributes(unsigned int numAttributes, CUpointer_attribute *attributes,
					void **data, CUdeviceptr ptr)
{
	CU_ENTER("n=%u attributes=%p data=%p ptr=%#llx", numAttributes, (void *)attributes, (void *)data,
		 ptr);
	struct known known;

	CU_NEEDS(numAttributes > 0 && attributes != NULL && data != NULL);
	for (unsigned int i = 0; i < numAttributes; i++)
		CU_NEEDS(is_attribute(attributes[i]) && data[i] != NULL);
	cu_lock();
	look_up(ptr, &known);
	/* Here an address that the driver does not know is no error. */
	for (unsigned int i = 0; i < numAttributes; i++)
		if (!tell_anywhere(data[i], attributes[i], ptr, &known) &&
		    (known.type == 0 || tell(data[i], attributes[i], ptr, &known) != 0))
			tell_nothing(data[i], attributes[i]);
	cu_unlock();
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr ptr)
{
	CU_ENTER("value=%p attribute=%d ptr=%#llx", value, (int)attribute, ptr);
	CUresult result = CUDA_ERROR_INVALID_VALUE;
	unsigned int flag;

	CU_NEEDS(value != NULL && attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS);
	memcpy(&flag, value, sizeof flag);
	cu_lock();
	struct cu_alloc *alloc = cu_space_find(ptr);

	if (alloc != NULL && alloc->kind != CU_ALLOC_ARRAY) {
		alloc->sync_memops = flag != 0;
		result = CUDA_SUCCESS;
	}
	cu_unlock();
	return result;
}

static CUresult address_range(CUdeviceptr *base, size_t *size, CUdeviceptr address)
{
	CU_CONTEXT(context);
	struct known known;

	cu_lock();
	look_up(address, &known);
	cu_unlock();
	if (known.type == 0 || context == NULL)
		return CUDA_ERROR_NOT_FOUND;
	if (base != NULL)
		*base = known.start;
	if (size != NULL)
		*size = known.size;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemGetAddressRange_v2(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr)
{
	CU_ENTER("pbase=%p psize=%p dptr=%#llx", (void *)pbase, (void *)psize, dptr);
	return address_range(pbase, psize, dptr);
}

CUresult CUDAAPI cuMemGetAddressRange(CUdeviceptr_v1 *pbase, unsigned int *psize, CUdeviceptr_v1 dptr)
{
	CU_ENTER("pbase=%p psize=%p dptr=%#x", (void *)pbase, (void *)psize, dptr);
	CUdeviceptr base;
	size_t size;
	CUresult result = address_range(&base, &size, dptr);

	if (result != CUDA_SUCCESS)
		return result;
	if (pbase != NULL)
		*pbase = (CUdeviceptr_v1)base;
	if (psize != NULL)
		*psize = size > UINT32_MAX ? UINT32_MAX : (unsigned int)size;
	return CUDA_SUCCESS;
}
