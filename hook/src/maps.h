/* SPDX-License-Identifier: Apache-2.0
 *
 * What a process has mapped, by /proc/<pid>/maps. A process that has become another program keeps its pid and
 * start time; what it does not keep is its mappings.
 */
#ifndef ALIQUOT_MAPS_H
#define ALIQUOT_MAPS_H

#include <stdbool.h>
#include <stddef.h>

/* A file of which one of our own mappings is known. */
struct aq_mapped_file {
	const void *address; /* inside that mapping */
	char text[48]; /* its device and inode, as maps spells them ("00:2c 1234"); "": not looked up yet */
};

/* True only if maps of that process could be read to its end and the file is not in it. */
bool aq_maps_lack(const char *pid, struct aq_mapped_file *file);

#endif
