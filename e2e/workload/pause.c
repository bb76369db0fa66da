/* SPDX-License-Identifier: Apache-2.0
 *
 * The first process of a pod: holds the pod's namespaces open and reaps what is left to it. Static, so that
 * its image is one file.
 */
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static void leave(int number)
{
	(void)number;
	_exit(0);
}

static void reap(int number)
{
	(void)number;
	while (waitpid(-1, NULL, WNOHANG) > 0)
		;
}

int main(void)
{
	struct sigaction end = {.sa_handler = leave};
	struct sigaction child = {.sa_handler = reap, .sa_flags = SA_NOCLDSTOP | SA_RESTART};

	if (sigaction(SIGINT, &end, NULL) || sigaction(SIGTERM, &end, NULL) ||
	    sigaction(SIGCHLD, &child, NULL))
		return EXIT_FAILURE;
	for (;;)
		pause();
}
