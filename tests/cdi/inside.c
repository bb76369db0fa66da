/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs in a container that was given CDI devices and prints what it finds there, one "key=value" per line.
 * Arguments: names of libraries to load, "node:PATH" to open a device, "read:PATH" and "write:PATH" for
 * files, "env:NAME" for variables, "run:PROGRAM" to start one from PATH, "bare" to start itself with no
 * environment.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *reason(void)
{
	return strerror(errno);
}

static void load(const char *name)
{
	void *handle = dlopen(name, RTLD_NOW);
	const char *(*version)(void);

	if (!handle) {
		printf("%s=missing: %s\n", name, dlerror());
		return;
	}
	*(void **)&version = dlsym(handle, "version");
	printf("%s=%s\n", name, version ? version() : "another library");
}

static void open_for(const char *what, const char *path, int flags)
{
	char text[256];
	int fd = open(path, flags | O_CLOEXEC);
	ssize_t size;

	if (fd < 0) {
		printf("%s=%s\n", what, reason());
		return;
	}
	size = (flags & O_ACCMODE) == O_RDONLY ? read(fd, text, sizeof(text) - 1) : 0;
	for (ssize_t i = 0; i < size; i++)
		if (text[i] == '\n')
			text[i] = '|';
	printf("%s=%.*s\n", what, size > 0 ? (int)size : 2, size > 0 ? text : "ok");
	close(fd);
}

static void start(char *const argv[], char *const environment[])
{
	pid_t child;
	int status;

	fflush(stdout);
	child = fork();
	if (!child) {
		if (environment)
			execve(argv[0], argv, environment);
		else
			execvp(argv[0], argv);
		_exit(127);
	}
	if (waitpid(child, &status, 0) < 0 || status)
		printf("%s=status %d\n", argv[0], status);
}

int main(int argc, char **argv)
{
	for (int i = 1; i < argc; i++) {
		char *colon = strchr(argv[i], ':');
		char *rest = colon ? colon + 1 : NULL;

		if (!colon && !strcmp(argv[i], "bare")) {
			char *none[] = {NULL};
			char *again[] = {"/inside", "env:LD_PRELOAD", NULL};

			start(again, none);
		} else if (!colon) {
			load(argv[i]);
		} else if (!strncmp(argv[i], "node:", 5)) {
			open_for(argv[i], rest, O_RDWR);
		} else if (!strncmp(argv[i], "read:", 5)) {
			open_for(argv[i], rest, O_RDONLY);
		} else if (!strncmp(argv[i], "write:", 6)) {
			open_for(argv[i], rest, O_WRONLY | O_CREAT);
		} else if (!strncmp(argv[i], "env:", 4)) {
			printf("%s=%s\n", argv[i], getenv(rest) ? getenv(rest) : "unset");
		} else if (!strncmp(argv[i], "run:", 4)) {
			char *program[] = {rest, NULL};

			start(program, NULL);
		}
	}
	return 0;
}
