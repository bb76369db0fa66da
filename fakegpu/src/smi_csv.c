/* SPDX-License-Identifier: Apache-2.0
 *
 * nvidia-smi --query-gpu and --query-compute-apps: comma separated values, which scripts read.
 */
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "smi.h"

/* ---- figures: each writes its text without a unit ---------------------------------------------------------
 */

typedef nvmlReturn_t (*figure)(nvmlDevice_t, char *, size_t);

#define TEXT(function, call)                                                       \
	static nvmlReturn_t function(nvmlDevice_t device, char *text, size_t size) \
	{                                                                          \
		return NVML(call, device, text, (unsigned int)size);               \
	}
#define VALUE(function, type, format, expression, call, ...)                       \
	static nvmlReturn_t function(nvmlDevice_t device, char *text, size_t size) \
	{                                                                          \
		type value;                                                        \
		memset(&value, 0, sizeof(value));                                  \
		nvmlReturn_t result = NVML(call, device, ##__VA_ARGS__, &value);   \
		if (result == NVML_SUCCESS)                                        \
			snprintf(text, size, format, expression);                  \
		return result;                                                     \
	}
#define NUMBER(function, call, ...) VALUE(function, unsigned int, "%u", value, call, ##__VA_ARGS__)
#define WATTS(function, call)       VALUE(function, unsigned int, "%.2f", value / 1000.0, call)
#define STATE(function, call)       VALUE(function, nvmlEnableState_t, "%s", smi_state(value), call)
#define PCI(function, format, part) VALUE(function, nvmlPciInfo_t, format, part, DeviceGetPciInfo_v3)

TEXT(name, DeviceGetName)
TEXT(uuid, DeviceGetUUID)
TEXT(serial, DeviceGetSerial)
TEXT(vbios, DeviceGetVbiosVersion)
TEXT(inforom, DeviceGetInforomImageVersion)
NUMBER(number, DeviceGetIndex)
PCI(bus_id, "%s", value.busId)
PCI(pci_domain, "0x%04X", value.domain)
PCI(pci_bus, "0x%02X", value.bus)
PCI(pci_device, "0x%02X", value.device)
PCI(pci_device_id, "0x%08X", value.pciDeviceId)
PCI(pci_sub_device_id, "0x%08X", value.pciSubSystemId)
STATE(persistence, DeviceGetPersistenceMode)
STATE(display_mode, DeviceGetDisplayMode)
STATE(display_active, DeviceGetDisplayActive)
STATE(accounting, DeviceGetAccountingMode)
VALUE(compute_mode, nvmlComputeMode_t, "%s", smi_compute_mode(value), DeviceGetComputeMode)
VALUE(memory_total, nvmlMemory_t, "%llu", value.total >> 20, DeviceGetMemoryInfo)
VALUE(memory_free, nvmlMemory_t, "%llu", value.free >> 20, DeviceGetMemoryInfo)
VALUE(utilization, nvmlUtilization_t, "%u", value.gpu, DeviceGetUtilizationRates)
VALUE(memory_utilization, nvmlUtilization_t, "%u", value.memory, DeviceGetUtilizationRates)
NUMBER(temperature, DeviceGetTemperature, NVML_TEMPERATURE_GPU)
NUMBER(fan, DeviceGetFanSpeed)
WATTS(power, DeviceGetPowerUsage)
WATTS(power_limit, DeviceGetPowerManagementLimit)
WATTS(enforced_limit, DeviceGetEnforcedPowerLimit)
WATTS(default_limit, DeviceGetPowerManagementDefaultLimit)
NUMBER(clock_graphics, DeviceGetClockInfo, NVML_CLOCK_GRAPHICS)
NUMBER(clock_sm, DeviceGetClockInfo, NVML_CLOCK_SM)
NUMBER(clock_memory, DeviceGetClockInfo, NVML_CLOCK_MEM)
NUMBER(clock_video, DeviceGetClockInfo, NVML_CLOCK_VIDEO)
NUMBER(max_graphics, DeviceGetMaxClockInfo, NVML_CLOCK_GRAPHICS)
NUMBER(max_sm, DeviceGetMaxClockInfo, NVML_CLOCK_SM)
NUMBER(max_memory, DeviceGetMaxClockInfo, NVML_CLOCK_MEM)
NUMBER(application_graphics, DeviceGetApplicationsClock, NVML_CLOCK_GRAPHICS)
NUMBER(application_memory, DeviceGetApplicationsClock, NVML_CLOCK_MEM)
VALUE(pstate, nvmlPstates_t, "P%u", (unsigned int)value, DeviceGetPerformanceState)
VALUE(reasons, unsigned long long, "0x%016llx", value, DeviceGetCurrentClocksThrottleReasons)
NUMBER(link_generation, DeviceGetCurrPcieLinkGeneration)
NUMBER(link_generation_max, DeviceGetMaxPcieLinkGeneration)
NUMBER(link_width, DeviceGetCurrPcieLinkWidth)
NUMBER(link_width_max, DeviceGetMaxPcieLinkWidth)
VALUE(ecc_corrected, unsigned long long, "%llu", value, DeviceGetTotalEccErrors,
      NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_VOLATILE_ECC)
VALUE(ecc_uncorrected, unsigned long long, "%llu", value, DeviceGetTotalEccErrors,
      NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC)
VALUE(ecc_corrected_ever, unsigned long long, "%llu", value, DeviceGetTotalEccErrors,
      NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_AGGREGATE_ECC)
VALUE(ecc_uncorrected_ever, unsigned long long, "%llu", value, DeviceGetTotalEccErrors,
      NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_AGGREGATE_ECC)

/* Two values, of which the first or the second counts. */
#define PAIR(function, type, format, expression, call)                             \
	static nvmlReturn_t function(nvmlDevice_t device, char *text, size_t size) \
	{                                                                          \
		type first = 0, second = 0;                                        \
		nvmlReturn_t result = NVML(call, device, &first, &second);         \
		if (result == NVML_SUCCESS)                                        \
			snprintf(text, size, format, expression);                  \
		return result;                                                     \
	}
PAIR(ecc_mode, nvmlEnableState_t, "%s", smi_state(first), DeviceGetEccMode)
PAIR(ecc_pending, nvmlEnableState_t, "%s", smi_state(second), DeviceGetEccMode)
PAIR(mig_mode, unsigned int, "%s", first ? "Enabled" : "Disabled", DeviceGetMigMode)
PAIR(mig_pending, unsigned int, "%s", second ? "Enabled" : "Disabled", DeviceGetMigMode)
PAIR(encoder, unsigned int, "%u", first, DeviceGetEncoderUtilization)
PAIR(decoder, unsigned int, "%u", first, DeviceGetDecoderUtilization)
PAIR(least_limit, unsigned int, "%.2f", first / 1000.0, DeviceGetPowerManagementLimitConstraints)
PAIR(most_limit, unsigned int, "%.2f", second / 1000.0, DeviceGetPowerManagementLimitConstraints)

static nvmlReturn_t compute_capability(nvmlDevice_t device, char *text, size_t size)
{
	int major = 0, minor = 0;
	nvmlReturn_t result = NVML(DeviceGetCudaComputeCapability, device, &major, &minor);
	if (result == NVML_SUCCESS)
		snprintf(text, size, "%d.%d", major, minor);
	return result;
}

/* Used and reserved from the second form; without it everything that is not free is used. */
static nvmlReturn_t memory_part(nvmlDevice_t device, int reserved, char *text, size_t size)
{
	nvmlMemory_v2_t second = {.version = nvmlMemory_v2};
	nvmlMemory_t first;
	nvmlReturn_t result = NVML(DeviceGetMemoryInfo_v2, device, &second);
	if (result == NVML_SUCCESS)
		snprintf(text, size, "%llu", (reserved ? second.reserved : second.used) >> 20);
	else if (!reserved && (result = NVML(DeviceGetMemoryInfo, device, &first)) == NVML_SUCCESS)
		snprintf(text, size, "%llu", first.used >> 20);
	return result;
}

static nvmlReturn_t memory_used(nvmlDevice_t device, char *text, size_t size)
{
	return memory_part(device, 0, text, size);
}

static nvmlReturn_t memory_reserved(nvmlDevice_t device, char *text, size_t size)
{
	return memory_part(device, 1, text, size);
}

static nvmlReturn_t driver_version(nvmlDevice_t device, char *text, size_t size)
{
	(void)device;
	return NVML(SystemGetDriverVersion, text, (unsigned int)size);
}

static nvmlReturn_t device_count(nvmlDevice_t device, char *text, size_t size)
{
	unsigned int count = 0;
	(void)device;
	nvmlReturn_t result = NVML(DeviceGetCount_v2, &count);
	if (result == NVML_SUCCESS)
		snprintf(text, size, "%u", count);
	return result;
}

static nvmlReturn_t now(nvmlDevice_t device, char *text, size_t size)
{
	struct timespec time;
	struct tm parts;
	(void)device;
	clock_gettime(CLOCK_REALTIME, &time);
	localtime_r(&time.tv_sec, &parts);
	size_t used = strftime(text, size, "%Y/%m/%d %H:%M:%S", &parts);
	snprintf(text + used, size - used, ".%03ld", time.tv_nsec / 1000000);
	return NVML_SUCCESS;
}

static const struct field {
	const char *name, *other; /* the second name, or NULL */
	const char *unit;
	figure tell;
} fields[] = {
    {"timestamp", NULL, "", now},
    {"driver_version", NULL, "", driver_version},
    {"count", NULL, "", device_count},
    {"name", "gpu_name", "", name},
    {"serial", "gpu_serial", "", serial},
    {"uuid", "gpu_uuid", "", uuid},
    {"index", NULL, "", number},
    {"pci.bus_id", "gpu_bus_id", "", bus_id},
    {"pci.domain", NULL, "", pci_domain},
    {"pci.bus", NULL, "", pci_bus},
    {"pci.device", NULL, "", pci_device},
    {"pci.device_id", NULL, "", pci_device_id},
    {"pci.sub_device_id", NULL, "", pci_sub_device_id},
    {"vbios_version", NULL, "", vbios},
    {"inforom.img", "inforom.image", "", inforom},
    {"compute_cap", NULL, "", compute_capability},
    {"persistence_mode", NULL, "", persistence},
    {"compute_mode", NULL, "", compute_mode},
    {"display_mode", NULL, "", display_mode},
    {"display_active", NULL, "", display_active},
    {"accounting.mode", NULL, "", accounting},
    {"memory.total", NULL, "MiB", memory_total},
    {"memory.reserved", NULL, "MiB", memory_reserved},
    {"memory.used", NULL, "MiB", memory_used},
    {"memory.free", NULL, "MiB", memory_free},
    {"utilization.gpu", NULL, "%", utilization},
    {"utilization.memory", NULL, "%", memory_utilization},
    {"utilization.encoder", NULL, "%", encoder},
    {"utilization.decoder", NULL, "%", decoder},
    {"temperature.gpu", NULL, "", temperature},
    {"fan.speed", NULL, "%", fan},
    {"pstate", NULL, "", pstate},
    {"power.draw", NULL, "W", power},
    {"power.limit", NULL, "W", power_limit},
    {"enforced.power.limit", NULL, "W", enforced_limit},
    {"power.default_limit", NULL, "W", default_limit},
    {"power.min_limit", NULL, "W", least_limit},
    {"power.max_limit", NULL, "W", most_limit},
    {"clocks.current.graphics", "clocks.gr", "MHz", clock_graphics},
    {"clocks.current.sm", "clocks.sm", "MHz", clock_sm},
    {"clocks.current.memory", "clocks.mem", "MHz", clock_memory},
    {"clocks.current.video", "clocks.video", "MHz", clock_video},
    {"clocks.max.graphics", "clocks.max.gr", "MHz", max_graphics},
    {"clocks.max.sm", NULL, "MHz", max_sm},
    {"clocks.max.memory", "clocks.max.mem", "MHz", max_memory},
    {"clocks.applications.graphics", "clocks.applications.gr", "MHz", application_graphics},
    {"clocks.applications.memory", "clocks.applications.mem", "MHz", application_memory},
    {"clocks_throttle_reasons.active", "clocks_event_reasons.active", "", reasons},
    {"pcie.link.gen.current", NULL, "", link_generation},
    {"pcie.link.gen.max", NULL, "", link_generation_max},
    {"pcie.link.width.current", NULL, "", link_width},
    {"pcie.link.width.max", NULL, "", link_width_max},
    {"ecc.mode.current", NULL, "", ecc_mode},
    {"ecc.mode.pending", NULL, "", ecc_pending},
    {"ecc.errors.corrected.volatile.total", NULL, "", ecc_corrected},
    {"ecc.errors.uncorrected.volatile.total", NULL, "", ecc_uncorrected},
    {"ecc.errors.corrected.aggregate.total", NULL, "", ecc_corrected_ever},
    {"ecc.errors.uncorrected.aggregate.total", NULL, "", ecc_uncorrected_ever},
    {"mig.mode.current", NULL, "", mig_mode},
    {"mig.mode.pending", NULL, "", mig_pending},
};
#define FIELD_COUNT (sizeof(fields) / sizeof(fields[0]))

int smi_help_query_gpu(void)
{
	printf("List of valid properties to query for the switch \"--query-gpu=\":\n\n");
	for (size_t i = 0; i < FIELD_COUNT; i++)
		printf(fields[i].other != NULL ? "\"%s\" or \"%s\"\n" : "\"%s\"\n", fields[i].name,
		       fields[i].other);
	return 0;
}

/* ---- the command line --------------------------------------------------------------------------------- */

struct shape {
	int header, units;
};

static int read_shape(const char *format, struct shape *shape)
{
	char list[256];
	int csv = 0;
	*shape = (struct shape){1, 1};
	snprintf(list, sizeof(list), "%s", format != NULL ? format : "");
	for (char *rest = list, *word; (word = strsep(&rest, ",")) != NULL;) {
		while (*word == ' ')
			word++;
		csv |= strcmp(word, "csv") == 0;
		shape->header &= strcmp(word, "noheader") != 0;
		shape->units &= strcmp(word, "nounits") != 0;
	}
	if (!csv)
		printf("\"--format=\" switch is missing. Supported values: csv, noheader, nounits\n");
	return csv;
}

#define MOST_COLUMNS 128u

static const struct field *find(const char *word)
{
	for (size_t i = 0; i < FIELD_COUNT; i++)
		if (strcmp(fields[i].name, word) == 0 ||
		    (fields[i].other != NULL && strcmp(fields[i].other, word) == 0))
			return &fields[i];
	return NULL;
}

static void title(const char *asked, const char *unit, const struct shape *shape, int first)
{
	printf(first ? "%s" : ", %s", asked);
	if (*unit != '\0' && shape->units)
		printf(" [%s]", unit);
}

static void cell(nvmlReturn_t result, const char *text, const char *unit, const struct shape *shape,
		 int first)
{
	printf("%s", first ? "" : ", ");
	if (result != NVML_SUCCESS)
		printf("[%s]", smi_unknown(result));
	else if (*unit != '\0' && shape->units)
		printf("%s %s", text, unit);
	else
		printf("%s", text);
}

int smi_csv_gpu(const struct smi_devices *devices, const struct smi_options *options)
{
	const struct field *column[MOST_COLUMNS];
	const char *asked[MOST_COLUMNS];
	unsigned int columns = 0;
	struct shape shape;
	static char list[8192];
	if (!read_shape(options->format, &shape))
		return 2;
	snprintf(list, sizeof(list), "%s", options->query_gpu);
	for (char *rest = list, *word; (word = strsep(&rest, ",")) != NULL && columns < MOST_COLUMNS;) {
		while (*word == ' ')
			word++;
		column[columns] = find(word);
		asked[columns] = word;
		if (column[columns++] == NULL) {
			printf("Field \"%s\" is not a valid field to query.\n\n", word);
			return 2;
		}
	}
	for (unsigned int i = 0; shape.header && i < columns; i++)
		title(asked[i], column[i]->unit, &shape, i == 0);
	if (shape.header)
		printf("\n");
	int status = 0;
	for (unsigned int d = 0; d < devices->count; d++) {
		for (unsigned int i = 0; i < columns; i++) {
			char text[SMI_TEXT] = "";
			nvmlReturn_t result = devices->device[d].state;
			if (result == NVML_SUCCESS)
				result = column[i]->tell(devices->device[d].handle, text, sizeof(text));
			cell(result, text, column[i]->unit, &shape, i == 0);
			if (result == NVML_ERROR_GPU_IS_LOST)
				status = (int)result;
		}
		printf("\n");
	}
	return status;
}

/* ---- processes ---------------------------------------------------------------------------------------- */

enum app_field { APP_TIME, APP_GPU_NAME, APP_BUS_ID, APP_SERIAL, APP_UUID, APP_PID, APP_NAME, APP_MEMORY };

static const struct {
	const char *name, *other;
	enum app_field field;
} app_fields[] = {
    {"timestamp", NULL, APP_TIME},      {"gpu_name", NULL, APP_GPU_NAME},
    {"gpu_bus_id", NULL, APP_BUS_ID},   {"gpu_serial", NULL, APP_SERIAL},
    {"gpu_uuid", NULL, APP_UUID},       {"pid", NULL, APP_PID},
    {"process_name", "name", APP_NAME}, {"used_gpu_memory", "used_memory", APP_MEMORY},
};
#define APP_FIELD_COUNT (sizeof(app_fields) / sizeof(app_fields[0]))

static void app_cell(enum app_field field, nvmlDevice_t device, const struct smi_process *process,
		     const struct shape *shape, int first)
{
	static const figure figures[] = {[APP_TIME] = now,
					 [APP_GPU_NAME] = name,
					 [APP_BUS_ID] = bus_id,
					 [APP_SERIAL] = serial,
					 [APP_UUID] = uuid};
	char text[SMI_TEXT] = "";
	nvmlReturn_t result = NVML_SUCCESS;
	if (field == APP_PID)
		snprintf(text, sizeof(text), "%u", process->pid);
	else if (field == APP_NAME)
		smi_process_name(process->pid, text, sizeof(text));
	else if (field == APP_MEMORY && process->bytes == (unsigned long long)NVML_VALUE_NOT_AVAILABLE)
		result = NVML_ERROR_NOT_SUPPORTED;
	else if (field == APP_MEMORY)
		snprintf(text, sizeof(text), "%llu", process->bytes >> 20);
	else
		result = figures[field](device, text, sizeof(text));
	cell(result, text, field == APP_MEMORY ? "MiB" : "", shape, first);
}

int smi_csv_apps(const struct smi_devices *devices, const struct smi_options *options)
{
	enum app_field column[MOST_COLUMNS];
	unsigned int columns = 0;
	struct shape shape;
	static char list[4096];
	if (!read_shape(options->format, &shape))
		return 2;
	snprintf(list, sizeof(list), "%s", options->query_apps);
	for (char *rest = list, *word; (word = strsep(&rest, ",")) != NULL && columns < MOST_COLUMNS;) {
		size_t at = 0;
		while (*word == ' ')
			word++;
		while (at < APP_FIELD_COUNT && strcmp(app_fields[at].name, word) != 0 &&
		       (app_fields[at].other == NULL || strcmp(app_fields[at].other, word) != 0))
			at++;
		if (at == APP_FIELD_COUNT) {
			printf("Field \"%s\" is not a valid field to query.\n\n", word);
			return 2;
		}
		if (shape.header)
			title(word, app_fields[at].field == APP_MEMORY ? "MiB" : "", &shape, columns == 0);
		column[columns++] = app_fields[at].field;
	}
	if (shape.header)
		printf("\n");
	for (unsigned int d = 0; d < devices->count; d++) {
		struct smi_process *processes = NULL;
		unsigned int count = devices->device[d].state == NVML_SUCCESS
					 ? smi_processes(devices->device[d].handle, &processes)
					 : 0;
		for (unsigned int i = 0; i < count; i++) {
			if (processes[i].type == 'G')
				continue;
			for (unsigned int c = 0; c < columns; c++)
				app_cell(column[c], devices->device[d].handle, &processes[i], &shape, c == 0);
			printf("\n");
		}
		free(processes);
	}
	return 0;
}
