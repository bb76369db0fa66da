/* SPDX-License-Identifier: Apache-2.0
 *
 * What the hook knows. Two kinds of memory:
 *
 *   shares, cards   what this container was given; read once (mode.c), then only their limits change. A
 * forked child goes on with them. process         what belongs to this process: its slots, contexts, tables.
 * It lies in pages that the kernel empties in a forked child (MADV_WIPEONFORK), so a child begins with
 * nothing, whatever other threads of its parent were doing, and no lock in there can be inherited.
 *
 * Invariant: nothing here is ever freed or moved, so no reader needs a lock.
 */
#ifndef ALIQUOT_STATE_H
#define ALIQUOT_STATE_H

#include <stdbool.h>
#include <stdint.h>

#include "account.h"
#include "driver.h"

#define AQ_MAX_CARDS    64u
#define AQ_MAX_SHARES   64u
#define AQ_MAX_ORDINALS 64u
#define AQ_NO_CARD      (-1)

/* One grant, or in standalone mode one card's limit. */
struct aq_share {
	struct aq_account account;
	const struct aq_grant_file *grant; /* NULL in standalone mode */
	uint64_t generation; /* of the grant whose values stand below */
	uint64_t limit; /* units; AQ_UNLIMITED */
	uint64_t context_overhead; /* bytes; 0 = not known */
	uint32_t core_percent; /* 0 = no compute limit */
	uint32_t core_policy;
	uint32_t priority;
	uint32_t flags;
	uint32_t index; /* its own place in aq_shares */
	int32_t standalone_index; /* of the card in HAMi's variables; -1 in grant mode */
};

/* A card of which this container holds at least one share. */
struct aq_card {
	CUuuid uuid;
	uint32_t share_count;
	uint32_t share[AQ_MAX_SHARES]; /* indices into aq_shares */
	struct aq_share *only; /* the share, where it is one; NULL: several */
};

extern struct aq_share aq_shares[AQ_MAX_SHARES];
extern uint32_t aq_share_count;
extern struct aq_card aq_cards[AQ_MAX_CARDS];
extern uint32_t aq_card_count;

/* Card of a CUDA ordinal of this process, or AQ_NO_CARD. */
extern int8_t aq_ordinal_card[AQ_MAX_ORDINALS];

/* The card that all devices of this process are on, so that nobody need ask which one is current; or
 * AQ_NO_CARD. */
extern int8_t aq_sole_card;

/* 0: not known; 1: limits hold in this process; 2: nothing to do. Set by aq_start (init.c). */
extern int aq_active_word;
int aq_start(void);

static inline bool aq_active(void)
{
	int active = __atomic_load_n(&aq_active_word, __ATOMIC_ACQUIRE);
	return (__builtin_expect(active != 0, 1) ? active : aq_start()) == 1;
}

/* True: the device is none of this container's, and limits say that it must not be used. */
bool aq_refuses(CUdevice ordinal);

static inline int aq_card_of_ordinal(CUdevice ordinal)
{
	return ordinal >= 0 && ordinal < (int)AQ_MAX_ORDINALS ? aq_ordinal_card[ordinal] : AQ_NO_CARD;
}

/* Index into aq_cards of a card with that UUID, or AQ_NO_CARD. */
int aq_card_by_uuid(const CUuuid *uuid);

/* Sixteen bytes of "GPU-xxxxxxxx-…" or "MIG-…". False: not a UUID. */
bool aq_uuid_parse(const char *text, CUuuid *uuid);

#endif
