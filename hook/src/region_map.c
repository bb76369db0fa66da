/* SPDX-License-Identifier: Apache-2.0
 *
 * See region_map.h. Never follows a symbolic link, opens a FIFO, or believes a size that a tenant could have
 * written.
 */
#include "region_map.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int aq_region_open(struct aq_region_map *view, const char *path, size_t need, int writable)
{
	int flags = (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY;
	int fd = open(path, flags);
	if (fd < 0)
		return -errno;
	struct stat stat;
	int rc = fstat(fd, &stat) < 0 ? -errno : 0;
	if (rc == 0 && (!S_ISREG(stat.st_mode) || stat.st_size < 0 || (size_t)stat.st_size < need))
		rc = -EPROTO;
	if (rc == 0) {
		/* A tenant may have made it huge; nothing of ours lies beyond these bounds. */
		const off_t most = 1 << 30;
		view->length = (size_t)(stat.st_size < most ? stat.st_size : most);
		int protection = PROT_READ | (writable ? PROT_WRITE : 0);
		view->map = mmap(NULL, view->length, protection, MAP_SHARED, fd, 0);
		if (view->map == MAP_FAILED)
			rc = -errno;
	}
	close(fd);
	return rc;
}

void aq_region_close(const struct aq_region_map *view)
{
	munmap(view->map, view->length);
}

static int write_all(int fd, const void *data, size_t size)
{
	const char *next = data;
	while (size > 0) {
		ssize_t done = write(fd, next, size);
		if (done < 0 && errno == EINTR)
			continue;
		if (done < 0)
			return -errno;
		next += done;
		size -= (size_t)done;
	}
	return 0;
}

int aq_region_make(const char *path, const void *data, size_t size, mode_t mode)
{
	char temporary[4096];
	int length = snprintf(temporary, sizeof(temporary), "%s.%ld.tmp", path, (long)getpid());
	if (length < 0 || (size_t)length >= sizeof(temporary))
		return -ENAMETOOLONG;
	/* Left over from a killed process with our number; a live one of that number is us. */
	unlink(temporary);
	int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (fd < 0)
		return -errno;
	int rc = write_all(fd, data, size);
	if (rc == 0 && (fchmod(fd, mode) < 0 || fsync(fd) < 0))
		rc = -errno;
	close(fd);
	if (rc == 0 && link(temporary, path) < 0)
		rc = -errno;
	unlink(temporary);
	return rc;
}
