/* SPDX-License-Identifier: Apache-2.0
 *
 * The machine as all processes share it: one file beside the configuration, mapped by everybody who opens the
 * driver, in whatever container. Cards, memory accounts, the process table, the timeline of each card, MIG
 * instances, events, and what the control file asks for.
 *
 * No process may hang or harm another, whatever it was killed in the middle of:
 *   - A process owns one slot of the process table, and the kernel says whether it lives: a record lock on
 * one byte of the file, held through a mapping that is not inherited by fork. It goes with the address space
 *     (exit, exec, SIGKILL) and with nothing else; closing descriptors does not end it, a child does not keep
 *     it, and every PID namespace sees it.
 *   - What a process uses on a card stands in its seat there. Sums are caches: they are changed under the
 * lock of the card, and whoever finds the holder of that lock dead takes it over and adds the seats up again.
 *   - The dead are removed by whoever looks next: before a figure is told and before a request is refused.
 *
 * Single words that others may read without a lock are changed with __atomic stores. Nothing here is a
 * pointer. The layout is private to one build of the driver: a file of another FG_STATE_VERSION is made anew.
 */
#ifndef FAKEGPU_STATE_H
#define FAKEGPU_STATE_H

#include <pthread.h>
#include <stdint.h>

#include "config.h"
#include "control.h"

#define FG_STATE_MAGIC   0x55504746u /* "FGPU", little endian */
#define FG_STATE_VERSION 1u

#define FG_MAX_CARDS     4096u
#define FG_MAX_PROCESSES 2048u
#define FG_MAX_SEATS     4096u
#define FG_QUEUE_ENTRIES 1024u /* most that `queue_depth` may say */
#define FG_MAX_INSTANCES 8u /* GPU instances, and compute instances, of one card */
#define FG_PARTS         (1u + FG_MAX_INSTANCES)
#define FG_EVENT_RING    256u
#define FG_SHARED_EVENTS 1024u
#define FG_NO_INSTANCE   0xffffffffu

/* Busy time is kept in buckets: word = bucket number << 32 | busy ns in it. */
#define FG_CARD_BUCKET_NS 10000000ull /* 10 ms */
#define FG_CARD_BUCKETS   1024u /* the last 10 s */
#define FG_SEAT_BUCKET_NS 100000000ull /* 100 ms */
#define FG_SEAT_BUCKETS   128u /* the last 12.8 s */

/* Words for libnvidia-ml's own settings of a card (clocks, power limit, accounting, …): it lays its own
 * struct over them. Zero in a new state. */
#define FG_NVML_WORDS 512u

/* A lock whose holder may be killed. Word: 0 free, else (slot + 1) | FG_LOCK_WAITERS. See lock.h. */
struct fg_lock {
	uint32_t word;
	uint32_t taken_over; /* how often the holder was found dead */
};

/* Bytes of one memory: the whole card, or one GPU instance. Changed under the card's lock. */
struct fg_account {
	uint64_t capacity; /* what can be given out (driver's reserve already taken off) */
	uint64_t used; /* contexts and data of all seats */
};

/* A card, or a compute instance, runs one kernel at a time. See engine.h. Changed under the card's lock. */
struct fg_engine {
	uint32_t running; /* seat + 1; 0: idle */
	uint32_t last; /* seat + 1 that ran last: turns go round from there */
	uint64_t segment_start; /* CLOCK_MONOTONIC ns */
	uint64_t segment_end; /* when the running kernel ends or is put aside; idle: since when */
	uint64_t turn_end; /* the running seat gives way to others from here on */
	uint64_t busy_ns; /* all time, finished segments */
	uint64_t kernels; /* finished */
	uint64_t waiting[FG_MAX_SEATS / 64]; /* seats with work, as bits */
	uint64_t bucket[FG_CARD_BUCKETS];
};

struct fg_gpu_instance {
	uint32_t in_use;
	uint32_t id; /* nvml's GPU instance id */
	uint32_t profile; /* NVML_GPU_INSTANCE_PROFILE_* */
	uint32_t placement_start, placement_size; /* memory slices */
	uint32_t sm_count;
	uint64_t memory_bytes;
};

struct fg_compute_instance {
	uint32_t in_use;
	uint32_t id; /* unique within its GPU instance */
	uint32_t gi; /* index into gpu_instance[] */
	uint32_t profile; /* NVML_COMPUTE_INSTANCE_PROFILE_* */
	uint32_t placement_start, placement_size;
	uint32_t sm_count;
	uint32_t mig_index; /* order of nvmlDeviceGetMigDeviceHandleByIndex and of CUDA's enumeration */
	uint8_t uuid[16];
	char uuid_text[FG_UUID_TEXT_LEN]; /* "MIG-…" */
};

struct fg_card {
	struct fg_card_config config;
	struct fg_lock lock;

	uint32_t lost; /* fell off the bus: NVML says GPU_IS_LOST, CUDA says unknown */
	uint32_t poison_epoch; /* contexts made before the last change of this are dead … */
	uint32_t poison_code; /* … with this CUresult */
	uint32_t compute_mode; /* CUcomputemode, now */
	uint32_t persistence;
	uint32_t ecc_enabled, ecc_pending;

	uint32_t mig_enabled, mig_pending;
	struct fg_gpu_instance gpu_instance[FG_MAX_INSTANCES];
	struct fg_compute_instance compute_instance[FG_MAX_INSTANCES];

	struct fg_account account[FG_PARTS]; /* 0: the card; 1 + i: gpu_instance[i] */
	struct fg_engine engine[FG_PARTS]; /* 0: the card; 1 + i: compute_instance[i] */

	uint64_t nvml[FG_NVML_WORDS];
};

enum fg_process_stage { FG_PROCESS_FREE = 0, FG_PROCESS_JOINING = 1, FG_PROCESS_LIVE = 2 };

struct fg_process {
	uint32_t stage; /* enum fg_process_stage */
	uint32_t generation;
	int32_t pid; /* as its own namespace sees it */
	int32_t
	    host_pid; /* as the namespace of the state's creator sees it; 0 while nobody there has looked */
	uint64_t start_ticks; /* field 22 of /proc/<pid>/stat */
	uint64_t pid_namespace; /* inode of /proc/self/ns/pid */
	/* Held from the first call to the end by one thread; the kernel marks its first word when that thread
	 * ends. Only a hint to ask about the record lock. Shares its cache line with `stage`: looks read
	 * both. */
	pthread_mutex_t pulse;
	uint32_t uses_cuda; /* 0: only looks and configures, through NVML */
	uint32_t has_files; /* it left files in <state dir>/shared/ that go with it */
	char name[128]; /* path of the program, as nvmlSystemGetProcessName tells it */
	uint8_t pad[48];
};

/* What one process holds on one card (or on one compute instance of it). */
struct fg_seat {
	uint32_t in_use;
	uint32_t process; /* index of the owner */
	uint32_t generation; /* of the owner */
	uint32_t card;
	uint32_t ci; /* index into compute_instance[], or FG_NO_INSTANCE */
	uint32_t gi; /* index into gpu_instance[], or FG_NO_INSTANCE */
	uint32_t contexts;
	uint32_t reserved;
	uint64_t context_bytes; /* overhead now charged */
	uint64_t data_bytes; /* allocations now charged */
	uint64_t peak_bytes;

	/* Work: entries [done, head) of its queue wait; times in ns. See engine.h. */
	uint64_t head, done; /* counts of kernels taken in, and finished */
	uint64_t left_ns; /* of the kernel at `done`; 0: not begun */
	uint64_t busy_ns; /* all time */
	uint64_t bucket[FG_SEAT_BUCKETS];
};

/* A kernel in the queue of a seat; once it is done, when that was. */
struct fg_work {
	uint64_t work_ns; /* while it waits */
	uint64_t time_ns; /* waits: not before this; done: its end */
};

/* An event others may wait for (Xid, …): nvmlEventSetWait hands them out. */
struct fg_event {
	uint64_t sequence; /* 1, 2, …; 0: empty */
	uint64_t time_ns;
	uint64_t type; /* nvmlEventType* */
	uint64_t data; /* the Xid */
	uint32_t card;
	uint32_t gi_id, ci_id; /* FG_NO_INSTANCE when it concerns the whole card */
	uint32_t reserved;
};

/* A CUDA event that several processes know (cuIpcGetEventHandle). */
struct fg_shared_event {
	uint32_t in_use;
	uint32_t process, generation; /* its creator */
	uint32_t recorded;
	uint64_t end_ns;
};

struct fg_state {
	uint32_t magic;
	uint32_t version;
	uint64_t size; /* of the file */
	uint64_t boot; /* changes whenever the state is made anew */
	uint64_t poke; /* offset 24: add 1 (and set bit 2 of `attention`) after writing the control file */
	uint32_t attention; /* offset 32: FG_ATTENTION_*, what the short path of every call looks at */
	uint32_t card_count;
	uint64_t build; /* of the driver: layouts differ */
	uint64_t card_offset, process_offset, seat_offset, queue_offset; /* from the start of the file */
	uint64_t config_inode, config_size, config_time_ns; /* the file this was made from */
	uint64_t config_hash;
	uint64_t creator_pid_namespace;
	struct fg_driver_config driver;

	struct fg_lock lock; /* process table, seats, control, events, MIG */
	uint32_t process_high; /* slots at and above this were never used */
	uint32_t seat_high;
	uint64_t last_sweep_ns; /* all record locks were asked at this time */

	uint64_t control_poke; /* `poke` when the control file was read last */
	uint64_t control_inode, control_size, control_time_ns;
	uint64_t control_checked_ns; /* when the file was looked at last */
	uint32_t control_index; /* control[] that holds */
	uint32_t reserved;
	uint64_t log_sequence;
	uint64_t launch_ns; /* duration of a kernel that says nothing itself: the configuration's or the
			       control file's */
	uint64_t last_control_event; /* highest "id" of an event of the control file that was delivered */
	struct fg_control control[2];

	uint64_t event_sequence; /* of the newest entry of `event` */
	struct fg_event event[FG_EVENT_RING];
	struct fg_shared_event shared_event[FG_SHARED_EVENTS];
};

/* ---- opening ------------------------------------------------------------------------------------------ */

/* Set by fg_state_open, NULL before; never moves afterwards. */
extern struct fg_state *fg_state;

enum fg_open_result {
	FG_OPEN_OK = 0,
	FG_OPEN_NO_CONFIG = 1, /* no such file: there is no driver and no card here */
	FG_OPEN_BAD_CONFIG = 2, /* not understood; one line was written to stderr */
	FG_OPEN_NO_ACCESS = 3, /* state file cannot be opened or made; one line was written to stderr */
	FG_OPEN_MISMATCH = 4, /* configuration was changed while processes use the old one */
};

/* Maps the state (creating it when needed), reads the control file. Cheap when it is mapped already; then
 * also follows a state that was made anew by someone else. Thread-safe. */
enum fg_open_result fg_state_open(void);
/* Path of the configuration and folder of the state, valid after a successful fg_state_open. */
const char *fg_config_path(void);
const char *fg_state_folder(void);

static inline struct fg_card *fg_card_at(uint32_t index)
{
	return (struct fg_card *)((char *)fg_state + fg_state->card_offset) + index;
}

static inline struct fg_process *fg_process_at(uint32_t index)
{
	return (struct fg_process *)((char *)fg_state + fg_state->process_offset) + index;
}

static inline struct fg_seat *fg_seat_at(uint32_t index)
{
	return (struct fg_seat *)((char *)fg_state + fg_state->seat_offset) + index;
}

static inline struct fg_work *fg_queue_at(uint32_t seat)
{
	return (struct fg_work *)((char *)fg_state + fg_state->queue_offset) +
	       (uint64_t)seat * FG_QUEUE_ENTRIES;
}

/* ---- processes (process.c) ---------------------------------------------------------------------------- */

/* Makes this process known (again with `uses_cuda` 1: also as one that uses CUDA); its slot, or -1 when the
 * table is full. Needed before any fg_lock_take. After fork the child gets its own. */
int fg_process_join(int uses_cuda);
/* This process's slot, or -1. */
int fg_process_self(void);
/* Removes the dead and what they held; exact at the time of the call, whatever namespace they lived in. */
void fg_reap(void);
/* The same, but asks the kernel only where a hint says so: what the fast paths call. */
void fg_reap_hinted(void);
/* Where the caller can see them in /proc, fills host_pid of processes that live in other PID namespaces. */
void fg_resolve_host_pids(void);
/* The number to report for a process: host_pid, else its own pid. */
int32_t fg_process_reported_pid(uint32_t index);

/* ---- accounts (account.c) ----------------------------------------------------------------------------- */

/* This process's seat on a card (ci = index into compute_instance[] or FG_NO_INSTANCE), made when needed; -1:
 * full. */
int fg_seat_claim(uint32_t card, uint32_t ci);
/* Takes `bytes` for data; 0, or -1 when they are not there (the dead were removed first). */
int fg_account_take(uint32_t seat, uint64_t bytes);
void fg_account_give(uint32_t seat, uint64_t bytes);
/* One more, or one fewer, context in this seat; the first is charged config.context_bytes. -1: no room. */
int fg_account_context_open(uint32_t seat);
void fg_account_context_close(uint32_t seat);
/* Bytes free and total for CUDA (gi = index into gpu_instance[], or FG_NO_INSTANCE). Removes the dead first.
 */
void fg_account_look(uint32_t card, uint32_t gi, uint64_t *free_bytes, uint64_t *total_bytes);
/* After a change of gpu_instance[]: sets the capacities of the parts of a card. Call under fg_state->lock. */
void fg_account_layout(uint32_t card);

/* ---- time (engine.c) ---------------------------------------------------------------------------------- */

uint64_t fg_now_ns(void); /* CLOCK_MONOTONIC */
uint64_t fg_coarse_ns(void); /* the same clock, up to 4 ms old, cheap */
/* Brings the timeline of a part of a card up to now. ci as for fg_seat_claim. */
void fg_engine_advance(uint32_t card, uint32_t ci);
/* Busy ns of a part of a card in [from, to), after fg_engine_advance; resolution FG_CARD_BUCKET_NS, last 10
 * s. */
uint64_t fg_engine_busy(uint32_t card, uint32_t ci, uint64_t from_ns, uint64_t to_ns);
/* The same for one seat; resolution FG_SEAT_BUCKET_NS, last 12.8 s. */
uint64_t fg_seat_busy(uint32_t seat, uint64_t from_ns, uint64_t to_ns);

/* ---- topology (topology.c) ---------------------------------------------------------------------------- */

enum fg_topology fg_topology_between(uint32_t a, uint32_t b);
/* Number of NVLinks that join two cards, directly or through a switch. */
uint32_t fg_nvlinks_between(uint32_t a, uint32_t b);
/* 1 when each can reach the other's memory. */
int fg_p2p_possible(uint32_t a, uint32_t b);

#endif
