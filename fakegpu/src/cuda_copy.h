/* SPDX-License-Identifier: Apache-2.0
 *
 * Copies as programs ask for them: in a stream, or waiting for it; at once, or as a node of a graph that is
 * captured.
 */
#ifndef FAKEGPU_CUDA_COPY_H
#define FAKEGPU_CUDA_COPY_H

#include "cuda_time.h"

/* What an end of a linear copy may be. */
enum cu_end { CU_END_DEVICE, CU_END_HOST, CU_END_ANY };

/* Copies `bytes` in the order of `stream`; `waits`: also for the stream, as calls without Async do. */
CUresult cu_copy_linear(struct CUstream_st *stream, int waits, CUdeviceptr to, enum cu_end to_end,
			CUdeviceptr from, enum cu_end from_end, size_t bytes);
/* The same for a box. */
CUresult cu_copy_box(struct CUstream_st *stream, int waits, const CUDA_MEMCPY3D *copy);

#endif
