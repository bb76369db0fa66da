/* SPDX-License-Identifier: Apache-2.0
 *
 * Who uses the driver, and who of them is dead. See state.h and process.h.
 *
 * Liveness is a record lock of an open file description that only a mapping keeps open: closing descriptors
 * does not end it, MADV_DONTFORK keeps it from children, exec and exit drop the mapping, and the kernel
 * answers for it across PID namespaces. Asking costs a system call, so the fast paths look at `pulse` first:
 * a robust mutex whose word the kernel marks when the thread that holds it ends.
 */
#include "process.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "account.h"
#include "lock.h"
#include "shared_file.h"
#include "state_make.h"

#define SWEEP_NS 20000000u

static int self = -1;
static uint64_t self_boot;
static void *life; /* the mapping that holds the record lock */
static uint32_t forks;
static pthread_mutex_t joining = PTHREAD_MUTEX_INITIALIZER;

static int is_locked(int fd, uint64_t byte, uint64_t length)
{
	struct flock lock = {
	    .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)byte, .l_len = (off_t)length};

	/* Not to know means to let live. */
	return fcntl(fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

int fg_process_lives(uint32_t slot)
{
	int fd = fg_state_descriptor();

	return fd < 0 || is_locked(fd, FG_LIVE_BYTE + slot, 1);
}

int fg_process_any_lives(int fd)
{
	if (!is_locked(fd, FG_LIVE_BYTE, FG_MAX_PROCESSES))
		return 0;
	if (fg_state->magic != FG_STATE_MAGIC || fg_state->version != FG_STATE_VERSION ||
	    fg_state->build != fg_state_build())
		return 1;
	for (uint32_t i = 0; i < FG_MAX_PROCESSES; i++)
		if (fg_process_at(i)->uses_cuda && fg_process_at(i)->stage != FG_PROCESS_FREE &&
		    is_locked(fd, FG_LIVE_BYTE + i, 1))
			return 1;
	return 0;
}

static uint32_t pulse_word(const struct fg_process *process)
{
	/* glibc keeps the futex in the first word; the kernel's FUTEX_OWNER_DIED is set there. */
	return __atomic_load_n((const uint32_t *)(const void *)&process->pulse, __ATOMIC_RELAXED);
}

static void start_pulse(struct fg_process *process)
{
	pthread_mutexattr_t attributes;

	pthread_mutexattr_init(&attributes);
	pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
	pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
	pthread_mutex_init(&process->pulse, &attributes);
	pthread_mutexattr_destroy(&attributes);
	pthread_mutex_lock(&process->pulse);
}

void fg_process_keep_pulse(void)
{
	struct fg_process *mine = fg_process_at((uint32_t)self);

	if (__builtin_expect((pulse_word(mine) & FUTEX_OWNER_DIED) == 0, 1))
		return;
	pthread_mutex_lock(&joining);
	if (self >= 0 && (pulse_word(mine) & FUTEX_OWNER_DIED) != 0)
		start_pulse(mine);
	pthread_mutex_unlock(&joining);
}

int fg_process_self(void)
{
	return self;
}

/* Locks the byte of `slot` in a way that lasts as long as this address space; 0 when someone has it. */
static int take_life(uint32_t slot)
{
	struct flock lock = {
	    .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)(FG_LIVE_BYTE + slot), .l_len = 1};
	int fd = fg_state_reopen();

	if (fd < 0)
		return 0;
	if (fcntl(fd, F_OFD_SETLK, &lock) != 0) {
		close(fd);
		return 0;
	}
	life = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
	if (life != MAP_FAILED)
		madvise(life, 4096, MADV_DONTFORK);
	close(fd);
	return life != MAP_FAILED;
}

/* Removes what the former owner of a slot left. Its record lock is gone, or this process's own by now. */
static void bury(uint32_t slot)
{
	struct fg_process *dead = fg_process_at(slot);

	for (uint32_t i = 0; i < fg_state->seat_high; i++) {
		struct fg_seat *seat = fg_seat_at(i);

		if (seat->in_use && seat->process == slot)
			fg_account_vacate(i);
	}
	for (uint32_t i = 0; i < FG_SHARED_EVENTS; i++)
		if (fg_state->shared_event[i].in_use && fg_state->shared_event[i].process == slot)
			__atomic_store_n(&fg_state->shared_event[i].in_use, 0, __ATOMIC_RELEASE);
	if (dead->has_files)
		fg_shared_file_remove_all(slot, dead->generation);
	dead->has_files = 0;
	dead->uses_cuda = 0;
	__atomic_store_n(&dead->stage, FG_PROCESS_FREE, __ATOMIC_RELEASE);
}

static void describe_self(struct fg_process *mine)
{
	char text[1024];
	struct stat info;
	FILE *file = fopen("/proc/self/stat", "re");
	ssize_t length = readlink("/proc/self/exe", mine->name, sizeof mine->name - 1);

	mine->name[length > 0 ? length : 0] = '\0';
	mine->pid = getpid();
	mine->pid_namespace = stat("/proc/self/ns/pid", &info) == 0 ? info.st_ino : 0;
	mine->host_pid = mine->pid_namespace == fg_state->creator_pid_namespace ? mine->pid : 0;
	mine->start_ticks = 0;
	if (file == NULL)
		return;
	length = (ssize_t)fread(text, 1, sizeof text - 1, file);
	fclose(file);
	text[length > 0 ? length : 0] = '\0';
	/* The name in parentheses may hold spaces and parentheses; what follows the last one does not. */
	char *at = strrchr(text, ')');

	for (int field = 2; at != NULL && field < 22; field++)
		at = strchr(at + 1, ' ');
	if (at != NULL)
		mine->start_ticks = strtoull(at + 1, NULL, 10);
}

static int join_slot(uint32_t slot)
{
	struct fg_process *mine = fg_process_at(slot);

	if (!take_life(slot))
		return -1;
	self = (int)slot;
	for (uint32_t i = 0; i < fg_state->card_count; i++)
		if (fg_lock_inherit(&fg_card_at(i)->lock)) {
			fg_account_repair(fg_card_at(i));
			fg_lock_give(&fg_card_at(i)->lock);
		}
	if (!fg_lock_inherit(&fg_state->lock))
		fg_state_lock();
	if (mine->stage != FG_PROCESS_FREE)
		bury(slot);
	mine->stage = FG_PROCESS_JOINING;
	mine->generation++;
	mine->uses_cuda = 0;
	start_pulse(mine);
	describe_self(mine);
	if (fg_state->process_high <= slot)
		__atomic_store_n(&fg_state->process_high, slot + 1, __ATOMIC_RELEASE);
	__atomic_store_n(&mine->stage, FG_PROCESS_LIVE, __ATOMIC_RELEASE);
	fg_state_unlock();
	return self;
}

static int join_somewhere(void)
{
	/* First where the table says that nobody is, then wherever the kernel says so. */
	for (uint32_t i = 0; i < FG_MAX_PROCESSES; i++) {
		const struct fg_process *process = fg_process_at(i);

		if ((process->stage == FG_PROCESS_FREE || (pulse_word(process) & FUTEX_OWNER_DIED) != 0) &&
		    join_slot(i) >= 0)
			return self;
	}
	for (uint32_t i = 0; i < FG_MAX_PROCESSES; i++)
		if (!fg_process_lives(i) && join_slot(i) >= 0)
			return self;
	return -1;
}

int fg_process_join(int uses_cuda)
{
	pthread_mutex_lock(&joining);
	int before = errno;

	if (self >= 0 && self_boot != fg_state->boot) {
		self = -1;
		munmap(life, 4096);
	}
	if (self < 0) {
		self_boot = fg_state->boot;
		join_somewhere();
	}
	if (self >= 0 && uses_cuda)
		__atomic_store_n(&fg_process_at((uint32_t)self)->uses_cuda, 1, __ATOMIC_RELEASE);
	errno = before;
	pthread_mutex_unlock(&joining);
	return self;
}

static void bury_if_dead(uint32_t slot)
{
	struct fg_process *process = fg_process_at(slot);
	uint32_t generation = process->generation;

	if (fg_process_lives(slot))
		return;
	if (self < 0 && fg_process_join(0) < 0)
		return;
	fg_state_lock();
	/* Someone may have been quicker, and a new process may sit there. */
	if (process->stage != FG_PROCESS_FREE && process->generation == generation && !fg_process_lives(slot))
		bury(slot);
	fg_state_unlock();
}

void fg_reap(void)
{
	int before = errno;
	uint32_t high = __atomic_load_n(&fg_state->process_high, __ATOMIC_ACQUIRE);

	for (uint32_t i = 0; i < high; i++)
		if ((int)i != self &&
		    __atomic_load_n(&fg_process_at(i)->stage, __ATOMIC_ACQUIRE) != FG_PROCESS_FREE)
			bury_if_dead(i);
	__atomic_store_n(&fg_state->last_sweep_ns, fg_coarse_ns(), __ATOMIC_RELAXED);
	errno = before;
}

void fg_reap_hinted(void)
{
	uint32_t high = __atomic_load_n(&fg_state->process_high, __ATOMIC_ACQUIRE);

	if (high <= 1 && self == 0)
		return;
	/* Where the kernel keeps no robust lists (emulators), and for processes whose first thread left. */
	if (fg_coarse_ns() - __atomic_load_n(&fg_state->last_sweep_ns, __ATOMIC_RELAXED) > SWEEP_NS) {
		fg_reap();
		return;
	}
	for (uint32_t i = 0; i < high; i++) {
		const struct fg_process *process = fg_process_at(i);

		if (__builtin_expect((pulse_word(process) & FUTEX_OWNER_DIED) != 0, 0) && (int)i != self &&
		    __atomic_load_n(&process->stage, __ATOMIC_RELAXED) != FG_PROCESS_FREE) {
			int before = errno;

			bury_if_dead(i);
			errno = before;
		}
	}
}

uint32_t fg_process_fork_count(void)
{
	return __atomic_load_n(&forks, __ATOMIC_RELAXED);
}

static void before_fork(void)
{
	fg_state_before_fork();
	pthread_mutex_lock(&joining);
}

static void after_fork_here(void)
{
	pthread_mutex_unlock(&joining);
	fg_state_after_fork();
}

static void after_fork_child(void)
{
	/* The slot, its lock and what is charged are the parent's. */
	self = -1;
	life = NULL;
	forks++;
	after_fork_here();
}

void fg_process_watch_fork(void)
{
	static int watching;

	if (!watching) {
		watching = 1;
		pthread_atfork(before_fork, after_fork_here, after_fork_child);
	}
}
