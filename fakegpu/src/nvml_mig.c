/* SPDX-License-Identifier: Apache-2.0
 *
 * libnvidia-ml: MIG as it stands: mode, profiles, placements, instances and their handles. What changes it is
 * in nvml_mig_change.c.
 */
#include "nvml_mig.h"

#include <stdio.h>
#include <string.h>

/* ---- instance handles --------------------------------------------------------------------------------- */

static uint32_t gi_tag(const struct fg_gpu_instance *instance)
{
	return instance->id << 8 | instance->profile;
}

nvmlGpuInstance_t nv_gi_handle(uint32_t card, uint32_t gi)
{
	return nv_handle(NV_GPU_INSTANCE, card, gi, gi_tag(&fg_card_at(card)->gpu_instance[gi]));
}

nvmlComputeInstance_t nv_ci_handle(uint32_t card, uint32_t ci)
{
	return nv_handle(NV_COMPUTE_INSTANCE, card, ci,
			 nv_instance_tag(&fg_card_at(card)->compute_instance[ci]));
}

static nvmlReturn_t alive(uint32_t card, struct nv_device *of)
{
	of->index = card;
	of->card = fg_card_at(card);
	return __atomic_load_n(&of->card->lost, __ATOMIC_RELAXED) ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

nvmlReturn_t nv_enter_gi(const char *function, nvmlGpuInstance_t handle, struct nv_device *of)
{
	nvmlReturn_t result = nv_enter(function);
	uint32_t card, slot, tag;
	if (result != NVML_SUCCESS)
		return result;
	if (!nv_handle_parts(handle, NV_GPU_INSTANCE, &card, &slot, &tag) || card >= fg_state->card_count ||
	    slot >= FG_MAX_INSTANCES || !fg_card_at(card)->gpu_instance[slot].in_use ||
	    gi_tag(&fg_card_at(card)->gpu_instance[slot]) != tag)
		return NVML_ERROR_INVALID_ARGUMENT;
	of->gi = slot;
	of->ci = FG_NO_INSTANCE;
	return alive(card, of);
}

nvmlReturn_t nv_enter_ci(const char *function, nvmlComputeInstance_t handle, struct nv_device *of)
{
	nvmlReturn_t result = nv_enter(function);
	uint32_t card, slot, tag;
	if (result != NVML_SUCCESS)
		return result;
	if (!nv_handle_parts(handle, NV_COMPUTE_INSTANCE, &card, &slot, &tag) ||
	    card >= fg_state->card_count || slot >= FG_MAX_INSTANCES ||
	    !fg_card_at(card)->compute_instance[slot].in_use ||
	    nv_instance_tag(&fg_card_at(card)->compute_instance[slot]) != tag)
		return NVML_ERROR_INVALID_ARGUMENT;
	of->ci = slot;
	of->gi = fg_card_at(card)->compute_instance[slot].gi;
	return alive(card, of);
}

/* ---- MIG devices -------------------------------------------------------------------------------------- */

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *currentMode, unsigned int *pendingMode)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(currentMode, pendingMode);
	if (nv_gi_profiles(&of.card->config) == NULL)
		return NVML_ERROR_NOT_SUPPORTED;
	*currentMode = of.card->mig_enabled;
	*pendingMode = of.card->mig_pending;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(count);
	const struct nv_gi_profile *profiles = nv_gi_profiles(&of.card->config);
	/* The smallest profile comes first. */
	*count = profiles == NULL || !of.card->mig_enabled ? 0 : profiles[0].most;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index,
						 nvmlDevice_t *migDevice)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(migDevice);
	const struct nv_gi_profile *profiles = nv_gi_profiles(&of.card->config);
	if (profiles == NULL || !of.card->mig_enabled)
		return NVML_ERROR_NOT_SUPPORTED;
	if (index >= profiles[0].most)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (uint32_t ci = 0; ci < FG_MAX_INSTANCES; ci++)
		if (of.card->compute_instance[ci].in_use &&
		    of.card->compute_instance[ci].mig_index == index) {
			*migDevice = nv_mig_handle(of.index, ci);
			return NVML_SUCCESS;
		}
	return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *isMigDevice)
{
	struct nv_device of;
	NV_DEVICE(device, of);
	NV_NEEDS(isMigDevice);
	*isMigDevice = of.ci != FG_NO_INSTANCE;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t migDevice, nvmlDevice_t *device)
{
	struct nv_device of;
	NV_DEVICE(migDevice, of);
	NV_NEEDS(device);
	if (of.ci == FG_NO_INSTANCE)
		return NVML_ERROR_INVALID_ARGUMENT;
	*device = nv_card_handle(of.index);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id)
{
	struct nv_device of;
	NV_DEVICE(device, of);
	NV_NEEDS(id);
	if (of.ci == FG_NO_INSTANCE)
		return NVML_ERROR_NOT_SUPPORTED;
	*id = of.card->gpu_instance[of.gi].id;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id)
{
	struct nv_device of;
	NV_DEVICE(device, of);
	NV_NEEDS(id);
	if (of.ci == FG_NO_INSTANCE)
		return NVML_ERROR_NOT_SUPPORTED;
	*id = of.card->compute_instance[of.ci].id;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
	struct nv_device of;
	NV_DEVICE(device, of);
	NV_NEEDS(attributes);
	if (of.ci == FG_NO_INSTANCE)
		return NVML_ERROR_NOT_SUPPORTED;
	const struct fg_gpu_instance *gi = &of.card->gpu_instance[of.gi];
	const struct nv_gi_profile *profile = nv_gi_profile(&of.card->config, gi->profile);
	if (profile == NULL)
		return NVML_ERROR_UNKNOWN;
	*attributes = (nvmlDeviceAttributes_t){
	    .multiprocessorCount = of.card->compute_instance[of.ci].sm_count,
	    .sharedCopyEngineCount = profile->copy,
	    .sharedDecoderCount = profile->decoder,
	    .sharedEncoderCount = profile->encoder,
	    .sharedJpegCount = profile->jpeg,
	    .sharedOfaCount = profile->ofa,
	    .gpuInstanceSliceCount = profile->slices,
	    .computeInstanceSliceCount = nv_ci_slices(of.card->compute_instance[of.ci].profile),
	    .memorySizeMB = gi->memory_bytes >> 20,
	};
	return NVML_SUCCESS;
}

/* The first form ended before the slices (driver 450). */
nvmlReturn_t nvmlDeviceGetAttributes(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
	NV_NEEDS(attributes);
	nvmlDeviceAttributes_t whole;
	nvmlReturn_t result = nvmlDeviceGetAttributes_v2(device, &whole);
	if (result == NVML_SUCCESS) {
		struct attributes_v1 {
			unsigned int first[6];
			unsigned long long memory;
		} *old = (struct attributes_v1 *)(void *)attributes;
		memcpy(old->first, &whole, sizeof(old->first));
		old->memory = whole.memorySizeMB;
	}
	return result;
}

/* ---- GPU instance profiles ---------------------------------------------------------------------------- */

static nvmlReturn_t profile_of(const struct nv_device *of, uint32_t profile, const struct nv_gi_profile **row)
{
	if (nv_gi_profiles(&of->card->config) == NULL)
		return NVML_ERROR_NOT_SUPPORTED;
	if (profile >= NVML_GPU_INSTANCE_PROFILE_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	*row = nv_gi_profile(&of->card->config, profile);
	return *row == NULL ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned int profile,
						 nvmlGpuInstanceProfileInfo_t *info)
{
	struct nv_device of;
	const struct nv_gi_profile *row;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(info);
	nvmlReturn_t result = profile_of(&of, profile, &row);
	if (result == NVML_SUCCESS)
		*info = (nvmlGpuInstanceProfileInfo_t){
		    .id = row->id,
		    .sliceCount = row->slices,
		    .instanceCount = row->most,
		    .multiprocessorCount = row->sm_count,
		    .copyEngineCount = row->copy,
		    .decoderCount = row->decoder,
		    .encoderCount = row->encoder,
		    .jpegCount = row->jpeg,
		    .ofaCount = row->ofa,
		    .memorySizeMB = nv_gi_memory(&of.card->config, row) >> 20,
		};
	return result;
}

static nvmlReturn_t versioned_gi_profile(const struct nv_device *of, const struct nv_gi_profile *row,
					 nvmlGpuInstanceProfileInfo_v2_t *info)
{
	unsigned int version = info->version;
	if (version == nvmlGpuInstanceProfileInfo_v3) {
		nvmlGpuInstanceProfileInfo_v3_t *third = (nvmlGpuInstanceProfileInfo_v3_t *)(void *)info;
		*third = (nvmlGpuInstanceProfileInfo_v3_t){
		    .version = version,
		    .id = row->id,
		    .sliceCount = row->slices,
		    .instanceCount = row->most,
		    .multiprocessorCount = row->sm_count,
		    .copyEngineCount = row->copy,
		    .decoderCount = row->decoder,
		    .encoderCount = row->encoder,
		    .jpegCount = row->jpeg,
		    .ofaCount = row->ofa,
		    .memorySizeMB = nv_gi_memory(&of->card->config, row) >> 20,
		};
		snprintf(third->name, sizeof(third->name), "MIG %s", row->name);
		return NVML_SUCCESS;
	}
	if (version != nvmlGpuInstanceProfileInfo_v2)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	*info = (nvmlGpuInstanceProfileInfo_v2_t){
	    .version = version,
	    .id = row->id,
	    .sliceCount = row->slices,
	    .instanceCount = row->most,
	    .multiprocessorCount = row->sm_count,
	    .copyEngineCount = row->copy,
	    .decoderCount = row->decoder,
	    .encoderCount = row->encoder,
	    .jpegCount = row->jpeg,
	    .ofaCount = row->ofa,
	    .memorySizeMB = nv_gi_memory(&of->card->config, row) >> 20,
	};
	snprintf(info->name, sizeof(info->name), "MIG %s", row->name);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t device, unsigned int profile,
						  nvmlGpuInstanceProfileInfo_v2_t *info)
{
	struct nv_device of;
	const struct nv_gi_profile *row;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(info);
	nvmlReturn_t result = profile_of(&of, profile, &row);
	return result == NVML_SUCCESS ? versioned_gi_profile(&of, row, info) : result;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoByIdV(nvmlDevice_t device, unsigned int profileId,
						      nvmlGpuInstanceProfileInfo_v2_t *info)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(info);
	const struct nv_gi_profile *row = nv_gi_profile_by_id(&of.card->config, profileId);
	return row == NULL ? NVML_ERROR_NOT_SUPPORTED : versioned_gi_profile(&of, row, info);
}

/* MIG on, and a profile with this id? */
static nvmlReturn_t enabled_profile(const struct nv_device *of, uint32_t id, const struct nv_gi_profile **row)
{
	if (nv_gi_profiles(&of->card->config) == NULL || !of->card->mig_enabled)
		return NVML_ERROR_NOT_SUPPORTED;
	*row = nv_gi_profile_by_id(&of->card->config, id);
	return *row == NULL ? NVML_ERROR_INVALID_ARGUMENT : NVML_SUCCESS;
}

static nvmlReturn_t placements(const char *function, nvmlDevice_t device, unsigned int id,
			       nvmlGpuInstancePlacement_t *list, unsigned int *count, int asks_size)
{
	struct nv_device of;
	const struct nv_gi_profile *row;
	nvmlReturn_t result = nv_enter_device(function, device, &of);
	if (result != NVML_SUCCESS)
		return result;
	NV_NEEDS(count);
	if (of.ci != FG_NO_INSTANCE || (result = enabled_profile(&of, id, &row)) != NVML_SUCCESS)
		return of.ci != FG_NO_INSTANCE ? NVML_ERROR_NOT_SUPPORTED : result;
	unsigned int have = (unsigned int)__builtin_popcount(row->starts), at = 0;
	/* The second form tells the number when there is no list and checks the room; the first takes both
	 * for granted. */
	if (list != NULL && asks_size && *count < have) {
		*count = have;
		return NVML_ERROR_INSUFFICIENT_SIZE;
	}
	for (unsigned int start = 0; list != NULL && start < NV_MIG_MAX_SLICES; start++)
		if ((row->starts >> start & 1) != 0)
			list[at++] = (nvmlGpuInstancePlacement_t){.start = start, .size = row->memory_slices};
	*count = have;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements(nvmlDevice_t device, unsigned int profileId,
							nvmlGpuInstancePlacement_t *list, unsigned int *count)
{
	return placements(__func__, device, profileId, list, count, 0);
}

nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t device, unsigned int profileId,
							   nvmlGpuInstancePlacement_t *list,
							   unsigned int *count)
{
	return placements(__func__, device, profileId, list, count, 1);
}

nvmlReturn_t nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t device, unsigned int profileId,
						       unsigned int *count)
{
	struct nv_device of;
	const struct nv_gi_profile *row;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(count);
	nvmlReturn_t result = enabled_profile(&of, profileId, &row);
	if (result == NVML_SUCCESS)
		*count = nv_gi_room(of.card, row);
	return result;
}

/* ---- GPU instances ------------------------------------------------------------------------------------ */

/* Without a size to go by, the caller must bring room for as many as the profile allows. */
nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned int profileId,
				       nvmlGpuInstance_t *gpuInstances, unsigned int *count)
{
	struct nv_device of;
	const struct nv_gi_profile *row;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(gpuInstances, count);
	nvmlReturn_t result = enabled_profile(&of, profileId, &row);
	if (result != NVML_SUCCESS)
		return result;
	*count = 0;
	for (uint32_t gi = 0; gi < FG_MAX_INSTANCES; gi++)
		if (of.card->gpu_instance[gi].in_use && of.card->gpu_instance[gi].profile == row->profile)
			gpuInstances[(*count)++] = nv_gi_handle(of.index, gi);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned int id,
					  nvmlGpuInstance_t *gpuInstance)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(gpuInstance);
	if (nv_gi_profiles(&of.card->config) == NULL || !of.card->mig_enabled)
		return NVML_ERROR_NOT_SUPPORTED;
	for (uint32_t gi = 0; gi < FG_MAX_INSTANCES; gi++)
		if (of.card->gpu_instance[gi].in_use && of.card->gpu_instance[gi].id == id) {
			*gpuInstance = nv_gi_handle(of.index, gi);
			return NVML_SUCCESS;
		}
	return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t gpuInstance, nvmlGpuInstanceInfo_t *info)
{
	struct nv_device of;
	nvmlReturn_t result = nv_enter_gi(__func__, gpuInstance, &of);
	if (result != NVML_SUCCESS)
		return result;
	NV_NEEDS(info);
	const struct fg_gpu_instance *gi = &of.card->gpu_instance[of.gi];
	const struct nv_gi_profile *row = nv_gi_profile(&of.card->config, gi->profile);
	*info = (nvmlGpuInstanceInfo_t){
	    .device = nv_card_handle(of.index),
	    .id = gi->id,
	    .profileId = row == NULL ? 0 : row->id,
	    .placement = {.start = gi->placement_start, .size = gi->placement_size},
	};
	return NVML_SUCCESS;
}
