/* SPDX-License-Identifier: Apache-2.0
 *
 * Threads that put, look up and take keys of their own in one table, and now and then fight over a shared
 * key. `table_check THREADS ROUNDS LIVE`. Exit 1: a key was lost, doubled, or had another's value.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "table.h"

static struct aq_table table;
static long rounds, live;
static unsigned long won;

static void *run(void *argument)
{
	uint64_t me = (uint64_t)(uintptr_t)argument;
	uint64_t state = me * 0x9e3779b97f4a7c15ull;
	char *held = calloc((size_t)live, 1);
	for (long i = 0; i < rounds; i++) {
		state ^= state << 13, state ^= state >> 7, state ^= state << 17;
		uint64_t place = state % (uint64_t)live;
		uint64_t key = (me << 40) + place * 512 + 4096, value;
		if (held[place]) {
			if (!aq_table_get(&table, key, &value) || value != key * 3)
				exit(1);
			if (!aq_table_take(&table, key, &value) || value != key * 3 ||
			    aq_table_get(&table, key, &value))
				exit(1);
		} else if (aq_table_get(&table, key, &value) || !aq_table_put(&table, key, key * 3)) {
			exit(1);
		}
		held[place] = !held[place];
		if (i % 16 == 0 && aq_table_take(&table, 512, &value)) {
			__atomic_fetch_add(&won, 1, __ATOMIC_RELAXED);
			aq_table_put(&table, 512, 1);
		}
	}
	uint64_t value;
	for (long place = 0; place < live; place++)
		if (held[place] && !aq_table_take(&table, (me << 40) + (uint64_t)place * 512 + 4096, &value))
			exit(1);
	free(held);
	return NULL;
}

static void count_entry(struct aq_table *of, uint64_t key, uint64_t value, void *argument)
{
	(void)of, (void)value;
	*(long *)argument += key != 512 ? 1000 : 1;
}

int main(int count, char **words)
{
	if (count != 4)
		return 2;
	long threads = atol(words[1]), left = 0;
	rounds = atol(words[2]), live = atol(words[3]);
	pthread_t thread[64];
	aq_table_put(&table, 512, 1);
	for (long i = 0; i < threads; i++)
		pthread_create(&thread[i], NULL, run, (void *)(uintptr_t)(i + 1));
	for (long i = 0; i < threads; i++)
		pthread_join(thread[i], NULL);
	aq_table_each(&table, count_entry, &left);
	printf("%ld %lu\n", left, won);
	return left != 1;
}
