/* SPDX-License-Identifier: Apache-2.0
 *
 * Whether the owner of a usage slot is gone; see identity.c.
 */
#ifndef ALIQUOT_IDENTITY_H
#define ALIQUOT_IDENTITY_H

#include <stdbool.h>
#include <stdint.h>

struct aq_process;

/* True only if the process that owns a slot with these words has certainly ended. */
bool aq_owner_gone(const struct aq_process *process, uint64_t owner, uint64_t pidns);

#endif
