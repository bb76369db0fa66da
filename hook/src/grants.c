/* SPDX-License-Identifier: Apache-2.0
 *
 * See grants.h and region.h. A grant file is believed (the container sees it read-only); a usage file is not.
 */
#include "grants.h"

#include <errno.h>
#include <string.h>

#include "crc32.h"
#include "early.h"
#include "files.h"
#include "sigbus.h"
#include "view.h"

struct folder {
	uint32_t count;
	bool too_many;
	char names[AQ_MAX_SHARES][AQ_NAME_LEN + 1];
};

static void remember(const char *name, void *argument)
{
	struct folder *folder = argument;
	uint32_t place = folder->count;
	if (place == AQ_MAX_SHARES || strlen(name) > AQ_NAME_LEN) {
		folder->too_many = true;
		return;
	}
	/* In the order of their names, so that all processes take from several shares in the same order. */
	while (place > 0 && strcmp(folder->names[place - 1], name) > 0) {
		memcpy(folder->names[place], folder->names[place - 1], sizeof(folder->names[0]));
		place--;
	}
	memcpy(folder->names[place], name, strlen(name) + 1);
	folder->count++;
}

/* Copies the slot that the selector names, checked; false while a writer is between two stores. */
static bool read_slot(const struct aq_grant_file *file, uint64_t selector, struct aq_grant_slot *out)
{
	memcpy(out, &file->slot[selector & 1], sizeof(*out));
	return out->generation == selector &&
	       out->checksum == aq_crc32(out, offsetof(struct aq_grant_slot, checksum));
}

static uint64_t limit_units(uint64_t bytes)
{
	/* Rounded down: a limit is never passed, not even by a part of a unit. */
	return bytes == 0 ? AQ_UNLIMITED : bytes >> AQ_UNIT_SHIFT;
}

static void adopt(struct aq_share *share, const struct aq_grant_slot *slot)
{
	/* An account that is gone cannot be kept: nothing more is granted from it. */
	uint64_t limit = aq_sigbus_lost() ? 0 : limit_units(slot->memory_limit);
	__atomic_store_n(&share->limit, limit, __ATOMIC_RELAXED);
	__atomic_store_n(&share->context_overhead, slot->context_overhead, __ATOMIC_RELAXED);
	__atomic_store_n(&share->core_percent, slot->core_percent, __ATOMIC_RELAXED);
	__atomic_store_n(&share->core_policy, slot->core_policy, __ATOMIC_RELAXED);
	__atomic_store_n(&share->priority, slot->priority, __ATOMIC_RELAXED);
	__atomic_store_n(&share->flags, slot->flags, __ATOMIC_RELAXED);
	__atomic_store_n(&share->generation, slot->generation, __ATOMIC_RELEASE);
}

void aq_share_refresh(struct aq_share *share)
{
	struct aq_grant_slot slot;
	uint64_t selector = __atomic_load_n(&share->grant->selector, __ATOMIC_ACQUIRE);
	/* An unreadable slot leaves what was in force before. */
	if (read_slot(share->grant, selector, &slot)) {
		adopt(share, &slot);
		aq_view_describe_grants();
	}
}

/* NULL, or why this grant cannot be used. */
static const char *open_grant(const char *name)
{
	char path[512];
	void *map;
	size_t length;
	struct aq_grant_slot slot;
	struct aq_share *share = &aq_shares[aq_share_count];
	CUuuid uuid;

	if (!aq_path(path, sizeof(path), aq_root, "grants", name))
		return "its name is too long";
	if (aq_map_file(path, AQ_GRANT_FILE_SIZE, false, &map, &length) < 0)
		return "the grant cannot be opened";
	const struct aq_grant_file *file = map;
	if (file->magic != AQ_GRANT_MAGIC || file->major != AQ_REGION_MAJOR ||
	    file->slot_offset != AQ_GRANT_SLOT0 || file->slot_size != AQ_GRANT_SLOT_SIZE)
		return "the grant is of a version that this library does not read";
	uint64_t selector = __atomic_load_n(&file->selector, __ATOMIC_ACQUIRE);
	/* The one before may serve while the newest is damaged. */
	if (!read_slot(file, selector, &slot) && !read_slot(file, selector - 1, &slot))
		return "the grant is damaged";
	slot.uuid[sizeof(slot.uuid) - 1] = '\0';
	if (!aq_uuid_parse(slot.uuid, &uuid))
		return "the grant names no card";

	char usage[512];
	if (!aq_path(usage, sizeof(usage), aq_root, "usage", name) ||
	    !aq_path(path, sizeof(path), usage, "region", NULL))
		return "its name is too long";
	int rc = aq_map_file(path, AQ_USAGE_FILE_SIZE, true, &map, &length);
	if (rc == -EPROTO)
		return "its usage file was cut short";
	if (rc < 0)
		return "its usage file cannot be opened for writing";
	aq_sigbus_guard(map, length);
	*share = (struct aq_share){.grant = file, .index = aq_share_count, .standalone_index = -1};
	if (aq_account_bind(&share->account, map, length) < 0)
		return "its usage file is damaged or of another version";
	adopt(share, &slot);
	if (aq_card_add(&uuid, aq_share_count) == AQ_NO_CARD)
		return "there are more cards than this library can hold";
	aq_share_count++;
	return NULL;
}

enum aq_mode aq_grants_read(void)
{
	char path[512];
	/* Too large for the stack of a small thread; aq_decide lets only one in. */
	AQ_EARLY_LISTING static struct folder folder;
	folder.count = 0;
	folder.too_many = false;
	if (!aq_path(path, sizeof(path), aq_root, "grants", NULL))
		return AQ_MODE_REFUSED;
	int rc = aq_list_folder(path, remember, &folder);
	if (rc == -ENOENT || (rc == 0 && folder.count == 0 && !folder.too_many))
		return AQ_MODE_OFF;
	if (rc < 0)
		return AQ_REFUSE_BECAUSE(path, " cannot be read");
	if (folder.too_many)
		return AQ_REFUSE_BECAUSE(path, " holds more than 64 grants, or one whose name is too long");
	for (uint32_t i = 0; i < folder.count; i++) {
		const char *why = open_grant(folder.names[i]);
		if (why)
			return AQ_REFUSE_BECAUSE(
			    "grant ", folder.names[i], ": ", why,
			    "; have the container started again, and if that does not help tell the ",
			    "operator of the node");
	}
	return AQ_MODE_GRANT;
}
