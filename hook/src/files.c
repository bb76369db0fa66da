/* SPDX-License-Identifier: Apache-2.0
 *
 * See files.h.
 */
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>

#include "kernel.h"

static int open_quietly(const char *path, int flags)
{
	int fd;
	do
		fd = aq_kernel_open(path, flags | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
	while (fd < 0 && errno == EINTR);
	return fd < 0 ? -errno : fd;
}

long aq_read_file(const char *path, char *buffer, size_t size)
{
	int saved = errno;
	int fd = open_quietly(path, O_RDONLY);
	long rc = fd;
	if (fd >= 0) {
		do
			rc = aq_kernel_read(fd, buffer, size - 1);
		while (rc < 0 && errno == EINTR);
		rc = rc < 0 ? -errno : rc;
		buffer[rc > 0 ? rc : 0] = '\0';
		aq_kernel_close(fd);
	}
	errno = saved;
	return rc;
}

static int file_size(int fd, uint64_t *size)
{
	struct stat stat;
	if (aq_kernel_fstat(fd, &stat) < 0)
		return -errno;
	if (!S_ISREG(stat.st_mode) || stat.st_size < 0)
		return -EPROTO;
	*size = (uint64_t)stat.st_size;
	return 0;
}

int aq_map_file(const char *path, size_t need, bool writable, void **map, size_t *length)
{
	const uint64_t most = 1ull << 30;
	int saved = errno;
	uint64_t size = 0;
	int fd = open_quietly(path, writable ? O_RDWR : O_RDONLY);
	int rc = fd < 0 ? fd : file_size(fd, &size);
	if (rc >= 0 && size < need)
		rc = -EPROTO;
	if (rc >= 0) {
		*length = (size_t)(size < most ? size : most);
		*map = aq_kernel_map(*length, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, fd);
		rc = *map == NULL ? -errno : 0;
	}
	if (fd >= 0)
		aq_kernel_close(fd);
	errno = saved;
	return rc;
}

bool aq_path(char *out, size_t size, const char *first, const char *second, const char *third)
{
	const char *parts[] = {first, second, third};
	size_t used = 0;
	for (size_t i = 0; i < 3 && parts[i]; i++) {
		size_t length = strlen(parts[i]);
		if (used + length + 2 > size)
			return false;
		if (i > 0)
			out[used++] = '/';
		memcpy(out + used, parts[i], length);
		used += length;
	}
	out[used] = '\0';
	return true;
}

struct entry {
	uint64_t inode;
	int64_t offset;
	unsigned short size;
	unsigned char type;
	char name[];
};

int aq_list_folder(const char *path, void (*visit)(const char *name, void *argument), void *argument)
{
	_Alignas(struct entry) char buffer[4096];
	int saved = errno;
	int fd = open_quietly(path, O_RDONLY | O_DIRECTORY);
	long rc = fd;
	while (fd >= 0 && (rc = syscall(SYS_getdents64, fd, buffer, sizeof(buffer))) > 0) {
		for (long at = 0; at < rc;) {
			const struct entry *entry = (const struct entry *)(const void *)(buffer + at);
			if (entry->name[0] != '.')
				visit(entry->name, argument);
			at += entry->size;
		}
	}
	if (fd >= 0) {
		rc = rc < 0 ? -errno : 0;
		aq_kernel_close(fd);
	}
	errno = saved;
	return (int)rc;
}
