/* SPDX-License-Identifier: Apache-2.0
 *
 * Virtual memory management: address ranges, physical pieces, and which is mapped where.
 *
 * A physical piece lives while it has a handle or a mapping, and is charged from cuMemCreate on until then,
 * once however often it is mapped. An imported one is charged where it was made.
 */
#ifndef FAKEGPU_CUDA_VMM_H
#define FAKEGPU_CUDA_VMM_H

#include "cuda_core.h"
#include "cuda_memory.h"

struct cu_physical {
	struct cu_object object;
	uint32_t handles; /* cuMemCreate, retain and import count one each */
	uint32_t mappings;
	struct cu_device *device; /* NULL: host memory */
	int seat;
	uint32_t imported;
	uint64_t size;
	char *bytes;
	int file; /* of shared memory, once exported; -1 */
	uint32_t is_multicast;
	CUmemAllocationProp prop;
};

/* Bytes from a mapped address on; -1: nothing is mapped there. Needs cu_lock. */
int cu_vmm_span(CUdeviceptr address, struct cu_span *span);
/* 1 when the address lies in a range of cuMemAddressReserve. Takes cu_lock. */
int cu_vmm_is_reserved(CUdeviceptr address);
/* The mapping an address lies in, for pointer attributes. Needs cu_lock; 0: none. */
int cu_vmm_mapping(CUdeviceptr address, CUdeviceptr *base, size_t *size, struct cu_physical **physical);
/* The reservation an address lies in. Needs cu_lock; 0: none. */
int cu_vmm_range(CUdeviceptr address, CUdeviceptr *base, size_t *size);

#endif
