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

#include "grants.h"
#include "process.h"
#include "state.h"

/* 0, or -ENOMEM: it would pass the limit, even after giving back what nobody holds any more; then it is
 * counted as `kind`. Waits while the share is suspended. */
int aq_charge(unsigned card, uint64_t units, enum aq_refusal kind);

/* The same, but only looks at the account: for callers that hold a lock. */
int aq_charge_quickly(unsigned card, uint64_t units);

/* Counts an allocation that was refused for want of room. */
void aq_refused(unsigned card, enum aq_refusal kind);

void aq_uncharge(unsigned card, uint64_t units);

/* The same for what a table has remembered (entry.h). */
void aq_uncharge_entry(uint64_t entry);

/* Tells the node, through every usage file of the card (or of all cards: AQ_NO_CARD). */
void aq_complain(int card, enum aq_complaint complaint);

/* So many units more (or fewer) of what this process holds are in managed memory. */
void aq_spilled(unsigned card, int64_t units);

/* Gives back what is charged but not held: dead neighbours, unsettled accounts, memory that pools of this
 * process have returned to the driver since anybody looked. */
void aq_make_room(unsigned card);

/* The limit of the card in units, AQ_UNLIMITED if one of its shares has none. */
uint64_t aq_card_limit(unsigned card);

/* What all processes together have of it, in units. */
uint64_t aq_card_used(unsigned card);

/* Slot of this process in a share, claimed if need be. NULL: there is none left. */
struct aq_usage_slot *aq_slot(struct aq_share *share);

/* Gives back the slots of dead processes of our own PID namespace, and settles the account. */
void aq_share_tidy(struct aq_share *share);

#endif
