/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory of one process in another: what names it, and both ends.
 */
#ifndef FAKEGPU_CUDA_SHARED_H
#define FAKEGPU_CUDA_SHARED_H

#include "cuda_space.h"

/* Fits into every handle that programs pass around (64 bytes). */
struct cu_shared_memory {
	uint32_t magic;
	uint32_t process, generation, number;
	uint64_t size;
	uint64_t boot; /* of the machine: handles do not outlive it */
	uint32_t card;
	uint32_t pool; /* of pool pointers: the pool's number in its process */
};

/* Moves the bytes to where others can map them, and names them. Needs cu_lock. */
CUresult cu_shared_export(struct cu_alloc *alloc, struct cu_shared_memory *name);
CUresult cu_shared_import(const struct cu_shared_memory *name, enum cu_alloc_kind kind,
			  struct cu_device *device, struct CUctx_st *context, struct cu_alloc **made);

#endif
