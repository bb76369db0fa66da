/* SPDX-License-Identifier: Apache-2.0
 *
 * The address space of device memory, and what lies where in it.
 *
 * Two equally large reservations: device addresses, where nothing is ever mapped (a program that follows one
 * crashes, as it should), and behind each of them the bytes, which the machine gives only once something is
 * copied there. Memory that the host may touch too (managed, page-locked) is handed out by the address of its
 * bytes. So an address is unique in the process, whatever kind of memory it stands for.
 *
 * Small pieces share 2 MiB units by size, larger ones have units of their own; both are found from any
 * address inside in constant time. Needs cu_lock throughout. Invariant: two live pieces never overlap.
 */
#ifndef FAKEGPU_CUDA_SPACE_H
#define FAKEGPU_CUDA_SPACE_H

#include "cuda_core.h"

enum cu_alloc_kind {
	CU_ALLOC_NONE = 0,
	CU_ALLOC_LINEAR, /* cuMemAlloc, cuMemAllocPitch, module variables */
	CU_ALLOC_MANAGED, /* cuMemAllocManaged */
	CU_ALLOC_HOST, /* cuMemAllocHost, cuMemHostAlloc */
	CU_ALLOC_POOL, /* stream-ordered */
	CU_ALLOC_GRAPH, /* of a graph's allocation node */
	CU_ALLOC_ARRAY, /* bytes of an array; no address a program sees */
	CU_ALLOC_IPC, /* another process's memory, opened */
	CU_ALLOC_EXTERNAL, /* a buffer of external memory */
	CU_ALLOC_POOL_IMPORT, /* another process's pool allocation */
};

struct cu_alloc {
	CUdeviceptr base;
	size_t size; /* as asked for */
	char *data; /* its bytes */
	uint64_t charged; /* in the account of `seat` */
	uint32_t kind; /* enum cu_alloc_kind; CU_ALLOC_NONE: free */
	int32_t seat; /* -1: charged nowhere */
	uint32_t flags; /* of the call that made it */
	uint32_t shared_number; /* of the file other processes open it by; 0: none */
	struct CUctx_st *context; /* NULL: belongs to none */
	struct cu_alloc *previous, *next; /* of the same context */
	void *owner; /* pool, external memory, graph, mapping of IPC */
	uint64_t id; /* CU_POINTER_ATTRIBUTE_BUFFER_ID */
	struct cu_device *device; /* NULL: none */
	uint64_t resident; /* managed: bytes now charged as on the device */
	uint8_t touched; /* bytes were written */
	uint8_t sync_memops;
	uint8_t advice_read_mostly;
	uint8_t foreign; /* `data` is not of the reservation */
	int32_t preferred, last_prefetch; /* managed: device ordinal, CU_DEVICE_CPU, CU_DEVICE_INVALID */
};

/* A piece of `size` bytes; `host_visible`: by the address of its bytes. NULL: no address space left.
 * Everything but base, size, data and id is zero. */
struct cu_alloc *cu_space_take(size_t size, int host_visible);
/* Gives the piece back; its bytes go. */
void cu_space_give(struct cu_alloc *alloc);
/* The piece that holds this address, or NULL. */
struct cu_alloc *cu_space_find(CUdeviceptr address);
/* 1 when the address lies in the reservations, used or not. */
int cu_space_is_reserved(CUdeviceptr address);
/* The bytes behind an address that lies in `alloc`. */
static inline char *cu_space_bytes(const struct cu_alloc *alloc, CUdeviceptr address)
{
	return alloc->data + (address - alloc->base);
}
/* Calls `each` for every live piece. */
void cu_space_each(void (*each)(struct cu_alloc *alloc, void *argument), void *argument);

#endif
