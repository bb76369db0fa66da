/* SPDX-License-Identifier: Apache-2.0
 *
 * See pool.h. Several threads may allocate from a pool and look at it at once. `pending` is raised before
 * `charged`, and a look reads `charged`, then `pending`, then asks the driver: so whatever happens in
 * between, it either fails to store its result or errs on the side of charging too much, and the next look
 * corrects.
 */
#include "pool.h"

#include <errno.h>

#include "charge.h"
#include "lock.h"
#include "priority.h"
#include "resolve.h"
#include "wait.h"

enum {
	ATTRIBUTE_RESERVED = 5,
	ATTRIBUTE_USED = 7,
	ATTRIBUTE_LOCATION_ID = 11,
	ATTRIBUTE_LOCATION_TYPE = 12,
};

/* A pool that belongs to the graphs of a device has no handle. */
static bool read_sizes(const struct aq_pool *pool, uint64_t *reserved, uint64_t *used)
{
	if (pool->handle)
		return REAL(cuMemPoolGetAttribute)(pool->handle, ATTRIBUTE_RESERVED, reserved) ==
			   CUDA_SUCCESS &&
		       (used == NULL ||
			REAL(cuMemPoolGetAttribute)(pool->handle, ATTRIBUTE_USED, used) == CUDA_SUCCESS);
	return REAL(cuDeviceGetGraphMemAttribute)(pool->ordinal, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT,
						  reserved) == CUDA_SUCCESS &&
	       (used == NULL || REAL(cuDeviceGetGraphMemAttribute)(
				    pool->ordinal, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, used) == CUDA_SUCCESS);
}

/* ---- records ------------------------------------------------------------------------------------ */

struct aq_pool *aq_pool_known(CUmemoryPool handle)
{
	struct aq_process *process = aq_process();
	uint32_t count = __atomic_load_n(&process->pools, __ATOMIC_ACQUIRE);
	for (uint32_t i = 0; i < count && handle; i++)
		if (__atomic_load_n(&process->pool[i].handle, __ATOMIC_ACQUIRE) == handle)
			return &process->pool[i];
	return NULL;
}

static struct aq_pool *enter(CUmemoryPool handle, CUdevice ordinal)
{
	struct aq_process *process = aq_process();
	int card = aq_card_of_ordinal(ordinal);
	if (card == AQ_NO_CARD)
		return NULL;
	aq_lock(&process->claiming);
	struct aq_pool *pool = aq_pool_known(handle);
	for (uint32_t i = 0; i < AQ_MAX_POOLS && pool == NULL; i++) {
		struct aq_pool *place = &process->pool[i];
		if (i < process->pools && place->handle)
			continue;
		place->card = (int16_t)card;
		place->ordinal = (int16_t)ordinal;
		place->ending = 0;
		__atomic_store_n(&place->handle, handle, __ATOMIC_RELEASE);
		if (i == process->pools)
			__atomic_store_n(&process->pools, i + 1, __ATOMIC_RELEASE);
		pool = place;
	}
	aq_unlock(&process->claiming);
	return pool;
}

void aq_pool_enter(CUmemoryPool handle, CUdevice ordinal)
{
	enter(handle, ordinal);
}

struct aq_pool *aq_pool_find(CUmemoryPool handle, CUdevice fallback)
{
	struct aq_pool *pool = aq_pool_known(handle);
	if (pool)
		return pool;
	int type, id;
	CUdevice ordinal = fallback;
	if (REAL(cuMemPoolGetAttribute)(handle, ATTRIBUTE_LOCATION_TYPE, &type) == CUDA_SUCCESS &&
	    REAL(cuMemPoolGetAttribute)(handle, ATTRIBUTE_LOCATION_ID, &id) == CUDA_SUCCESS) {
		if (type != CU_MEM_LOCATION_TYPE_DEVICE)
			return NULL;
		ordinal = id;
	}
	return enter(handle, ordinal);
}

/* ---- charging ----------------------------------------------------------------------------------- */

/* A pool grows in steps; the first ones seen are the largest. What a driver is seen to do makes them smaller.
 */
#define LARGEST_STEP  (32ull << 20 >> AQ_UNIT_SHIFT)
#define SMALLEST_STEP (2ull << 20 >> AQ_UNIT_SHIFT)

static uint64_t step_of(const struct aq_pool *pool)
{
	uint64_t step = __atomic_load_n(&pool->step, __ATOMIC_RELAXED);
	return step ? step : LARGEST_STEP;
}

/* The size is a multiple of the step, so the step is no larger than the lowest bit of any size. */
static void learn_step(struct aq_pool *pool, uint64_t units)
{
	uint64_t step = step_of(pool);
	while (step > SMALLEST_STEP && (units & (step - 1)))
		step >>= 1;
	__atomic_store_n(&pool->step, step, __ATOMIC_RELAXED);
}

static uint64_t growth(const struct aq_pool *pool, uint64_t units)
{
	uint64_t step = step_of(pool);
	return units > AQ_WORD_UNIT_MASK ? units : (units + step - 1) & ~(step - 1);
}

static int charge_growth(struct aq_pool_request *request, uint64_t units)
{
	struct aq_pool *pool = request->pool;
	uint64_t more = growth(pool, units);
	if (more > 0 && aq_charge_quickly((unsigned)pool->card, more) < 0)
		return -ENOMEM;
	request->charged = more;
	__atomic_add_fetch(&pool->pending, more, __ATOMIC_SEQ_CST);
	__atomic_add_fetch(&pool->charged, more, __ATOMIC_SEQ_CST);
	return 0;
}

/* Sets aside what the pool has and does not use, so that only the rest has to be charged. */
static int charge_rest(struct aq_pool_request *request, uint64_t units)
{
	struct aq_pool *pool = request->pool;
	uint64_t reserved, used, claimed = __atomic_load_n(&pool->claimed, __ATOMIC_SEQ_CST), part;
	if (!read_sizes(pool, &reserved, &used) || reserved <= used)
		return -ENOMEM;
	uint64_t spare = (reserved - used) >> AQ_UNIT_SHIFT;
	do {
		part = spare > claimed ? spare - claimed : 0;
		part = part < units ? part : units;
	} while (part > 0 && !__atomic_compare_exchange_n(&pool->claimed, &claimed, claimed + part, false,
							  __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
	request->claimed = part;
	if (part > 0 && charge_growth(request, units - part) == 0)
		return 0;
	__atomic_sub_fetch(&pool->claimed, part, __ATOMIC_SEQ_CST);
	request->claimed = 0;
	return -ENOMEM;
}

int aq_pool_begin(struct aq_pool_request *request, struct aq_pool *pool, uint64_t units)
{
	unsigned card = (unsigned)pool->card;
	aq_suspend_wait(card);
	*request = (struct aq_pool_request){pool, 0, 0};
	if (charge_growth(request, units) == 0)
		return 0;
	aq_make_room(card);
	if (charge_growth(request, units) == 0 || charge_rest(request, units) == 0)
		return 0;
	aq_pools_trim(card);
	if (charge_growth(request, units) == 0)
		return 0;
	struct aq_wait wait = {0};
	while (aq_wait_for_others(card, units, &wait))
		if (charge_growth(request, units) == 0)
			return 0;
	aq_refused(card, AQ_REFUSED_ASYNC);
	request->pool = NULL;
	return -ENOMEM;
}

/* Makes the charge what the driver says the pool has. */
static int adjust(struct aq_pool *pool, bool force)
{
	unsigned card = (unsigned)pool->card;
	for (;;) {
		uint64_t charged = __atomic_load_n(&pool->charged, __ATOMIC_SEQ_CST);
		uint64_t pending = __atomic_load_n(&pool->pending, __ATOMIC_SEQ_CST);
		uint64_t reserved, seen = charged;
		/* A driver that does not tell (during a capture, after its end) leaves the charge as it is.
		 */
		if (!read_sizes(pool, &reserved, NULL))
			return 0;
		learn_step(pool, aq_units_of(reserved));
		uint64_t target = aq_units_of(reserved) + pending;
		if (target > charged && aq_charge_quickly(card, target - charged) < 0) {
			if (!force)
				return -ENOMEM;
			aq_charge_anyway(card, target - charged);
		}
		if (__atomic_compare_exchange_n(&pool->charged, &seen, target, false, __ATOMIC_SEQ_CST,
						__ATOMIC_SEQ_CST)) {
			if (target < charged)
				aq_uncharge(card, charged - target);
			return 0;
		}
		if (target > charged)
			aq_uncharge(card, target - charged);
	}
}

int aq_pool_end(struct aq_pool_request *request)
{
	struct aq_pool *pool = request->pool;
	__atomic_sub_fetch(&pool->claimed, request->claimed, __ATOMIC_SEQ_CST);
	__atomic_sub_fetch(&pool->pending, request->charged, __ATOMIC_SEQ_CST);
	return adjust(pool, false);
}

void aq_pool_sync(struct aq_pool *pool)
{
	adjust(pool, true);
}

/* A pool that the program has destroyed while memory out of it was still in use ends when that is free. */
static void end_if_empty(struct aq_pool *pool)
{
	uint64_t reserved, used;
	if (!__atomic_load_n(&pool->ending, __ATOMIC_ACQUIRE) || !read_sizes(pool, &reserved, &used) ||
	    used > 0)
		return;
	if (__atomic_exchange_n(&pool->ending, 0, __ATOMIC_ACQ_REL))
		aq_pool_destroy(pool);
}

CUresult aq_pool_destroy(struct aq_pool *pool)
{
	CUmemoryPool handle = pool->handle;
	uint64_t reserved, used;
	if (read_sizes(pool, &reserved, &used) && used > 0) {
		/* The driver would let it live on where nobody can ask how large it is; so it lives on with
		 * us. */
		CUmemoryPool current, standard;
		if (REAL(cuDeviceGetMemPool)(&current, pool->ordinal) == CUDA_SUCCESS && current == handle &&
		    REAL(cuDeviceGetDefaultMemPool)(&standard, pool->ordinal) == CUDA_SUCCESS)
			REAL(cuDeviceSetMemPool)(pool->ordinal, standard);
		__atomic_store_n(&pool->ending, 1, __ATOMIC_RELEASE);
		return CUDA_SUCCESS;
	}
	CUresult result = REAL(cuMemPoolDestroy)(handle);
	if (result == CUDA_SUCCESS) {
		uint64_t charged = __atomic_exchange_n(&pool->charged, 0, __ATOMIC_SEQ_CST);
		unsigned card = (unsigned)pool->card;
		__atomic_store_n(&pool->handle, NULL, __ATOMIC_RELEASE);
		aq_uncharge(card, charged);
	}
	return result;
}

void aq_pools_sync_slowly(unsigned card)
{
	struct aq_process *process = aq_process();
	uint32_t count = __atomic_load_n(&process->pools, __ATOMIC_ACQUIRE);
	for (uint32_t i = 0; i < count; i++) {
		struct aq_pool *pool = &process->pool[i];
		if (__atomic_load_n(&pool->handle, __ATOMIC_ACQUIRE) && pool->card == (int16_t)card) {
			aq_pool_sync(pool);
			end_if_empty(pool);
		}
	}
	struct aq_pool *graph = &process->card[card].graph;
	if (__atomic_load_n(&process->graphs, __ATOMIC_RELAXED) && graph->charged)
		aq_pool_sync(graph);
}

void aq_pools_sync_all(void)
{
	for (unsigned card = 0; card < aq_card_count; card++)
		aq_pools_sync_slowly(card);
}

void aq_pools_trim(unsigned card)
{
	struct aq_process *process = aq_process();
	uint32_t count = __atomic_load_n(&process->pools, __ATOMIC_ACQUIRE);
	for (uint32_t i = 0; i < count; i++) {
		struct aq_pool *pool = &process->pool[i];
		CUmemoryPool handle = __atomic_load_n(&pool->handle, __ATOMIC_ACQUIRE);
		uint64_t reserved, used;
		if (handle && pool->card == (int16_t)card && read_sizes(pool, &reserved, &used) &&
		    reserved > used)
			REAL(cuMemPoolTrimTo)(handle, 0);
	}
	if (__atomic_load_n(&process->graphs, __ATOMIC_RELAXED))
		REAL(cuDeviceGraphMemTrim)(process->card[card].graph.ordinal);
	aq_pools_sync(card);
}
