/* SPDX-License-Identifier: Apache-2.0
 *
 * The node's side of the usage file: see region_node.h. One mapping per call, so nothing of a file is kept
 * between calls and a file that was swapped is simply the next call's file. A file cut short under a running
 * call ends that call with -EIO (guard.h).
 */
#include <errno.h>
#include <string.h>

#include "account.h"
#include "guard.h"
#include "region_map.h"
#include "region_node.h"

/* Races a settle may lose in one call; each takes a few microseconds, the caller comes again within a second.
 */
#define SETTLE_ATTEMPTS 64u

AQ_EXPORT int aq_usage_create(const char *path)
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
	return aq_region_make(path, &blank, sizeof(blank), 0666);
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
	report->done_ns = __atomic_load_n(&file->bucket.done_ns, __ATOMIC_RELAXED);
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
	struct aq_region_map view;
	memset(reading->report, 0, sizeof(*reading->report));
	int rc = aq_region_open(&view, path, AQ_USAGE_FILE_SIZE, writable);
	if (rc == -EPROTO || rc == -ELOOP)
		reading->report->suspicious = 1;
	if (rc < 0)
		return rc;
	reading->length = view.length;
	rc = aq_guarded(step, view.map, reading);
	if (rc == -EIO)
		reading->report->suspicious = 1;
	aq_region_close(&view);
	return rc;
}

AQ_EXPORT int aq_usage_read(const char *path, struct aq_usage_report *report,
			    struct aq_usage_process *processes, size_t capacity)
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

AQ_EXPORT int aq_usage_settle(const char *path, const uint64_t *dead, size_t dead_count,
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
	struct aq_region_map view;
	int rc = aq_region_open(&view, path, AQ_USAGE_FILE_SIZE, 1);
	if (rc < 0)
		return rc;
	request->length = view.length;
	rc = aq_guarded(step, view.map, request);
	aq_region_close(&view);
	return rc;
}

AQ_EXPORT int aq_usage_reap(const char *path, uint32_t index, uint64_t owner)
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

AQ_EXPORT int aq_usage_set_host_pid(const char *path, uint32_t index, uint64_t owner, uint64_t host_pid)
{
	struct slot_request request = {.index = index, .owner = owner, .host_pid = host_pid};
	return slot_call(path, set_host_pid_mapped, &request);
}

struct observation {
	size_t length;
	uint32_t index;
	uint64_t owner;
	uint64_t charged;
	uint64_t driver;
};

static int observe_mapped(void *map, void *argument)
{
	const struct observation *seen = argument;
	struct aq_account account;
	int rc = aq_account_bind(&account, map, seen->length);
	if (rc < 0)
		return rc;
	if (seen->index >= account.slot_count)
		return -ERANGE;
	struct aq_usage_slot *slot = aq_account_slot(&account, seen->index);
	if (__atomic_load_n(&slot->owner, __ATOMIC_SEQ_CST) != seen->owner)
		return -ESRCH;
	uint64_t units = aq_word_units(__atomic_load_n(&slot->charge, __ATOMIC_SEQ_CST));
	if (units != seen->charged >> AQ_UNIT_SHIFT)
		return -EAGAIN;
	/* A tenant may have written anything here; more than the charge it cannot be. */
	uint64_t added = __atomic_load_n(&slot->observed_bytes, __ATOMIC_SEQ_CST) >> AQ_UNIT_SHIFT;
	added = added < units ? added : units;
	uint64_t own = units - added, driver = aq_units_of(seen->driver);
	uint64_t wanted = driver > own ? driver - own : 0;
	if (wanted > added)
		rc = aq_account_reserve(&account, slot, wanted - added, AQ_UNLIMITED);
	else if (wanted < added)
		aq_account_release(&account, slot, added - wanted);
	if (rc == 0)
		__atomic_store_n(&slot->observed_bytes, wanted << AQ_UNIT_SHIFT, __ATOMIC_SEQ_CST);
	return rc;
}

AQ_EXPORT int aq_usage_observe(const char *path, uint32_t index, uint64_t owner, uint64_t charged_bytes,
			       uint64_t driver_bytes)
{
	struct aq_region_map view;
	int rc = aq_region_open(&view, path, AQ_USAGE_FILE_SIZE, 1);
	if (rc < 0)
		return rc;
	struct observation seen = {view.length, index, owner, charged_bytes, driver_bytes};
	rc = aq_guarded(observe_mapped, view.map, &seen);
	aq_region_close(&view);
	return rc;
}
