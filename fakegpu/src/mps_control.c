/* SPDX-License-Identifier: Apache-2.0
 *
 * nvidia-cuda-mps-control, as far as a manager of MPS needs one: it takes the commands and writes down what
 * it got.
 *
 *   nvidia-cuda-mps-control -d | -f    "starts" the daemon: logs that, and returns (-f: stays until stdin
 * ends) nvidia-cuda-mps-control            reads commands from stdin, one a line, and logs each
 *
 * Log, one line each ("start", "command <text>"): $FAKEGPU_MPS_LOG, else $CUDA_MPS_LOG_DIRECTORY/control.log,
 * else /var/log/nvidia-mps/control.log. $FAKEGPU_MPS_EXIT is the exit status instead of 0. Never starts a
 * process.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>

static FILE *open_log(void)
{
	const char *file = getenv("FAKEGPU_MPS_LOG"), *folder = getenv("CUDA_MPS_LOG_DIRECTORY");
	char path[4096];
	if (file != NULL && *file != '\0')
		snprintf(path, sizeof(path), "%s", file);
	else
		snprintf(path, sizeof(path), "%s/control.log",
			 folder != NULL && *folder != '\0' ? folder : "/var/log/nvidia-mps");
	FILE *log = fopen(path, "ae");
	if (log == NULL)
		fprintf(stderr,
			"Cannot open the log %s: %s; set FAKEGPU_MPS_LOG to a file that can be written\n",
			path, strerror(errno));
	return log;
}

static void note(FILE *log, const char *what, const char *text)
{
	flock(fileno(log), LOCK_EX);
	fprintf(log, "%s%s%s\n", what, *text != '\0' ? " " : "", text);
	fflush(log);
	flock(fileno(log), LOCK_UN);
}

/* What a client expects to read back; everything else is answered by silence, as the real one does. */
static void answer(const char *command)
{
	if (strcmp(command, "get_default_active_thread_percentage") == 0)
		puts("100.0");
	fflush(stdout);
}

static int exit_status(void)
{
	const char *text = getenv("FAKEGPU_MPS_EXIT");
	return text != NULL ? (int)strtol(text, NULL, 10) & 0xff : 0;
}

int main(int argc, char **argv)
{
	int start = argc == 2 && (strcmp(argv[1], "-d") == 0 || strcmp(argv[1], "-f") == 0);
	if (argc > 1 && !start) {
		fprintf(stderr, "usage: %s [-d | -f]   (commands are read from standard input)\n", argv[0]);
		return 2;
	}
	FILE *log = open_log();
	if (log == NULL)
		return 1;
	if (start)
		note(log, "start", argv[1] + 1);
	if (!start || argv[1][1] == 'f') {
		char line[4096];
		while (fgets(line, sizeof(line), stdin) != NULL) {
			line[strcspn(line, "\r\n")] = '\0';
			if (*line == '\0')
				continue;
			note(log, "command", line);
			answer(line);
			if (strncmp(line, "quit", 4) == 0)
				break;
		}
	}
	fclose(log);
	return exit_status();
}
