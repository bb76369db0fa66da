/* SPDX-License-Identifier: Apache-2.0
 *
 * How busy a card is, as this container may know it: how busy its own processes keep it, in percent of the
 * card.
 *
 * Where NVML tells it by process, those of this container are added up. Where it cannot (MIG, or the node has
 * not said yet which pids are ours), what the limiter has charged since the last question is taken. Only
 * where there is neither does the figure of the whole card stand. Nothing about other containers' processes
 * is ever passed on.
 */
/* Small before quick: nothing in here is on a hot path, and every process of a container maps it. */
#pragma GCC optimize("Os")

#include <string.h>
#include <time.h>

#include "nvml_process.h"
#include "pages.h"
#include "priority.h"
#include "resolve.h"

#define ROOM          256u
#define WINDOW_US     1000000u
#define GPU_SAMPLES   1 /* NVML_GPU_UTILIZATION_SAMPLES */
#define MEMORY_SAMPLE 2 /* NVML_MEMORY_UTILIZATION_SAMPLES */
#define SHORTEST_NS   20000000u

struct sample {
	unsigned pid;
	unsigned long long time_us;
	unsigned sm, memory, encoder, decoder;
};

struct info {
	unsigned long long time_us;
	unsigned pid, sm, memory, encoder, decoder, jpeg, ofa;
};

struct info_list {
	unsigned version, count;
	unsigned long long since_us;
	struct info *array;
};

static bool fits(uint32_t have, unsigned *count, const void *into, nvmlReturn_t *result)
{
	unsigned room = *count;
	*count = have;
	*result = have > room || into == NULL ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
	if (have == 0)
		*result = NVML_ERROR_NOT_FOUND;
	return *result == NVML_SUCCESS;
}

/* The driver's samples of our own processes, under our pids. */
static nvmlReturn_t own_samples(nvmlDevice_t device, unsigned long long since, struct sample *into,
				uint32_t *count, bool *all_known)
{
	unsigned have = ROOM;
	uint32_t number, kept = 0;
	*count = 0;
	nvmlReturn_t result = REAL(nvmlDeviceGetProcessUtilization)(device, into, &have, since);
	struct aq_own *own = aq_own_list(aq_nvml_card(device), &number);
	*all_known = own != NULL;
	for (uint32_t i = 0; own && i < number; i++)
		*all_known = *all_known && own[i].host_pid != 0;
	for (uint32_t i = 0; result == NVML_SUCCESS && own && i < have && i < ROOM; i++) {
		const struct aq_own *mine = aq_own_find(own, number, into[i].pid);
		if (mine == NULL)
			continue;
		*all_known = *all_known || mine->host_pid == 0;
		into[kept] = into[i];
		into[kept++].pid = mine->pid;
	}
	*count = kept;
	aq_own_give(own);
	return result;
}

HOOK(nvmlReturn_t, nvmlDeviceGetProcessUtilization,
     (nvmlDevice_t device, void *into, unsigned *count, unsigned long long since))
{
	struct sample samples[ROOM];
	uint32_t have;
	bool known;
	if (!aq_nvml_filters() || count == NULL)
		return REAL(nvmlDeviceGetProcessUtilization)(device, into, count, since);
	/* Without room the question is how much to bring; the driver says how much it would need for
	 * everybody. */
	if (into == NULL) {
		nvmlReturn_t verdict = REAL(nvmlDeviceGetProcessUtilization)(device, NULL, count, since);
		if (verdict == NVML_ERROR_INSUFFICIENT_SIZE || verdict == NVML_SUCCESS) {
			aq_own_give(aq_own_list(aq_nvml_card(device), &have));
			*count = have + 1;
		}
		return verdict;
	}
	nvmlReturn_t result = own_samples(device, since, samples, &have, &known);
	if (result == NVML_SUCCESS && fits(have, count, into, &result))
		memcpy(into, samples, have * sizeof(samples[0]));
	return result;
}

HOOK(nvmlReturn_t, nvmlDeviceGetProcessesUtilizationInfo, (nvmlDevice_t device, void *into))
{
	struct info_list *list = into;
	struct info infos[ROOM];
	uint32_t number, kept = 0;
	if (!aq_nvml_filters() || list == NULL)
		return REAL(nvmlDeviceGetProcessesUtilizationInfo)(device, into);
	struct info_list whole = {list->version, ROOM, 0, infos};
	if (list->version != (sizeof(*list) | 1u << 24)) {
		nvmlReturn_t verdict = REAL(nvmlDeviceGetProcessesUtilizationInfo)(device, &whole);
		return verdict == NVML_SUCCESS || verdict == NVML_ERROR_INSUFFICIENT_SIZE
			   ? NVML_ERROR_ARGUMENT_VERSION_MISMATCH
			   : verdict;
	}
	whole.since_us = list->since_us;
	struct aq_own *own = aq_own_list(aq_nvml_card(device), &number);
	if (own == NULL)
		return NVML_ERROR_MEMORY;
	if (list->array == NULL)
		whole.array = NULL;
	nvmlReturn_t result = REAL(nvmlDeviceGetProcessesUtilizationInfo)(device, &whole);
	if (list->array == NULL && (result == NVML_SUCCESS || result == NVML_ERROR_INSUFFICIENT_SIZE)) {
		list->count = number + 1;
	} else if (result == NVML_SUCCESS) {
		for (uint32_t i = 0; i < whole.count && i < ROOM; i++) {
			const struct aq_own *mine = aq_own_find(own, number, infos[i].pid);
			if (mine == NULL)
				continue;
			infos[kept] = infos[i];
			infos[kept++].pid = mine->pid;
		}
		if (fits(kept, &list->count, list->array, &result))
			memcpy(list->array, infos, kept * sizeof(infos[0]));
	}
	aq_own_give(own);
	return result;
}

/* ---- of the share as a whole ------------------------------------------------------------------------ */

static unsigned percent(uint64_t value)
{
	return value < 100 ? (unsigned)value : 100;
}

/* What was charged between two questions of this process. False: nothing is charged on this card. */
static bool charged_rate(int card, nvmlUtilization_t *rates)
{
	static uint64_t then_ns[AQ_MAX_CARDS], then_busy[AQ_MAX_CARDS];
	static uint32_t shown[AQ_MAX_CARDS];
	uint64_t busy = 0, now = aq_now_ns();
	for (uint32_t i = 0; i < aq_cards[card].share_count; i++) {
		const struct aq_share *share = &aq_shares[aq_cards[card].share[i]];
		uint32_t limit = __atomic_load_n(&share->core_percent, __ATOMIC_RELAXED);
		if (limit == 0 || limit >= 100)
			return false;
		busy += __atomic_load_n(&share->account.file->bucket.busy_ns, __ATOMIC_RELAXED);
	}
	uint64_t then = __atomic_load_n(&then_ns[card], __ATOMIC_RELAXED);
	if (then == 0 || now - then >= SHORTEST_NS) {
		uint64_t before = __atomic_load_n(&then_busy[card], __ATOMIC_RELAXED);
		uint64_t spent = then && busy > before ? busy - before : 0;
		__atomic_store_n(&shown[card], percent(then ? spent * 100 / (now - then) : 0),
				 __ATOMIC_RELAXED);
		__atomic_store_n(&then_busy[card], busy, __ATOMIC_RELAXED);
		__atomic_store_n(&then_ns[card], now, __ATOMIC_RELAXED);
	}
	rates->gpu = __atomic_load_n(&shown[card], __ATOMIC_RELAXED);
	rates->memory = rates->memory < rates->gpu ? rates->memory : rates->gpu;
	return true;
}

/* Makes the card's rates those of this container. */
static void own_rates(nvmlDevice_t device, int card, nvmlUtilization_t *rates)
{
	struct sample samples[ROOM];
	struct timespec now;
	uint32_t have;
	bool known;
	clock_gettime(CLOCK_REALTIME, &now);
	unsigned long long since =
	    (unsigned long long)now.tv_sec * 1000000u + (unsigned long long)now.tv_nsec / 1000u - WINDOW_US;
	nvmlReturn_t result = own_samples(device, since, samples, &have, &known);
	if (!known || (result != NVML_SUCCESS && result != NVML_ERROR_NOT_FOUND)) {
		charged_rate(card, rates);
		return;
	}
	uint64_t sm = 0, memory = 0;
	for (uint32_t i = 0; i < have; i++) {
		bool newest = true;
		for (uint32_t j = 0; j < have && newest; j++)
			newest = samples[j].pid != samples[i].pid ||
				 samples[j].time_us < samples[i].time_us ||
				 (samples[j].time_us == samples[i].time_us && j >= i);
		sm += newest ? samples[i].sm : 0;
		memory += newest ? samples[i].memory : 0;
	}
	rates->gpu = percent(sm);
	rates->memory = percent(memory);
}

HOOK(nvmlReturn_t, nvmlDeviceGetUtilizationRates, (nvmlDevice_t device, nvmlUtilization_t *rates))
{
	nvmlReturn_t result = REAL(nvmlDeviceGetUtilizationRates)(device, rates);
	int card = result == NVML_SUCCESS && aq_nvml_filters() ? aq_nvml_card(device) : AQ_NO_CARD;
	if (card != AQ_NO_CARD)
		own_rates(device, card, rates);
	return result;
}

struct plain_sample {
	unsigned long long time_us;
	union {
		double real;
		unsigned whole;
		unsigned long long wide;
	} value;
};

/* The past of the card as a whole says what others did; the present of the share takes its place. */
HOOK(nvmlReturn_t, nvmlDeviceGetSamples,
     (nvmlDevice_t device, int type, unsigned long long since, void *value_type, unsigned *count, void *into))
{
	nvmlUtilization_t rates;
	nvmlReturn_t result = REAL(nvmlDeviceGetSamples)(device, type, since, value_type, count, into);
	if (result != NVML_SUCCESS || into == NULL || count == NULL || !aq_nvml_filters() ||
	    (type != GPU_SAMPLES && type != MEMORY_SAMPLE))
		return result;
	int card = aq_nvml_card(device);
	if (card == AQ_NO_CARD || REAL(nvmlDeviceGetUtilizationRates)(device, &rates) != NVML_SUCCESS)
		return result;
	own_rates(device, card, &rates);
	unsigned own = type == GPU_SAMPLES ? rates.gpu : rates.memory;
	struct plain_sample *sample = into;
	for (unsigned i = 0; i < *count; i++)
		if (sample[i].value.whole > own)
			sample[i].value.whole = own;
	return result;
}
