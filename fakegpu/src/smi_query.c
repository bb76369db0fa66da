/* SPDX-License-Identifier: Apache-2.0
 *
 * nvidia-smi -q, as text or (-x) as XML: one description of what is told, two ways to write it. Element names
 * are those of the real tool's XML, so that what parses the one parses the other.
 */
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "smi.h"

struct out {
	FILE *file;
	int xml, depth;
};

static void indent(const struct out *out)
{
	fprintf(out->file, "%*s", out->depth * (out->xml ? 2 : 4), "");
}

static void escape(FILE *file, const char *text)
{
	for (; *text != '\0'; text++)
		switch (*text) {
		case '<':
			fputs("&lt;", file);
			break;
		case '>':
			fputs("&gt;", file);
			break;
		case '&':
			fputs("&amp;", file);
			break;
		case '"':
			fputs("&quot;", file);
			break;
		default:
			fputc(*text, file);
		}
}

static void open_part(struct out *out, const char *tag, const char *title)
{
	indent(out);
	if (out->xml)
		fprintf(out->file, "<%s>\n", tag);
	else
		fprintf(out->file, "%s\n", title);
	out->depth++;
}

static void close_part(struct out *out, const char *tag)
{
	out->depth--;
	if (!out->xml)
		return;
	indent(out);
	fprintf(out->file, "</%s>\n", tag);
}

/* `result`: whether the value could be had at all. */
__attribute__((format(printf, 5, 6))) static void item(struct out *out, const char *tag, const char *title,
						       nvmlReturn_t result, const char *format, ...)
{
	char text[SMI_TEXT];
	va_list arguments;
	va_start(arguments, format);
	vsnprintf(text, sizeof(text), format, arguments);
	va_end(arguments);
	if (result != NVML_SUCCESS)
		snprintf(text, sizeof(text), "%s", smi_unknown(result));
	indent(out);
	if (out->xml) {
		fprintf(out->file, "<%s>", tag);
		escape(out->file, text);
		fprintf(out->file, "</%s>\n", tag);
	} else {
		fprintf(out->file, "%-*s : %s\n", 45 - out->depth * 4, title, text);
	}
}

/* ---- parts of a card ---------------------------------------------------------------------------------- */

static const char *architecture(nvmlDeviceArchitecture_t value)
{
	static const char *const names[] = {"Unknown",      "Unknown", "Kepler",   "Maxwell",
					    "Pascal",       "Volta",   "Turing",   "Ampere",
					    "Ada Lovelace", "Hopper",  "Blackwell"};
	return value < sizeof(names) / sizeof(names[0]) ? names[value] : "Unknown";
}

#define TEXT_ITEM(out, tag, title, call, device)                                 \
	do {                                                                     \
		char text_[SMI_TEXT] = "";                                       \
		nvmlReturn_t result_ = NVML(call, device, text_, sizeof(text_)); \
		item(out, tag, title, result_, "%s", text_);                     \
	} while (0)
#define NUMBER_ITEM(out, tag, title, format, call, ...)                  \
	do {                                                             \
		unsigned int value_ = 0;                                 \
		nvmlReturn_t result_ = NVML(call, __VA_ARGS__, &value_); \
		item(out, tag, title, result_, format, value_);          \
	} while (0)
#define STATE_ITEM(out, tag, title, call, device)                        \
	do {                                                             \
		nvmlEnableState_t state_ = NVML_FEATURE_DISABLED;        \
		nvmlReturn_t result_ = NVML(call, device, &state_);      \
		item(out, tag, title, result_, "%s", smi_state(state_)); \
	} while (0)
#define WATTS_ITEM(out, tag, title, call, device)                          \
	do {                                                               \
		unsigned int value_ = 0;                                   \
		nvmlReturn_t result_ = NVML(call, device, &value_);        \
		item(out, tag, title, result_, "%.2f W", value_ / 1000.0); \
	} while (0)

static void memory(struct out *out, nvmlDevice_t device)
{
	nvmlMemory_v2_t second = {.version = nvmlMemory_v2};
	nvmlMemory_t first = {0};
	nvmlBAR1Memory_t bar1 = {0};
	nvmlReturn_t result = NVML(DeviceGetMemoryInfo_v2, device, &second), old = NVML_SUCCESS;
	if (result == NVML_ERROR_FUNCTION_NOT_FOUND) {
		old = NVML(DeviceGetMemoryInfo, device, &first);
		second = (nvmlMemory_v2_t){.total = first.total, .used = first.used, .free = first.free};
	} else {
		old = result;
	}
	open_part(out, "fb_memory_usage", "FB Memory Usage");
	item(out, "total", "Total", old, "%llu MiB", second.total >> 20);
	item(out, "reserved", "Reserved", result, "%llu MiB", second.reserved >> 20);
	item(out, "used", "Used", old, "%llu MiB", second.used >> 20);
	item(out, "free", "Free", old, "%llu MiB", second.free >> 20);
	close_part(out, "fb_memory_usage");
	result = NVML(DeviceGetBAR1MemoryInfo, device, &bar1);
	open_part(out, "bar1_memory_usage", "BAR1 Memory Usage");
	item(out, "total", "Total", result, "%llu MiB", bar1.bar1Total >> 20);
	item(out, "used", "Used", result, "%llu MiB", bar1.bar1Used >> 20);
	item(out, "free", "Free", result, "%llu MiB", bar1.bar1Free >> 20);
	close_part(out, "bar1_memory_usage");
}

static void pci(struct out *out, nvmlDevice_t device)
{
	nvmlPciInfo_t info = {0};
	nvmlReturn_t result = NVML(DeviceGetPciInfo_v3, device, &info);
	open_part(out, "pci", "PCI");
	item(out, "pci_bus", "Bus", result, "0x%02X", info.bus);
	item(out, "pci_device", "Device", result, "0x%02X", info.device);
	item(out, "pci_domain", "Domain", result, "0x%04X", info.domain);
	item(out, "pci_device_id", "Device Id", result, "0x%08X", info.pciDeviceId);
	item(out, "pci_bus_id", "Bus Id", result, "%s", info.busId);
	item(out, "pci_sub_system_id", "Sub System Id", result, "0x%08X", info.pciSubSystemId);
	open_part(out, "pci_gpu_link_info", "GPU Link Info");
	open_part(out, "pcie_gen", "PCIe Generation");
	NUMBER_ITEM(out, "max_link_gen", "Max", "%u", DeviceGetMaxPcieLinkGeneration, device);
	NUMBER_ITEM(out, "current_link_gen", "Current", "%u", DeviceGetCurrPcieLinkGeneration, device);
	close_part(out, "pcie_gen");
	open_part(out, "link_widths", "Link Width");
	NUMBER_ITEM(out, "max_link_width", "Max", "%ux", DeviceGetMaxPcieLinkWidth, device);
	NUMBER_ITEM(out, "current_link_width", "Current", "%ux", DeviceGetCurrPcieLinkWidth, device);
	close_part(out, "link_widths");
	close_part(out, "pci_gpu_link_info");
	close_part(out, "pci");
}

static void utilization(struct out *out, nvmlDevice_t device)
{
	nvmlUtilization_t rates = {0};
	unsigned int value = 0, period;
	nvmlReturn_t result = NVML(DeviceGetUtilizationRates, device, &rates);
	open_part(out, "utilization", "Utilization");
	item(out, "gpu_util", "GPU", result, "%u %%", rates.gpu);
	item(out, "memory_util", "Memory", result, "%u %%", rates.memory);
	result = NVML(DeviceGetEncoderUtilization, device, &value, &period);
	item(out, "encoder_util", "Encoder", result, "%u %%", value);
	result = NVML(DeviceGetDecoderUtilization, device, &value, &period);
	item(out, "decoder_util", "Decoder", result, "%u %%", value);
	close_part(out, "utilization");
}

static void ecc(struct out *out, nvmlDevice_t device)
{
	nvmlEnableState_t current = NVML_FEATURE_DISABLED, pending = NVML_FEATURE_DISABLED;
	nvmlReturn_t result = NVML(DeviceGetEccMode, device, &current, &pending);
	open_part(out, "ecc_mode", "ECC Mode");
	item(out, "current_ecc", "Current", result, "%s", smi_state(current));
	item(out, "pending_ecc", "Pending", result, "%s", smi_state(pending));
	close_part(out, "ecc_mode");
	open_part(out, "ecc_errors", "ECC Errors");
	for (int aggregate = 0; aggregate < 2; aggregate++) {
		unsigned long long corrected = 0, uncorrected = 0;
		nvmlEccCounterType_t type = aggregate ? NVML_AGGREGATE_ECC : NVML_VOLATILE_ECC;
		result =
		    NVML(DeviceGetTotalEccErrors, device, NVML_MEMORY_ERROR_TYPE_CORRECTED, type, &corrected);
		nvmlReturn_t other = NVML(DeviceGetTotalEccErrors, device, NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
					  type, &uncorrected);
		open_part(out, aggregate ? "aggregate" : "volatile", aggregate ? "Aggregate" : "Volatile");
		item(out, "dram_correctable", "DRAM Correctable", result, "%llu", corrected);
		item(out, "dram_uncorrectable", "DRAM Uncorrectable", other, "%llu", uncorrected);
		close_part(out, aggregate ? "aggregate" : "volatile");
	}
	close_part(out, "ecc_errors");
}

static void heat_and_power(struct out *out, nvmlDevice_t device)
{
	unsigned int least = 0, most = 0;
	open_part(out, "temperature", "Temperature");
	NUMBER_ITEM(out, "gpu_temp", "GPU Current Temp", "%u C", DeviceGetTemperature, device,
		    NVML_TEMPERATURE_GPU);
	NUMBER_ITEM(out, "gpu_temp_max_threshold", "GPU Shutdown Temp", "%u C", DeviceGetTemperatureThreshold,
		    device, NVML_TEMPERATURE_THRESHOLD_SHUTDOWN);
	NUMBER_ITEM(out, "gpu_temp_slow_threshold", "GPU Slowdown Temp", "%u C",
		    DeviceGetTemperatureThreshold, device, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN);
	close_part(out, "temperature");
	nvmlReturn_t result = NVML(DeviceGetPowerManagementLimitConstraints, device, &least, &most);
	open_part(out, "gpu_power_readings", "GPU Power Readings");
	WATTS_ITEM(out, "power_draw", "Power Draw", DeviceGetPowerUsage, device);
	WATTS_ITEM(out, "current_power_limit", "Current Power Limit", DeviceGetEnforcedPowerLimit, device);
	WATTS_ITEM(out, "requested_power_limit", "Requested Power Limit", DeviceGetPowerManagementLimit,
		   device);
	WATTS_ITEM(out, "default_power_limit", "Default Power Limit", DeviceGetPowerManagementDefaultLimit,
		   device);
	item(out, "min_power_limit", "Min Power Limit", result, "%.2f W", least / 1000.0);
	item(out, "max_power_limit", "Max Power Limit", result, "%.2f W", most / 1000.0);
	close_part(out, "gpu_power_readings");
}

static void clocks(struct out *out, nvmlDevice_t device)
{
	open_part(out, "clocks", "Clocks");
	NUMBER_ITEM(out, "graphics_clock", "Graphics", "%u MHz", DeviceGetClockInfo, device,
		    NVML_CLOCK_GRAPHICS);
	NUMBER_ITEM(out, "sm_clock", "SM", "%u MHz", DeviceGetClockInfo, device, NVML_CLOCK_SM);
	NUMBER_ITEM(out, "mem_clock", "Memory", "%u MHz", DeviceGetClockInfo, device, NVML_CLOCK_MEM);
	NUMBER_ITEM(out, "video_clock", "Video", "%u MHz", DeviceGetClockInfo, device, NVML_CLOCK_VIDEO);
	close_part(out, "clocks");
	open_part(out, "max_clocks", "Max Clocks");
	NUMBER_ITEM(out, "graphics_clock", "Graphics", "%u MHz", DeviceGetMaxClockInfo, device,
		    NVML_CLOCK_GRAPHICS);
	NUMBER_ITEM(out, "sm_clock", "SM", "%u MHz", DeviceGetMaxClockInfo, device, NVML_CLOCK_SM);
	NUMBER_ITEM(out, "mem_clock", "Memory", "%u MHz", DeviceGetMaxClockInfo, device, NVML_CLOCK_MEM);
	close_part(out, "max_clocks");
}

static void mig(struct out *out, nvmlDevice_t device)
{
	unsigned int current = 0, pending = 0, most = 0;
	nvmlReturn_t result = NVML(DeviceGetMigMode, device, &current, &pending);
	open_part(out, "mig_mode", "MIG Mode");
	item(out, "current_mig", "Current", result, "%s", current ? "Enabled" : "Disabled");
	item(out, "pending_mig", "Pending", result, "%s", pending ? "Enabled" : "Disabled");
	close_part(out, "mig_mode");
	open_part(out, "mig_devices", "MIG Devices");
	if (current)
		NVML(DeviceGetMaxMigDeviceCount, device, &most);
	for (unsigned int i = 0; i < most; i++) {
		nvmlDevice_t child;
		nvmlDeviceAttributes_t what = {0};
		if (NVML(DeviceGetMigDeviceHandleByIndex, device, i, &child) != NVML_SUCCESS)
			continue;
		open_part(out, "mig_device", "MIG Device");
		item(out, "index", "Index", NVML_SUCCESS, "%u", i);
		NUMBER_ITEM(out, "gpu_instance_id", "GPU Instance ID", "%u", DeviceGetGpuInstanceId, child);
		NUMBER_ITEM(out, "compute_instance_id", "Compute Instance ID", "%u",
			    DeviceGetComputeInstanceId, child);
		TEXT_ITEM(out, "uuid", "UUID", DeviceGetUUID, child);
		result = NVML(DeviceGetAttributes_v2, child, &what);
		item(out, "multiprocessor_count", "Multiprocessor Count", result, "%u",
		     what.multiprocessorCount);
		memory(out, child);
		close_part(out, "mig_device");
	}
	close_part(out, "mig_devices");
}

static void processes(struct out *out, nvmlDevice_t device)
{
	struct smi_process *list;
	unsigned int count = smi_processes(device, &list);
	open_part(out, "processes", "Processes");
	for (unsigned int i = 0; i < count; i++) {
		char name[SMI_TEXT];
		smi_process_name(list[i].pid, name, sizeof(name));
		open_part(out, "process_info", "Process");
		item(out, "gpu_instance_id", "GPU instance ID",
		     list[i].gi == 0xffffffffu ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS, "%u", list[i].gi);
		item(out, "compute_instance_id", "Compute instance ID",
		     list[i].ci == 0xffffffffu ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS, "%u", list[i].ci);
		item(out, "pid", "Process ID", NVML_SUCCESS, "%u", list[i].pid);
		item(out, "type", "Type", NVML_SUCCESS, "%c", list[i].type);
		item(out, "process_name", "Name", NVML_SUCCESS, "%s", name);
		item(out, "used_memory", "Used GPU Memory",
		     list[i].bytes == (unsigned long long)NVML_VALUE_NOT_AVAILABLE ? NVML_ERROR_NOT_SUPPORTED
										   : NVML_SUCCESS,
		     "%llu MiB", list[i].bytes >> 20);
		close_part(out, "process_info");
	}
	close_part(out, "processes");
	free(list);
}

static void card(struct out *out, nvmlDevice_t device)
{
	nvmlDeviceArchitecture_t arch = 0;
	nvmlComputeMode_t mode = NVML_COMPUTEMODE_DEFAULT;
	nvmlPstates_t pstate = NVML_PSTATE_UNKNOWN;
	TEXT_ITEM(out, "product_name", "Product Name", DeviceGetName, device);
	nvmlReturn_t result = NVML(DeviceGetArchitecture, device, &arch);
	item(out, "product_architecture", "Product Architecture", result, "%s", architecture(arch));
	STATE_ITEM(out, "display_mode", "Display Mode", DeviceGetDisplayMode, device);
	STATE_ITEM(out, "display_active", "Display Active", DeviceGetDisplayActive, device);
	STATE_ITEM(out, "persistence_mode", "Persistence Mode", DeviceGetPersistenceMode, device);
	mig(out, device);
	STATE_ITEM(out, "accounting_mode", "Accounting Mode", DeviceGetAccountingMode, device);
	TEXT_ITEM(out, "serial", "Serial Number", DeviceGetSerial, device);
	TEXT_ITEM(out, "uuid", "GPU UUID", DeviceGetUUID, device);
	NUMBER_ITEM(out, "minor_number", "Minor Number", "%u", DeviceGetMinorNumber, device);
	TEXT_ITEM(out, "vbios_version", "VBIOS Version", DeviceGetVbiosVersion, device);
	TEXT_ITEM(out, "board_part_number", "Board Part Number", DeviceGetBoardPartNumber, device);
	pci(out, device);
	NUMBER_ITEM(out, "fan_speed", "Fan Speed", "%u %%", DeviceGetFanSpeed, device);
	result = NVML(DeviceGetPerformanceState, device, &pstate);
	item(out, "performance_state", "Performance State", result, "P%u", (unsigned int)pstate);
	memory(out, device);
	result = NVML(DeviceGetComputeMode, device, &mode);
	item(out, "compute_mode", "Compute Mode", result, "%s", smi_compute_mode(mode));
	utilization(out, device);
	ecc(out, device);
	heat_and_power(out, device);
	clocks(out, device);
	processes(out, device);
}

static void one_card(struct out *out, const struct smi_device *device)
{
	nvmlPciInfo_t info = {.busId = "unknown"};
	if (device->state == NVML_SUCCESS)
		NVML(DeviceGetPciInfo_v3, device->handle, &info);
	indent(out);
	fprintf(out->file, out->xml ? "<gpu id=\"%s\">\n" : "GPU %s\n", info.busId);
	out->depth++;
	if (device->state == NVML_SUCCESS)
		card(out, device->handle);
	else
		item(out, "product_name", "Product Name", device->state, "%s", "");
	close_part(out, "gpu");
	if (!out->xml)
		fputc('\n', out->file);
}

int smi_query(const struct smi_devices *devices, const struct smi_options *options)
{
	struct out out = {.file = stdout, .xml = options->xml};
	char driver[NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE] = "", when[64];
	int cuda = 0;
	time_t now = time(NULL);
	struct tm parts;
	if (options->file != NULL && (out.file = fopen(options->file, "we")) == NULL) {
		printf("Cannot write %s.\n", options->file);
		return 2;
	}
	strftime(when, sizeof(when), "%a %b %e %H:%M:%S %Y", localtime_r(&now, &parts));
	if (out.xml)
		fputs("<?xml version=\"1.0\" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM \"nvsmi_device_v12.dtd\">\n",
		      out.file);
	else
		fputs("\n==============NVSMI LOG==============\n\n", out.file);
	if (out.xml)
		open_part(&out, "nvidia_smi_log", "");
	item(&out, "timestamp", "Timestamp", NVML_SUCCESS, "%s", when);
	nvmlReturn_t result = NVML(SystemGetDriverVersion, driver, sizeof(driver));
	item(&out, "driver_version", "Driver Version", result, "%s", driver);
	result = NVML(SystemGetCudaDriverVersion_v2, &cuda);
	item(&out, "cuda_version", "CUDA Version", result, "%d.%d", cuda / 1000, cuda % 1000 / 10);
	if (!out.xml)
		fputc('\n', out.file);
	item(&out, "attached_gpus", "Attached GPUs", NVML_SUCCESS, "%u", devices->count);
	for (unsigned int i = 0; i < devices->count; i++)
		one_card(&out, &devices->device[i]);
	if (out.xml)
		close_part(&out, "nvidia_smi_log");
	if (out.file != stdout && fclose(out.file) != 0) {
		printf("Cannot write %s.\n", options->file);
		return 2;
	}
	return 0;
}
