/* SPDX-License-Identifier: Apache-2.0
 *
 * Contexts: making them in all forms, ending them, and the stack of each thread.
 *
 * A context that ended keeps its place in the arena for good, with an error that never goes away, so threads
 * that still have it current are told CUDA_ERROR_CONTEXT_IS_DESTROYED and nothing worse.
 */
#include <string.h>

#include "cuda_memory.h"
#include "cuda_mempool.h"
#include "cuda_module.h"
#include "cuda_parts.h"
#include "cuda_time.h"
#include "engine.h"

#define VERSION_1 3010u /* what cuCtxGetApiVersion tells of cuCtxCreate … */
#define VERSION_2 3020u /* … and of its later forms */

static int others_have_contexts(uint32_t card)
{
	int self = fg_process_self();

	for (uint32_t i = 0; i < fg_state->seat_high; i++) {
		const struct fg_seat *seat = fg_seat_at(i);

		if (seat->in_use && seat->card == card && seat->contexts > 0 && (int)seat->process != self)
			return 1;
	}
	return 0;
}

static CUresult check_card(const struct cu_device *device)
{
	const struct fg_card *card = device->shared;

	fg_control_follow(fg_coarse_ns());
	fg_reap_hinted();
	if (card->lost || card->compute_mode == CU_COMPUTEMODE_PROHIBITED)
		return CUDA_ERROR_DEVICE_UNAVAILABLE;
	if (card->compute_mode == CU_COMPUTEMODE_EXCLUSIVE_PROCESS && others_have_contexts(device->card))
		return CUDA_ERROR_DEVICE_UNAVAILABLE;
	if (device->ci < FG_MAX_INSTANCES ? !card->compute_instance[device->ci].in_use : card->mig_enabled)
		return CUDA_ERROR_DEVICE_UNAVAILABLE; /* the instance is gone, or the card was cut up since
							 cuInit */
	return CUDA_SUCCESS;
}

static void set_limits(struct CUctx_st *context)
{
	context->limit[CU_LIMIT_STACK_SIZE] = 1024;
	context->limit[CU_LIMIT_PRINTF_FIFO_SIZE] = 7u << 20;
	context->limit[CU_LIMIT_MALLOC_HEAP_SIZE] = 8u << 20;
	context->limit[CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH] = 2;
	context->limit[CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT] = 2048;
	context->limit[CU_LIMIT_MAX_L2_FETCH_GRANULARITY] = 64;
}

CUresult cu_context_make(struct cu_device *device, unsigned int flags, unsigned int api_version,
			 struct CUctx_st **made)
{
	CUresult result = check_card(device);
	struct CUctx_st *context;
	int seat;

	if (result != CUDA_SUCCESS)
		return result;
	cu_lock();
	seat = cu_seat(device);
	if (seat < 0 || fg_account_context_open((uint32_t)seat) != 0) {
		cu_unlock();
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	context = cu_object_make(CU_KIND_CONTEXT, sizeof *context);
	if (context == NULL) {
		fg_account_context_close((uint32_t)seat);
		cu_unlock();
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	context->device = device;
	context->seat = seat;
	context->epoch = device->shared->poison_epoch;
	context->flags = flags;
	context->api_version = api_version;
	context->id = cu_next_id();
	context->attached = 1;
	context->cache_config = CU_FUNC_CACHE_PREFER_NONE;
	context->shared_config = CU_SHARED_MEM_CONFIG_DEFAULT_BANK_SIZE;
	set_limits(context);
	context->next = cu_contexts;
	cu_contexts = context;
	cu_unlock();
	if (fg_state->driver.context_create_ns > 0)
		fg_sleep_until(fg_now_ns() + fg_state->driver.context_create_ns, 0);
	result = cu_stream_make(context, CU_STREAM_DEFAULT, 0, &context->legacy);
	if (result != CUDA_SUCCESS) {
		cu_context_end(context);
		return result;
	}
	context->legacy->is_legacy = 1;
	*made = context;
	return CUDA_SUCCESS;
}

void cu_context_end(struct CUctx_st *context)
{
	cu_context_drain(context);
	cu_lock();
	while (context->modules != NULL)
		cu_module_end(context->modules);
	while (context->allocs != NULL)
		cu_memory_end(context->allocs);
	while (context->streams != NULL)
		cu_stream_end(context->streams);
	for (struct CUctx_st **link = &cu_contexts; *link != NULL; link = &(*link)->next)
		if (*link == context) {
			*link = context->next;
			break;
		}
	context->sticky = CUDA_ERROR_CONTEXT_IS_DESTROYED;
	context->object.kind = CU_KIND_FREE;
	fg_account_context_close((uint32_t)context->seat);
	if (fg_seat_at((uint32_t)context->seat)->contexts == 0)
		cu_pools_end(context->device);
	cu_unlock();
}

/* ---- the stack of a thread ---------------------------------------------------------------------------- */

static CUresult push(struct CUctx_st *context)
{
	struct cu_thread *thread = cu_thread();

	if (thread->depth == CU_STACK_DEPTH)
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (thread->current != NULL || thread->depth > 0)
		thread->stack[thread->depth++] = thread->current;
	thread->current = context;
	return CUDA_SUCCESS;
}

static struct CUctx_st *pop(void)
{
	struct cu_thread *thread = cu_thread();
	struct CUctx_st *top = thread->current;

	thread->current = thread->depth > 0 ? thread->stack[--thread->depth] : NULL;
	return top;
}

static CUresult pop_current(CUcontext *pctx)
{
	struct CUctx_st *context = cu_thread()->current;

	if (context == NULL)
		return CUDA_ERROR_INVALID_CONTEXT;
	pop();
	if (pctx != NULL)
		*pctx = context;
	return CUDA_SUCCESS;
}

static CUresult push_current(CUcontext ctx)
{
	if (!cu_is(ctx, CU_KIND_CONTEXT))
		return CUDA_ERROR_INVALID_CONTEXT;
	return push(ctx);
}

CUresult CUDAAPI cuCtxPushCurrent_v2(CUcontext ctx)
{
	CU_ENTER("ctx=%p", (void *)ctx);
	return push_current(ctx);
}

CUresult CUDAAPI cuCtxPushCurrent(CUcontext ctx)
{
	CU_ENTER("ctx=%p", (void *)ctx);
	return push_current(ctx);
}

CUresult CUDAAPI cuCtxPopCurrent_v2(CUcontext *pctx)
{
	CU_ENTER("pctx=%p", (void *)pctx);
	return pop_current(pctx);
}

CUresult CUDAAPI cuCtxPopCurrent(CUcontext *pctx)
{
	CU_ENTER("pctx=%p", (void *)pctx);
	return pop_current(pctx);
}

CUresult CUDAAPI cuCtxSetCurrent(CUcontext ctx)
{
	CU_ENTER("ctx=%p", (void *)ctx);
	if (ctx == NULL) {
		pop();
		return CUDA_SUCCESS;
	}
	if (!cu_is(ctx, CU_KIND_CONTEXT))
		return CUDA_ERROR_INVALID_CONTEXT;
	cu_thread()->current = ctx;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext *pctx)
{
	CU_ENTER("pctx=%p", (void *)pctx);
	CU_NEEDS(pctx != NULL);
	*pctx = cu_thread()->current;
	return CUDA_SUCCESS;
}

/* ---- making and ending -------------------------------------------------------------------------------- */

static CUresult create(CUcontext *pctx, unsigned int flags, CUdevice dev, unsigned int api_version)
{
	struct cu_device *device = cu_device_at(dev);
	struct CUctx_st *context;
	CUresult result;

	CU_NEEDS(pctx != NULL && (flags & ~(unsigned int)CU_CTX_FLAGS_MASK) == 0);
	if (device == NULL)
		return CUDA_ERROR_INVALID_DEVICE;
	result = cu_context_make(device, flags, api_version, &context);
	if (result != CUDA_SUCCESS)
		return result;
	*pctx = context;
	return push(context);
}

CUresult CUDAAPI cuCtxCreate(CUcontext *pctx, unsigned int flags, CUdevice dev)
{
	CU_ENTER("pctx=%p flags=%u dev=%d", (void *)pctx, flags, dev);
	return create(pctx, flags, dev, VERSION_1);
}

CUresult CUDAAPI cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev)
{
	CU_ENTER("pctx=%p flags=%u dev=%d", (void *)pctx, flags, dev);
	return create(pctx, flags, dev, VERSION_2);
}

CUresult CUDAAPI cuCtxCreate_v3(CUcontext *pctx, CUexecAffinityParam *paramsArray, int numParams,
				unsigned int flags, CUdevice dev)
{
	CU_ENTER("pctx=%p numParams=%d flags=%u dev=%d", (void *)pctx, numParams, flags, dev);
	if (numParams != 0)
		return paramsArray == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
	return create(pctx, flags, dev, VERSION_2);
}

CUresult CUDAAPI cuCtxCreate_v4(CUcontext *pctx, CUctxCreateParams *ctxCreateParams, unsigned int flags,
				CUdevice dev)
{
	CU_ENTER("pctx=%p params=%p flags=%u dev=%d", (void *)pctx, (void *)ctxCreateParams, flags, dev);
	if (ctxCreateParams != NULL && ctxCreateParams->cigParams != NULL)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (ctxCreateParams != NULL && ctxCreateParams->numExecAffinityParams != 0)
		return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
	return create(pctx, flags, dev, VERSION_2);
}

static CUresult destroy(CUcontext ctx)
{
	struct cu_thread *thread = cu_thread();

	if (!cu_is(ctx, CU_KIND_CONTEXT) || ctx->primary)
		return CUDA_ERROR_INVALID_CONTEXT;
	cu_context_end(ctx);
	if (thread->current == ctx)
		pop();
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxDestroy_v2(CUcontext ctx)
{
	CU_ENTER("ctx=%p", (void *)ctx);
	return destroy(ctx);
}

CUresult CUDAAPI cuCtxDestroy(CUcontext ctx)
{
	CU_ENTER("ctx=%p", (void *)ctx);
	return destroy(ctx);
}

CUresult CUDAAPI cuCtxAttach(CUcontext *pctx, unsigned int flags)
{
	CU_ENTER("pctx=%p flags=%u", (void *)pctx, flags);
	CU_CONTEXT(context);
	CU_NEEDS(pctx != NULL && flags == 0);
	context->attached++;
	*pctx = context;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxDetach(CUcontext ctx)
{
	CU_ENTER("ctx=%p", (void *)ctx);
	if (!cu_is(ctx, CU_KIND_CONTEXT) || ctx != cu_thread()->current)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (--ctx->attached > 0)
		return CUDA_SUCCESS;
	return destroy(ctx);
}

/* ---- waiting ------------------------------------------------------------------------------------------ */

static CUresult synchronize(struct CUctx_st *context)
{
	CUresult trouble;

	CU_FORBIDDEN_IN_CAPTURE();
	CU_UNSAFE_IN_CAPTURE(context);
	cu_context_wait(context);
	trouble = cu_context_check(context);
	return trouble;
}

CUresult CUDAAPI cuCtxSynchronize(void)
{
	CU_ENTER("%s", "");
	CU_CONTEXT(context);
	return synchronize(context);
}

CUresult CUDAAPI cuCtxSynchronize_v2(CUcontext ctx)
{
	CU_ENTER("ctx=%p", (void *)ctx);
	struct CUctx_st *context = ctx != NULL ? ctx : cu_thread()->current;

	if (!cu_is(context, CU_KIND_CONTEXT))
		return CUDA_ERROR_INVALID_CONTEXT;
	return synchronize(context);
}
