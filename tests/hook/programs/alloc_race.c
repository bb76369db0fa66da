/* SPDX-License-Identifier: Apache-2.0
 *
 * Allocates and frees at random through the driver it is linked to: `alloc_race THREADS OPERATIONS SIZE SEED
 * [hold]`. Prints {"allocated", "refused", "other": codes that are neither, "live"}. With `hold` it keeps
 * what it has and waits for a line on stdin.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cuInit(unsigned);
int cuCtxCreate_v2(void **, unsigned, int);
int cuCtxSetCurrent(void *);
int cuMemAlloc_v2(uint64_t *, size_t);
int cuMemFree_v2(uint64_t);

static long operations, size;
static void *context;
static unsigned long allocated, refused, other, live;

static void *run(void *argument)
{
	uint64_t state = (uint64_t)(uintptr_t)argument * 0x9e3779b97f4a7c15ull + 1, mine[64] = {0};
	cuCtxSetCurrent(context);
	for (long i = 0; i < operations; i++) {
		state ^= state << 13, state ^= state >> 7, state ^= state << 17;
		unsigned place = state & 63;
		if (mine[place]) {
			if (cuMemFree_v2(mine[place]))
				__atomic_fetch_add(&other, 1, __ATOMIC_RELAXED);
			mine[place] = 0;
			continue;
		}
		int rc = cuMemAlloc_v2(&mine[place], 1 + (state >> 8) % (uint64_t)size);
		if (rc)
			mine[place] = 0;
		__atomic_fetch_add(rc == 0 ? &allocated : rc == 2 ? &refused : &other, 1, __ATOMIC_RELAXED);
	}
	for (unsigned place = 0; place < 64; place++)
		if (mine[place])
			__atomic_fetch_add(&live, 1, __ATOMIC_RELAXED);
	return NULL;
}

int main(int count, char **words)
{
	long threads = atol(words[1]), seed = atol(words[4]);
	pthread_t thread[64];
	operations = atol(words[2]), size = atol(words[3]);
	int rc = cuInit(0);
	if (!rc)
		rc = cuCtxCreate_v2(&context, 0, 0);
	if (rc) {
		printf("{\"start\": %d}\n", rc);
		return 1;
	}
	for (long i = 0; i < threads; i++)
		pthread_create(&thread[i], NULL, run, (void *)(uintptr_t)(seed * 64 + i + 1));
	for (long i = 0; i < threads; i++)
		pthread_join(thread[i], NULL);
	printf("{\"allocated\": %lu, \"refused\": %lu, \"other\": %lu, \"live\": %lu}\n", allocated, refused,
	       other, live);
	fflush(stdout);
	if (count > 5 && strcmp(words[5], "hold") == 0)
		getchar();
	return 0;
}
