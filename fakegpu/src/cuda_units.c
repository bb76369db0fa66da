/* SPDX-License-Identifier: Apache-2.0
 *
 * Units of address space: which are free, and finding some that follow each other. See cuda_units.h.
 */
#include "cuda_units.h"

#include <string.h>
#include <sys/mman.h>

#include "cuda_core.h"

#define EXACT 1024u /* freed runs of up to so many units are kept by size */

struct run { /* freed units */
	struct run *next;
	uint32_t unit, units;
};

static uint32_t next_unit, unit_count; /* units from next_unit on were never taken */
static struct run *exact[EXACT + 1], *large, *free_runs;
static int (*unit_is_used)(uint32_t unit);

void cu_units_open(uint32_t count, int (*is_used)(uint32_t unit))
{
	next_unit = 0;
	unit_count = count;
	unit_is_used = is_used;
	memset((void *)exact, 0, sizeof exact);
	large = free_runs = NULL;
}

uint32_t cu_units_reached(void)
{
	return next_unit;
}

/* ---- memory for the records themselves ---------------------------------------------------------------- */

void *cu_units_record(size_t size)
{
	static char *chunk;
	static size_t left;
	static uint32_t generation;

	size = (size + 15) & ~(size_t)15;
	if (generation != cu_generation || left < size) {
		size_t chunk_size = size > (1u << 20) ? size : (size_t)1 << 20;

		generation = cu_generation;
		left = 0;
		chunk = mmap(NULL, chunk_size, PROT_READ | PROT_WRITE,
			     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (chunk == MAP_FAILED)
			return NULL;
		left = chunk_size;
	}
	void *made = chunk;

	chunk += size;
	left -= size;
	return made;
}

/* ---- units -------------------------------------------------------------------------------------------- */

void cu_units_give(uint32_t unit, uint32_t units)
{
	struct run *run = free_runs != NULL ? free_runs : cu_units_record(sizeof *run);
	struct run **list = units <= EXACT ? &exact[units] : &large;

	if (run == NULL)
		return;
	if (run == free_runs)
		free_runs = run->next;
	*run = (struct run){*list, unit, units};
	*list = run;
}

static struct run *cut_run(struct run **link)
{
	struct run *run = *link;

	*link = run->next;
	run->next = free_runs;
	free_runs = run;
	return run;
}

/* First fit among freed runs of any size; `align` in units. */
static int64_t fit_run(uint32_t units, uint32_t align)
{
	for (uint32_t list = 0; list <= EXACT; list++) {
		uint32_t size = list < EXACT ? units + list : 0;

		if (size > EXACT)
			list = EXACT;
		for (struct run **link = list == EXACT ? &large : &exact[size]; *link != NULL;
		     link = &(*link)->next) {
			uint32_t first = ((*link)->unit + align - 1) / align * align;
			uint32_t skip = first - (*link)->unit;

			if ((*link)->units < skip || (*link)->units - skip < units)
				continue;
			struct run run = *cut_run(link);

			if (skip > 0)
				cu_units_give(run.unit, skip);
			if (run.units > skip + units)
				cu_units_give(first + units, run.units - skip - units);
			return first;
		}
	}
	return -1;
}

/* Joins neighbouring free units, which freeing alone does not. */
static void join_runs(void)
{
	for (uint32_t i = 0; i <= EXACT; i++)
		while (exact[i] != NULL)
			cut_run(&exact[i]);
	while (large != NULL)
		cut_run(&large);
	for (uint32_t unit = 0; unit < next_unit;) {
		uint32_t end = unit;

		while (end < next_unit && !unit_is_used(end))
			end++;
		if (end > unit)
			cu_units_give(unit, end - unit);
		unit = end + 1;
	}
}

int64_t cu_units_take(uint32_t units)
{
	uint32_t align = units % CU_BIG_UNITS == 0 ? CU_BIG_UNITS : 1;
	int64_t found = -1;

	if (units <= EXACT && exact[units] != NULL && exact[units]->unit % align == 0)
		return cut_run(&exact[units])->unit;
	for (int attempt = 0; attempt < 2; attempt++) {
		uint32_t first = (next_unit + align - 1) / align * align;

		if (first <= unit_count && unit_count - first >= units) {
			if (first > next_unit)
				cu_units_give(next_unit, first - next_unit);
			next_unit = first + units;
			return first;
		}
		if (attempt == 1)
			join_runs();
		found = fit_run(units, align);
		if (found >= 0)
			break;
	}
	return found;
}
