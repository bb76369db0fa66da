/* SPDX-License-Identifier: Apache-2.0
 *
 * Who uses a card: one list for all the calls that tell of processes.
 */
#ifndef FAKEGPU_NVML_PROCESS_H
#define FAKEGPU_NVML_PROCESS_H

#include "nvml_core.h"

struct nv_process {
	uint32_t pid; /* as the host sees it */
	uint32_t type; /* 'C', 'G' or 'M' */
	uint64_t bytes;
	uint32_t gi_id, ci_id;
	uint32_t seat; /* index, or FG_NO_INSTANCE for a row of the control file */
	uint32_t sm_percent; /* of such a row */
};

/* All processes with a context on the device (a MIG device: on that instance), and the rows of the control
 * file. The dead are removed first. Returns how many; *list is malloc'ed, or NULL when there are none or no
 * memory. */
uint32_t nv_processes(const struct nv_device *of, struct nv_process **list);

/* In accounting mode: notes who is there. */
void nv_accounting_look(const struct nv_device *of);

#endif
