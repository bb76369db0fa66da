/* SPDX-License-Identifier: Apache-2.0
 *
 * Waiting that the node asks for: a suspended share, and low priority work that gives way to high.
 *
 * Holds no lock while it waits, and waits in short sleeps (AQ_LOOK_NS), so that what the node takes back is
 * seen at once. Bounds: a suspension whose node has not been heard of for AQ_SUSPEND_MOST_NS is over, and a
 * launch of low priority is held AQ_HOLD_MOST_NS at most, so that it never stands still altogether.
 */
#ifndef ALIQUOT_PRIORITY_H
#define ALIQUOT_PRIORITY_H

#include "state.h"

#define AQ_LOOK_NS         50000000u
#define AQ_SUSPEND_MOST_NS 30000000000u
#define AQ_HOLD_MOST_NS    500000000u

/* CLOCK_MONOTONIC. */
uint64_t aq_now_ns(void);

/* Sleeps until then, or a little less; no cancellation point, errno stays. */
void aq_sleep_until(uint64_t until_ns);

/* Before a launch on the card. */
void aq_launch_wait(unsigned card);

void aq_suspend_wait_slowly(unsigned card);

/* Before an allocation on the card. */
static inline void aq_suspend_wait(unsigned number)
{
	const struct aq_card *card = &aq_cards[number];
	for (uint32_t i = 0; i < card->share_count; i++) {
		const struct aq_grant_file *grant = aq_shares[card->share[i]].grant;
		if (grant &&
		    __builtin_expect(__atomic_load_n(&grant->hints.suspended, __ATOMIC_RELAXED) != 0, 0))
			aq_suspend_wait_slowly(number);
	}
}

#endif
