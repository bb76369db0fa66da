/* SPDX-License-Identifier: Apache-2.0
 *
 * Making the state from a configuration. Between state.c, state_make.c and process.c only.
 */
#ifndef FAKEGPU_STATE_MAKE_H
#define FAKEGPU_STATE_MAKE_H

#include <stddef.h>
#include <sys/stat.h>

#include "state.h"

/* Makes the state anew in place, holding FG_INIT_BYTE; refuses while processes use the one that is there. */
enum fg_open_result fg_state_make(int descriptor, const char *config_path);
/* Tells builds of the driver with different layouts apart. */
uint64_t fg_state_build(void);
/* A whole file, NUL-terminated, to be freed; NULL when it cannot be read. */
char *fg_read_file(const char *path, size_t *length, struct stat *info);
/* One line on stderr, the same one never twice in a row. */
void fg_state_complain(const char *what, const char *why);
void fg_state_before_fork(void);
void fg_state_after_fork(void);

#endif
