/* SPDX-License-Identifier: Apache-2.0
 *
 * See charge.h.
 */
#include "charge.h"

#include <errno.h>
#include <time.h>

#include "entry.h"
#include "identity.h"
#include "lock.h"
#include "pool.h"
#include "priority.h"
#include "say.h"
#include "view.h"
#include "wait.h"

#define SETTLE_ATTEMPTS 4096u
#define SPLIT_ATTEMPTS  16

static bool card_has(unsigned number, uint32_t share)
{
	const struct aq_card *card = &aq_cards[number];
	for (uint32_t i = 0; i < card->share_count; i++)
		if (card->share[i] == share)
			return true;
	return false;
}

/* Looking into what neighbours have mapped takes long, so it is done now and then only. */
#define MAPS_EVERY_MS 250u
#define TIDY_EVERY_MS 200u

static bool time_for_maps(struct aq_process *process)
{
	struct timespec now = {0, 0};
	clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	uint64_t ms = (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000 + MAPS_EVERY_MS;
	uint64_t last = __atomic_load_n(&process->maps_read_ms, __ATOMIC_RELAXED);
	return ms - last >= MAPS_EVERY_MS &&
	       __atomic_compare_exchange_n(&process->maps_read_ms, &last, ms, false, __ATOMIC_RELAXED,
					   __ATOMIC_RELAXED);
}

static void tidy(struct aq_share *share, enum aq_look look)
{
	struct aq_process *process = aq_process();
	struct aq_mapped_file region = {share->account.file, ""};
	bool maps = look == AQ_LOOK_CLOSELY && time_for_maps(process);
	uint32_t used = aq_account_used_slots(&share->account);
	for (uint32_t i = 0; i < used; i++) {
		struct aq_usage_slot *slot = aq_account_slot(&share->account, i);
		uint64_t owner = __atomic_load_n(&slot->owner, __ATOMIC_SEQ_CST);
		if (owner == 0)
			continue;
		uint64_t pidns = __atomic_load_n(&slot->pidns, __ATOMIC_SEQ_CST);
		if (aq_owner_left(process, owner, pidns, look, maps ? &region : NULL))
			aq_account_reap(&share->account, i, owner);
	}
	aq_account_settle(&share->account, SETTLE_ATTEMPTS, NULL);
	aq_view_refresh(share);
}

void aq_share_tidy(struct aq_share *share)
{
	tidy(share, AQ_LOOK_CLOSELY);
}

static int claim(const struct aq_share *share, const struct aq_process *process)
{
	uint64_t owner;
	return aq_account_claim(&share->account, process->pid, process->start, process->pidns, &owner);
}

struct aq_usage_slot *aq_slot_claim(struct aq_share *share)
{
	struct aq_process *process = aq_process();
	aq_lock(&process->claiming);
	struct aq_usage_slot *slot = __atomic_load_n(&process->slot[share->index], __ATOMIC_ACQUIRE);
	if (slot == NULL) {
		if (!process->known)
			aq_identify(process);
		/* Neighbours that ended before we came are nobody's business any more. With a node a glance
		 * will do: it sees the rest within a second, and whoever would be refused looks closely.
		 * Where there is none, we also look after the other cards. */
		if (share->grant)
			tidy(share, AQ_LOOK_BRIEFLY);
		for (uint32_t i = 0; share->grant == NULL && i < aq_share_count; i++)
			aq_share_tidy(&aq_shares[i]);
		int index = claim(share, process);
		if (index < 0) {
			aq_share_tidy(share);
			index = claim(share, process);
		}
		if (index >= 0) {
			slot = aq_account_slot(&share->account, (uint32_t)index);
			__atomic_store_n(&process->slot[share->index], slot, __ATOMIC_RELEASE);
		}
	}
	aq_unlock(&process->claiming);
	if (slot == NULL) {
		__atomic_fetch_or(&share->account.file->complaints, AQ_COMPLAINT_SLOTS, __ATOMIC_RELAXED);
		AQ_SAY(AQ_SAY_SLOTS,
		       "this share of a GPU is used by as many processes as its usage file has room for; "
		       "this process gets no GPU memory");
	}
	if (process->pidns == 0)
		__atomic_fetch_or(&share->account.file->complaints, AQ_COMPLAINT_BLIND, __ATOMIC_RELAXED);
	return slot;
}

void aq_tidy_now_and_then(unsigned number)
{
	struct aq_share *share = &aq_shares[aq_cards[number].share[0]];
	struct aq_process *process = aq_process();
	if (share->grant || aq_account_used_slots(&share->account) < 2)
		return;
	struct timespec now = {0, 0};
	clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	uint64_t ms = (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
	if (ms - __atomic_load_n(&process->tidied_ms, __ATOMIC_RELAXED) < TIDY_EVERY_MS)
		return;
	__atomic_store_n(&process->tidied_ms, ms, __ATOMIC_RELAXED);
	if (!process->known) {
		aq_lock(&process->claiming);
		if (!process->known)
			aq_identify(process);
		aq_unlock(&process->claiming);
	}
	aq_share_tidy(share);
}

static uint64_t remaining(struct aq_share *share)
{
	uint64_t limit = aq_share_limit(share);
	uint64_t used = aq_account_units(&share->account);
	return limit > used ? limit - used : 0;
}

/* Takes as much of `units` as the share has left. Returns what it took. */
static uint64_t take_part(struct aq_share *share, uint64_t units)
{
	struct aq_usage_slot *slot = aq_slot(share);
	while (slot && units > 0) {
		uint64_t left = remaining(share);
		uint64_t part = units < left ? units : left;
		if (part == 0)
			break;
		if (aq_account_reserve(&share->account, slot, part, aq_share_limit(share)) == 0) {
			aq_view_update(share, slot);
			return part;
		}
	}
	return 0;
}

static void give_part(struct aq_share *share, struct aq_usage_slot *slot, uint64_t units)
{
	aq_account_release(&share->account, slot, units);
	aq_view_update(share, slot);
}

/* Over all shares of the card, each as far as it goes. */
static int charge_split(const struct aq_card *card, uint64_t units)
{
	uint64_t part[AQ_MAX_SHARES];
	for (int attempt = 0; attempt < SPLIT_ATTEMPTS; attempt++) {
		uint64_t missing = units, free = 0;
		for (uint32_t i = 0; i < card->share_count; i++) {
			part[i] = missing ? take_part(&aq_shares[card->share[i]], missing) : 0;
			missing -= part[i];
		}
		if (missing == 0)
			return 0;
		for (uint32_t i = card->share_count; i-- > 0;) {
			struct aq_share *share = &aq_shares[card->share[i]];
			if (part[i])
				give_part(share, aq_slot(share), part[i]);
		}
		/* Two that each took a part of what only one can have: once more, as long as it could fit. */
		for (uint32_t i = 0; i < card->share_count; i++)
			free += remaining(&aq_shares[card->share[i]]);
		if (free < units)
			break;
	}
	return -ENOMEM;
}

int aq_charge_quickly(unsigned number, uint64_t units)
{
	const struct aq_card *card = &aq_cards[number];
	if (__builtin_expect(card->share_count != 1, 0))
		return charge_split(card, units);
	struct aq_share *share = &aq_shares[card->share[0]];
	struct aq_usage_slot *slot = aq_slot(share);
	if (slot == NULL || aq_account_reserve(&share->account, slot, units, aq_share_limit(share)) < 0)
		return -ENOMEM;
	if (__builtin_expect(__atomic_load_n(&share->limit, __ATOMIC_RELAXED) == 0, 0)) {
		/* The account was lost on the way (sigbus.c), so what it said is nothing. */
		aq_account_release(&share->account, slot, units);
		return -ENOMEM;
	}
	aq_view_update(share, slot);
	return 0;
}

void aq_charge_anyway(unsigned number, uint64_t units)
{
	struct aq_share *share = &aq_shares[aq_cards[number].share[0]];
	struct aq_usage_slot *slot = aq_slot(share);
	if (slot) {
		aq_account_reserve(&share->account, slot, units, AQ_UNLIMITED);
		aq_view_update(share, slot);
	}
}

void aq_make_room(unsigned number)
{
	const struct aq_card *card = &aq_cards[number];
	aq_pools_sync(number);
	for (uint32_t i = 0; i < card->share_count; i++)
		aq_share_tidy(&aq_shares[card->share[i]]);
}

/* What is missing is with others: what this process has itself nobody else can give back. */
static bool others_hold(unsigned number, uint64_t units)
{
	const struct aq_card *card = &aq_cards[number];
	const struct aq_process *process = aq_process();
	uint64_t own = 0;
	for (uint32_t i = 0; i < card->share_count; i++) {
		const struct aq_usage_slot *slot =
		    __atomic_load_n(&process->slot[card->share[i]], __ATOMIC_ACQUIRE);
		own += slot ? aq_word_units(__atomic_load_n(&slot->charge, __ATOMIC_RELAXED)) : 0;
	}
	uint64_t limit = aq_card_limit(number);
	return units <= limit && own <= limit - units;
}

bool aq_wait_for_others(unsigned card, uint64_t units, struct aq_wait *wait)
{
	if (!others_hold(card, units) || !aq_wait_more(card, wait))
		return false;
	aq_make_room(card);
	return true;
}

int aq_charge_slowly(unsigned card, uint64_t units, enum aq_refusal kind)
{
	aq_suspend_wait(card);
	if (__builtin_expect(aq_charge_quickly(card, units) == 0, 1))
		return 0;
	aq_make_room(card);
	if (aq_charge_quickly(card, units) == 0)
		return 0;
	if (aq_pools_any()) {
		aq_pools_trim(card);
		if (aq_charge_quickly(card, units) == 0)
			return 0;
	}
	struct aq_wait wait = {0};
	while (aq_wait_for_others(card, units, &wait))
		if (aq_charge_quickly(card, units) == 0)
			return 0;
	aq_refused(card, kind);
	return -ENOMEM;
}

void aq_refused(unsigned number, enum aq_refusal kind)
{
	const struct aq_share *share = &aq_shares[aq_cards[number].share[0]];
	__atomic_fetch_add(&share->account.file->refused[kind], 1, __ATOMIC_RELAXED);
}

void aq_complain(int card, enum aq_complaint complaint)
{
	for (uint32_t i = 0; i < aq_share_count; i++) {
		uint64_t *word = &aq_shares[i].account.file->complaints;
		if ((card == AQ_NO_CARD || card_has((unsigned)card, i)) &&
		    !(__atomic_load_n(word, __ATOMIC_RELAXED) & complaint))
			__atomic_fetch_or(word, complaint, __ATOMIC_RELAXED);
	}
}

void aq_spilled(unsigned number, int64_t units)
{
	struct aq_usage_slot *slot = aq_slot(&aq_shares[aq_cards[number].share[0]]);
	if (slot)
		__atomic_fetch_add(&slot->spilled_bytes, (uint64_t)units << AQ_UNIT_SHIFT, __ATOMIC_RELAXED);
}

/* What this process holds of the card is the sum over its slots; which share pays it back is all one. The
 * last share gives back first, so that the others stay whole. */
static void uncharge_split(const struct aq_card *card, uint64_t units)
{
	struct aq_process *process = aq_process();
	for (uint32_t i = card->share_count; i-- > 0 && units > 0;) {
		struct aq_share *share = &aq_shares[card->share[i]];
		struct aq_usage_slot *slot = __atomic_load_n(&process->slot[share->index], __ATOMIC_ACQUIRE);
		if (slot == NULL)
			continue;
		units -= aq_account_release(&share->account, slot, units);
		aq_view_update(share, slot);
	}
}

void aq_uncharge_slowly(unsigned number, uint64_t units)
{
	const struct aq_card *card = &aq_cards[number];
	if (__builtin_expect(card->share_count != 1, 0)) {
		uncharge_split(card, units);
		return;
	}
	struct aq_share *share = &aq_shares[card->share[0]];
	struct aq_usage_slot *slot = __atomic_load_n(&aq_process()->slot[share->index], __ATOMIC_ACQUIRE);
	if (__builtin_expect(slot != NULL, 1)) {
		aq_account_release(&share->account, slot, units);
		aq_view_update(share, slot);
	}
}

uint64_t aq_card_limit(unsigned number)
{
	const struct aq_card *card = &aq_cards[number];
	uint64_t sum = 0;
	for (uint32_t i = 0; i < card->share_count; i++) {
		uint64_t limit = aq_share_limit(&aq_shares[card->share[i]]);
		if (limit == AQ_UNLIMITED)
			return AQ_UNLIMITED;
		sum += limit;
	}
	return sum;
}

uint64_t aq_card_used(unsigned number)
{
	const struct aq_card *card = &aq_cards[number];
	uint64_t sum = 0;
	for (uint32_t i = 0; i < card->share_count; i++) {
		const struct aq_share *share = &aq_shares[card->share[i]];
		if (__atomic_load_n(&share->account.file->unsettled, __ATOMIC_RELAXED))
			aq_account_settle(&share->account, SETTLE_ATTEMPTS, NULL);
		sum += aq_account_units(&share->account);
	}
	return sum;
}
