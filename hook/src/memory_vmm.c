/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory made as a handle and mapped by address. It lives as long as one handle or one mapping of it does,
 * and is charged once for that long. A handle imported from elsewhere was charged where it was made.
 *
 * Each reference is one entry of a table: a handle that was handed out twice stands in it twice.
 */
#include "charge.h"
#include "lock.h"
#include "pages.h"
#include "place.h"
#include "resolve.h"
#include "wait.h"

/* One physical piece of memory. */
struct block {
	struct block *next; /* in the list of free records */
	uint64_t units;
	uint32_t card;
	uint32_t references;
};

struct mapping {
	struct mapping *next;
	struct block *block; /* NULL: somebody else's memory */
	uint64_t size;
	uint64_t start;
};

/* Smallest step in which the driver maps. */
#define MAP_STEP 65536ull

/* Records come from pages and go back into a list, under the lock of rare things. */
static void *record_take(void **list, size_t size)
{
	struct aq_process *process = aq_process();
	aq_lock(&process->claiming);
	if (*list == NULL) {
		const size_t bytes = 65536;
		char *pages = aq_pages(bytes);
		for (size_t at = 0; pages && at + size <= bytes; at += size) {
			*(void **)(void *)(pages + at) = *list;
			*list = pages + at;
		}
	}
	void *record = *list;
	if (record)
		*list = *(void **)record;
	aq_unlock(&process->claiming);
	return record;
}

static void record_give(void **list, void *record)
{
	struct aq_process *process = aq_process();
	aq_lock(&process->claiming);
	*(void **)record = *list;
	*list = record;
	aq_unlock(&process->claiming);
}

static void let_go(struct block *block)
{
	if (block == NULL || __atomic_sub_fetch(&block->references, 1, __ATOMIC_ACQ_REL) != 0)
		return;
	aq_uncharge(block->card, block->units);
	record_give(&aq_process()->free_blocks, block);
}

static struct block *block_of(CUmemGenericAllocationHandle handle)
{
	uint64_t value;
	return aq_table_get(&aq_process()->handles, handle, &value) ? (struct block *)(uintptr_t)value : NULL;
}

/* A device, whole or a part of it; -1: the host. */
static CUdevice location_device(const CUmemLocation *location)
{
	if (location->type == CU_MEM_LOCATION_TYPE_DEVICE)
		return location->id;
	if (location->type == CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN)
		return location->id & 0xff;
	return -1;
}

HOOK(CUresult, cuMemCreate,
     (CUmemGenericAllocationHandle * handle, size_t size, const CUmemAllocationProp *properties,
      unsigned long long flags))
{
	struct aq_place place;
	CUdevice device = properties ? location_device(&properties->location) : -1;
	enum aq_verdict verdict = device < 0 || size == 0 ? AQ_PASS : aq_place_device(device, &place);
	if (verdict == AQ_PASS)
		return REAL(cuMemCreate)(handle, size, properties, flags);
	/* An ordinal that does not exist is for the driver to name. */
	if (verdict == AQ_REFUSE)
		return CUDA_ERROR_NOT_PERMITTED;
	uint64_t units = aq_units_of(size);
	struct block *block = record_take(&aq_process()->free_blocks, sizeof(struct block));
	if (block == NULL)
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
	if (aq_charge(place.card, units, AQ_REFUSED_HANDLE) == 0) {
		*block = (struct block){NULL, units, place.card, 1};
		struct aq_wait wait = {0};
		do
			result = REAL(cuMemCreate)(handle, size, properties, flags);
		while (result == CUDA_ERROR_OUT_OF_MEMORY && aq_wait_more(place.card, &wait));
		if (result == CUDA_SUCCESS) {
			if (aq_table_put(&aq_process()->handles, *handle, (uintptr_t)block))
				return result;
			REAL(cuMemRelease)(*handle);
			result = CUDA_ERROR_OUT_OF_MEMORY;
		}
		if (result == CUDA_ERROR_OUT_OF_MEMORY)
			aq_refused(place.card, AQ_REFUSED_HANDLE);
		aq_uncharge(place.card, units);
	}
	record_give(&aq_process()->free_blocks, block);
	return result;
}

HOOK(CUresult, cuMemRelease, (CUmemGenericAllocationHandle handle))
{
	struct aq_process *process = aq_process();
	uint64_t value = 0;
	bool ours = aq_active() && aq_table_take(&process->handles, handle, &value);
	CUresult result = REAL(cuMemRelease)(handle);
	if (ours && result != CUDA_SUCCESS)
		aq_table_put(&process->handles, handle, value);
	else if (ours)
		let_go((struct block *)(uintptr_t)value);
	return result;
}

HOOK(CUresult, cuMemMap,
     (CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
      unsigned long long flags))
{
	struct aq_process *process = aq_process();
	if (!aq_active())
		return REAL(cuMemMap)(address, size, offset, handle, flags);
	struct mapping *mapping = record_take(&process->free_mappings, sizeof(struct mapping));
	if (mapping == NULL)
		return CUDA_ERROR_OUT_OF_MEMORY;
	/* The reference is taken first: another thread may release the handle as soon as it is mapped. */
	struct block *block = block_of(handle);
	if (block)
		__atomic_add_fetch(&block->references, 1, __ATOMIC_ACQ_REL);
	*mapping = (struct mapping){NULL, block, size, address};
	CUresult result = REAL(cuMemMap)(address, size, offset, handle, flags);
	if (result == CUDA_SUCCESS) {
		if (aq_table_put(&process->mappings, address, (uintptr_t)mapping))
			return result;
		REAL(cuMemUnmap)(address, size);
		result = CUDA_ERROR_OUT_OF_MEMORY;
	}
	let_go(block);
	record_give(&process->free_mappings, mapping);
	return result;
}

HOOK(CUresult, cuMemUnmap, (CUdeviceptr address, size_t size))
{
	struct aq_process *process = aq_process();
	struct mapping *taken = NULL;
	uint64_t value;
	/* One call may undo several mappings that lie side by side. */
	for (CUdeviceptr at = address; aq_active() && at - address < size;) {
		struct mapping *mapping = NULL;
		if (aq_table_take(&process->mappings, at, &value))
			mapping = (struct mapping *)(uintptr_t)value;
		at += mapping ? mapping->size : MAP_STEP;
		if (mapping) {
			mapping->next = taken;
			taken = mapping;
		}
	}
	CUresult result = REAL(cuMemUnmap)(address, size);
	while (taken) {
		struct mapping *mapping = taken;
		taken = mapping->next;
		if (result != CUDA_SUCCESS) {
			aq_table_put(&process->mappings, mapping->start, (uintptr_t)mapping);
			continue;
		}
		let_go(mapping->block);
		record_give(&process->free_mappings, mapping);
	}
	return result;
}

struct search {
	uint64_t address;
	struct block *found;
};

static void containing(struct aq_table *table, uint64_t key, uint64_t value, void *argument)
{
	struct search *search = argument;
	const struct mapping *mapping = (const struct mapping *)(uintptr_t)value;
	(void)table;
	if (search->address - key < mapping->size)
		search->found = mapping->block;
}

HOOK(CUresult, cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle * handle, void *address))
{
	CUresult result = REAL(cuMemRetainAllocationHandle)(handle, address);
	if (result != CUDA_SUCCESS || !aq_active())
		return result;
	struct aq_process *process = aq_process();
	struct block *block = block_of(*handle);
	if (block == NULL) {
		struct search search = {(uintptr_t)address, NULL};
		aq_table_each(&process->mappings, containing, &search);
		block = search.found;
	}
	if (block) {
		__atomic_add_fetch(&block->references, 1, __ATOMIC_ACQ_REL);
		if (!aq_table_put(&process->handles, *handle, (uintptr_t)block))
			__atomic_sub_fetch(&block->references, 1, __ATOMIC_ACQ_REL);
	}
	return result;
}
