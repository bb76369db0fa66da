/* SPDX-License-Identifier: Apache-2.0
 *
 * Measuring launches on the device: an event before, one after, and the time between them once both are done.
 *
 * Never waits for the device, never touches a stream that captures, never disturbs a capture of another
 * thread, and keeps a fixed number of events per process. Invariant: an event is used in the context it was
 * made in, and not after that context has ended.
 */
#ifndef ALIQUOT_LIMITER_SAMPLE_H
#define ALIQUOT_LIMITER_SAMPLE_H

#include "limiter.h"

/* True: what is launched there now goes into a graph, not to the device. */
bool aq_stream_captures(CUstream stream);

/* Begins to measure the launch. NULL: not now. */
struct aq_sample *aq_sample_begin(struct aq_limiter *limiter, const struct aq_launch *launch, unsigned card);

/* The launch has been made, or refused. */
void aq_sample_end(struct aq_limiter *limiter, struct aq_sample *sample, CUstream stream, bool launched);

/* Learns from measurements that are done, and has their launches charged what they took. */
void aq_samples_collect(struct aq_limiter *limiter);

/* How many are under way. */
unsigned aq_samples_running(const struct aq_samples *samples);

/* Makes the place for them. NULL: no memory. */
struct aq_samples *aq_samples_make(void);

/* Events of a context that has ended are no more. */
void aq_samples_drop(struct aq_samples *samples, CUcontext context);

/* A launch that is done. */
struct aq_settlement {
	uint64_t charged_ns, cost_ns, upto_ns; /* as in struct aq_launch */
	uint64_t took_ns; /* what it should have been charged */
	uint64_t lately_ns; /* aq_key_lately of its kind */
};

/* limiter.c: puts right what a launch on the card was charged, and what was paid for it. */
void aq_limiter_settle(struct aq_limiter *limiter, unsigned number, const struct aq_settlement *settlement,
		       uint64_t now);

/* limiter.c: what the node says of the card at the moment. */
enum aq_measured aq_limiter_company(unsigned card, uint64_t now);

#endif
