/* SPDX-License-Identifier: Apache-2.0
 *
 * The arena of objects: memory that is only ever used for objects of one size, so that a handle can be looked
 * at whatever became of it. See cuda_core.h.
 */
#include <string.h>
#include <sys/mman.h>

#include "cuda_core.h"
#include "cuda_parts.h"

#define ARENA_BYTES (UINT64_C(64) << 30)
#define ALIGN       64u
#define CLASSES     64u /* sizes up to CLASSES * ALIGN bytes */
#define BATCH       16u

struct free_object {
	struct cu_object object;
	struct free_object *next;
};

static char *arena;
static uint64_t used, arena_size;
static struct free_object *free_list[CLASSES + 1];
static uint64_t last_id;

static int open_arena(void)
{
	for (uint64_t size = ARENA_BYTES; size >= UINT64_C(64) << 20; size /= 4) {
		void *map = mmap(NULL, size, PROT_READ | PROT_WRITE,
				 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

		if (map != MAP_FAILED) {
			arena = map;
			arena_size = size;
			return 1;
		}
	}
	return 0;
}

void *cu_object_make(enum cu_kind kind, size_t size)
{
	size_t class = (size + ALIGN - 1) / ALIGN;
	struct free_object *object;

	if (class > CLASSES || (arena == NULL && !open_arena()))
		return NULL;
	if (free_list[class] == NULL)
		for (unsigned i = 0; i < BATCH && used + class * ALIGN <= arena_size; i++) {
			object = (struct free_object *)(void *)(arena + used);
			used += class * ALIGN;
			object->object.kind = CU_KIND_FREE;
			object->next = free_list[class];
			free_list[class] = object;
		}
	object = free_list[class];
	if (object == NULL)
		return NULL;
	free_list[class] = object->next;
	uint32_t serial = object->object.serial + 1;

	memset(object, 0, class * ALIGN);
	object->object.serial = serial | (uint32_t)class << 24;
	object->object.kind = (uint32_t)kind;
	return object;
}

void cu_object_end(void *ended)
{
	struct free_object *object = ended;
	uint32_t class = object->object.serial >> 24;

	object->object.kind = CU_KIND_FREE;
	object->next = free_list[class];
	free_list[class] = object;
}

int cu_is(const void *handle, enum cu_kind kind)
{
	uintptr_t at = (uintptr_t)handle - (uintptr_t)arena;

	return handle != NULL && arena != NULL && at < used && at % ALIGN == 0 &&
	       ((const struct cu_object *)handle)->kind == (uint32_t)kind;
}

void cu_object_forget(void)
{
	/* A handle of the parent must not be one of the child. */
	arena = NULL;
	used = arena_size = 0;
	memset(free_list, 0, sizeof free_list);
}

uint64_t cu_next_id(void)
{
	return __atomic_add_fetch(&last_id, 1, __ATOMIC_RELAXED);
}
