/* SPDX-License-Identifier: Apache-2.0
 *
 * Changes a grant in a child, one instruction at a time, and looks at the file after each: that is what a
 * writer killed there would leave, for a mapped file does not notice a death. `grant_step FOLDER`. Prints how
 * many instructions and how many different files there were.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include "region_node.h"

static char path[512], copy[512];
static long steps;

static void fail(const char *what)
{
	printf("after %ld instructions: %s\n", steps, what);
	exit(1);
}

static int holds(const char *file, uint64_t limit)
{
	struct aq_grant_slot slot;
	return aq_grant_read(file, &slot) == 0 && slot.memory_limit == limit &&
	       slot.core_percent == limit % 97 && slot.name[0] == 'g';
}

static struct aq_grant_slot grant_of(uint64_t limit)
{
	struct aq_grant_slot slot = {.memory_limit = limit, .core_percent = (uint32_t)(limit % 97)};
	memset(slot.name, 'g', sizeof(slot.name) - 1);
	memset(slot.uuid, (int)('a' + limit % 26), sizeof(slot.uuid) - 1);
	return slot;
}

static void judge(const void *state, uint64_t old, uint64_t new)
{
	int fd = open(copy, O_RDWR | O_CREAT | O_TRUNC, 0644);
	if (write(fd, state, AQ_GRANT_FILE_SIZE) != AQ_GRANT_FILE_SIZE)
		fail("no copy");
	close(fd);
	if (!holds(copy, old) && !holds(copy, new))
		fail("neither the old grant nor the new one");
	struct aq_grant_slot third = grant_of(333);
	if (aq_grant_update(copy, &third) != 0 || !holds(copy, 333))
		fail("it cannot be changed any more");
}

int main(int count, char **words)
{
	if (count != 2)
		return 2;
	snprintf(path, sizeof(path), "%s/grant", words[1]);
	snprintf(copy, sizeof(copy), "%s/copy", words[1]);
	uint64_t limits[] = {1000, 2000, 3500};
	struct aq_grant_slot slot = grant_of(limits[0]);
	if (aq_grant_create(path, &slot) != 0)
		return 2;
	const void *map = mmap(NULL, AQ_GRANT_FILE_SIZE, PROT_READ, MAP_SHARED, open(path, O_RDONLY), 0);
	static char last[AQ_GRANT_FILE_SIZE];
	long states = 0;
	/* Twice, so that both slots are written. */
	for (int i = 1; i < 3; i++) {
		struct aq_grant_slot next = grant_of(limits[i]);
		int status;
		pid_t child = fork();
		if (child == 0) {
			ptrace(PTRACE_TRACEME, 0, 0, 0);
			raise(SIGSTOP);
			_exit(aq_grant_update(path, &next) != 0);
		}
		waitpid(child, &status, 0);
		for (; !WIFEXITED(status); steps++) {
			if (memcmp(last, map, sizeof(last)) != 0) {
				memcpy(last, map, sizeof(last));
				judge(last, limits[i - 1], limits[i]);
				states++;
			}
			ptrace(PTRACE_SINGLESTEP, child, 0, 0);
			waitpid(child, &status, 0);
		}
		if (WEXITSTATUS(status) != 0 || !holds(path, limits[i]))
			fail("the update failed");
	}
	printf("%ld %ld\n", steps, states);
	return 0;
}
