/* SPDX-License-Identifier: Apache-2.0
 *
 * The timeline of a card: kernels have a length, one runs at a time, and processes take turns.
 *
 * Nobody ticks. Whoever looks brings the timeline up to now by replaying what must have happened since: the
 * kernel that ran until its end, then the next of whoever's turn it was, each process keeping the card for at
 * most `time_slice_ns` while others wait. So every figure is exact at the time it is asked for, and an idle
 * machine costs nothing. A process's kernels run in the order in which it launched them.
 *
 * Invariant under the card's lock after an advance to `now`: segment_end > now, or the engine is idle; an
 * entry of a queue holds its end time once it is done, for the next FG_QUEUE_ENTRIES - depth launches at
 * least.
 */
#ifndef FAKEGPU_ENGINE_H
#define FAKEGPU_ENGINE_H

#include "state.h"

/* Puts a kernel of `work_ns` behind the others of the seat, not to begin before `not_before_ns`. Waits while
 * `queue_depth` of them are outstanding. Returns its number (1, 2, …) within the seat. */
uint64_t fg_engine_launch(uint32_t seat, uint64_t work_ns, uint64_t not_before_ns);
/* 1 when kernel `number` is done; then *end_ns is when (0: too long ago to tell). */
int fg_engine_is_done(uint32_t seat, uint64_t number, uint64_t *end_ns);
/* The earliest time at which kernel `number` can be done if nobody else comes; at most the real one. */
uint64_t fg_engine_estimate(uint32_t seat, uint64_t number);
/* Waits for it; `may_spin`: the last part without sleeping, for a sharper end. Returns end_ns as above. */
uint64_t fg_engine_wait(uint32_t seat, uint64_t number, int may_spin);
/* Sleeps until `until_ns` on the same terms. */
void fg_sleep_until(uint64_t until_ns, int may_spin);

/* With the card's lock: drops a seat's work; puts the engines in order after the lock was taken over. */
void fg_engine_leave(uint32_t seat);
void fg_engine_repair(struct fg_card *card);

#endif
