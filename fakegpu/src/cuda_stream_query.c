/* SPDX-License-Identifier: Apache-2.0
 *
 * What a stream is asked about, and attributes that are only remembered.
 */
#include <string.h>

#include "cuda_parts.h"
#include "cuda_time.h"

#define ATTRIBUTES (sizeof((struct CUstream_st *)0)->attribute / sizeof(CUstreamAttrValue))

/* A question with one answer: CU_STREAM and one line. */
#define ASK(name, twin, type, answer)                                                                 \
	static CUresult ask_##name(const char *function, int per_thread, CUstream hStream, type *out) \
	{                                                                                             \
		CU_ENTER_AS(function, "stream=%p out=%p", (void *)hStream, (void *)out);              \
		CU_STREAM(stream, context, hStream, per_thread);                                      \
		CU_NEEDS(out != NULL && context != NULL);                                             \
		*out = (answer);                                                                      \
		return CUDA_SUCCESS;                                                                  \
	}                                                                                             \
	CU_TWINS(name, twin, ask_##name, (CUstream hStream, type * out), hStream, out)

ASK(cuStreamGetFlags, cuStreamGetFlags_ptsz, unsigned int, stream->flags)
ASK(cuStreamGetPriority, cuStreamGetPriority_ptsz, int, stream->priority)
ASK(cuStreamGetId, cuStreamGetId_ptsz, unsigned long long, stream->id)
ASK(cuStreamGetCtx, cuStreamGetCtx_ptsz, CUcontext, stream->context)
ASK(cuStreamGetDevice, cuStreamGetDevice_ptsz, CUdevice, stream->context->device->ordinal)

static CUresult get_contexts(const char *name, int per_thread, CUstream hStream, CUcontext *context_out,
			     CUgreenCtx *green)
{
	CU_ENTER_AS(name, "stream=%p ctx=%p green=%p", (void *)hStream, (void *)context_out, (void *)green);
	CU_STREAM(stream, context, hStream, per_thread);
	CU_NEEDS(context_out != NULL && green != NULL && stream != NULL);
	*green = context->green;
	*context_out = context->green != NULL ? NULL : context;
	return CUDA_SUCCESS;
}
CU_TWINS(cuStreamGetCtx_v2, cuStreamGetCtx_v2_ptsz, get_contexts,
	 (CUstream hStream, CUcontext *pCtx, CUgreenCtx *pGreenCtx), hStream, pCtx, pGreenCtx)

CUresult CUDAAPI cuStreamGetGreenCtx(CUstream hStream, CUgreenCtx *phCtx)
{
	CU_ENTER("stream=%p green=%p", (void *)hStream, (void *)phCtx);
	CU_STREAM(stream, context, hStream, 0);
	CU_NEEDS(phCtx != NULL && stream != NULL);
	*phCtx = context->green;
	return CUDA_SUCCESS;
}

static CUresult get_attribute(const char *name, int per_thread, CUstream hStream, CUstreamAttrID attr,
			      CUstreamAttrValue *value)
{
	CU_ENTER_AS(name, "stream=%p attr=%d value=%p", (void *)hStream, (int)attr, (void *)value);
	CU_STREAM(stream, context, hStream, per_thread);
	CU_NEEDS(value != NULL && (unsigned)attr < ATTRIBUTES && context != NULL);
	*value = stream->attribute[attr];
	if (attr == CU_LAUNCH_ATTRIBUTE_PRIORITY)
		value->priority = stream->priority;
	return CUDA_SUCCESS;
}
CU_TWINS(cuStreamGetAttribute, cuStreamGetAttribute_ptsz, get_attribute,
	 (CUstream hStream, CUstreamAttrID attr, CUstreamAttrValue *value_out), hStream, attr, value_out)

static CUresult set_attribute(const char *name, int per_thread, CUstream hStream, CUstreamAttrID attr,
			      const CUstreamAttrValue *value)
{
	CU_ENTER_AS(name, "stream=%p attr=%d value=%p", (void *)hStream, (int)attr, (const void *)value);
	CU_STREAM(stream, context, hStream, per_thread);
	CU_NEEDS(value != NULL && (unsigned)attr < ATTRIBUTES && context != NULL);
	stream->attribute[attr] = *value;
	if (attr == CU_LAUNCH_ATTRIBUTE_PRIORITY)
		stream->priority = value->priority;
	return CUDA_SUCCESS;
}
CU_TWINS(cuStreamSetAttribute, cuStreamSetAttribute_ptsz, set_attribute,
	 (CUstream hStream, CUstreamAttrID attr, const CUstreamAttrValue *value), hStream, attr, value)

static CUresult copy_attributes(const char *name, int per_thread, CUstream dst, CUstream src)
{
	CU_ENTER_AS(name, "dst=%p src=%p", (void *)dst, (void *)src);
	CU_STREAM(to, to_context, dst, per_thread);
	CU_STREAM(from, from_context, src, per_thread);
	if (to_context == NULL || from_context == NULL)
		return CUDA_ERROR_INVALID_CONTEXT;
	memmove(to->attribute, from->attribute, sizeof to->attribute);
	return CUDA_SUCCESS;
}
CU_TWINS(cuStreamCopyAttributes, cuStreamCopyAttributes_ptsz, copy_attributes, (CUstream dst, CUstream src),
	 dst, src)

static CUresult attach(const char *name, int per_thread, CUstream hStream, CUdeviceptr dptr, size_t length,
		       unsigned int flags)
{
	CU_ENTER_AS(name, "stream=%p dptr=%#llx length=%zu flags=%u", (void *)hStream, dptr, length, flags);
	CU_STREAM(stream, context, hStream, per_thread);
	CU_NEEDS(dptr != 0 && flags != 0 && (flags & ~7u) == 0 && stream != NULL && context != NULL);
	return CUDA_SUCCESS;
}
CU_TWINS(cuStreamAttachMemAsync, cuStreamAttachMemAsync_ptsz, attach,
	 (CUstream hStream, CUdeviceptr dptr, size_t length, unsigned int flags), hStream, dptr, length,
	 flags)
