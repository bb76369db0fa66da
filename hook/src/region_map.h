/* SPDX-License-Identifier: Apache-2.0
 *
 * What the two halves of the node's region library share: mapping a file for one call, and making one in a
 * step.
 */
#ifndef ALIQUOT_REGION_MAP_H
#define ALIQUOT_REGION_MAP_H

#include <stddef.h>
#include <sys/types.h>

#define AQ_EXPORT __attribute__((visibility("default")))

struct aq_region_map {
	void *map;
	size_t length;
};

/* Maps at least `need` bytes of a regular file. 0 or a negative errno, -EPROTO: too short, or no regular
 * file. */
int aq_region_open(struct aq_region_map *view, const char *path, size_t need, int writable);
void aq_region_close(const struct aq_region_map *view);

/* Makes `path` with this content in one step: nobody ever sees half a file, and nothing is replaced. */
int aq_region_make(const char *path, const void *data, size_t size, mode_t mode);

#endif
