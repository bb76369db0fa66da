/* SPDX-License-Identifier: Apache-2.0
 *
 * Locks that survive their holder. See lock.h.
 */
#include "lock.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "account.h"
#include "process.h"

#define WAITERS      0x80000000u
#define INHERITED    0x40000000u
#define HOLDER(word) ((word) & ~(WAITERS | INHERITED))
#define SPINS        100

static void relax(void)
{
#if defined(__x86_64__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

static void wait_for_change(struct fg_lock *lock, uint32_t seen)
{
	const struct timespec limit = {0, 2000000};

	syscall(SYS_futex, &lock->word, FUTEX_WAIT, seen, &limit, NULL, 0);
}

static int take_slowly(struct fg_lock *lock, uint32_t self)
{
	for (int spins = 0;; spins++) {
		uint32_t word = __atomic_load_n(&lock->word, __ATOMIC_RELAXED);

		if (word == 0) {
			/* Others may wait too, so the flag stays set: one needless wake-up at most. */
			if (__atomic_compare_exchange_n(&lock->word, &word, self | WAITERS, 0,
							__ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
				return 0;
			continue;
		}
		if (spins < SPINS) {
			relax();
			continue;
		}
		if ((word & WAITERS) == 0 &&
		    !__atomic_compare_exchange_n(&lock->word, &word, word | WAITERS, 0, __ATOMIC_RELAXED,
						 __ATOMIC_RELAXED))
			continue;
		word |= WAITERS;
		wait_for_change(lock, word);
		if (__atomic_load_n(&lock->word, __ATOMIC_RELAXED) != word || HOLDER(word) == self ||
		    fg_process_lives(HOLDER(word) - 1))
			continue;
		if (__atomic_compare_exchange_n(&lock->word, &word, self | WAITERS, 0, __ATOMIC_ACQUIRE,
						__ATOMIC_RELAXED)) {
			lock->taken_over++;
			return 1;
		}
	}
}

int fg_lock_take(struct fg_lock *lock)
{
	uint32_t self = (uint32_t)fg_process_self() + 1, free_word = 0;

	if (__builtin_expect(__atomic_compare_exchange_n(&lock->word, &free_word, self, 0, __ATOMIC_ACQUIRE,
							 __ATOMIC_RELAXED),
			     1))
		return 0;
	return take_slowly(lock, self);
}

void fg_lock_give(struct fg_lock *lock)
{
	uint32_t word = __atomic_exchange_n(&lock->word, 0, __ATOMIC_RELEASE);

	if (word & WAITERS)
		syscall(SYS_futex, &lock->word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

int fg_lock_inherit(struct fg_lock *lock)
{
	uint32_t self = (uint32_t)fg_process_self() + 1;
	uint32_t word = __atomic_load_n(&lock->word, __ATOMIC_RELAXED);

	/* The word is changed, so that a waiter who found the former owner dead just now does not take it as
	 * well. */
	while (HOLDER(word) == self)
		if (__atomic_compare_exchange_n(&lock->word, &word, self | WAITERS | INHERITED, 0,
						__ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
			lock->taken_over++;
			return 1;
		}
	return 0;
}

void fg_state_lock(void)
{
	/* What this lock guards is changed so that every half-done step is either invisible or found by
	 * fg_reap. */
	fg_lock_take(&fg_state->lock);
}

void fg_state_unlock(void)
{
	fg_lock_give(&fg_state->lock);
}

void fg_card_lock(struct fg_card *card)
{
	if (fg_lock_take(&card->lock))
		fg_account_repair(card);
}

void fg_card_unlock(struct fg_card *card)
{
	fg_lock_give(&card->lock);
}
