/* SPDX-License-Identifier: Apache-2.0
 *
 * libnvidia-ml: the system as a whole, and finding devices in it.
 */
#include "nvml_core.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

const char *nvmlErrorString(nvmlReturn_t result)
{
	static const char *const texts[] = {
	    "Success",
	    "Uninitialized",
	    "Invalid Argument",
	    "Not Supported",
	    "Insufficient Permissions",
	    "Already Initialized",
	    "Not Found",
	    "Insufficient Size",
	    "Insufficient External Power",
	    "Driver Not Loaded",
	    "Timeout",
	    "Interrupt Request Issue",
	    "NVML Shared Library Not Found",
	    "Function Not Found",
	    "Corrupted infoROM",
	    "GPU is lost",
	    "GPU requires reset",
	    "GPU access blocked by the operating system",
	    "Driver/library version mismatch",
	    "In use by another client",
	    "Insufficient Memory",
	    "No data",
	    "The requested vgpu operation is not available on target device, because ECC is enabled",
	    "Insufficient Resources",
	    "Frequency Not Supported",
	    "Argument Version Mismatch",
	    "Deprecated",
	    "Not Ready",
	    "GPU Not Found",
	    "Invalid State",
	    "Reset Type Not Supported",
	};
	if ((unsigned int)result < sizeof(texts) / sizeof(texts[0]))
		return texts[result];
	return "Unknown Error";
}

/* ---- versions ----------------------------------------------------------------------------------------- */

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
	NV_ENTER();
	return nv_text(nv_driver_version(), version, length);
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
	NV_ENTER();
	char text[FG_VERSION_LEN + 8];
	if (!fake_flavour.hides_names && fg_state->driver.nvml_version[0] != '\0')
		return nv_text(fg_state->driver.nvml_version, version, length);
	snprintf(text, sizeof(text), "%d.%s", nv_cuda_version() / 1000, nv_driver_version());
	return nv_text(text, version, length);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *cudaDriverVersion)
{
	NV_ENTER();
	NV_NEEDS(cudaDriverVersion);
	*cudaDriverVersion = nv_cuda_version();
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *cudaDriverVersion)
{
	NV_ENTER();
	NV_NEEDS(cudaDriverVersion);
	*cudaDriverVersion = nv_cuda_version();
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetDriverBranch(nvmlSystemDriverBranchInfo_t *branchInfo, unsigned int length)
{
	NV_ENTER();
	NV_NEEDS(branchInfo);
	nvmlReturn_t result = nv_version(branchInfo->version, sizeof(*branchInfo), 1);
	if (result != NVML_SUCCESS)
		return result;
	char text[16];
	snprintf(text, sizeof(text), "r%ld_00", strtol(nv_driver_version(), NULL, 10));
	return nv_text(text, branchInfo->branch,
		       length < sizeof(branchInfo->branch) ? length
							   : (unsigned int)sizeof(branchInfo->branch));
}

nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length)
{
	NV_ENTER();
	if (name == NULL || length == 0)
		return NVML_ERROR_INVALID_ARGUMENT;
	fg_reap();
	fg_resolve_host_pids();
	const char *found = NULL;
	for (uint32_t i = 0; i < fg_state->process_high && found == NULL; i++)
		if (fg_process_at(i)->stage == FG_PROCESS_LIVE && fg_process_reported_pid(i) == (int32_t)pid)
			found = fg_process_at(i)->name;
	const struct fg_control *control = fg_control_now();
	for (uint32_t i = 0; i < control->row_count && found == NULL; i++)
		if (control->row[i].pid == (int32_t)pid && control->row[i].name[0] != '\0')
			found = control->row[i].name;
	if (found == NULL)
		return NVML_ERROR_NOT_FOUND;
	snprintf(name, length, "%s", found); /* cut to fit, as the real one does */
	return NVML_SUCCESS;
}

/* ---- units, HIC, exclusion: there are none of them here -------------------------------------------------
 */

nvmlReturn_t nvmlUnitGetCount(unsigned int *unitCount)
{
	NV_ENTER();
	NV_NEEDS(unitCount);
	*unitCount = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlUnitGetHandleByIndex(unsigned int index, nvmlUnit_t *unit)
{
	(void)index;
	NV_ENTER();
	NV_NEEDS(unit);
	return NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvmlSystemGetHicVersion(unsigned int *hwbcCount, nvmlHwbcEntry_t *hwbcEntries)
{
	(void)hwbcEntries;
	NV_ENTER();
	NV_NEEDS(hwbcCount);
	*hwbcCount = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlGetExcludedDeviceCount(unsigned int *deviceCount)
{
	NV_ENTER();
	NV_NEEDS(deviceCount);
	*deviceCount = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlGetExcludedDeviceInfoByIndex(unsigned int index, nvmlExcludedDeviceInfo_t *info)
{
	(void)index;
	NV_ENTER();
	NV_NEEDS(info);
	return NVML_ERROR_INVALID_ARGUMENT;
}

/* The names that these two had before driver 460; no header declares them any more. */
FAKE_EXPORT nvmlReturn_t nvmlGetBlacklistDeviceCount(unsigned int *deviceCount);
FAKE_EXPORT nvmlReturn_t nvmlGetBlacklistDeviceInfoByIndex(unsigned int index,
							   nvmlExcludedDeviceInfo_t *info);

nvmlReturn_t nvmlGetBlacklistDeviceCount(unsigned int *deviceCount)
{
	return nvmlGetExcludedDeviceCount(deviceCount);
}

nvmlReturn_t nvmlGetBlacklistDeviceInfoByIndex(unsigned int index, nvmlExcludedDeviceInfo_t *info)
{
	return nvmlGetExcludedDeviceInfoByIndex(index, info);
}

/* ---- enumeration -------------------------------------------------------------------------------------- */

static nvmlReturn_t count_devices(const char *function, unsigned int *count)
{
	nvmlReturn_t result = nv_enter(function);
	if (result != NVML_SUCCESS)
		return result;
	NV_NEEDS(count);
	*count = nv_visible_count();
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount(unsigned int *deviceCount)
{
	return count_devices(__func__, deviceCount);
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *deviceCount)
{
	return count_devices(__func__, deviceCount);
}

static nvmlReturn_t give(uint32_t card, nvmlDevice_t *device)
{
	if (__atomic_load_n(&fg_card_at(card)->lost, __ATOMIC_RELAXED))
		return NVML_ERROR_GPU_IS_LOST;
	*device = nv_card_handle(card);
	return NVML_SUCCESS;
}

static nvmlReturn_t by_index(const char *function, unsigned int index, nvmlDevice_t *device)
{
	/* Faults may be for one card only, so its number must be known before. */
	FG_CALL_ABOUT(index < nv_visible_count() ? nv_visible_card(index) : FG_RULE_ANY_CARD, function,
		      "index=%u", index);
	nvmlReturn_t result = nv_enter_quietly();
	if (result != NVML_SUCCESS)
		return result;
	NV_NEEDS(device);
	if (index >= nv_visible_count())
		return NVML_ERROR_INVALID_ARGUMENT;
	return give(nv_visible_card(index), device);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device)
{
	return by_index(__func__, index, device);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
	return by_index(__func__, index, device);
}

static nvmlReturn_t find_uuid(const char *text, nvmlDevice_t *device)
{
	for (uint32_t i = 0; i < nv_visible_count(); i++) {
		uint32_t index = nv_visible_card(i);
		const struct fg_card *card = fg_card_at(index);
		if (strcasecmp(card->config.uuid_text, text) == 0)
			return give(index, device);
		for (uint32_t ci = 0; card->mig_enabled && ci < FG_MAX_INSTANCES; ci++)
			if (card->compute_instance[ci].in_use &&
			    strcasecmp(card->compute_instance[ci].uuid_text, text) == 0) {
				nvmlReturn_t result = give(index, device);
				if (result == NVML_SUCCESS)
					*device = nv_mig_handle(index, ci);
				return result;
			}
	}
	return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
	NV_ENTER();
	NV_NEEDS(uuid, device);
	return find_uuid(uuid, device);
}

nvmlReturn_t nvmlDeviceGetHandleByUUIDV(const nvmlUUID_t *uuid, nvmlDevice_t *device)
{
	NV_ENTER();
	NV_NEEDS(uuid, device);
	nvmlReturn_t result = nv_version(uuid->version, sizeof(*uuid), 1);
	if (result != NVML_SUCCESS)
		return result;
	if (uuid->type == NVML_UUID_TYPE_ASCII)
		return find_uuid(uuid->value.str, device);
	if (uuid->type != NVML_UUID_TYPE_BINARY)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (uint32_t i = 0; i < nv_visible_count(); i++)
		if (memcmp(fg_card_at(nv_visible_card(i))->config.uuid, uuid->value.bytes, 16) == 0)
			return give(nv_visible_card(i), device);
	return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device)
{
	NV_ENTER();
	NV_NEEDS(serial, device);
	for (uint32_t i = 0; i < nv_visible_count(); i++)
		if (strcmp(fg_card_at(nv_visible_card(i))->config.serial, serial) == 0)
			return give(nv_visible_card(i), device);
	return NVML_ERROR_NOT_FOUND;
}

/* "0000:3B:00.0", "00000000:3b:00.0" and "3b:00.0" all name the same card. */
static int read_bus_id(const char *text, unsigned int *domain, unsigned int *bus, unsigned int *device)
{
	int end = 0;
	*domain = 0;
	if (sscanf(text, "%x:%x:%x.0%n", domain, bus, device, &end) == 3 && end > 0 && text[end] == '\0')
		return 1;
	*domain = 0;
	end = 0;
	return sscanf(text, "%x:%x.0%n", bus, device, &end) == 2 && end > 0 && text[end] == '\0';
}

static nvmlReturn_t by_bus_id(const char *function, const char *text, nvmlDevice_t *device)
{
	nvmlReturn_t result = nv_enter(function);
	if (result != NVML_SUCCESS)
		return result;
	NV_NEEDS(text, device);
	unsigned int domain, bus, number;
	if (!read_bus_id(text, &domain, &bus, &number))
		return NVML_ERROR_INVALID_ARGUMENT;
	for (uint32_t i = 0; i < nv_visible_count(); i++) {
		const struct fg_card_config *config = &fg_card_at(nv_visible_card(i))->config;
		if (config->pci_domain == domain && config->pci_bus == bus && config->pci_device == number)
			return give(nv_visible_card(i), device);
	}
	return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *pciBusId, nvmlDevice_t *device)
{
	return by_bus_id(__func__, pciBusId, device);
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *pciBusId, nvmlDevice_t *device)
{
	return by_bus_id(__func__, pciBusId, device);
}
