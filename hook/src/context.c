/* SPDX-License-Identifier: Apache-2.0
 *
 * A context takes memory of its card: charged once per process and card, before the driver makes the first,
 * given back after the last is gone. When a context goes, so does all memory that was allocated in it.
 *
 * Invariant: aq_process()->card[c].contexts counts the contexts of card c that this process holds or is
 * making.
 */
#include "context.h"

#include <errno.h>

#include "charge.h"
#include "context_end.h"
#include "entry.h"
#include "lock.h"
#include "place.h"
#include "resolve.h"
#include "say.h"

/* ---- which card a context is on ---------------------------------------------------------------- */

struct aq_context *aq_context_look(CUcontext handle)
{
	struct aq_context *all = aq_process()->context;
	unsigned home = aq_context_home(handle);
	for (unsigned i = 0; i < 8; i++) {
		struct aq_context *context = &all[(home + i) & (AQ_MAX_CONTEXTS - 1)];
		if (__atomic_load_n(&context->handle, __ATOMIC_ACQUIRE) == handle)
			return context;
	}
	return NULL;
}

struct aq_context *aq_context_enter(CUcontext handle, CUdevice ordinal, bool counted)
{
	struct aq_process *process = aq_process();
	unsigned home = aq_context_home(handle);
	aq_lock(&process->claiming);
	struct aq_context *found = aq_context_look(handle);
	for (unsigned i = 0; i < 8 && !found; i++) {
		struct aq_context *context = &process->context[(home + i) & (AQ_MAX_CONTEXTS - 1)];
		if (context->handle)
			continue;
		context->ordinal = (int16_t)ordinal;
		context->card = (int8_t)aq_card_of_ordinal(ordinal);
		context->counted = 0;
		context->attached = 0;
		__atomic_store_n(&context->handle, handle, __ATOMIC_RELEASE);
		found = context;
	}
	if (found && counted)
		found->counted = 1;
	aq_unlock(&process->claiming);
	return found;
}

unsigned aq_context_find(CUcontext handle, CUdevice *ordinal, int *card)
{
	const struct aq_context *context = aq_context_look(handle);
	if (__builtin_expect(context == NULL, 0)) {
		/* Made in a way that we did not see. */
		if (REAL(cuCtxGetDevice)(ordinal) != CUDA_SUCCESS) {
			*card = AQ_NO_CARD;
			return AQ_NO_CONTEXT;
		}
		*card = aq_card_of_ordinal(*ordinal);
		context = aq_context_enter(handle, *ordinal, false);
		if (context == NULL)
			return AQ_NO_CONTEXT;
	}
	*ordinal = context->ordinal;
	*card = context->card;
	return (unsigned)(context - aq_process()->context);
}

/* ---- what having a context costs --------------------------------------------------------------- */

static uint64_t overhead_units(unsigned number)
{
	const struct aq_card *card = &aq_cards[number];
	uint64_t bytes = 0;
	for (uint32_t i = 0; i < card->share_count; i++) {
		const struct aq_share *share = &aq_shares[card->share[i]];
		uint64_t own = __atomic_load_n(&share->context_overhead, __ATOMIC_RELAXED);
		bytes = own > bytes ? own : bytes;
	}
	uint64_t units = aq_units_of(bytes), limit = aq_card_limit(number);
	if (units <= limit)
		return units;
	/* A context alone is more than the whole limit: the program may look, and allocate nothing. */
	aq_complain((int)number, AQ_COMPLAINT_CONTEXT);
	AQ_SAY(AQ_SAY_CONTEXT,
	       "the memory limit of this container is smaller than what one CUDA context takes; "
	       "no allocation will succeed, ask for more memory");
	return limit;
}

static void note_overhead(unsigned number, uint64_t units)
{
	struct aq_share *share = &aq_shares[aq_cards[number].share[0]];
	struct aq_usage_slot *slot = aq_slot(share);
	if (slot)
		__atomic_store_n(&slot->context_bytes, units << AQ_UNIT_SHIFT, __ATOMIC_RELAXED);
}

static bool count_in(unsigned number)
{
	struct aq_process_card *own = &aq_process()->card[number];
	aq_lock(&own->lock);
	bool fits = true;
	if (own->contexts == 0) {
		uint64_t units = overhead_units(number);
		fits = units == 0 || aq_charge_quickly(number, units) == 0;
		if (fits) {
			own->overhead = units;
			note_overhead(number, units);
		}
	}
	own->contexts += fits;
	aq_unlock(&own->lock);
	return fits;
}

void aq_context_count_out(unsigned number)
{
	struct aq_process_card *own = &aq_process()->card[number];
	aq_lock(&own->lock);
	if (own->contexts > 0 && --own->contexts == 0 && own->overhead > 0) {
		aq_uncharge(number, own->overhead);
		own->overhead = 0;
		note_overhead(number, 0);
	}
	aq_unlock(&own->lock);
}

/* Before the driver makes a context on `ordinal`. CUDA_SUCCESS: go on (`card` is charged, or AQ_NO_CARD). */
CUresult aq_context_begin(CUdevice ordinal, int *card)
{
	struct aq_place place;
	*card = AQ_NO_CARD;
	switch (aq_place_device(ordinal, &place)) {
	case AQ_REFUSE:
		return CUDA_ERROR_NOT_PERMITTED;
	case AQ_CHARGE:
		if (!count_in(place.card)) {
			aq_make_room(place.card);
			if (!count_in(place.card)) {
				aq_refused(place.card, AQ_REFUSED_CONTEXT);
				return CUDA_ERROR_OUT_OF_MEMORY;
			}
		}
		*card = (int)place.card;
		return CUDA_SUCCESS;
	case AQ_PASS:
	default:
		return CUDA_SUCCESS;
	}
}

/* After the driver was asked for one. */
static CUresult end(CUresult result, const CUcontext *handle, CUdevice ordinal, int card)
{
	if (result == CUDA_SUCCESS) {
		if (handle && *handle && card != AQ_NO_CARD)
			aq_context_enter(*handle, ordinal, true);
	} else if (card != AQ_NO_CARD) {
		aq_context_count_out((unsigned)card);
	}
	return result;
}

#define CREATE(name, parameters, arguments, handle, ordinal)                                               \
	HOOK(CUresult, name, parameters)                                                                   \
	{                                                                                                  \
		int card;                                                                                  \
		CUresult result = aq_context_begin(ordinal, &card);                                        \
		return result == CUDA_SUCCESS ? end(REAL(name) arguments, handle, ordinal, card) : result; \
	}

CREATE(cuCtxCreate, (CUcontext * context, unsigned flags, CUdevice device), (context, flags, device), context,
       device)
CREATE(cuCtxCreate_v2, (CUcontext * context, unsigned flags, CUdevice device), (context, flags, device),
       context, device)
CREATE(cuCtxCreate_v3, (CUcontext * context, void *affinity, int count, unsigned flags, CUdevice device),
       (context, affinity, count, flags, device), context, device)
CREATE(cuCtxCreate_v4, (CUcontext * context, void *parameters, unsigned flags, CUdevice device),
       (context, parameters, flags, device), context, device)
CREATE(cuGLCtxCreate, (CUcontext * context, unsigned flags, CUdevice device), (context, flags, device),
       context, device)
CREATE(cuGLCtxCreate_v2, (CUcontext * context, unsigned flags, CUdevice device), (context, flags, device),
       context, device)
CREATE(cuVDPAUCtxCreate, (CUcontext * context, unsigned flags, CUdevice device, uint32_t vdpau, void *get),
       (context, flags, device, vdpau, get), context, device)
CREATE(cuVDPAUCtxCreate_v2, (CUcontext * context, unsigned flags, CUdevice device, uint32_t vdpau, void *get),
       (context, flags, device, vdpau, get), context, device)

static CUresult destroy(__typeof__(&hook_cuCtxDestroy) real, CUcontext handle)
{
	struct aq_ending ending = {NULL, 0, {NULL}, {NULL}};
	struct aq_context *context = handle ? aq_context_look(handle) : NULL;
	if (context)
		aq_ending_add(&ending, context);
	CUresult result = real(handle);
	aq_ending_over(&ending, result == CUDA_SUCCESS);
	return result;
}

HOOK(CUresult, cuCtxDestroy, (CUcontext context))
{
	return destroy(REAL(cuCtxDestroy), context);
}

HOOK(CUresult, cuCtxDestroy_v2, (CUcontext context))
{
	return destroy(REAL(cuCtxDestroy_v2), context);
}

HOOK(CUresult, cuCtxAttach, (CUcontext * context, unsigned flags))
{
	CUresult result = REAL(cuCtxAttach)(context, flags);
	struct aq_context *known =
	    result == CUDA_SUCCESS && context && *context ? aq_context_look(*context) : NULL;
	if (known)
		__atomic_fetch_add(&known->attached, 1, __ATOMIC_RELAXED);
	return result;
}

HOOK(CUresult, cuCtxDetach, (CUcontext context))
{
	struct aq_context *known = context ? aq_context_look(context) : NULL;
	if (known == NULL || __atomic_load_n(&known->attached, __ATOMIC_RELAXED) == 0)
		return destroy(REAL(cuCtxDetach), context);
	CUresult result = REAL(cuCtxDetach)(context);
	if (result == CUDA_SUCCESS)
		__atomic_fetch_sub(&known->attached, 1, __ATOMIC_RELAXED);
	return result;
}
