/* SPDX-License-Identifier: Apache-2.0
 *
 * The process table: who is there, and who is dead. The public part stands in state.h.
 */
#ifndef FAKEGPU_PROCESS_H
#define FAKEGPU_PROCESS_H

#include <stddef.h>
#include <stdint.h>

#include "state.h"

#define FG_LIVE_BYTE (UINT64_C(1) << 40) /* record lock of slot 0; the file never gets there */
#define FG_INIT_BYTE (FG_LIVE_BYTE - 1) /* held while the state is made */

/* 1 unless the kernel says that nobody holds the slot's record lock. */
int fg_process_lives(uint32_t slot);
/* 1 when any process that uses CUDA lives, or, the state being of another build, any at all. */
int fg_process_any_lives(int descriptor);
/* A descriptor of the state file that is certainly one, though the program may have closed or reused numbers;
 * or -1. */
int fg_state_descriptor(void);
/* A new descriptor with an open file description of its own, or -1. */
int fg_state_reopen(void);
/* Counts how often this process forked off itself: differs in a child. */
uint32_t fg_process_fork_count(void);
/* Registers the fork handlers; idempotent. */
void fg_process_watch_fork(void);
/* Marks this process's pulse as beating again when the thread that held it has ended. */
void fg_process_keep_pulse(void);

#endif
