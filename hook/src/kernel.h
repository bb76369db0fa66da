/* SPDX-License-Identifier: Apache-2.0
 *
 * The few calls to the kernel that every start of a program makes, all by libc's one `syscall`. Each further
 * function of libc would have to be looked up at its first call; it may be a program's own, and a point at
 * which a thread is cancelled. Errors are libc's: -1 and errno.
 */
#ifndef ALIQUOT_KERNEL_H
#define ALIQUOT_KERNEL_H

#include <fcntl.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static inline int aq_kernel_open(const char *path, int flags)
{
	return (int)syscall(SYS_openat, AT_FDCWD, path, flags, 0);
}

static inline void aq_kernel_close(int fd)
{
	syscall(SYS_close, fd);
}

static inline ssize_t aq_kernel_read(int fd, void *buffer, size_t size)
{
	return syscall(SYS_read, fd, buffer, size);
}

/* libc's fstat is also a symbol that old ones do not have. */
static inline int aq_kernel_fstat(int fd, struct stat *stat)
{
	return (int)syscall(SYS_fstat, fd, stat);
}

/* NULL, never MAP_FAILED. */
static inline void *aq_kernel_map(size_t size, int protection, int flags, int fd)
{
	void *pages = (void *)syscall(SYS_mmap, NULL, size, protection, flags, fd, 0L);
	return pages == MAP_FAILED ? NULL : pages;
}

#endif
