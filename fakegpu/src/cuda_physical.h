/* SPDX-License-Identifier: Apache-2.0
 *
 * Physical pieces of cuMemCreate: between cuda_vmm.c, cuda_physical.c and cuda_multicast.c.
 */
#ifndef FAKEGPU_CUDA_PHYSICAL_H
#define FAKEGPU_CUDA_PHYSICAL_H

#include "cuda_vmm.h"

/* The piece behind a handle that the program holds; NULL: none. */
struct cu_physical *cu_physical_of(CUmemGenericAllocationHandle handle);
/* Its bytes, made when needed; NULL: out of memory. */
char *cu_physical_bytes(struct cu_physical *physical);
/* Ends a piece that nobody holds or maps any more. Needs cu_lock. */
void cu_physical_settle(struct cu_physical *physical);

#endif
