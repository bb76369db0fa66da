/* SPDX-License-Identifier: Apache-2.0
 *
 * Processes and threads that reserve and release at random on one usage file, beside a truth that each of
 * them keeps in step: what the driver would have given out. `account_race REGION TRUTH LIMIT OPERATIONS
 * THREADS SEED`. Exit 3: the truth passed the limit. Reports what it had when it was refused last.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "account.h"

struct truth {
	uint64_t total;
	uint64_t most;
	uint64_t held[4096]; /* by pid modulo: for whoever clears up after a kill */
};

static struct aq_account account;
static struct aq_usage_slot *slot;
static struct truth *truth;
static uint64_t limit;
static long operations;
static uint64_t *own;

static void *map(const char *path, size_t size)
{
	int fd = open(path, O_RDWR | O_CLOEXEC);
	void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (fd < 0 || at == MAP_FAILED)
		exit(2);
	close(fd);
	return at;
}

static void *run(void *argument)
{
	uint64_t state = (uint64_t)(uintptr_t)argument * 0x9e3779b97f4a7c15ull + 1;
	uint64_t mine[16] = {0};
	for (long i = 0; i < operations; i++) {
		state ^= state << 13, state ^= state >> 7, state ^= state << 17;
		unsigned place = state & 15;
		if (mine[place] == 0) {
			uint64_t units = 1 + (state >> 8) % (limit / 8);
			if (aq_account_reserve(&account, slot, units, limit) < 0) {
				if ((state >> 32) % 64 == 0)
					aq_account_settle(&account, 3, NULL);
				continue;
			}
			__atomic_fetch_add(own, units, __ATOMIC_SEQ_CST);
			uint64_t now = __atomic_add_fetch(&truth->total, units, __ATOMIC_SEQ_CST);
			if ((int64_t)now > (int64_t)limit)
				_exit(3);
			uint64_t most = __atomic_load_n(&truth->most, __ATOMIC_RELAXED);
			if (now > most && now <= limit)
				__atomic_store_n(&truth->most, now, __ATOMIC_RELAXED);
			mine[place] = units;
		} else {
			__atomic_fetch_sub(&truth->total, mine[place], __ATOMIC_SEQ_CST);
			__atomic_fetch_sub(own, mine[place], __ATOMIC_SEQ_CST);
			aq_account_release(&account, slot, mine[place]);
			mine[place] = 0;
		}
	}
	for (unsigned place = 0; place < 16; place++) {
		if (mine[place] == 0)
			continue;
		__atomic_fetch_sub(&truth->total, mine[place], __ATOMIC_SEQ_CST);
		__atomic_fetch_sub(own, mine[place], __ATOMIC_SEQ_CST);
		aq_account_release(&account, slot, mine[place]);
	}
	return NULL;
}

int main(int count, char **words)
{
	if (count != 7)
		return 2;
	void *region = map(words[1], AQ_USAGE_FILE_SIZE);
	truth = map(words[2], sizeof(*truth));
	limit = strtoull(words[3], NULL, 10);
	operations = atol(words[4]);
	long threads = atol(words[5]), seed = atol(words[6]);
	uint64_t owner;
	if (aq_account_bind(&account, region, AQ_USAGE_FILE_SIZE) < 0)
		return 2;
	int index = aq_account_claim(&account, (uint32_t)getpid(), 1, 4026531836u, &owner);
	if (index < 0)
		return 4;
	slot = aq_account_slot(&account, (uint32_t)index);
	own = &truth->held[getpid() % 4096];
	printf("%llu\n", (unsigned long long)owner);
	fflush(stdout);
	pthread_t thread[64];
	for (long i = 0; i < threads; i++)
		pthread_create(&thread[i], NULL, run, (void *)(uintptr_t)(seed * 100 + i + 1));
	for (long i = 0; i < threads; i++)
		pthread_join(thread[i], NULL);
	return 0;
}
