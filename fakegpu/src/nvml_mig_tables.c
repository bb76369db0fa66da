/* SPDX-License-Identifier: Apache-2.0
 *
 * Profiles of the MIG families, and the arithmetic of placements. Ids, slices and multiprocessors as
 * `nvidia-smi mig -lgip` prints them on such cards; B200 and RTX PRO 6000 are less well documented, so
 * approximate.
 */
#include "nvml_mig.h"

#include <stdio.h>

enum { /* NVML_GPU_INSTANCE_PROFILE_* by what they are called */
       ONE = NVML_GPU_INSTANCE_PROFILE_1_SLICE,
       TWO = NVML_GPU_INSTANCE_PROFILE_2_SLICE,
       THREE = NVML_GPU_INSTANCE_PROFILE_3_SLICE,
       FOUR = NVML_GPU_INSTANCE_PROFILE_4_SLICE,
       SEVEN = NVML_GPU_INSTANCE_PROFILE_7_SLICE,
       ONE_MEDIA = NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1,
       TWO_MEDIA = NVML_GPU_INSTANCE_PROFILE_2_SLICE_REV1,
       ONE_WIDE = NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV2,
};

#define END {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, NULL}

/* profile, id, slices, memory slices, SMs, starts, most, copy, decoder, encoder, jpeg, ofa, name */
static const struct nv_gi_profile a30[] = {
    {ONE, 14, 1, 1, 14, 0x0f, 4, 1, 0, 0, 0, 0, "1g.6gb"},
    {ONE_MEDIA, 21, 1, 1, 14, 0x0f, 1, 1, 1, 0, 1, 1, "1g.6gb+me"},
    {TWO, 5, 2, 2, 28, 0x05, 2, 2, 2, 0, 0, 0, "2g.12gb"},
    {TWO_MEDIA, 6, 2, 2, 28, 0x05, 1, 2, 2, 0, 1, 1, "2g.12gb+me"},
    {FOUR, 0, 4, 4, 56, 0x01, 1, 4, 4, 0, 1, 1, "4g.24gb"},
    END,
};

static const struct nv_gi_profile rtx_pro_6000[] = {
    {ONE, 14, 1, 1, 46, 0x0f, 4, 1, 1, 1, 1, 0, "1g.24gb"},
    {ONE_MEDIA, 21, 1, 1, 46, 0x0f, 1, 1, 4, 4, 4, 1, "1g.24gb+me"},
    {TWO, 5, 2, 2, 94, 0x05, 2, 2, 2, 2, 2, 0, "2g.48gb"},
    {FOUR, 0, 4, 4, 188, 0x01, 1, 4, 4, 4, 4, 1, "4g.96gb"},
    END,
};

/* The families of eight memory slices differ in names and multiprocessors only. */
#define AMPERE(one, wide, two, three, four, seven)                        \
	{                                                                 \
	    {ONE, 19, 1, 1, 14, 0x7f, 7, 1, 0, 0, 0, 0, one},             \
	    {ONE_MEDIA, 20, 1, 1, 14, 0x7f, 1, 1, 1, 0, 1, 1, one "+me"}, \
	    {ONE_WIDE, 15, 1, 2, 14, 0x55, 4, 1, 1, 0, 0, 0, wide},       \
	    {TWO, 14, 2, 2, 28, 0x15, 3, 2, 1, 0, 0, 0, two},             \
	    {THREE, 9, 3, 4, 42, 0x11, 2, 3, 2, 0, 0, 0, three},          \
	    {FOUR, 5, 4, 4, 56, 0x01, 1, 4, 2, 0, 0, 0, four},            \
	    {SEVEN, 0, 7, 8, 98, 0x01, 1, 7, 5, 0, 1, 1, seven},          \
	    END,                                                          \
	}
#define HOPPER(sm1, smw, sm2, sm3, sm4, sm7, one, wide, two, three, four, seven) \
	{                                                                        \
	    {ONE, 19, 1, 1, sm1, 0x7f, 7, 1, 1, 0, 1, 0, one},                   \
	    {ONE_MEDIA, 20, 1, 1, sm1, 0x7f, 1, 1, 1, 0, 1, 1, one "+me"},       \
	    {ONE_WIDE, 15, 1, 2, smw, 0x55, 4, 1, 1, 0, 1, 0, wide},             \
	    {TWO, 14, 2, 2, sm2, 0x15, 3, 2, 2, 0, 2, 0, two},                   \
	    {THREE, 9, 3, 4, sm3, 0x11, 2, 3, 3, 0, 3, 0, three},                \
	    {FOUR, 5, 4, 4, sm4, 0x01, 1, 4, 4, 0, 4, 0, four},                  \
	    {SEVEN, 0, 7, 8, sm7, 0x01, 1, 8, 7, 0, 7, 1, seven},                \
	    END,                                                                 \
	}

static const struct nv_gi_profile a100_40[] =
    AMPERE("1g.5gb", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb");
static const struct nv_gi_profile a100_80[] =
    AMPERE("1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb");
static const struct nv_gi_profile h100_80[] =
    HOPPER(16, 26, 32, 60, 64, 132, "1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb");
static const struct nv_gi_profile h100_96[] =
    HOPPER(16, 26, 32, 60, 64, 132, "1g.12gb", "1g.24gb", "2g.24gb", "3g.48gb", "4g.48gb", "7g.96gb");
static const struct nv_gi_profile h200[] =
    HOPPER(16, 26, 32, 60, 64, 132, "1g.18gb", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb");
static const struct nv_gi_profile b200[] =
    HOPPER(18, 30, 36, 70, 72, 148, "1g.23gb", "1g.45gb", "2g.45gb", "3g.90gb", "4g.90gb", "7g.180gb");

const struct nv_gi_profile *nv_gi_profiles(const struct fg_card_config *config)
{
	static const struct nv_gi_profile *const families[] = {
	    [FG_MIG_NONE] = NULL,       [FG_MIG_A30] = a30,         [FG_MIG_A100_40] = a100_40,
	    [FG_MIG_A100_80] = a100_80, [FG_MIG_H100_80] = h100_80, [FG_MIG_H100_96] = h100_96,
	    [FG_MIG_H200] = h200,       [FG_MIG_B200] = b200,       [FG_MIG_RTX_PRO_6000] = rtx_pro_6000,
	};
	return config->mig_family < sizeof(families) / sizeof(families[0]) ? families[config->mig_family]
									   : NULL;
}

const struct nv_gi_profile *nv_gi_profile(const struct fg_card_config *config, uint32_t profile)
{
	const struct nv_gi_profile *row = nv_gi_profiles(config);
	for (; row != NULL && row->name != NULL; row++)
		if (row->profile == profile)
			return row;
	return NULL;
}

const struct nv_gi_profile *nv_gi_profile_by_id(const struct fg_card_config *config, uint32_t id)
{
	const struct nv_gi_profile *row = nv_gi_profiles(config);
	for (; row != NULL && row->name != NULL; row++)
		if (row->id == id)
			return row;
	return NULL;
}

uint32_t nv_memory_slices(const struct fg_card_config *config)
{
	return config->mig_family == FG_MIG_A30 || config->mig_family == FG_MIG_RTX_PRO_6000 ? 4 : 8;
}

uint64_t nv_gi_memory(const struct fg_card_config *config, const struct nv_gi_profile *profile)
{
	uint64_t whole = config->memory_bytes - config->reserved_bytes;
	uint64_t part = whole / nv_memory_slices(config) * profile->memory_slices;
	return part & ~((64ull << 20) - 1);
}

/* ---- compute instances -------------------------------------------------------------------------------- */

uint32_t nv_ci_slices(uint32_t ci_profile)
{
	switch (ci_profile) {
	case NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE:
		return 1;
	case NVML_COMPUTE_INSTANCE_PROFILE_2_SLICE:
		return 2;
	case NVML_COMPUTE_INSTANCE_PROFILE_3_SLICE:
		return 3;
	case NVML_COMPUTE_INSTANCE_PROFILE_4_SLICE:
		return 4;
	case NVML_COMPUTE_INSTANCE_PROFILE_7_SLICE:
		return 7;
	default:
		return 0;
	}
}

int nv_ci_fits(const struct nv_gi_profile *gi, uint32_t ci_profile)
{
	uint32_t slices = nv_ci_slices(ci_profile);
	return slices != 0 && slices <= gi->slices;
}

/* ---- placements --------------------------------------------------------------------------------------- */

static uint32_t bits(uint32_t start, uint32_t size)
{
	return ((1u << size) - 1) << start;
}

uint32_t nv_gi_taken(const struct fg_card *card)
{
	uint32_t taken = 0;
	for (uint32_t i = 0; i < FG_MAX_INSTANCES; i++)
		if (card->gpu_instance[i].in_use)
			taken |=
			    bits(card->gpu_instance[i].placement_start, card->gpu_instance[i].placement_size);
	return taken;
}

static uint32_t count_of(const struct fg_card *card, uint32_t profile)
{
	uint32_t count = 0;
	for (uint32_t i = 0; i < FG_MAX_INSTANCES; i++)
		count += card->gpu_instance[i].in_use && card->gpu_instance[i].profile == profile;
	return count;
}

static int place(uint32_t taken, const struct nv_gi_profile *profile)
{
	for (int start = 0; start < (int)NV_MIG_MAX_SLICES; start++)
		if ((profile->starts >> start & 1) != 0 &&
		    (taken & bits((uint32_t)start, profile->memory_slices)) == 0)
			return start;
	return -1;
}

int nv_gi_place(const struct fg_card *card, const struct nv_gi_profile *profile)
{
	return count_of(card, profile->profile) < profile->most ? place(nv_gi_taken(card), profile) : -1;
}

uint32_t nv_gi_room(const struct fg_card *card, const struct nv_gi_profile *profile)
{
	uint32_t taken = nv_gi_taken(card), room = 0, have = count_of(card, profile->profile);
	while (have + room < profile->most) {
		int start = place(taken, profile);
		if (start < 0)
			break;
		taken |= bits((uint32_t)start, profile->memory_slices);
		room++;
	}
	return room;
}

uint32_t nv_ci_taken(const struct fg_card *card, uint32_t gi)
{
	uint32_t taken = 0;
	for (uint32_t i = 0; i < FG_MAX_INSTANCES; i++) {
		const struct fg_compute_instance *one = &card->compute_instance[i];
		if (one->in_use && one->gi == gi)
			taken |= bits(one->placement_start, one->placement_size);
	}
	return taken;
}

int nv_ci_place(const struct fg_card *card, uint32_t gi, uint32_t slices)
{
	const struct nv_gi_profile *profile = nv_gi_profile(&card->config, card->gpu_instance[gi].profile);
	uint32_t taken = nv_ci_taken(card, gi);
	for (uint32_t start = 0; profile != NULL && start + slices <= profile->slices; start++)
		if ((taken & bits(start, slices)) == 0)
			return (int)start;
	return -1;
}

/* ---- names -------------------------------------------------------------------------------------------- */

void nv_mig_device_profile(const struct fg_card *card, uint32_t ci, char *text, size_t size)
{
	const struct fg_compute_instance *instance = &card->compute_instance[ci];
	const struct nv_gi_profile *profile =
	    nv_gi_profile(&card->config, card->gpu_instance[instance->gi].profile);
	uint32_t slices = nv_ci_slices(instance->profile);
	if (profile == NULL)
		snprintf(text, size, "unknown");
	else if (slices == profile->slices)
		snprintf(text, size, "%s", profile->name);
	else
		snprintf(text, size, "%uc.%s", slices, profile->name);
}
