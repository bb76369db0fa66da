/* SPDX-License-Identifier: Apache-2.0
 *
 * The clocks, and sleeping to a point in time.
 */
#include <errno.h>
#include <sched.h>
#include <time.h>

#include "engine.h"

#define SPIN_NS 80000u /* what a sleeper may come late */

uint64_t fg_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint64_t fg_coarse_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void fg_sleep_until(uint64_t until_ns, int may_spin)
{
	uint64_t now = fg_now_ns(), sleep_end = until_ns;

	if (may_spin)
		sleep_end = until_ns > SPIN_NS ? until_ns - SPIN_NS : 0;
	if (sleep_end > now) {
		struct timespec until = {(time_t)(sleep_end / 1000000000u), (long)(sleep_end % 1000000000u)};
		int before = errno;

		while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR)
			;
		errno = before;
	}
	while (may_spin && fg_now_ns() < until_ns)
		sched_yield();
}
