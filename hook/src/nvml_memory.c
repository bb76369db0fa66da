/* SPDX-License-Identifier: Apache-2.0
 *
 * A card's memory as NVML tells it: the same figures as CUDA's.
 */
#include "nvml_device.h"
#include "query.h"
#include "resolve.h"

HOOK(nvmlReturn_t, nvmlDeviceGetMemoryInfo, (nvmlDevice_t device, nvmlMemory_t *memory))
{
	nvmlReturn_t result = REAL(nvmlDeviceGetMemoryInfo)(device, memory);
	int card = result == NVML_SUCCESS ? aq_nvml_card(device) : AQ_NO_CARD;
	struct aq_view_figures figures;
	if (card == AQ_NO_CARD)
		return result;
	aq_pools_sync((unsigned)card);
	if (aq_share_view((unsigned)card, memory->total, memory->free, &figures)) {
		memory->total = figures.total;
		memory->free = figures.free;
		memory->used = figures.used;
	}
	return result;
}

/* total = used + free: what the driver keeps for itself is no part of a share, so `reserved` is 0. */
HOOK(nvmlReturn_t, nvmlDeviceGetMemoryInfo_v2, (nvmlDevice_t device, nvmlMemory_v2_t *memory))
{
	nvmlReturn_t result = REAL(nvmlDeviceGetMemoryInfo_v2)(device, memory);
	int card = result == NVML_SUCCESS ? aq_nvml_card(device) : AQ_NO_CARD;
	struct aq_view_figures figures;
	if (card == AQ_NO_CARD)
		return result;
	aq_pools_sync((unsigned)card);
	if (aq_share_view((unsigned)card, memory->total, memory->free, &figures)) {
		memory->total = figures.total;
		memory->free = figures.free;
		memory->used = figures.used;
		memory->reserved = 0;
	}
	return result;
}
