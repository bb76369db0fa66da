/* SPDX-License-Identifier: Apache-2.0
 *
 * Contexts of this process: which card each is on, and what having one costs.
 */
#ifndef ALIQUOT_CONTEXT_H
#define ALIQUOT_CONTEXT_H

#include "process.h"

/* Place of a context in aq_process()->context, entered if it was not known; AQ_NO_CONTEXT when it cannot be
 * told. `ordinal` and `card` get what is known of it. */
unsigned aq_context_find(CUcontext handle, CUdevice *ordinal, int *card);

#endif
