/* SPDX-License-Identifier: Apache-2.0
 *
 * Small things: the profiler's switches, linking, texture and surface objects. Nothing here does more than
 * remember.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda_array.h"
#include "cuda_parts.h"

FAKE_EXPORT CUresult CUDAAPI cuProfilerStart(void);
FAKE_EXPORT CUresult CUDAAPI cuProfilerStop(void);

CUresult CUDAAPI cuProfilerStart(void)
{
	CU_ENTER("%s", "");
	CU_CONTEXT(context);
	return context != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult CUDAAPI cuProfilerStop(void)
{
	CU_ENTER("%s", "");
	CU_CONTEXT(context);
	return context != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

/* ---- linking: the result is an image as good as any other ---------------------------------------------- */

struct CUlinkState_st {
	struct cu_object object;
	uint32_t inputs;
	char image[64];
};

static CUresult link_create(unsigned int options_count, const CUjit_option *options, void *const *values,
			    CUlinkState *made)
{
	CU_CONTEXT(context);
	struct CUlinkState_st *state;

	CU_NEEDS(made != NULL && (options_count == 0 || (options != NULL && values != NULL)) &&
		 context != NULL);
	cu_lock();
	state = cu_object_make(CU_KIND_LINK, sizeof *state);
	cu_unlock();
	if (state == NULL)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*made = state;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLinkCreate_v2(unsigned int numOptions, CUjit_option *options, void **optionValues,
				 CUlinkState *stateOut)
{
	CU_ENTER("options=%u state=%p", numOptions, (void *)stateOut);
	return link_create(numOptions, options, optionValues, stateOut);
}

CUresult CUDAAPI cuLinkCreate(unsigned int numOptions, CUjit_option *options, void **optionValues,
			      CUlinkState *stateOut)
{
	CU_ENTER("options=%u state=%p", numOptions, (void *)stateOut);
	return link_create(numOptions, options, optionValues, stateOut);
}

static CUresult link_data(CUlinkState state, const void *data, size_t size)
{
	if (!cu_is(state, CU_KIND_LINK))
		return CUDA_ERROR_INVALID_HANDLE;
	CU_NEEDS(data != NULL && size > 0);
	state->inputs++;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLinkAddData_v2(CUlinkState state, CUjitInputType type, void *data, size_t size,
				  const char *name, unsigned int numOptions, CUjit_option *options,
				  void **optionValues)
{
	CU_ENTER("state=%p type=%d size=%zu name=%s options=%u/%p/%p", (void *)state, (int)type, size,
		 name != NULL ? name : "", numOptions, (void *)options, (void *)optionValues);
	return link_data(state, data, size);
}

CUresult CUDAAPI cuLinkAddData(CUlinkState state, CUjitInputType type, void *data, size_t size,
			       const char *name, unsigned int numOptions, CUjit_option *options,
			       void **optionValues)
{
	CU_ENTER("state=%p type=%d size=%zu name=%s options=%u/%p/%p", (void *)state, (int)type, size,
		 name != NULL ? name : "", numOptions, (void *)options, (void *)optionValues);
	return link_data(state, data, size);
}

static CUresult link_file(CUlinkState state, const char *path)
{
	if (!cu_is(state, CU_KIND_LINK))
		return CUDA_ERROR_INVALID_HANDLE;
	CU_NEEDS(path != NULL);
	if (access(path, R_OK) != 0)
		return CUDA_ERROR_FILE_NOT_FOUND;
	state->inputs++;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLinkAddFile_v2(CUlinkState state, CUjitInputType type, const char *path,
				  unsigned int numOptions, CUjit_option *options, void **optionValues)
{
	CU_ENTER("state=%p type=%d path=%s options=%u/%p/%p", (void *)state, (int)type,
		 path != NULL ? path : "(null)", numOptions, (void *)options, (void *)optionValues);
	return link_file(state, path);
}

CUresult CUDAAPI cuLinkAddFile(CUlinkState state, CUjitInputType type, const char *path,
			       unsigned int numOptions, CUjit_option *options, void **optionValues)
{
	CU_ENTER("state=%p type=%d path=%s options=%u/%p/%p", (void *)state, (int)type,
		 path != NULL ? path : "(null)", numOptions, (void *)options, (void *)optionValues);
	return link_file(state, path);
}

CUresult CUDAAPI cuLinkComplete(CUlinkState state, void **cubinOut, size_t *sizeOut)
{
	CU_ENTER("state=%p cubin=%p size=%p", (void *)state, (void *)cubinOut, (void *)sizeOut);
	if (!cu_is(state, CU_KIND_LINK))
		return CUDA_ERROR_INVALID_HANDLE;
	CU_NEEDS(cubinOut != NULL && state->inputs > 0);
	*cubinOut = state->image;
	if (sizeOut != NULL)
		*sizeOut = sizeof state->image;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLinkDestroy(CUlinkState state)
{
	CU_ENTER("state=%p", (void *)state);
	if (!cu_is(state, CU_KIND_LINK))
		return CUDA_ERROR_INVALID_HANDLE;
	cu_lock();
	cu_object_end(state);
	cu_unlock();
	return CUDA_SUCCESS;
}

/* ---- textures and surfaces ---------------------------------------------------------------------------- */

struct texture {
	struct cu_object object;
	CUDA_RESOURCE_DESC resource;
	CUDA_TEXTURE_DESC texture;
	CUDA_RESOURCE_VIEW_DESC view;
	int has_view;
};

static CUresult check_resource(const CUDA_RESOURCE_DESC *resource)
{
	CU_NEEDS(resource != NULL && resource->flags == 0);
	if (resource->resType == CU_RESOURCE_TYPE_ARRAY)
		return cu_is(resource->res.array.hArray, CU_KIND_ARRAY) ? CUDA_SUCCESS
									: CUDA_ERROR_INVALID_HANDLE;
	if (resource->resType == CU_RESOURCE_TYPE_MIPMAPPED_ARRAY)
		return cu_is(resource->res.mipmap.hMipmappedArray, CU_KIND_MIPMAP)
			   ? CUDA_SUCCESS
			   : CUDA_ERROR_INVALID_HANDLE;
	CU_NEEDS(resource->resType == CU_RESOURCE_TYPE_LINEAR ||
		 resource->resType == CU_RESOURCE_TYPE_PITCH2D);
	return CUDA_SUCCESS;
}

static CUresult make(enum cu_kind kind, const CUDA_RESOURCE_DESC *resource, struct texture **made)
{
	CU_CONTEXT(context);
	CUresult result = check_resource(resource);

	if (result != CUDA_SUCCESS || context == NULL)
		return result;
	cu_lock();
	*made = cu_object_make(kind, sizeof **made);
	cu_unlock();
	if (*made == NULL)
		return CUDA_ERROR_OUT_OF_MEMORY;
	(*made)->resource = *resource;
	return CUDA_SUCCESS;
}

static CUresult end(enum cu_kind kind, unsigned long long handle)
{
	struct texture *texture = (struct texture *)(uintptr_t)handle;

	CU_NEEDS(cu_is(texture, kind));
	cu_lock();
	cu_object_end(texture);
	cu_unlock();
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuTexObjectCreate(CUtexObject *pTexObject, const CUDA_RESOURCE_DESC *pResDesc,
				   const CUDA_TEXTURE_DESC *pTexDesc,
				   const CUDA_RESOURCE_VIEW_DESC *pResViewDesc)
{
	CU_ENTER("texture=%p", (void *)pTexObject);
	struct texture *texture;
	CUresult result;

	CU_NEEDS(pTexObject != NULL && pTexDesc != NULL);
	result = make(CU_KIND_TEXTURE, pResDesc, &texture);
	if (result != CUDA_SUCCESS)
		return result;
	texture->texture = *pTexDesc;
	texture->has_view = pResViewDesc != NULL;
	if (pResViewDesc != NULL)
		texture->view = *pResViewDesc;
	*pTexObject = (CUtexObject)(uintptr_t)texture;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuTexObjectDestroy(CUtexObject texObject)
{
	CU_ENTER("texture=%#llx", texObject);
	return end(CU_KIND_TEXTURE, texObject);
}

CUresult CUDAAPI cuTexObjectGetResourceDesc(CUDA_RESOURCE_DESC *pResDesc, CUtexObject texObject)
{
	CU_ENTER("desc=%p texture=%#llx", (void *)pResDesc, texObject);
	const struct texture *texture = (const struct texture *)(uintptr_t)texObject;

	CU_NEEDS(pResDesc != NULL && cu_is(texture, CU_KIND_TEXTURE));
	*pResDesc = texture->resource;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuTexObjectGetTextureDesc(CUDA_TEXTURE_DESC *pTexDesc, CUtexObject texObject)
{
	CU_ENTER("desc=%p texture=%#llx", (void *)pTexDesc, texObject);
	const struct texture *texture = (const struct texture *)(uintptr_t)texObject;

	CU_NEEDS(pTexDesc != NULL && cu_is(texture, CU_KIND_TEXTURE));
	*pTexDesc = texture->texture;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuTexObjectGetResourceViewDesc(CUDA_RESOURCE_VIEW_DESC *pResViewDesc, CUtexObject texObject)
{
	CU_ENTER("desc=%p texture=%#llx", (void *)pResViewDesc, texObject);
	const struct texture *texture = (const struct texture *)(uintptr_t)texObject;

	CU_NEEDS(pResViewDesc != NULL && cu_is(texture, CU_KIND_TEXTURE) && texture->has_view);
	*pResViewDesc = texture->view;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuSurfObjectCreate(CUsurfObject *pSurfObject, const CUDA_RESOURCE_DESC *pResDesc)
{
	CU_ENTER("surface=%p", (void *)pSurfObject);
	struct texture *surface;
	CUresult result;

	CU_NEEDS(pSurfObject != NULL && pResDesc != NULL && pResDesc->resType == CU_RESOURCE_TYPE_ARRAY);
	result = make(CU_KIND_SURFACE, pResDesc, &surface);
	if (result == CUDA_SUCCESS)
		*pSurfObject = (CUsurfObject)(uintptr_t)surface;
	return result;
}

CUresult CUDAAPI cuSurfObjectDestroy(CUsurfObject surfObject)
{
	CU_ENTER("surface=%#llx", surfObject);
	return end(CU_KIND_SURFACE, surfObject);
}

CUresult CUDAAPI cuSurfObjectGetResourceDesc(CUDA_RESOURCE_DESC *pResDesc, CUsurfObject surfObject)
{
	CU_ENTER("desc=%p surface=%#llx", (void *)pResDesc, surfObject);
	const struct texture *surface = (const struct texture *)(uintptr_t)surfObject;

	CU_NEEDS(pResDesc != NULL && cu_is(surface, CU_KIND_SURFACE));
	*pResDesc = surface->resource;
	return CUDA_SUCCESS;
}
