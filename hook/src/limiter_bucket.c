/* SPDX-License-Identifier: Apache-2.0
 *
 * See limiter_bucket.h.
 */
#include "limiter_bucket.h"

#define TRIES       64
#define FINEST_NS   2000u /* filling more often would lose more to rounding than it gains */
#define SKEW_NS     1000000u /* another thread may have read its clock a little later */
#define LONGEST_NS  4000000000u
#define SCRIBBLE_NS 1000000u

static int64_t clamp(int64_t tokens, uint32_t percent)
{
	int64_t debt = -(int64_t)AQ_BUCKET_WAIT_NS / 100 * percent;
	if (tokens < debt)
		return debt;
	return tokens > AQ_BUCKET_FULL_NS ? AQ_BUCKET_FULL_NS : tokens;
}

/* tokens = clamp(clamp(tokens) + change); false after too many races. */
static bool change(struct aq_usage_bucket *bucket, uint32_t percent, int64_t amount)
{
	int64_t raw = __atomic_load_n(&bucket->tokens_ns, __ATOMIC_RELAXED);
	for (int i = 0; i < TRIES; i++)
		if (__atomic_compare_exchange_n(&bucket->tokens_ns, &raw,
						clamp(clamp(raw, percent) + amount, percent), false,
						__ATOMIC_RELAXED, __ATOMIC_RELAXED))
			return true;
	return false;
}

static void fill(struct aq_usage_bucket *bucket, uint32_t percent, uint64_t now)
{
	uint64_t last = __atomic_load_n(&bucket->refilled_at_ns, __ATOMIC_RELAXED);
	uint64_t passed = now - last;
	if (last > now) {
		if (last - now < SKEW_NS)
			return;
		passed = 0;
	} else if (passed < FINEST_NS) {
		return;
	}
	/* Who moves the time on fills for it; a process killed in between leaves it unfilled. */
	if (!__atomic_compare_exchange_n(&bucket->refilled_at_ns, &last, now, false, __ATOMIC_RELAXED,
					 __ATOMIC_RELAXED))
		return;
	if (passed > LONGEST_NS)
		passed = LONGEST_NS;
	change(bucket, percent, (int64_t)(passed * percent / 100));
}

bool aq_bucket_take(struct aq_usage_bucket *bucket, uint32_t percent, uint64_t amount, uint64_t now,
		    uint64_t *wait_ns)
{
	/* No launch can pay more than the largest debt, and so no sum can overflow. */
	int64_t price = amount < LONGEST_NS ? (int64_t)amount : (int64_t)LONGEST_NS;
	fill(bucket, percent, now);
	int64_t raw = __atomic_load_n(&bucket->tokens_ns, __ATOMIC_RELAXED);
	for (int i = 0; i < TRIES; i++) {
		int64_t tokens = clamp(raw, percent);
		if (tokens <= 0) {
			/* Nothing is filled before the time of the last filling, if that lies ahead. */
			uint64_t last = __atomic_load_n(&bucket->refilled_at_ns, __ATOMIC_RELAXED);
			uint64_t ahead = last > now && last - now < SKEW_NS ? last - now : 0;
			*wait_ns = (uint64_t)(1 - tokens) * 100 / percent + FINEST_NS + ahead;
			return false;
		}
		if (__atomic_compare_exchange_n(&bucket->tokens_ns, &raw, clamp(tokens - price, percent),
						false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
			return true;
	}
	*wait_ns = SCRIBBLE_NS;
	return false;
}

void aq_bucket_correct(struct aq_usage_bucket *bucket, uint32_t percent, int64_t amount, uint64_t now)
{
	/* First what the time of the launch itself has brought, else it would pay off the debt for it. */
	fill(bucket, percent, now);
	if (amount > (int64_t)LONGEST_NS)
		amount = (int64_t)LONGEST_NS;
	if (amount < -(int64_t)LONGEST_NS)
		amount = -(int64_t)LONGEST_NS;
	change(bucket, percent, -amount);
}
