/* SPDX-License-Identifier: Apache-2.0
 *
 * See table.h. A cell's key is 0 (never used since the segment came), 1 (taken out), 2 (being filled), or a
 * key. Filling: key free → 2 by compare-and-swap, value, key. A reader that meets 2 passes on: nobody can ask
 * for a key before the driver's call that made it has returned.
 */
#include "table.h"

#include <stddef.h>

#include "pages.h"

/* The first segment is one page, for many programs never need more; the next begin with this. */
#define FIRST_CELLS 128u
#define NEXT_CELLS  1024u
#define MOST_CELLS  (1u << 26)

_Static_assert(sizeof(struct aq_segment) + FIRST_CELLS * sizeof(struct aq_cell) <= 4096, "one page");

static bool put_in(struct aq_segment *segment, uint64_t key, uint64_t value)
{
	uint32_t place = aq_table_place(key, segment->cells);
	for (uint32_t i = 0; i < AQ_TABLE_PROBES; i++)
		if (aq_cell_fill(&segment->cell[(place + i) & (segment->cells - 1)], key, value))
			return true;
	return false;
}

/* A further segment, at least twice as large as `newest`. Of several threads that need one, one wins. */
static struct aq_segment *grow(struct aq_table *table, struct aq_segment *newest)
{
	uint32_t cells = newest == NULL               ? FIRST_CELLS
			 : newest->cells < NEXT_CELLS ? NEXT_CELLS
						      : newest->cells * 2;
	if (cells > MOST_CELLS)
		return NULL;
	size_t size = sizeof(struct aq_segment) + cells * sizeof(struct aq_cell);
	struct aq_segment *segment = aq_pages(size);
	if (segment == NULL)
		return NULL;
	segment->older = newest;
	segment->cells = cells;
	if (__atomic_compare_exchange_n(&table->newest, &newest, segment, false, __ATOMIC_ACQ_REL,
					__ATOMIC_ACQUIRE))
		return segment;
	aq_pages_give(segment, size);
	return newest;
}

bool aq_table_put_slowly(struct aq_table *table, uint64_t key, uint64_t value)
{
	struct aq_segment *newest = __atomic_load_n(&table->newest, __ATOMIC_ACQUIRE);
	for (;;) {
		/* Old segments first empty, then fill again; a crowded one is left after a few cells. */
		for (struct aq_segment *segment = newest; segment; segment = segment->older)
			if (put_in(segment, key, value))
				return true;
		newest = grow(table, newest);
		if (newest == NULL)
			return false;
	}
}

static struct aq_cell *find(const struct aq_table *table, uint64_t key)
{
	struct aq_segment *segment = __atomic_load_n(&table->newest, __ATOMIC_ACQUIRE);
	for (; segment; segment = segment->older) {
		uint32_t place = aq_table_place(key, segment->cells);
		for (uint32_t i = 0; i < AQ_TABLE_PROBES; i++) {
			struct aq_cell *cell = &segment->cell[(place + i) & (segment->cells - 1)];
			uint64_t seen = __atomic_load_n(&cell->key, __ATOMIC_ACQUIRE);
			if (seen == key)
				return cell;
			if (seen == AQ_CELL_EMPTY)
				break;
		}
	}
	return NULL;
}

bool aq_table_take_slowly(struct aq_table *table, uint64_t key, uint64_t *value)
{
	struct aq_cell *cell = key > AQ_CELL_FILLING ? find(table, key) : NULL;
	if (cell == NULL)
		return false;
	*value = __atomic_load_n(&cell->value, __ATOMIC_RELAXED);
	return __atomic_compare_exchange_n(&cell->key, &key, AQ_CELL_GONE, false, __ATOMIC_ACQ_REL,
					   __ATOMIC_RELAXED);
}

bool aq_table_get_slowly(const struct aq_table *table, uint64_t key, uint64_t *value)
{
	const struct aq_cell *cell = key > AQ_CELL_FILLING ? find(table, key) : NULL;
	if (cell == NULL)
		return false;
	*value = __atomic_load_n(&cell->value, __ATOMIC_RELAXED);
	return true;
}

void aq_table_each(struct aq_table *table,
		   void (*visit)(struct aq_table *table, uint64_t key, uint64_t value, void *argument),
		   void *argument)
{
	struct aq_segment *segment = __atomic_load_n(&table->newest, __ATOMIC_ACQUIRE);
	for (; segment; segment = segment->older) {
		for (uint32_t i = 0; i < segment->cells; i++) {
			uint64_t key = __atomic_load_n(&segment->cell[i].key, __ATOMIC_ACQUIRE);
			if (key > AQ_CELL_FILLING)
				visit(table, key, __atomic_load_n(&segment->cell[i].value, __ATOMIC_RELAXED),
				      argument);
		}
	}
}
