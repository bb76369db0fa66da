/* SPDX-License-Identifier: Apache-2.0
 *
 * See wait.h.
 */
/* Small before quick: nothing in here is on a hot path, and every process of a container maps it. */
#pragma GCC optimize("Os")

#include "wait.h"

#include <stdlib.h>

#include "charge.h"
#include "priority.h"

#define MOST_MS  3600000u
#define STEP_NS  10000000u
#define MS_IN_NS 1000000u

static uint32_t wait_ms;

void aq_wait_read(void)
{
	const char *text = getenv("ALIQUOT_MEMORY_WAIT_MS");
	uint32_t value = 0;
	for (; text && *text >= '0' && *text <= '9' && value <= MOST_MS; text++)
		value = value * 10 + (uint32_t)(*text - '0');
	wait_ms = text == NULL || *text ? 0 : value < MOST_MS ? value : MOST_MS;
}

bool aq_wait_more(unsigned card, struct aq_wait *wait)
{
	if (wait_ms == 0)
		return false;
	uint64_t now = aq_now_ns();
	if (wait->until_ns == 0) {
		wait->until_ns = now + (uint64_t)wait_ms * MS_IN_NS;
		aq_refused(card, AQ_WAITED);
	}
	if (now >= wait->until_ns)
		return false;
	aq_sleep_until(wait->until_ns - now < STEP_NS ? wait->until_ns : now + STEP_NS);
	return true;
}
