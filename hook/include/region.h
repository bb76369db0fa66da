/* SPDX-License-Identifier: Apache-2.0
 *
 * The two files through which a node and a container talk: the layout, and nothing else.
 *
 *   grant   one page, written by the node only, mounted read-only at /usr/local/vgpu/grants/<name>.
 *           What the holder may use. It is never replaced while live (a rename is invisible through a
 *           bind mount) but changed in place: two slots, each with a checksum, and one aligned 64-bit
 *           selector stored last. A writer killed anywhere leaves the old slot valid; no reader waits.
 *   usage   mounted read-write at /usr/local/vgpu/usage/<name>/region, written by every process that
 *           holds the share. What is in use. The tenant may scribble over it: whoever reads it checks
 *           every size, count and index against the file's real size first and believes nothing.
 *
 * Guarded invariant: at any instant, whatever was killed where, account.units >= sum of what processes hold.
 * So a share can only be over-counted (and is repaired, see below), never over-committed.
 *
 * api/aliquot/api/region_layout.py mirrors this file; tests/api asserts the one against the other, offset by
 * offset. Little endian only. Change anything here: raise AQ_REGION_MINOR (added fields in reserved
 * space) or AQ_REGION_MAJOR (anything else); both sides must go on reading the version before.
 */
#ifndef ALIQUOT_REGION_H
#define ALIQUOT_REGION_H

#include <stddef.h>
#include <stdint.h>

#define AQ_GRANT_MAGIC  0x52475141u /* "AQGR" */
#define AQ_USAGE_MAGIC  0x53555141u /* "AQUS" */
#define AQ_REGION_MAJOR 1u
#define AQ_REGION_MINOR 1u /* 1: hints.ratio, bucket.done_ns */

#define AQ_UUID_LEN   96u /* "GPU-…" or "MIG-…", NUL-terminated */
#define AQ_BUS_ID_LEN 32u /* "00000000:3b:00.0", NUL-terminated */
#define AQ_NAME_LEN   192u /* name of the grant = CDI device name, NUL-terminated */

/* ---- grant ------------------------------------------------------------------------------------ */

#define AQ_GRANT_FILE_SIZE 4096u
#define AQ_GRANT_SLOT_SIZE 1024u
#define AQ_GRANT_SLOT0     512u

enum aq_core_policy {
	AQ_CORE_DEFAULT = 0, /* limit binds only while others want the card (work-conserving) */
	AQ_CORE_FORCE = 1, /* limit always binds */
	AQ_CORE_DISABLE = 2, /* no compute limit */
};

enum aq_grant_flag {
	AQ_GRANT_OVERSUBSCRIBE = 1u << 0, /* beyond the card's memory, allocations move to managed memory */
};

/* One version of a grant. `checksum` is CRC-32 (IEEE, as zlib's) over every byte before it. */
struct aq_grant_slot {
	uint64_t generation; /* equals the selector that names this slot; slot index = generation & 1 */
	uint64_t memory_limit; /* bytes; 0 = no memory limit (an explicit whole card) */
	uint64_t physical_memory; /* bytes of the card; 0 = unknown */
	uint64_t context_overhead; /* bytes one process's context takes; 0 = not known: the node adds what it
				      observes */
	uint32_t core_percent; /* 1..100; 0 = no compute limit */
	uint32_t core_policy; /* enum aq_core_policy */
	uint32_t priority; /* HAMi's CUDA_TASK_PRIORITY: 0 high, 1 low */
	uint32_t flags; /* enum aq_grant_flag */
	char uuid[AQ_UUID_LEN];
	char bus_id[AQ_BUS_ID_LEN];
	char name[AQ_NAME_LEN];
	uint8_t reserved[AQ_GRANT_SLOT_SIZE - 48 - AQ_UUID_LEN - AQ_BUS_ID_LEN - AQ_NAME_LEN - 8];
	uint32_t pad;
	uint32_t checksum;
};

/* Words the node refreshes on its own; each stands alone, is written with one store and is advice. */
struct aq_grant_hints {
	uint64_t suspended; /* non-zero: every launch and allocation waits until it is 0 again */
	uint64_t burst_until_ns; /* CLOCK_MONOTONIC: until then a `default` compute limit does not bind */
	uint64_t hold_until_ns; /* CLOCK_MONOTONIC: until then low priority work gives way */
	uint64_t heartbeat_ns; /* CLOCK_MONOTONIC of the node daemon's last round */
	uint64_t
	    ratio; /* device time seen by NVML for each that was charged, times AQ_RATIO_ONE; 0: not known */
};

#define AQ_RATIO_ONE 65536u

struct aq_grant_file {
	uint32_t magic;
	uint16_t major;
	uint16_t minor;
	uint32_t file_size; /* AQ_GRANT_FILE_SIZE */
	uint32_t slot_offset; /* of slot 0 */
	uint32_t slot_size;
	uint32_t reserved0;
	uint64_t selector; /* generation of the valid slot; aligned, stored last (release) */
	struct aq_grant_hints hints;
	uint8_t reserved1[AQ_GRANT_SLOT0 - 32 - sizeof(struct aq_grant_hints)];
	struct aq_grant_slot slot[2];
	uint8_t reserved2[AQ_GRANT_FILE_SIZE - AQ_GRANT_SLOT0 - 2 * AQ_GRANT_SLOT_SIZE];
};

/* ---- usage ------------------------------------------------------------------------------------ */

#define AQ_USAGE_HEADER_SIZE 4096u
#define AQ_USAGE_SLOT_SIZE   128u
#define AQ_USAGE_SLOTS       1024u
#define AQ_USAGE_FILE_SIZE   (AQ_USAGE_HEADER_SIZE + AQ_USAGE_SLOTS * AQ_USAGE_SLOT_SIZE)

/* Charges are counted in units of what the driver rounds the smallest allocation to. */
#define AQ_UNIT_SHIFT 9u
#define AQ_UNIT_BYTES (1ull << AQ_UNIT_SHIFT)

/* account word: units in the low 33 bits (4 TiB), above them a sequence number that every change bumps.
 * charge word of a slot: the same split. Nothing else ever writes either: each change is one CAS.
 *
 * reserve:  e = epoch; account += units (only if <= limit); charge += units; done if epoch is still e,
 *           else charge -= units and from the start (the account may keep the units: `unsettled`)
 * release:  e = epoch; charge -= units; account -= units in a CAS that is tried only while epoch is e,
 *           else the account keeps them (`unsettled`)
 * reap:     a dead owner's charge -> 0, its owner word -> 0; the account is left to settle
 * settle:   a = account; epoch += 1; s = sum of the charges; epoch += 1; CAS(account: a -> s)
 *
 * So a charge stands in the account from before the driver is asked until after the driver has given the
 * memory back, a settle never takes off what a live process still counts on, and it waits for nobody: a
 * process stopped or killed between any two steps only leaves the account too large until the next settle.
 * tests/hook/test_account_model.py walks every interleaving of these steps, kills included. */
#define AQ_WORD_UNIT_BITS 33u
#define AQ_WORD_UNIT_MASK ((1ull << AQ_WORD_UNIT_BITS) - 1)
#define AQ_WORD_SEQ_ONE   (1ull << AQ_WORD_UNIT_BITS)

/* owner word of a slot: who holds it, claimed and given up with one CAS.
 * bits 0..21 pid as its own namespace sees it, 22..53 low 32 bits of its start time in clock ticks
 * (/proc/self/stat field 22), 54..61 generation (low bits of the charge's sequence at the claim, so that the
 * same process never claims a slot twice under one word), 62 live, 63 claiming. All zero: free.
 * A claim goes free -> claiming, names its PID namespace in `pidns`, then -> live; only then may its owner be
 * looked for. Whoever takes a claiming slot away does no harm: the claimer notices and claims another. */
#define AQ_OWNER_PID_MASK         ((1ull << 22) - 1)
#define AQ_OWNER_START_SHIFT      22u
#define AQ_OWNER_GENERATION_SHIFT 54u
#define AQ_OWNER_LIVE             (1ull << 62)
#define AQ_OWNER_CLAIMING         (1ull << 63)

struct aq_usage_slot {
	uint64_t owner;
	uint64_t charge;
	uint64_t pidns; /* inode of the owner's PID namespace; 0 = not known (yet) */
	uint64_t host_pid; /* written by the node daemon once it knows; 0 = not known */
	uint64_t context_bytes; /* the part of the charge that is context overhead */
	uint64_t spilled_bytes; /* oversubscription: the part of the charge that lies in managed memory */
	uint64_t launches; /* statistics, not exact under concurrency */
	uint64_t device_ns; /* device time charged to this process */
	uint64_t observed_bytes; /* the part of the charge that the node added (aq_usage_observe) */
	uint8_t reserved[AQ_USAGE_SLOT_SIZE - 72];
};

/* The compute bucket of the share; all its processes draw from it (see hook/src/limiter.c). */
struct aq_usage_bucket {
	int64_t tokens_ns; /* device time still to spend; negative = debt, capped */
	uint64_t refilled_at_ns; /* CLOCK_MONOTONIC of the last refill */
	uint64_t busy_ns; /* device time ever charged */
	uint64_t waiters; /* futex word and count, advisory */
	uint64_t last_launch_ns; /* CLOCK_MONOTONIC_COARSE of the latest launch: is the share busy? */
	uint64_t done_ns; /* device time ever charged for work that is known to be done */
	uint64_t reserved[10];
};

/* Bits of `complaints`: what a hook found that the node's operator should know. */
enum aq_complaint {
	AQ_COMPLAINT_CONTEXT = 1, /* the limit is smaller than one context */
	AQ_COMPLAINT_SLOTS = 2, /* more processes than slots: some got nothing */
	AQ_COMPLAINT_CARD = 4, /* a program asked for a card outside its grants */
	AQ_COMPLAINT_BLIND = 8, /* a process that cannot say who it is: no /proc of its own namespace */
	AQ_COMPLAINT_SWITCH = 16, /* the environment asked for no limits; it was not heard */
};

/* Which call asked for memory that was not there. */
enum aq_refusal {
	AQ_REFUSED_LINEAR = 0,
	AQ_REFUSED_PITCHED = 1,
	AQ_REFUSED_MANAGED = 2,
	AQ_REFUSED_ASYNC = 3, /* stream-ordered, the device's or an own pool */
	AQ_REFUSED_HANDLE = 4, /* cuMemCreate */
	AQ_REFUSED_ARRAY = 5,
	AQ_REFUSED_MIPMAP = 6,
	AQ_REFUSED_GRAPH = 7,
	AQ_REFUSED_CONTEXT = 8,
	AQ_WAITED = 9, /* none: an allocation that waited for room, whatever came of it */
	AQ_REFUSALS = 12,
};

struct aq_usage_file {
	uint32_t magic;
	uint16_t major;
	uint16_t minor;
	uint32_t file_size;
	uint32_t header_size;
	uint32_t slot_size;
	uint32_t slot_count;
	uint64_t complaints; /* bit set: what a hook found wrong with this file; the node reports it */
	uint64_t refused[AQ_REFUSALS]; /* allocations refused for want of room, by kind */
	uint64_t account; /* own cache line (offset 128): units and sequence */
	uint64_t epoch; /* bumped twice by every settle */
	uint64_t unsettled; /* non-zero: somebody left units behind that the next settle takes off */
	uint64_t slots_used; /* no slot from this index on was ever claimed; only grows */
	uint8_t reserved1[96];
	struct aq_usage_bucket bucket; /* offset 256 */
	uint8_t reserved2[AQ_USAGE_HEADER_SIZE - 256 - sizeof(struct aq_usage_bucket)];
	struct aq_usage_slot slot[AQ_USAGE_SLOTS];
};

#define AQ_ASSERT_AT(type, field, offset) \
	_Static_assert(offsetof(struct type, field) == (offset), #type "." #field " moved")

_Static_assert(sizeof(struct aq_grant_slot) == AQ_GRANT_SLOT_SIZE, "grant slot size");
_Static_assert(sizeof(struct aq_grant_file) == AQ_GRANT_FILE_SIZE, "grant file size");
_Static_assert(sizeof(struct aq_usage_slot) == AQ_USAGE_SLOT_SIZE, "usage slot size");
_Static_assert(sizeof(struct aq_usage_file) == AQ_USAGE_FILE_SIZE, "usage file size");
AQ_ASSERT_AT(aq_grant_file, selector, 24);
AQ_ASSERT_AT(aq_grant_file, hints, 32);
AQ_ASSERT_AT(aq_grant_file, slot, 512);
AQ_ASSERT_AT(aq_grant_slot, core_percent, 32);
AQ_ASSERT_AT(aq_grant_slot, uuid, 48);
AQ_ASSERT_AT(aq_grant_slot, bus_id, 144);
AQ_ASSERT_AT(aq_grant_slot, name, 176);
AQ_ASSERT_AT(aq_grant_slot, checksum, 1020);
AQ_ASSERT_AT(aq_usage_file, complaints, 24);
AQ_ASSERT_AT(aq_usage_file, refused, 32);
AQ_ASSERT_AT(aq_usage_file, account, 128);
AQ_ASSERT_AT(aq_usage_file, epoch, 136);
AQ_ASSERT_AT(aq_usage_file, bucket, 256);
AQ_ASSERT_AT(aq_usage_file, slot, 4096);

#endif
