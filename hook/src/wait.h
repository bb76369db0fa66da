/* SPDX-License-Identifier: Apache-2.0
 *
 * Waiting for room: a program that would rather wait for its neighbours than be told that memory is full says
 * so in ALIQUOT_MEMORY_WAIT_MS. It is the one word of the environment that counts in every mode, since all
 * that it gains is time lost.
 *
 * Holds no lock and no more than the allocation that waits; sleeps, and no longer than was asked for.
 */
#ifndef ALIQUOT_WAIT_H
#define ALIQUOT_WAIT_H

#include <stdbool.h>
#include <stdint.h>

/* One allocation's wait; zeroed before its first step. */
struct aq_wait {
	uint64_t until_ns;
};

/* Reads the variable; once, before anybody allocates. */
void aq_wait_read(void);

/* Sleeps for a moment. False, at once: nobody asked for it, or the time is over. */
bool aq_wait_more(unsigned card, struct aq_wait *wait);

#endif
