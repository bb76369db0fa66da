/* SPDX-License-Identifier: Apache-2.0
 *
 * Which number a process in a container has outside. The driver reports the outer number everywhere; a
 * process cannot know its own, but whoever looks from outside finds it in /proc.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "state.h"

int32_t fg_process_reported_pid(uint32_t index)
{
	const struct fg_process *process = fg_process_at(index);

	return process->host_pid != 0 ? process->host_pid : process->pid;
}

static int any_unknown(void)
{
	for (uint32_t i = 0; i < fg_state->process_high; i++)
		if (fg_process_at(i)->stage == FG_PROCESS_LIVE && fg_process_at(i)->host_pid == 0)
			return 1;
	return 0;
}

/* The last number of the NSpid line: the one the process sees itself. */
static int32_t inner_pid(const char *outer)
{
	char path[300], line[512];
	int32_t last = 0;
	FILE *file;

	snprintf(path, sizeof path, "/proc/%s/status", outer);
	file = fopen(path, "re");
	if (file == NULL)
		return 0;
	while (fgets(line, sizeof line, file) != NULL)
		if (strncmp(line, "NSpid:", 6) == 0) {
			char *at = line + 6, *end;

			for (long number = strtol(at, &end, 10); end != at; number = strtol(at, &end, 10)) {
				last = (int32_t)number;
				at = end;
			}
		}
	fclose(file);
	return last;
}

static void look_at(const char *outer)
{
	char path[300];
	struct stat space;

	snprintf(path, sizeof path, "/proc/%s/ns/pid", outer);
	if (stat(path, &space) != 0)
		return;
	int32_t inner = 0;

	for (uint32_t i = 0; i < fg_state->process_high; i++) {
		struct fg_process *process = fg_process_at(i);

		if (process->stage != FG_PROCESS_LIVE || process->host_pid != 0 ||
		    process->pid_namespace != space.st_ino)
			continue;
		if (inner == 0)
			inner = inner_pid(outer);
		if (process->pid == inner)
			__atomic_store_n(&process->host_pid, atoi(outer), __ATOMIC_RELEASE);
	}
}

void fg_resolve_host_pids(void)
{
	struct dirent *entry;
	struct stat mine;
	DIR *proc;

	/* Only the namespace of the state's creator counts as outside. */
	if (!any_unknown() || stat("/proc/self/ns/pid", &mine) != 0 ||
	    mine.st_ino != fg_state->creator_pid_namespace)
		return;
	proc = opendir("/proc");
	if (proc == NULL)
		return;
	while ((entry = readdir(proc)) != NULL)
		if (entry->d_name[0] >= '1' && entry->d_name[0] <= '9')
			look_at(entry->d_name);
	closedir(proc);
}
