/* SPDX-License-Identifier: Apache-2.0
 *
 * Opening the shared state: finding the configuration, making the state from it, noticing that it was made
 * anew.
 *
 * The mapping is larger than any state and is made once, so that pointers into it stay good when the file is
 * made anew in place (never truncated: that would kill whoever looks into it at that moment). Invariant:
 * `magic` is written last; a state with it is complete.
 */
#include "state.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "account.h"
#include "call.h"
#include "process.h"
#include "state_make.h"

#define DEFAULT_CONFIG "/run/fakegpu/config.json"
#define MAP_BYTES      (UINT64_C(4) << 30)

struct fg_state *fg_state;
static const uint32_t nothing;
const uint32_t *fg_attention = &nothing;
uint32_t fg_attention_here;

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
static char config_path[512], state_path[520], folder[512];
static dev_t state_device;
static ino_t state_inode;
static int descriptor = -1;
static uint64_t complained; /* last error told, so that it is told once */

const char *fg_config_path(void)
{
	return config_path;
}

const char *fg_state_folder(void)
{
	return folder;
}

void fg_state_complain(const char *what, const char *why)
{
	char line[900];
	int length = snprintf(line, sizeof line, "fakegpu: %s: %s\n", what, why);
	uint64_t hash = 14695981039346656037ull;

	for (int i = 0; i < length && i < (int)sizeof line; i++)
		hash = (hash ^ (unsigned char)line[i]) * 1099511628211ull;
	if (hash == complained)
		return;
	complained = hash;
	if (length > (int)sizeof line - 1)
		length = (int)sizeof line - 1;
	if (write(STDERR_FILENO, line, (size_t)length) < 0)
		return;
}

static int is_state_file(int fd)
{
	struct stat info;

	return fd >= 0 && fstat(fd, &info) == 0 && info.st_dev == state_device && info.st_ino == state_inode;
}

int fg_state_reopen(void)
{
	int fd = open(state_path, O_RDWR | O_CLOEXEC);

	if (fd >= 0 && !is_state_file(fd)) {
		close(fd);
		fd = -1;
	}
	return fd;
}

int fg_state_descriptor(void)
{
	if (is_state_file(descriptor))
		return descriptor;
	/* The program closed it (closefrom), and the number may be its own file by now: leave that alone. */
	int fresh = fg_state_reopen();
	int high = fresh < 0 ? -1 : fcntl(fresh, F_DUPFD_CLOEXEC, 600);

	if (high >= 0) {
		close(fresh);
		fresh = high;
	}
	descriptor = fresh;
	return fresh;
}

static const char *library_file; /* where this library was loaded from */

/* When it is loaded, not when it is asked: the question needs the loader's lock, which must not be waited for
 * with `opening` held. */
__attribute__((constructor)) static void remember_library(void)
{
	Dl_info here;

	if (dladdr(&library_file, &here) != 0)
		library_file = here.dli_fname;
}

/* The configuration at the top of the driver root that this library lies in, or "". In a container that root
 * is the image's own "/", whose files are nobody's configuration. */
static void find_beside_library(char *path, size_t size)
{
	char *real = library_file != NULL ? realpath(library_file, NULL) : NULL;
	char *inside = real != NULL ? strstr(real, "/usr/lib") : NULL;

	path[0] = '\0';
	for (char *next = inside; next != NULL; next = strstr(next + 1, "/usr/lib"))
		inside = next;
	if (inside != NULL && inside != real &&
	    (snprintf(path, size, "%.*s/config.json", (int)(inside - real), real) >= (int)size ||
	     access(path, R_OK) != 0))
		path[0] = '\0';
	free(real);
}

static void find_paths(void)
{
	const char *named = secure_getenv("FAKEGPU_CONFIG");
	char *slash;

	config_path[0] = '\0';
	if (named != NULL && named[0] != '\0')
		snprintf(config_path, sizeof config_path, "%s", named);
	else if (access(DEFAULT_CONFIG, F_OK) != 0)
		find_beside_library(config_path, sizeof config_path);
	if (config_path[0] == '\0')
		snprintf(config_path, sizeof config_path, "%s", DEFAULT_CONFIG);
	snprintf(state_path, sizeof state_path, "%s.state", config_path);
	snprintf(folder, sizeof folder, "%s", config_path);
	slash = strrchr(folder, '/');
	if (slash != NULL)
		*slash = '\0';
	else
		snprintf(folder, sizeof folder, ".");
}

static enum fg_open_result map_file(void)
{
	struct stat info;
	int fd = open(state_path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);

	if (fd < 0 || fstat(fd, &info) != 0) {
		fg_state_complain(state_path, strerror(errno));
		return FG_OPEN_NO_ACCESS;
	}
	if (info.st_size == 0)
		fchmod(fd, 0666); /* every user of the machine has the driver; umask or not */
	void *map = mmap(NULL, MAP_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);

	if (map == MAP_FAILED) {
		fg_state_complain(state_path, strerror(errno));
		close(fd);
		return FG_OPEN_NO_ACCESS;
	}
	state_device = info.st_dev;
	state_inode = info.st_ino;
	int high = fcntl(fd, F_DUPFD_CLOEXEC, 600);

	if (high >= 0) {
		close(fd);
		fd = high;
	}
	descriptor = fd;
	fg_state = map;
	return FG_OPEN_OK;
}

/* Does the state stand for this configuration file? Reads the header only if there is one. */
static int is_current(const struct stat *config)
{
	static int has_header; /* the file never gets shorter */
	struct stat info;

	if (!has_header)
		has_header =
		    fstat(fg_state_descriptor(), &info) == 0 && (uint64_t)info.st_size >= sizeof *fg_state;
	return has_header && __atomic_load_n(&fg_state->magic, __ATOMIC_ACQUIRE) == FG_STATE_MAGIC &&
	       fg_state->version == FG_STATE_VERSION && fg_state->build == fg_state_build() &&
	       fg_state->config_inode == config->st_ino &&
	       fg_state->config_size == (uint64_t)config->st_size &&
	       fg_state->config_time_ns ==
		   (uint64_t)config->st_mtim.tv_sec * 1000000000u + (uint64_t)config->st_mtim.tv_nsec;
}

static enum fg_open_result make_current(void)
{
	struct flock lock = {
	    .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)FG_INIT_BYTE, .l_len = 1};
	/* A descriptor of its own, so that the lock ends with it. */
	int fd = fg_state_reopen();
	enum fg_open_result result;
	struct stat config;

	if (fd < 0 || fcntl(fd, F_OFD_SETLKW, &lock) != 0) {
		fg_state_complain(state_path, "cannot be locked");
		result = FG_OPEN_NO_ACCESS;
	} else if (stat(config_path, &config) != 0) {
		result = FG_OPEN_NO_CONFIG;
	} else if (is_current(&config)) {
		result = FG_OPEN_OK;
	} else {
		result = fg_state_make(fd, config_path);
	}
	if (fd >= 0)
		close(fd);
	return result;
}

static enum fg_open_result open_locked(void)
{
	enum fg_open_result result = FG_OPEN_OK;
	struct stat config;

	if (config_path[0] == '\0')
		find_paths();
	if (stat(config_path, &config) != 0)
		return FG_OPEN_NO_CONFIG;
	if (fg_state == NULL)
		result = map_file();
	if (result == FG_OPEN_OK && !is_current(&config))
		result = make_current();
	if (result != FG_OPEN_OK)
		return result;
	fg_process_watch_fork();
	__atomic_store_n(&fg_attention, &fg_state->attention, __ATOMIC_RELEASE);
	fg_call_start();
	fg_control_follow(0);
	return FG_OPEN_OK;
}

enum fg_open_result fg_state_open(void)
{
	pthread_mutex_lock(&opening);
	int before = errno;
	enum fg_open_result result = open_locked();

	errno = before;
	pthread_mutex_unlock(&opening);
	return result;
}

void fg_state_before_fork(void)
{
	pthread_mutex_lock(&opening);
}

void fg_state_after_fork(void)
{
	pthread_mutex_unlock(&opening);
}
