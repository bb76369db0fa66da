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
#include <stddef.h>
#include <stdint.h>

#define AQ_TABLE_PROBES 16u

enum { AQ_CELL_EMPTY = 0, AQ_CELL_GONE = 1, AQ_CELL_FILLING = 2 };

struct aq_cell {
	uint64_t key;
	uint64_t value;
};

struct aq_segment {
	struct aq_segment *older;
	uint32_t cells; /* a power of two */
	struct aq_cell cell[];
};

struct aq_table {
	struct aq_segment *newest; /* NULL: nothing was ever put in */
};

static inline uint32_t aq_table_place(uint64_t key, uint32_t cells)
{
	return (uint32_t)((key * 0x9e3779b97f4a7c15ull) >> 32) & (cells - 1);
}

/* Fills a cell that nobody else has. */
static inline bool aq_cell_fill(struct aq_cell *cell, uint64_t key, uint64_t value)
{
	uint64_t seen = __atomic_load_n(&cell->key, __ATOMIC_RELAXED);
	if (seen > AQ_CELL_GONE || !__atomic_compare_exchange_n(&cell->key, &seen, AQ_CELL_FILLING, false,
								__ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
		return false;
	__atomic_store_n(&cell->value, value, __ATOMIC_RELAXED);
	__atomic_store_n(&cell->key, key, __ATOMIC_RELEASE);
	return true;
}

bool aq_table_put_slowly(struct aq_table *table, uint64_t key, uint64_t value);
bool aq_table_take_slowly(struct aq_table *table, uint64_t key, uint64_t *value);

/* False: no memory for it. Keys 0, 1 and 2 cannot be stored. */
static inline bool aq_table_put(struct aq_table *table, uint64_t key, uint64_t value)
{
	struct aq_segment *newest = __atomic_load_n(&table->newest, __ATOMIC_ACQUIRE);
	if (__builtin_expect(newest != NULL, 1) &&
	    __builtin_expect(aq_cell_fill(&newest->cell[aq_table_place(key, newest->cells)], key, value), 1))
		return true;
	return aq_table_put_slowly(table, key, value);
}

/* Removes the key. False: it is not there. */
static inline bool aq_table_take(struct aq_table *table, uint64_t key, uint64_t *value)
{
	struct aq_segment *newest = __atomic_load_n(&table->newest, __ATOMIC_ACQUIRE);
	if (newest == NULL)
		return false;
	struct aq_cell *cell = &newest->cell[aq_table_place(key, newest->cells)];
	if (__builtin_expect(__atomic_load_n(&cell->key, __ATOMIC_ACQUIRE) != key || key <= AQ_CELL_FILLING,
			     0))
		return aq_table_take_slowly(table, key, value);
	*value = __atomic_load_n(&cell->value, __ATOMIC_RELAXED);
	return __atomic_compare_exchange_n(&cell->key, &key, AQ_CELL_GONE, false, __ATOMIC_ACQ_REL,
					   __ATOMIC_RELAXED);
}

bool aq_table_get_slowly(const struct aq_table *table, uint64_t key, uint64_t *value);

/* Value of a key. False: it is not there. */
static inline bool aq_table_get(const struct aq_table *table, uint64_t key, uint64_t *value)
{
	const struct aq_segment *newest = __atomic_load_n(&table->newest, __ATOMIC_ACQUIRE);
	if (newest == NULL)
		return false;
	const struct aq_cell *cell = &newest->cell[aq_table_place(key, newest->cells)];
	if (__builtin_expect(__atomic_load_n(&cell->key, __ATOMIC_ACQUIRE) != key || key <= AQ_CELL_FILLING,
			     0))
		return aq_table_get_slowly(table, key, value);
	*value = __atomic_load_n(&cell->value, __ATOMIC_RELAXED);
	return true;
}

/* Calls `visit` for every entry; `visit` may take the key it is shown. */
void aq_table_each(struct aq_table *table,
		   void (*visit)(struct aq_table *table, uint64_t key, uint64_t value, void *argument),
		   void *argument);

#endif
