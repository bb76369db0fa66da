/* SPDX-License-Identifier: Apache-2.0
 *
 * libnvidia-ml: memory, and what goes wrong with it.
 */
#include <string.h>

#include "nvml_settings.h"

/* Free, used by programs, and kept by the driver; a MIG device has nothing of the last. */
struct figures {
	uint64_t total, free_bytes, used, reserved;
};

static nvmlReturn_t look(const struct nv_device *of, struct figures *figures)
{
	uint64_t free_bytes, usable;
	if (!of->card->config.memory_from_nvml)
		return NVML_ERROR_NOT_SUPPORTED;
	fg_account_look(of->index, of->gi, &free_bytes, &usable);
	figures->free_bytes = free_bytes;
	figures->used = usable - free_bytes;
	figures->total = of->ci == FG_NO_INSTANCE ? of->card->config.memory_bytes : usable;
	figures->reserved = figures->total - usable;
	return NVML_SUCCESS;
}

/* The first form counts what the driver keeps as used. */
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
	struct nv_device of;
	struct figures figures;
	NV_DEVICE(device, of);
	NV_NEEDS(memory);
	nvmlReturn_t result = look(&of, &figures);
	if (result == NVML_SUCCESS) {
		memory->total = figures.total;
		memory->free = figures.free_bytes;
		memory->used = figures.used + figures.reserved;
	}
	return result;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
	struct nv_device of;
	struct figures figures;
	NV_DEVICE(device, of);
	NV_NEEDS(memory);
	nvmlReturn_t result = nv_version(memory->version, sizeof(*memory), 2);
	if (result == NVML_SUCCESS)
		result = look(&of, &figures);
	if (result == NVML_SUCCESS) {
		memory->total = figures.total;
		memory->reserved = figures.reserved;
		memory->free = figures.free_bytes;
		memory->used = figures.used;
	}
	return result;
}

nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *bar1Memory)
{
	struct nv_device of;
	NV_DEVICE(device, of);
	NV_NEEDS(bar1Memory);
	uint64_t total = of.card->config.bar1_bytes;
	if (of.ci != FG_NO_INSTANCE)
		total = total / 8 * of.card->gpu_instance[of.gi].placement_size;
	bar1Memory->bar1Total = total;
	bar1Memory->bar1Used = total < 1ull << 20 ? total : 1ull << 20;
	bar1Memory->bar1Free = total - bar1Memory->bar1Used;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryBusWidth(nvmlDevice_t device, unsigned int *busWidth)
{
	struct nv_device of;
	NV_DEVICE(device, of);
	NV_NEEDS(busWidth);
	*busWidth = of.card->config.memory_bus_bits;
	return NVML_SUCCESS;
}

/* ---- ECC ---------------------------------------------------------------------------------------------- */

uint64_t nv_ecc_count(uint32_t card, int uncorrected, int aggregate)
{
	const struct nv_settings *settings = nv_settings_of(fg_card_at(card));
	int64_t count = fg_control_override(
	    card, uncorrected ? FG_OVERRIDE_ECC_UNCORRECTED : FG_OVERRIDE_ECC_CORRECTED, 0);
	uint64_t cleared = uncorrected ? settings->cleared_uncorrected : settings->cleared_corrected;
	if (aggregate)
		cleared = uncorrected ? settings->cleared_aggregate_uncorrected
				      : settings->cleared_aggregate_corrected;
	return count > 0 && (uint64_t)count > cleared ? (uint64_t)count - cleared : 0;
}

static nvmlReturn_t ecc_on(const struct nv_device *of, unsigned int error, unsigned int counter)
{
	if (!of->card->config.ecc_capable || !of->card->ecc_enabled)
		return NVML_ERROR_NOT_SUPPORTED;
	return error < NVML_MEMORY_ERROR_TYPE_COUNT && counter < NVML_ECC_COUNTER_TYPE_COUNT
		   ? NVML_SUCCESS
		   : NVML_ERROR_INVALID_ARGUMENT;
}

static uint64_t ecc_of(const struct nv_device *of, unsigned int error, unsigned int counter)
{
	return nv_ecc_count(of->index, error == NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
			    counter == NVML_AGGREGATE_ECC);
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t errorType,
					 nvmlEccCounterType_t counterType, unsigned long long *eccCounts)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(eccCounts);
	nvmlReturn_t result = ecc_on(&of, errorType, counterType);
	if (result == NVML_SUCCESS)
		*eccCounts = ecc_of(&of, errorType, counterType);
	return result;
}

nvmlReturn_t nvmlDeviceGetDetailedEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t errorType,
					    nvmlEccCounterType_t counterType, nvmlEccErrorCounts_t *eccCounts)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(eccCounts);
	nvmlReturn_t result = ecc_on(&of, errorType, counterType);
	if (result == NVML_SUCCESS)
		*eccCounts = (nvmlEccErrorCounts_t){.deviceMemory = ecc_of(&of, errorType, counterType)};
	return result;
}

/* All errors are in device memory; the other places that a card of this age has report none. */
nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, nvmlMemoryErrorType_t errorType,
					     nvmlEccCounterType_t counterType,
					     nvmlMemoryLocation_t locationType, unsigned long long *count)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(count);
	nvmlReturn_t result = ecc_on(&of, errorType, counterType);
	if (result != NVML_SUCCESS)
		return result;
	if ((unsigned int)locationType >= NVML_MEMORY_LOCATION_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (locationType != NVML_MEMORY_LOCATION_DRAM && locationType != NVML_MEMORY_LOCATION_SRAM &&
	    of.card->config.architecture >= NVML_DEVICE_ARCH_AMPERE)
		return NVML_ERROR_NOT_SUPPORTED;
	*count = locationType == NVML_MEMORY_LOCATION_DRAM ? ecc_of(&of, errorType, counterType) : 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceClearEccErrorCounts(nvmlDevice_t device, nvmlEccCounterType_t counterType)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_ROOT();
	nvmlReturn_t result = ecc_on(&of, 0, counterType);
	if (result != NVML_SUCCESS)
		return result;
	struct nv_settings *settings = nv_settings_of(of.card);
	int64_t corrected = fg_control_override(of.index, FG_OVERRIDE_ECC_CORRECTED, 0);
	int64_t uncorrected = fg_control_override(of.index, FG_OVERRIDE_ECC_UNCORRECTED, 0);
	settings->cleared_corrected = corrected > 0 ? (uint64_t)corrected : 0;
	settings->cleared_uncorrected = uncorrected > 0 ? (uint64_t)uncorrected : 0;
	if (counterType == NVML_AGGREGATE_ECC) {
		settings->cleared_aggregate_corrected = settings->cleared_corrected;
		settings->cleared_aggregate_uncorrected = settings->cleared_uncorrected;
	}
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetSramEccErrorStatus(nvmlDevice_t device, nvmlEccSramErrorStatus_t *status)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(status);
	unsigned int version = status->version;
	nvmlReturn_t result = nv_version(version, sizeof(*status), 1);
	if (result == NVML_SUCCESS)
		result = ecc_on(&of, 0, 0);
	if (result == NVML_SUCCESS)
		*status = (nvmlEccSramErrorStatus_t){.version = version};
	return result;
}

nvmlReturn_t
nvmlDeviceGetSramUniqueUncorrectedEccErrorCounts(nvmlDevice_t device,
						 nvmlEccSramUniqueUncorrectedErrorCounts_t *errorCounts)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(errorCounts);
	nvmlReturn_t result = nv_version(errorCounts->version, sizeof(*errorCounts), 1);
	if (result == NVML_SUCCESS)
		result = ecc_on(&of, 0, 0);
	if (result == NVML_SUCCESS)
		errorCounts->entryCount = 0;
	return result;
}

/* ---- pages and rows taken out of use ----------------------------------------------------------------------
 */

/* Cards before Ampere retire pages, later ones remap rows. */
static int retires_pages(const struct fg_card *card)
{
	return card->config.ecc_capable && card->config.architecture < NVML_DEVICE_ARCH_AMPERE;
}

static int remaps_rows(const struct fg_card *card)
{
	return card->config.ecc_capable && card->config.architecture >= NVML_DEVICE_ARCH_AMPERE;
}

static nvmlReturn_t retired(const char *function, nvmlDevice_t device, nvmlPageRetirementCause_t cause,
			    unsigned int *count, unsigned long long *addresses,
			    unsigned long long *timestamps)
{
	struct nv_device of;
	nvmlReturn_t result = nv_enter_device(function, device, &of);
	if (result != NVML_SUCCESS)
		return result;
	if (of.ci != FG_NO_INSTANCE || !retires_pages(of.card))
		return NVML_ERROR_NOT_SUPPORTED;
	if ((unsigned int)cause >= NVML_PAGE_RETIREMENT_CAUSE_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	int64_t pages = cause == NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR
			    ? fg_control_override(of.index, FG_OVERRIDE_RETIRED_PAGES, 0)
			    : 0;
	unsigned int have = pages < 0 ? 0 : (unsigned int)pages;
	if (!nv_list(have, count, addresses, &result))
		return result;
	for (unsigned int i = 0; i < have; i++) {
		addresses[i] = 0x100000ull * (i + 1);
		if (timestamps != NULL)
			timestamps[i] = 0; /* not recorded */
	}
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, nvmlPageRetirementCause_t cause,
				       unsigned int *pageCount, unsigned long long *addresses)
{
	return retired(__func__, device, cause, pageCount, addresses, NULL);
}

nvmlReturn_t nvmlDeviceGetRetiredPages_v2(nvmlDevice_t device, nvmlPageRetirementCause_t cause,
					  unsigned int *pageCount, unsigned long long *addresses,
					  unsigned long long *timestamps)
{
	return retired(__func__, device, cause, pageCount, addresses, timestamps);
}

nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t device, nvmlEnableState_t *isPending)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(isPending);
	if (!retires_pages(of.card))
		return NVML_ERROR_NOT_SUPPORTED;
	*isPending = NVML_FEATURE_DISABLED;
	return NVML_SUCCESS;
}

static unsigned int rows_of(uint32_t card)
{
	int64_t rows = fg_control_override(card, FG_OVERRIDE_REMAPPED_ROWS, 0);
	return rows < 0 ? 0 : (unsigned int)rows;
}

nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrRows, unsigned int *uncRows,
				       unsigned int *isPending, unsigned int *failureOccurred)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(corrRows, uncRows, isPending, failureOccurred);
	if (!remaps_rows(of.card))
		return NVML_ERROR_NOT_SUPPORTED;
	*corrRows = 0;
	*uncRows = rows_of(of.index);
	*isPending = *failureOccurred = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRemappedRows_v2(nvmlDevice_t device, nvmlRemappedRowsInfo_v2_t *info)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(info);
	if (!remaps_rows(of.card))
		return NVML_ERROR_NOT_SUPPORTED;
	*info = (nvmlRemappedRowsInfo_v2_t){.uncActiveRemaps = rows_of(of.index)};
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t device, nvmlRowRemapperHistogramValues_t *values)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(values);
	if (!remaps_rows(of.card))
		return NVML_ERROR_NOT_SUPPORTED;
	unsigned int banks = 640, used = rows_of(of.index);
	used = used < banks ? used : banks;
	*values = (nvmlRowRemapperHistogramValues_t){.max = banks - used, .high = used};
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRepairStatus(nvmlDevice_t device, nvmlRepairStatus_t *repairStatus)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(repairStatus);
	nvmlReturn_t result = nv_version(repairStatus->version, sizeof(*repairStatus), 1);
	if (result == NVML_SUCCESS)
		repairStatus->bChannelRepairPending = repairStatus->bTpcRepairPending = 0;
	return result;
}

nvmlReturn_t nvmlDeviceGetUnrepairableMemoryFlag_v1(nvmlDevice_t device,
						    nvmlUnrepairableMemoryStatus_v1_t *status)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(status);
	status->bUnrepairableMemory = 0;
	return NVML_SUCCESS;
}
