/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory accounts and seats: the part that is not for everybody (that stands in state.h).
 *
 * Invariant, whenever no live process holds the card's lock: account.used = sum of the seats' bytes.
 */
#ifndef FAKEGPU_ACCOUNT_H
#define FAKEGPU_ACCOUNT_H

#include "state.h"

/* Adds the seats of a card up again, after its lock was taken over. Call with that lock. */
void fg_account_repair(struct fg_card *card);
/* Takes a seat out of its card and frees it. Call under fg_state->lock. */
void fg_account_vacate(uint32_t seat);

#endif
