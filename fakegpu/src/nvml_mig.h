/* SPDX-License-Identifier: Apache-2.0
 *
 * What a card can be cut into. Tables of the profiles of each family, and small pure functions on the
 * instances that stand in the shared state.
 *
 * Placements count memory slices; a card has 8 (A30 and RTX PRO: 4). Two instances never overlap, and an
 * instance starts only where its profile allows. Invariant: ids follow from placements, so the same sequence
 * of creations gives the same ids and UUIDs on every machine.
 */
#ifndef FAKEGPU_NVML_MIG_H
#define FAKEGPU_NVML_MIG_H

#include "nvml_core.h"

#define NV_MIG_MAX_SLICES 8u

struct nv_gi_profile {
	uint32_t profile; /* NVML_GPU_INSTANCE_PROFILE_* */
	uint32_t id; /* what nvidia-smi mig -cgi takes */
	uint32_t slices; /* compute slices */
	uint32_t memory_slices; /* size of a placement */
	uint32_t sm_count;
	uint32_t starts; /* bit s: may start at memory slice s */
	uint32_t most; /* instances at a time */
	uint32_t copy, decoder, encoder, jpeg, ofa;
	const char *name; /* "1g.5gb" */
};

/* The profiles of a card's family, ended by an entry without name; NULL for cards without MIG. */
const struct nv_gi_profile *nv_gi_profiles(const struct fg_card_config *config);
const struct nv_gi_profile *nv_gi_profile(const struct fg_card_config *config, uint32_t profile);
const struct nv_gi_profile *nv_gi_profile_by_id(const struct fg_card_config *config, uint32_t id);
uint32_t nv_memory_slices(const struct fg_card_config *config);
/* Bytes that an instance of a profile gets. */
uint64_t nv_gi_memory(const struct fg_card_config *config, const struct nv_gi_profile *profile);

/* Compute slices of a compute instance profile (NVML_COMPUTE_INSTANCE_PROFILE_*); 0: no such profile. */
uint32_t nv_ci_slices(uint32_t ci_profile);
/* 1 when `gi` can hold compute instances of that profile at all. */
int nv_ci_fits(const struct nv_gi_profile *gi, uint32_t ci_profile);

/* Memory slices taken: bit s set when slice s is in use. */
uint32_t nv_gi_taken(const struct fg_card *card);
/* Compute slices of a GPU instance that its compute instances take, as bits. */
uint32_t nv_ci_taken(const struct fg_card *card, uint32_t gi);
/* First free start of a profile; -1: none. */
int nv_gi_place(const struct fg_card *card, const struct nv_gi_profile *profile);
/* How many more instances of a profile fit. */
uint32_t nv_gi_room(const struct fg_card *card, const struct nv_gi_profile *profile);
/* First free start of a compute instance of `slices`; -1: none. */
int nv_ci_place(const struct fg_card *card, uint32_t gi, uint32_t slices);

/* "3g.20gb", or "1c.3g.20gb" for a compute instance that is a part of its GPU instance. */
void nv_mig_device_profile(const struct fg_card *card, uint32_t ci, char *text, size_t size);

nvmlGpuInstance_t nv_gi_handle(uint32_t card, uint32_t gi);
nvmlComputeInstance_t nv_ci_handle(uint32_t card, uint32_t ci);
/* As nv_enter_device, for handles of instances; nv_enter_gi leaves `ci` empty. */
nvmlReturn_t nv_enter_gi(const char *function, nvmlGpuInstance_t handle, struct nv_device *of);
nvmlReturn_t nv_enter_ci(const char *function, nvmlComputeInstance_t handle, struct nv_device *of);

#endif
