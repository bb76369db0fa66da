/* SPDX-License-Identifier: Apache-2.0
 *
 * The control file: what its readers and its writers share beside control.h.
 */
#ifndef FAKEGPU_CONTROL_FILE_H
#define FAKEGPU_CONTROL_FILE_H

#include <stddef.h>
#include <stdint.h>

/* The key of a figure that can be overridden. */
const char *fg_control_figure(uint32_t kind);
/* Path of the control file, once the state is open. */
void fg_control_path(char *path, size_t size);
/* Tells every process to look at the control file before its next call. */
void fg_control_poke(void);

#endif
