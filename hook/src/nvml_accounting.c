/* SPDX-License-Identifier: Apache-2.0
 *
 * What else NVML tells about processes: which of them accounting mode has noted, and who encodes or captures.
 * The driver's lists, filtered to the live processes of this container and under the pids that it knows; of
 * everybody else neither a pid nor a figure is passed on.
 */
/* Small before quick: nothing in here is on a hot path, and every process of a container maps it. */
#pragma GCC optimize("Os")

#include <string.h>

#include "nvml_process.h"
#include "pages.h"
#include "resolve.h"

#define ROOM      1024u
#define MOST_ROOM 65536u

/* How long an entry of a list is and where its pid stands, as nvml.h lays them out in every version. */
struct shape {
	uint32_t size, pid_at;
};

static const struct shape plain_pid = {4, 0}, encoder_session = {32, 4}, capture_session = {48, 4};

typedef nvmlReturn_t (*ask)(nvmlDevice_t, unsigned *, void *);

static uint32_t pid_of(const char *entry, const struct shape *shape)
{
	uint32_t pid;
	memcpy(&pid, entry + shape->pid_at, sizeof(pid));
	return pid;
}

/* Moves what is ours to the front, under our pids. Returns how many. */
static uint32_t keep_own(char *entries, uint32_t have, const struct shape *shape, const struct aq_own *own,
			 uint32_t number)
{
	uint32_t kept = 0;
	for (uint32_t i = 0; i < have; i++) {
		char *entry = entries + (size_t)i * shape->size;
		const struct aq_own *mine = aq_own_find(own, number, pid_of(entry, shape));
		if (mine == NULL)
			continue;
		char *to = entries + (size_t)kept++ * shape->size;
		memmove(to, entry, shape->size);
		memcpy(to + shape->pid_at, &mine->pid, sizeof(mine->pid));
	}
	return kept;
}

/* `asks_with_none`: what the driver answers to room for none when there is something to tell. */
static nvmlReturn_t filtered(ask real, nvmlDevice_t device, unsigned *count, void *into,
			     const struct shape *shape, nvmlReturn_t asks_with_none)
{
	/* Missing outputs are the driver's to judge. */
	if (!aq_nvml_filters() || count == NULL)
		return real(device, count, into);
	if (into == NULL && *count > 0) {
		nvmlReturn_t verdict = real(device, count, NULL);
		if (verdict != NVML_SUCCESS && verdict != NVML_ERROR_INSUFFICIENT_SIZE)
			return verdict;
		*count = 0;
	}
	nvmlReturn_t result = NVML_ERROR_INSUFFICIENT_SIZE;
	for (uint32_t room = ROOM; result == NVML_ERROR_INSUFFICIENT_SIZE && room <= MOST_ROOM; room *= 4) {
		char *all = aq_pages((size_t)room * shape->size);
		unsigned have = room;
		uint32_t number;
		if (all == NULL)
			return NVML_ERROR_MEMORY;
		result = real(device, &have, all);
		struct aq_own *own =
		    result == NVML_SUCCESS ? aq_own_list(aq_nvml_card(device), &number) : NULL;
		if (own) {
			uint32_t kept = keep_own(all, have < room ? have : room, shape, own, number);
			unsigned fits = *count;
			*count = kept;
			if (kept > fits)
				result = fits == 0 ? asks_with_none : NVML_ERROR_INSUFFICIENT_SIZE;
			else if (into)
				memcpy(into, all, (size_t)kept * shape->size);
			aq_own_give(own);
			aq_pages_give(all, (size_t)room * shape->size);
			return result;
		}
		aq_pages_give(all, (size_t)room * shape->size);
		if (result == NVML_SUCCESS)
			return NVML_ERROR_MEMORY;
	}
	return result;
}

HOOK(nvmlReturn_t, nvmlDeviceGetAccountingPids, (nvmlDevice_t device, unsigned *count, unsigned *pids))
{
	return filtered((ask)REAL(nvmlDeviceGetAccountingPids), device, count, pids, &plain_pid,
			NVML_ERROR_INSUFFICIENT_SIZE);
}

HOOK(nvmlReturn_t, nvmlDeviceGetEncoderSessions, (nvmlDevice_t device, unsigned *count, void *sessions))
{
	return filtered((ask)REAL(nvmlDeviceGetEncoderSessions), device, count, sessions, &encoder_session,
			NVML_SUCCESS);
}

HOOK(nvmlReturn_t, nvmlDeviceGetFBCSessions, (nvmlDevice_t device, unsigned *count, void *sessions))
{
	return filtered((ask)REAL(nvmlDeviceGetFBCSessions), device, count, sessions, &capture_session,
			NVML_SUCCESS);
}

/* What the driver calls the process of this container with that pid; where it is none of ours, a number that
 * nobody has, so that the verdict is the driver's all the same. */
static uint32_t outside(nvmlDevice_t device, uint32_t pid)
{
	uint32_t number, found = UINT32_MAX;
	struct aq_own *own = aq_own_list(aq_nvml_card(device), &number);
	for (uint32_t i = 0; own && i < number; i++)
		if (own[i].pid == pid)
			found = own[i].host_pid ? own[i].host_pid : pid;
	aq_own_give(own);
	return found;
}

HOOK(nvmlReturn_t, nvmlDeviceGetAccountingStats, (nvmlDevice_t device, unsigned pid, void *stats))
{
	if (aq_nvml_filters())
		pid = outside(device, pid);
	return REAL(nvmlDeviceGetAccountingStats)(device, pid, stats);
}

/* The second form names the process in its first word. */
HOOK(nvmlReturn_t, nvmlDeviceGetAccountingStats_v2, (nvmlDevice_t device, void *stats))
{
	if (stats == NULL || !aq_nvml_filters())
		return REAL(nvmlDeviceGetAccountingStats_v2)(device, stats);
	uint32_t *pid = stats, inside = *pid;
	*pid = outside(device, inside);
	nvmlReturn_t result = REAL(nvmlDeviceGetAccountingStats_v2)(device, stats);
	*pid = inside;
	return result;
}
