/* SPDX-License-Identifier: Apache-2.0
 *
 * What a program sees of its card's memory. The driver is always asked first, so that errors, missing outputs
 * and states are its own; then the figures become those of the share.
 *
 * Invariant: total is the limit (never more than the card has), used is what the account says, free is what
 * the next allocation can get, and CUDA and NVML say the same.
 */
#include "query.h"

#include "charge.h"
#include "place.h"
#include "resolve.h"

/* A card with one share, which is nearly all of them. False: several, or units left behind to be settled. */
static inline bool look_quickly(const struct aq_card *card, uint64_t *limit, uint64_t *used, bool *beyond)
{
	struct aq_share *share = card->only;
	if (__builtin_expect(share == NULL, 0) ||
	    __builtin_expect(__atomic_load_n(&share->account.file->unsettled, __ATOMIC_RELAXED) != 0, 0))
		return false;
	*limit = aq_share_limit(share);
	*used = aq_account_units(&share->account);
	*beyond = (__atomic_load_n(&share->flags, __ATOMIC_RELAXED) & AQ_GRANT_OVERSUBSCRIBE) != 0;
	return true;
}

bool aq_share_view(unsigned number, uint64_t physical, uint64_t physical_free, struct aq_view_figures *out)
{
	uint64_t limit, used;
	bool beyond;
	if (!look_quickly(&aq_cards[number], &limit, &used, &beyond)) {
		limit = aq_card_limit(number);
		used = aq_card_used(number);
		beyond = aq_oversubscribed(number);
	}
	if (limit == AQ_UNLIMITED)
		return false;
	uint64_t total = limit << AQ_UNIT_SHIFT;
	used <<= AQ_UNIT_SHIFT;
	if (total > physical && !beyond)
		total = physical;
	out->total = total;
	out->used = used < total ? used : total;
	out->free = total - out->used;
	/* Less than our share may be left when the card is overbooked or others hold more than theirs. */
	if (out->free > physical_free && !beyond)
		out->free = physical_free;
	return true;
}

bool aq_oversubscribed(unsigned number)
{
	const struct aq_card *card = &aq_cards[number];
	for (uint32_t i = 0; i < card->share_count; i++)
		if (__atomic_load_n(&aq_shares[card->share[i]].flags, __ATOMIC_RELAXED) &
		    AQ_GRANT_OVERSUBSCRIBE)
			return true;
	return false;
}

static void show_info(size_t *free, size_t *total, size_t real_free, size_t real_total)
{
	struct aq_place place;
	struct aq_view_figures figures;
	enum aq_verdict verdict = AQ_CHARGE;
	/* The driver has answered, so there is a context; with one card it can only be on that. */
	if (__builtin_expect(aq_active() && aq_sole_card != AQ_NO_CARD, 1))
		place.card = (unsigned)aq_sole_card;
	else
		verdict = aq_place_here(&place);
	if (verdict == AQ_CHARGE) {
		aq_pools_sync(place.card);
		if (__builtin_expect(aq_cards[place.card].only == NULL || !aq_cards[place.card].only->grant,
				     0))
			aq_tidy_now_and_then(place.card);
		if (aq_share_view(place.card, real_total, real_free, &figures)) {
			real_free = figures.free;
			real_total = figures.total;
		}
	}
	if (free)
		*free = real_free;
	if (total)
		*total = real_total;
}

HOOK(CUresult, cuMemGetInfo_v2, (size_t *free, size_t *total))
{
	/* The driver's verdict on missing outputs is its own; ours need both. */
	if (free == NULL || total == NULL) {
		CUresult verdict = REAL(cuMemGetInfo_v2)(free, total);
		if (verdict != CUDA_SUCCESS || (free == NULL && total == NULL))
			return verdict;
	}
	size_t real_free = 0, real_total = 0;
	CUresult result = REAL(cuMemGetInfo_v2)(&real_free, &real_total);
	if (result == CUDA_SUCCESS)
		show_info(free, total, real_free, real_total);
	return result;
}

static unsigned narrow(size_t value)
{
	return value < UINT32_MAX ? (unsigned)value : UINT32_MAX;
}

HOOK(CUresult, cuMemGetInfo, (unsigned *free, unsigned *total))
{
	CUresult result = REAL(cuMemGetInfo)(free, total);
	size_t real_free = 0, real_total = 0;
	if (result == CUDA_SUCCESS && REAL(cuMemGetInfo_v2)(&real_free, &real_total) == CUDA_SUCCESS) {
		size_t shown_free = 0, shown_total = 0;
		show_info(&shown_free, &shown_total, real_free, real_total);
		/* Where the share is smaller than the card; else the driver's own way of narrowing stands. */
		if (free && shown_free != real_free)
			*free = narrow(shown_free);
		if (total && shown_total != real_total)
			*total = narrow(shown_total);
	}
	return result;
}

/* What the share makes of the card's size. */
static size_t shown_total(CUdevice device, size_t physical)
{
	struct aq_place place;
	struct aq_view_figures figures;
	if (aq_place_device(device, &place) == AQ_CHARGE &&
	    aq_share_view(place.card, physical, physical, &figures))
		return figures.total;
	return physical;
}

HOOK(CUresult, cuDeviceTotalMem_v2, (size_t *bytes, CUdevice device))
{
	CUresult result = REAL(cuDeviceTotalMem_v2)(bytes, device);
	if (result == CUDA_SUCCESS && bytes)
		*bytes = shown_total(device, *bytes);
	return result;
}

HOOK(CUresult, cuDeviceTotalMem, (unsigned *bytes, CUdevice device))
{
	CUresult result = REAL(cuDeviceTotalMem)(bytes, device);
	size_t physical = 0;
	if (result == CUDA_SUCCESS && bytes && REAL(cuDeviceTotalMem_v2)(&physical, device) == CUDA_SUCCESS) {
		size_t shown = shown_total(device, physical);
		if (shown != physical)
			*bytes = narrow(shown);
	}
	return result;
}
