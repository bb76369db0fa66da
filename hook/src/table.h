/* SPDX-License-Identifier: Apache-2.0
 *
 * Key → value without locks: what was charged for an address, an array, a handle. Keys are chosen by the
 * driver and unique while they live, so nobody inserts a key twice.
 *
 * Never calls malloc; grows by further segments of pages, entries never move. A look-up reads at most
 * AQ_TABLE_PROBES cells of each segment. Invariant: of two threads that take the same key, one gets it.
 */
#ifndef ALIQUOT_TABLE_H
#define ALIQUOT_TABLE_H

#include <stdbool.h>
#include <stdint.h>

#define AQ_TABLE_PROBES 16u

struct aq_segment;

struct aq_table {
	struct aq_segment *newest; /* NULL: nothing was ever put in */
};

/* False: no memory for it. Keys 0, 1 and 2 cannot be stored. */
bool aq_table_put(struct aq_table *table, uint64_t key, uint64_t value);

/* Removes the key. False: it is not there. */
bool aq_table_take(struct aq_table *table, uint64_t key, uint64_t *value);

bool aq_table_get(const struct aq_table *table, uint64_t key, uint64_t *value);

/* Calls `visit` for every entry; `visit` may take the key it is shown. */
void aq_table_each(struct aq_table *table,
		   void (*visit)(struct aq_table *table, uint64_t key, uint64_t value, void *argument),
		   void *argument);

#endif
