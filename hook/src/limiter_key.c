/* SPDX-License-Identifier: Apache-2.0
 *
 * See limiter_key.h.
 *
 * A measurement is the time between two events around a launch. While the card is this container's alone that
 * is the launch's length, and the average of it is what launches cost. When others want the card too, the
 * driver gives it to one after the other, and the time in between stands in the measurement. Then the least
 * that was ever seen is the best that can be known, until so many measurements lie so far above it that the
 * work itself must have changed.
 *
 * A launch longer than a turn may never run undisturbed, and nothing in its measurements tells its length
 * from the others' turns. What NVML sees of the share on the node puts that right (limiter.c, `rated`).
 */
#include "limiter_key.h"

#include <stddef.h>

#include "lock.h"

#define AVERAGE        8u /* weight of a measurement is 1/8 */
#define FAR_NUMERATOR  9u /* "far above" is more than 9/4 of it: more than one other taking turns explains */
#define FAR_SHIFT      2u
#define FAR_COUNT      16u
#define REST_NS        250000u /* launches of less than this are measured one in so many */
#define REST_MOST      255u
#define SPREAD         16u /* so many under way double the distance to the next */
#define LATELY_NS      750000000u /* how old what a ratio tells of is, on average */
#define FIRST_GUESS_NS 20000u

static bool same(const struct aq_key *entry, const void *key, uint64_t blocks)
{
	return entry->key == key && entry->blocks == blocks;
}

static void clear(struct aq_key *entry, const void *key, uint64_t blocks)
{
	__atomic_store_n(&entry->key, NULL, __ATOMIC_RELEASE);
	__atomic_store_n(&entry->quick, 0, __ATOMIC_RELAXED);
	__atomic_store_n(&entry->estimate_ns, 0, __ATOMIC_RELAXED);
	entry->mean_ns = entry->low_ns = entry->streak_ns = entry->lately_ns = 0;
	entry->measured = entry->streak = 0;
	entry->pending = 0;
	entry->epoch++;
	__atomic_store_n(&entry->blocks, blocks, __ATOMIC_RELAXED);
	__atomic_store_n(&entry->key, key, __ATOMIC_RELEASE);
}

struct aq_key *aq_key_find(struct aq_keys *keys, const void *key, uint64_t blocks, unsigned card)
{
	struct aq_key *set = aq_key_home(keys, key, blocks, card);
	blocks = aq_key_blocks(blocks, card);
	for (unsigned way = 0; way < AQ_KEY_WAYS; way++)
		if (__atomic_load_n(&set[way].key, __ATOMIC_ACQUIRE) == key && set[way].blocks == blocks) {
			set[way].used = keys->clock;
			return &set[way];
		}
	aq_lock(&keys->lock);
	struct aq_key *place = NULL;
	for (unsigned way = 0; way < AQ_KEY_WAYS && !place; way++)
		if (set[way].key == NULL || same(&set[way], key, blocks))
			place = &set[way];
	/* Given up: the one that was longest not asked for. */
	for (unsigned way = 0; way < AQ_KEY_WAYS && (!place || place->key); way++)
		if (place == NULL ||
		    (!same(place, key, blocks) && keys->clock - set[way].used > keys->clock - place->used))
			place = &set[way];
	if (!same(place, key, blocks))
		clear(place, key, blocks);
	place->used = ++keys->clock;
	aq_unlock(&keys->lock);
	return place;
}

uint64_t aq_key_charge(const struct aq_keys *keys, const struct aq_key *entry)
{
	if (entry->measured)
		return __atomic_load_n(&entry->estimate_ns, __ATOMIC_RELAXED);
	/* Of something that has changed since, the old length. */
	if (__atomic_load_n(&entry->estimate_ns, __ATOMIC_RELAXED))
		return __atomic_load_n(&entry->estimate_ns, __ATOMIC_RELAXED);
	uint64_t guess = __atomic_load_n(&keys->guess_ns, __ATOMIC_RELAXED);
	return guess ? guess : FIRST_GUESS_NS;
}

void aq_key_rest(struct aq_key *entry, unsigned running)
{
	uint64_t length = __atomic_load_n(&entry->estimate_ns, __ATOMIC_RELAXED);
	uint64_t rest = length >= REST_NS ? 0 : REST_NS / (length + 1);
	uint64_t spread = (1ull << (running / SPREAD < 8 ? running / SPREAD : 8)) - 1;
	rest = rest > spread ? rest : spread;
	/* The first few are measured close together: the very first carries loading and warming up. And while
	 * nothing is known, none goes by unseen. */
	if (entry->measured < 4 && rest > 2)
		rest = 2;
	if (entry->measured == 0)
		rest = 0;
	__atomic_store_n(&entry->quick, (uint32_t)(rest < REST_MOST ? rest : REST_MOST), __ATOMIC_RELAXED);
}

static void average(uint64_t *mean, uint64_t value, uint64_t weight)
{
	uint64_t before = __atomic_load_n(mean, __ATOMIC_RELAXED);
	uint64_t after =
	    value >= before ? before + (value - before) / weight : before - (before - value) / weight;
	__atomic_store_n(mean, after, __ATOMIC_RELAXED);
}

/* What a launch is charged after a measurement of that kind. */
static uint64_t judge(const struct aq_key *entry, enum aq_measured how)
{
	if (how == AQ_MEASURED_ALONE || (how == AQ_MEASURED_PART && entry->mean_ns < entry->low_ns))
		return entry->mean_ns;
	return entry->low_ns;
}

static void learn_low(struct aq_key *entry, uint64_t ns, enum aq_measured how)
{
	if (ns <= entry->low_ns) {
		entry->low_ns = ns;
		entry->streak = 0;
		return;
	}
	if (how == AQ_MEASURED_ALONE) {
		average(&entry->low_ns, ns, AVERAGE);
		entry->streak = 0;
		return;
	}
	if (ns <= entry->low_ns * FAR_NUMERATOR >> FAR_SHIFT) {
		entry->streak = 0;
		return;
	}
	if (entry->streak == 0 || ns < entry->streak_ns)
		entry->streak_ns = ns;
	if (++entry->streak >= FAR_COUNT) {
		entry->low_ns = entry->streak_ns;
		entry->streak = 0;
	}
}

uint64_t aq_key_learn(struct aq_keys *keys, struct aq_key *entry, uint64_t ns, enum aq_measured how)
{
	if (entry->measured == 0) {
		entry->mean_ns = ns;
		entry->low_ns = ns;
		entry->streak = 0;
	} else {
		average(&entry->mean_ns, ns, AVERAGE);
		if (how != AQ_MEASURED_PART)
			learn_low(entry, ns, how);
	}
	if (entry->measured < UINT16_MAX)
		entry->measured++;
	uint64_t estimate = judge(entry, how);
	__atomic_store_n(&entry->estimate_ns, estimate, __ATOMIC_RELAXED);
	if (__atomic_load_n(&keys->guess_ns, __ATOMIC_RELAXED) == 0)
		__atomic_store_n(&keys->guess_ns, estimate ? estimate : 1, __ATOMIC_RELAXED);
	else
		average(&keys->guess_ns, estimate, AVERAGE);
	return how == AQ_MEASURED_ALONE || how == AQ_MEASURED_PART ? ns : estimate;
}

void aq_key_settled(struct aq_key *entry, uint64_t ns, uint64_t now)
{
	uint64_t before = __atomic_load_n(&entry->lately_ns, __ATOMIC_RELAXED);
	uint64_t passed = now - __atomic_load_n(&entry->lately_at_ns, __ATOMIC_RELAXED);
	/* One weighs what its time is of the whole, but the first few all the same. */
	uint64_t weight = passed < LATELY_NS ? LATELY_NS / (passed + 1) : 1;
	if (weight > entry->measured)
		weight = entry->measured;
	/* Other work than before: the ratio tells nothing of it. */
	if (weight == 0 || before == 0 || ns > before * FAR_NUMERATOR >> FAR_SHIFT)
		weight = 1;
	average(&entry->lately_ns, ns, weight);
	__atomic_store_n(&entry->lately_at_ns, now, __ATOMIC_RELAXED);
}

void aq_key_forget(struct aq_keys *keys, const void *key, unsigned card)
{
	struct aq_key *set = aq_key_home(keys, key, 0, card);
	for (unsigned way = 0; way < AQ_KEY_WAYS; way++)
		if (aq_key_is(&set[way], key, 0, card)) {
			set[way].measured = 0;
			__atomic_store_n(&set[way].pending, 0, __ATOMIC_RELAXED);
			__atomic_fetch_add(&set[way].epoch, 1, __ATOMIC_RELAXED);
			__atomic_store_n(&set[way].quick, 0, __ATOMIC_RELAXED);
		}
}
