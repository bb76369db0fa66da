/* SPDX-License-Identifier: Apache-2.0
 *
 * A lock for the few private things that are changed rarely (slot claims, the context table). Never held over
 * a driver call, never on the path of an allocation, and always in `struct aq_process`, so that a forked
 * child finds it open.
 */
#ifndef ALIQUOT_LOCK_H
#define ALIQUOT_LOCK_H

#include <sched.h>
#include <stdint.h>

static inline void aq_lock(uint32_t *lock)
{
	for (unsigned tries = 0; __atomic_exchange_n(lock, 1, __ATOMIC_ACQUIRE) != 0; tries++)
		if (tries > 64)
			sched_yield();
}

static inline void aq_unlock(uint32_t *lock)
{
	__atomic_store_n(lock, 0, __ATOMIC_RELEASE);
}

#endif
