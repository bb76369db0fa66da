/* SPDX-License-Identifier: Apache-2.0
 *
 * Primary contexts: one per device and process, counted by the driver. They cost what any context costs, from
 * the first retain until the driver says that none is active. Green contexts are parts of them.
 */
#include "context.h"

#include "place.h"
#include "resolve.h"

/* The one mark that says whether this process's primary context on a device is counted. */
static uint32_t *primary_mark(CUdevice ordinal)
{
	return &aq_process()->primary_active[ordinal];
}

static bool known_ordinal(CUdevice ordinal)
{
	return ordinal >= 0 && ordinal < (int)AQ_MAX_ORDINALS;
}

HOOK(CUresult, cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device))
{
	if (!known_ordinal(device) || __atomic_load_n(primary_mark(device), __ATOMIC_ACQUIRE))
		return REAL(cuDevicePrimaryCtxRetain)(context, device);
	int card;
	CUresult result = aq_context_begin(device, &card);
	if (result != CUDA_SUCCESS)
		return result;
	result = REAL(cuDevicePrimaryCtxRetain)(context, device);
	if (result == CUDA_SUCCESS && card != AQ_NO_CARD) {
		/* Several threads may have come here at once; one count is right, the others go back. */
		if (__atomic_exchange_n(primary_mark(device), 1, __ATOMIC_ACQ_REL))
			aq_context_count_out((unsigned)card);
		else if (context && *context)
			aq_context_enter(*context, device, false);
	} else if (card != AQ_NO_CARD) {
		aq_context_count_out((unsigned)card);
	}
	return result;
}

/* After a release or reset: has the primary context ended? */
static CUresult primary_released(CUresult result, CUdevice device)
{
	unsigned flags;
	int active = 1;
	if (result != CUDA_SUCCESS || !known_ordinal(device) || !aq_active() ||
	    !__atomic_load_n(primary_mark(device), __ATOMIC_ACQUIRE) ||
	    REAL(cuDevicePrimaryCtxGetState)(device, &flags, &active) != CUDA_SUCCESS || active)
		return result;
	if (!__atomic_exchange_n(primary_mark(device), 0, __ATOMIC_ACQ_REL))
		return result;
	/* Contexts on the device that nobody created one by one are the primary one and its green parts. */
	struct aq_process *process = aq_process();
	for (unsigned i = 0; i < AQ_MAX_CONTEXTS; i++) {
		struct aq_context *context = &process->context[i];
		if (context->handle && !context->counted && context->ordinal == device)
			aq_context_gone(context);
	}
	int card = aq_card_of_ordinal(device);
	if (card != AQ_NO_CARD)
		aq_context_count_out((unsigned)card);
	return result;
}

HOOK(CUresult, cuDevicePrimaryCtxRelease, (CUdevice device))
{
	return primary_released(REAL(cuDevicePrimaryCtxRelease)(device), device);
}

HOOK(CUresult, cuDevicePrimaryCtxRelease_v2, (CUdevice device))
{
	return primary_released(REAL(cuDevicePrimaryCtxRelease_v2)(device), device);
}

HOOK(CUresult, cuDevicePrimaryCtxReset, (CUdevice device))
{
	return primary_released(REAL(cuDevicePrimaryCtxReset)(device), device);
}

HOOK(CUresult, cuDevicePrimaryCtxReset_v2, (CUdevice device))
{
	return primary_released(REAL(cuDevicePrimaryCtxReset_v2)(device), device);
}

/* A green context keeps the primary context of its device alive. */
HOOK(CUresult, cuGreenCtxCreate, (CUgreenCtx * context, void *description, CUdevice device, unsigned flags))
{
	if (!known_ordinal(device) || __atomic_load_n(primary_mark(device), __ATOMIC_ACQUIRE))
		return REAL(cuGreenCtxCreate)(context, description, device, flags);
	int card;
	CUresult result = aq_context_begin(device, &card);
	if (result != CUDA_SUCCESS)
		return result;
	result = REAL(cuGreenCtxCreate)(context, description, device, flags);
	if (card != AQ_NO_CARD &&
	    (result != CUDA_SUCCESS || __atomic_exchange_n(primary_mark(device), 1, __ATOMIC_ACQ_REL)))
		aq_context_count_out((unsigned)card);
	return result;
}

HOOK(CUresult, cuGreenCtxDestroy, (CUgreenCtx context))
{
	CUresult result = REAL(cuGreenCtxDestroy)(context);
	for (CUdevice device = 0; result == CUDA_SUCCESS && device < (int)AQ_MAX_ORDINALS; device++)
		primary_released(result, device);
	return result;
}
