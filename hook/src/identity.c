/* SPDX-License-Identifier: Apache-2.0
 *
 * Who this process is, and whether a neighbour is gone. Identity of a process is (PID namespace, pid, start
 * time); a pid alone may have been given to somebody else.
 *
 * Never calls a living process dead: where it cannot see (another PID namespace, no /proc, a /proc of another
 * namespace), it leaves the judgement to the node.
 */
#include "identity.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "early.h"
#include "files.h"
#include "kernel.h"
#include "process.h"
#include "say.h"

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

extern int __register_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void), void *dso);
/* What start files would bring; they bring constructors too. */
void *__dso_handle __attribute__((weak, visibility("hidden"))) = &__dso_handle;

AQ_EARLY struct aq_process *aq_process_word;

/* Kernels before 4.14 do not empty pages in a child, so it is done by hand. */
static void empty_in_child(void)
{
	memset(aq_process_word, 0, sizeof(struct aq_process));
}

struct aq_process *aq_process_pages(void)
{
	static struct aq_process last_resort;
	int saved = errno;
	size_t size = sizeof(struct aq_process);
	struct aq_process *expected = NULL;
	struct aq_process *pages =
	    aq_kernel_map(size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	bool wiped = pages && syscall(SYS_madvise, pages, size, MADV_WIPEONFORK) == 0;
	if (pages == NULL)
		pages = &last_resort;
	if (__atomic_compare_exchange_n(&aq_process_word, &expected, pages, false, __ATOMIC_ACQ_REL,
					__ATOMIC_ACQUIRE)) {
		if (!wiped)
			__register_atfork(NULL, NULL, empty_in_child, &__dso_handle);
		expected = pages;
	} else if (pages != &last_resort) {
		munmap(pages, size);
	}
	errno = saved;
	return expected;
}

/* State, thread count and start time out of /proc/<pid>/stat. The name in it may hold anything, so what
 * counts begins after its last closing parenthesis. */
struct stat_line {
	uint64_t pid;
	char state;
	uint64_t threads;
	uint64_t start;
};

/* The number that begins at `text`; 0 where there is none. */
static uint64_t number_at(const char *text)
{
	uint64_t number = 0;
	for (; *text >= '0' && *text <= '9'; text++)
		number = number * 10 + (uint64_t)(*text - '0');
	return number;
}

static bool read_stat(const char *pid, struct stat_line *out)
{
	char path[64], text[1024];
	long length = 0;
	if (aq_path(path, sizeof(path), "/proc", pid, "stat"))
		length = aq_read_file(path, text, sizeof(text));
	const char *rest = text + (length > 0 ? length : 0);
	while (rest > text && rest[-1] != ')')
		rest--;
	if (rest == text || rest[0] != ' ')
		return false;
	out->pid = number_at(text);
	out->state = rest[1];
	/* Field 3 is the state; 20 the number of threads; 22 the start time. */
	const char *field = rest + 1;
	for (int number = 3; number < 22; number++) {
		if (number == 20)
			out->threads = number_at(field);
		while (*field && *field != ' ')
			field++;
		if (*field == '\0')
			return false;
		field++;
	}
	out->start = number_at(field);
	return true;
}

static uint64_t namespace_inode(void)
{
	char target[64];
	long length = syscall(SYS_readlinkat, AT_FDCWD, "/proc/self/ns/pid", target, sizeof(target) - 1);
	if (length <= 0)
		return 0;
	target[length] = '\0';
	/* "pid:[4026531836]" */
	const char *inode = target;
	while (*inode && (*inode < '0' || *inode > '9'))
		inode++;
	return number_at(inode);
}

void aq_identify(struct aq_process *process)
{
	int saved = errno;
	struct stat_line line;
	process->pid = (uint32_t)syscall(SYS_getpid);
	process->start = 0;
	process->pidns = 0;
	/* A /proc of another namespace is worse than none. */
	if (read_stat("self", &line) && line.pid == process->pid) {
		process->start = line.start & UINT32_MAX;
		process->pidns = namespace_inode();
	}
	__atomic_store_n(&process->known, 1, __ATOMIC_RELEASE);
	errno = saved;
}

bool aq_owner_left(const struct aq_process *process, uint64_t owner, uint64_t pidns, enum aq_look look,
		   struct aq_mapped_file *region)
{
	if (!(owner & AQ_OWNER_LIVE) || process->pidns == 0 || pidns != process->pidns)
		return false;
	uint32_t pid = (uint32_t)(owner & AQ_OWNER_PID_MASK);
	uint64_t start = owner >> AQ_OWNER_START_SHIFT & UINT32_MAX;
	if (pid == 0 || pid == process->pid)
		return false;
	int saved = errno;
	bool exists = syscall(SYS_kill, (pid_t)pid, 0) == 0 || errno != ESRCH;
	errno = saved;
	if (!exists || look == AQ_LOOK_BRIEFLY)
		return !exists;
	char digits[24];
	const char *text = aq_decimal(pid, digits);
	struct stat_line line;
	if (!read_stat(text, &line))
		return false;
	if ((line.start & UINT32_MAX) != start)
		return true;
	/* A zombie holds nothing any more, unless it is the first thread of a process that goes on. */
	if (line.state == 'Z' || line.state == 'X')
		return line.threads <= 1;
	return region && aq_maps_lack(text, region);
}
