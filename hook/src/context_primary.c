/* SPDX-License-Identifier: Apache-2.0
 *
 * Primary contexts: one per device and process, counted by the driver. They cost what any context costs. Each
 * retain counts as a context of its card from before the driver is asked until after its release, so that any
 * number of threads may retain and release at once. Green contexts are parts of them.
 */
#include "context.h"
#include "context_end.h"

#include "place.h"
#include "resolve.h"

/* How often this process has retained the primary context of a device and not released it again; each is
 * counted on its card. A green context retains it too. */
static uint32_t *retains(CUdevice ordinal)
{
	return &aq_process()->primary_retains[ordinal];
}

static bool known_ordinal(CUdevice ordinal)
{
	return ordinal >= 0 && ordinal < (int)AQ_MAX_ORDINALS;
}

/* Before the driver retains it. */
static CUresult begin(CUdevice device, int *card)
{
	*card = AQ_NO_CARD;
	return known_ordinal(device) ? aq_context_begin(device, card) : CUDA_SUCCESS;
}

static void end(CUresult result, CUdevice device, int card, const CUcontext *context)
{
	if (card == AQ_NO_CARD)
		return;
	if (result != CUDA_SUCCESS) {
		aq_context_count_out((unsigned)card);
		return;
	}
	__atomic_fetch_add(retains(device), 1, __ATOMIC_ACQ_REL);
	if (context && *context && aq_active())
		aq_context_enter(*context, device, false);
}

/* Takes back `most` retains at most. Returns how many are left. */
static uint32_t count_back(CUdevice device, uint32_t most)
{
	uint32_t held = __atomic_load_n(retains(device), __ATOMIC_ACQUIRE), taken;
	do {
		taken = held < most ? held : most;
	} while (taken && !__atomic_compare_exchange_n(retains(device), &held, held - taken, false,
						       __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
	int card = taken ? aq_card_of_ordinal(device) : AQ_NO_CARD;
	for (uint32_t i = 0; i < taken && card != AQ_NO_CARD; i++)
		aq_context_count_out((unsigned)card);
	return held - taken;
}

HOOK(CUresult, cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device))
{
	int card;
	CUresult result = begin(device, &card);
	if (result != CUDA_SUCCESS)
		return result;
	result = REAL(cuDevicePrimaryCtxRetain)(context, device);
	end(result, device, card, context);
	return result;
}

/* Contexts on the device that nobody created one by one are the primary one and its green parts. */
static void prepare(struct aq_ending *ending, CUdevice device)
{
	struct aq_process *process = aq_process();
	*ending = (struct aq_ending){NULL, 0, {NULL}, {NULL}};
	for (unsigned i = 0; i < AQ_MAX_CONTEXTS; i++) {
		struct aq_context *context = &process->context[i];
		if (__atomic_load_n(&context->handle, __ATOMIC_ACQUIRE) && !context->counted &&
		    context->ordinal == device)
			aq_ending_add(ending, context);
	}
}

static bool still_active(CUdevice device)
{
	unsigned flags;
	int active = 1;
	return REAL(cuDevicePrimaryCtxGetState)(device, &flags, &active) != CUDA_SUCCESS || active;
}

/* A release or reset that is under way. */
struct conclusion {
	struct aq_ending ending;
	CUdevice device;
	bool ours; /* we have seen it retained */
	bool last; /* the primary context may end by it */
	bool whatever_is_held;
};

static void conclude(struct conclusion *call, CUdevice device, bool whatever_is_held)
{
	uint32_t held =
	    known_ordinal(device) && aq_active() ? __atomic_load_n(retains(device), __ATOMIC_ACQUIRE) : 0;
	call->device = device;
	call->whatever_is_held = whatever_is_held;
	call->ours = held > 0;
	call->last = held == 1 || (held > 1 && whatever_is_held);
	if (call->last)
		prepare(&call->ending, device);
}

static CUresult concluded(struct conclusion *call, CUresult result)
{
	if (!call->ours)
		return result;
	/* One that goes on is held by somebody whom we did not see, or has been retained again. */
	bool ended = result == CUDA_SUCCESS && !still_active(call->device);
	if (call->last)
		aq_ending_over(&call->ending, ended);
	uint32_t left = 1;
	if (result == CUDA_SUCCESS && (ended || !call->whatever_is_held))
		left = count_back(call->device, call->whatever_is_held ? UINT32_MAX : 1);
	if (left == 0 && ended && !call->last) {
		/* Several threads have released at once, and none of them knew that it was the last. */
		prepare(&call->ending, call->device);
		aq_ending_over(&call->ending, true);
	}
	return result;
}

HOOK(CUresult, cuDevicePrimaryCtxRelease, (CUdevice device))
{
	struct conclusion call;
	conclude(&call, device, false);
	return concluded(&call, REAL(cuDevicePrimaryCtxRelease)(device));
}

HOOK(CUresult, cuDevicePrimaryCtxRelease_v2, (CUdevice device))
{
	struct conclusion call;
	conclude(&call, device, false);
	return concluded(&call, REAL(cuDevicePrimaryCtxRelease_v2)(device));
}

HOOK(CUresult, cuDevicePrimaryCtxReset, (CUdevice device))
{
	struct conclusion call;
	conclude(&call, device, true);
	return concluded(&call, REAL(cuDevicePrimaryCtxReset)(device));
}

HOOK(CUresult, cuDevicePrimaryCtxReset_v2, (CUdevice device))
{
	struct conclusion call;
	conclude(&call, device, true);
	return concluded(&call, REAL(cuDevicePrimaryCtxReset_v2)(device));
}

/* A green context keeps the primary context of its device alive. */
HOOK(CUresult, cuGreenCtxCreate, (CUgreenCtx * context, void *description, CUdevice device, unsigned flags))
{
	int card;
	CUresult result = begin(device, &card);
	if (result != CUDA_SUCCESS)
		return result;
	result = REAL(cuGreenCtxCreate)(context, description, device, flags);
	end(result, device, card, NULL);
	if (result == CUDA_SUCCESS && context && aq_active())
		aq_table_put(&aq_process()->green, (uintptr_t)*context, (uint64_t)device);
	return result;
}

HOOK(CUresult, cuGreenCtxDestroy, (CUgreenCtx context))
{
	struct aq_process *process = aq_process();
	struct conclusion call;
	uint64_t device = AQ_MAX_ORDINALS;
	bool ours = aq_table_take(&process->green, (uintptr_t)context, &device);
	conclude(&call, (CUdevice)device, false);
	CUresult result = REAL(cuGreenCtxDestroy)(context);
	if (ours && result != CUDA_SUCCESS)
		aq_table_put(&process->green, (uintptr_t)context, device);
	return concluded(&call, result);
}
