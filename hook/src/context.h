/* SPDX-License-Identifier: Apache-2.0
 *
 * Contexts of this process: which card each is on, and what having one costs.
 */
#ifndef ALIQUOT_CONTEXT_H
#define ALIQUOT_CONTEXT_H

#include "process.h"

static inline unsigned aq_context_home(CUcontext handle)
{
	return (unsigned)(((uintptr_t)handle >> 4) * 0x9e3779b1u >> 8) & (AQ_MAX_CONTEXTS - 1);
}

/* The record of a context; NULL: not known. */
struct aq_context *aq_context_look(CUcontext handle);

/* Place of a context in aq_process()->context, entered if it was not known; AQ_NO_CONTEXT when it cannot be
 * told. `ordinal` and `card` get what is known of it. */
unsigned aq_context_find(CUcontext handle, CUdevice *ordinal, int *card);

/* Before the driver makes a context on `ordinal`: charges it. CUDA_SUCCESS: go on; `card` is counted, or
 * AQ_NO_CARD. */
CUresult aq_context_begin(CUdevice ordinal, int *card);

/* Enters a context that the driver has made. `counted`: it was made by itself and ends by itself. */
struct aq_context *aq_context_enter(CUcontext handle, CUdevice ordinal, bool counted);

/* One context less on the card, or one that did not come about. */
void aq_context_count_out(unsigned card);

#endif
