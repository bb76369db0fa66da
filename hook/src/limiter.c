/* SPDX-License-Identifier: Apache-2.0
 *
 * See limiter.h. A launch is charged what launches like it took before (limiter_key), from the bucket of its
 * share (limiter_bucket); some launches are measured (limiter_sample), and what they were charged is put
 * right. Work that is queued ahead of the device is paid for already, so what a program has queued is never
 * more than the bucket holds.
 *
 * Invariant: nobody waits for the device without a bound, and nobody who waits holds anything that another
 * one needs.
 */
#include "limiter.h"

#include "charge.h"
#include "grants.h"
#include "limiter_bucket.h"
#include "limiter_sample.h"
#include "lock.h"
#include "pages.h"
#include "place.h"
#include "priority.h"

#define SMALL_NS   25000u /* shorter launches draw from the bucket in portions */
#define PORTION_NS 100000u
#define FIRST_NS \
	20000000u /* how long the second launch of a kind waits to hear how long the first one took */
#define POLL_NS          50000u
#define POLL_MOST        1000000u
#define MOST_NS          1000000000u
#define UNSURE           8u /* measurements, and the length of a kind is known as well as it will be */
#define UNSURE_LOOK_NS   3000000u /* until then the next one is looked for while waiting */
#define UNSURE_DEBT_NS   14000000u
#define DEFERRED_MOST_NS 30000000 /* 3 points of a second */
#define KNOWN            4u /* times more or less, and nothing was known of it */
#define LENT_NS          1000000000u
#define LENT_PART        4 /* a quarter of its limit is always left */
#define DEFERRED_PART    8u
#define NODE_NS          3000000000u /* a node daemon that was not heard of for so long is gone */
#define MOST_RATIO       8u /* more than this is no matter of others' turns */
#define MOST_RATED_NS    (1ull << 40) /* no launch pays for so much, and the product cannot overflow */

struct aq_gate aq_gate;
static const uint64_t nothing[4];

/* ---- which limits hold ------------------------------------------------------------------------ */

static bool share_open(struct aq_share *share)
{
	uint32_t percent = __atomic_load_n(&share->core_percent, __ATOMIC_RELAXED);
	return percent == 0 || percent >= 100 ||
	       __atomic_load_n(&share->core_policy, __ATOMIC_RELAXED) == AQ_CORE_DISABLE;
}

/* A card is not limited when one of its shares is not. Takes over what the node has changed. */
static bool card_open(unsigned number)
{
	const struct aq_card *card = &aq_cards[number];
	bool open = false;
	for (uint32_t i = 0; i < card->share_count; i++) {
		struct aq_share *share = &aq_shares[card->share[i]];
		aq_share_limit(share);
		open = open || share_open(share);
	}
	return open;
}

/* The only card of this process, or AQ_NO_CARD when there are several. */
static int only_card(void)
{
	int only = AQ_NO_CARD;
	for (unsigned i = 0; i < AQ_MAX_ORDINALS; i++) {
		if (aq_ordinal_card[i] == AQ_NO_CARD)
			continue;
		if (only != AQ_NO_CARD && only != aq_ordinal_card[i])
			return AQ_NO_CARD;
		only = aq_ordinal_card[i];
	}
	return only;
}

/* Tells the wrappers what they may go by. With several shares there is no one place to look. */
static void set_gate(void)
{
	int only = only_card();
	if (only == AQ_NO_CARD)
		return;
	/* The only card needs no asking for the stream's, however many shares it has. */
	__atomic_store_n(&aq_gate.single, (uint32_t)only + 1, __ATOMIC_RELAXED);
	if (aq_cards[only].share_count != 1)
		return;
	struct aq_share *share = &aq_shares[aq_cards[only].share[0]];
	__atomic_store_n(&aq_gate.open, share_open(share), __ATOMIC_RELAXED);
	__atomic_store_n(&aq_gate.generation,
			 share->grant ? __atomic_load_n(&share->generation, __ATOMIC_RELAXED) : 0,
			 __ATOMIC_RELEASE);
	__atomic_store_n(&aq_gate.words, share->grant ? &share->grant->selector : nothing, __ATOMIC_RELEASE);
}

static bool share_bursts(const struct aq_share *share, uint64_t now)
{
	return share->grant && __atomic_load_n(&share->core_policy, __ATOMIC_RELAXED) == AQ_CORE_DEFAULT &&
	       __atomic_load_n(&share->grant->hints.burst_until_ns, __ATOMIC_RELAXED) > now;
}

enum aq_measured aq_limiter_company(unsigned number, uint64_t now)
{
	const struct aq_card *card = &aq_cards[number];
	for (uint32_t i = 0; i < card->share_count; i++)
		if (share_bursts(&aq_shares[card->share[i]], now))
			return AQ_MEASURED_ALONE;
	return AQ_MEASURED_SHARED;
}

/* ---- paying ------------------------------------------------------------------------------------ */

static void note(struct aq_share *share, uint64_t amount, uint64_t now)
{
	struct aq_usage_bucket *bucket = &share->account.file->bucket;
	struct aq_usage_slot *slot = aq_slot(share);
	__atomic_store_n(&bucket->last_launch_ns, now, __ATOMIC_RELAXED);
	__atomic_fetch_add(&bucket->busy_ns, amount, __ATOMIC_RELAXED);
	if (slot)
		__atomic_fetch_add(&slot->device_ns, amount, __ATOMIC_RELAXED);
}

/* Device time that the node saw in NVML for each that was charged lately, times AQ_RATIO_ONE: while others
 * have turns on the card, their time stands in what is measured. 0: not known. */
static uint64_t ratio_of(const struct aq_share *share, uint64_t now)
{
	if (share->grant == NULL)
		return 0;
	uint64_t ratio = __atomic_load_n(&share->grant->hints.ratio, __ATOMIC_RELAXED);
	uint64_t heard = __atomic_load_n(&share->grant->hints.heartbeat_ns, __ATOMIC_RELAXED);
	if (ratio == 0 || now - heard >= NODE_NS)
		return 0;
	if (ratio < AQ_RATIO_ONE / MOST_RATIO)
		return AQ_RATIO_ONE / MOST_RATIO;
	return ratio < AQ_RATIO_ONE * MOST_RATIO ? ratio : AQ_RATIO_ONE * MOST_RATIO;
}

/* What is paid for a launch that is charged `amount`, of a kind that was charged `lately`. */
static uint64_t cost(const struct aq_share *share, uint64_t amount, uint64_t lately, uint64_t now)
{
	uint64_t ratio = ratio_of(share, now);
	if (ratio == 0 || lately > MOST_RATED_NS)
		return amount;
	return lately * ratio / AQ_RATIO_ONE;
}

/* From whichever share of the card has something. False: none; `wait` is how long the first will take. */
static bool pay(unsigned number, struct aq_launch *launch, uint64_t portion, uint64_t now, uint64_t *wait)
{
	const struct aq_card *card = &aq_cards[number];
	uint64_t amount = launch->charged_ns + portion;
	uint64_t lately = aq_key_lately(launch->known, launch->charged_ns);
	*wait = MOST_NS;
	for (uint32_t i = 0; i < card->share_count; i++) {
		struct aq_share *share = &aq_shares[card->share[i]];
		uint32_t percent = __atomic_load_n(&share->core_percent, __ATOMIC_RELAXED);
		bool free = share_bursts(share, now) || percent == 0;
		uint64_t price = cost(share, amount, lately + portion, now), own;
		if (free || aq_bucket_take(&share->account.file->bucket, percent, price, now, &own)) {
			note(share, amount, now);
			launch->cost_ns = free ? AQ_FREE : cost(share, launch->charged_ns, lately, now);
			return true;
		}
		*wait = own < *wait ? own : *wait;
	}
	return false;
}

static struct aq_share *first_share(unsigned number)
{
	return &aq_shares[aq_cards[number].share[0]];
}

static struct aq_usage_bucket *bucket_of(unsigned number)
{
	return &first_share(number)->account.file->bucket;
}

/* Takes `amount` whatever there is, or gives it back when negative. */
static void correct(unsigned number, int64_t amount, uint64_t now)
{
	struct aq_share *share = first_share(number);
	uint32_t percent = __atomic_load_n(&share->core_percent, __ATOMIC_RELAXED);
	if (percent && amount && !share_bursts(share, now))
		aq_bucket_correct(&share->account.file->bucket, percent, amount, now);
}

/* What was charged for all that is done with this launch: itself, and what was launched since the one that
 * was measured before it, which is taken to have been misjudged as much as it was, if it was known at all. */
static uint64_t done_with(struct aq_limited_card *card, const struct aq_settlement *settlement)
{
	uint64_t charged = settlement->charged_ns, took = settlement->took_ns;
	uint64_t before = __atomic_load_n(&card->done_ns, __ATOMIC_RELAXED);
	int64_t since = (int64_t)(settlement->upto_ns - before);
	if (since <= 0)
		return 0;
	__atomic_store_n(&card->done_ns, settlement->upto_ns, __ATOMIC_RELAXED);
	uint64_t others = (uint64_t)since > charged ? (uint64_t)since - charged : 0;
	if (charged > 0 && took / KNOWN < charged && charged / KNOWN < took)
		others = (uint64_t)((double)others * (double)took / (double)charged);
	return others + took;
}

/* What was queued while no limit bound still runs when it does, and is paid only as far as it takes more of
 * the card than the limit; and in parts, so that no share comes to a stop for it. `took` of the device's
 * time. */
static void give_back(struct aq_limited_card *card, unsigned number, uint64_t took, uint64_t now)
{
	const struct aq_share *share = first_share(number);
	uint64_t percent = __atomic_load_n(&share->core_percent, __ATOMIC_RELAXED);
	uint64_t passed = now - __atomic_exchange_n(&card->lent_at_ns, now, __ATOMIC_RELAXED);
	/* Without a ratio nobody knows what it took. */
	if (share_bursts(share, now) || ratio_of(share, now) == 0 || passed > LENT_NS || took > LENT_NS)
		return;
	int64_t filled = (int64_t)(passed * percent / 100);
	int64_t over = __atomic_load_n(&card->lent_ns, __ATOMIC_RELAXED) + (int64_t)took - filled;
	int64_t part = over < filled - filled / LENT_PART ? over : filled - filled / LENT_PART;
	if (part > 0) {
		correct(number, part, now);
		over -= part;
	}
	if (over < -AQ_BUCKET_FULL_NS)
		over = -AQ_BUCKET_FULL_NS;
	__atomic_store_n(&card->lent_ns, over < (int64_t)LENT_NS ? over : (int64_t)LENT_NS, __ATOMIC_RELAXED);
}

void aq_limiter_settle(struct aq_limiter *limiter, unsigned number, const struct aq_settlement *settlement,
		       uint64_t now)
{
	struct aq_usage_bucket *bucket = bucket_of(number);
	uint64_t done = done_with(&limiter->card[number], settlement);
	__atomic_fetch_add(&bucket->done_ns, done, __ATOMIC_RELAXED);
	if (card_open(number))
		return;
	__atomic_fetch_add(&bucket->busy_ns, settlement->took_ns - settlement->charged_ns, __ATOMIC_RELAXED);
	uint64_t price = cost(first_share(number), settlement->took_ns, settlement->lately_ns, now);
	if (settlement->cost_ns != AQ_FREE)
		correct(number, (int64_t)(price - settlement->cost_ns), now);
	else if (settlement->took_ns > 0)
		give_back(&limiter->card[number], number,
			  (uint64_t)((double)done * (double)price / (double)settlement->took_ns), now);
}

/* ---- one launch -------------------------------------------------------------------------------- */

static struct aq_limiter *limiter_pages(void)
{
	struct aq_process *process = aq_process();
	struct aq_limiter *limiter = __atomic_load_n(&process->limiter, __ATOMIC_ACQUIRE);
	if (limiter)
		return limiter;
	aq_lock(&process->claiming);
	limiter = __atomic_load_n(&process->limiter, __ATOMIC_ACQUIRE);
	if (limiter == NULL) {
		limiter = aq_pages(sizeof(*limiter));
		if (limiter)
			limiter->samples = aq_samples_make();
		if (limiter && limiter->samples == NULL) {
			aq_pages_give(limiter, sizeof(*limiter));
			limiter = NULL;
		}
		__atomic_store_n(&process->limiter, limiter, __ATOMIC_RELEASE);
	}
	aq_unlock(&process->claiming);
	return limiter;
}

/* A kind of launch that runs for the first time: how long it takes is known soon, and worth waiting for, else
 * a program could queue any amount of it. Returns what to charge. */
static uint64_t first_of_a_kind(struct aq_limiter *limiter, struct aq_key *entry, CUstream stream)
{
	uint64_t pause = POLL_NS, now = aq_now_ns();
	if (__atomic_load_n(&entry->pending, __ATOMIC_RELAXED) == 0)
		entry->since_ns = now;
	uint64_t since = entry->since_ns;
	while (__atomic_load_n(&entry->pending, __ATOMIC_RELAXED) > 0 && entry->measured == 0 &&
	       now - since < FIRST_NS) {
		if (pause == POLL_NS && aq_stream_captures(stream))
			return 0;
		aq_sleep_until(now + pause);
		pause = pause * 2 < POLL_MOST ? pause * 2 : POLL_MOST;
		aq_samples_collect(limiter);
		now = aq_now_ns();
	}
	uint64_t charge = aq_key_charge(&limiter->keys, entry);
	/* It is still not done: it takes at least as long as that. */
	if (entry->measured == 0 && now - since > charge && now - since < MOST_NS)
		charge = now - since;
	return charge;
}

/* Takes it from what this process has taken before. */
static bool spend(struct aq_limited_card *card, uint64_t amount)
{
	int64_t price = (int64_t)amount;
	if (__atomic_load_n(&card->credit_ns, __ATOMIC_RELAXED) < price)
		return false;
	if (__atomic_fetch_sub(&card->credit_ns, price, __ATOMIC_RELAXED) >= price)
		return true;
	__atomic_fetch_add(&card->credit_ns, price, __ATOMIC_RELAXED);
	return false;
}

/* The first launches of a kind on a card that others use look longer than they are, as do those that follow a
 * burst which the others' coming has ended, and the node has not said yet by how much. */
static bool unsure(const struct aq_limited_card *card, unsigned number, const struct aq_launch *launch,
		   uint64_t now)
{
	return (launch->known->measured < UNSURE ||
		now - __atomic_load_n(&card->lent_at_ns, __ATOMIC_RELAXED) < LENT_NS) &&
	       aq_cards[number].share_count == 1 && ratio_of(first_share(number), now) == 0;
}

/* How long a launch waits at a time that had to wait since `start`, and is to wait for `wait` more. Nobody
 * waits for long on account of a length that may be twice the true one: the rest of such a debt is paid
 * later, in parts. */
static uint64_t pause_of(struct aq_limited_card *card, unsigned number, const struct aq_launch *launch,
			 uint64_t start, uint64_t now, uint64_t wait)
{
	if (!unsure(card, number, launch, now))
		return wait < AQ_LOOK_NS ? wait : AQ_LOOK_NS;
	uint64_t percent = __atomic_load_n(&first_share(number)->core_percent, __ATOMIC_RELAXED);
	uint64_t patience = percent ? UNSURE_DEBT_NS * 100 / percent : 0, waited = now - start;
	if (waited < patience) {
		uint64_t most = patience - waited < UNSURE_LOOK_NS ? patience - waited : UNSURE_LOOK_NS;
		return wait < most ? wait : most;
	}
	int64_t debt = (int64_t)(wait < MOST_NS ? wait * percent / 100 : MOST_NS);
	if (__atomic_load_n(&card->deferred_ns, __ATOMIC_RELAXED) + debt > DEFERRED_MOST_NS)
		return wait < AQ_LOOK_NS ? wait : AQ_LOOK_NS;
	__atomic_fetch_add(&card->deferred_ns, debt, __ATOMIC_RELAXED);
	correct(number, -debt, now);
	return 0;
}

/* A part of what was deferred, with a launch that pays `cost`. */
static void pay_deferred(struct aq_limited_card *card, unsigned number, const struct aq_launch *launch,
			 uint64_t now)
{
	int64_t owed = __atomic_load_n(&card->deferred_ns, __ATOMIC_RELAXED);
	if (owed <= 0 || launch->cost_ns == AQ_FREE || unsure(card, number, launch, now))
		return;
	int64_t part = (int64_t)(launch->cost_ns / DEFERRED_PART) + 1;
	part = part < owed ? part : owed;
	__atomic_fetch_sub(&card->deferred_ns, part, __ATOMIC_RELAXED);
	correct(number, part, now);
}

/* False: the launch goes on without being charged (the limit is gone, or it only goes into a graph). */
static bool wait_and_pay(struct aq_limiter *limiter, unsigned number, struct aq_launch *launch)
{
	struct aq_limited_card *card = &limiter->card[number];
	uint64_t portion = launch->charged_ns < SMALL_NS ? PORTION_NS : 0;
	uint64_t now = aq_now_ns(), start = now, wait;
	for (bool first = true; !pay(number, launch, portion, now, &wait); first = false) {
		if (first && aq_stream_captures(launch->stream))
			return false;
		aq_sleep_until(now + pause_of(card, number, launch, start, now, wait));
		aq_samples_collect(limiter);
		if (card_open(number))
			return false;
		aq_suspend_wait(number);
		now = aq_now_ns();
		/* A bucket never stays empty for that long by itself: somebody writes into it, or a hundred
		 * others are quicker every time. */
		uint64_t last = __atomic_load_n(&card->taken_at_ns, __ATOMIC_RELAXED);
		if (now - start > AQ_BUCKET_WAIT_NS && (last > now || now - last > AQ_BUCKET_WAIT_NS)) {
			note(first_share(number), launch->charged_ns + portion, now);
			correct(number, (int64_t)(launch->cost_ns + portion), now);
			break;
		}
	}
	pay_deferred(card, number, launch, now);
	__atomic_store_n(&card->taken_at_ns, now, __ATOMIC_RELAXED);
	__atomic_fetch_add(&card->charged_ns, launch->charged_ns + portion, __ATOMIC_RELAXED);
	if (portion)
		__atomic_fetch_add(&card->credit_ns, (int64_t)portion, __ATOMIC_RELAXED);
	return true;
}

static void count(unsigned number, uint64_t launches)
{
	struct aq_usage_slot *slot = aq_slot(&aq_shares[aq_cards[number].share[0]]);
	if (slot)
		__atomic_fetch_add(&slot->launches, launches, __ATOMIC_RELAXED);
}

static void admit(struct aq_limiter *limiter, unsigned number, struct aq_launch *launch)
{
	struct aq_limited_card *card = &limiter->card[number];
	struct aq_key *entry = aq_key_find(&limiter->keys, launch->key, launch->blocks, number);
	aq_samples_collect(limiter);
	/* Counted here as well: what several cards or devices take part in never goes the quick way. */
	bool measure = entry->measured == 0 || !aq_key_quick(entry);
	launch->known = entry;
	launch->charged_ns = entry->measured ? aq_key_charge(&limiter->keys, entry)
					     : first_of_a_kind(limiter, entry, launch->stream);
	launch->cost_ns = cost(first_share(number), launch->charged_ns,
			       aq_key_lately(entry, launch->charged_ns), aq_now_ns());
	if (!spend(card, launch->charged_ns) && !wait_and_pay(limiter, number, launch))
		return;
	launch->card = card;
	if (measure) {
		launch->upto_ns = __atomic_load_n(&card->charged_ns, __ATOMIC_RELAXED);
		launch->sample = aq_sample_begin(limiter, launch, number);
		aq_key_rest(entry, aq_samples_running(limiter->samples));
		count(number, entry->quick + 1ull);
	}
}

CUresult aq_launch_begin(struct aq_launch *launch)
{
	struct aq_place place;
	if (!aq_active()) {
		/* Nothing limits this process, and nothing will. */
		if (__atomic_load_n(&aq_active_word, __ATOMIC_ACQUIRE) == 2) {
			__atomic_store_n(&aq_gate.open, 1, __ATOMIC_RELAXED);
			__atomic_store_n(&aq_gate.words, nothing, __ATOMIC_RELEASE);
		}
		return CUDA_SUCCESS;
	}
	int number = (int)__atomic_load_n(&aq_gate.single, __ATOMIC_RELAXED) - 1;
	if (number < 0) {
		if (aq_place_stream(launch->stream, &place) != AQ_CHARGE)
			return CUDA_SUCCESS;
		number = (int)place.card;
	}
	aq_launch_wait((unsigned)number);
	bool open = card_open((unsigned)number);
	set_gate();
	struct aq_limiter *limiter = open ? NULL : limiter_pages();
	if (limiter)
		admit(limiter, (unsigned)number, launch);
	return CUDA_SUCCESS;
}

void aq_launch_end(struct aq_launch *launch, CUresult result)
{
	if (launch->card == NULL || (result == CUDA_SUCCESS && launch->sample == NULL))
		return;
	struct aq_limiter *limiter = __atomic_load_n(&aq_process()->limiter, __ATOMIC_ACQUIRE);
	if (limiter == NULL)
		return;
	if (result != CUDA_SUCCESS)
		__atomic_fetch_add(&launch->card->credit_ns, (int64_t)launch->charged_ns, __ATOMIC_RELAXED);
	if (launch->sample)
		aq_sample_end(limiter, launch->sample, launch->stream, result == CUDA_SUCCESS);
}

void aq_limiter_forget(const void *key)
{
	struct aq_limiter *limiter = __atomic_load_n(&aq_process()->limiter, __ATOMIC_ACQUIRE);
	for (unsigned card = 0; limiter && key && card < aq_card_count; card++)
		aq_key_forget(&limiter->keys, key, card);
}

void aq_limiter_context_gone(CUcontext context)
{
	struct aq_limiter *limiter = __atomic_load_n(&aq_process()->limiter, __ATOMIC_ACQUIRE);
	if (limiter)
		aq_samples_drop(limiter->samples, context);
}
