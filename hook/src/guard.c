/* SPDX-License-Identifier: Apache-2.0
 *
 * See guard.h. The handler is installed at the first use and again whenever something else has taken its
 * place; a SIGBUS that is not ours goes to whoever had the signal before.
 */
#include "guard.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>

static pthread_mutex_t install_lock = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction previous;
static _Thread_local sigjmp_buf *armed;

static void on_sigbus(int signal_number, siginfo_t *info, void *context)
{
	if (armed)
		siglongjmp(*armed, 1);
	if (previous.sa_flags & SA_SIGINFO) {
		previous.sa_sigaction(signal_number, info, context);
	} else if (previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN) {
		/* Back to the instruction that faulted, now without us: the process ends as it would have. */
		struct sigaction standard = {.sa_handler = SIG_DFL};
		sigaction(SIGBUS, &standard, NULL);
	} else {
		previous.sa_handler(signal_number);
	}
}

static int install(void)
{
	struct sigaction now;
	int rc = 0;
	pthread_mutex_lock(&install_lock);
	if (sigaction(SIGBUS, NULL, &now) < 0) {
		rc = -errno;
	} else if (!(now.sa_flags & SA_SIGINFO) || now.sa_sigaction != on_sigbus) {
		struct sigaction ours = {.sa_sigaction = on_sigbus,
					 .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
		sigemptyset(&ours.sa_mask);
		previous = now;
		if (sigaction(SIGBUS, &ours, NULL) < 0)
			rc = -errno;
	}
	pthread_mutex_unlock(&install_lock);
	return rc;
}

int aq_guarded(int (*step)(void *map, void *argument), void *map, void *argument)
{
	sigjmp_buf here;
	sigset_t bus, before;
	int rc = install();
	if (rc < 0)
		return rc;
	/* A thread that blocks SIGBUS would be ended by the kernel instead of coming to the handler. */
	sigemptyset(&bus);
	sigaddset(&bus, SIGBUS);
	pthread_sigmask(SIG_UNBLOCK, &bus, &before);
	if (sigsetjmp(here, 0) == 0) {
		armed = &here;
		rc = step(map, argument);
	} else {
		rc = -EIO;
	}
	armed = NULL;
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return rc;
}
