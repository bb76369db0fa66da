/* SPDX-License-Identifier: Apache-2.0
 *
 * The bytes behind addresses: copying and filling them without making more of them real than needed.
 *
 * Device memory that nobody wrote is not there. Zeros that are written to it, by a fill or by a copy of
 * memory that is not there either, leave it so: the pages are dropped instead. So copying an empty 40 GiB
 * piece costs nothing.
 */
#include <string.h>
#include <sys/mman.h>

#include "cuda_memory.h"
#include "cuda_vmm.h"

#define PAGE  4096u
#define CHUNK (UINT64_C(2) << 20)

int cu_span_at(CUdeviceptr address, struct cu_span *span)
{
	int result = -1;

	cu_lock();
	struct cu_alloc *alloc = cu_space_find(address);

	if (alloc != NULL) {
		*span = (struct cu_span){cu_space_bytes(alloc, address),
					 alloc->size - (address - alloc->base), alloc};
		result = 0;
	} else {
		result = cu_vmm_span(address, span);
	}
	cu_unlock();
	return result;
}

int cu_range_check(CUdeviceptr address, size_t length, int or_host)
{
	struct cu_span span;

	while (length > 0) {
		if (cu_span_at(address, &span) != 0)
			return or_host && !cu_space_is_reserved(address) && !cu_vmm_is_reserved(address) ? 0
													 : -1;
		/* Mappings may follow each other, but no copy runs from one piece into the next. */
		if (span.alloc != NULL)
			return length <= span.length ? 0 : -1;
		size_t part = span.length < length ? span.length : length;

		address += part;
		length -= part;
	}
	return 0;
}

void cu_forget_bytes(char *bytes, size_t length)
{
	uintptr_t from = ((uintptr_t)bytes + PAGE - 1) & ~(uintptr_t)(PAGE - 1);
	uintptr_t to = ((uintptr_t)bytes + length) & ~(uintptr_t)(PAGE - 1);

	if (to <= from || madvise((void *)from, to - from, MADV_DONTNEED) != 0) {
		memset(bytes, 0, length);
		return;
	}
	memset(bytes, 0, from - (uintptr_t)bytes);
	memset((void *)to, 0, (uintptr_t)bytes + length - to);
}

static int can_forget(const struct cu_span *span)
{
	/* Dropping pages of a shared file would not empty them. */
	return span->alloc != NULL && !span->alloc->foreign &&
	       (span->alloc->kind == CU_ALLOC_LINEAR || span->alloc->kind == CU_ALLOC_POOL ||
		span->alloc->kind == CU_ALLOC_GRAPH || span->alloc->kind == CU_ALLOC_ARRAY);
}

static int is_zero(const char *bytes, size_t length)
{
	return length == 0 || (bytes[0] == 0 && memcmp(bytes, bytes + 1, length - 1) == 0);
}

static void note_write(struct cu_span *span, size_t length)
{
	if (span->alloc == NULL)
		return;
	span->alloc->touched = 1;
	if (span->alloc->kind == CU_ALLOC_MANAGED) {
		const struct CUctx_st *context = cu_thread()->current;

		if (context != NULL) {
			cu_lock();
			cu_managed_move(span->alloc, context->device, length);
			cu_unlock();
		}
	}
}

static void span_or_host(CUdeviceptr address, struct cu_span *span, size_t left)
{
	if (cu_span_at(address, span) != 0)
		*span = (struct cu_span){(char *)(uintptr_t)address, left, NULL};
	if (span->length > left)
		span->length = left;
}

void cu_copy_bytes(CUdeviceptr to, CUdeviceptr from, size_t length)
{
	while (length > 0) {
		struct cu_span target, source;
		size_t part;

		span_or_host(to, &target, length);
		span_or_host(from, &source, length);
		part = target.length < source.length ? target.length : source.length;
		if (part > CHUNK)
			part = CHUNK;
		if (part >= PAGE && can_forget(&target) && source.alloc != NULL && !source.alloc->foreign &&
		    is_zero(source.bytes, part)) {
			cu_forget_bytes(target.bytes, part);
		} else {
			memmove(target.bytes, source.bytes, part);
			note_write(&target, part);
		}
		to += part;
		from += part;
		length -= part;
	}
}

static void fill(char *bytes, uint32_t value, uint32_t width, size_t length)
{
	if (width == 1) {
		memset(bytes, (int)(value & 255), length);
	} else if (width == 2) {
		uint16_t half = (uint16_t)value;

		for (size_t i = 0; i + 1 < length; i += 2)
			memcpy(bytes + i, &half, 2);
	} else {
		for (size_t i = 0; i + 3 < length; i += 4)
			memcpy(bytes + i, &value, 4);
	}
}

void cu_fill_bytes(CUdeviceptr to, uint32_t value, uint32_t width, size_t length)
{
	while (length > 0) {
		struct cu_span target;

		span_or_host(to, &target, length);
		if (value == 0 && target.length >= PAGE && can_forget(&target)) {
			cu_forget_bytes(target.bytes, target.length);
		} else {
			fill(target.bytes, value, width, target.length);
			note_write(&target, target.length);
		}
		to += target.length;
		length -= target.length;
	}
}
