/* SPDX-License-Identifier: Apache-2.0
 *
 * nvidia-smi, written anew on top of NVML: the commands and output forms that people and scripts use every
 * day. Exit status as the real one: 0, 2 for a wrong argument, else NVML's code (6 nothing found, 9 no
 * driver, 15 lost, …).
 */
#ifndef FAKEGPU_SMI_H
#define FAKEGPU_SMI_H

#include "smi_nvml.h"

#include <stdio.h>

#define SMI_MAX_DEVICES 1024u

struct smi_device {
	unsigned int index;
	nvmlDevice_t handle;
	nvmlReturn_t state; /* not SUCCESS: NVML gives no handle for it (lost, say) */
};

/* The devices the command is about: all, or those of -i. */
struct smi_devices {
	unsigned int count;
	struct smi_device device[SMI_MAX_DEVICES];
};

struct smi_options {
	const char *ids; /* -i */
	const char *query_gpu, *query_apps, *format;
	const char *file; /* -f */
	int list, query, xml;
	/* What to set; NULL: nothing. */
	const char *compute_mode, *persistence, *ecc, *power_limit, *accounting, *mig;
};

/* Text of one figure; what cannot be told becomes "N/A" (or "GPU is lost", "Unknown Error"). */
#define SMI_TEXT 256u
const char *smi_unknown(nvmlReturn_t result);
const char *smi_compute_mode(nvmlComputeMode_t mode);
const char *smi_state(nvmlEnableState_t state);

/* Processes of a device by any kind of list; the caller frees *list. */
struct smi_process {
	unsigned int pid;
	char type; /* C, G or M */
	unsigned long long bytes;
	unsigned int gi, ci;
};
unsigned int smi_processes(nvmlDevice_t device, struct smi_process **list);
void smi_process_name(unsigned int pid, char *name, size_t size);

/* The commands; each returns the exit status. */
int smi_table(const struct smi_devices *devices);
int smi_list(const struct smi_devices *devices);
int smi_query(const struct smi_devices *devices, const struct smi_options *options);
int smi_csv_gpu(const struct smi_devices *devices, const struct smi_options *options);
int smi_csv_apps(const struct smi_devices *devices, const struct smi_options *options);
int smi_help_query_gpu(void);
int smi_topology(const struct smi_devices *devices);
int smi_mig(const struct smi_devices *devices, int argc, char **argv);
int smi_set(const struct smi_devices *devices, const struct smi_options *options);

#endif
