/* SPDX-License-Identifier: Apache-2.0
 *
 * Primary contexts: one per device and process, counted by the driver. They cost what any context costs, from
 * the first retain until the driver says that none is active. Green contexts are parts of them.
 */
#include "context.h"
#include "context_end.h"

#include "place.h"
#include "resolve.h"

/* How often this process has retained the primary context of a device and not released it again; not 0: it is
 * counted on its card. A green context retains it too. */
static uint32_t *retains(CUdevice ordinal)
{
	return &aq_process()->primary_retains[ordinal];
}

static bool known_ordinal(CUdevice ordinal)
{
	return ordinal >= 0 && ordinal < (int)AQ_MAX_ORDINALS;
}

/* Before the driver retains it: charges the first time. */
static CUresult begin(CUdevice device, int *card)
{
	*card = AQ_NO_CARD;
	if (!known_ordinal(device) || __atomic_load_n(retains(device), __ATOMIC_ACQUIRE))
		return CUDA_SUCCESS;
	return aq_context_begin(device, card);
}

static void end(CUresult result, CUdevice device, int card, const CUcontext *context)
{
	bool first = false;
	if (result == CUDA_SUCCESS && known_ordinal(device))
		first = __atomic_fetch_add(retains(device), 1, __ATOMIC_ACQ_REL) == 0;
	/* Several threads may have come here at once; one count is right, the others go back. */
	if (card != AQ_NO_CARD && !first)
		aq_context_count_out((unsigned)card);
	if (first && context && *context && aq_active())
		aq_context_enter(*context, device, false);
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
	uint32_t held; /* retains before it, as we have counted; 0: none of our business */
	bool last; /* the primary context may end by it */
};

static void conclude(struct conclusion *call, CUdevice device, bool whatever_is_held)
{
	call->device = device;
	call->held =
	    known_ordinal(device) && aq_active() ? __atomic_load_n(retains(device), __ATOMIC_ACQUIRE) : 0;
	call->last = call->held == 1 || (call->held > 1 && whatever_is_held);
	if (call->last)
		prepare(&call->ending, device);
}

static CUresult concluded(struct conclusion *call, CUresult result)
{
	if (!call->last) {
		if (result == CUDA_SUCCESS && call->held > 1)
			__atomic_fetch_sub(retains(call->device), 1, __ATOMIC_ACQ_REL);
		return result;
	}
	bool ended = result == CUDA_SUCCESS && !still_active(call->device);
	aq_ending_over(&call->ending, ended);
	/* One that goes on is held by somebody whom we did not see; ours is the last count all the same. */
	if (!ended || __atomic_exchange_n(retains(call->device), 0, __ATOMIC_ACQ_REL) == 0)
		return result;
	int card = aq_card_of_ordinal(call->device);
	if (card != AQ_NO_CARD)
		aq_context_count_out((unsigned)card);
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
