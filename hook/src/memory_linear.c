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
#include "resolve.h"

/* Remembers what was allocated; when that cannot be done the memory goes back, since nobody could uncharge
 * it. */
static CUresult remember(CUdeviceptr address, uint64_t units, const struct aq_place *place)
{
	if (aq_table_put(&aq_process()->addresses, address, aq_entry(units, place->card, place->context)))
		return CUDA_SUCCESS;
	REAL(cuMemFree_v2)(address);
	aq_uncharge(place->card, units);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

/* CUDA_SUCCESS: `units` are charged. `*pass`: the driver is to be called and nothing remembered. */
static CUresult reserve(struct aq_place *place, uint64_t bytes, uint64_t *units, bool *pass)
{
	enum aq_verdict verdict = bytes == 0 ? AQ_PASS : aq_place_here(place);
	*pass = verdict == AQ_PASS;
	if (*pass)
		return CUDA_SUCCESS;
	if (verdict == AQ_REFUSE)
		return CUDA_ERROR_NOT_PERMITTED;
	*units = aq_units_of(bytes);
	return aq_charge(place->card, *units) == 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

HOOK(CUresult, cuMemAlloc_v2, (CUdeviceptr * address, size_t bytes))
{
	struct aq_place place;
	uint64_t units;
	bool pass;
	CUresult result = reserve(&place, bytes, &units, &pass);
	if (result != CUDA_SUCCESS)
		return result;
	result = REAL(cuMemAlloc_v2)(address, bytes);
	if (pass)
		return result;
	if (result == CUDA_SUCCESS)
		return remember(*address, units, &place);
	aq_uncharge(place.card, units);
	return result;
}

HOOK(CUresult, cuMemAlloc, (CUdeviceptr_v1 * address, unsigned bytes))
{
	struct aq_place place;
	uint64_t units;
	bool pass;
	CUresult result = reserve(&place, bytes, &units, &pass);
	if (result != CUDA_SUCCESS)
		return result;
	result = REAL(cuMemAlloc)(address, bytes);
	if (pass)
		return result;
	if (result == CUDA_SUCCESS)
		return remember(*address, units, &place);
	aq_uncharge(place.card, units);
	return result;
}

HOOK(CUresult, cuMemAllocManaged, (CUdeviceptr * address, size_t bytes, unsigned flags))
{
	struct aq_place place;
	uint64_t units;
	bool pass;
	CUresult result = reserve(&place, bytes, &units, &pass);
	if (result != CUDA_SUCCESS)
		return result;
	result = REAL(cuMemAllocManaged)(address, bytes, flags);
	if (pass)
		return result;
	if (result == CUDA_SUCCESS)
		return remember(*address, units, &place);
	aq_uncharge(place.card, units);
	return result;
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
static CUresult settle_pitch(CUdeviceptr address, uint64_t width, uint64_t pitch, uint64_t height,
			     uint64_t units, const struct aq_place *place)
{
	uint64_t real = aq_units_of(saturating_product(pitch, height));
	if (pitch != pitched_bytes(width, 1))
		learn_pitch(pitch);
	if (real < units) {
		aq_uncharge(place->card, units - real);
	} else if (real > units && aq_charge(place->card, real - units) < 0) {
		REAL(cuMemFree_v2)(address);
		aq_uncharge(place->card, units);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	return remember(address, real, place);
}

HOOK(CUresult, cuMemAllocPitch_v2,
     (CUdeviceptr * address, size_t *pitch, size_t width, size_t height, unsigned element))
{
	struct aq_place place;
	uint64_t units;
	bool pass;
	CUresult result = reserve(&place, pitched_bytes(width, height), &units, &pass);
	if (result != CUDA_SUCCESS)
		return result;
	result = REAL(cuMemAllocPitch_v2)(address, pitch, width, height, element);
	if (pass)
		return result;
	if (result == CUDA_SUCCESS)
		return settle_pitch(*address, width, *pitch, height, units, &place);
	aq_uncharge(place.card, units);
	return result;
}

HOOK(CUresult, cuMemAllocPitch,
     (CUdeviceptr_v1 * address, unsigned *pitch, unsigned width, unsigned height, unsigned element))
{
	struct aq_place place;
	uint64_t units;
	bool pass;
	CUresult result = reserve(&place, pitched_bytes(width, height), &units, &pass);
	if (result != CUDA_SUCCESS)
		return result;
	result = REAL(cuMemAllocPitch)(address, pitch, width, height, element);
	if (pass)
		return result;
	if (result == CUDA_SUCCESS)
		return settle_pitch(*address, width, *pitch, height, units, &place);
	aq_uncharge(place.card, units);
	return result;
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
		aq_uncharge(aq_entry_card(entry), aq_entry_units(entry));
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
