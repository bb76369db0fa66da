/* SPDX-License-Identifier: Apache-2.0
 *
 * How long a process takes from its start to its end, with a library preloaded and without, in turn. Prints
 * one line of JSON with the medians in microseconds.
 *
 *   starts LIBRARY ROUNDS AT_ONCE COMMAND…
 */
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

extern char **environ;

static uint64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int order(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
	return (x > y) - (x < y);
}

static uint64_t lives(char **command, char **environment, int at_once)
{
	pid_t child[64];
	uint64_t from = now();
	for (int i = 0; i < at_once; i++)
		if (posix_spawn(&child[i], command[0], NULL, NULL, command, environment) != 0) {
			perror(command[0]);
			exit(2);
		}
	for (int i = 0; i < at_once; i++) {
		int status;
		waitpid(child[i], &status, 0);
		if (status != 0) {
			fprintf(stderr, "starts: %s ended with %d\n", command[0], status);
			exit(3);
		}
	}
	return now() - from;
}

int main(int argc, char **argv)
{
	if (argc < 5)
		return 2;
	int rounds = atoi(argv[2]), at_once = atoi(argv[3]), count = 0;
	char preload[4096], *with[256];
	uint64_t *bare = calloc((size_t)rounds, sizeof(*bare)),
		 *hooked = calloc((size_t)rounds, sizeof(*hooked));
	if (rounds < 1 || at_once < 1 || at_once > 64 || !bare || !hooked)
		return 2;
	snprintf(preload, sizeof(preload), "LD_PRELOAD=%s", argv[1]);
	for (char **variable = environ; *variable && count < 250; variable++)
		with[count++] = *variable;
	with[count++] = preload;
	with[count] = NULL;
	for (int i = -2; i < rounds; i++) {
		/* Who goes first alternates, so that neither always finds the other's warm caches. */
		uint64_t first = lives(argv + 4, i & 1 ? with : environ, at_once);
		uint64_t second = lives(argv + 4, i & 1 ? environ : with, at_once);
		if (i >= 0) {
			bare[i] = i & 1 ? second : first;
			hooked[i] = i & 1 ? first : second;
		}
	}
	qsort(bare, (size_t)rounds, sizeof(*bare), order);
	qsort(hooked, (size_t)rounds, sizeof(*hooked), order);
	printf("{\"bare_us\": %.1f, \"hooked_us\": %.1f}\n", (double)bare[rounds / 2] / 1e3,
	       (double)hooked[rounds / 2] / 1e3);
	return 0;
}
