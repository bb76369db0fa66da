/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs one operation on an account in a child, one instruction at a time, and kills the child after `n` of
 * them, for every n: whatever the instruction was, what is left must be an account that is not too small, and
 * right after the next settle. `account_step REGION reserve|release|claim|reap|settle`. Prints how many were
 * tried.
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

#include "account.h"

#define OTHERS 100u /* held by a neighbour that lives on */
#define MINE   40u /* held by the victim before a release */
#define MORE   7u

static struct aq_account account;
static struct aq_usage_slot *neighbour, *victim;
static uint64_t neighbour_owner, victim_owner;

static void fail(const char *what, long n)
{
	printf("after %ld instructions: %s (account %llu)\n", n, what,
	       (unsigned long long)aq_account_units(&account));
	exit(1);
}

static void operate(const char *operation)
{
	uint64_t owner;
	if (strcmp(operation, "reserve") == 0)
		aq_account_reserve(&account, victim, MORE, 1000);
	else if (strcmp(operation, "release") == 0)
		aq_account_release(&account, victim, MORE);
	else if (strcmp(operation, "claim") == 0)
		aq_account_claim(&account, 4000, 9, 1, &owner);
	else if (strcmp(operation, "reap") == 0)
		aq_account_reap(&account, (uint32_t)(victim - account.file->slot), victim_owner);
	else
		aq_account_settle(&account, 4, NULL);
}

/* Both hold something, and a third that was killed left units behind. */
static void prepare(void *region)
{
	memset((char *)region + offsetof(struct aq_usage_file, account), 0, 32);
	memset(account.slots, 0, (size_t)account.slot_size * account.slot_count);
	neighbour =
	    aq_account_slot(&account, (uint32_t)aq_account_claim(&account, 1, 1, 1, &neighbour_owner));
	victim = aq_account_slot(&account, (uint32_t)aq_account_claim(&account, 2, 1, 1, &victim_owner));
	aq_account_reserve(&account, neighbour, OTHERS, 1000);
	aq_account_reserve(&account, victim, MINE, 1000);
	account.file->account += 3;
}

/* True: the operation came to its end before the n-th instruction. */
static int step(const char *operation, long n)
{
	int status, over = 0;
	pid_t child = fork();
	if (child == 0) {
		ptrace(PTRACE_TRACEME, 0, 0, 0);
		raise(SIGSTOP);
		operate(operation);
		_exit(0);
	}
	waitpid(child, &status, 0);
	for (long i = 0; i < n && !over; i++) {
		ptrace(PTRACE_SINGLESTEP, child, 0, 0);
		waitpid(child, &status, 0);
		over = WIFEXITED(status);
	}
	if (!over) {
		kill(child, SIGKILL);
		waitpid(child, &status, 0);
	}
	return over;
}

int main(int count, char **words)
{
	if (count != 3)
		return 2;
	int fd = open(words[1], O_RDWR);
	void *region = mmap(NULL, AQ_USAGE_FILE_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (region == MAP_FAILED || aq_account_bind(&account, region, AQ_USAGE_FILE_SIZE) < 0)
		return 2;
	long n = 0;
	for (int over = 0; !over; n++) {
		prepare(region);
		over = step(words[2], n);
		uint64_t held = OTHERS;
		if (aq_account_units(&account) < held)
			fail("the account is less than what the neighbour holds", n);
		/* A neighbour goes on without waiting for anybody. */
		if (aq_account_reserve(&account, neighbour, 1, 1000) < 0)
			fail("a neighbour was refused", n);
		aq_account_release(&account, neighbour, 1);
		for (uint32_t i = 0; i < account.slot_count; i++) {
			uint64_t owner = aq_account_slot(&account, i)->owner;
			if (owner != 0 && owner != neighbour_owner)
				aq_account_reap(&account, i, owner);
		}
		if (aq_account_settle(&account, 4, NULL) < 0)
			fail("it could not be settled", n);
		if (aq_account_units(&account) != held)
			fail("the account is wrong after a settle", n);
		if (neighbour->owner != neighbour_owner || aq_word_units(neighbour->charge) != OTHERS)
			fail("the neighbour's slot was touched", n);
	}
	printf("%ld\n", n);
	return 0;
}
