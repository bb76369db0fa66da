/* SPDX-License-Identifier: Apache-2.0
 *
 * Files for memory that several processes see. See shared_file.h.
 */
#include "shared_file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "state.h"

static uint32_t last_number;

static void folder_path(char *path, size_t size)
{
	snprintf(path, size, "%s.shared", fg_config_path());
}

static void file_path(char *path, size_t size, uint32_t slot, uint32_t generation, uint32_t number)
{
	snprintf(path, size, "%s.shared/%" PRIu32 "-%" PRIu32 "-%" PRIu32, fg_config_path(), slot, generation,
		 number);
}

int fg_shared_file_make(uint64_t size, uint32_t *number)
{
	uint32_t self = (uint32_t)fg_process_self();
	struct fg_process *mine = fg_process_at(self);
	char path[600];
	int fd;

	folder_path(path, sizeof path);
	if (mkdir(path, 0777) == 0)
		chmod(path, 0777); /* processes of all users put files there, whatever the umask */
	*number = __atomic_add_fetch(&last_number, 1, __ATOMIC_RELAXED);
	__atomic_store_n(&mine->has_files, 1, __ATOMIC_RELEASE);
	file_path(path, sizeof path, self, mine->generation, *number);
	fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
	if (fd < 0)
		return -1;
	fchmod(fd, 0666);
	if (ftruncate(fd, (off_t)size) != 0) {
		close(fd);
		unlink(path);
		return -1;
	}
	return fd;
}

int fg_shared_file_open(uint32_t slot, uint32_t generation, uint32_t number)
{
	char path[600];

	file_path(path, sizeof path, slot, generation, number);
	return open(path, O_RDWR | O_CLOEXEC);
}

void fg_shared_file_remove(uint32_t slot, uint32_t generation, uint32_t number)
{
	char path[600];

	file_path(path, sizeof path, slot, generation, number);
	unlink(path);
}

void fg_shared_file_remove_all(uint32_t slot, uint32_t generation)
{
	char path[600], prefix[32];
	struct dirent *entry;
	DIR *folder;
	int length = snprintf(prefix, sizeof prefix, "%" PRIu32 "-%" PRIu32 "-", slot, generation);

	folder_path(path, sizeof path);
	folder = opendir(path);
	if (folder == NULL)
		return;
	while ((entry = readdir(folder)) != NULL)
		if (strncmp(entry->d_name, prefix, (size_t)length) == 0)
			unlinkat(dirfd(folder), entry->d_name, 0);
	closedir(folder);
}
