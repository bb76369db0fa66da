/* SPDX-License-Identifier: Apache-2.0
 *
 * nvidia-smi's switches that change a card: -c, -pm, -e, -pl, -am, -mig.
 */
#include <stdlib.h>
#include <string.h>

#include "smi.h"

static void address(nvmlDevice_t device, char *text, size_t size)
{
	nvmlPciInfo_t pci = {.busId = "?"};
	NVML(DeviceGetPciInfo_v3, device, &pci);
	snprintf(text, size, "%s", pci.busId);
}

/* Says what happened with one setting of one card; the exit status is NVML's code. */
static int say(nvmlDevice_t device, const char *what, nvmlReturn_t result)
{
	char bus_id[NVML_DEVICE_PCI_BUS_ID_BUFFER_SIZE];
	address(device, bus_id, sizeof(bus_id));
	if (result == NVML_SUCCESS)
		printf("%s for GPU %s.\n", what, bus_id);
	else if (result == NVML_ERROR_NOT_SUPPORTED)
		printf("Changing this is not supported for GPU %s.\n", bus_id);
	else
		printf("Unable to change this for GPU %s: %s\n", bus_id, smi_error(result));
	return (int)result;
}

/* 0 or 1, also in words; -1: neither. */
static int on_off(const char *text)
{
	if (strcmp(text, "0") == 0 || strcmp(text, "DISABLED") == 0)
		return 0;
	return strcmp(text, "1") == 0 || strcmp(text, "ENABLED") == 0 ? 1 : -1;
}

static int compute_mode(const char *text)
{
	static const char *const words[] = {"DEFAULT", "EXCLUSIVE_THREAD", "PROHIBITED", "EXCLUSIVE_PROCESS"};
	for (int i = 0; i < 4; i++)
		if (strcmp(text, words[i]) == 0 || (text[0] == '0' + i && text[1] == '\0'))
			return i;
	return -1;
}

static int set_compute_mode(nvmlDevice_t device, int mode)
{
	char text[64];
	snprintf(text, sizeof(text), "Set compute mode to %s", smi_compute_mode((nvmlComputeMode_t)mode));
	return say(device, text, NVML(DeviceSetComputeMode, device, (nvmlComputeMode_t)mode));
}

static int set_mig(nvmlDevice_t device, int mode)
{
	nvmlReturn_t activation = NVML_SUCCESS;
	nvmlReturn_t result = NVML(DeviceSetMigMode, device, (unsigned int)mode, &activation);
	char bus_id[NVML_DEVICE_PCI_BUS_ID_BUFFER_SIZE];
	address(device, bus_id, sizeof(bus_id));
	if (result != NVML_SUCCESS)
		return say(device, "", result);
	if (activation != NVML_SUCCESS)
		printf("Warning: MIG mode is in pending %s state for GPU %s: %s\n",
		       mode ? "enable" : "disable", bus_id, smi_error(activation));
	printf("%s MIG Mode for GPU %s\n", mode ? "Enabled" : "Disabled", bus_id);
	return 0;
}

static int set_switch(nvmlDevice_t device, const char *what, int on,
		      nvmlReturn_t (*call)(nvmlDevice_t, nvmlEnableState_t))
{
	char text[96];
	snprintf(text, sizeof(text), "%s %s", on ? "Enabled" : "Disabled", what);
	return say(device, text,
		   call == NULL ? NVML_ERROR_FUNCTION_NOT_FOUND : call(device, (nvmlEnableState_t)on));
}

static int set_one(nvmlDevice_t device, const struct smi_options *options)
{
	int status = 0;
	if (options->persistence != NULL)
		status |= set_switch(device, "persistence mode", on_off(options->persistence),
				     nvml.DeviceSetPersistenceMode);
	if (options->compute_mode != NULL)
		status |= set_compute_mode(device, compute_mode(options->compute_mode));
	if (options->ecc != NULL)
		status |= set_switch(device, "ECC support", on_off(options->ecc), nvml.DeviceSetEccMode);
	if (options->accounting != NULL)
		status |= set_switch(device, "Accounting Mode", on_off(options->accounting),
				     nvml.DeviceSetAccountingMode);
	if (options->mig != NULL)
		status |= set_mig(device, on_off(options->mig));
	if (options->power_limit != NULL)
		status |= say(device, "Power limit was set",
			      NVML(DeviceSetPowerManagementLimit, device,
				   (unsigned int)(strtod(options->power_limit, NULL) * 1000)));
	return status;
}

int smi_set(const struct smi_devices *devices, const struct smi_options *options)
{
	const char *const switches[] = {options->persistence, options->ecc, options->accounting,
					options->mig};
	for (size_t i = 0; i < sizeof(switches) / sizeof(switches[0]); i++)
		if (switches[i] != NULL && on_off(switches[i]) < 0) {
			printf("Invalid value \"%s\": 0 or 1 is wanted.\n", switches[i]);
			return 2;
		}
	if (options->compute_mode != NULL && compute_mode(options->compute_mode) < 0) {
		printf("Invalid compute mode \"%s\": 0 DEFAULT, 2 PROHIBITED or 3 EXCLUSIVE_PROCESS is "
		       "wanted.\n",
		       options->compute_mode);
		return 2;
	}
	int status = 0;
	for (unsigned int i = 0; i < devices->count; i++) {
		int one = devices->device[i].state != NVML_SUCCESS
			      ? (int)devices->device[i].state
			      : set_one(devices->device[i].handle, options);
		status = status != 0 ? status : one;
	}
	if (status == 0)
		printf("All done.\n");
	return status;
}
