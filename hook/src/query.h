/* SPDX-License-Identifier: Apache-2.0
 *
 * The figures of a share, the same for every question about them.
 */
#ifndef ALIQUOT_QUERY_H
#define ALIQUOT_QUERY_H

#include <stdbool.h>
#include <stdint.h>

#include "pool.h"

struct aq_view_figures {
	uint64_t total;
	uint64_t used;
	uint64_t free;
};

/* Figures in bytes for a card whose driver says `physical` and `physical_free`. False: there is no limit. */
bool aq_share_view(unsigned card, uint64_t physical, uint64_t physical_free, struct aq_view_figures *out);

/* True: allocations beyond the card's memory move to managed memory. */
bool aq_oversubscribed(unsigned card);

#endif
