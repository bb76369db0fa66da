/* SPDX-License-Identifier: Apache-2.0
 *
 * Managed memory. It is charged on no card when it is allocated, and can be more than all of them: what a
 * device works on (prefetches, copies, fills) moves there as far as there is room, and is charged there as
 * long as it stays.
 */
#include <string.h>

#include "cuda_memory.h"
#include "cuda_parts.h"
#include "cuda_time.h"

void cu_managed_leave(struct cu_alloc *alloc)
{
	if (alloc->resident > 0) {
		fg_account_give((uint32_t)alloc->seat, alloc->resident);
		alloc->resident = 0;
	}
}

static void make_room(struct cu_alloc *other, void *argument)
{
	/* Other managed memory of this process gives way, as the driver evicts it. */
	const struct cu_alloc *wanted = argument;

	if (other->kind == CU_ALLOC_MANAGED && other != wanted && other->resident > 0 &&
	    other->seat == wanted->seat)
		cu_managed_leave(other);
}

void cu_managed_move(struct cu_alloc *alloc, struct cu_device *device, size_t bytes)
{
	uint64_t page = fg_state->driver.managed_page, whole = cu_round(alloc->size, page), goal;
	int seat = cu_seat(device);

	if (seat < 0)
		return;
	if (alloc->seat != seat)
		cu_managed_leave(alloc);
	alloc->seat = seat;
	goal = alloc->resident + cu_round(bytes, page);
	if (goal > whole)
		goal = whole;
	for (int attempt = 0; goal > alloc->resident; attempt++) {
		uint64_t more = goal - alloc->resident, free_bytes, total_bytes;

		if (fg_account_take((uint32_t)seat, more) == 0) {
			alloc->resident = goal;
			return;
		}
		if (attempt == 0) {
			cu_space_each(make_room, alloc);
			continue;
		}
		fg_account_look(device->card, device->gi, &free_bytes, &total_bytes);
		free_bytes &= ~(page - 1);
		if (attempt > 4 || free_bytes == 0)
			return;
		if (free_bytes < more)
			goal = alloc->resident + free_bytes;
	}
}

CUresult CUDAAPI cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned int flags)
{
	CU_ENTER("dptr=%p bytesize=%zu flags=%u", (void *)dptr, bytesize, flags);
	CU_CONTEXT(context);
	CU_UNSAFE_IN_CAPTURE(context);
	struct cu_alloc *alloc;
	CUresult result;

	CU_NEEDS(dptr != NULL && bytesize > 0 &&
		 (flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST));
	fg_control_follow(fg_coarse_ns());
	cu_memory_delay();
	result = cu_memory_make(context->device, context, bytesize, 0, CU_ALLOC_MANAGED, &alloc);
	if (result != CUDA_SUCCESS)
		return result;
	alloc->flags = flags;
	alloc->touched = 1; /* the host may write it at any time */
	*dptr = alloc->base;
	return CUDA_SUCCESS;
}

/* ---- prefetch and advice ------------------------------------------------------------------------------ */

/* The managed piece that holds the whole range, or NULL. Needs cu_lock. */
static struct cu_alloc *managed(CUdeviceptr address, size_t count)
{
	struct cu_alloc *alloc = cu_space_find(address);

	return alloc != NULL && alloc->kind == CU_ALLOC_MANAGED && count > 0 &&
		       count <= alloc->size - (address - alloc->base)
		   ? alloc
		   : NULL;
}

static CUresult move(CUdeviceptr address, size_t count, const CUmemLocation *location)
{
	struct cu_device *device =
	    location->type == CU_MEM_LOCATION_TYPE_DEVICE ? cu_device_at(location->id) : NULL;
	struct cu_alloc *alloc;

	if (location->type == CU_MEM_LOCATION_TYPE_DEVICE && device == NULL)
		return CUDA_ERROR_INVALID_DEVICE;
	if (location->type < CU_MEM_LOCATION_TYPE_DEVICE ||
	    location->type > CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT)
		return CUDA_ERROR_INVALID_VALUE;
	cu_lock();
	alloc = managed(address, count);
	if (alloc != NULL) {
		alloc->last_prefetch = device != NULL ? device->ordinal : CU_DEVICE_CPU;
		if (device != NULL)
			cu_managed_move(alloc, device, count);
		else
			cu_managed_leave(alloc);
	}
	cu_unlock();
	return alloc != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUmemLocation location_of(CUdevice device)
{
	return (CUmemLocation){.type = device == CU_DEVICE_CPU ? CU_MEM_LOCATION_TYPE_HOST
							       : CU_MEM_LOCATION_TYPE_DEVICE,
			       .id = device == CU_DEVICE_CPU ? 0 : device};
}

static CUresult prefetch(const char *name, int per_thread, CUdeviceptr devPtr, size_t count,
			 CUdevice dstDevice, CUstream hStream)
{
	CU_ENTER_AS(name, "devPtr=%#llx count=%zu dst=%d stream=%p", devPtr, count, dstDevice,
		    (void *)hStream);
	CU_STREAM(stream, context, hStream, per_thread);
	CUmemLocation location = location_of(dstDevice);

	CU_NEEDS(context != NULL && stream->capture == NULL);
	return move(devPtr, count, &location);
}
CU_TWINS(cuMemPrefetchAsync, cuMemPrefetchAsync_ptsz, prefetch,
	 (CUdeviceptr devPtr, size_t count, CUdevice dstDevice, CUstream hStream), devPtr, count, dstDevice,
	 hStream)

static CUresult prefetch_2(const char *name, int per_thread, CUdeviceptr devPtr, size_t count,
			   CUmemLocation location, unsigned int flags, CUstream hStream)
{
	CU_ENTER_AS(name, "devPtr=%#llx count=%zu type=%d id=%d stream=%p", devPtr, count, (int)location.type,
		    location.id, (void *)hStream);
	CU_STREAM(stream, context, hStream, per_thread);
	CU_NEEDS(flags == 0 && context != NULL && stream->capture == NULL);
	return move(devPtr, count, &location);
}
CU_TWINS(cuMemPrefetchAsync_v2, cuMemPrefetchAsync_v2_ptsz, prefetch_2,
	 (CUdeviceptr devPtr, size_t count, CUmemLocation location, unsigned int flags, CUstream hStream),
	 devPtr, count, location, flags, hStream)

static CUresult advise(CUdeviceptr address, size_t count, CUmem_advise advice, int device)
{
	struct cu_alloc *alloc;

	CU_NEEDS(device == CU_DEVICE_CPU || cu_device_at(device) != NULL ||
		 advice == CU_MEM_ADVISE_SET_READ_MOSTLY || advice == CU_MEM_ADVISE_UNSET_READ_MOSTLY ||
		 advice == CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION);
	CU_NEEDS(advice >= CU_MEM_ADVISE_SET_READ_MOSTLY && advice <= CU_MEM_ADVISE_UNSET_ACCESSED_BY);
	cu_lock();
	alloc = managed(address, count);
	if (alloc != NULL && advice == CU_MEM_ADVISE_SET_PREFERRED_LOCATION)
		alloc->preferred = device;
	else if (alloc != NULL && advice == CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION)
		alloc->preferred = CU_DEVICE_INVALID;
	else if (alloc != NULL && advice <= CU_MEM_ADVISE_UNSET_READ_MOSTLY)
		alloc->advice_read_mostly = advice == CU_MEM_ADVISE_SET_READ_MOSTLY;
	cu_unlock();
	return alloc != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemAdvise(CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUdevice device)
{
	CU_ENTER("devPtr=%#llx count=%zu advice=%d dev=%d", devPtr, count, (int)advice, device);
	return advise(devPtr, count, advice, device);
}

CUresult CUDAAPI cuMemAdvise_v2(CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUmemLocation location)
{
	CU_ENTER("devPtr=%#llx count=%zu advice=%d type=%d id=%d", devPtr, count, (int)advice,
		 (int)location.type, location.id);
	return advise(devPtr, count, advice,
		      location.type == CU_MEM_LOCATION_TYPE_DEVICE ? location.id : (int)CU_DEVICE_CPU);
}

static CUresult range_attribute(void *data, size_t size, CUmem_range_attribute attribute, CUdeviceptr address,
				size_t count)
{
	struct cu_alloc *alloc;
	int value = 0;

	CU_NEEDS(data != NULL && size >= sizeof value);
	cu_lock();
	alloc = managed(address, count);
	if (alloc != NULL && attribute == CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY)
		value = alloc->advice_read_mostly;
	else if (alloc != NULL && attribute == CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION)
		value = alloc->preferred;
	else if (alloc != NULL && attribute == CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION)
		value = alloc->last_prefetch;
	else if (alloc != NULL)
		value = CU_DEVICE_INVALID;
	cu_unlock();
	if (alloc == NULL || attribute < CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY)
		return CUDA_ERROR_INVALID_VALUE;
	memset(data, 0xff, attribute == CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY ? size : 0);
	memcpy(data, &value, sizeof value);
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemRangeGetAttribute(void *data, size_t dataSize, CUmem_range_attribute attribute,
					CUdeviceptr devPtr, size_t count)
{
	CU_ENTER("data=%p attribute=%d devPtr=%#llx count=%zu", data, (int)attribute, devPtr, count);
	return range_attribute(data, dataSize, attribute, devPtr, count);
}

CUresult CUDAAPI cuMemRangeGetAttributes(void **data, size_t *dataSizes, CUmem_range_attribute *attributes,
					 size_t numAttributes, CUdeviceptr devPtr, size_t count)
{
	CU_ENTER("data=%p n=%zu devPtr=%#llx count=%zu", (void *)data, numAttributes, devPtr, count);
	CU_NEEDS(data != NULL && dataSizes != NULL && attributes != NULL && numAttributes > 0);
	for (size_t i = 0; i < numAttributes; i++) {
		CUresult result = range_attribute(data[i], dataSizes[i], attributes[i], devPtr, count);

		if (result != CUDA_SUCCESS)
			return result;
	}
	return CUDA_SUCCESS;
}
