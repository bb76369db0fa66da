/* SPDX-License-Identifier: Apache-2.0
 *
 * Multicast objects: handles that devices are added to and memory is bound to. They take no memory of their
 * own.
 */
#include "cuda_parts.h"
#include "cuda_physical.h"

static struct cu_physical *multicast_of(CUmemGenericAllocationHandle handle)
{
	struct cu_physical *object = cu_physical_of(handle);

	return object != NULL && object->is_multicast ? object : NULL;
}

static CUresult check_prop(const CUmulticastObjectProp *prop)
{
	CU_NEEDS(prop != NULL && prop->numDevices > 0 && prop->numDevices <= (unsigned)cu_device_count &&
		 prop->flags == 0);
	for (int i = 0; i < cu_device_count; i++)
		if (cu_attribute(&cu_devices[i], CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED) == 0)
			return CUDA_ERROR_NOT_SUPPORTED;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMulticastGetGranularity(size_t *granularity, const CUmulticastObjectProp *prop,
					   CUmulticastGranularity_flags option)
{
	CU_ENTER("granularity=%p prop=%p option=%d", (void *)granularity, (const void *)prop, (int)option);
	CUresult result = check_prop(prop);

	CU_NEEDS(granularity != NULL);
	if (result == CUDA_SUCCESS)
		*granularity = fg_state->driver.vmm_granularity;
	return result;
}

CUresult CUDAAPI cuMulticastCreate(CUmemGenericAllocationHandle *mcHandle, const CUmulticastObjectProp *prop)
{
	CU_ENTER("handle=%p prop=%p", (void *)mcHandle, (const void *)prop);
	CUresult result = check_prop(prop);
	struct cu_physical *object;

	CU_NEEDS(mcHandle != NULL);
	if (result != CUDA_SUCCESS)
		return result;
	CU_NEEDS(prop->size > 0 && prop->size % fg_state->driver.vmm_granularity == 0);
	cu_lock();
	object = cu_object_make(CU_KIND_PHYSICAL, sizeof *object);
	if (object != NULL) {
		object->handles = 1;
		object->seat = -1;
		object->file = -1;
		object->size = prop->size;
		object->is_multicast = 1;
		object->prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
	}
	cu_unlock();
	if (object == NULL)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*mcHandle = (CUmemGenericAllocationHandle)(uintptr_t)object;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMulticastAddDevice(CUmemGenericAllocationHandle mcHandle, CUdevice dev)
{
	CU_ENTER("handle=%#llx dev=%d", mcHandle, dev);
	CU_NEEDS(multicast_of(mcHandle) != NULL);
	return cu_device_at(dev) != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

static CUresult bind_memory(CUmemGenericAllocationHandle handle, size_t offset,
			    CUmemGenericAllocationHandle memory, size_t memory_offset, size_t size)
{
	const struct cu_physical *object = multicast_of(handle), *physical = cu_physical_of(memory);

	CU_NEEDS(object != NULL && physical != NULL && !physical->is_multicast && size > 0);
	CU_NEEDS(offset <= object->size && size <= object->size - offset);
	CU_NEEDS(memory_offset <= physical->size && size <= physical->size - memory_offset);
	return CUDA_SUCCESS;
}

static CUresult bind_address(CUmemGenericAllocationHandle handle, size_t offset, CUdeviceptr address,
			     size_t size)
{
	const struct cu_physical *object = multicast_of(handle);

	CU_NEEDS(object != NULL && size > 0 && offset <= object->size && size <= object->size - offset);
	return cu_range_check(address, size, 0) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMulticastBindMem(CUmemGenericAllocationHandle mcHandle, size_t mcOffset,
				    CUmemGenericAllocationHandle memHandle, size_t memOffset, size_t size,
				    unsigned long long flags)
{
	CU_ENTER("handle=%#llx offset=%zu memory=%#llx size=%zu flags=%llu", mcHandle, mcOffset, memHandle,
		 size, flags);
	CU_NEEDS(flags == 0);
	return bind_memory(mcHandle, mcOffset, memHandle, memOffset, size);
}

CUresult CUDAAPI cuMulticastBindMem_v2(CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset,
				       CUmemGenericAllocationHandle memHandle, size_t memOffset, size_t size,
				       unsigned long long flags)
{
	CU_ENTER("handle=%#llx dev=%d offset=%zu memory=%#llx size=%zu flags=%llu", mcHandle, dev, mcOffset,
		 memHandle, size, flags);
	CU_NEEDS(flags == 0);
	if (cu_device_at(dev) == NULL)
		return CUDA_ERROR_INVALID_DEVICE;
	return bind_memory(mcHandle, mcOffset, memHandle, memOffset, size);
}

CUresult CUDAAPI cuMulticastBindAddr(CUmemGenericAllocationHandle mcHandle, size_t mcOffset,
				     CUdeviceptr memptr, size_t size, unsigned long long flags)
{
	CU_ENTER("handle=%#llx offset=%zu memptr=%#llx size=%zu flags=%llu", mcHandle, mcOffset, memptr, size,
		 flags);
	CU_NEEDS(flags == 0);
	return bind_address(mcHandle, mcOffset, memptr, size);
}

CUresult CUDAAPI cuMulticastBindAddr_v2(CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset,
					CUdeviceptr memptr, size_t size, unsigned long long flags)
{
	CU_ENTER("handle=%#llx dev=%d offset=%zu memptr=%#llx size=%zu flags=%llu", mcHandle, dev, mcOffset,
		 memptr, size, flags);
	CU_NEEDS(flags == 0);
	if (cu_device_at(dev) == NULL)
		return CUDA_ERROR_INVALID_DEVICE;
	return bind_address(mcHandle, mcOffset, memptr, size);
}

CUresult CUDAAPI cuMulticastUnbind(CUmemGenericAllocationHandle mcHandle, CUdevice dev, size_t mcOffset,
				   size_t size)
{
	CU_ENTER("handle=%#llx dev=%d offset=%zu size=%zu", mcHandle, dev, mcOffset, size);
	const struct cu_physical *object = multicast_of(mcHandle);

	CU_NEEDS(object != NULL && size > 0 && mcOffset <= object->size && size <= object->size - mcOffset);
	return cu_device_at(dev) != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
