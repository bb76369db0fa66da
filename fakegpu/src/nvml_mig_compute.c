/* SPDX-License-Identifier: Apache-2.0
 *
 * libnvidia-ml: compute instances of a GPU instance, as they stand.
 */
#include "nvml_mig.h"

#include <stdio.h>

static nvmlReturn_t ci_profile_of(const struct nv_device *of, unsigned int profile, unsigned int engine,
				  const struct nv_gi_profile **parent)
{
	if (profile >= NVML_COMPUTE_INSTANCE_PROFILE_COUNT ||
	    engine >= NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	*parent = nv_gi_profile(&of->card->config, of->card->gpu_instance[of->gi].profile);
	return *parent != NULL && nv_ci_fits(*parent, profile) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

static uint32_t ci_multiprocessors(const struct nv_gi_profile *parent, unsigned int profile)
{
	uint32_t slices = nv_ci_slices(profile);
	return slices == parent->slices ? parent->sm_count : parent->sm_count / parent->slices * slices;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfo(nvmlGpuInstance_t gpuInstance, unsigned int profile,
							  unsigned int engProfile,
							  nvmlComputeInstanceProfileInfo_t *info)
{
	struct nv_device of;
	const struct nv_gi_profile *parent;
	nvmlReturn_t result = nv_enter_gi(__func__, gpuInstance, &of);
	if (result != NVML_SUCCESS)
		return result;
	NV_NEEDS(info);
	result = ci_profile_of(&of, profile, engProfile, &parent);
	if (result == NVML_SUCCESS)
		*info = (nvmlComputeInstanceProfileInfo_t){
		    .id = profile,
		    .sliceCount = nv_ci_slices(profile),
		    .instanceCount = parent->slices / nv_ci_slices(profile),
		    .multiprocessorCount = ci_multiprocessors(parent, profile),
		    .sharedCopyEngineCount = parent->copy,
		    .sharedDecoderCount = parent->decoder,
		    .sharedEncoderCount = parent->encoder,
		    .sharedJpegCount = parent->jpeg,
		    .sharedOfaCount = parent->ofa,
		};
	return result;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfoV(nvmlGpuInstance_t gpuInstance,
							   unsigned int profile, unsigned int engProfile,
							   nvmlComputeInstanceProfileInfo_v2_t *info)
{
	struct nv_device of;
	const struct nv_gi_profile *parent;
	nvmlReturn_t result = nv_enter_gi(__func__, gpuInstance, &of);
	if (result != NVML_SUCCESS)
		return result;
	NV_NEEDS(info);
	result = ci_profile_of(&of, profile, engProfile, &parent);
	if (result != NVML_SUCCESS)
		return result;
	unsigned int version = info->version;
	if (version != nvmlComputeInstanceProfileInfo_v2 && version != nvmlComputeInstanceProfileInfo_v3)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	/* The third version only adds a word at the end. */
	*info = (nvmlComputeInstanceProfileInfo_v2_t){
	    .version = version,
	    .id = profile,
	    .sliceCount = nv_ci_slices(profile),
	    .instanceCount = parent->slices / nv_ci_slices(profile),
	    .multiprocessorCount = ci_multiprocessors(parent, profile),
	    .sharedCopyEngineCount = parent->copy,
	    .sharedDecoderCount = parent->decoder,
	    .sharedEncoderCount = parent->encoder,
	    .sharedJpegCount = parent->jpeg,
	    .sharedOfaCount = parent->ofa,
	};
	if (version == nvmlComputeInstanceProfileInfo_v3)
		((nvmlComputeInstanceProfileInfo_v3_t *)(void *)info)->capabilities = 0;
	if (nv_ci_slices(profile) == parent->slices)
		snprintf(info->name, sizeof(info->name), "MIG %s", parent->name);
	else
		snprintf(info->name, sizeof(info->name), "MIG %uc.%s", nv_ci_slices(profile), parent->name);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceRemainingCapacity(nvmlGpuInstance_t gpuInstance,
								unsigned int profileId, unsigned int *count)
{
	struct nv_device of;
	const struct nv_gi_profile *parent;
	nvmlReturn_t result = nv_enter_gi(__func__, gpuInstance, &of);
	if (result != NVML_SUCCESS)
		return result;
	NV_NEEDS(count);
	result = ci_profile_of(&of, profileId, 0, &parent);
	if (result != NVML_SUCCESS)
		return result;
	uint32_t taken = nv_ci_taken(of.card, of.gi), slices = nv_ci_slices(profileId);
	*count = 0;
	for (uint32_t start = 0; start + slices <= parent->slices; start++) {
		uint32_t mask = ((1u << slices) - 1) << start;
		if ((taken & mask) == 0) {
			taken |= mask;
			(*count)++;
		}
	}
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstancePossiblePlacements(nvmlGpuInstance_t gpuInstance,
								 unsigned int profileId,
								 nvmlComputeInstancePlacement_t *placements,
								 unsigned int *count)
{
	struct nv_device of;
	const struct nv_gi_profile *parent;
	nvmlReturn_t result = nv_enter_gi(__func__, gpuInstance, &of);
	if (result != NVML_SUCCESS)
		return result;
	NV_NEEDS(count);
	result = ci_profile_of(&of, profileId, 0, &parent);
	if (result != NVML_SUCCESS)
		return result;
	uint32_t slices = nv_ci_slices(profileId), have = parent->slices - slices + 1;
	if (placements != NULL && *count < have)
		result = NVML_ERROR_INSUFFICIENT_SIZE;
	for (uint32_t start = 0; placements != NULL && result == NVML_SUCCESS && start < have; start++)
		placements[start] = (nvmlComputeInstancePlacement_t){.start = start, .size = slices};
	*count = have;
	return result;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstances(nvmlGpuInstance_t gpuInstance, unsigned int profileId,
						nvmlComputeInstance_t *computeInstances, unsigned int *count)
{
	struct nv_device of;
	const struct nv_gi_profile *parent;
	nvmlReturn_t result = nv_enter_gi(__func__, gpuInstance, &of);
	if (result != NVML_SUCCESS)
		return result;
	NV_NEEDS(computeInstances, count);
	result = ci_profile_of(&of, profileId, 0, &parent);
	if (result != NVML_SUCCESS)
		return result;
	*count = 0;
	for (uint32_t i = 0; i < FG_MAX_INSTANCES; i++) {
		const struct fg_compute_instance *one = &of.card->compute_instance[i];
		if (one->in_use && one->gi == of.gi && one->profile == profileId)
			computeInstances[(*count)++] = nv_ci_handle(of.index, i);
	}
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t gpuInstance, unsigned int id,
						   nvmlComputeInstance_t *computeInstance)
{
	struct nv_device of;
	nvmlReturn_t result = nv_enter_gi(__func__, gpuInstance, &of);
	if (result != NVML_SUCCESS)
		return result;
	NV_NEEDS(computeInstance);
	for (uint32_t i = 0; i < FG_MAX_INSTANCES; i++) {
		const struct fg_compute_instance *one = &of.card->compute_instance[i];
		if (one->in_use && one->gi == of.gi && one->id == id) {
			*computeInstance = nv_ci_handle(of.index, i);
			return NVML_SUCCESS;
		}
	}
	return NVML_ERROR_NOT_FOUND;
}

static nvmlReturn_t ci_info(const char *function, nvmlComputeInstance_t instance,
			    nvmlComputeInstanceInfo_t *info)
{
	struct nv_device of;
	nvmlReturn_t result = nv_enter_ci(function, instance, &of);
	if (result != NVML_SUCCESS)
		return result;
	NV_NEEDS(info);
	const struct fg_compute_instance *ci = &of.card->compute_instance[of.ci];
	*info = (nvmlComputeInstanceInfo_t){
	    .device = nv_card_handle(of.index),
	    .gpuInstance = nv_gi_handle(of.index, of.gi),
	    .id = ci->id,
	    .profileId = ci->profile,
	    .placement = {.start = ci->placement_start, .size = ci->placement_size},
	};
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t computeInstance,
					   nvmlComputeInstanceInfo_t *info)
{
	return ci_info(__func__, computeInstance, info);
}

/* The first form ended before the placement. */
nvmlReturn_t nvmlComputeInstanceGetInfo(nvmlComputeInstance_t computeInstance,
					nvmlComputeInstanceInfo_t *info)
{
	nvmlComputeInstanceInfo_t whole;
	NV_NEEDS(info);
	nvmlReturn_t result = ci_info(__func__, computeInstance, &whole);
	if (result == NVML_SUCCESS) {
		info->device = whole.device;
		info->gpuInstance = whole.gpuInstance;
		info->id = whole.id;
		info->profileId = whole.profileId;
	}
	return result;
}
