/* SPDX-License-Identifier: Apache-2.0
 *
 * See lookup.h; the constants are those of hook/gen/tables.py.
 */
#include "lookup.h"

const struct aq_name_cell *aq_lookup(const char *name)
{
	/* Every name begins "cu" + capital or "nvml"; almost everything a program looks up ends here. */
	if (name[0] == 'c') {
		if (name[1] != 'u' || name[2] < 'A' || name[2] > 'Z')
			return NULL;
	} else if (name[0] != 'n' || name[1] != 'v' || name[2] != 'm' || name[3] != 'l') {
		return NULL;
	}
	uint32_t hash = 0x811c9dc5u;
	for (const char *byte = name; *byte; byte++)
		hash = (hash ^ (unsigned char)*byte) * 0x01000193u;
	uint32_t displacement = aq_name_displacement[hash & (AQ_NAME_BUCKETS - 1)];
	uint32_t place = ((hash ^ (displacement * 0x9e3779b1u)) * 0x85ebca6bu) >> (32 - AQ_NAME_CELL_BITS);
	const struct aq_name_cell *cell = &aq_name_cell[place];
	if (cell->name == 0 || !aq_same_text(aq_name_text + cell->name - 1, name))
		return NULL;
	return cell;
}
