/* SPDX-License-Identifier: Apache-2.0
 *
 * See account.h and the protocol in region.h. All steps are sequentially consistent: on x86-64 that costs
 * nothing over weaker orders, and the proof (tests/hook/test_account_model.py) assumes it.
 */
#include "account.h"

#include "account_steps.h"

#include <errno.h>

#define ALIGNED_64(n) (((n) & 63u) == 0)

/* Bounds of what a later minor version may have grown to. */
#define HEADER_MAX 65536u
#define SLOT_MAX   4096u
#define COUNT_MAX  65536u

int aq_account_bind(struct aq_account *account, void *map, size_t length)
{
	const struct aq_usage_file *file = map;
	if (length < AQ_USAGE_FILE_SIZE || file->magic != AQ_USAGE_MAGIC || file->major != AQ_REGION_MAJOR)
		return -EPROTO;
	uint32_t header = __atomic_load_n(&file->header_size, __ATOMIC_RELAXED);
	uint32_t size = __atomic_load_n(&file->slot_size, __ATOMIC_RELAXED);
	uint32_t count = __atomic_load_n(&file->slot_count, __ATOMIC_RELAXED);
	if (header < AQ_USAGE_HEADER_SIZE || header > HEADER_MAX || !ALIGNED_64(header) ||
	    size < AQ_USAGE_SLOT_SIZE || size > SLOT_MAX || !ALIGNED_64(size) || count == 0 ||
	    count > COUNT_MAX || header + (uint64_t)size * count > length)
		return -EPROTO;
	*account = (struct aq_account){map, (char *)map + header, size, count};
	return 0;
}

int aq_account_reserve(const struct aq_account *account, struct aq_usage_slot *slot, uint64_t units,
		       uint64_t limit)
{
	return aq_step_reserve(account->file, slot, units, limit);
}

uint64_t aq_account_release(const struct aq_account *account, struct aq_usage_slot *slot, uint64_t units)
{
	return aq_step_release(account->file, slot, units);
}

uint32_t aq_account_used_slots(const struct aq_account *account)
{
	uint64_t used = aq_step_load(&account->file->slots_used);
	return used < account->slot_count ? (uint32_t)used : account->slot_count;
}

/* The charge of a slot whose owner does nothing any more becomes 0; the account is left to settle. */
static void empty(const struct aq_account *account, struct aq_usage_slot *slot, uint64_t seen)
{
	if (aq_word_units(seen) != 0 && aq_step_swap(&slot->charge, &seen, aq_step_moved(seen, 0)))
		aq_step_mark_unsettled(account->file);
}

static void raise_used(struct aq_usage_file *file, uint64_t count)
{
	uint64_t seen = aq_step_load(&file->slots_used);
	while (seen < count && !aq_step_swap(&file->slots_used, &seen, count))
		;
}

static uint64_t owner_word(uint32_t pid, uint64_t start, uint64_t charge)
{
	uint64_t generation = (charge >> AQ_WORD_UNIT_BITS) & 0xff;
	return AQ_OWNER_LIVE | generation << AQ_OWNER_GENERATION_SHIFT |
	       (start & UINT32_MAX) << AQ_OWNER_START_SHIFT | (pid & AQ_OWNER_PID_MASK);
}

/* Same process, whatever the generation. */
static bool same_process(uint64_t owner, uint64_t other)
{
	return ((owner ^ other) & ~(0xffull << AQ_OWNER_GENERATION_SHIFT)) == 0;
}

static bool take(const struct aq_account *account, uint32_t index, uint64_t old, uint64_t owner,
		 uint64_t pidns)
{
	struct aq_usage_slot *slot = aq_account_slot(account, index);
	uint64_t claiming = (owner & ~AQ_OWNER_LIVE) | AQ_OWNER_CLAIMING;
	if (!aq_step_swap(&slot->owner, &old, claiming))
		return false;
	empty(account, slot, aq_step_load(&slot->charge));
	__atomic_store_n(&slot->host_pid, 0, __ATOMIC_RELAXED);
	__atomic_store_n(&slot->context_bytes, 0, __ATOMIC_RELAXED);
	__atomic_store_n(&slot->spilled_bytes, 0, __ATOMIC_RELAXED);
	__atomic_store_n(&slot->launches, 0, __ATOMIC_RELAXED);
	__atomic_store_n(&slot->device_ns, 0, __ATOMIC_RELAXED);
	__atomic_store_n(&slot->observed_bytes, 0, __ATOMIC_RELAXED);
	__atomic_store_n(&slot->pidns, pidns, __ATOMIC_SEQ_CST);
	return aq_step_swap(&slot->owner, &claiming, owner);
}

int aq_account_claim(const struct aq_account *account, uint32_t pid, uint64_t start, uint64_t pidns,
		     uint64_t *owner)
{
	uint32_t used = aq_account_used_slots(account);
	uint64_t plain = owner_word(pid, start, 0);
	/* Who cannot name its namespace cannot know its own slot either. */
	for (uint32_t i = 0; pidns != 0 && i < used; i++) {
		struct aq_usage_slot *slot = aq_account_slot(account, i);
		uint64_t old = aq_step_load(&slot->owner);
		if (old == 0 || !same_process(old, plain) || aq_step_load(&slot->pidns) != pidns)
			continue;
		/* Ours from before an exec: what that image held died with it. */
		*owner = owner_word(pid, start, aq_step_load(&slot->charge) + AQ_WORD_SEQ_ONE);
		if (*owner == old)
			*owner ^= 1ull << AQ_OWNER_GENERATION_SHIFT;
		if (take(account, i, old, *owner, pidns))
			return (int)i;
	}
	for (uint32_t i = 0; i < account->slot_count; i++) {
		struct aq_usage_slot *slot = aq_account_slot(account, i);
		if (aq_step_load(&slot->owner) != 0)
			continue;
		raise_used(account->file, i + 1ull);
		*owner = owner_word(pid, start, aq_step_load(&slot->charge));
		if (take(account, i, 0, *owner, pidns))
			return (int)i;
	}
	return -EUSERS;
}

bool aq_account_reap(const struct aq_account *account, uint32_t index, uint64_t owner)
{
	struct aq_usage_slot *slot = aq_account_slot(account, index);
	/* Order matters: the charge is read before the owner is confirmed, and every change moves its
	 * sequence, so a reaper that was delayed here can never empty the charge of the slot's next owner. */
	uint64_t charge = aq_step_load(&slot->charge);
	if (aq_step_load(&slot->owner) != owner)
		return false;
	empty(account, slot, charge);
	if (aq_word_units(aq_step_load(&slot->charge)) != 0)
		return false;
	return aq_step_swap(&slot->owner, &owner, 0);
}

static uint64_t sum_of_charges(const struct aq_account *account)
{
	uint32_t used = aq_account_used_slots(account);
	uint64_t sum = 0;
	for (uint32_t i = 0; i < used; i++)
		sum += aq_word_units(aq_step_load(&aq_account_slot(account, i)->charge));
	return sum < AQ_WORD_UNIT_MASK ? sum : AQ_WORD_UNIT_MASK;
}

int aq_account_settle(const struct aq_account *account, unsigned attempts, uint64_t *repaired)
{
	struct aq_usage_file *file = account->file;
	uint64_t seen = aq_step_load(&file->account);
	if (repaired)
		*repaired = 0;
	__atomic_store_n(&file->unsettled, 0, __ATOMIC_SEQ_CST);
	/* Usually all is well, and then nobody in mid-step need be disturbed. */
	if (sum_of_charges(account) == aq_word_units(seen) && aq_step_load(&file->account) == seen)
		return 0;
	while (attempts-- > 0) {
		seen = aq_step_load(&file->account);
		__atomic_fetch_add(&file->epoch, 1, __ATOMIC_SEQ_CST);
		uint64_t sum = sum_of_charges(account);
		__atomic_fetch_add(&file->epoch, 1, __ATOMIC_SEQ_CST);
		uint64_t before = aq_word_units(seen);
		if (!aq_step_swap(&file->account, &seen, aq_step_moved(seen, sum)))
			continue;
		if (repaired && before > sum)
			*repaired = before - sum;
		return 0;
	}
	aq_step_mark_unsettled(file);
	return -EAGAIN;
}
