/* SPDX-License-Identifier: Apache-2.0
 *
 * How long a process takes from its start to its end: bare, with a library preloaded, and with an empty one,
 * in turn. Prints one line of JSON, in microseconds: the median of the bare ones, and the medians of what
 * each of the others took more than the bare one of its round.
 *
 *   starts LIBRARY EMPTY ROUNDS AT_ONCE COMMAND…
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
	double x = *(const double *)a, y = *(const double *)b;
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

static double median(const double *one, const double *bare, int rounds)
{
	double *all = calloc((size_t)rounds, sizeof(*all));
	if (all == NULL)
		exit(2);
	for (int i = 0; i < rounds; i++)
		all[i] = one[i] - (bare ? bare[i] : 0);
	qsort(all, (size_t)rounds, sizeof(*all), order);
	double middle = all[rounds / 2] / 1e3;
	free(all);
	return middle;
}

enum { BARE, HOOKED, EMPTY, WAYS };

int main(int argc, char **argv)
{
	if (argc < 6)
		return 2;
	int rounds = atoi(argv[3]), at_once = atoi(argv[4]);
	char preload[WAYS][4096], *environment[WAYS][256];
	double *took[WAYS];
	if (rounds < 1 || at_once < 1 || at_once > 64)
		return 2;
	for (int way = BARE; way < WAYS; way++) {
		int count = 0;
		for (char **variable = environ; *variable && count < 250; variable++)
			environment[way][count++] = *variable;
		if (way != BARE) {
			snprintf(preload[way], sizeof(preload[way]), "LD_PRELOAD=%s", argv[way]);
			environment[way][count++] = preload[way];
		}
		environment[way][count] = NULL;
		took[way] = calloc((size_t)rounds, sizeof(double));
		if (took[way] == NULL)
			return 2;
	}
	for (int i = -2; i < rounds; i++) {
		/* Who goes first changes, so that none always finds another's warm caches. */
		for (int turn = 0; turn < WAYS; turn++) {
			int way = (turn + i + WAYS) % WAYS;
			double time = (double)lives(argv + 5, environment[way], at_once);
			if (i >= 0)
				took[way][i] = time;
		}
	}
	printf("{\"bare_us\": %.1f, \"hooked_us\": %.1f, \"empty_us\": %.1f}\n",
	       median(took[BARE], NULL, rounds), median(took[HOOKED], took[BARE], rounds),
	       median(took[EMPTY], took[BARE], rounds));
	return 0;
}
