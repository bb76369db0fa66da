/* SPDX-License-Identifier: Apache-2.0
 *
 * What a context is asked about: device, flags, limits, configuration, events of all its streams.
 */
#include "cuda_parts.h"
#include "cuda_time.h"

CUresult CUDAAPI cuCtxGetDevice(CUdevice *device)
{
	CU_ENTER("device=%p", (void *)device);
	const struct CUctx_st *context = cu_thread()->current;

	if (__builtin_expect(context == NULL, 0))
		return CUDA_ERROR_INVALID_CONTEXT;
	CU_NEEDS(device != NULL);
	*device = context->device->ordinal;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetDevice_v2(CUdevice *device, CUcontext ctx)
{
	CU_ENTER("device=%p ctx=%p", (void *)device, (void *)ctx);
	const struct CUctx_st *context = ctx != NULL ? ctx : cu_thread()->current;

	if (!cu_is(context, CU_KIND_CONTEXT))
		return CUDA_ERROR_INVALID_CONTEXT;
	CU_NEEDS(device != NULL);
	*device = context->device->ordinal;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetApiVersion(CUcontext ctx, unsigned int *version)
{
	CU_ENTER("ctx=%p version=%p", (void *)ctx, (void *)version);
	const struct CUctx_st *context = ctx != NULL ? ctx : cu_thread()->current;

	if (!cu_is(context, CU_KIND_CONTEXT))
		return CUDA_ERROR_INVALID_CONTEXT;
	CU_NEEDS(version != NULL);
	*version = context->api_version;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetId(CUcontext ctx, unsigned long long *ctxId)
{
	CU_ENTER("ctx=%p ctxId=%p", (void *)ctx, (void *)ctxId);
	const struct CUctx_st *context = ctx != NULL ? ctx : cu_thread()->current;

	if (!cu_is(context, CU_KIND_CONTEXT))
		return CUDA_ERROR_CONTEXT_IS_DESTROYED;
	CU_NEEDS(ctxId != NULL);
	*ctxId = context->id;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetFlags(unsigned int *flags)
{
	CU_ENTER("flags=%p", (void *)flags);
	CU_CONTEXT(context);
	CU_NEEDS(flags != NULL);
	*flags = context->flags;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSetFlags(unsigned int flags)
{
	CU_ENTER("flags=%u", flags);
	CU_CONTEXT(context);
	CU_NEEDS((flags & ~(unsigned int)CU_CTX_FLAGS_MASK) == 0);
	context->flags = flags;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetLimit(size_t *pvalue, CUlimit limit)
{
	CU_ENTER("pvalue=%p limit=%d", (void *)pvalue, (int)limit);
	CU_CONTEXT(context);
	CU_NEEDS(pvalue != NULL);
	if ((unsigned)limit >= CU_LIMIT_MAX || (unsigned)limit >= CU_LIMITS)
		return CUDA_ERROR_UNSUPPORTED_LIMIT;
	*pvalue = context->limit[limit];
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSetLimit(CUlimit limit, size_t value)
{
	CU_ENTER("limit=%d value=%zu", (int)limit, value);
	CU_CONTEXT(context);
	if ((unsigned)limit >= CU_LIMIT_MAX || (unsigned)limit >= CU_LIMITS)
		return CUDA_ERROR_UNSUPPORTED_LIMIT;
	context->limit[limit] = value;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetCacheConfig(CUfunc_cache *pconfig)
{
	CU_ENTER("pconfig=%p", (void *)pconfig);
	CU_CONTEXT(context);
	CU_NEEDS(pconfig != NULL);
	*pconfig = context->cache_config;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSetCacheConfig(CUfunc_cache config)
{
	CU_ENTER("config=%d", (int)config);
	CU_CONTEXT(context);
	context->cache_config = config;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetSharedMemConfig(CUsharedconfig *pConfig)
{
	CU_ENTER("pConfig=%p", (void *)pConfig);
	CU_CONTEXT(context);
	CU_NEEDS(pConfig != NULL);
	*pConfig = context->shared_config;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSetSharedMemConfig(CUsharedconfig config)
{
	CU_ENTER("config=%d", (int)config);
	CU_CONTEXT(context);
	context->shared_config = config;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetStreamPriorityRange(int *leastPriority, int *greatestPriority)
{
	CU_ENTER("least=%p greatest=%p", (void *)leastPriority, (void *)greatestPriority);
	CU_CONTEXT(context);
	if (context != NULL && leastPriority != NULL)
		*leastPriority = 0;
	if (greatestPriority != NULL)
		*greatestPriority = -5;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxResetPersistingL2Cache(void)
{
	CU_ENTER("%s", "");
	CU_CONTEXT(context);
	return context != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult CUDAAPI cuCtxGetExecAffinity(CUexecAffinityParam *pExecAffinity, CUexecAffinityType type)
{
	CU_ENTER("p=%p type=%d", (void *)pExecAffinity, (int)type);
	CU_CONTEXT(context);
	CU_NEEDS(pExecAffinity != NULL && context != NULL);
	return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
}

CUresult CUDAAPI cuCtxRecordEvent(CUcontext hCtx, CUevent hEvent)
{
	CU_ENTER("ctx=%p event=%p", (void *)hCtx, (void *)hEvent);
	struct CUctx_st *context = hCtx != NULL ? hCtx : cu_thread()->current;

	if (!cu_is(context, CU_KIND_CONTEXT))
		return CUDA_ERROR_INVALID_CONTEXT;
	if (!cu_is(hEvent, CU_KIND_EVENT) || hEvent->context != context)
		return CUDA_ERROR_INVALID_HANDLE;
	cu_event_mark(hEvent, context->legacy);
	hEvent->number = context->last_number;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxWaitEvent(CUcontext hCtx, CUevent hEvent)
{
	CU_ENTER("ctx=%p event=%p", (void *)hCtx, (void *)hEvent);
	struct CUctx_st *context = hCtx != NULL ? hCtx : cu_thread()->current;

	if (!cu_is(context, CU_KIND_CONTEXT))
		return CUDA_ERROR_INVALID_CONTEXT;
	if (!cu_is(hEvent, CU_KIND_EVENT))
		return CUDA_ERROR_INVALID_HANDLE;
	cu_lock();
	for (struct CUstream_st *stream = context->streams; stream != NULL; stream = stream->next)
		cu_event_hold(hEvent, stream);
	cu_unlock();
	return CUDA_SUCCESS;
}
