/* SPDX-License-Identifier: Apache-2.0
 *
 * How long a launch will keep its card busy, learned from launches of the same function and grid before it.
 *
 * Pure arithmetic over a table in this process's pages: no driver, no clock, no wait. Entries may be read
 * while another thread writes them; a torn reading misjudges one launch, and measuring puts it right.
 * Invariant: an estimate is never larger than the longest measurement of its key.
 */
#ifndef ALIQUOT_LIMITER_KEY_H
#define ALIQUOT_LIMITER_KEY_H

#include <stdbool.h>
#include <stdint.h>

#define AQ_KEY_SETS 1024u
#define AQ_KEY_WAYS 4u

struct aq_key {
	const void *key; /* NULL: free */
	uint64_t blocks; /* of the grid, and the card in the top bits */
	uint64_t estimate_ns; /* what a launch is charged */
	uint64_t mean_ns; /* moving average of the measurements */
	uint64_t low_ns; /* what it takes while nobody else uses the card */
	uint64_t streak_ns; /* smallest of the measurements that were all far above `low_ns` */
	uint64_t since_ns; /* when the first measurement began */
	uint64_t
	    lately_ns; /* what launches of it were charged over the time that the node's ratio tells of */
	uint64_t lately_at_ns;
	uint32_t quick; /* launches until the next measurement */
	uint16_t measured; /* 0: nothing known; counts up to a bound */
	uint16_t streak; /* how many they are */
	uint32_t pending; /* measurements under way */
	uint32_t epoch; /* raised when what it stands for has changed */
	uint32_t used; /* for choosing which entry of a full set to give up */
};

struct aq_keys {
	struct aq_key set[AQ_KEY_SETS][AQ_KEY_WAYS];
	uint32_t lock; /* of insertions */
	uint32_t clock;
	uint64_t guess_ns; /* for what was never measured: the average of everything */
};

#define AQ_KEY_CARD_SHIFT 57u

static inline uint64_t aq_key_blocks(uint64_t blocks, unsigned card)
{
	return (blocks & ((1ull << AQ_KEY_CARD_SHIFT) - 1)) | (uint64_t)card << AQ_KEY_CARD_SHIFT;
}

static inline struct aq_key *aq_key_home(struct aq_keys *keys, const void *key, uint64_t blocks,
					 unsigned card)
{
	uint64_t hash =
	    ((uint64_t)(uintptr_t)key >> 4 ^ aq_key_blocks(blocks, card) * 0xff51afd7ed558ccdull) *
	    0x9e3779b97f4a7c15ull;
	return keys->set[hash >> 54];
}

static inline bool aq_key_is(const struct aq_key *entry, const void *key, uint64_t blocks, unsigned card)
{
	return __atomic_load_n(&entry->key, __ATOMIC_ACQUIRE) == key &&
	       __atomic_load_n(&entry->blocks, __ATOMIC_RELAXED) == aq_key_blocks(blocks, card);
}

/* Counts one launch that need not be measured. False: this one should be. */
static inline bool aq_key_quick(struct aq_key *entry)
{
	uint32_t left = __atomic_load_n(&entry->quick, __ATOMIC_RELAXED);
	if (left == 0)
		return false;
	__atomic_store_n(&entry->quick, left - 1, __ATOMIC_RELAXED);
	return true;
}

/* The entry of a key, made if need be. */
struct aq_key *aq_key_find(struct aq_keys *keys, const void *key, uint64_t blocks, unsigned card);

/* What a launch of it is charged: its estimate, or a guess while nothing is known. */
uint64_t aq_key_charge(const struct aq_keys *keys, const struct aq_key *entry);

/* The next measurement is so far away that measuring costs little beside the work itself; and the more of
 * them are under way (`running`), the farther, so that a long queue has some in all its length. */
void aq_key_rest(struct aq_key *entry, unsigned running);

/* A launch of it is done, and its estimate is `ns` now. */
void aq_key_settled(struct aq_key *entry, uint64_t ns, uint64_t now);

/* What the node's ratio is to be taken of. The ratio compares what the share had with what it was charged in
 * the second before; an estimate that has become better since is not what was charged then. */
static inline uint64_t aq_key_lately(const struct aq_key *entry, uint64_t charge)
{
	uint64_t lately = __atomic_load_n(&entry->lately_ns, __ATOMIC_RELAXED);
	return entry->measured && lately ? lately : charge;
}

/* How a measurement came about. */
enum aq_measured {
	AQ_MEASURED_ALONE, /* nobody else used the card: it is the truth */
	AQ_MEASURED_SHARED, /* others may have had the card in between: it is at most this */
	AQ_MEASURED_PART, /* the end only: the rest overlapped with other launches of this process */
};

/* One launch took `ns`. Returns what it should have been charged. */
uint64_t aq_key_learn(struct aq_keys *keys, struct aq_key *entry, uint64_t ns, enum aq_measured how);

/* What has this key (and no grid) has changed: the old length is only the best guess at the new one. */
void aq_key_forget(struct aq_keys *keys, const void *key, unsigned card);

#endif
