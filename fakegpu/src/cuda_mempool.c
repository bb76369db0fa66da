/* SPDX-License-Identifier: Apache-2.0
 *
 * Pools of stream-ordered memory: growing, shrinking, pieces. See cuda_mempool.h; the calls of programs stand
 * in cuda_mempool_api.c.
 */
#include "cuda_mempool.h"

#include "cuda_memory.h"
#include "cuda_parts.h"

uint32_t cu_pools_loose;

struct CUmemPoolHandle_st *cu_pool_make(struct cu_device *device, uint64_t grow)
{
	struct CUmemPoolHandle_st *pool = cu_object_make(CU_KIND_POOL, sizeof *pool);

	if (pool == NULL)
		return NULL;
	pool->device = device;
	pool->grow = grow;
	pool->access = UINT64_C(1) << (device->ordinal & 63);
	pool->reuse[0] = pool->reuse[1] = pool->reuse[2] = 1;
	pool->location = (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device->ordinal};
	pool->next = device->pools;
	device->pools = pool;
	return pool;
}

struct CUmemPoolHandle_st *cu_pool_default(struct cu_device *device)
{
	if (device->default_pool == NULL) {
		device->default_pool = cu_pool_make(device, fg_state->driver.pool_grow_bytes);
		if (device->default_pool != NULL)
			device->default_pool->is_default = 1;
	}
	return device->default_pool;
}

struct CUmemPoolHandle_st *cu_pool_current(struct cu_device *device)
{
	if (device->current_pool == NULL)
		device->current_pool = cu_pool_default(device);
	return device->current_pool;
}

struct CUmemPoolHandle_st *cu_pool_graph(struct cu_device *device)
{
	if (device->graph_pool == NULL) {
		device->graph_pool = cu_pool_make(device, fg_state->driver.vmm_granularity);
		if (device->graph_pool != NULL) {
			device->graph_pool->is_graph = 1;
			/* Graph memory stays until cuDeviceGraphMemTrim. */
			device->graph_pool->threshold = UINT64_MAX;
		}
	}
	return device->graph_pool;
}

static void shrink(struct CUmemPoolHandle_st *pool, uint64_t to)
{
	if (to >= pool->reserved)
		return;
	if (!pool->host)
		fg_account_give((uint32_t)pool->device->seat, pool->reserved - to);
	pool->reserved = to;
}

void cu_pool_trim(struct CUmemPoolHandle_st *pool, uint64_t keep)
{
	uint64_t least = cu_round(pool->used, pool->grow);

	keep = keep > UINT64_MAX - pool->grow ? keep : cu_round(keep, pool->grow);
	shrink(pool, keep > least ? keep : least);
}

/* Takes `more` bytes of the card for the pool. */
static int take(const struct CUmemPoolHandle_st *pool, uint64_t more)
{
	int seat = pool->host ? 0 : cu_seat(pool->device);

	return pool->host || (seat >= 0 && fg_account_take((uint32_t)seat, more) == 0);
}

CUresult cu_pool_reserve(struct CUmemPoolHandle_st *pool, uint64_t size)
{
	uint64_t wanted = pool->used + size, more;

	if (wanted < size || (pool->max_size > 0 && wanted > pool->max_size))
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (wanted > pool->reserved) {
		more = cu_round(wanted - pool->reserved, pool->grow);
		if (!take(pool, more)) {
			/* What other pools of the device keep unused goes first; then smaller steps do. */
			for (struct CUmemPoolHandle_st *other = pool->device->pools; other != NULL;
			     other = other->next)
				cu_pool_trim(other, 0);
			if (!take(pool, more)) {
				more = cu_round(wanted - pool->reserved, fg_state->driver.vmm_granularity);
				if (!take(pool, more))
					return CUDA_ERROR_OUT_OF_MEMORY;
			}
		}
		pool->reserved += more;
		if (pool->reserved > pool->reserved_high)
			pool->reserved_high = pool->reserved;
	}
	pool->used = wanted;
	if (pool->used > pool->used_high)
		pool->used_high = pool->used;
	return CUDA_SUCCESS;
}

void cu_pool_unreserve(struct CUmemPoolHandle_st *pool, uint64_t size)
{
	pool->used -= size;
	if (pool->ended && pool->pieces == 0) {
		shrink(pool, 0);
		for (struct CUmemPoolHandle_st **link = &pool->device->pools; *link != NULL;
		     link = &(*link)->next)
			if (*link == pool) {
				*link = pool->next;
				break;
			}
		cu_object_end(pool);
		return;
	}
	if (pool->reserved > pool->threshold)
		cu_pools_loose = 1;
}

void cu_pools_settle(struct cu_device *device)
{
	cu_lock();
	cu_pools_loose = 0;
	for (struct CUmemPoolHandle_st *pool = device->pools; pool != NULL; pool = pool->next)
		if (pool->reserved > pool->threshold)
			cu_pool_trim(pool, pool->threshold);
	/* Pools of other devices wait for a synchronisation of their own. */
	for (int i = 0; i < cu_device_count; i++)
		for (struct CUmemPoolHandle_st *pool = cu_devices[i].pools; pool != NULL; pool = pool->next)
			if (&cu_devices[i] != device && pool->reserved > pool->threshold &&
			    pool->reserved > cu_round(pool->used, pool->grow))
				cu_pools_loose = 1;
	cu_unlock();
}

CUresult cu_pool_take(struct CUmemPoolHandle_st *pool, size_t size, struct cu_alloc **made)
{
	uint64_t rounded = cu_round(size, fg_state->driver.plain_round);
	struct cu_alloc *alloc;
	CUresult result;

	if (rounded < size)
		return CUDA_ERROR_OUT_OF_MEMORY;
	cu_lock();
	result = cu_pool_reserve(pool, rounded);
	if (result == CUDA_SUCCESS) {
		alloc = cu_space_take(size, (int)pool->host);
		if (alloc == NULL) {
			cu_pool_unreserve(pool, rounded);
			result = CUDA_ERROR_OUT_OF_MEMORY;
		} else {
			alloc->kind = CU_ALLOC_POOL;
			alloc->device = pool->device;
			alloc->owner = pool;
			pool->pieces++;
			*made = alloc;
		}
	}
	cu_unlock();
	return result;
}

CUresult cu_pool_free(struct cu_alloc *alloc)
{
	struct CUmemPoolHandle_st *pool = alloc->owner;
	uint64_t rounded = cu_round(alloc->size, fg_state->driver.plain_round);

	if (alloc->kind == CU_ALLOC_POOL_IMPORT) {
		cu_memory_end(alloc);
		return CUDA_SUCCESS;
	}
	if (alloc->kind == CU_ALLOC_GRAPH) {
		/* The address stays the graph's; what goes is the memory behind it. */
		if (!alloc->resident)
			return CUDA_ERROR_INVALID_VALUE;
		alloc->resident = 0;
		if (alloc->touched)
			cu_forget_bytes(alloc->data, alloc->size);
		alloc->touched = 0;
		cu_pool_unreserve(cu_pool_graph(alloc->device), rounded);
		if (alloc->owner == NULL)
			cu_memory_end(alloc); /* the graph is gone already */
		return CUDA_SUCCESS;
	}
	cu_memory_end(alloc);
	pool->pieces--;
	cu_pool_unreserve(pool, rounded);
	return CUDA_SUCCESS;
}

static void end_piece(struct cu_alloc *alloc, void *device)
{
	if (alloc->device == device && (alloc->kind == CU_ALLOC_POOL || alloc->kind == CU_ALLOC_POOL_IMPORT ||
					(alloc->kind == CU_ALLOC_GRAPH && alloc->resident)))
		cu_pool_free(alloc);
}

void cu_pools_end(struct cu_device *device)
{
	cu_space_each(end_piece, device);
	for (struct CUmemPoolHandle_st *pool = device->pools; pool != NULL; pool = pool->next)
		cu_pool_trim(pool, 0);
}
