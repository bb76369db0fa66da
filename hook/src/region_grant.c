/* SPDX-License-Identifier: Apache-2.0
 *
 * The node's side of the grant file: see region_node.h. Written by one daemon, read by everybody at any
 * moment; a writer killed between any two stores leaves the version before in force.
 */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "crc32.h"
#include "guard.h"
#include "region_map.h"
#include "region_node.h"

static void slot_seal(struct aq_grant_slot *slot, uint64_t generation)
{
	slot->generation = generation;
	slot->checksum = aq_crc32(slot, offsetof(struct aq_grant_slot, checksum));
}

AQ_EXPORT int aq_grant_create(const char *path, const struct aq_grant_slot *grant)
{
	static const struct aq_grant_file blank = {
	    .magic = AQ_GRANT_MAGIC,
	    .major = AQ_REGION_MAJOR,
	    .minor = AQ_REGION_MINOR,
	    .file_size = AQ_GRANT_FILE_SIZE,
	    .slot_offset = AQ_GRANT_SLOT0,
	    .slot_size = AQ_GRANT_SLOT_SIZE,
	    .selector = 2,
	};
	struct aq_grant_file file = blank;
	file.slot[0] = *grant;
	slot_seal(&file.slot[0], file.selector);
	return aq_region_make(path, &file, sizeof(file), 0444);
}

static int grant_readable(const struct aq_grant_file *file)
{
	return file->magic == AQ_GRANT_MAGIC && file->major == AQ_REGION_MAJOR &&
	       file->slot_offset == AQ_GRANT_SLOT0 && file->slot_size == AQ_GRANT_SLOT_SIZE;
}

static int slot_valid(const struct aq_grant_slot *slot, uint64_t generation)
{
	return slot->generation == generation &&
	       slot->checksum == aq_crc32(slot, offsetof(struct aq_grant_slot, checksum));
}

/* The slot the selector names; if that one is damaged, the one before it. NULL: neither is right. */
static const struct aq_grant_slot *valid_slot(const struct aq_grant_file *file, uint64_t selector)
{
	for (uint64_t generation = selector; generation + 1 >= selector && generation > 0; generation--) {
		const struct aq_grant_slot *slot = &file->slot[generation & 1];
		if (slot_valid(slot, generation))
			return slot;
	}
	return NULL;
}

static int same_content(const struct aq_grant_slot *one, const struct aq_grant_slot *other)
{
	const size_t from = offsetof(struct aq_grant_slot, memory_limit);
	return memcmp((const char *)one + from, (const char *)other + from,
		      offsetof(struct aq_grant_slot, checksum) - from) == 0;
}

static int update_mapped(void *map, void *argument)
{
	struct aq_grant_file *file = map;
	const struct aq_grant_slot *grant = argument;
	if (!grant_readable(file))
		return -EPROTO;
	uint64_t selector = __atomic_load_n(&file->selector, __ATOMIC_ACQUIRE);
	const struct aq_grant_slot *current = valid_slot(file, selector);
	if (current && current->generation == selector && same_content(current, grant))
		return 0;
	struct aq_grant_slot *target = &file->slot[(selector + 1) & 1];
	struct aq_grant_slot fresh = *grant;
	slot_seal(&fresh, selector + 1);
	/* While it is being filled the slot carries a generation nobody asks for. */
	__atomic_store_n(&target->generation, 0, __ATOMIC_SEQ_CST);
	memcpy((char *)target + sizeof(uint64_t), (const char *)&fresh + sizeof(uint64_t),
	       sizeof(fresh) - sizeof(uint64_t));
	__atomic_store_n(&target->generation, fresh.generation, __ATOMIC_RELEASE);
	__atomic_store_n(&file->selector, selector + 1, __ATOMIC_RELEASE);
	return 0;
}

AQ_EXPORT int aq_grant_update(const char *path, const struct aq_grant_slot *grant)
{
	struct aq_grant_slot copy = *grant;
	struct aq_region_map view;
	int rc = aq_region_open(&view, path, AQ_GRANT_FILE_SIZE, 1);
	if (rc < 0)
		return rc;
	rc = aq_guarded(update_mapped, view.map, &copy);
	if (rc == 0 && msync(view.map, AQ_GRANT_FILE_SIZE, MS_SYNC) < 0)
		rc = -errno;
	aq_region_close(&view);
	return rc;
}

static int read_mapped(void *map, void *argument)
{
	const struct aq_grant_file *file = map;
	struct aq_grant_slot *out = argument;
	if (!grant_readable(file))
		return -EPROTO;
	/* Another writer may be at work: copy, then check the copy. */
	for (int attempt = 0; attempt < 8; attempt++) {
		uint64_t selector = __atomic_load_n(&file->selector, __ATOMIC_ACQUIRE);
		for (uint64_t generation = selector; generation + 1 >= selector && generation > 0;
		     generation--) {
			memcpy(out, &file->slot[generation & 1], sizeof(*out));
			if (slot_valid(out, generation))
				return 0;
		}
	}
	return -EBADMSG;
}

AQ_EXPORT int aq_grant_read(const char *path, struct aq_grant_slot *out)
{
	struct aq_region_map view;
	int rc = aq_region_open(&view, path, AQ_GRANT_FILE_SIZE, 0);
	if (rc < 0)
		return rc;
	rc = aq_guarded(read_mapped, view.map, out);
	aq_region_close(&view);
	return rc;
}

static int hint_mapped(void *map, void *argument)
{
	struct aq_grant_file *file = map;
	const struct aq_grant_hints *hints = argument;
	if (!grant_readable(file))
		return -EPROTO;
	const uint64_t *from = (const uint64_t *)hints;
	uint64_t *to = (uint64_t *)&file->hints;
	for (size_t i = 0; i < sizeof(*hints) / sizeof(*from); i++)
		if (from[i] != UINT64_MAX)
			__atomic_store_n(&to[i], from[i], __ATOMIC_RELAXED);
	return 0;
}

AQ_EXPORT int aq_grant_hint(const char *path, const struct aq_grant_hints *hints)
{
	struct aq_grant_hints copy = *hints;
	struct aq_region_map view;
	int rc = aq_region_open(&view, path, AQ_GRANT_FILE_SIZE, 1);
	if (rc < 0)
		return rc;
	rc = aq_guarded(hint_mapped, view.map, &copy);
	aq_region_close(&view);
	return rc;
}
