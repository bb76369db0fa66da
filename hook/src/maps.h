/* SPDX-License-Identifier: Apache-2.0
 *
 * What a process has mapped, by /proc/<pid>/maps. A process that has become another program keeps its pid and
 * start time; what it does not keep is its mappings.
 */
#ifndef ALIQUOT_MAPS_H
#define ALIQUOT_MAPS_H

#include <stdbool.h>
#include <stddef.h>

/* Device and inode of a mapped file, as maps spells them ("00:2c 1234"). "": not known. */
struct aq_mapped_file {
	char text[48];
};

/* Which file lies at this address of our own. */
void aq_maps_own(const void *address, struct aq_mapped_file *file);

/* True only if maps of that process could be read to its end and the file is not in it. */
bool aq_maps_lack(const char *pid, const struct aq_mapped_file *file);

#endif
