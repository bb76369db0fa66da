/* SPDX-License-Identifier: Apache-2.0
 *
 * The grants mounted into this container.
 */
#ifndef ALIQUOT_GRANTS_H
#define ALIQUOT_GRANTS_H

#include "mode.h"
#include "state.h"

/* "/usr/local/vgpu"; only a test build has another (root.c). */
extern const char aq_root[];

/* Maps every grant and its usage file: AQ_MODE_GRANT, AQ_MODE_OFF when there is none at all, AQ_MODE_REFUSED
 * (and says why) when one of them cannot be used. */
enum aq_mode aq_grants_read(void);

/* Takes over the grant's present values if they changed. */
void aq_share_refresh(struct aq_share *share);

/* The limit in force, in units. */
static inline uint64_t aq_share_limit(struct aq_share *share)
{
	if (share->grant) {
		uint64_t selector = __atomic_load_n(&share->grant->selector, __ATOMIC_ACQUIRE);
		if (__builtin_expect(selector != __atomic_load_n(&share->generation, __ATOMIC_RELAXED), 0))
			aq_share_refresh(share);
	}
	return __atomic_load_n(&share->limit, __ATOMIC_RELAXED);
}

/* Adds a share to the card with that UUID. Card, or AQ_NO_CARD when there is no room. */
int aq_card_add(const CUuuid *uuid, uint32_t share);

#endif
