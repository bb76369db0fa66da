/* SPDX-License-Identifier: Apache-2.0
 *
 * See priority.h.
 */
/* Small before quick: nothing in here is on a hot path, and every process of a container maps it. */
#pragma GCC optimize("Os")

#include "priority.h"

#include <errno.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SECOND_NS 1000000000u

uint64_t aq_now_ns(void)
{
	struct timespec now = {0, 0};
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * SECOND_NS + (uint64_t)now.tv_nsec;
}

void aq_sleep_until(uint64_t until_ns)
{
	int saved = errno;
	struct timespec until = {(time_t)(until_ns / SECOND_NS), (long)(until_ns % SECOND_NS)};
	/* Straight to the kernel: libc's is a point at which a thread may be cancelled, and a launch is none.
	 * Where a filter forbids it, the processor is at least offered to others. */
	if (syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) < 0 && errno != EINTR)
		sched_yield();
	errno = saved;
}

static const struct aq_grant_hints *hints_of(const struct aq_card *card, uint32_t i)
{
	const struct aq_grant_file *grant = aq_shares[card->share[i]].grant;
	return grant ? &grant->hints : NULL;
}

static bool suspended(const struct aq_card *card, uint64_t since, uint64_t now)
{
	for (uint32_t i = 0; i < card->share_count; i++) {
		const struct aq_grant_hints *hints = hints_of(card, i);
		if (hints == NULL || __atomic_load_n(&hints->suspended, __ATOMIC_RELAXED) == 0)
			continue;
		uint64_t heard = __atomic_load_n(&hints->heartbeat_ns, __ATOMIC_RELAXED);
		if (heard < since)
			heard = since;
		if (now < heard || now - heard < AQ_SUSPEND_MOST_NS)
			return true;
	}
	return false;
}

void aq_suspend_wait_slowly(unsigned number)
{
	uint64_t since = aq_now_ns();
	for (uint64_t now = since; suspended(&aq_cards[number], since, now); now = aq_now_ns())
		aq_sleep_until(now + AQ_LOOK_NS);
}

/* Until when every share of the card is asked to give way; 0: one of them is not. */
static uint64_t held_until(const struct aq_card *card)
{
	uint64_t until = UINT64_MAX;
	for (uint32_t i = 0; i < card->share_count; i++) {
		const struct aq_grant_hints *hints = hints_of(card, i);
		if (hints == NULL ||
		    __atomic_load_n(&aq_shares[card->share[i]].priority, __ATOMIC_RELAXED) == 0)
			return 0;
		uint64_t own = __atomic_load_n(&hints->hold_until_ns, __ATOMIC_RELAXED);
		until = own < until ? own : until;
	}
	return until;
}

void aq_launch_wait(unsigned number)
{
	const struct aq_card *card = &aq_cards[number];
	aq_suspend_wait(number);
	if (__builtin_expect(held_until(card) == 0, 1))
		return;
	uint64_t now = aq_now_ns(), most = now + AQ_HOLD_MOST_NS;
	for (uint64_t until = held_until(card); now < until && now < most; until = held_until(card)) {
		uint64_t look = now + AQ_LOOK_NS;
		aq_sleep_until(until < look ? until : look < most ? look : most);
		now = aq_now_ns();
	}
	aq_suspend_wait(number);
}
