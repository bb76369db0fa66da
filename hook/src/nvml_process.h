/* SPDX-License-Identifier: Apache-2.0
 *
 * Whose process is it? NVML speaks of processes by the pid that the host knows; a container sees only its
 * own, under the pids that it knows itself. The usage files say which is which: a slot's owner is the pid
 * inside, and the node writes the pid outside beside it.
 *
 * Never shows a process that no usage file of this container and PID namespace names.
 */
#ifndef ALIQUOT_NVML_PROCESS_H
#define ALIQUOT_NVML_PROCESS_H

#include "nvml_device.h"

/* One process of this container. */
struct aq_own {
	uint32_t pid; /* as seen inside */
	uint32_t host_pid; /* 0: not known (yet) */
	uint64_t bytes; /* of the card that was asked for */
	uint64_t device_ns; /* charged so far */
};

#define AQ_MOST_OWN 1024u

/* The live processes of this container that hold shares of `card` (AQ_NO_CARD: of any), by pid. Pages to be
 * given back with aq_own_give; NULL: no memory. */
struct aq_own *aq_own_list(int card, uint32_t *count);
void aq_own_give(struct aq_own *list);

/* The one that NVML means with `pid`, or NULL. */
const struct aq_own *aq_own_find(const struct aq_own *list, uint32_t count, uint32_t pid);

/* False: nothing limits this process, and NVML's answers are its own business. */
bool aq_nvml_filters(void);

#endif
