/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory operations of streams: writing a word, waiting for one.
 */
#ifndef FAKEGPU_CUDA_MEMOP_H
#define FAKEGPU_CUDA_MEMOP_H

#include "cuda_core.h"

/* Does all of them now, one after the other. */
CUresult cu_memops_run(const CUstreamBatchMemOpParams *ops, unsigned int count);

#endif
