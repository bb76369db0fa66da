/* SPDX-License-Identifier: Apache-2.0
 *
 * Virtual memory management: ranges of addresses and what is mapped in them. See cuda_vmm.h; physical pieces
 * stand in cuda_physical.c.
 */
#include "cuda_vmm.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cuda_parts.h"
#include "cuda_physical.h"

struct mapping {
	CUdeviceptr base;
	size_t size, offset;
	struct cu_physical *physical;
	uint64_t readable, writable; /* devices, the first 64 */
	uint32_t host_access;
};

struct range {
	struct range *next;
	CUdeviceptr base;
	size_t size;
	struct mapping *mapping; /* in the order of their addresses */
	size_t count, room;
};

static struct range *ranges;

void cu_vmm_forget(void)
{
	ranges = NULL;
}

static struct range *range_of(CUdeviceptr address)
{
	for (struct range *range = ranges; range != NULL; range = range->next)
		if (address - range->base < range->size)
			return range;
	return NULL;
}

/* Index of the first mapping that ends behind `address`. */
static size_t first_behind(const struct range *range, CUdeviceptr address)
{
	size_t low = 0, high = range->count;

	while (low < high) {
		size_t middle = (low + high) / 2;

		if (range->mapping[middle].base + range->mapping[middle].size > address)
			high = middle;
		else
			low = middle + 1;
	}
	return low;
}

static struct mapping *mapping_of(CUdeviceptr address)
{
	struct range *range = range_of(address);
	size_t index = range != NULL ? first_behind(range, address) : 0;

	return range != NULL && index < range->count && range->mapping[index].base <= address
		   ? &range->mapping[index]
		   : NULL;
}

int cu_vmm_is_reserved(CUdeviceptr address)
{
	cu_lock();
	int found = range_of(address) != NULL;

	cu_unlock();
	return found;
}

int cu_vmm_range(CUdeviceptr address, CUdeviceptr *base, size_t *size)
{
	const struct range *range = range_of(address);

	if (range == NULL)
		return 0;
	*base = range->base;
	*size = range->size;
	return 1;
}

int cu_vmm_mapping(CUdeviceptr address, CUdeviceptr *base, size_t *size, struct cu_physical **physical)
{
	const struct mapping *mapping = mapping_of(address);

	if (mapping == NULL)
		return 0;
	*base = mapping->base;
	*size = mapping->size;
	*physical = mapping->physical;
	return 1;
}

int cu_vmm_span(CUdeviceptr address, struct cu_span *span)
{
	const struct mapping *mapping = mapping_of(address);

	/* Mapped, but nobody was given access: as good as not there. */
	if (mapping == NULL || (mapping->readable == 0 && !mapping->host_access) ||
	    cu_physical_bytes(mapping->physical) == NULL)
		return -1;
	*span = (struct cu_span){mapping->physical->bytes + mapping->offset + (address - mapping->base),
				 mapping->size - (address - mapping->base), NULL};
	return 0;
}

/* ---- ranges ------------------------------------------------------------------------------------------- */

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr,
				     unsigned long long flags)
{
	CU_ENTER("ptr=%p size=%zu alignment=%zu addr=%#llx flags=%llu", (void *)ptr, size, alignment, addr,
		 flags);
	size_t step = fg_state->driver.vmm_granularity, whole;
	struct range *range;
	char *map;

	CU_NEEDS(ptr != NULL && size > 0 && size % step == 0 && (alignment & (alignment - 1)) == 0 &&
		 flags == 0);
	if (alignment < step)
		alignment = step;
	if (__builtin_add_overflow(size, alignment, &whole))
		return CUDA_ERROR_OUT_OF_MEMORY;
	range = calloc(1, sizeof *range);
	/* `addr` is only a wish; the address space is what mmap gives. */
	map = mmap((void *)(uintptr_t)addr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
		   0);
	if (range == NULL || map == MAP_FAILED) {
		free(range);
		if (map != MAP_FAILED)
			munmap(map, whole);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	char *aligned = (char *)(((uintptr_t)map + alignment - 1) & ~(uintptr_t)(alignment - 1));

	if (aligned > map)
		munmap(map, (size_t)(aligned - map));
	if (aligned + size < map + whole)
		munmap(aligned + size, (size_t)(map + whole - aligned - size));
	range->base = (CUdeviceptr)(uintptr_t)aligned;
	range->size = size;
	cu_lock();
	range->next = ranges;
	ranges = range;
	cu_unlock();
	*ptr = range->base;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr ptr, size_t size)
{
	CU_ENTER("ptr=%#llx size=%zu", ptr, size);
	CUresult result = CUDA_ERROR_INVALID_VALUE;

	cu_lock();
	for (struct range **link = &ranges; *link != NULL; link = &(*link)->next) {
		struct range *range = *link;

		if (range->base != ptr || range->size != size || range->count > 0)
			continue;
		*link = range->next;
		munmap((void *)(uintptr_t)range->base, range->size);
		free(range->mapping);
		free(range);
		result = CUDA_SUCCESS;
		break;
	}
	cu_unlock();
	return result;
}

/* ---- mappings ----------------------------------------------------------------------------------------- */

/* Needs cu_lock. */
static CUresult map(CUdeviceptr ptr, size_t size, size_t offset, struct cu_physical *physical)
{
	struct range *range = range_of(ptr);
	size_t index;

	CU_NEEDS(range != NULL && size <= range->size - (ptr - range->base));
	index = first_behind(range, ptr);
	CU_NEEDS(index == range->count || range->mapping[index].base >= ptr + size);
	if (range->count == range->room) {
		size_t room = range->room > 0 ? 2 * range->room : 16;
		struct mapping *more = realloc(range->mapping, room * sizeof *more);

		if (more == NULL)
			return CUDA_ERROR_OUT_OF_MEMORY;
		range->mapping = more;
		range->room = room;
	}
	memmove(&range->mapping[index + 1], &range->mapping[index],
		(range->count - index) * sizeof *range->mapping);
	range->mapping[index] =
	    (struct mapping){.base = ptr, .size = size, .offset = offset, .physical = physical};
	range->count++;
	physical->mappings++;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
			  unsigned long long flags)
{
	CU_ENTER("ptr=%#llx size=%zu offset=%zu handle=%#llx flags=%llu", ptr, size, offset, handle, flags);
	struct cu_physical *physical = cu_physical_of(handle);
	size_t step = fg_state->driver.vmm_granularity;
	CUresult result;

	CU_NEEDS(physical != NULL && size > 0 && flags == 0 && ptr % step == 0 && size % step == 0);
	CU_NEEDS(offset % step == 0 && offset <= physical->size && size <= physical->size - offset);
	cu_lock();
	result = map(ptr, size, offset, physical);
	cu_unlock();
	return result;
}

CUresult CUDAAPI cuMemUnmap(CUdeviceptr ptr, size_t size)
{
	CU_ENTER("ptr=%#llx size=%zu", ptr, size);
	struct range *range;
	size_t first, last, covered = 0;

	CU_NEEDS(size > 0);
	cu_lock();
	range = range_of(ptr);
	if (range == NULL) {
		cu_unlock();
		return CUDA_ERROR_INVALID_VALUE;
	}
	/* Whole mappings, without a gap. */
	first = last = first_behind(range, ptr);
	while (last < range->count && range->mapping[last].base == ptr + covered && covered < size)
		covered += range->mapping[last++].size;
	if (covered != size) {
		cu_unlock();
		return CUDA_ERROR_INVALID_VALUE;
	}
	for (size_t i = first; i < last; i++) {
		range->mapping[i].physical->mappings--;
		cu_physical_settle(range->mapping[i].physical);
	}
	memmove(&range->mapping[first], &range->mapping[last],
		(range->count - last) * sizeof *range->mapping);
	range->count -= last - first;
	cu_unlock();
	return CUDA_SUCCESS;
}

static CUresult check_access(const CUmemAccessDesc *desc, size_t count)
{
	for (size_t i = 0; i < count; i++) {
		if (desc[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
			if (cu_device_at(desc[i].location.id) == NULL)
				return CUDA_ERROR_INVALID_DEVICE;
		} else if (desc[i].location.type < CU_MEM_LOCATION_TYPE_HOST ||
			   desc[i].location.type > CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT) {
			return CUDA_ERROR_INVALID_VALUE;
		}
		CU_NEEDS(desc[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE ||
			 desc[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READ ||
			 desc[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
	}
	return CUDA_SUCCESS;
}

static CUresult set_one(struct mapping *mapping, const CUmemAccessDesc *desc)
{
	uint64_t bit = UINT64_C(1) << (desc->location.id & 63);

	if (desc->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
		mapping->host_access = desc->flags != CU_MEM_ACCESS_FLAGS_PROT_NONE;
		return CUDA_SUCCESS;
	}
	const struct cu_device *device = cu_device_at(desc->location.id), *home = mapping->physical->device;

	if (home != NULL && home != device && desc->flags != CU_MEM_ACCESS_FLAGS_PROT_NONE &&
	    !fg_p2p_possible(device->card, home->card))
		return CUDA_ERROR_INVALID_DEVICE;
	mapping->readable =
	    desc->flags != CU_MEM_ACCESS_FLAGS_PROT_NONE ? mapping->readable | bit : mapping->readable & ~bit;
	mapping->writable = desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? mapping->writable | bit
									      : mapping->writable & ~bit;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)
{
	CU_ENTER("ptr=%#llx size=%zu desc=%p count=%zu", ptr, size, (const void *)desc, count);
	CUresult result;
	size_t covered = 0, index;

	CU_NEEDS(desc != NULL && count > 0 && size > 0);
	result = check_access(desc, count);
	if (result != CUDA_SUCCESS)
		return result;
	cu_lock();
	struct range *range = range_of(ptr);

	index = range != NULL ? first_behind(range, ptr) : 0;
	while (result == CUDA_SUCCESS && covered < size) {
		if (range == NULL || index == range->count || range->mapping[index].base != ptr + covered) {
			result = CUDA_ERROR_INVALID_VALUE;
			break;
		}
		for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++)
			result = set_one(&range->mapping[index], &desc[i]);
		covered += range->mapping[index++].size;
	}
	cu_unlock();
	return result;
}

CUresult CUDAAPI cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr ptr)
{
	CU_ENTER("flags=%p location=%p ptr=%#llx", (void *)flags, (const void *)location, ptr);
	CU_NEEDS(flags != NULL && location != NULL);
	if (location->type == CU_MEM_LOCATION_TYPE_DEVICE && cu_device_at(location->id) == NULL)
		return CUDA_ERROR_INVALID_DEVICE;
	cu_lock();
	const struct mapping *mapping = mapping_of(ptr);
	uint64_t bit = UINT64_C(1) << (location->id & 63);

	if (mapping != NULL && location->type != CU_MEM_LOCATION_TYPE_DEVICE)
		*flags =
		    mapping->host_access ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
	else if (mapping != NULL)
		*flags = mapping->writable & bit   ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
			 : mapping->readable & bit ? CU_MEM_ACCESS_FLAGS_PROT_READ
						   : CU_MEM_ACCESS_FLAGS_PROT_NONE;
	cu_unlock();
	return mapping != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr)
{
	CU_ENTER("handle=%p addr=%p", (void *)handle, addr);
	CU_NEEDS(handle != NULL);
	cu_lock();
	const struct mapping *mapping = mapping_of((CUdeviceptr)(uintptr_t)addr);

	if (mapping != NULL) {
		mapping->physical->handles++;
		*handle = (CUmemGenericAllocationHandle)(uintptr_t)mapping->physical;
	}
	cu_unlock();
	return mapping != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
