/* SPDX-License-Identifier: Apache-2.0
 *
 * What a table remembers of an allocation, in one word: 33 bits units, 7 bits card, 9 bits context.
 */
#ifndef ALIQUOT_ENTRY_H
#define ALIQUOT_ENTRY_H

#include <stdint.h>

#include "region.h"

#define AQ_ENTRY_CARD_SHIFT    33u
#define AQ_ENTRY_CONTEXT_SHIFT 40u
#define AQ_ENTRY_SPILLED       (1ull << 49) /* held in managed memory, outside the charge */

/* No context owns it: it outlives them all. */
#define AQ_NO_CONTEXT 511u

static inline uint64_t aq_entry(uint64_t units, unsigned card, unsigned context)
{
	return units | (uint64_t)card << AQ_ENTRY_CARD_SHIFT | (uint64_t)context << AQ_ENTRY_CONTEXT_SHIFT;
}

static inline uint64_t aq_entry_units(uint64_t entry)
{
	return entry & AQ_WORD_UNIT_MASK;
}

static inline unsigned aq_entry_card(uint64_t entry)
{
	return (unsigned)(entry >> AQ_ENTRY_CARD_SHIFT & 127u);
}

static inline unsigned aq_entry_context(uint64_t entry)
{
	return (unsigned)(entry >> AQ_ENTRY_CONTEXT_SHIFT & 511u);
}

#endif
