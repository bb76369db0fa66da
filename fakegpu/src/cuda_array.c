/* SPDX-License-Identifier: Apache-2.0
 *
 * Arrays and mipmapped arrays. See cuda_array.h.
 */
#include "cuda_array.h"

#include <string.h>

#include "cuda_memory.h"
#include "cuda_parts.h"

uint32_t cu_array_element(CUarray_format format, unsigned int channels)
{
	static const uint8_t packed[] = {1, 2, 4, 2, 4, 8}; /* INT8X1 … INT16X4 */

	if (format >= CU_AD_FORMAT_UNORM_INT8X1 && format <= CU_AD_FORMAT_SNORM_INT16X4)
		return packed[(format - CU_AD_FORMAT_UNORM_INT8X1) % 6];
	if (channels != 1 && channels != 2 && channels != 4)
		return 0;
	switch (format) {
	case CU_AD_FORMAT_UNSIGNED_INT8:
	case CU_AD_FORMAT_SIGNED_INT8:
		return channels;
	case CU_AD_FORMAT_UNSIGNED_INT16:
	case CU_AD_FORMAT_SIGNED_INT16:
	case CU_AD_FORMAT_HALF:
		return 2 * channels;
	case CU_AD_FORMAT_UNSIGNED_INT32:
	case CU_AD_FORMAT_SIGNED_INT32:
	case CU_AD_FORMAT_FLOAT:
		return 4 * channels;
	default:
		return 0;
	}
}

uint64_t cu_array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *descriptor, size_t *pitch)
{
	uint64_t element = cu_array_element(descriptor->Format, descriptor->NumChannels), rows, bytes;
	size_t height = descriptor->Height > 0 ? descriptor->Height : 1;
	size_t depth = descriptor->Depth > 0 ? descriptor->Depth : 1;

	if (element == 0 || descriptor->Width == 0 || descriptor->Width > UINT64_MAX / element / 2)
		return 0;
	*pitch = cu_round(descriptor->Width * element, fg_state->driver.pitch_align);
	if (__builtin_mul_overflow(height, depth, &rows) || __builtin_mul_overflow(rows, *pitch, &bytes) ||
	    bytes > UINT64_MAX / 2)
		return 0;
	return cu_round(bytes, fg_state->driver.plain_round);
}

static struct CUarray_st *make_object(const CUDA_ARRAY3D_DESCRIPTOR *descriptor, struct cu_alloc *alloc,
				      char *bytes, size_t pitch)
{
	struct CUarray_st *array = cu_object_make(CU_KIND_ARRAY, sizeof *array);

	if (array == NULL)
		return NULL;
	array->descriptor = *descriptor;
	array->alloc = alloc;
	array->bytes = bytes;
	array->pitch = pitch;
	array->element = cu_array_element(descriptor->Format, descriptor->NumChannels);
	return array;
}

static CUresult create(CUarray *handle, const CUDA_ARRAY3D_DESCRIPTOR *descriptor)
{
	CU_CONTEXT(context);
	CU_UNSAFE_IN_CAPTURE(context);
	struct cu_alloc *alloc;
	size_t pitch;
	uint64_t bytes;
	CUresult result;

	CU_NEEDS(handle != NULL);
	fg_control_follow(fg_coarse_ns());
	cu_memory_delay();
	bytes = cu_array_bytes(descriptor, &pitch);
	CU_NEEDS(bytes > 0);
	result = cu_memory_make(context->device, context, bytes, bytes, CU_ALLOC_ARRAY, &alloc);
	if (result != CUDA_SUCCESS)
		return result;
	cu_lock();
	*handle = make_object(descriptor, alloc, alloc->data, pitch);
	if (*handle != NULL)
		alloc->owner = *handle;
	else
		cu_memory_end(alloc);
	cu_unlock();
	return *handle != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult CUDAAPI cuArray3DCreate_v2(CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pAllocateArray)
{
	CU_ENTER("pHandle=%p descriptor=%p", (void *)pHandle, (const void *)pAllocateArray);
	CU_NEEDS(pAllocateArray != NULL);
	return create(pHandle, pAllocateArray);
}

CUresult CUDAAPI cuArray3DCreate(CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR_v1 *pAllocateArray)
{
	CU_ENTER("pHandle=%p descriptor=%p", (void *)pHandle, (const void *)pAllocateArray);
	CU_NEEDS(pAllocateArray != NULL);
	const CUDA_ARRAY3D_DESCRIPTOR descriptor = {pAllocateArray->Width,       pAllocateArray->Height,
						    pAllocateArray->Depth,       pAllocateArray->Format,
						    pAllocateArray->NumChannels, pAllocateArray->Flags};

	return create(pHandle, &descriptor);
}

CUresult CUDAAPI cuArrayCreate_v2(CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR *pAllocateArray)
{
	CU_ENTER("pHandle=%p descriptor=%p", (void *)pHandle, (const void *)pAllocateArray);
	CU_NEEDS(pAllocateArray != NULL);
	const CUDA_ARRAY3D_DESCRIPTOR descriptor = {pAllocateArray->Width,  pAllocateArray->Height,      0,
						    pAllocateArray->Format, pAllocateArray->NumChannels, 0};

	return create(pHandle, &descriptor);
}

CUresult CUDAAPI cuArrayCreate(CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR_v1 *pAllocateArray)
{
	CU_ENTER("pHandle=%p descriptor=%p", (void *)pHandle, (const void *)pAllocateArray);
	CU_NEEDS(pAllocateArray != NULL);
	const CUDA_ARRAY3D_DESCRIPTOR descriptor = {pAllocateArray->Width,  pAllocateArray->Height,      0,
						    pAllocateArray->Format, pAllocateArray->NumChannels, 0};

	return create(pHandle, &descriptor);
}

CUresult CUDAAPI cuArrayDestroy(CUarray hArray)
{
	CU_ENTER("array=%p", (void *)hArray);
	if (!cu_is(hArray, CU_KIND_ARRAY))
		return CUDA_ERROR_INVALID_HANDLE;
	CU_NEEDS(hArray->mipmap == NULL);
	cu_memory_delay();
	cu_lock();
	/* Where its context went first, the memory did too. */
	if (hArray->alloc->kind == CU_ALLOC_ARRAY && hArray->alloc->owner == hArray)
		cu_memory_end(hArray->alloc);
	cu_object_end(hArray);
	cu_unlock();
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *pArrayDescriptor, CUarray hArray)
{
	CU_ENTER("descriptor=%p array=%p", (void *)pArrayDescriptor, (void *)hArray);
	CU_NEEDS(pArrayDescriptor != NULL);
	if (!cu_is(hArray, CU_KIND_ARRAY))
		return CUDA_ERROR_INVALID_HANDLE;
	*pArrayDescriptor = hArray->descriptor;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuArray3DGetDescriptor(CUDA_ARRAY3D_DESCRIPTOR_v1 *pArrayDescriptor, CUarray hArray)
{
	CU_ENTER("descriptor=%p array=%p", (void *)pArrayDescriptor, (void *)hArray);
	CU_NEEDS(pArrayDescriptor != NULL);
	if (!cu_is(hArray, CU_KIND_ARRAY))
		return CUDA_ERROR_INVALID_HANDLE;
	*pArrayDescriptor = (CUDA_ARRAY3D_DESCRIPTOR_v1){
	    (unsigned int)hArray->descriptor.Width, (unsigned int)hArray->descriptor.Height,
	    (unsigned int)hArray->descriptor.Depth, hArray->descriptor.Format,
	    hArray->descriptor.NumChannels,         hArray->descriptor.Flags};
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR *pArrayDescriptor, CUarray hArray)
{
	CU_ENTER("descriptor=%p array=%p", (void *)pArrayDescriptor, (void *)hArray);
	CU_NEEDS(pArrayDescriptor != NULL);
	if (!cu_is(hArray, CU_KIND_ARRAY))
		return CUDA_ERROR_INVALID_HANDLE;
	*pArrayDescriptor =
	    (CUDA_ARRAY_DESCRIPTOR){hArray->descriptor.Width, hArray->descriptor.Height,
				    hArray->descriptor.Format, hArray->descriptor.NumChannels};
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuArrayGetDescriptor(CUDA_ARRAY_DESCRIPTOR_v1 *pArrayDescriptor, CUarray hArray)
{
	CU_ENTER("descriptor=%p array=%p", (void *)pArrayDescriptor, (void *)hArray);
	CU_NEEDS(pArrayDescriptor != NULL);
	if (!cu_is(hArray, CU_KIND_ARRAY))
		return CUDA_ERROR_INVALID_HANDLE;
	*pArrayDescriptor = (CUDA_ARRAY_DESCRIPTOR_v1){
	    (unsigned int)hArray->descriptor.Width, (unsigned int)hArray->descriptor.Height,
	    hArray->descriptor.Format, hArray->descriptor.NumChannels};
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *memoryRequirements,
					      CUarray array, CUdevice device)
{
	CU_ENTER("requirements=%p array=%p dev=%d", (void *)memoryRequirements, (void *)array, device);
	size_t pitch;

	CU_NEEDS(memoryRequirements != NULL);
	if (!cu_is(array, CU_KIND_ARRAY))
		return CUDA_ERROR_INVALID_HANDLE;
	*memoryRequirements = (CUDA_ARRAY_MEMORY_REQUIREMENTS){
	    .size = cu_array_bytes(&array->descriptor, &pitch), .alignment = fg_state->driver.plain_round};
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuArrayGetPlane(CUarray *pPlaneArray, CUarray hArray, unsigned int planeIdx)
{
	CU_ENTER("plane=%p array=%p index=%u", (void *)pPlaneArray, (void *)hArray, planeIdx);
	return cu_is(hArray, CU_KIND_ARRAY) ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
}

/* ---- mipmaps ------------------------------------------------------------------------------------------ */

static CUDA_ARRAY3D_DESCRIPTOR level_shape(const CUDA_ARRAY3D_DESCRIPTOR *base, unsigned int level)
{
	CUDA_ARRAY3D_DESCRIPTOR shape = *base;
	int layered = (base->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)) != 0;

	shape.Width = base->Width >> level > 0 ? base->Width >> level : 1;
	if (base->Height > 0)
		shape.Height = base->Height >> level > 0 ? base->Height >> level : 1;
	if (base->Depth > 0 && !layered)
		shape.Depth = base->Depth >> level > 0 ? base->Depth >> level : 1;
	return shape;
}

static unsigned int most_levels(const CUDA_ARRAY3D_DESCRIPTOR *base)
{
	size_t side = base->Width;
	unsigned int levels = 1;

	if (base->Height > side)
		side = base->Height;
	if (base->Depth > side && (base->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)) == 0)
		side = base->Depth;
	while (side > 1) {
		side /= 2;
		levels++;
	}
	return levels;
}

static void end_levels(struct CUmipmappedArray_st *mipmap)
{
	for (unsigned int i = 0; i < mipmap->levels; i++)
		if (mipmap->level[i] != NULL)
			cu_object_end(mipmap->level[i]);
	cu_object_end(mipmap);
}

/* Needs cu_lock. */
static struct CUmipmappedArray_st *make_mipmap(struct CUctx_st *context, const CUDA_ARRAY3D_DESCRIPTOR *base,
					       unsigned int levels, struct cu_alloc *alloc)
{
	struct CUmipmappedArray_st *mipmap = cu_object_make(CU_KIND_MIPMAP, sizeof *mipmap);
	char *at = alloc->data;

	if (mipmap == NULL)
		return NULL;
	mipmap->context = context;
	mipmap->alloc = alloc;
	mipmap->levels = levels;
	for (unsigned int i = 0; i < levels; i++) {
		CUDA_ARRAY3D_DESCRIPTOR shape = level_shape(base, i);
		size_t pitch;
		uint64_t bytes = cu_array_bytes(&shape, &pitch);

		mipmap->level[i] = make_object(&shape, alloc, at, pitch);
		if (mipmap->level[i] == NULL) {
			end_levels(mipmap);
			return NULL;
		}
		mipmap->level[i]->mipmap = mipmap;
		at += bytes;
	}
	alloc->owner = mipmap;
	return mipmap;
}

CUresult CUDAAPI cuMipmappedArrayCreate(CUmipmappedArray *pHandle,
					const CUDA_ARRAY3D_DESCRIPTOR *pMipmappedArrayDesc,
					unsigned int numMipmapLevels)
{
	CU_ENTER("pHandle=%p descriptor=%p levels=%u", (void *)pHandle, (const void *)pMipmappedArrayDesc,
		 numMipmapLevels);
	CU_CONTEXT(context);
	CU_UNSAFE_IN_CAPTURE(context);
	uint64_t bytes = 0;
	unsigned int levels;
	struct cu_alloc *alloc;
	CUresult result;

	CU_NEEDS(pHandle != NULL && pMipmappedArrayDesc != NULL && numMipmapLevels > 0);
	levels = most_levels(pMipmappedArrayDesc);
	levels = numMipmapLevels < levels ? numMipmapLevels : levels;
	levels = levels < CU_MIP_LEVELS ? levels : CU_MIP_LEVELS;
	for (unsigned int i = 0; i < levels; i++) {
		CUDA_ARRAY3D_DESCRIPTOR shape = level_shape(pMipmappedArrayDesc, i);
		size_t pitch;
		uint64_t part = cu_array_bytes(&shape, &pitch);

		CU_NEEDS(part > 0);
		bytes += part;
	}
	result = cu_memory_make(context->device, context, bytes, bytes, CU_ALLOC_ARRAY, &alloc);
	if (result != CUDA_SUCCESS)
		return result;
	cu_lock();
	*pHandle = make_mipmap(context, pMipmappedArrayDesc, levels, alloc);
	if (*pHandle == NULL)
		cu_memory_end(alloc);
	cu_unlock();
	return *pHandle != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult CUDAAPI cuMipmappedArrayGetLevel(CUarray *pLevelArray, CUmipmappedArray hMipmappedArray,
					  unsigned int level)
{
	CU_ENTER("pLevelArray=%p mipmap=%p level=%u", (void *)pLevelArray, (void *)hMipmappedArray, level);
	CU_NEEDS(pLevelArray != NULL);
	if (!cu_is(hMipmappedArray, CU_KIND_MIPMAP))
		return CUDA_ERROR_INVALID_HANDLE;
	CU_NEEDS(level < hMipmappedArray->levels);
	*pLevelArray = hMipmappedArray->level[level];
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMipmappedArrayDestroy(CUmipmappedArray hMipmappedArray)
{
	CU_ENTER("mipmap=%p", (void *)hMipmappedArray);
	if (!cu_is(hMipmappedArray, CU_KIND_MIPMAP))
		return CUDA_ERROR_INVALID_HANDLE;
	cu_lock();
	if (hMipmappedArray->alloc != NULL && hMipmappedArray->alloc->kind == CU_ALLOC_ARRAY &&
	    hMipmappedArray->alloc->owner == hMipmappedArray)
		cu_memory_end(hMipmappedArray->alloc);
	end_levels(hMipmappedArray);
	cu_unlock();
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMipmappedArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *memoryRequirements,
						       CUmipmappedArray mipmap, CUdevice device)
{
	CU_ENTER("requirements=%p mipmap=%p dev=%d", (void *)memoryRequirements, (void *)mipmap, device);
	CU_NEEDS(memoryRequirements != NULL);
	if (!cu_is(mipmap, CU_KIND_MIPMAP))
		return CUDA_ERROR_INVALID_HANDLE;
	*memoryRequirements = (CUDA_ARRAY_MEMORY_REQUIREMENTS){.alignment = fg_state->driver.plain_round};
	for (unsigned int i = 0; i < mipmap->levels; i++) {
		size_t pitch;

		memoryRequirements->size += cu_array_bytes(&mipmap->level[i]->descriptor, &pitch);
	}
	return CUDA_SUCCESS;
}
