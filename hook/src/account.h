/* SPDX-License-Identifier: Apache-2.0
 *
 * The account of one share: the atomic steps that region.h prescribes, over a mapped usage file. Used by the
 * hook (reserve, release, claim) and by the node's region library (reap, settle).
 *
 * Never waits, allocates, logs, or trusts a size, count or index that stands in the file. Invariant: see
 * region.h; a process killed between any two instructions of this file leaves the account too large, never
 * too small, and the next settle makes it right.
 */
#ifndef ALIQUOT_ACCOUNT_H
#define ALIQUOT_ACCOUNT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "region.h"

/* No limit, as units. */
#define AQ_UNLIMITED UINT64_MAX

/* A usage file as mapped, with the sizes that were checked when it was bound. The file's own header is never
 * looked at again: the tenant may have changed it since. */
struct aq_account {
	struct aq_usage_file *file;
	char *slots;
	uint32_t slot_size;
	uint32_t slot_count;
};

static inline uint64_t aq_word_units(uint64_t word)
{
	return word & AQ_WORD_UNIT_MASK;
}

/* Bytes as units, rounded up. Sizes no account can hold become a number of units no limit can meet. */
static inline uint64_t aq_units_of(uint64_t bytes)
{
	return (bytes >> AQ_UNIT_SHIFT) + ((bytes & (AQ_UNIT_BYTES - 1)) != 0);
}

static inline struct aq_usage_slot *aq_account_slot(const struct aq_account *account, uint32_t index)
{
	return (struct aq_usage_slot *)(void *)(account->slots + (size_t)index * account->slot_size);
}

/* Binds a mapping of `length` bytes. -EPROTO: not a usage file this version reads (nothing is kept). */
int aq_account_bind(struct aq_account *account, void *map, size_t length);

/* Units in the account now. */
static inline uint64_t aq_account_units(const struct aq_account *account)
{
	return aq_word_units(__atomic_load_n(&account->file->account, __ATOMIC_SEQ_CST));
}

/* Adds `units` to account and slot if the account then stands at most at `limit`. 0 or -ENOMEM. */
int aq_account_reserve(const struct aq_account *account, struct aq_usage_slot *slot, uint64_t units,
		       uint64_t limit);

/* Takes `units` off again, but never more than the slot is charged with. Returns how much that was. */
uint64_t aq_account_release(const struct aq_account *account, struct aq_usage_slot *slot, uint64_t units);

/* Takes a free slot for (pid, start), or the one that the same process held before an exec; its charge is 0.
 * Returns the index, or -EUSERS when every slot is taken. `owner` gets the owner word. */
int aq_account_claim(const struct aq_account *account, uint32_t pid, uint64_t start, uint64_t pidns,
		     uint64_t *owner);

/* Gives back the slot `index` of an owner that is known to be gone. True if it was still `owner`'s. */
bool aq_account_reap(const struct aq_account *account, uint32_t index, uint64_t owner);

/* Sets the account to the sum of the charges. Returns 0, or -EAGAIN when `attempts` races were all lost.
 * `repaired` (may be NULL) gets the units taken off. */
int aq_account_settle(const struct aq_account *account, unsigned attempts, uint64_t *repaired);

/* Index bound for walks over the slots: what was ever claimed, checked against the real count. */
uint32_t aq_account_used_slots(const struct aq_account *account);

#endif
