// SPDX-License-Identifier: Apache-2.0
//
// A process that holds memory of a share the way the hook does: with the hook's own account.c, without CUDA.
// Commands come on standard input, one a line; each is answered with one line. It never frees on its way out.
#define _GNU_SOURCE
#include "account.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static uint64_t start_time(void)
{
	char text[2048];
	FILE *file = fopen("/proc/self/stat", "r");
	size_t length = file ? fread(text, 1, sizeof(text) - 1, file) : 0;
	if (file)
		fclose(file);
	text[length] = '\0';
	char *next = strrchr(text, ')');
	if (!next)
		return 0;
	next += 2;
	for (int field = 3; field < 22; field++)
		next = strchr(next, ' ') + 1;
	return strtoull(next, NULL, 10);
}

static void *stay(void *unused)
{
	(void)unused;
	for (;;)
		pause();
}

int main(int argc, char **argv)
{
	int fd = argc > 1 ? open(argv[1], O_RDWR | O_CLOEXEC) : -1;
	void *map =
	    fd < 0 ? MAP_FAILED : mmap(NULL, AQ_USAGE_FILE_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	struct aq_account account;
	struct stat ns;
	if (map == MAP_FAILED || aq_account_bind(&account, map, AQ_USAGE_FILE_SIZE) < 0 ||
	    stat("/proc/self/ns/pid", &ns) < 0)
		return 1;
	uint64_t owner = 0;
	// With a second argument as if its container had no /proc.
	int index = aq_account_claim(&account, (uint32_t)getpid(), argc > 2 ? 0 : start_time(),
				     argc > 2 ? 0 : ns.st_ino, &owner);
	if (index < 0)
		return 2;
	struct aq_usage_slot *slot = aq_account_slot(&account, (uint32_t)index);
	printf("%d %d %llu\n", index, getpid(), (unsigned long long)owner);
	fflush(stdout);

	char line[128];
	while (fgets(line, sizeof(line), stdin)) {
		char *number = strchr(line, ' ');
		uint64_t units = aq_units_of(number ? strtoull(number, NULL, 10) : 0);
		int rc = 0;
		if (strncmp(line, "reserve ", 8) == 0) {
			rc = aq_account_reserve(&account, slot, units, AQ_UNLIMITED);
		} else if (strncmp(line, "release ", 8) == 0) {
			aq_account_release(&account, slot, units);
		} else if (strncmp(line, "half ", 5) == 0) {
			// The first of the two steps of a reservation, as if killed right after it.
			__atomic_fetch_add(&account.file->account, units + AQ_WORD_SEQ_ONE, __ATOMIC_SEQ_CST);
		} else if (strncmp(line, "launch", 6) == 0) {
			// At the moment that is named, or now.
			struct timespec now;
			clock_gettime(CLOCK_MONOTONIC, &now);
			account.file->bucket.last_launch_ns =
			    number ? strtoull(number, NULL, 10)
				   : (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
		} else if (strncmp(line, "done ", 5) == 0) {
			account.file->bucket.done_ns += strtoull(number, NULL, 10);
		} else if (strncmp(line, "leave", 5) == 0) {
			// The main thread ends and another goes on: the process lives, its leader is a
			// zombie.
			pthread_t thread;
			pthread_create(&thread, NULL, stay, NULL);
			printf("0\n");
			fflush(stdout);
			pthread_exit(NULL);
		}
		printf("%d\n", rc);
		fflush(stdout);
	}
	return 0;
}
