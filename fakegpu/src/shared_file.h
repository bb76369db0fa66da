/* SPDX-License-Identifier: Apache-2.0
 *
 * Files through which processes see each other's memory (IPC handles), in <config>.shared/. They go with the
 * process that made them.
 */
#ifndef FAKEGPU_SHARED_FILE_H
#define FAKEGPU_SHARED_FILE_H

#include <stdint.h>

/* Makes an empty file of `size` bytes for this process; its descriptor, or -1. `number` names it to others.
 */
int fg_shared_file_make(uint64_t size, uint32_t *number);
/* Opens the file of another process; its descriptor, or -1. */
int fg_shared_file_open(uint32_t slot, uint32_t generation, uint32_t number);
void fg_shared_file_remove(uint32_t slot, uint32_t generation, uint32_t number);
void fg_shared_file_remove_all(uint32_t slot, uint32_t generation);

#endif
