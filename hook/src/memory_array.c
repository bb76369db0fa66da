/* SPDX-License-Identifier: Apache-2.0
 *
 * Arrays and mipmapped arrays. How large the driver makes one is known only afterwards, and only where it
 * tells; so the layout is foreseen (rows in pitch steps, the whole in pages), charged, and corrected.
 *
 * Sparse and deferred arrays have no memory of their own: what is mapped into them was charged when it was
 * made.
 */
#include "charge.h"
#include "entry.h"
#include "place.h"
#include "resolve.h"

#define ROW_STEP   512u
#define PAGE_BYTES 65536u

/* Bytes of one element of one channel; for formats that pack or plane, an upper bound of the whole element.
 */
static uint64_t element_bytes(int format, unsigned channels)
{
	switch (format) {
	case 0x01: /* 8 bits */
	case 0x08:
		return channels;
	case 0x02: /* 16 bits */
	case 0x09:
	case 0x10:
		return 2ull * channels;
	case 0x03: /* 32 bits */
	case 0x0a:
	case 0x20:
		return 4ull * channels;
	default:
		/* No format has elements of more than 16 bytes. */
		return 16;
	}
}

static uint64_t product(uint64_t one, uint64_t other)
{
	uint64_t result;
	return __builtin_mul_overflow(one, other, &result) ? UINT64_MAX : result;
}

static uint64_t round_up(uint64_t value, uint64_t step)
{
	return value > UINT64_MAX - step ? UINT64_MAX : (value + step - 1) / step * step;
}

static uint64_t level_bytes(const CUDA_ARRAY3D_DESCRIPTOR *array, unsigned level)
{
	uint64_t width = array->Width >> level, height = array->Height >> level;
	/* Layers and faces are as many at every level. */
	uint64_t depth = array->Flags & 0x05u ? array->Depth : array->Depth >> level;
	uint64_t row = product(width ? width : 1, element_bytes(array->Format, array->NumChannels));
	/* A one-dimensional array has no rows to align. */
	uint64_t size = array->Height == 0 && array->Depth == 0 ? row : round_up(row, ROW_STEP);
	return product(product(size, height ? height : 1), depth ? depth : 1);
}

struct request {
	struct aq_place place;
	uint64_t units;
	bool charged;
	enum aq_refusal kind;
};

/* CUDA_SUCCESS: call the driver. */
static CUresult begin(struct request *request, const CUDA_ARRAY3D_DESCRIPTOR *array, unsigned levels,
		      enum aq_refusal kind)
{
	uint64_t bytes = 0;
	request->charged = false;
	if (array == NULL || (array->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING)))
		return CUDA_SUCCESS;
	enum aq_verdict verdict = aq_place_here(&request->place);
	if (verdict == AQ_REFUSE)
		return CUDA_ERROR_NOT_PERMITTED;
	if (verdict == AQ_PASS)
		return CUDA_SUCCESS;
	for (unsigned level = 0; level < levels && level < 32; level++) {
		uint64_t more = level_bytes(array, level);
		bytes = bytes > UINT64_MAX - more ? UINT64_MAX : bytes + more;
	}
	request->units = aq_units_of(round_up(bytes, PAGE_BYTES));
	request->kind = kind;
	if (aq_charge(request->place.card, request->units, kind) < 0)
		return CUDA_ERROR_OUT_OF_MEMORY;
	request->charged = true;
	return CUDA_SUCCESS;
}

/* Where the driver tells what it took, that is the charge. False: it does not fit. */
static bool correct(struct request *request, CUresult told, const CUDA_ARRAY_MEMORY_REQUIREMENTS *real)
{
	uint64_t units = aq_units_of(real->size);
	if (told != CUDA_SUCCESS || real->size == 0 || units == request->units)
		return true;
	if (units < request->units)
		aq_uncharge(request->place.card, request->units - units);
	else if (aq_charge(request->place.card, units - request->units, request->kind) < 0)
		return false;
	request->units = units;
	return true;
}

static bool remember(const struct request *request, const void *handle)
{
	return aq_table_put(&aq_process()->arrays, (uintptr_t)handle,
			    aq_entry(request->units, request->place.card, request->place.context));
}

static CUresult end_array(struct request *request, CUresult result, const CUarray *array)
{
	CUDA_ARRAY_MEMORY_REQUIREMENTS real = {0};
	if (!request->charged)
		return result;
	if (result == CUDA_SUCCESS) {
		CUresult told = REAL(cuArrayGetMemoryRequirements)(&real, *array, request->place.ordinal);
		if (correct(request, told, &real) && remember(request, *array))
			return result;
		REAL(cuArrayDestroy)(*array);
		result = CUDA_ERROR_OUT_OF_MEMORY;
	}
	if (result == CUDA_ERROR_OUT_OF_MEMORY)
		aq_refused(request->place.card, request->kind);
	aq_uncharge(request->place.card, request->units);
	return result;
}

HOOK(CUresult, cuArray3DCreate_v2, (CUarray * array, const CUDA_ARRAY3D_DESCRIPTOR *description))
{
	struct request request;
	CUresult result = begin(&request, description, 1, AQ_REFUSED_ARRAY);
	if (result != CUDA_SUCCESS)
		return result;
	return end_array(&request, REAL(cuArray3DCreate_v2)(array, description), array);
}

HOOK(CUresult, cuArray3DCreate, (CUarray * array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *narrow))
{
	struct request request;
	CUDA_ARRAY3D_DESCRIPTOR wide = {0};
	if (narrow)
		wide = (CUDA_ARRAY3D_DESCRIPTOR){narrow->Width,  narrow->Height,      narrow->Depth,
						 narrow->Format, narrow->NumChannels, narrow->Flags};
	CUresult result = begin(&request, narrow ? &wide : NULL, 1, AQ_REFUSED_ARRAY);
	if (result != CUDA_SUCCESS)
		return result;
	return end_array(&request, REAL(cuArray3DCreate)(array, narrow), array);
}

HOOK(CUresult, cuArrayCreate_v2, (CUarray * array, const CUDA_ARRAY_DESCRIPTOR *flat))
{
	struct request request;
	CUDA_ARRAY3D_DESCRIPTOR deep = {0};
	if (flat)
		deep = (CUDA_ARRAY3D_DESCRIPTOR){flat->Width,  flat->Height,      0,
						 flat->Format, flat->NumChannels, 0};
	CUresult result = begin(&request, flat ? &deep : NULL, 1, AQ_REFUSED_ARRAY);
	if (result != CUDA_SUCCESS)
		return result;
	return end_array(&request, REAL(cuArrayCreate_v2)(array, flat), array);
}

HOOK(CUresult, cuArrayCreate, (CUarray * array, const CUDA_ARRAY_DESCRIPTOR_v1 *flat))
{
	struct request request;
	CUDA_ARRAY3D_DESCRIPTOR deep = {0};
	if (flat)
		deep = (CUDA_ARRAY3D_DESCRIPTOR){flat->Width,  flat->Height,      0,
						 flat->Format, flat->NumChannels, 0};
	CUresult result = begin(&request, flat ? &deep : NULL, 1, AQ_REFUSED_ARRAY);
	if (result != CUDA_SUCCESS)
		return result;
	return end_array(&request, REAL(cuArrayCreate)(array, flat), array);
}

HOOK(CUresult, cuMipmappedArrayCreate,
     (CUmipmappedArray * array, const CUDA_ARRAY3D_DESCRIPTOR *description, unsigned levels))
{
	struct request request;
	CUDA_ARRAY_MEMORY_REQUIREMENTS real = {0};
	CUresult result = begin(&request, description, levels, AQ_REFUSED_MIPMAP);
	if (result != CUDA_SUCCESS)
		return result;
	result = REAL(cuMipmappedArrayCreate)(array, description, levels);
	if (!request.charged)
		return result;
	if (result == CUDA_SUCCESS) {
		CUresult told =
		    REAL(cuMipmappedArrayGetMemoryRequirements)(&real, *array, request.place.ordinal);
		if (correct(&request, told, &real) && remember(&request, *array))
			return result;
		REAL(cuMipmappedArrayDestroy)(*array);
		result = CUDA_ERROR_OUT_OF_MEMORY;
	}
	if (result == CUDA_ERROR_OUT_OF_MEMORY)
		aq_refused(request.place.card, request.kind);
	aq_uncharge(request.place.card, request.units);
	return result;
}

static bool take(const void *handle, uint64_t *entry)
{
	return aq_active() && aq_table_take(&aq_process()->arrays, (uintptr_t)handle, entry);
}

static CUresult destroyed(CUresult result, const void *handle, bool ours, uint64_t entry)
{
	if (ours && result != CUDA_SUCCESS)
		aq_table_put(&aq_process()->arrays, (uintptr_t)handle, entry);
	else if (ours)
		aq_uncharge_entry(entry);
	return result;
}

HOOK(CUresult, cuArrayDestroy, (CUarray array))
{
	uint64_t entry = 0;
	bool ours = take(array, &entry);
	return destroyed(REAL(cuArrayDestroy)(array), array, ours, entry);
}

HOOK(CUresult, cuMipmappedArrayDestroy, (CUmipmappedArray array))
{
	uint64_t entry = 0;
	bool ours = take(array, &entry);
	return destroyed(REAL(cuMipmappedArrayDestroy)(array), array, ours, entry);
}
