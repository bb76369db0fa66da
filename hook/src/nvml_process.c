/* SPDX-License-Identifier: Apache-2.0
 *
 * The lists of processes on a card: what of them this container may see.
 *
 * The driver is asked with room of our own, so that its verdict on device, version and state is its own and
 * nothing of what it says about others reaches the caller; then the protocol of two calls is played again
 * over what is left. Graphics and MPS lists are the driver's, filtered. The compute list is what the usage
 * files say, since the driver's names processes by pids that mean nothing here until the node has told which
 * is which.
 */
/* Small before quick: nothing in here is on a hot path, and every process of a container maps it. */
#pragma GCC optimize("Os")

#include "nvml_process.h"

#include <string.h>

#include "pages.h"
#include "resolve.h"

#define NO_INSTANCE UINT32_MAX
#define ROOM        256u
#define MOST_ROOM   65536u

enum kind { COMPUTE, GRAPHICS, MPS };

/* Entries of the driver, in whichever form, as ours. */
struct entry {
	uint32_t pid;
	uint32_t gpu_instance, compute_instance;
	uint64_t bytes;
};

struct entries {
	struct entry *entry;
	uint32_t count, room;
};

typedef nvmlReturn_t (*ask_v1)(nvmlDevice_t, unsigned *, nvmlProcessInfo_v1_t *);
typedef nvmlReturn_t (*ask_v2)(nvmlDevice_t, unsigned *, nvmlProcessInfo_v2_t *);

static void forget(struct entries *all)
{
	if (all->entry)
		aq_pages_give(all->entry, all->room * sizeof(struct entry));
	*all = (struct entries){NULL, 0, 0};
}

/* The whole list of the driver. Both forms are smaller than ours, so they are spread out where they are. */
static nvmlReturn_t ask(nvmlDevice_t device, ask_v1 one, ask_v2 two, struct entries *all)
{
	nvmlReturn_t result = NVML_ERROR_INSUFFICIENT_SIZE;
	uint32_t room = ROOM;
	*all = (struct entries){NULL, 0, 0};
	while (result == NVML_ERROR_INSUFFICIENT_SIZE && room <= MOST_ROOM) {
		unsigned count = room;
		forget(all);
		all->entry = aq_pages(room * sizeof(struct entry));
		if (all->entry == NULL)
			return NVML_ERROR_MEMORY;
		all->room = room;
		void *raw = all->entry;
		result = one ? one(device, &count, raw) : two(device, &count, raw);
		all->count = result == NVML_SUCCESS && count <= room ? count : 0;
		room *= 4;
	}
	for (uint32_t i = all->count; i-- > 0;) {
		struct entry whole = {.gpu_instance = NO_INSTANCE, .compute_instance = NO_INSTANCE};
		if (one) {
			nvmlProcessInfo_v1_t raw;
			memcpy(&raw, (const char *)all->entry + i * sizeof(raw), sizeof(raw));
			whole.pid = raw.pid;
			whole.bytes = raw.usedGpuMemory;
		} else {
			nvmlProcessInfo_v2_t raw;
			memcpy(&raw, (const char *)all->entry + i * sizeof(raw), sizeof(raw));
			whole = (struct entry){raw.pid, raw.gpuInstanceId, raw.computeInstanceId,
					       raw.usedGpuMemory};
		}
		all->entry[i] = whole;
	}
	return result;
}

static const struct entry *of_process(const struct entries *all, const struct aq_own *own)
{
	for (uint32_t i = 0; i < all->count; i++)
		if (all->entry[i].pid == (own->host_pid ? own->host_pid : own->pid))
			return &all->entry[i];
	return NULL;
}

/* The driver's entries that are ours, under our pids. */
static void keep_own(struct entries *all, const struct aq_own *own, uint32_t count)
{
	uint32_t kept = 0;
	for (uint32_t i = 0; i < all->count; i++) {
		const struct aq_own *mine = aq_own_find(own, count, all->entry[i].pid);
		if (mine == NULL)
			continue;
		all->entry[kept] = all->entry[i];
		all->entry[kept++].pid = mine->pid;
	}
	all->count = kept;
}

/* What holds memory of the share, but for the clients of MPS, which have a list of their own. */
static void put_compute(struct entries *all, const struct entries *mps, const struct aq_own *own,
			uint32_t count)
{
	struct entry kept[ROOM];
	uint32_t number = 0;
	for (uint32_t i = 0; i < count && number < ROOM; i++) {
		const struct entry *seen = of_process(all, &own[i]);
		if (own[i].bytes == 0 || (seen == NULL && of_process(mps, &own[i]) != NULL))
			continue;
		kept[number++] = (struct entry){
		    .pid = own[i].pid,
		    .gpu_instance = seen ? seen->gpu_instance : NO_INSTANCE,
		    .compute_instance = seen ? seen->compute_instance : NO_INSTANCE,
		    .bytes = own[i].bytes,
		};
	}
	memcpy(all->entry, kept, number * sizeof(kept[0]));
	all->count = number;
}

static nvmlReturn_t collect(nvmlDevice_t device, enum kind kind, ask_v1 one, ask_v2 two, struct entries *all)
{
	uint32_t count;
	nvmlReturn_t result = ask(device, one, two, all);
	if (result != NVML_SUCCESS)
		return result;
	int card = aq_nvml_card(device);
	struct aq_own *own = aq_own_list(card, &count);
	if (own == NULL)
		return NVML_ERROR_MEMORY;
	if (kind == COMPUTE && card != AQ_NO_CARD) {
		struct entries mps = {NULL, 0, 0};
		if (HAS(nvmlDeviceGetMPSComputeRunningProcesses_v3))
			ask(device, NULL, REAL(nvmlDeviceGetMPSComputeRunningProcesses_v3), &mps);
		put_compute(all, &mps, own, count);
		forget(&mps);
	} else {
		keep_own(all, own, count);
	}
	aq_own_give(own);
	return NVML_SUCCESS;
}

/* Plays the protocol of two calls: room for none asks how many there are. */
static bool fits(uint32_t have, unsigned *count, const void *into, nvmlReturn_t *result)
{
	unsigned room = *count;
	*count = have;
	if (have > room) {
		*result = NVML_ERROR_INSUFFICIENT_SIZE;
		return false;
	}
	*result = NVML_SUCCESS;
	return have > 0 && into != NULL;
}

static nvmlReturn_t answer(nvmlDevice_t device, enum kind kind, ask_v1 one, ask_v2 two, unsigned *count,
			   void *into)
{
	struct entries all;
	/* Missing outputs are the driver's to judge, but what it counts is not for us. */
	if (count == NULL || (into == NULL && *count > 0)) {
		nvmlReturn_t verdict = one ? one(device, count, into) : two(device, count, into);
		if (count == NULL || (verdict != NVML_SUCCESS && verdict != NVML_ERROR_INSUFFICIENT_SIZE))
			return verdict;
		*count = 0;
	}
	nvmlReturn_t result = collect(device, kind, one, two, &all);
	if (result == NVML_SUCCESS && fits(all.count, count, into, &result)) {
		for (uint32_t i = 0; i < all.count; i++) {
			const struct entry *entry = &all.entry[i];
			if (one)
				((nvmlProcessInfo_v1_t *)into)[i] =
				    (nvmlProcessInfo_v1_t){entry->pid, entry->bytes};
			else
				((nvmlProcessInfo_v2_t *)into)[i] = (nvmlProcessInfo_v2_t){
				    entry->pid, entry->bytes, entry->gpu_instance, entry->compute_instance};
		}
	}
	forget(&all);
	return result;
}

#define RUNNING(name, kind, type, one, two)                                          \
	HOOK(nvmlReturn_t, name, (nvmlDevice_t device, unsigned *count, type *into)) \
	{                                                                            \
		if (!aq_nvml_filters())                                              \
			return REAL(name)(device, count, into);                      \
		return answer(device, kind, one, two, count, into);                  \
	}
#define RUNNING_ALL(what, kind)                                                             \
	RUNNING(nvmlDeviceGet##what##RunningProcesses, kind, nvmlProcessInfo_v1_t,          \
		REAL(nvmlDeviceGet##what##RunningProcesses), NULL)                          \
	RUNNING(nvmlDeviceGet##what##RunningProcesses_v2, kind, nvmlProcessInfo_v2_t, NULL, \
		REAL(nvmlDeviceGet##what##RunningProcesses_v2))                             \
	RUNNING(nvmlDeviceGet##what##RunningProcesses_v3, kind, nvmlProcessInfo_t, NULL,    \
		REAL(nvmlDeviceGet##what##RunningProcesses_v3))

RUNNING_ALL(Compute, COMPUTE)
RUNNING_ALL(Graphics, GRAPHICS)
RUNNING_ALL(MPSCompute, MPS)

/* ---- the list that names its version and kind in itself ------------------------------------------ */

struct detail {
	unsigned pid;
	unsigned long long bytes;
	unsigned gpu_instance, compute_instance;
	unsigned long long protected_bytes;
};

struct detail_list {
	unsigned version, mode, count;
	struct detail *array;
};

HOOK(nvmlReturn_t, nvmlDeviceGetRunningProcessDetailList, (nvmlDevice_t device, void *into))
{
	struct detail_list *list = into;
	uint32_t number, kept = 0, room = ROOM;
	if (!aq_nvml_filters() || list == NULL)
		return REAL(nvmlDeviceGetRunningProcessDetailList)(device, into);
	nvmlReturn_t result = NVML_ERROR_INSUFFICIENT_SIZE;
	struct detail_list whole = {list->version, list->mode, 0, NULL};
	/* A version we do not know is the driver's to judge, and may lay things out in another way. */
	if (list->version != (sizeof(*list) | 1u << 24)) {
		whole = *list;
		whole.count = 0;
		whole.array = NULL;
		result = REAL(nvmlDeviceGetRunningProcessDetailList)(device, &whole);
		return result == NVML_SUCCESS || result == NVML_ERROR_INSUFFICIENT_SIZE
			   ? NVML_ERROR_ARGUMENT_VERSION_MISMATCH
			   : result;
	}
	for (; result == NVML_ERROR_INSUFFICIENT_SIZE && room <= MOST_ROOM; room *= 4) {
		if (whole.array)
			aq_pages_give(whole.array, room / 4 * sizeof(struct detail));
		whole.array = aq_pages(room * sizeof(struct detail));
		if (whole.array == NULL)
			return NVML_ERROR_MEMORY;
		whole.count = room;
		result = REAL(nvmlDeviceGetRunningProcessDetailList)(device, &whole);
	}
	room /= 4;
	struct aq_own *own = result == NVML_SUCCESS ? aq_own_list(aq_nvml_card(device), &number) : NULL;
	if (own) {
		for (uint32_t i = 0; i < whole.count && i < room; i++) {
			const struct aq_own *mine = aq_own_find(own, number, whole.array[i].pid);
			if (mine == NULL)
				continue;
			whole.array[kept] = whole.array[i];
			whole.array[kept].bytes = mine->bytes;
			whole.array[kept++].pid = mine->pid;
		}
		if (fits(kept, &list->count, list->array, &result))
			memcpy(list->array, whole.array, kept * sizeof(struct detail));
		aq_own_give(own);
	}
	if (whole.array)
		aq_pages_give(whole.array, room * sizeof(struct detail));
	return result;
}
