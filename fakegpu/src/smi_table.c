/* SPDX-License-Identifier: Apache-2.0
 *
 * nvidia-smi without arguments: the table that everybody knows, and -L.
 */
#include <stdlib.h>
#include <string.h>

#include "smi.h"

#define RULE "+-----------------------------------------------------------------------------------------+\n"
#define COLUMNS \
	"+-----------------------------------------+------------------------+----------------------+\n"

static void head(void)
{
	char driver[NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE] = "N/A", version[16] = "N/A";
	int cuda = 0;
	NVML(SystemGetDriverVersion, driver, sizeof(driver));
	if (NVML(SystemGetCudaDriverVersion_v2, &cuda) == NVML_SUCCESS)
		snprintf(version, sizeof(version), "%d.%d", cuda / 1000, cuda % 1000 / 10);
	printf(
	    RULE
	    "| NVIDIA-SMI %-22.22s Driver Version: %-14.14s CUDA Version: %-9.9s|\n" COLUMNS
	    "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |\n"
	    "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |\n"
	    "|                                         |                        |               MIG M. |\n"
	    "|=========================================+========================+======================|\n",
	    driver, driver, version);
}

/* Used and total MiB, as the driver's own reserve is not a program's use: from the second form where there is
 * one. */
static nvmlReturn_t memory_of(nvmlDevice_t device, unsigned long long *used, unsigned long long *total)
{
	nvmlMemory_v2_t second = {.version = nvmlMemory_v2};
	nvmlMemory_t first;
	nvmlReturn_t result = NVML(DeviceGetMemoryInfo_v2, device, &second);
	if (result == NVML_SUCCESS) {
		*used = second.used >> 20;
		*total = second.total >> 20;
	} else if ((result = NVML(DeviceGetMemoryInfo, device, &first)) == NVML_SUCCESS) {
		*used = first.used >> 20;
		*total = first.total >> 20;
	}
	return result;
}

static void first_line(unsigned int index, nvmlDevice_t device)
{
	char name[NVML_DEVICE_NAME_V2_BUFFER_SIZE] = "Unknown", ecc[24] = "N/A";
	nvmlPciInfo_t pci = {.busId = "N/A"};
	nvmlEnableState_t persistence = NVML_FEATURE_DISABLED, display = NVML_FEATURE_DISABLED, mode, pending;
	unsigned long long errors;
	NVML(DeviceGetName, device, name, sizeof(name));
	NVML(DeviceGetPciInfo_v3, device, &pci);
	NVML(DeviceGetPersistenceMode, device, &persistence);
	NVML(DeviceGetDisplayActive, device, &display);
	if (NVML(DeviceGetEccMode, device, &mode, &pending) == NVML_SUCCESS) {
		if (mode == NVML_FEATURE_DISABLED)
			snprintf(ecc, sizeof(ecc), "Off");
		else if (NVML(DeviceGetTotalEccErrors, device, NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
			      NVML_VOLATILE_ECC, &errors) == NVML_SUCCESS)
			snprintf(ecc, sizeof(ecc), "%llu", errors);
	}
	if (strlen(name) > 27) /* as the real one shortens it */
		memcpy(name + 24, "...", 4);
	printf("| %3u  %-27.27s   %3s  |   %-16.16s %3s | %20s |\n", index, name,
	       persistence == NVML_FEATURE_ENABLED ? "On" : "Off", pci.busId,
	       display == NVML_FEATURE_ENABLED ? "On" : "Off", ecc);
}

static void second_line(nvmlDevice_t device)
{
	char fan[8] = "N/A", heat[8] = "N/A", state[8] = "N/A", power[24] = "N/A / N/A", memory[40] = "N/A",
	     busy[8] = "N/A";
	unsigned int value, limit;
	unsigned long long used, total;
	nvmlPstates_t pstate;
	nvmlUtilization_t rates;
	nvmlComputeMode_t mode;
	const char *mode_text = "N/A";
	if (NVML(DeviceGetFanSpeed, device, &value) == NVML_SUCCESS)
		snprintf(fan, sizeof(fan), "%u%%", value);
	if (NVML(DeviceGetTemperature, device, NVML_TEMPERATURE_GPU, &value) == NVML_SUCCESS)
		snprintf(heat, sizeof(heat), "%uC", value);
	if (NVML(DeviceGetPerformanceState, device, &pstate) == NVML_SUCCESS)
		snprintf(state, sizeof(state), "P%u", (unsigned int)pstate);
	if (NVML(DeviceGetPowerUsage, device, &value) == NVML_SUCCESS &&
	    NVML(DeviceGetEnforcedPowerLimit, device, &limit) == NVML_SUCCESS)
		snprintf(power, sizeof(power), "%uW / %4uW", value / 1000, limit / 1000);
	if (memory_of(device, &used, &total) == NVML_SUCCESS)
		snprintf(memory, sizeof(memory), "%lluMiB / %6lluMiB", used, total);
	if (NVML(DeviceGetUtilizationRates, device, &rates) == NVML_SUCCESS)
		snprintf(busy, sizeof(busy), "%u%%", rates.gpu);
	if (NVML(DeviceGetComputeMode, device, &mode) == NVML_SUCCESS)
		mode_text =
		    mode == NVML_COMPUTEMODE_EXCLUSIVE_PROCESS ? "E. Process" : smi_compute_mode(mode);
	printf("| %3s  %4s  %4s  %22s | %22s | %7s %12s |\n", fan, heat, state, power, memory, busy,
	       mode_text);
}

static void third_line(nvmlDevice_t device)
{
	unsigned int mode, pending;
	const char *text = "N/A";
	if (NVML(DeviceGetMigMode, device, &mode, &pending) == NVML_SUCCESS)
		text = mode != pending ? (mode ? "Enabled*" : "Disabled*") : mode ? "Enabled" : "Disabled";
	printf("|                                         |                        | %20s |\n" COLUMNS, text);
}

static void lost_lines(const struct smi_device *one)
{
	char text[64];
	snprintf(text, sizeof(text), "ERR! %s", smi_unknown(one->state));
	printf("| %3u  %-34.34s | %-22s | %-20s |\n" COLUMNS, one->index, text, "ERR!", "ERR!");
}

/* ---- MIG ---------------------------------------------------------------------------------------------- */

static void mig_line(unsigned int index, unsigned int number, nvmlDevice_t device)
{
	unsigned int gi = 0, ci = 0;
	unsigned long long used = 0, total = 0;
	nvmlBAR1Memory_t bar1 = {0};
	nvmlDeviceAttributes_t what = {0};
	NVML(DeviceGetGpuInstanceId, device, &gi);
	NVML(DeviceGetComputeInstanceId, device, &ci);
	NVML(DeviceGetAttributes_v2, device, &what);
	NVML(DeviceGetBAR1MemoryInfo, device, &bar1);
	memory_of(device, &used, &total);
	printf("| %3u %4u %3u %4u |  %11lluMiB / %6lluMiB   | %3u     0 | %2u  %3u  %3u  %3u  %3u  |\n",
	       index, gi, ci, number, used, total, what.multiprocessorCount, what.sharedCopyEngineCount,
	       what.sharedEncoderCount, what.sharedDecoderCount, what.sharedOfaCount, what.sharedJpegCount);
	printf("|                   |  %11lluMiB / %6lluMiB   |           |                         |\n",
	       bar1.bar1Used >> 20, bar1.bar1Total >> 20);
}

#define MIG_RULE \
	"+-------------------+-------------------------------+-----------+-------------------------+\n"
#define MIG_HEAD                                                                                        \
	"| MIG devices:                                                                            "    \
	"|\n" MIG_RULE                                                                                  \
	"| GPU   GI  CI  MIG |           Shared Memory-Usage |       Vol |         Shared          |\n" \
	"|       ID  ID  Dev |             Shared BAR1-Usage | SM    ECC | CE  ENC  DEC  OFA  JPG  |\n" \
	"|===================+===============================+===========+=========================|\n"

static void mig_devices(const struct smi_devices *devices)
{
	int any = 0, found = 0;
	for (unsigned int i = 0; i < devices->count; i++) {
		unsigned int mode = 0, pending, most = 0;
		if (devices->device[i].state != NVML_SUCCESS ||
		    NVML(DeviceGetMigMode, devices->device[i].handle, &mode, &pending) != NVML_SUCCESS ||
		    !mode)
			continue;
		if (!any++)
			printf("\n" RULE MIG_HEAD);
		NVML(DeviceGetMaxMigDeviceCount, devices->device[i].handle, &most);
		for (unsigned int number = 0; number < most; number++) {
			nvmlDevice_t mig;
			if (NVML(DeviceGetMigDeviceHandleByIndex, devices->device[i].handle, number, &mig) !=
			    NVML_SUCCESS)
				continue;
			mig_line(devices->device[i].index, number, mig);
			printf(MIG_RULE);
			found++;
		}
	}
	if (any && !found)
		printf("|  No MIG devices found                                                              "
		       "     |\n" RULE);
}

/* ---- processes ---------------------------------------------------------------------------------------- */

static void instance_text(unsigned int id, char *text, size_t size)
{
	if (id == 0xffffffffu)
		snprintf(text, size, "N/A");
	else
		snprintf(text, size, "%u", id);
}

static void processes(const struct smi_devices *devices)
{
	int any = 0;
	printf(
	    "\n" RULE
	    "| Processes:                                                                              |\n"
	    "|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |\n"
	    "|        ID   ID                                                               Usage      |\n"
	    "|=========================================================================================|\n");
	for (unsigned int i = 0; i < devices->count; i++) {
		struct smi_process *list = NULL;
		unsigned int count = devices->device[i].state == NVML_SUCCESS
					 ? smi_processes(devices->device[i].handle, &list)
					 : 0;
		for (unsigned int j = 0; j < count; j++, any++) {
			char gi[12], ci[12], name[128], shown[32], memory[24] = "N/A";
			instance_text(list[j].gi, gi, sizeof(gi));
			instance_text(list[j].ci, ci, sizeof(ci));
			smi_process_name(list[j].pid, name, sizeof(name));
			size_t length = strlen(name);
			if (length > 30) /* the end of a path tells more than its beginning */
				snprintf(shown, sizeof(shown), "...%s", name + length - 27);
			else
				snprintf(shown, sizeof(shown), "%s", name);
			if (list[j].bytes != (unsigned long long)NVML_VALUE_NOT_AVAILABLE)
				snprintf(memory, sizeof(memory), "%lluMiB", list[j].bytes >> 20);
			printf("| %4u %4s %4s %16u %6c   %-30s %15s |\n", devices->device[i].index, gi, ci,
			       list[j].pid, list[j].type, shown, memory);
		}
		free(list);
	}
	if (!any)
		printf("|  No running processes found                                                        "
		       "     |\n");
	printf(RULE);
}

int smi_table(const struct smi_devices *devices)
{
	head();
	for (unsigned int i = 0; i < devices->count; i++) {
		const struct smi_device *one = &devices->device[i];
		if (one->state != NVML_SUCCESS) {
			lost_lines(one);
			continue;
		}
		first_line(one->index, one->handle);
		second_line(one->handle);
		third_line(one->handle);
	}
	mig_devices(devices);
	processes(devices);
	return 0;
}

int smi_list(const struct smi_devices *devices)
{
	for (unsigned int i = 0; i < devices->count; i++) {
		const struct smi_device *one = &devices->device[i];
		char name[NVML_DEVICE_NAME_V2_BUFFER_SIZE] = "Unknown",
		     uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE] = "N/A";
		unsigned int most = 0;
		if (one->state != NVML_SUCCESS) {
			printf("Unable to determine the device handle for gpu %u: %s\n", one->index,
			       smi_error(one->state));
			continue;
		}
		NVML(DeviceGetName, one->handle, name, sizeof(name));
		NVML(DeviceGetUUID, one->handle, uuid, sizeof(uuid));
		printf("GPU %u: %s (UUID: %s)\n", one->index, name, uuid);
		NVML(DeviceGetMaxMigDeviceCount, one->handle, &most);
		for (unsigned int number = 0; number < most; number++) {
			nvmlDevice_t mig;
			char mig_name[NVML_DEVICE_NAME_V2_BUFFER_SIZE] = "";
			if (NVML(DeviceGetMigDeviceHandleByIndex, one->handle, number, &mig) != NVML_SUCCESS)
				continue;
			NVML(DeviceGetName, mig, mig_name, sizeof(mig_name));
			NVML(DeviceGetUUID, mig, uuid, sizeof(uuid));
			const char *profile = strstr(mig_name, "MIG ");
			printf("  MIG %-15s Device %2u: (UUID: %s)\n",
			       profile != NULL ? profile + 4 : mig_name, number, uuid);
		}
	}
	return 0;
}
