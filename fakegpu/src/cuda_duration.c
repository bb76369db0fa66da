/* SPDX-License-Identifier: Apache-2.0
 *
 * How long a kernel takes: what its name says ("spin_us_250"), else FAKEGPU_LAUNCH_NS, else the control file,
 * else the configuration.
 */
#include <stdlib.h>
#include <string.h>

#include "cuda_parts.h"
#include "cuda_time.h"

static uint64_t from_environment = CU_DURATION_DEFAULT;

void cu_duration_read_environment(void)
{
	const char *text = getenv("FAKEGPU_LAUNCH_NS");
	char *end;

	from_environment = CU_DURATION_DEFAULT;
	if (text == NULL || text[0] < '0' || text[0] > '9')
		return;
	unsigned long long value = strtoull(text, &end, 10);

	if (*end == '\0')
		from_environment = value;
}

uint64_t cu_duration_of_name(const char *name)
{
	static const struct {
		const char *word;
		uint64_t ns;
	} units[] = {{"spin_ns_", 1}, {"spin_us_", 1000}, {"spin_ms_", 1000000}, {"spin_s_", 1000000000}};

	for (size_t i = 0; i < sizeof units / sizeof units[0]; i++) {
		const char *at = strstr(name, units[i].word);

		if (at == NULL)
			continue;
		at += strlen(units[i].word);
		if (*at >= '0' && *at <= '9')
			return strtoull(at, NULL, 10) * units[i].ns;
	}
	return CU_DURATION_DEFAULT;
}

uint64_t cu_duration(uint64_t own)
{
	if (own != CU_DURATION_DEFAULT)
		return own;
	if (from_environment != CU_DURATION_DEFAULT)
		return from_environment;
	return __atomic_load_n(&fg_state->launch_ns, __ATOMIC_RELAXED);
}
