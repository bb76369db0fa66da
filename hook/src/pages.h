/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory straight from the kernel: the hook never calls malloc, which may be the program's own.
 */
#ifndef ALIQUOT_PAGES_H
#define ALIQUOT_PAGES_H

#include <errno.h>
#include <stddef.h>
#include <sys/mman.h>

#include "kernel.h"

/* Zeroed pages, or NULL; errno stays as it was. */
static inline void *aq_pages(size_t size)
{
	int saved = errno;
	void *pages = aq_kernel_map(size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	errno = saved;
	return pages;
}

static inline void aq_pages_give(void *pages, size_t size)
{
	int saved = errno;
	munmap(pages, size);
	errno = saved;
}

#endif
