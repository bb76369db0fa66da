/* SPDX-License-Identifier: Apache-2.0
 *
 * HAMi's shared region, version 1: a view of our accounts for HAMi's monitor, in the file that
 * CUDA_DEVICE_MEMORY_SHARED_CACHE names. Of what stands in it only the monitor's own words are ever read.
 * In standalone mode our accounts lie in the same file, behind the part that HAMi knows.
 */
#ifndef ALIQUOT_VIEW_H
#define ALIQUOT_VIEW_H

#include <stdbool.h>

#include "state.h"

struct aq_view;

/* NULL unless there is a region that this process could open. */
extern struct aq_view *aq_view_word;

/* Opens the region if it is not open. `make`: also where nobody has made it or named it. */
void aq_view_open(bool make);

/* Place of the account of card `index` in the region; NULL: none. */
struct aq_usage_file *aq_view_account(unsigned index);

/* Enters a card. */
void aq_view_describe(unsigned index, const CUuuid *uuid, uint64_t memory, uint32_t cores, uint32_t priority);

/* Enters all cards of the grants, as they are now. */
void aq_view_describe_grants(void);

void aq_view_write(const struct aq_share *share, const struct aq_usage_slot *slot);

static inline void aq_view_update(const struct aq_share *share, const struct aq_usage_slot *slot)
{
	if (__builtin_expect(__atomic_load_n(&aq_view_word, __ATOMIC_RELAXED) != NULL, 0))
		aq_view_write(share, slot);
}

/* The same for every slot of a share, after dead ones were given back. */
void aq_view_refresh(const struct aq_share *share);

#endif
