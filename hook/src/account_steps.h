/* SPDX-License-Identifier: Apache-2.0
 *
 * The two steps of the account that stand on an allocation's path, in line; see account.h for what they
 * promise and region.h for the protocol. All of it is sequentially consistent: on x86-64 that costs nothing
 * over weaker orders, and the proof (tests/hook/test_account_model.py) assumes it.
 */
#ifndef ALIQUOT_ACCOUNT_STEPS_H
#define ALIQUOT_ACCOUNT_STEPS_H

#include <errno.h>

#include "account.h"

static inline uint64_t aq_step_load(const uint64_t *word)
{
	return __atomic_load_n(word, __ATOMIC_SEQ_CST);
}

static inline bool aq_step_swap(uint64_t *word, uint64_t *expected, uint64_t desired)
{
	return __atomic_compare_exchange_n(word, expected, desired, false, __ATOMIC_SEQ_CST,
					   __ATOMIC_SEQ_CST);
}

/* A word with other units and the next sequence number. */
static inline uint64_t aq_step_moved(uint64_t word, uint64_t units)
{
	return ((word & ~AQ_WORD_UNIT_MASK) + AQ_WORD_SEQ_ONE) | units;
}

static inline void aq_step_word_add(uint64_t *word, uint64_t units)
{
	uint64_t seen = aq_step_load(word);
	uint64_t sum;
	do {
		sum = aq_word_units(seen) + units;
		if (sum > AQ_WORD_UNIT_MASK)
			sum = AQ_WORD_UNIT_MASK;
	} while (!aq_step_swap(word, &seen, aq_step_moved(seen, sum)));
}

/* Returns what was there to be taken off. */
static inline uint64_t aq_step_word_subtract(uint64_t *word, uint64_t units)
{
	uint64_t seen = aq_step_load(word);
	uint64_t part;
	do {
		part = aq_word_units(seen) < units ? aq_word_units(seen) : units;
	} while (!aq_step_swap(word, &seen, aq_step_moved(seen, aq_word_units(seen) - part)));
	return part;
}

static inline void aq_step_mark_unsettled(struct aq_usage_file *file)
{
	__atomic_store_n(&file->unsettled, 1, __ATOMIC_SEQ_CST);
}

static inline int aq_step_reserve(struct aq_usage_file *file, struct aq_usage_slot *slot, uint64_t units,
				  uint64_t limit)
{
	if (units > AQ_WORD_UNIT_MASK)
		return -ENOMEM;
	for (;;) {
		uint64_t epoch = aq_step_load(&file->epoch);
		uint64_t seen = aq_step_load(&file->account);
		uint64_t sum;
		do {
			sum = aq_word_units(seen) + units;
			if (sum > limit || sum > AQ_WORD_UNIT_MASK)
				return -ENOMEM;
		} while (!aq_step_swap(&file->account, &seen, aq_step_moved(seen, sum)));
		aq_step_word_add(&slot->charge, units);
		if (aq_step_load(&file->epoch) == epoch)
			return 0;
		/* Somebody settled meanwhile and may have taken our units off; nothing hangs on them yet. */
		aq_step_word_subtract(&slot->charge, units);
		aq_step_mark_unsettled(file);
	}
}

static inline uint64_t aq_step_release(struct aq_usage_file *file, struct aq_usage_slot *slot, uint64_t units)
{
	uint64_t epoch = aq_step_load(&file->epoch);
	units = aq_step_word_subtract(&slot->charge, units);
	uint64_t seen = aq_step_load(&file->account);
	for (;;) {
		/* Checked for every value of `seen`: a settle that already left our units out changes the
		 * epoch before it changes the account. */
		if (aq_step_load(&file->epoch) != epoch) {
			aq_step_mark_unsettled(file);
			return units;
		}
		uint64_t rest = aq_word_units(seen);
		rest = rest > units ? rest - units : 0;
		if (aq_step_swap(&file->account, &seen, aq_step_moved(seen, rest)))
			return units;
	}
}

#endif
