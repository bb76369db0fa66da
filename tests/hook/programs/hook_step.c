/* SPDX-License-Identifier: Apache-2.0
 *
 * A program that allocates behind the hook, one instruction at a time, watched from outside. After each the
 * usage file is what a SIGKILL there would leave, for a mapped file does not notice a death; so wherever it
 * changed, a copy is reaped and settled as the node does. `hook_step REGION GRANT
 * alloc|refused|resize|context`, linked to the smallest driver, with the hook preloaded. Prints instructions
 * and different files.
 *
 * Held at every instruction: the account is not less than what the driver has given out; a neighbour goes on;
 * what the dead one held comes back to the unit.
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
#include "region_node.h"

int cuInit(unsigned);
int cuCtxCreate_v2(void **, unsigned, int);
int cuMemAlloc_v2(uint64_t *, size_t);
int cuMemFree_v2(uint64_t);
long *stub_live(void);

#define MIB_UNITS  2048u
#define NEIGHBOURS (40u * MIB_UNITS)
#define LOOKED_AT  (AQ_USAGE_HEADER_SIZE + 8 * AQ_USAGE_SLOT_SIZE)

static long steps;

static void fail(const char *what)
{
	printf("after %ld instructions: %s\n", steps, what);
	fflush(stdout);
	_exit(1);
}

/* Allocations are of 1 MiB each, so that what the driver counts tells bytes. */
static int victim(const char *operation)
{
	uint64_t one, two, three;
	void *context;
	long *live = stub_live();
	int made = strcmp(operation, "context") == 0;
	if (cuInit(0) || (!made && cuCtxCreate_v2(&context, 0, 0)))
		return 9;
	if (strcmp(operation, "alloc") != 0 && !made && cuMemAlloc_v2(&one, 1 << 20))
		return 8;
	if (write(3, &live, sizeof(live)) != sizeof(live))
		return 7;
	raise(SIGSTOP);
	if (made) /* charged first, and then memory in it */
		return cuCtxCreate_v2(&context, 0, 0) || cuMemAlloc_v2(&one, 1 << 20);
	if (strcmp(operation, "refused") == 0) /* makes room, finds none, says so */
		return cuMemAlloc_v2(&two, 90 << 20) != 2;
	if (strcmp(operation, "resize") == 0) /* the grant has been changed since the last call */
		return cuMemAlloc_v2(&two, 1 << 20) || cuMemFree_v2(one);
	/* The first of all claims a slot. */
	return cuMemAlloc_v2(&one, 1 << 20) || cuMemAlloc_v2(&two, 1 << 20) || cuMemFree_v2(one) ||
	       cuMemAlloc_v2(&three, 1 << 20) || cuMemFree_v2(three);
}

static struct aq_account copy;
static uint64_t neighbour_owner;
static int neighbour;

static void judge(const void *state)
{
	memcpy(copy.file, state, LOOKED_AT);
	struct aq_usage_slot *slot = aq_account_slot(&copy, (uint32_t)neighbour);
	if (slot->owner != neighbour_owner || aq_word_units(slot->charge) != NEIGHBOURS)
		fail("the neighbour's slot was touched");
	if (aq_account_reserve(&copy, slot, MIB_UNITS, 200 * MIB_UNITS) < 0)
		fail("a neighbour was refused");
	aq_account_release(&copy, slot, MIB_UNITS);
	for (uint32_t i = 0; i < 8; i++) {
		uint64_t owner = aq_account_slot(&copy, i)->owner;
		if (owner != 0 && owner != neighbour_owner)
			aq_account_reap(&copy, i, owner);
	}
	if (aq_account_settle(&copy, 8, NULL) < 0)
		fail("it could not be settled");
	if (aq_account_units(&copy) != NEIGHBOURS)
		fail("the account is wrong after a settle");
}

int main(int count, char **words)
{
	if (count == 2)
		return victim(words[1]);
	if (count != 4)
		return 2;
	const char *grant = words[2], *operation = words[3];
	struct aq_account account;
	void *region = mmap(NULL, AQ_USAGE_FILE_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED,
			    open(words[1], O_RDWR | O_CLOEXEC), 0);
	void *other =
	    mmap(NULL, AQ_USAGE_FILE_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	memcpy(other, region, AQ_USAGE_FILE_SIZE);
	if (aq_account_bind(&account, region, AQ_USAGE_FILE_SIZE) < 0 ||
	    aq_account_bind(&copy, other, AQ_USAGE_FILE_SIZE) < 0)
		return 2;
	/* A neighbour in another PID namespace, whom nobody here may judge. */
	neighbour = aq_account_claim(&account, 1, 1, 77, &neighbour_owner);
	aq_account_reserve(&account, aq_account_slot(&account, (uint32_t)neighbour), NEIGHBOURS,
			   AQ_UNLIMITED);

	int ends[2], status;
	if (pipe(ends) < 0)
		return 2;
	pid_t child = fork();
	if (child == 0) {
		if (ends[1] != 3)
			dup2(ends[1], 3);
		ptrace(PTRACE_TRACEME, 0, 0, 0);
		execl("/proc/self/exe", words[0], operation, (char *)NULL);
		_exit(6);
	}
	do { /* past exec, to where it stops itself */
		if (waitpid(child, &status, 0) < 0 || !WIFSTOPPED(status))
			fail("it did not start");
		if (WSTOPSIG(status) != SIGSTOP)
			ptrace(PTRACE_CONT, child, 0, 0);
	} while (WSTOPSIG(status) != SIGSTOP);
	long *live;
	if (read(ends[0], &live, sizeof(live)) != sizeof(live))
		fail("it said nothing");
	if (strcmp(operation, "resize") == 0) {
		struct aq_grant_slot slot;
		if (aq_grant_read(grant, &slot) < 0)
			return 2;
		slot.memory_limit = 43u << 20; /* room for the neighbour and three */
		if (aq_grant_update(grant, &slot) < 0)
			return 2;
	}

	static char last[LOOKED_AT];
	long states = 0;
	for (; !WIFEXITED(status); steps++) {
		long given = ptrace(PTRACE_PEEKDATA, child, live, 0);
		if (given < 0)
			fail("it lost count");
		if (aq_account_units(&account) < NEIGHBOURS + (uint64_t)given * MIB_UNITS)
			fail("the driver has given out more than the account says");
		if (memcmp(last, region, LOOKED_AT) != 0) {
			memcpy(last, region, LOOKED_AT);
			judge(last);
			states++;
		}
		ptrace(PTRACE_SINGLESTEP, child, 0, 0);
		if (waitpid(child, &status, 0) < 0 || WIFSIGNALED(status))
			fail("it died");
	}
	if (WEXITSTATUS(status) != 0)
		fail("a call answered something else");
	printf("%ld %ld\n", steps, states);
	return 0;
}
