/* SPDX-License-Identifier: Apache-2.0
 *
 * A usage file that is cut short under a running program. The kernel then sends SIGBUS at the next access; no
 * check beforehand can exclude that. So a handler stands there which knows one thing: a fault inside one of
 * our mappings puts empty pages in place of the lost ones and lets the access go on; from then on this
 * process is granted nothing more. Everything else goes to whatever the program has installed.
 *
 * The program does not see it: sigaction and signal are exported and answer for SIGBUS from what the program
 * itself last set. All other signals pass through untouched. A thread that blocks SIGBUS is not covered: the
 * kernel ends the process then.
 */
#include "sigbus.h"

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "early.h"
#include "lock.h"
#include "objects.h"
#include "say.h"
#include "state.h"

#define EXPORT __attribute__((visibility("default")))

struct range {
	uintptr_t start;
	size_t length;
};

/* One for each share, and HAMi's region. */
#define MOST_RANGES (AQ_MAX_SHARES + 1)

AQ_EARLY static struct range ranges[MOST_RANGES];
AQ_EARLY static uint32_t range_count;
AQ_EARLY static int installed;
AQ_EARLY static int lost;
/* What the program believes to be in force for SIGBUS, once ours is. */
AQ_EARLY static struct sigaction programs;

typedef int sigaction_type(int, const struct sigaction *, struct sigaction *);
typedef void (*handler_type)(int);
typedef handler_type signal_type(int, handler_type);

static void *libc_function(const char *name)
{
	static const char *const places[] = {"libc.so", "libc-", NULL};
	return aq_elf_function(places, name);
}

static sigaction_type *libc_sigaction(void)
{
	AQ_EARLY static void *function;
	if (__atomic_load_n(&function, __ATOMIC_RELAXED) == NULL)
		__atomic_store_n(&function, libc_function("sigaction"), __ATOMIC_RELAXED);
	return (sigaction_type *)function;
}

static bool mend(uintptr_t address)
{
	uint32_t count = __atomic_load_n(&range_count, __ATOMIC_ACQUIRE);
	for (uint32_t i = 0; i < count && i < MOST_RANGES; i++) {
		if (address - ranges[i].start >= ranges[i].length)
			continue;
		void *empty = mmap((void *)ranges[i].start, ranges[i].length, PROT_READ | PROT_WRITE,
				   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
		return empty != MAP_FAILED;
	}
	return false;
}

static void pass_on(int number, siginfo_t *info, void *context)
{
	struct sigaction action = programs;
	if (action.sa_flags & SA_SIGINFO) {
		action.sa_sigaction(number, info, context);
	} else if (action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN) {
		/* The access is repeated without us and ends the program as it would have. */
		struct sigaction standard;
		memset(&standard, 0, sizeof(standard));
		standard.sa_handler = SIG_DFL;
		libc_sigaction()(SIGBUS, &standard, NULL);
		if (info->si_code <= 0)
			raise(SIGBUS);
	} else {
		action.sa_handler(number);
	}
}

static void on_sigbus(int number, siginfo_t *info, void *context)
{
	int saved = errno;
	if (info->si_code <= 0 || !mend((uintptr_t)info->si_addr)) {
		errno = saved;
		pass_on(number, info, context);
		return;
	}
	__atomic_store_n(&lost, 1, __ATOMIC_SEQ_CST);
	for (uint32_t i = 0; i < aq_share_count && i < AQ_MAX_SHARES; i++)
		__atomic_store_n(&aq_shares[i].limit, 0, __ATOMIC_SEQ_CST);
	AQ_SAY(AQ_SAY_REGION,
	       "the usage file of this container was cut short; this process gets no more GPU memory");
	errno = saved;
}

bool aq_sigbus_lost(void)
{
	return __atomic_load_n(&lost, __ATOMIC_SEQ_CST) != 0;
}

/* Called under the lock of aq_decide. */
void aq_sigbus_guard(void *map, size_t length)
{
	sigaction_type *set = libc_sigaction();
	uint32_t place = __atomic_load_n(&range_count, __ATOMIC_RELAXED);
	if (set == NULL || place >= MOST_RANGES)
		return;
	ranges[place] = (struct range){(uintptr_t)map, length};
	__atomic_store_n(&range_count, place + 1, __ATOMIC_RELEASE);
	if (__atomic_exchange_n(&installed, 1, __ATOMIC_ACQ_REL))
		return;
	struct sigaction ours;
	memset(&ours, 0, sizeof(ours));
	ours.sa_sigaction = on_sigbus;
	ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER | SA_RESTART;
	set(SIGBUS, &ours, &programs);
}

/* ---- what the program sees of SIGBUS ----------------------------------------------------------- */

EXPORT int sigaction(int number, const struct sigaction *action, struct sigaction *old)
{
	if (number == SIGBUS && __atomic_load_n(&installed, __ATOMIC_ACQUIRE)) {
		struct sigaction before = programs;
		if (action)
			programs = *action;
		if (old)
			*old = before;
		return 0;
	}
	sigaction_type *real = libc_sigaction();
	if (real)
		return real(number, action, old);
	errno = ENOSYS;
	return -1;
}

EXPORT handler_type signal(int number, handler_type handler)
{
	if (number == SIGBUS && __atomic_load_n(&installed, __ATOMIC_ACQUIRE)) {
		handler_type before = programs.sa_handler;
		if (handler != SIG_ERR) {
			memset(&programs, 0, sizeof(programs));
			programs.sa_handler = handler;
			programs.sa_flags = SA_RESTART;
		}
		return before;
	}
	AQ_EARLY static void *function;
	if (__atomic_load_n(&function, __ATOMIC_RELAXED) == NULL)
		__atomic_store_n(&function, libc_function("signal"), __ATOMIC_RELAXED);
	if (function)
		return ((signal_type *)function)(number, handler);
	errno = ENOSYS;
	return SIG_ERR;
}
