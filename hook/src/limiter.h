/* SPDX-License-Identifier: Apache-2.0
 *
 * The compute limiter as the launch wrappers see it. Memory is not its business, and it knows nothing of
 * memory.
 */
#ifndef ALIQUOT_LIMITER_H
#define ALIQUOT_LIMITER_H

#include "driver.h"
#include "state.h"

/* What a launch is: the same kind and key take about the same time. */
struct aq_launch {
	const void *key; /* function, or executable graph */
	uint64_t blocks;
	CUstream stream;
	uint64_t begun_ns; /* the limiter's own */
};

/* Before a launch: waits until the share may go on. CUDA_SUCCESS: call the driver. */
CUresult aq_launch_begin(struct aq_launch *launch);

/* After it, with the driver's verdict. */
void aq_launch_end(struct aq_launch *launch, CUresult result);

#endif
