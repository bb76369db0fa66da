/* SPDX-License-Identifier: Apache-2.0
 *
 * The bucket of device time that all processes of a share draw from: the atomic steps over struct
 * aq_usage_bucket (region.h). Filled by whoever looks, by the time that has passed; so there is no thread and
 * no timer, and an idle share costs nothing.
 *
 * Never waits, and never believes what stands in the bucket: values are clamped before they are used, clocks
 * that lie in the future are set right, and a race with somebody who scribbles is given up after a few tries.
 * Invariant: tokens stand between the debt of AQ_BUCKET_WAIT_NS and AQ_BUCKET_FULL_NS; a process killed
 * between two steps leaves the bucket a moment's filling short.
 */
#ifndef ALIQUOT_LIMITER_BUCKET_H
#define ALIQUOT_LIMITER_BUCKET_H

#include <stdbool.h>
#include <stdint.h>

#include "region.h"

/* What may be saved up while nothing runs: 3 points of a second. */
#define AQ_BUCKET_FULL_NS 30000000

/* The longest that one launch, however long, makes the next one wait; the rest of its debt is forgiven. */
#define AQ_BUCKET_WAIT_NS 2000000000

/* Takes `amount` at `now` (CLOCK_MONOTONIC) from a bucket that fills with `percent` of the time, if there is
 * anything in it at all; what is missing becomes debt. False: not now; `wait_ns` is how long it will take. */
bool aq_bucket_take(struct aq_usage_bucket *bucket, uint32_t percent, uint64_t amount, uint64_t now,
		    uint64_t *wait_ns);

/* Corrects what was taken before: takes `amount` whatever there is, or gives it back when negative. */
void aq_bucket_correct(struct aq_usage_bucket *bucket, uint32_t percent, int64_t amount, uint64_t now);

#endif
