/* SPDX-License-Identifier: Apache-2.0
 *
 * libnvidia-ml: accounting mode. Nobody ticks here, so a process is noted when NVML is asked about processes
 * or about accounting while it lives; one that came and went between two questions is not known.
 */
#include <string.h>
#include <unistd.h>

#include "lock.h"
#include "nvml_process.h"
#include "nvml_settings.h"

/* When a process began, from its start time in ticks since boot. */
static uint64_t start_us(const struct fg_process *process)
{
	static long per_second;
	if (per_second == 0)
		per_second = sysconf(_SC_CLK_TCK);
	uint64_t since_boot = process->start_ticks * 1000000ull / (uint64_t)per_second;
	return nv_wall_us() - fg_now_ns() / 1000 + since_boot;
}

/* The entry of a process, made (over the one seen longest ago) when it has none. Start times are compared
 * roughly: they are computed against the wall clock, which may be set. */
static struct nv_account *entry_of(struct nv_settings *settings, int32_t pid, uint64_t start)
{
	struct nv_account *oldest = &settings->account[0];
	for (uint32_t i = 0; i < NV_ACCOUNTS; i++) {
		struct nv_account *one = &settings->account[i];
		uint64_t apart = one->start_us > start ? one->start_us - start : start - one->start_us;
		if (one->pid == pid && apart < 1000000)
			return one;
		if (one->order < oldest->order)
			oldest = one;
	}
	*oldest = (struct nv_account){.pid = pid, .start_us = start};
	return oldest;
}

void nv_accounting_look(const struct nv_device *of)
{
	struct nv_settings *settings = nv_settings_of(of->card);
	if (!settings->accounting_on || fg_process_join(0) < 0)
		return;
	fg_engine_advance(of->index, FG_NO_INSTANCE);
	fg_state_lock();
	uint8_t seen[NV_ACCOUNTS] = {0};
	for (uint32_t i = 0; i < fg_state->seat_high; i++) {
		const struct fg_seat *seat = fg_seat_at(i);
		if (!seat->in_use || seat->card != of->index || seat->contexts == 0)
			continue;
		struct nv_account *entry = entry_of(settings, fg_process_reported_pid(seat->process),
						    start_us(fg_process_at(seat->process)));
		entry->running = seen[entry - settings->account] = 1;
		entry->busy_ns = seat->busy_ns;
		if (seat->peak_bytes > entry->peak_bytes)
			entry->peak_bytes = seat->peak_bytes;
		entry->order = ++settings->account_order;
	}
	for (uint32_t i = 0; i < NV_ACCOUNTS; i++)
		if (settings->account[i].running && !seen[i]) {
			settings->account[i].running = 0;
			settings->account[i].end_us = nv_wall_us();
		}
	fg_state_unlock();
}

nvmlReturn_t nvmlDeviceGetAccountingMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(mode);
	*mode = nv_settings_of(of.card)->accounting_on ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetAccountingMode(nvmlDevice_t device, nvmlEnableState_t mode)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_ROOT();
	if (mode != NVML_FEATURE_ENABLED && mode != NVML_FEATURE_DISABLED)
		return NVML_ERROR_INVALID_ARGUMENT;
	__atomic_store_n(&nv_settings_of(of.card)->accounting_on, mode == NVML_FEATURE_ENABLED,
			 __ATOMIC_RELAXED);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAccountingBufferSize(nvmlDevice_t device, unsigned int *bufferSize)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(bufferSize);
	*bufferSize = NV_ACCOUNTS;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAccountingPids(nvmlDevice_t device, unsigned int *count, unsigned int *pids)
{
	struct nv_device of;
	nvmlReturn_t result;
	NV_WHOLE_CARD(device, of);
	fg_reap();
	nv_accounting_look(&of);
	const struct nv_settings *settings = nv_settings_of(of.card);
	unsigned int have = 0, at = 0;
	for (uint32_t i = 0; i < NV_ACCOUNTS; i++)
		have += settings->account[i].pid != 0;
	if (nv_list(have, count, pids, &result))
		for (uint32_t i = 0; i < NV_ACCOUNTS && at < have; i++)
			if (settings->account[i].pid != 0)
				pids[at++] = (unsigned int)settings->account[i].pid;
	return result;
}

nvmlReturn_t nvmlDeviceGetAccountingStats(nvmlDevice_t device, unsigned int pid, nvmlAccountingStats_t *stats)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(stats);
	fg_reap();
	nv_accounting_look(&of);
	const struct nv_settings *settings = nv_settings_of(of.card);
	const struct nv_account *found = NULL;
	for (uint32_t i = 0; i < NV_ACCOUNTS; i++)
		if (settings->account[i].pid == (int32_t)pid && pid != 0 &&
		    (found == NULL || settings->account[i].order > found->order))
			found = &settings->account[i];
	if (found == NULL)
		return NVML_ERROR_NOT_FOUND;
	uint64_t end = found->running ? nv_wall_us() : found->end_us;
	uint64_t life_us = end > found->start_us ? end - found->start_us : 1;
	uint64_t percent = found->busy_ns / 10 / life_us;
	memset(stats, 0, sizeof(*stats));
	stats->gpuUtilization = percent > 100 ? 100 : (unsigned int)percent;
	stats->memoryUtilization = stats->gpuUtilization / 2;
	stats->maxMemoryUsage = found->peak_bytes;
	stats->time = found->running ? 0 : life_us / 1000;
	stats->startTime = found->start_us;
	stats->isRunning = found->running != 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceClearAccountingPids(nvmlDevice_t device)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_ROOT();
	if (fg_process_join(0) < 0)
		return NVML_ERROR_INSUFFICIENT_RESOURCES;
	struct nv_settings *settings = nv_settings_of(of.card);
	fg_state_lock();
	for (uint32_t i = 0; i < NV_ACCOUNTS; i++)
		if (!settings->account[i].running)
			memset(&settings->account[i], 0, sizeof(settings->account[i]));
	fg_state_unlock();
	return NVML_SUCCESS;
}
