/* SPDX-License-Identifier: Apache-2.0
 *
 * The end of a context, and of everything that was allocated in it. As with a single free: what the driver is
 * about to free is taken out of the tables before it is called, because other threads may be given the same
 * addresses and the same handle before we come back; if the driver refuses, all of it is put back.
 */
#ifndef ALIQUOT_CONTEXT_END_H
#define ALIQUOT_CONTEXT_END_H

#include "process.h"

#define AQ_ENDING_MOST 16u

struct aq_taken;

struct aq_ending {
	struct aq_taken *taken; /* newest first */
	uint32_t count;
	struct aq_context *context[AQ_ENDING_MOST];
	CUcontext handle[AQ_ENDING_MOST];
};

/* Hides a context and takes what is charged in it. */
void aq_ending_add(struct aq_ending *ending, struct aq_context *context);

/* The driver's verdict: gives back what the contexts held, or puts everything where it was. */
void aq_ending_over(struct aq_ending *ending, bool ended);

#endif
