/* SPDX-License-Identifier: Apache-2.0
 *
 * The address space of device memory. See cuda_space.h.
 */
#include "cuda_space.h"

#include <string.h>
#include <sys/mman.h>

#include "cuda_parts.h"
#include "cuda_units.h"

#define UNIT_SHIFT 21u
#define UNIT       (UINT64_C(1) << UNIT_SHIFT)
#define SMALL_MAX  (UINT64_C(1) << 20)
#define CLASSES    48u

/* A unit that holds pieces of one size. */
struct block {
	struct block *next; /* of the same size, with room */
	struct block *previous;
	uint32_t class, piece, count, used;
	uint32_t free_head; /* index + 1 of the first free piece that was used before */
	uint32_t fresh; /* pieces from here on were never used */
	uint32_t listed;
	uint32_t unit;
	uint8_t touched;
	struct cu_alloc *piece_of; /* `count` entries */
};

/* What a unit, or a step of CU_BIG_UNITS, holds. */
struct place {
	struct block *block;
	struct cu_alloc *alloc;
};

static char *device_base, *byte_base;
static uint64_t span; /* bytes of each reservation */
static struct place *unit_place, *step_place;
static uint32_t unit_count;
static struct block *with_room[CLASSES];
static struct block *spare[CLASSES]; /* block records, with their entries, of units that were given back */
static struct cu_alloc *free_allocs; /* records of pieces with units of their own */

static void *reserve(uint64_t bytes, int protection)
{
	void *map = mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	return map == MAP_FAILED ? NULL : map;
}

static int is_used(uint32_t unit)
{
	const struct place *step = &step_place[unit / CU_BIG_UNITS], *place = &unit_place[unit];

	return step->alloc != NULL || place->alloc != NULL || place->block != NULL;
}

int cu_space_open(void)
{
	uint64_t wanted = UINT64_C(64) << 30;

	for (int i = 0; i < cu_device_count; i++)
		wanted += 4 * cu_devices[i].shared->config.memory_bytes;
	if (wanted > UINT64_C(16) << 40)
		wanted = UINT64_C(16) << 40;
	for (span = (wanted + (UNIT * CU_BIG_UNITS - 1)) & ~(UNIT * CU_BIG_UNITS - 1);
	     span >= UINT64_C(1) << 30; span = (span / 2) & ~(UNIT * CU_BIG_UNITS - 1)) {
		/* One step more on each side of the bytes, so that units can be aligned to 1 GiB. */
		device_base = reserve(2 * span + 2 * UNIT * CU_BIG_UNITS, PROT_NONE);
		if (device_base == NULL)
			continue;
		device_base = (char *)(((uintptr_t)device_base + UNIT * CU_BIG_UNITS - 1) &
				       ~(uintptr_t)(UNIT * CU_BIG_UNITS - 1));
		byte_base = device_base + span;
		if (mprotect(byte_base, span, PROT_READ | PROT_WRITE) != 0)
			continue;
		unit_count = (uint32_t)(span >> UNIT_SHIFT);
		unit_place = reserve(unit_count * sizeof *unit_place, PROT_READ | PROT_WRITE);
		step_place =
		    reserve((unit_count / CU_BIG_UNITS + 1) * sizeof *step_place, PROT_READ | PROT_WRITE);
		if (unit_place != NULL && step_place != NULL) {
			cu_units_open(unit_count, is_used);
			return 0;
		}
	}
	return -1;
}

void cu_space_forget(void)
{
	/* The parent's pieces stay mapped in the child, untouched, and are never used again. */
	device_base = byte_base = NULL;
	span = 0;
	unit_count = 0;
	cu_units_open(0, is_used);
	memset(with_room, 0, sizeof with_room);
	memset(spare, 0, sizeof spare);
	free_allocs = NULL;
}

/* ---- small pieces ------------------------------------------------------------------------------------- */

static uint32_t class_piece[CLASSES];
static uint32_t class_count;

static void make_classes(void)
{
	/* 512 bytes to 1 MiB, four steps to each doubling. */
	for (uint32_t base = 512; base < SMALL_MAX; base *= 2)
		for (uint32_t quarter = 0; quarter < 4 && class_count < CLASSES - 1; quarter++) {
			uint32_t piece = base + quarter * (base / 4);

			if (piece % 512 == 0)
				class_piece[class_count++] = piece;
		}
	class_piece[class_count++] = (uint32_t)SMALL_MAX;
}

static uint32_t class_for(size_t size)
{
	uint32_t low = 0, high = class_count - 1;

	while (low < high) {
		uint32_t middle = (low + high) / 2;

		if (class_piece[middle] >= size)
			high = middle;
		else
			low = middle + 1;
	}
	return low;
}

static struct block *new_block(uint32_t class)
{
	struct block *block = spare[class];
	int64_t unit = cu_units_take(1);

	if (unit < 0)
		return NULL;
	if (block != NULL) {
		spare[class] = block->next;
	} else {
		uint32_t count = (uint32_t)(UNIT / class_piece[class]);

		block = cu_units_record(sizeof *block);
		if (block == NULL)
			return NULL;
		memset(block, 0, sizeof *block);
		block->class = class;
		block->piece = class_piece[class];
		block->count = count;
		block->piece_of = cu_units_record(count * sizeof *block->piece_of);
		if (block->piece_of == NULL)
			return NULL;
	}
	block->unit = (uint32_t)unit;
	block->used = block->fresh = block->free_head = 0;
	block->touched = 0;
	unit_place[unit].block = block;
	return block;
}

static void list_block(struct block *block)
{
	block->listed = 1;
	block->previous = NULL;
	block->next = with_room[block->class];
	if (block->next != NULL)
		block->next->previous = block;
	with_room[block->class] = block;
}

static void unlist_block(struct block *block)
{
	block->listed = 0;
	if (block->previous != NULL)
		block->previous->next = block->next;
	else
		with_room[block->class] = block->next;
	if (block->next != NULL)
		block->next->previous = block->previous;
}

static struct cu_alloc *take_small(size_t size, uint64_t *offset)
{
	uint32_t class = class_for(size), index;
	struct block *block = with_room[class];

	if (block == NULL) {
		block = new_block(class);
		if (block == NULL)
			return NULL;
		list_block(block);
	}
	if (block->free_head != 0) {
		index = block->free_head - 1;
		block->free_head = (uint32_t)block->piece_of[index].id;
	} else {
		index = block->fresh++;
	}
	if (++block->used == block->count)
		unlist_block(block);
	*offset = ((uint64_t)block->unit << UNIT_SHIFT) + (uint64_t)index * block->piece;
	return &block->piece_of[index];
}

static void give_small(struct block *block, struct cu_alloc *alloc)
{
	uint32_t index = (uint32_t)(alloc - block->piece_of);

	block->touched |= alloc->touched;
	alloc->kind = CU_ALLOC_NONE;
	alloc->id = block->free_head;
	block->free_head = index + 1;
	if (!block->listed)
		list_block(block);
	if (--block->used > 0 || (block->next == NULL && block->previous == NULL))
		return;
	/* Empty, and not the last of its size with room. */
	unlist_block(block);
	if (block->touched)
		madvise(byte_base + ((uint64_t)block->unit << UNIT_SHIFT), UNIT, MADV_DONTNEED);
	unit_place[block->unit].block = NULL;
	cu_units_give(block->unit, 1);
	block->next = spare[block->class];
	spare[block->class] = block;
}

/* ---- pieces with units of their own ------------------------------------------------------------------- */

static uint32_t units_of(size_t size)
{
	uint64_t units = (size + UNIT - 1) >> UNIT_SHIFT;

	if (units >= CU_BIG_UNITS / 2)
		units = (units + CU_BIG_UNITS - 1) / CU_BIG_UNITS * CU_BIG_UNITS;
	return units > UINT32_MAX ? UINT32_MAX : (uint32_t)units;
}

static void set_places(uint64_t unit, uint32_t units, struct cu_alloc *alloc)
{
	if (units % CU_BIG_UNITS == 0)
		for (uint32_t i = 0; i < units / CU_BIG_UNITS; i++)
			step_place[unit / CU_BIG_UNITS + i].alloc = alloc;
	else
		for (uint32_t i = 0; i < units; i++)
			unit_place[unit + i].alloc = alloc;
}

static struct cu_alloc *take_large(size_t size, uint64_t *offset)
{
	uint32_t units = units_of(size);
	struct cu_alloc *alloc = free_allocs != NULL ? free_allocs : cu_units_record(sizeof *alloc);
	int64_t unit = alloc == NULL || units > unit_count ? -1 : cu_units_take(units);

	if (unit < 0) {
		if (alloc != NULL && alloc != free_allocs) {
			alloc->next = free_allocs;
			free_allocs = alloc;
		}
		return NULL;
	}
	if (alloc == free_allocs)
		free_allocs = alloc->next;
	set_places((uint64_t)unit, units, alloc);
	*offset = (uint64_t)unit << UNIT_SHIFT;
	return alloc;
}

struct cu_alloc *cu_space_take(size_t size, int host_visible)
{
	uint64_t offset;
	struct cu_alloc *alloc;

	if (class_count == 0)
		make_classes();
	if (size > span)
		return NULL;
	alloc = size <= SMALL_MAX ? take_small(size, &offset) : take_large(size, &offset);
	if (alloc == NULL)
		return NULL;
	memset(alloc, 0, sizeof *alloc);
	alloc->data = byte_base + offset;
	alloc->base = (CUdeviceptr)(uintptr_t)(host_visible ? byte_base : device_base) + offset;
	alloc->size = size;
	alloc->seat = -1;
	alloc->id = cu_next_id();
	alloc->preferred = alloc->last_prefetch = CU_DEVICE_INVALID;
	return alloc;
}

static uint64_t offset_of(CUdeviceptr address)
{
	uint64_t offset = address - (CUdeviceptr)(uintptr_t)device_base;

	/* The bytes lie right behind the device addresses. */
	return offset >= span && offset < 2 * span ? offset - span : offset;
}

void cu_space_give(struct cu_alloc *alloc)
{
	uint64_t offset = offset_of(alloc->base), unit = offset >> UNIT_SHIFT;
	struct block *block = step_place[unit / CU_BIG_UNITS].alloc == NULL ? unit_place[unit].block : NULL;
	uint32_t units;

	if (block != NULL) {
		give_small(block, alloc);
		return;
	}
	units = units_of(alloc->size);
	if (alloc->touched && !alloc->foreign)
		madvise(byte_base + offset, alloc->size, MADV_DONTNEED);
	set_places(unit, units, NULL);
	cu_units_give((uint32_t)unit, units);
	alloc->kind = CU_ALLOC_NONE;
	alloc->next = free_allocs;
	free_allocs = alloc;
}

struct cu_alloc *cu_space_find(CUdeviceptr address)
{
	uint64_t offset = offset_of(address), unit = offset >> UNIT_SHIFT;
	struct cu_alloc *alloc;

	if (offset >= span || unit >= cu_units_reached())
		return NULL;
	alloc = step_place[unit / CU_BIG_UNITS].alloc;
	if (alloc == NULL)
		alloc = unit_place[unit].alloc;
	if (alloc == NULL) {
		const struct block *block = unit_place[unit].block;
		uint32_t index = block != NULL ? (uint32_t)(offset & (UNIT - 1)) / block->piece : 0;

		if (block == NULL || index >= block->fresh)
			return NULL;
		alloc = &block->piece_of[index];
	}
	if (alloc->kind == CU_ALLOC_NONE || address < alloc->base || address - alloc->base >= alloc->size)
		return NULL;
	return alloc;
}

int cu_space_is_reserved(CUdeviceptr address)
{
	return address - (CUdeviceptr)(uintptr_t)device_base < 2 * span;
}

void cu_space_each(void (*each)(struct cu_alloc *alloc, void *argument), void *argument)
{
	for (uint32_t unit = 0; unit < cu_units_reached(); unit++) {
		struct cu_alloc *big = step_place[unit / CU_BIG_UNITS].alloc;
		struct cu_alloc *alloc = big != NULL ? big : unit_place[unit].alloc;
		struct block *block = big != NULL ? NULL : unit_place[unit].block;

		if (alloc != NULL && (offset_of(alloc->base) >> UNIT_SHIFT) == unit)
			each(alloc, argument);
		for (uint32_t i = 0; block != NULL && i < block->fresh; i++)
			if (block->piece_of[i].kind != CU_ALLOC_NONE)
				each(&block->piece_of[i], argument);
	}
}
