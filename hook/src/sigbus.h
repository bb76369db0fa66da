/* SPDX-License-Identifier: Apache-2.0
 *
 * Usage files lie in a folder that the container may write, so anybody in it can cut one short, and the next
 * access of any process that has it mapped would end that process. See sigbus.c for what is done about it.
 */
#ifndef ALIQUOT_SIGBUS_H
#define ALIQUOT_SIGBUS_H

#include <stdbool.h>
#include <stddef.h>

/* From now on accesses to this mapping survive the loss of the file. */
void aq_sigbus_guard(void *map, size_t length);

/* True once a guarded mapping lost its file: nothing more is to be charged to it. */
bool aq_sigbus_lost(void);

#endif
