/* SPDX-License-Identifier: Apache-2.0
 *
 * Small files and folders, read with plain system calls into the caller's buffers: nothing here allocates,
 * locks or changes errno, so it may run wherever a program first touches the driver.
 */
#ifndef ALIQUOT_FILES_H
#define ALIQUOT_FILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Reads a small file of /proc, which comes in one piece: at most size - 1 bytes, ended with NUL. Bytes read,
 * or a negative errno. */
long aq_read_file(const char *path, char *buffer, size_t size);

/* Maps a regular file of at least `need` bytes, shared; `length` gets how much was mapped (at most 1 GiB).
 * 0 or a negative errno, -EPROTO for a file that is too short or no regular file. */
int aq_map_file(const char *path, size_t need, bool writable, void **map, size_t *length);

/* Joins up to three parts with "/". False: it does not fit. */
bool aq_path(char *out, size_t size, const char *first, const char *second, const char *third);

/* Calls `visit` with each name in a folder but those that begin with a dot. 0 or a negative errno. */
int aq_list_folder(const char *path, void (*visit)(const char *name, void *argument), void *argument);

#endif
