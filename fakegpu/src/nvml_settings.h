/* SPDX-License-Identifier: Apache-2.0
 *
 * What NVML can set on a card and others must see: laid over fg_card.nvml, shared by all processes, zero in a
 * new state (zero always means "as it comes"). Single words are stored atomically; the accounting table is
 * changed under the lock of the state.
 */
#ifndef FAKEGPU_NVML_SETTINGS_H
#define FAKEGPU_NVML_SETTINGS_H

#include "nvml_core.h"

#define NV_ACCOUNTS 32u
#define NV_FANS     2u

/* A process that accounting mode has seen, alive or not. */
struct nv_account {
	int32_t pid; /* as reported; 0: free */
	uint32_t running;
	uint64_t start_us; /* since the epoch */
	uint64_t end_us;
	uint64_t busy_ns;
	uint64_t peak_bytes;
	uint64_t order; /* larger: seen later */
};

struct nv_settings {
	uint32_t application_sm_mhz, application_memory_mhz;
	uint32_t locked_sm_mhz, locked_memory_mhz; /* upper ends; 0: not locked */
	uint32_t power_limit_mw;
	uint32_t accounting_on;
	uint32_t auto_boost_off;
	uint32_t restricted[2]; /* 1 + nvmlEnableState_t, by nvmlRestrictedAPI_t */
	uint32_t drained;
	uint32_t fan_percent[NV_FANS]; /* 1 + percent; 0: automatic */
	/* Counts at the last "clear volatile" (nvmlDeviceClearEccErrorCounts). */
	uint64_t cleared_corrected, cleared_uncorrected;
	uint64_t cleared_aggregate_corrected, cleared_aggregate_uncorrected;
	uint64_t account_order;
	struct nv_account account[NV_ACCOUNTS];
};
_Static_assert(sizeof(struct nv_settings) <= FG_NVML_WORDS * 8, "settings must fit their words");

static inline struct nv_settings *nv_settings_of(struct fg_card *card)
{
	return (struct nv_settings *)(void *)card->nvml;
}

/* ---- figures that several files tell ----------------------------------------------------------------------
 */

#define NV_SAMPLE_NS 160000000ull /* period of utilisation: 16 buckets, near the real sixth of a second */

/* Percent of the last sample period that kernels ran on a card, or on one compute instance of it. */
uint32_t nv_gpu_utilization(uint32_t card, uint32_t ci);
uint32_t nv_memory_utilization(uint32_t card);
uint32_t nv_power_mw(uint32_t card);
uint32_t nv_power_limit_mw(struct fg_card *card);
uint64_t nv_energy_mj(uint32_t card);
uint32_t nv_temperature(uint32_t card);
uint32_t nv_clock_mhz(uint32_t card, nvmlClockType_t type);
uint64_t nv_throttle_reasons(uint32_t card);
/* ECC counts since boot (volatile) or ever (aggregate); `uncorrected` 0 or 1. */
uint64_t nv_ecc_count(uint32_t card, int uncorrected, int aggregate);

#endif
