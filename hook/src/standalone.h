/* SPDX-License-Identifier: Apache-2.0
 *
 * Limits from HAMi's environment variables, where there is no grant.
 */
#ifndef ALIQUOT_STANDALONE_H
#define ALIQUOT_STANDALONE_H

#include "mode.h"
#include "state.h"

/* AQ_MODE_STANDALONE if a variable sets a limit, else AQ_MODE_OFF. */
enum aq_mode aq_standalone_read(void);

/* The card with that UUID, which is number `index` of this container; entered at its first use. */
int aq_standalone_card(const CUuuid *uuid, int index);

/* Number of a card in this container, as the variables count: NVML's, or the ordinal where that is the same.
 */
int aq_standalone_index(const CUuuid *uuid, int ordinal, int count);

#endif
