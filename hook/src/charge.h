/* SPDX-License-Identifier: Apache-2.0
 *
 * Charging a card: account first, driver second, give back on failure. A card's limit is the sum of the
 * shares that this container holds of it; what does not fit into one share is split over several.
 *
 * Never holds a lock over the account, never calls the driver but in aq_make_room. Invariant: what this
 * process's slots carry is at least what it has of the card.
 */
#ifndef ALIQUOT_CHARGE_H
#define ALIQUOT_CHARGE_H

#include <stdbool.h>
#include <stdint.h>

#include "account_steps.h"
#include "entry.h"
#include "grants.h"
#include "process.h"
#include "state.h"
#include "view.h"

/* Slot of this process in a share, claimed if need be. NULL: there is none left. */
struct aq_usage_slot *aq_slot_claim(struct aq_share *share);

static inline struct aq_usage_slot *aq_slot(struct aq_share *share)
{
	struct aq_usage_slot *slot = __atomic_load_n(&aq_process()->slot[share->index], __ATOMIC_ACQUIRE);
	return __builtin_expect(slot != NULL, 1) ? slot : aq_slot_claim(share);
}

/* Only looks at the account: for callers that hold a lock. 0 or -ENOMEM. */
int aq_charge_quickly(unsigned card, uint64_t units);

int aq_charge_slowly(unsigned card, uint64_t units, enum aq_refusal kind);

/* Charges what is there already, whatever the limit. */
void aq_charge_anyway(unsigned card, uint64_t units);

/* 0, or -ENOMEM: it would pass the limit, even after giving back what nobody holds any more; then it is
 * counted as `kind`. Waits while the share is suspended. */
static inline int aq_charge(unsigned number, uint64_t units, enum aq_refusal kind)
{
	struct aq_share *share = aq_cards[number].only;
	if (__builtin_expect(share == NULL || share->grant == NULL || aq_view_word != NULL ||
				 __atomic_load_n(&share->grant->hints.suspended, __ATOMIC_RELAXED) != 0,
			     0))
		return aq_charge_slowly(number, units, kind);
	struct aq_usage_slot *slot = __atomic_load_n(&aq_process()->slot[share->index], __ATOMIC_ACQUIRE);
	if (__builtin_expect(slot == NULL, 0) ||
	    __builtin_expect(aq_step_reserve(share->account.file, slot, units, aq_share_limit(share)) < 0,
			     0) ||
	    __builtin_expect(__atomic_load_n(&share->limit, __ATOMIC_RELAXED) == 0, 0))
		return aq_charge_slowly(number, units, kind);
	return 0;
}

void aq_uncharge_slowly(unsigned card, uint64_t units);

static inline void aq_uncharge(unsigned number, uint64_t units)
{
	struct aq_share *share = aq_cards[number].only;
	struct aq_usage_slot *slot =
	    share ? __atomic_load_n(&aq_process()->slot[share->index], __ATOMIC_ACQUIRE) : NULL;
	if (__builtin_expect(slot == NULL || aq_view_word != NULL, 0))
		aq_uncharge_slowly(number, units);
	else
		aq_step_release(share->account.file, slot, units);
}

/* Counts an allocation that was refused for want of room. */
void aq_refused(unsigned card, enum aq_refusal kind);

/* Tells the node, through every usage file of the card (or of all cards: AQ_NO_CARD). */
void aq_complain(int card, enum aq_complaint complaint);

/* So many units more (or fewer) of what this process holds are in managed memory. */
void aq_spilled(unsigned card, int64_t units);

/* Takes off what a table has remembered. */
static inline void aq_uncharge_entry(uint64_t entry)
{
	aq_uncharge(aq_entry_card(entry), aq_entry_units(entry));
	if (__builtin_expect((entry & AQ_ENTRY_SPILLED) != 0, 0))
		aq_spilled(aq_entry_card(entry), -(int64_t)aq_entry_units(entry));
}

/* Gives back what is charged but not held: dead neighbours, unsettled accounts, memory that pools of this
 * process have returned to the driver since anybody looked. */
void aq_make_room(unsigned card);

/* A step of waiting for what others of the share hold; then it may be tried again. False: no use, no time. */
struct aq_wait;
bool aq_wait_for_others(unsigned card, uint64_t units, struct aq_wait *wait);

/* The limit of the card in units, AQ_UNLIMITED if one of its shares has none. */
uint64_t aq_card_limit(unsigned card);

/* What all processes together have of it, in units. */
uint64_t aq_card_used(unsigned card);

/* Gives back the slots of dead processes of our own PID namespace, and settles the account. */
void aq_share_tidy(struct aq_share *share);

/* The same now and then, where no node does it: before somebody is told what is in use. */
void aq_tidy_now_and_then(unsigned card);

#endif
