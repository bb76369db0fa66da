/* SPDX-License-Identifier: Apache-2.0
 *
 * A lock between processes whose holder may be killed at any instruction.
 *
 * The word names the holder's slot in the process table. Who waits asks the kernel, every 2 ms, whether that
 * process lives, and takes the lock over when it does not; the caller then puts in order what the lock
 * guards. Never held over a wait, a system call that may block, or a call out of the driver.
 */
#ifndef FAKEGPU_LOCK_H
#define FAKEGPU_LOCK_H

#include "state.h"

/* Takes the lock; 1 when it was taken over from a dead holder (what it guards is half-changed), else 0. The
 * process must have joined. */
int fg_lock_take(struct fg_lock *lock);
void fg_lock_give(struct fg_lock *lock);
/* A lock that names this process's slot though this process does not hold it was left by the slot's former
 * owner: takes it; 1 when it did. Called once, while joining. */
int fg_lock_inherit(struct fg_lock *lock);

/* The locks of the state with their repair. */
void fg_state_lock(void);
void fg_state_unlock(void);
void fg_card_lock(struct fg_card *card);
void fg_card_unlock(struct fg_card *card);

#endif
