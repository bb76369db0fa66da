/* SPDX-License-Identifier: Apache-2.0
 *
 * libnvidia-ml: processes on a device and how much each of them uses it.
 */
#include "nvml_process.h"

#include <stdlib.h>
#include <string.h>

static void add_control_rows(const struct nv_device *of, struct nv_process *list, uint32_t *count)
{
	const struct fg_control *control = fg_control_now();
	uint32_t live = *count;
	for (uint32_t i = 0; i < control->row_count; i++) {
		const struct fg_row *row = &control->row[i];
		struct nv_process *same = NULL;
		if (row->card != of->index)
			continue;
		if (of->ci != FG_NO_INSTANCE && (row->gi_id != of->card->gpu_instance[of->gi].id ||
						 row->ci_id != of->card->compute_instance[of->ci].id))
			continue;
		for (uint32_t j = 0; j < live && same == NULL; j++)
			if (list[j].pid == (uint32_t)row->pid && list[j].type == row->type)
				same = &list[j];
		if (same != NULL)
			same->bytes += row->memory_bytes;
		else
			list[(*count)++] = (struct nv_process){
			    .pid = (uint32_t)row->pid,
			    .type = row->type,
			    .bytes = row->memory_bytes,
			    .gi_id = row->gi_id,
			    .ci_id = row->ci_id,
			    .seat = FG_NO_INSTANCE,
			    .sm_percent = row->sm_utilization,
			};
	}
}

uint32_t nv_processes(const struct nv_device *of, struct nv_process **list)
{
	fg_reap();
	fg_resolve_host_pids();
	uint32_t high = fg_state->seat_high, count = 0;
	*list = malloc((high + FG_MAX_ROWS) * sizeof(**list));
	if (*list == NULL)
		return 0;
	for (uint32_t i = 0; i < high; i++) {
		const struct fg_seat *seat = fg_seat_at(i);
		if (!seat->in_use || seat->card != of->index || seat->contexts == 0 ||
		    (of->ci != FG_NO_INSTANCE && seat->ci != of->ci))
			continue;
		int in_instance = seat->gi < FG_MAX_INSTANCES && seat->ci < FG_MAX_INSTANCES;
		(*list)[count++] = (struct nv_process){
		    .pid = (uint32_t)fg_process_reported_pid(seat->process),
		    .type = 'C',
		    .bytes = seat->context_bytes + seat->data_bytes,
		    .gi_id = in_instance ? of->card->gpu_instance[seat->gi].id : FG_NO_INSTANCE,
		    .ci_id = in_instance ? of->card->compute_instance[seat->ci].id : FG_NO_INSTANCE,
		    .seat = i,
		};
	}
	add_control_rows(of, *list, &count);
	nv_accounting_look(of);
	return count;
}

/* Keeps the entries of one type at the front; 0 keeps all. */
static uint32_t keep(struct nv_process *list, uint32_t count, uint32_t type)
{
	uint32_t kept = 0;
	for (uint32_t i = 0; i < count; i++)
		if (type == 0 || list[i].type == type)
			list[kept++] = list[i];
	return kept;
}

/* `v1`: 16 bytes an entry, else 24. Where there is less room than entries, nothing is written but the count.
 */
static nvmlReturn_t running(const char *function, nvmlDevice_t device, uint32_t type, unsigned int *count,
			    void *infos, int v1)
{
	struct nv_device of;
	struct nv_process *list;
	nvmlReturn_t result = nv_enter_device(function, device, &of);
	if (result != NVML_SUCCESS)
		return result;
	uint32_t have = nv_processes(&of, &list);
	have = keep(list, have, type);
	if (nv_list(have, count, infos, &result)) {
		for (uint32_t i = 0; i < have; i++) {
			if (v1)
				((nvmlProcessInfo_v1_t *)infos)[i] = (nvmlProcessInfo_v1_t){
				    .pid = list[i].pid, .usedGpuMemory = list[i].bytes};
			else
				((nvmlProcessInfo_v2_t *)infos)[i] = (nvmlProcessInfo_v2_t){
				    .pid = list[i].pid,
				    .usedGpuMemory = list[i].bytes,
				    .gpuInstanceId = list[i].gi_id,
				    .computeInstanceId = list[i].ci_id,
				};
		}
	}
	free(list);
	return result;
}

#define RUNNING(kind, type)                                                                                 \
	nvmlReturn_t nvmlDeviceGet##kind##RunningProcesses(nvmlDevice_t device, unsigned int *infoCount,    \
							   nvmlProcessInfo_v1_t *infos)                     \
	{                                                                                                   \
		return running(__func__, device, type, infoCount, infos, 1);                                \
	}                                                                                                   \
	nvmlReturn_t nvmlDeviceGet##kind##RunningProcesses_v2(nvmlDevice_t device, unsigned int *infoCount, \
							      nvmlProcessInfo_v2_t *infos)                  \
	{                                                                                                   \
		return running(__func__, device, type, infoCount, infos, 0);                                \
	}                                                                                                   \
	nvmlReturn_t nvmlDeviceGet##kind##RunningProcesses_v3(nvmlDevice_t device, unsigned int *infoCount, \
							      nvmlProcessInfo_t *infos)                     \
	{                                                                                                   \
		return running(__func__, device, type, infoCount, infos, 0);                                \
	}
RUNNING(Compute, 'C')
RUNNING(Graphics, 'G')
RUNNING(MPSCompute, 'M')

nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_t *plist)
{
	static const uint32_t types[] = {'C', 'G', 'M', 0}; /* by nvmlProcessMode_t */
	struct nv_device of;
	struct nv_process *list;
	NV_DEVICE(device, of);
	NV_NEEDS(plist);
	nvmlReturn_t result = nv_version(plist->version, sizeof(*plist), 1);
	if (result != NVML_SUCCESS)
		return result;
	if (plist->mode >= sizeof(types) / sizeof(types[0]))
		return NVML_ERROR_INVALID_ARGUMENT;
	uint32_t have = nv_processes(&of, &list);
	have = keep(list, have, types[plist->mode]);
	if (nv_list(have, &plist->numProcArrayEntries, plist->procArray, &result))
		for (uint32_t i = 0; i < have; i++)
			plist->procArray[i] = (nvmlProcessDetail_v1_t){
			    .pid = list[i].pid,
			    .usedGpuMemory = list[i].bytes,
			    .gpuInstanceId = list[i].gi_id,
			    .computeInstanceId = list[i].ci_id,
			};
	free(list);
	return result;
}

/* ---- how busy each of them keeps the card
 * ------------------------------------------------------------------ */

#define LONGEST_NS 1000000000ull /* a sample tells of the last second at most */

struct sample {
	uint32_t pid, sm_percent;
	unsigned long long time_us;
};

/* A sample for every process that was busy since `last_us`. Samples end at the last full bucket, so asking
 * twice within one bucket finds nothing new. */
static uint32_t take_samples(const struct nv_device *of, unsigned long long last_us, struct sample **samples)
{
	struct nv_process *list;
	uint64_t now_us = nv_wall_us(), now_ns = fg_now_ns();
	uint64_t end_ns = now_ns / FG_SEAT_BUCKET_NS * FG_SEAT_BUCKET_NS;
	uint64_t end_us = now_us - (now_ns - end_ns) / 1000;
	uint64_t from_ns = end_ns > LONGEST_NS ? end_ns - LONGEST_NS : 0;
	uint32_t count = 0, have = nv_processes(of, &list);
	*samples = calloc(have + 1, sizeof(**samples));
	if (last_us >= end_us || *samples == NULL) {
		free(list);
		return 0;
	}
	uint64_t since_ns = (end_us - last_us) * 1000;
	if (since_ns < end_ns - from_ns) /* whole buckets: the one that `last_us` fell into was told then */
		from_ns = end_ns - (since_ns + FG_SEAT_BUCKET_NS - 1) / FG_SEAT_BUCKET_NS * FG_SEAT_BUCKET_NS;
	fg_engine_advance(of->index, FG_NO_INSTANCE);
	for (uint32_t i = 0; i < have; i++) {
		uint64_t percent = list[i].sm_percent;
		if (list[i].seat != FG_NO_INSTANCE)
			percent =
			    (fg_seat_busy(list[i].seat, from_ns, end_ns) * 100 + (end_ns - from_ns) / 2) /
			    (end_ns - from_ns);
		if (percent > 0)
			(*samples)[count++] = (struct sample){
			    .pid = list[i].pid,
			    .sm_percent = percent > 100 ? 100 : (uint32_t)percent,
			    .time_us = end_us,
			};
	}
	free(list);
	return count;
}

/* How much room to bring, and some more for who comes meanwhile; never none, since that would be an answer.
 */
static unsigned int room_for_samples(const struct nv_device *of)
{
	struct nv_process *list;
	unsigned int count = nv_processes(of, &list);
	free(list);
	return count + 4;
}

nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *utilization,
					     unsigned int *processSamplesCount,
					     unsigned long long lastSeenTimeStamp)
{
	struct nv_device of;
	struct sample *samples;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(processSamplesCount);
	if (of.card->mig_enabled)
		return NVML_ERROR_NOT_SUPPORTED;
	if (utilization == NULL) {
		*processSamplesCount = room_for_samples(&of);
		return NVML_ERROR_INSUFFICIENT_SIZE;
	}
	nvmlReturn_t result = NVML_SUCCESS;
	uint32_t have = take_samples(&of, lastSeenTimeStamp, &samples);
	if (have == 0)
		result = NVML_ERROR_NOT_FOUND;
	else if (nv_list(have, processSamplesCount, utilization, &result))
		for (uint32_t i = 0; i < have; i++)
			utilization[i] = (nvmlProcessUtilizationSample_t){
			    .pid = samples[i].pid,
			    .timeStamp = samples[i].time_us,
			    .smUtil = samples[i].sm_percent,
			    .memUtil = samples[i].sm_percent / 2,
			};
	free(samples);
	return result;
}

nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, nvmlProcessesUtilizationInfo_t *info)
{
	struct nv_device of;
	struct sample *samples;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(info);
	nvmlReturn_t result = nv_version(info->version, sizeof(*info), 1);
	if (result != NVML_SUCCESS)
		return result;
	if (of.card->mig_enabled)
		return NVML_ERROR_NOT_SUPPORTED;
	if (info->procUtilArray == NULL) {
		info->processSamplesCount = room_for_samples(&of);
		return NVML_ERROR_INSUFFICIENT_SIZE;
	}
	uint32_t have = take_samples(&of, info->lastSeenTimeStamp, &samples);
	if (have == 0)
		result = NVML_ERROR_NOT_FOUND;
	else if (nv_list(have, &info->processSamplesCount, info->procUtilArray, &result))
		for (uint32_t i = 0; i < have; i++)
			info->procUtilArray[i] = (nvmlProcessUtilizationInfo_v1_t){
			    .timeStamp = samples[i].time_us,
			    .pid = samples[i].pid,
			    .smUtil = samples[i].sm_percent,
			    .memUtil = samples[i].sm_percent / 2,
			};
	free(samples);
	return result;
}
