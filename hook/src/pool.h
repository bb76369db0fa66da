/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory pools. What a pool takes of the card is what it has reserved, not what has been handed out of it,
 * and it changes when the driver likes: so a pool is charged by asking the driver, after whatever may have
 * changed it and before anybody is refused.
 *
 * Invariant: pool.charged >= what the pool has reserved, but for the moment between the driver growing it by
 * more than was asked for and the look that follows every allocation.
 */
#ifndef ALIQUOT_POOL_H
#define ALIQUOT_POOL_H

#include <stdbool.h>

#include "process.h"

/* The record of a pool; NULL when it is on no card of ours or cannot be recorded. `fallback` is the ordinal
 * to assume where the driver does not tell a pool's own. */
struct aq_pool *aq_pool_find(CUmemoryPool handle, CUdevice fallback);

/* The record of a pool, if there is one. */
struct aq_pool *aq_pool_known(CUmemoryPool handle);

/* Enters a pool that was just made on a device. */
void aq_pool_enter(CUmemoryPool handle, CUdevice ordinal);

/* What a call under way has set aside for itself. */
struct aq_pool_request {
	struct aq_pool *pool; /* NULL: nothing */
	uint64_t charged; /* units of growth, in the account */
	uint64_t claimed; /* units out of what the pool has and does not use */
};

/* Before an allocation: charges what the pool may grow by. 0 or -ENOMEM. */
int aq_pool_begin(struct aq_pool_request *request, struct aq_pool *pool, uint64_t units);

/* After it: the charge becomes what the pool has now. -ENOMEM: it grew past the limit, the caller has to
 * undo. */
int aq_pool_end(struct aq_pool_request *request);

/* Makes the charge what the pool has now, even past the limit: it is there. */
void aq_pool_sync(struct aq_pool *pool);

/* cuMemPoolDestroy of a pool that is known. */
CUresult aq_pool_destroy(struct aq_pool *pool);

/* All pools of this process on a card, graph memory included. Free where there are none. */
void aq_pools_sync_slowly(unsigned card);

static inline bool aq_pools_any(void)
{
	const struct aq_process *process = aq_process();
	return __atomic_load_n(&process->pools, __ATOMIC_RELAXED) |
	       __atomic_load_n(&process->graphs, __ATOMIC_RELAXED);
}

static inline void aq_pools_sync(unsigned card)
{
	if (__builtin_expect(aq_pools_any(), 0))
		aq_pools_sync_slowly(card);
}

/* All cards; after a synchronisation or a free, when the driver gives memory back. */
void aq_pools_sync_all(void);

static inline void aq_pools_freed(void)
{
	if (__builtin_expect(aq_pools_any(), 0))
		aq_pools_sync_all();
}

/* Asks the driver to give back what pools of this process on a card hold and do not use. */
void aq_pools_trim(unsigned card);

#endif
