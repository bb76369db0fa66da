/* SPDX-License-Identifier: Apache-2.0
 *
 * Arrays and mipmapped arrays. Rows are padded to the pitch the device uses, and that is what is charged.
 */
#ifndef FAKEGPU_CUDA_ARRAY_H
#define FAKEGPU_CUDA_ARRAY_H

#include "cuda_core.h"
#include "cuda_space.h"

struct CUarray_st {
	struct cu_object object;
	CUDA_ARRAY3D_DESCRIPTOR descriptor;
	struct cu_alloc *alloc;
	char *bytes; /* in `alloc` */
	size_t pitch;
	uint32_t element; /* bytes */
	struct CUmipmappedArray_st *mipmap; /* NULL: on its own */
};

#define CU_MIP_LEVELS 32

struct CUmipmappedArray_st {
	struct cu_object object;
	struct CUctx_st *context;
	struct cu_alloc *alloc;
	uint32_t levels;
	struct CUarray_st *level[CU_MIP_LEVELS];
};

/* Bytes of an element, 0 for a format that is not known. */
uint32_t cu_array_element(CUarray_format format, unsigned int channels);
/* What an array of that shape takes, rounded; 0: no such array. */
uint64_t cu_array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *descriptor, size_t *pitch);

#endif
