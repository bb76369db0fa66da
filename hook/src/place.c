/* SPDX-License-Identifier: Apache-2.0
 *
 * See place.h. The driver says which context is current, and which device that is on; a context is asked
 * about once.
 */
#include "place.h"

#include "context.h"
#include "entry.h"
#include "resolve.h"

enum aq_verdict aq_place_device(CUdevice ordinal, struct aq_place *place)
{
	if (!aq_active())
		return AQ_PASS;
	int card = aq_card_of_ordinal(ordinal);
	place->ordinal = ordinal;
	place->context = AQ_NO_CONTEXT;
	if (card == AQ_NO_CARD)
		return aq_refuses(ordinal) ? AQ_REFUSE : AQ_PASS;
	place->card = (unsigned)card;
	return AQ_CHARGE;
}

enum aq_verdict aq_place_here(struct aq_place *place)
{
	CUcontext current = NULL;
	int card;
	if (!aq_active() || REAL(cuCtxGetCurrent)(&current) != CUDA_SUCCESS || current == NULL)
		return AQ_PASS;
	const struct aq_context *all = aq_process()->context;
	unsigned home = aq_context_home(current);
	if (__builtin_expect(__atomic_load_n(&all[home].handle, __ATOMIC_ACQUIRE) == current, 1)) {
		place->context = home;
		place->ordinal = all[home].ordinal;
		card = all[home].card;
	} else {
		place->context = aq_context_find(current, &place->ordinal, &card);
	}
	if (card == AQ_NO_CARD)
		return aq_refuses(place->ordinal) ? AQ_REFUSE : AQ_PASS;
	place->card = (unsigned)card;
	return AQ_CHARGE;
}

enum aq_verdict aq_place_stream(CUstream stream, struct aq_place *place)
{
	CUcontext own = NULL, current = NULL;
	/* 0 is the default stream, 1 and 2 name the legacy one and the thread's own. */
	if ((uintptr_t)stream <= 2 || !aq_active() || REAL(cuStreamGetCtx)(stream, &own) != CUDA_SUCCESS ||
	    own == NULL || REAL(cuCtxGetCurrent)(&current) != CUDA_SUCCESS || own == current)
		return aq_place_here(place);
	const struct aq_context *context = aq_context_look(own);
	if (context)
		return aq_place_device(context->ordinal, place);
	if (REAL(cuCtxPushCurrent_v2)(own) != CUDA_SUCCESS)
		return AQ_PASS;
	enum aq_verdict verdict = aq_place_here(place);
	REAL(cuCtxPopCurrent_v2)(&current);
	return verdict;
}
