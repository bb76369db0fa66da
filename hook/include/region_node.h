/* SPDX-License-Identifier: Apache-2.0
 *
 * What a node daemon does to the region files, as a small library (build/hook/libaliquot-region.so, loaded
 * by aliquot.node.regions through ctypes). It is C because each of these steps is one atomic instruction on
 * memory that others write at the same time, and because a tenant may truncate a file while we look at it:
 * every function here survives that (SIGBUS is caught inside the call and becomes -EIO).
 *
 * Every function returns >= 0 or a negative errno. None of them waits, allocates on behalf of the caller, or
 * trusts a count or index read from a usage file.
 */
#ifndef ALIQUOT_REGION_NODE_H
#define ALIQUOT_REGION_NODE_H

#include <stdint.h>
#include <sys/types.h>

#include "region.h"

/* Writes a complete new grant file at `path` (temp name in the same folder, fsync, link; mode 0444).
 * -EEXIST if there is one: use aq_grant_update. `grant->generation` and `checksum` are filled in here. */
int aq_grant_create(const char *path, const struct aq_grant_slot *grant);

/* Changes a live grant in place: fills the other slot, then stores the selector. -EPROTO: not a grant file of
 * a version this library reads. Returns 0 also when the content was already the same (nothing is written). */
int aq_grant_update(const char *path, const struct aq_grant_slot *grant);

/* Copies the valid slot out. -EPROTO unreadable version, -EBADMSG no slot has a right checksum. */
int aq_grant_read(const char *path, struct aq_grant_slot *out);

/* Stores the hints that are not UINT64_MAX. */
int aq_grant_hint(const char *path, const struct aq_grant_hints *hints);

/* Creates an empty usage file of AQ_USAGE_FILE_SIZE at `path`, mode 0666 whatever the umask.
 * -EEXIST if there is one (its content is then left alone). */
int aq_usage_create(const char *path);

/* One occupied slot of a usage file. */
struct aq_usage_process {
	uint64_t owner; /* the owner word: identity for aq_usage_settle */
	uint64_t pidns; /* 0 = the process died, or has not come, between claiming the slot and naming its
			   namespace */
	uint64_t start_time; /* low 32 bits of /proc/<pid>/stat field 22 */
	uint32_t pid; /* as its own namespace sees it */
	uint32_t index; /* of the slot */
	uint64_t host_pid; /* what the node wrote; 0 = not yet known */
	uint64_t used_bytes;
	uint64_t context_bytes;
	uint64_t spilled_bytes;
	uint64_t launches;
	uint64_t device_ns;
};

struct aq_usage_report {
	uint64_t used_bytes; /* the account, clamped to what the format can say */
	uint64_t busy_ns;
	uint64_t done_ns; /* of busy_ns: what is known to be done */
	uint64_t last_launch_ns;
	uint64_t complaints;
	uint64_t repaired_bytes; /* taken off the account in this call */
	uint32_t occupied; /* slots with an owner, before reaping */
	uint32_t reaped; /* slots given back in this call */
	uint32_t unsettled; /* 1: account and charges disagree and settling lost every race; try again soon */
	uint32_t
	    suspicious; /* 1: the file says things no hook would write; it was read as far as it is sane */
};

/* Reads a usage file: the report, and at most `capacity` occupied slots into `processes`. Returns how many.
 */
int aq_usage_read(const char *path, struct aq_usage_report *report, struct aq_usage_process *processes,
		  size_t capacity);

/* Gives back what dead owners hold, then sets the account to the sum of the slots (see region.h).
 * `dead` are owner words that aq_usage_read returned BEFORE the caller looked for those processes and did not
 * find them: a slot claimed since then has another owner word and is not touched. With none dead it only
 * repairs the account (after a reaper was killed half way). */
int aq_usage_settle(const char *path, const uint64_t *dead, size_t dead_count,
		    struct aq_usage_report *report);

/* Gives back one slot of an owner that is known to be gone: 1, or 0 when the slot is not `owner`'s any more.
 * For owners whose word occurs twice (equal PIDs in two namespaces, begun in one clock tick) and only one of
 * whom is dead; the account is left to aq_usage_settle. */
int aq_usage_reap(const char *path, uint32_t index, uint64_t owner);

/* Makes the charge of a process what the driver says it has, where that is more than it was charged with:
 * context, modules, and whatever no hook sees. `charged_bytes` is `used_bytes` as aq_usage_read gave it
 * before the driver was asked; when it has changed since, nothing is done (-EAGAIN), for the two figures
 * belong to different moments. What this adds may pass the limit; then new memory is refused until it fits
 * again. Comes off again when the driver says less, and with the process. */
int aq_usage_observe(const char *path, uint32_t index, uint64_t owner, uint64_t charged_bytes,
		     uint64_t driver_bytes);

/* Tells the owner of slot `index` its PID on the host (only if `owner` still holds the slot). */
int aq_usage_set_host_pid(const char *path, uint32_t index, uint64_t owner, uint64_t host_pid);

#endif
