/* SPDX-License-Identifier: Apache-2.0
 *
 * Whether the owner of a usage slot is gone; see identity.c.
 */
#ifndef ALIQUOT_IDENTITY_H
#define ALIQUOT_IDENTITY_H

#include <stdbool.h>
#include <stdint.h>

#include "maps.h"

struct aq_process;

enum aq_look {
	AQ_LOOK_BRIEFLY, /* one question to the kernel; a zombie, or another with its pid, passes for alive */
	AQ_LOOK_CLOSELY, /* and what /proc says of it */
};

/* True only if the process that owns a slot with these words has certainly ended, or (where `region` is
 * given) has become a program that does not have the usage file mapped. */
bool aq_owner_left(const struct aq_process *process, uint64_t owner, uint64_t pidns, enum aq_look look,
		   struct aq_mapped_file *region);

static inline bool aq_owner_gone(const struct aq_process *process, uint64_t owner, uint64_t pidns)
{
	return aq_owner_left(process, owner, pidns, AQ_LOOK_CLOSELY, NULL);
}

#endif
