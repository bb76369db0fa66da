/* SPDX-License-Identifier: Apache-2.0
 *
 * Device memory: charging, giving out, and finding the bytes behind an address. See CUDA.md for what each
 * kind is rounded to.
 *
 * Invariant: charged before it exists, given back after it is gone; what fails on the way leaves nothing
 * charged.
 */
#ifndef FAKEGPU_CUDA_MEMORY_H
#define FAKEGPU_CUDA_MEMORY_H

#include "cuda_capture.h"
#include "cuda_core.h"
#include "cuda_space.h"

/* `size` rounded up to a power of two; 0 when that overflows. */
static inline uint64_t cu_round(uint64_t size, uint64_t step)
{
	return (size + step - 1) & ~(step - 1);
}

/* A piece of `kind` that belongs to `context` (or, NULL, to `device` alone), with `charge` bytes on the
 * device's account. Does not need cu_lock. */
CUresult cu_memory_make(struct cu_device *device, struct CUctx_st *context, size_t size, uint64_t charge,
			enum cu_alloc_kind kind, struct cu_alloc **made);
/* Gives back what is charged and the piece. Needs cu_lock. */
void cu_memory_end(struct cu_alloc *alloc);
/* Waits as long as an allocation takes by configuration. */
void cu_memory_delay(void);

/* Bytes that lie in one go behind an address. */
struct cu_span {
	char *bytes;
	size_t length;
	struct cu_alloc *alloc; /* NULL: mapped by cuMemMap, or host memory the driver does not know */
};
/* 0: `span` holds what lies from `address` on; -1: the driver has given out no such address. Takes cu_lock.
 */
int cu_span_at(CUdeviceptr address, struct cu_span *span);
/* 0 when all of [address, address + length) is device memory or, `or_host`, plain memory of the program. */
int cu_range_check(CUdeviceptr address, size_t length, int or_host);
/* Copies within checked ranges, whatever memory they are. */
void cu_copy_bytes(CUdeviceptr to, CUdeviceptr from, size_t length);
/* Fills a checked range with `length` bytes of a repeated pattern of `width` (1, 2 or 4) bytes. */
void cu_fill_bytes(CUdeviceptr to, uint32_t value, uint32_t width, size_t length);
/* Lets the pages behind a span go: they read as zeros, and take nothing. */
void cu_forget_bytes(char *bytes, size_t length);

/* cuda_managed.c: a device works on managed memory, so that it moves there as far as there is room. Needs
 * cu_lock. */
void cu_managed_move(struct cu_alloc *alloc, struct cu_device *device, size_t bytes);
/* … and back to the host. */
void cu_managed_leave(struct cu_alloc *alloc);

/* cuda_host.c: the registered range that holds this address. Needs cu_lock. */
struct cu_registered {
	char *start;
	size_t size;
	unsigned int flags;
	struct CUctx_st *context;
	uint64_t id;
	struct cu_registered *next;
};
struct cu_registered *cu_registered_find(const void *address);

#endif
