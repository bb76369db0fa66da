/* SPDX-License-Identifier: Apache-2.0
 *
 * See say.h. One write(2) per line: no stdio, whose buffers and locks belong to the program.
 */
#include "say.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "process.h"

void aq_say(enum aq_trouble kind, const char *const *parts)
{
	uint32_t bit = 1u << kind;
	if (__atomic_fetch_or(&aq_process()->said, bit, __ATOMIC_RELAXED) & bit)
		return;
	char line[512];
	size_t used = 0;
	const char *part = "aliquot: ";
	for (; part; part = *parts++) {
		size_t length = strlen(part);
		if (length > sizeof(line) - 1 - used)
			length = sizeof(line) - 1 - used;
		memcpy(line + used, part, length);
		used += length;
	}
	line[used++] = '\n';
	int saved = errno;
	ssize_t written = write(STDERR_FILENO, line, used);
	(void)written;
	errno = saved;
}

const char *aq_decimal(unsigned long long value, char buffer[24])
{
	char *digit = buffer + 23;
	*digit = '\0';
	do
		*--digit = (char)('0' + value % 10);
	while ((value /= 10) != 0);
	return digit;
}
