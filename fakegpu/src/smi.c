/* SPDX-License-Identifier: Apache-2.0 */
#include "smi.h"

#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "NVIDIA System Management Interface (Aliquot's, on whatever libnvidia-ml.so.1 is found)\n\n"
    "  nvidia-smi                                   table of cards and processes\n"
    "  nvidia-smi -L                                list of cards and MIG devices\n"
    "  nvidia-smi -q [-x] [-f FILE]                 everything, as text or XML\n"
    "  nvidia-smi --query-gpu=F,… --format=csv[,noheader][,nounits]\n"
    "  nvidia-smi --query-compute-apps=F,… --format=csv[,noheader][,nounits]\n"
    "  nvidia-smi --help-query-gpu                  the fields of --query-gpu\n"
    "  nvidia-smi topo -m                           how cards are joined\n"
    "  nvidia-smi mig -lgip | -lgi | -lcip | -lci   MIG profiles and instances\n"
    "  nvidia-smi mig -cgi P,… [-C] | -cci [P,…] [-gi N] | -dci [-gi N] [-ci N] | -dgi [-gi N]\n"
    "  nvidia-smi [-pm 0|1] [-c 0|2|3] [-mig 0|1] [-e 0|1] [-pl WATTS] [-am 0|1]\n"
    "  with -i INDEX|UUID|BUS-ID,… for some cards only\n";

const char *smi_unknown(nvmlReturn_t result)
{
	switch (result) {
	case NVML_ERROR_GPU_IS_LOST:
		return "GPU is lost";
	case NVML_ERROR_NO_PERMISSION:
		return "Insufficient Permissions";
	case NVML_ERROR_NOT_SUPPORTED:
	case NVML_ERROR_FUNCTION_NOT_FOUND:
	case NVML_ERROR_NOT_FOUND:
		return "N/A";
	default:
		return "Unknown Error";
	}
}

const char *smi_compute_mode(nvmlComputeMode_t mode)
{
	switch (mode) {
	case NVML_COMPUTEMODE_DEFAULT:
		return "Default";
	case NVML_COMPUTEMODE_EXCLUSIVE_PROCESS:
		return "Exclusive_Process";
	case NVML_COMPUTEMODE_PROHIBITED:
		return "Prohibited";
	case NVML_COMPUTEMODE_EXCLUSIVE_THREAD:
		return "Exclusive_Thread";
	case NVML_COMPUTEMODE_COUNT:
	default:
		return "Unknown";
	}
}

const char *smi_state(nvmlEnableState_t state)
{
	return state == NVML_FEATURE_ENABLED ? "Enabled" : "Disabled";
}

/* ---- processes ---------------------------------------------------------------------------------------- */

typedef nvmlReturn_t (*process_call)(nvmlDevice_t, unsigned int *, nvmlProcessInfo_v2_t *);

static void add_processes(process_call call, nvmlDevice_t device, char type, struct smi_process **list,
			  unsigned int *count)
{
	unsigned int have = 0;
	nvmlProcessInfo_v2_t *infos = NULL;
	if (call == NULL)
		return;
	nvmlReturn_t result = call(device, &have, NULL);
	/* More may come while we ask: bring some room, try again a few times. */
	for (int tries = 0; result == NVML_ERROR_INSUFFICIENT_SIZE && tries < 5; tries++) {
		have += have / 2 + 8;
		free(infos);
		infos = calloc(have, sizeof(*infos));
		if (infos == NULL)
			return;
		result = call(device, &have, infos);
	}
	struct smi_process *larger =
	    infos != NULL && result == NVML_SUCCESS ? realloc(*list, (*count + have) * sizeof(**list)) : NULL;
	if (larger != NULL) {
		*list = larger;
		for (unsigned int i = 0; i < have; i++)
			larger[(*count)++] = (struct smi_process){
			    .pid = infos[i].pid,
			    .type = type,
			    .bytes = infos[i].usedGpuMemory,
			    .gi = infos[i].gpuInstanceId,
			    .ci = infos[i].computeInstanceId,
			};
	}
	free(infos);
}

unsigned int smi_processes(nvmlDevice_t device, struct smi_process **list)
{
	unsigned int count = 0;
	*list = NULL;
	add_processes(nvml.DeviceGetGraphicsRunningProcesses_v3, device, 'G', list, &count);
	add_processes(nvml.DeviceGetComputeRunningProcesses_v3 != NULL
			  ? nvml.DeviceGetComputeRunningProcesses_v3
			  : nvml.DeviceGetComputeRunningProcesses_v2,
		      device, 'C', list, &count);
	add_processes(nvml.DeviceGetMPSComputeRunningProcesses_v3, device, 'M', list, &count);
	return count;
}

void smi_process_name(unsigned int pid, char *name, size_t size)
{
	if (NVML(SystemGetProcessName, pid, name, (unsigned int)size) != NVML_SUCCESS)
		snprintf(name, size, "[Not Found]");
}

/* ---- devices ------------------------------------------------------------------------------------------ */

static nvmlReturn_t find(const char *id, nvmlDevice_t *handle)
{
	char *end;
	unsigned long index = strtoul(id, &end, 10);
	if (*id != '\0' && *end == '\0' && strlen(id) < 6)
		return NVML(DeviceGetHandleByIndex_v2, (unsigned int)index, handle);
	if (strchr(id, ':') != NULL)
		return NVML(DeviceGetHandleByPciBusId_v2, id, handle);
	if (strncmp(id, "GPU-", 4) == 0 || strncmp(id, "MIG-", 4) == 0)
		return NVML(DeviceGetHandleByUUID, id, handle);
	return NVML(DeviceGetHandleBySerial, id, handle);
}

static int some_devices(const char *ids, struct smi_devices *devices)
{
	char list[8192];
	snprintf(list, sizeof(list), "%s", ids);
	for (char *rest = list, *id; (id = strsep(&rest, ",")) != NULL;) {
		struct smi_device one = {0};
		one.state = find(id, &one.handle);
		if (one.state != NVML_SUCCESS && one.state != NVML_ERROR_GPU_IS_LOST) {
			printf("No devices were found\n");
			return NVML_ERROR_NOT_FOUND;
		}
		if (one.state != NVML_SUCCESS || NVML(DeviceGetIndex, one.handle, &one.index) != NVML_SUCCESS)
			one.index = (unsigned int)strtoul(id, NULL, 10);
		if (devices->count < SMI_MAX_DEVICES)
			devices->device[devices->count++] = one;
	}
	return 0;
}

static int all_devices(struct smi_devices *devices)
{
	unsigned int count = 0;
	nvmlReturn_t result = NVML(DeviceGetCount_v2, &count);
	if (result != NVML_SUCCESS) {
		printf("Failed to count devices: %s\n", smi_error(result));
		return (int)result;
	}
	for (unsigned int i = 0; i < count && i < SMI_MAX_DEVICES; i++) {
		struct smi_device *one = &devices->device[devices->count++];
		one->index = i;
		one->state = NVML(DeviceGetHandleByIndex_v2, i, &one->handle);
	}
	if (count > 0)
		return 0;
	printf("No devices were found\n");
	return NVML_ERROR_NOT_FOUND;
}

/* ---- arguments ---------------------------------------------------------------------------------------- */

/* "-i X", "--id=X" and "--id X"; moves *at to the value's argument. */
static const char *value_of(int argc, char **argv, int *at, const char *letter, const char *word)
{
	const char *argument = argv[*at];
	size_t length = strlen(word);
	if (argument == NULL)
		return NULL;
	if (strncmp(argument, word, length) == 0 && argument[length] == '=')
		return argument + length + 1;
	if ((letter != NULL && strcmp(argument, letter) == 0) || strcmp(argument, word) == 0) {
		if (*at + 1 >= argc) {
			printf("Option %s needs a value. Please run 'nvidia-smi -h' for help.\n", argument);
			exit(2);
		}
		return argv[++*at];
	}
	return NULL;
}

static int flag(const char *argument, const char *letter, const char *word)
{
	return strcmp(argument, letter) == 0 || strcmp(argument, word) == 0;
}

static void read_options(int argc, char **argv, struct smi_options *options)
{
	static const struct {
		const char *letter, *word;
		size_t offset;
	} values[] = {
#define OPTION(letter, word, member) {letter, word, offsetof(struct smi_options, member)}
	    OPTION("-i", "--id", ids),
	    OPTION(NULL, "--query-gpu", query_gpu),
	    OPTION(NULL, "--query-compute-apps", query_apps),
	    OPTION(NULL, "--format", format),
	    OPTION("-f", "--filename", file),
	    OPTION("-c", "--compute-mode", compute_mode),
	    OPTION("-pm", "--persistence-mode", persistence),
	    OPTION("-e", "--ecc-config", ecc),
	    OPTION("-pl", "--power-limit", power_limit),
	    OPTION("-am", "--accounting-mode", accounting),
	    OPTION("-mig", "--multi-instance-gpu", mig),
#undef OPTION
	};
	for (int at = 1; at < argc; at++) {
		const char *argument = argv[at], *value = NULL;
		for (size_t i = 0; i < sizeof(values) / sizeof(values[0]) && value == NULL; i++)
			if ((value = value_of(argc, argv, &at, values[i].letter, values[i].word)) != NULL)
				memcpy((char *)options + values[i].offset, &value, sizeof(value));
		if (value != NULL)
			continue;
		if (value_of(argc, argv, &at, "-d", "--display") != NULL)
			continue; /* -q tells everything anyway */
		if (flag(argument, "-L", "--list-gpus"))
			options->list = 1;
		else if (flag(argument, "-q", "--query"))
			options->query = 1;
		else if (flag(argument, "-x", "--xml-format"))
			options->xml = 1;
		else {
			printf("Invalid combination of input arguments. Please run 'nvidia-smi -h' for "
			       "help.\n\n");
			exit(2);
		}
	}
}

static int run(int argc, char **argv)
{
	static struct smi_options options;
	static struct smi_devices devices;
	int is_topology = argc > 1 && strcmp(argv[1], "topo") == 0,
	    is_mig = argc > 1 && strcmp(argv[1], "mig") == 0;
	if (is_mig) {
		for (int at = 2; at < argc; at++)
			if (strcmp(argv[at], "-i") == 0 && at + 1 < argc)
				options.ids = argv[at + 1];
	} else if (is_topology) {
		if (argc != 3 || !flag(argv[2], "-m", "--matrix")) {
			printf("Only 'nvidia-smi topo -m' is known.\n");
			return 2;
		}
	} else {
		read_options(argc, argv, &options);
	}
	int status = smi_open();
	if (status != 0)
		return status;
	status = options.ids != NULL ? some_devices(options.ids, &devices) : all_devices(&devices);
	if (status != 0)
		return status;
	if (is_topology)
		return smi_topology(&devices);
	if (is_mig)
		return smi_mig(&devices, argc - 2, argv + 2);
	if (options.compute_mode != NULL || options.persistence != NULL || options.ecc != NULL ||
	    options.power_limit != NULL || options.accounting != NULL || options.mig != NULL)
		return smi_set(&devices, &options);
	if (options.query_gpu != NULL)
		return smi_csv_gpu(&devices, &options);
	if (options.query_apps != NULL)
		return smi_csv_apps(&devices, &options);
	if (options.list)
		return smi_list(&devices);
	if (options.query || options.xml)
		return smi_query(&devices, &options);
	return smi_table(&devices);
}

int main(int argc, char **argv)
{
	if (argc == 2 && flag(argv[1], "-h", "--help")) {
		fputs(usage, stdout);
		return 0;
	}
	if (argc == 2 && strcmp(argv[1], "--help-query-gpu") == 0)
		return smi_help_query_gpu();
	if (argc == 2 && strcmp(argv[1], "--version") == 0) {
		char driver[NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE] = "N/A",
		     library[NVML_SYSTEM_NVML_VERSION_BUFFER_SIZE] = "N/A";
		int status = smi_open(), cuda = 0;
		if (status != 0)
			return status;
		NVML(SystemGetDriverVersion, driver, sizeof(driver));
		NVML(SystemGetNVMLVersion, library, sizeof(library));
		NVML(SystemGetCudaDriverVersion_v2, &cuda);
		printf("NVIDIA-SMI version  : %s\nNVML version        : %s\nDRIVER version      : %s\n"
		       "CUDA Version        : %d.%d\n",
		       driver, library, driver, cuda / 1000, cuda % 1000 / 10);
		return 0;
	}
	int status = run(argc, argv);
	NVML(Shutdown);
	return status;
}
