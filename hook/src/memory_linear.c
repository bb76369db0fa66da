/* SPDX-License-Identifier: Apache-2.0
 *
 * Linear memory: plain, pitched, managed; and the free calls, which take any of them.
 *
 * Account first, driver second. A free takes the entry out before the driver is called, because the driver
 * may give the same address to another thread before we come back, and puts it back if the driver refuses.
 */
#include "charge.h"
#include "entry.h"
#include "place.h"
#include "pool.h"
#include "query.h"
#include "resolve.h"
#include "wait.h"

/* Managed memory that any stream may use: what a program expects of memory it did not ask to be managed. */
#define ATTACH_GLOBAL 1u

struct request {
	struct aq_place place;
	uint64_t units;
	bool charged; /* else the driver is called and nothing remembered */
};

/* CUDA_SUCCESS: call the driver. */
static CUresult begin(struct request *request, uint64_t bytes, enum aq_refusal kind)
{
	enum aq_verdict verdict = bytes == 0 ? AQ_PASS : aq_place_here(&request->place);
	request->charged = false;
	if (verdict == AQ_PASS)
		return CUDA_SUCCESS;
	if (verdict == AQ_REFUSE)
		return CUDA_ERROR_NOT_PERMITTED;
	request->units = aq_units_of(bytes);
	if (aq_charge(request->place.card, request->units, kind) < 0)
		return CUDA_ERROR_OUT_OF_MEMORY;
	request->charged = true;
	return CUDA_SUCCESS;
}

/* The card is full, but the share goes beyond the card: then as managed memory. */
static CUresult spill(const struct request *request, CUdeviceptr *address, uint64_t bytes,
		      enum aq_refusal kind)
{
	CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
	if (request->charged && aq_oversubscribed(request->place.card))
		result = REAL(cuMemAllocManaged)(address, bytes, ATTACH_GLOBAL);
	if (result != CUDA_SUCCESS && request->charged)
		aq_refused(request->place.card, kind);
	return result;
}

/* True: a moment was waited for whoever fills the card, so once more. */
static __attribute__((noinline, cold)) bool waited(const struct request *request, struct aq_wait *wait)
{
	return request->charged && !aq_oversubscribed(request->place.card) &&
	       aq_wait_more(request->place.card, wait);
}

/* After the driver. What cannot be remembered goes back, since nobody could uncharge it. */
static CUresult end(const struct request *request, CUresult result, CUdeviceptr address, bool spilled)
{
	if (!request->charged)
		return result;
	uint64_t entry = aq_entry(request->units, request->place.card, request->place.context);
	if (spilled)
		entry |= AQ_ENTRY_SPILLED;
	if (result == CUDA_SUCCESS && !aq_table_put(&aq_process()->addresses, address, entry)) {
		REAL(cuMemFree_v2)(address);
		result = CUDA_ERROR_OUT_OF_MEMORY;
	}
	if (result != CUDA_SUCCESS)
		aq_uncharge(request->place.card, request->units);
	else if (spilled)
		aq_spilled(request->place.card, (int64_t)request->units);
	return result;
}

HOOK(CUresult, cuMemAlloc_v2, (CUdeviceptr * address, size_t bytes))
{
	struct request request;
	CUresult result = begin(&request, bytes, AQ_REFUSED_LINEAR);
	if (result != CUDA_SUCCESS)
		return result;
	result = REAL(cuMemAlloc_v2)(address, bytes);
	struct aq_wait wait = {0};
	while (__builtin_expect(result == CUDA_ERROR_OUT_OF_MEMORY, 0) && waited(&request, &wait))
		result = REAL(cuMemAlloc_v2)(address, bytes);
	bool spilled = result == CUDA_ERROR_OUT_OF_MEMORY;
	if (spilled)
		result = spill(&request, address, bytes, AQ_REFUSED_LINEAR);
	return end(&request, result, result == CUDA_SUCCESS ? *address : 0, spilled);
}

HOOK(CUresult, cuMemAlloc, (CUdeviceptr_v1 * address, unsigned bytes))
{
	struct request request;
	CUresult result = begin(&request, bytes, AQ_REFUSED_LINEAR);
	if (result != CUDA_SUCCESS)
		return result;
	result = REAL(cuMemAlloc)(address, bytes);
	return end(&request, result, result == CUDA_SUCCESS ? *address : 0, false);
}

HOOK(CUresult, cuMemAllocManaged, (CUdeviceptr * address, size_t bytes, unsigned flags))
{
	struct request request;
	CUresult result = begin(&request, bytes, AQ_REFUSED_MANAGED);
	if (result != CUDA_SUCCESS)
		return result;
	result = REAL(cuMemAllocManaged)(address, bytes, flags);
	return end(&request, result, result == CUDA_SUCCESS ? *address : 0, false);
}

/* ---- pitched ------------------------------------------------------------------------------------ */

/* Rows are laid out in steps of this many bytes on every card so far; what the driver answers corrects it. */
static uint64_t pitch_step = 512;

static void learn_pitch(uint64_t pitch)
{
	uint64_t step = pitch & (~pitch + 1);
	if (step < 65536 && step != __atomic_load_n(&pitch_step, __ATOMIC_RELAXED))
		__atomic_store_n(&pitch_step, step, __ATOMIC_RELAXED);
}

static uint64_t saturating_product(uint64_t one, uint64_t other)
{
	uint64_t product;
	return __builtin_mul_overflow(one, other, &product) ? UINT64_MAX : product;
}

static uint64_t pitched_bytes(uint64_t width, uint64_t height)
{
	uint64_t step = __atomic_load_n(&pitch_step, __ATOMIC_RELAXED);
	uint64_t pitch = width > UINT64_MAX - step ? UINT64_MAX : (width + step - 1) & ~(step - 1);
	return saturating_product(pitch, height);
}

/* After the driver's answer: charge what the real pitch takes, or give the memory back. */
static CUresult end_pitch(struct request *request, CUresult result, CUdeviceptr address, uint64_t width,
			  uint64_t pitch, uint64_t height, bool spilled)
{
	if (!request->charged || result != CUDA_SUCCESS)
		return end(request, result, address, spilled);
	uint64_t real = aq_units_of(saturating_product(pitch, height));
	if (pitch != pitched_bytes(width, 1))
		learn_pitch(pitch);
	if (real < request->units) {
		aq_uncharge(request->place.card, request->units - real);
		request->units = real;
	} else if (real > request->units) {
		if (aq_charge(request->place.card, real - request->units, AQ_REFUSED_PITCHED) < 0) {
			REAL(cuMemFree_v2)(address);
			return end(request, CUDA_ERROR_OUT_OF_MEMORY, address, spilled);
		}
		request->units = real;
	}
	return end(request, result, address, spilled);
}

HOOK(CUresult, cuMemAllocPitch_v2,
     (CUdeviceptr * address, size_t *pitch, size_t width, size_t height, unsigned element))
{
	struct request request;
	uint64_t bytes = pitched_bytes(width, height);
	CUresult result = begin(&request, bytes, AQ_REFUSED_PITCHED);
	if (result != CUDA_SUCCESS)
		return result;
	result = REAL(cuMemAllocPitch_v2)(address, pitch, width, height, element);
	struct aq_wait wait = {0};
	while (__builtin_expect(result == CUDA_ERROR_OUT_OF_MEMORY, 0) && waited(&request, &wait))
		result = REAL(cuMemAllocPitch_v2)(address, pitch, width, height, element);
	bool spilled = result == CUDA_ERROR_OUT_OF_MEMORY;
	if (spilled) {
		result = spill(&request, address, bytes, AQ_REFUSED_PITCHED);
		if (result == CUDA_SUCCESS)
			*pitch = pitched_bytes(width, 1);
	}
	bool made = result == CUDA_SUCCESS;
	return end_pitch(&request, result, made ? *address : 0, width, made ? *pitch : 0, height, spilled);
}

HOOK(CUresult, cuMemAllocPitch,
     (CUdeviceptr_v1 * address, unsigned *pitch, unsigned width, unsigned height, unsigned element))
{
	struct request request;
	CUresult result = begin(&request, pitched_bytes(width, height), AQ_REFUSED_PITCHED);
	if (result != CUDA_SUCCESS)
		return result;
	result = REAL(cuMemAllocPitch)(address, pitch, width, height, element);
	bool made = result == CUDA_SUCCESS;
	return end_pitch(&request, result, made ? *address : 0, width, made ? *pitch : 0, height, false);
}

/* ---- free --------------------------------------------------------------------------------------- */

/* Before the driver frees an address: true if it was charged, and then it no longer stands in the table. */
static bool take(CUdeviceptr address, uint64_t *entry)
{
	return aq_active() && aq_table_take(&aq_process()->addresses, address, entry);
}

/* After the driver's verdict. */
static CUresult freed(CUresult result, CUdeviceptr address, bool ours, uint64_t entry)
{
	if (ours && result != CUDA_SUCCESS)
		aq_table_put(&aq_process()->addresses, address, entry);
	else if (ours)
		aq_uncharge_entry(entry);
	else if (result == CUDA_SUCCESS)
		aq_pools_freed();
	return result;
}

HOOK(CUresult, cuMemFree_v2, (CUdeviceptr address))
{
	uint64_t entry = 0;
	bool ours = take(address, &entry);
	return freed(REAL(cuMemFree_v2)(address), address, ours, entry);
}

HOOK(CUresult, cuMemFree, (CUdeviceptr_v1 address))
{
	uint64_t entry = 0;
	bool ours = take(address, &entry);
	return freed(REAL(cuMemFree)(address), address, ours, entry);
}

/* Stream-ordered frees also take plain memory. */
HOOK(CUresult, cuMemFreeAsync, (CUdeviceptr address, CUstream stream))
{
	uint64_t entry = 0;
	bool ours = take(address, &entry);
	return freed(REAL(cuMemFreeAsync)(address, stream), address, ours, entry);
}

HOOK(CUresult, cuMemFreeAsync_ptsz, (CUdeviceptr address, CUstream stream))
{
	uint64_t entry = 0;
	bool ours = take(address, &entry);
	return freed(REAL(cuMemFreeAsync_ptsz)(address, stream), address, ours, entry);
}
