/* SPDX-License-Identifier: Apache-2.0
 *
 * libnvidia-ml: what changes MIG: the mode, creating and destroying instances. Only root may. Everything
 * happens under the lock of the state, which guards the tables of instances; who reads them without it sees
 * an instance either whole or not at all, since `in_use` is stored last.
 */
#include "nvml_mig.h"

#include <stdio.h>
#include <string.h>

#include "lock.h"
#include "uuid.h"

/* Joins (locks want an owner's slot), takes the lock and removes the dead, so that "in use" is the truth. */
static nvmlReturn_t begin(void)
{
	if (fg_process_join(0) < 0)
		return NVML_ERROR_INSUFFICIENT_RESOURCES;
	fg_reap();
	fg_state_lock();
	return NVML_SUCCESS;
}

/* 1 when a process has a context on the card (ci: FG_NO_INSTANCE) or on one compute instance of it. */
static int in_use(uint32_t card, uint32_t ci)
{
	for (uint32_t i = 0; i < fg_state->seat_high; i++) {
		const struct fg_seat *seat = fg_seat_at(i);
		if (seat->in_use && seat->card == card && seat->contexts > 0 &&
		    (ci == FG_NO_INSTANCE || seat->ci == ci))
			return 1;
	}
	return 0;
}

nvmlReturn_t nvmlDeviceSetMigMode(nvmlDevice_t device, unsigned int mode, nvmlReturn_t *activationStatus)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(activationStatus);
	NV_ROOT();
	if (nv_gi_profiles(&of.card->config) == NULL)
		return NVML_ERROR_NOT_SUPPORTED;
	if (mode != NVML_DEVICE_MIG_DISABLE && mode != NVML_DEVICE_MIG_ENABLE)
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t result = begin();
	if (result != NVML_SUCCESS)
		return result;
	if (mode == NVML_DEVICE_MIG_DISABLE && nv_gi_taken(of.card) != 0) {
		result = NVML_ERROR_IN_USE;
	} else {
		/* With programs on the card the mode waits for a reset, as on the real one. */
		*activationStatus = in_use(of.index, FG_NO_INSTANCE) ? NVML_ERROR_IN_USE : NVML_SUCCESS;
		of.card->mig_pending = mode;
		if (*activationStatus == NVML_SUCCESS)
			of.card->mig_enabled = mode;
	}
	fg_state_unlock();
	return result;
}

/* ---- GPU instances ------------------------------------------------------------------------------------ */

/* Numbers that follow from the place, so that they are the same on every machine: 0 for the whole card, 1 and
 * 2 for halves, 3 to 6 for quarters, 7 to 14 for eighths. */
static uint32_t gi_id(const struct nv_gi_profile *profile, uint32_t memory_slices, uint32_t start)
{
	uint32_t parts = memory_slices / profile->memory_slices; /* 1, 2, 4, 8 */
	return parts - 1 + start / profile->memory_slices;
}

static nvmlReturn_t create_gi(const struct nv_device *of, unsigned int id,
			      const nvmlGpuInstancePlacement_t *wanted, nvmlGpuInstance_t *handle)
{
	const struct nv_gi_profile *profile = nv_gi_profile_by_id(&of->card->config, id);
	if (nv_gi_profiles(&of->card->config) == NULL || !of->card->mig_enabled)
		return NVML_ERROR_NOT_SUPPORTED;
	if (profile == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	int start = nv_gi_place(of->card, profile);
	if (wanted != NULL) {
		if (wanted->size != profile->memory_slices || wanted->start >= NV_MIG_MAX_SLICES ||
		    (profile->starts >> wanted->start & 1) == 0)
			return NVML_ERROR_INVALID_ARGUMENT;
		uint32_t mask = ((1u << wanted->size) - 1) << wanted->start;
		if (start < 0 || (nv_gi_taken(of->card) & mask) != 0)
			return NVML_ERROR_INSUFFICIENT_RESOURCES;
		start = (int)wanted->start;
	}
	uint32_t slot = 0;
	while (slot < FG_MAX_INSTANCES && of->card->gpu_instance[slot].in_use)
		slot++;
	if (start < 0 || slot == FG_MAX_INSTANCES)
		return NVML_ERROR_INSUFFICIENT_RESOURCES;
	struct fg_gpu_instance *gi = &of->card->gpu_instance[slot];
	*gi = (struct fg_gpu_instance){
	    .id = gi_id(profile, nv_memory_slices(&of->card->config), (uint32_t)start),
	    .profile = profile->profile,
	    .placement_start = (uint32_t)start,
	    .placement_size = profile->memory_slices,
	    .sm_count = profile->sm_count,
	    .memory_bytes = nv_gi_memory(&of->card->config, profile),
	};
	__atomic_store_n(&gi->in_use, 1, __ATOMIC_RELEASE);
	fg_account_layout(of->index);
	*handle = nv_gi_handle(of->index, slot);
	return NVML_SUCCESS;
}

static nvmlReturn_t create_gi_locked(const char *function, nvmlDevice_t device, unsigned int id,
				     const nvmlGpuInstancePlacement_t *wanted, nvmlGpuInstance_t *handle)
{
	struct nv_device of;
	nvmlReturn_t result = nv_enter_device(function, device, &of);
	if (result != NVML_SUCCESS)
		return result;
	if (of.ci != FG_NO_INSTANCE)
		return NVML_ERROR_NOT_SUPPORTED;
	NV_NEEDS(handle);
	NV_ROOT();
	if ((result = begin()) != NVML_SUCCESS)
		return result;
	result = create_gi(&of, id, wanted, handle);
	fg_state_unlock();
	return result;
}

nvmlReturn_t nvmlDeviceCreateGpuInstance(nvmlDevice_t device, unsigned int profileId,
					 nvmlGpuInstance_t *gpuInstance)
{
	return create_gi_locked(__func__, device, profileId, NULL, gpuInstance);
}

nvmlReturn_t nvmlDeviceCreateGpuInstanceWithPlacement(nvmlDevice_t device, unsigned int profileId,
						      const nvmlGpuInstancePlacement_t *placement,
						      nvmlGpuInstance_t *gpuInstance)
{
	NV_NEEDS(placement);
	return create_gi_locked(__func__, device, profileId, placement, gpuInstance);
}

nvmlReturn_t nvmlGpuInstanceDestroy(nvmlGpuInstance_t gpuInstance)
{
	struct nv_device of;
	nvmlReturn_t result = nv_enter_gi(__func__, gpuInstance, &of);
	if (result != NVML_SUCCESS)
		return result;
	NV_ROOT();
	if ((result = begin()) != NVML_SUCCESS)
		return result;
	if (nv_ci_taken(of.card, of.gi) != 0) {
		result = NVML_ERROR_IN_USE;
	} else {
		__atomic_store_n(&of.card->gpu_instance[of.gi].in_use, 0, __ATOMIC_RELEASE);
		fg_account_layout(of.index);
	}
	fg_state_unlock();
	return result;
}

/* ---- compute instances -------------------------------------------------------------------------------- */

static uint32_t free_number(const struct fg_card *card, uint32_t gi, int of_mig_index)
{
	uint32_t number = 0;
	for (uint32_t i = 0; i < FG_MAX_INSTANCES; i++) {
		const struct fg_compute_instance *one = &card->compute_instance[i];
		if (!one->in_use || (!of_mig_index && one->gi != gi))
			continue;
		if ((of_mig_index ? one->mig_index : one->id) == number) {
			number++;
			i = UINT32_MAX; /* look through all again for the next number */
		}
	}
	return number;
}

static void name_ci(const struct fg_card *card, uint32_t gi, struct fg_compute_instance *ci)
{
	char text[FG_UUID_TEXT_LEN + 32];
	snprintf(text, sizeof(text), "%s/%u/%u", card->config.uuid_text, card->gpu_instance[gi].id, ci->id);
	fg_uuid_make(fg_seed(text, 0), ci->uuid);
	fg_uuid_format("MIG-", ci->uuid, ci->uuid_text, sizeof(ci->uuid_text));
}

static nvmlReturn_t create_ci(const struct nv_device *of, unsigned int profile,
			      const nvmlComputeInstancePlacement_t *wanted, nvmlComputeInstance_t *handle)
{
	struct fg_card *card = of->card;
	const struct nv_gi_profile *parent = nv_gi_profile(&card->config, card->gpu_instance[of->gi].profile);
	if (parent == NULL || !nv_ci_fits(parent, profile))
		return NVML_ERROR_INVALID_ARGUMENT;
	uint32_t slices = nv_ci_slices(profile);
	int start = nv_ci_place(card, of->gi, slices);
	if (wanted != NULL) {
		if (wanted->size != slices || wanted->start + slices > parent->slices)
			return NVML_ERROR_INVALID_ARGUMENT;
		uint32_t mask = ((1u << slices) - 1) << wanted->start;
		start = (nv_ci_taken(card, of->gi) & mask) == 0 ? (int)wanted->start : -1;
	}
	uint32_t slot = 0;
	while (slot < FG_MAX_INSTANCES && card->compute_instance[slot].in_use)
		slot++;
	if (start < 0 || slot == FG_MAX_INSTANCES)
		return NVML_ERROR_INSUFFICIENT_RESOURCES;
	struct fg_compute_instance *ci = &card->compute_instance[slot];
	uint32_t id = free_number(card, of->gi, 0), mig_index = free_number(card, of->gi, 1);
	*ci = (struct fg_compute_instance){
	    .id = id,
	    .gi = of->gi,
	    .profile = profile,
	    .placement_start = (uint32_t)start,
	    .placement_size = slices,
	    .sm_count =
		slices == parent->slices ? parent->sm_count : parent->sm_count / parent->slices * slices,
	    .mig_index = mig_index,
	};
	name_ci(card, of->gi, ci);
	fg_card_lock(card);
	memset(&card->engine[1 + slot], 0,
	       sizeof(card->engine[0])); /* the slot's former instance left its history */
	fg_card_unlock(card);
	__atomic_store_n(&ci->in_use, 1, __ATOMIC_RELEASE);
	*handle = nv_ci_handle(of->index, slot);
	return NVML_SUCCESS;
}

static nvmlReturn_t create_ci_locked(const char *function, nvmlGpuInstance_t instance, unsigned int profile,
				     const nvmlComputeInstancePlacement_t *wanted,
				     nvmlComputeInstance_t *handle)
{
	struct nv_device of;
	nvmlReturn_t result = nv_enter_gi(function, instance, &of);
	if (result != NVML_SUCCESS)
		return result;
	NV_NEEDS(handle);
	NV_ROOT();
	if ((result = begin()) != NVML_SUCCESS)
		return result;
	result = create_ci(&of, profile, wanted, handle);
	fg_state_unlock();
	return result;
}

nvmlReturn_t nvmlGpuInstanceCreateComputeInstance(nvmlGpuInstance_t gpuInstance, unsigned int profileId,
						  nvmlComputeInstance_t *computeInstance)
{
	return create_ci_locked(__func__, gpuInstance, profileId, NULL, computeInstance);
}

nvmlReturn_t
nvmlGpuInstanceCreateComputeInstanceWithPlacement(nvmlGpuInstance_t gpuInstance, unsigned int profileId,
						  const nvmlComputeInstancePlacement_t *placement,
						  nvmlComputeInstance_t *computeInstance)
{
	NV_NEEDS(placement);
	return create_ci_locked(__func__, gpuInstance, profileId, placement, computeInstance);
}

nvmlReturn_t nvmlComputeInstanceDestroy(nvmlComputeInstance_t computeInstance)
{
	struct nv_device of;
	nvmlReturn_t result = nv_enter_ci(__func__, computeInstance, &of);
	if (result != NVML_SUCCESS)
		return result;
	NV_ROOT();
	if ((result = begin()) != NVML_SUCCESS)
		return result;
	if (in_use(of.index, of.ci))
		result = NVML_ERROR_IN_USE;
	else
		__atomic_store_n(&of.card->compute_instance[of.ci].in_use, 0, __ATOMIC_RELEASE);
	fg_state_unlock();
	return result;
}
