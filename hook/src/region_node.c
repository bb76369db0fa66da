/* SPDX-License-Identifier: Apache-2.0
 *
 * The node's side of the region files: see region_node.h. One mapping per call, so nothing of a file is kept
 * between calls and a file that was swapped is simply the next call's file.
 *
 * Never follows a symbolic link, opens a FIFO, or believes a size that a tenant could have written; a file
 * cut short under a running call ends that call with -EIO (guard.h).
 */
#include "region_node.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "account.h"
#include "crc32.h"
#include "guard.h"

#define EXPORT __attribute__((visibility("default")))

/* Races a settle may lose in one call; each takes a few microseconds, the caller comes again within a second.
 */
#define SETTLE_ATTEMPTS 64u

struct view {
	void *map;
	size_t length;
};

/* Maps at least `need` bytes of a regular file. */
static int view_open(struct view *view, const char *path, size_t need, int writable)
{
	int flags = (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY;
	int fd = open(path, flags);
	if (fd < 0)
		return -errno;
	struct stat stat;
	int rc = fstat(fd, &stat) < 0 ? -errno : 0;
	if (rc == 0 && (!S_ISREG(stat.st_mode) || stat.st_size < 0 || (size_t)stat.st_size < need))
		rc = -EPROTO;
	if (rc == 0) {
		/* A tenant may have made it huge; nothing of ours lies beyond these bounds. */
		const off_t most = 1 << 30;
		view->length = (size_t)(stat.st_size < most ? stat.st_size : most);
		int protection = PROT_READ | (writable ? PROT_WRITE : 0);
		view->map = mmap(NULL, view->length, protection, MAP_SHARED, fd, 0);
		if (view->map == MAP_FAILED)
			rc = -errno;
	}
	close(fd);
	return rc;
}

static void view_close(const struct view *view)
{
	munmap(view->map, view->length);
}

/* ---- grant ------------------------------------------------------------------------------------ */

static void slot_seal(struct aq_grant_slot *slot, uint64_t generation)
{
	slot->generation = generation;
	slot->checksum = aq_crc32(slot, offsetof(struct aq_grant_slot, checksum));
}

static int write_all(int fd, const void *data, size_t size)
{
	const char *next = data;
	while (size > 0) {
		ssize_t done = write(fd, next, size);
		if (done < 0 && errno == EINTR)
			continue;
		if (done < 0)
			return -errno;
		next += done;
		size -= (size_t)done;
	}
	return 0;
}

/* Makes `path` with this content in one step: nobody ever sees half a file, and nothing is replaced. */
static int create_file(const char *path, const void *data, size_t size, mode_t mode)
{
	char temporary[4096];
	int length = snprintf(temporary, sizeof(temporary), "%s.%ld.tmp", path, (long)getpid());
	if (length < 0 || (size_t)length >= sizeof(temporary))
		return -ENAMETOOLONG;
	/* Left over from a killed process with our number; a live one of that number is us. */
	unlink(temporary);
	int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (fd < 0)
		return -errno;
	int rc = write_all(fd, data, size);
	if (rc == 0 && (fchmod(fd, mode) < 0 || fsync(fd) < 0))
		rc = -errno;
	close(fd);
	if (rc == 0 && link(temporary, path) < 0)
		rc = -errno;
	unlink(temporary);
	return rc;
}

EXPORT int aq_grant_create(const char *path, const struct aq_grant_slot *grant)
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
	return create_file(path, &file, sizeof(file), 0444);
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

EXPORT int aq_grant_update(const char *path, const struct aq_grant_slot *grant)
{
	struct aq_grant_slot copy = *grant;
	struct view view;
	int rc = view_open(&view, path, AQ_GRANT_FILE_SIZE, 1);
	if (rc < 0)
		return rc;
	rc = aq_guarded(update_mapped, view.map, &copy);
	if (rc == 0 && msync(view.map, AQ_GRANT_FILE_SIZE, MS_SYNC) < 0)
		rc = -errno;
	view_close(&view);
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

EXPORT int aq_grant_read(const char *path, struct aq_grant_slot *out)
{
	struct view view;
	int rc = view_open(&view, path, AQ_GRANT_FILE_SIZE, 0);
	if (rc < 0)
		return rc;
	rc = aq_guarded(read_mapped, view.map, out);
	view_close(&view);
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

EXPORT int aq_grant_hint(const char *path, const struct aq_grant_hints *hints)
{
	struct aq_grant_hints copy = *hints;
	struct view view;
	int rc = view_open(&view, path, AQ_GRANT_FILE_SIZE, 1);
	if (rc < 0)
		return rc;
	rc = aq_guarded(hint_mapped, view.map, &copy);
	view_close(&view);
	return rc;
}

/* ---- usage ------------------------------------------------------------------------------------ */

EXPORT int aq_usage_create(const char *path)
{
	static const struct aq_usage_file blank = {
	    .magic = AQ_USAGE_MAGIC,
	    .major = AQ_REGION_MAJOR,
	    .minor = AQ_REGION_MINOR,
	    .file_size = AQ_USAGE_FILE_SIZE,
	    .header_size = AQ_USAGE_HEADER_SIZE,
	    .slot_size = AQ_USAGE_SLOT_SIZE,
	    .slot_count = AQ_USAGE_SLOTS,
	};
	return create_file(path, &blank, sizeof(blank), 0666);
}

struct reading {
	size_t length;
	struct aq_usage_report *report;
	struct aq_usage_process *processes;
	size_t capacity;
	const uint64_t *dead;
	size_t dead_count;
};

static void read_process(const struct aq_usage_slot *slot, uint32_t index, uint64_t owner,
			 struct aq_usage_process *out)
{
	uint64_t charge = __atomic_load_n(&slot->charge, __ATOMIC_RELAXED);
	*out = (struct aq_usage_process){
	    .owner = owner,
	    .pidns = owner & AQ_OWNER_LIVE ? __atomic_load_n(&slot->pidns, __ATOMIC_RELAXED) : 0,
	    .start_time = owner >> AQ_OWNER_START_SHIFT & UINT32_MAX,
	    .pid = (uint32_t)(owner & AQ_OWNER_PID_MASK),
	    .index = index,
	    .host_pid = __atomic_load_n(&slot->host_pid, __ATOMIC_RELAXED),
	    .used_bytes = aq_word_units(charge) << AQ_UNIT_SHIFT,
	    .context_bytes = __atomic_load_n(&slot->context_bytes, __ATOMIC_RELAXED),
	    .spilled_bytes = __atomic_load_n(&slot->spilled_bytes, __ATOMIC_RELAXED),
	    .launches = __atomic_load_n(&slot->launches, __ATOMIC_RELAXED),
	    .device_ns = __atomic_load_n(&slot->device_ns, __ATOMIC_RELAXED),
	};
}

/* The account as it stands in the file; it counts as suspicious when it says what no hook would write. */
static void read_account(const struct aq_account *account, struct aq_usage_report *report)
{
	const struct aq_usage_file *file = account->file;
	uint64_t sum = 0;
	uint32_t used = aq_account_used_slots(account);
	uint64_t before = __atomic_load_n(&file->account, __ATOMIC_SEQ_CST);
	for (uint32_t i = 0; i < used; i++)
		sum += aq_word_units(__atomic_load_n(&aq_account_slot(account, i)->charge, __ATOMIC_SEQ_CST));
	uint64_t after = __atomic_load_n(&file->account, __ATOMIC_SEQ_CST);
	report->used_bytes = aq_word_units(after) << AQ_UNIT_SHIFT;
	report->busy_ns = __atomic_load_n(&file->bucket.busy_ns, __ATOMIC_RELAXED);
	report->last_launch_ns = __atomic_load_n(&file->bucket.last_launch_ns, __ATOMIC_RELAXED);
	report->complaints = __atomic_load_n(&file->complaints, __ATOMIC_RELAXED);
	if (before == after && sum != aq_word_units(after))
		report->unsettled = 1;
	if (file->file_size < AQ_USAGE_FILE_SIZE ||
	    __atomic_load_n(&file->slots_used, __ATOMIC_RELAXED) > account->slot_count)
		report->suspicious = 1;
}

static int bind(struct aq_account *account, void *map, const struct reading *reading)
{
	int rc = aq_account_bind(account, map, reading->length);
	if (rc < 0 && reading->report)
		reading->report->suspicious = 1;
	return rc;
}

static int usage_read_mapped(void *map, void *argument)
{
	struct reading *reading = argument;
	struct aq_usage_report *report = reading->report;
	struct aq_account account;
	int rc = bind(&account, map, reading);
	if (rc < 0)
		return rc;
	read_account(&account, report);
	size_t found = 0;
	for (uint32_t i = 0; i < account.slot_count; i++) {
		const struct aq_usage_slot *slot = aq_account_slot(&account, i);
		uint64_t owner = __atomic_load_n(&slot->owner, __ATOMIC_SEQ_CST);
		if (owner == 0)
			continue;
		report->occupied++;
		if (!(owner & (AQ_OWNER_LIVE | AQ_OWNER_CLAIMING)) || (owner & AQ_OWNER_PID_MASK) == 0)
			report->suspicious = 1;
		if (found < reading->capacity)
			read_process(slot, i, owner, &reading->processes[found++]);
	}
	return (int)found;
}

static int usage_call(const char *path, int (*step)(void *, void *), struct reading *reading, int writable)
{
	struct view view;
	memset(reading->report, 0, sizeof(*reading->report));
	int rc = view_open(&view, path, AQ_USAGE_FILE_SIZE, writable);
	if (rc == -EPROTO || rc == -ELOOP)
		reading->report->suspicious = 1;
	if (rc < 0)
		return rc;
	reading->length = view.length;
	rc = aq_guarded(step, view.map, reading);
	if (rc == -EIO)
		reading->report->suspicious = 1;
	view_close(&view);
	return rc;
}

EXPORT int aq_usage_read(const char *path, struct aq_usage_report *report, struct aq_usage_process *processes,
			 size_t capacity)
{
	struct reading reading = {.report = report, .processes = processes, .capacity = capacity};
	return usage_call(path, usage_read_mapped, &reading, 0);
}

static int is_dead(const struct reading *reading, uint64_t owner)
{
	for (size_t i = 0; i < reading->dead_count; i++)
		if (reading->dead[i] == owner)
			return 1;
	return 0;
}

static int usage_settle_mapped(void *map, void *argument)
{
	struct reading *reading = argument;
	struct aq_usage_report *report = reading->report;
	struct aq_account account;
	int rc = bind(&account, map, reading);
	if (rc < 0)
		return rc;
	for (uint32_t i = 0; i < account.slot_count; i++) {
		uint64_t owner = __atomic_load_n(&aq_account_slot(&account, i)->owner, __ATOMIC_SEQ_CST);
		if (owner == 0)
			continue;
		report->occupied++;
		if (is_dead(reading, owner) && aq_account_reap(&account, i, owner))
			report->reaped++;
	}
	uint64_t repaired = 0;
	int settled = aq_account_settle(&account, SETTLE_ATTEMPTS, &repaired);
	read_account(&account, report);
	report->repaired_bytes = repaired << AQ_UNIT_SHIFT;
	report->unsettled = settled < 0;
	return 0;
}

EXPORT int aq_usage_settle(const char *path, const uint64_t *dead, size_t dead_count,
			   struct aq_usage_report *report)
{
	struct reading reading = {.report = report, .dead = dead, .dead_count = dead_count};
	return usage_call(path, usage_settle_mapped, &reading, 1);
}

struct slot_request {
	size_t length;
	uint32_t index;
	uint64_t owner;
	uint64_t host_pid;
};

static int usage_reap_mapped(void *map, void *argument)
{
	const struct slot_request *request = argument;
	struct aq_account account;
	int rc = aq_account_bind(&account, map, request->length);
	if (rc < 0)
		return rc;
	if (request->index >= account.slot_count)
		return -ERANGE;
	return aq_account_reap(&account, request->index, request->owner);
}

static int slot_call(const char *path, int (*step)(void *, void *), struct slot_request *request)
{
	struct view view;
	int rc = view_open(&view, path, AQ_USAGE_FILE_SIZE, 1);
	if (rc < 0)
		return rc;
	request->length = view.length;
	rc = aq_guarded(step, view.map, request);
	view_close(&view);
	return rc;
}

EXPORT int aq_usage_reap(const char *path, uint32_t index, uint64_t owner)
{
	struct slot_request request = {.index = index, .owner = owner};
	return slot_call(path, usage_reap_mapped, &request);
}

static int set_host_pid_mapped(void *map, void *argument)
{
	const struct slot_request *request = argument;
	struct aq_account account;
	int rc = aq_account_bind(&account, map, request->length);
	if (rc < 0)
		return rc;
	if (request->index >= account.slot_count)
		return -ERANGE;
	struct aq_usage_slot *slot = aq_account_slot(&account, request->index);
	if (__atomic_load_n(&slot->owner, __ATOMIC_SEQ_CST) != request->owner)
		return -ESRCH;
	__atomic_store_n(&slot->host_pid, request->host_pid, __ATOMIC_SEQ_CST);
	return 0;
}

EXPORT int aq_usage_set_host_pid(const char *path, uint32_t index, uint64_t owner, uint64_t host_pid)
{
	struct slot_request request = {.index = index, .owner = owner, .host_pid = host_pid};
	return slot_call(path, set_host_pid_mapped, &request);
}
