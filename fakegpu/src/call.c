/* SPDX-License-Identifier: Apache-2.0
 *
 * The long way through a call: control file, log, faults. See call.h.
 */
#include "call.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "state.h"

#define DEINITIALIZED 4 /* CUDA_ERROR_DEINITIALIZED */

static char log_here[256];

void fg_call_start(void)
{
	const char *path = secure_getenv("FAKEGPU_LOG");

	if (path == NULL || path[0] == '\0' || strlen(path) >= sizeof log_here)
		return;
	memcpy(log_here, path, strlen(path) + 1);
	__atomic_fetch_or(&fg_attention_here, FG_ATTENTION_LOG, __ATOMIC_RELAXED);
}

/* Copies `from` as the inside of a JSON string. */
static size_t escape(char *to, size_t size, const char *from)
{
	size_t used = 0;

	for (; *from != '\0' && used + 7 < size; from++) {
		unsigned char c = (unsigned char)*from;

		if (c == '"' || c == '\\') {
			to[used++] = '\\';
			to[used++] = (char)c;
		} else if (c < 0x20 || c >= 0x7f) {
			used += (size_t)snprintf(to + used, size - used, "\\u%04x", c);
		} else {
			to[used++] = (char)c;
		}
	}
	to[used] = '\0';
	return used;
}

static void write_line(const char *path, const char *function, const char *arguments)
{
	char line[1400], escaped[1024];
	uint64_t number = __atomic_add_fetch(&fg_state->log_sequence, 1, __ATOMIC_RELAXED);
	int length, fd;

	escape(escaped, sizeof escaped, arguments);
	length = snprintf(line, sizeof line,
			  "{\"n\":%" PRIu64 ",\"pid\":%d,\"tid\":%ld,\"t\":%" PRIu64
			  ",\"f\":\"%s\",\"a\":\"%s\"}\n",
			  number, (int)getpid(), (long)syscall(SYS_gettid), fg_now_ns(), function, escaped);
	/* Opened for each line: a descriptor kept open would be at the mercy of the program. */
	fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY, 0666);
	if (fd < 0)
		return;
	if (length > 0 && write(fd, line, (size_t)length) < 0)
		errno = 0;
	close(fd);
}

static int matches(const struct fg_rule *rule, const char *function, uint32_t card)
{
	const char *star = strchr(rule->function, '*');

	if (star != NULL ? strncmp(rule->function, function, (size_t)(star - rule->function)) != 0
			 : strcmp(rule->function, function) != 0)
		return 0;
	return (rule->pid == 0 || rule->pid == (uint32_t)getpid()) &&
	       (rule->card == FG_RULE_ANY_CARD || rule->card == card);
}

static int apply_rules(const char *function, uint32_t card)
{
	struct fg_control *control = &fg_state->control[fg_state->control_index & 1];
	uint32_t slow_us = 0;
	int code = 0;

	if (control->shut_down && strncmp(function, "cu", 2) == 0)
		return DEINITIALIZED;
	for (uint32_t i = 0; i < control->rule_count && i < FG_MAX_RULES && code == 0; i++) {
		struct fg_rule *rule = &control->rule[i];

		if (!matches(rule, function, card))
			continue;
		uint64_t before = __atomic_fetch_add(&rule->seen, 1, __ATOMIC_RELAXED);

		if (before < rule->after || (rule->count > 0 && before - rule->after >= rule->count))
			continue;
		slow_us += rule->slow_us;
		code = rule->code;
	}
	if (slow_us > 0) {
		struct timespec left = {(time_t)(slow_us / 1000000), (long)(slow_us % 1000000) * 1000};

		while (clock_nanosleep(CLOCK_MONOTONIC, 0, &left, &left) == EINTR)
			;
	}
	return code;
}

int fg_call_slow(const char *function, uint32_t card, const char *format, ...)
{
	int before = errno, code = 0;
	uint32_t attention;

	if (fg_state == NULL || fg_state->magic != FG_STATE_MAGIC)
		return 0;
	if (__atomic_load_n(&fg_state->attention, __ATOMIC_ACQUIRE) & FG_ATTENTION_CONTROL)
		fg_control_follow(0);
	attention = __atomic_load_n(&fg_state->attention, __ATOMIC_ACQUIRE) | fg_attention_here;
	if (attention & FG_ATTENTION_LOG) {
		char arguments[512];
		va_list list;

		va_start(list, format);
		vsnprintf(arguments, sizeof arguments, format, list);
		va_end(list);
		write_line(log_here[0] != '\0' ? log_here : fg_control_now()->log_path, function, arguments);
	}
	if (attention & FG_ATTENTION_RULES)
		code = apply_rules(function, card);
	errno = before;
	return code;
}
