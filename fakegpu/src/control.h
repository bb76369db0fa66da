/* SPDX-License-Identifier: Apache-2.0
 *
 * What can be changed while the machine runs: <config>.control, a JSON file anybody may replace.
 *
 * Whoever notices a change first (after a poke at once, else at the next allocation, launch, cuInit or NVML
 * call that comes more than 2 ms after the last look) parses it and puts it into the shared state. Invariant:
 * a file that is not understood to the last key leaves the old settings in force and is told on stderr once.
 *
 * Keys stand in fakegpu/CUDA.md.
 */
#ifndef FAKEGPU_CONTROL_H
#define FAKEGPU_CONTROL_H

#include <stddef.h>
#include <stdint.h>

#define FG_FUNCTION_LEN  64u
#define FG_MAX_RULES     64u
#define FG_MAX_MISSING   64u
#define FG_MAX_FORMS     64u
#define FG_MAX_OVERRIDES 128u
#define FG_MAX_ROWS      128u
#define FG_MAX_INJECTED  64u

/* A fault: calls number after+1 … after+count of the functions that match get `code` and do nothing. */
struct fg_rule {
	char function[FG_FUNCTION_LEN]; /* exact symbol, or a prefix followed by '*' */
	int32_t code; /* CUresult or nvmlReturn_t; 0: only slow */
	uint32_t slow_us; /* sleep this long before anything else */
	uint64_t after; /* calls let through first, over all processes */
	uint64_t count; /* calls that are hit; 0: all that follow */
	uint32_t pid; /* only this process (as it sees itself); 0: all */
	uint32_t card; /* only calls about this card; FG_RULE_ANY_CARD: all (NVML only) */
	uint64_t seen; /* calls so far; counted by the driver */
};
#define FG_RULE_ANY_CARD 0xffffffffu

/* Asked for `name` at CUDA version `from` or later (until the next row of that name), cuGetProcAddress
 * answers as if it had been asked at version `give`; 0: not found. */
struct fg_form {
	char name[FG_FUNCTION_LEN];
	uint32_t from;
	uint32_t give;
};

enum fg_override_kind { /* figures of one card as NVML tells them; -1 in `value` stands for "as computed" */
			FG_OVERRIDE_GPU_UTILIZATION = 1, /* percent */
			FG_OVERRIDE_MEMORY_UTILIZATION, /* percent */
			FG_OVERRIDE_TEMPERATURE, /* degrees C */
			FG_OVERRIDE_POWER, /* mW */
			FG_OVERRIDE_SM_CLOCK, /* MHz */
			FG_OVERRIDE_MEMORY_CLOCK, /* MHz */
			FG_OVERRIDE_FAN, /* percent */
			FG_OVERRIDE_ENCODER_UTILIZATION, /* percent */
			FG_OVERRIDE_DECODER_UTILIZATION, /* percent */
			FG_OVERRIDE_ECC_CORRECTED, /* count */
			FG_OVERRIDE_ECC_UNCORRECTED, /* count */
			FG_OVERRIDE_THROTTLE_REASONS, /* bit mask of nvmlClocksThrottleReason* */
			FG_OVERRIDE_RETIRED_PAGES, /* count */
			FG_OVERRIDE_REMAPPED_ROWS, /* count, uncorrectable */
			FG_OVERRIDE_RECOVERY_ACTION, /* nvmlDeviceGpuRecoveryAction_t */
};

struct fg_override {
	uint32_t card;
	uint32_t kind;
	int64_t value;
};

/* An extra row of a card's process table, or extra bytes for a process that is there (same pid). */
struct fg_row {
	uint32_t card;
	int32_t pid; /* as reported, i.e. the host's */
	uint64_t memory_bytes;
	uint32_t type; /* 'C' compute, 'G' graphics, 'M' MPS compute */
	uint32_t gi_id, ci_id; /* 0xffffffff: none */
	uint32_t sm_utilization; /* percent */
	char name[64];
};

/* Delivered once: `id` must be above all delivered before. */
struct fg_injected_event {
	uint64_t id;
	uint64_t type; /* nvmlEventType*; default: critical Xid */
	uint64_t data; /* the Xid */
	uint32_t card;
	uint32_t gi_id, ci_id;
	uint32_t kill_code; /* CUresult every context on the card gets from now on; 0: contexts live on */
};

struct fg_control {
	uint32_t rule_count, missing_count, form_count, override_count, row_count, event_count;
	uint32_t
	    forbid_in_capture; /* a synchronise, memory query or legacy-stream call in a capture breaks it */
	uint32_t log_on;
	uint32_t lost_count;
	uint32_t shut_down; /* every CUDA call answers CUDA_ERROR_DEINITIALIZED */
	char log_path[256];
	uint64_t launch_ns; /* overrides the configuration's; FG_CONTROL_UNSET: does not */
	struct fg_rule rule[FG_MAX_RULES];
	char missing[FG_MAX_MISSING][FG_FUNCTION_LEN]; /* names that look-ups do not find */
	struct fg_form form[FG_MAX_FORMS];
	struct fg_override override[FG_MAX_OVERRIDES];
	struct fg_row row[FG_MAX_ROWS];
	struct fg_injected_event event[FG_MAX_INJECTED];
	uint32_t lost[FG_MAX_OVERRIDES]; /* indices of cards that are off the bus */
};
#define FG_CONTROL_UNSET UINT64_MAX

/* Parses `text` into `control`. Returns 0, or -1 with one sentence in `error`. `card_count` bounds card
 * indices. */
int fg_control_parse(const char *text, size_t length, uint32_t card_count, struct fg_control *control,
		     char *error, size_t error_size);
/* Writes `control` as JSON that fg_control_parse reads back to the same; bytes written, or -1 when it does
 * not fit. */
long fg_control_format(const struct fg_control *control, char *text, size_t size);

/* Looks at the file when a poke or time says so and takes over what changed. `now_ns` 0: look in any case. */
void fg_control_follow(uint64_t now_ns);
/* The settings in force. Never NULL once the state is open. */
const struct fg_control *fg_control_now(void);
/* The override of `kind` for `card`, or `otherwise`. */
int64_t fg_control_override(uint32_t card, uint32_t kind, int64_t otherwise);
/* 1 when look-ups shall not find `name`. */
int fg_control_is_missing(const char *name);

#endif
