/* SPDX-License-Identifier: Apache-2.0
 *
 * See mode.h. Where the limits come from is decided by files that the container cannot write. Its environment
 * only counts in standalone mode, and never in a program that runs with another user's rights.
 */
#include "mode.h"

#include <stdlib.h>
#include <string.h>

#include "charge.h"
#include "early.h"
#include "grants.h"
#include "lock.h"
#include "process.h"
#include "standalone.h"
#include "view.h"
#include "wait.h"

AQ_EARLY int aq_mode_word;

AQ_EARLY_SHARES struct aq_share aq_shares[AQ_MAX_SHARES];
AQ_EARLY uint32_t aq_share_count;
AQ_EARLY_CARDS struct aq_card aq_cards[AQ_MAX_CARDS];
AQ_EARLY uint32_t aq_card_count;

char aq_refusal[512];

enum aq_mode aq_refuse(const char *const *parts)
{
	size_t used = 0;
	for (; *parts; parts++) {
		size_t length = strlen(*parts);
		if (length > sizeof(aq_refusal) - 1 - used)
			length = sizeof(aq_refusal) - 1 - used;
		memcpy(aq_refusal + used, *parts, length);
		used += length;
	}
	aq_refusal[used] = '\0';
	return AQ_MODE_REFUSED;
}

static enum aq_mode decide(void)
{
	/* Another thread of a parent may have been cut off half way through this by a fork. */
	aq_share_count = 0;
	aq_card_count = 0;
	enum aq_mode mode = aq_grants_read();
#ifndef AQ_STRICT
	if (mode == AQ_MODE_OFF)
		mode = aq_standalone_read();
#else
	if (mode == AQ_MODE_OFF)
		mode = AQ_REFUSE_BECAUSE("no grant in ", aq_root,
					 "/grants; this container has the hook but no share of a ",
					 "GPU, start it through the claim or the pod that asks for one");
#endif
	return mode;
}

enum aq_mode aq_decide(void)
{
	struct aq_process *process = aq_process();
	aq_lock(&process->deciding);
	enum aq_mode mode = (enum aq_mode)__atomic_load_n(&aq_mode_word, __ATOMIC_ACQUIRE);
	if (mode == AQ_MODE_UNDECIDED) {
		mode = decide();
		aq_wait_read();
		if (mode == AQ_MODE_GRANT) {
			aq_view_open(false);
			aq_view_describe_grants();
			/* HAMi's switch; a tenant's word counts for nothing here, but the operator may want
			 * to know. */
			if (getenv("CUDA_DISABLE_CONTROL"))
				aq_complain(AQ_NO_CARD, AQ_COMPLAINT_SWITCH);
		}
		__atomic_store_n(&aq_mode_word, (int)mode, __ATOMIC_RELEASE);
	}
	aq_unlock(&process->deciding);
	return mode;
}

static int hex(char digit)
{
	if (digit >= '0' && digit <= '9')
		return digit - '0';
	if (digit >= 'a' && digit <= 'f')
		return digit - 'a' + 10;
	if (digit >= 'A' && digit <= 'F')
		return digit - 'A' + 10;
	return -1;
}

bool aq_uuid_parse(const char *text, CUuuid *uuid)
{
	if (strncmp(text, "GPU-", 4) != 0 && strncmp(text, "MIG-", 4) != 0)
		return false;
	text += 4;
	for (unsigned i = 0; i < sizeof(uuid->bytes); i++) {
		if (*text == '-')
			text++;
		int high = hex(text[0]);
		int low = high < 0 ? -1 : hex(text[1]);
		if (low < 0)
			return false;
		uuid->bytes[i] = (unsigned char)(high << 4 | low);
		text += 2;
	}
	return *text == '\0';
}

int aq_card_by_uuid(const CUuuid *uuid)
{
	uint32_t count = __atomic_load_n(&aq_card_count, __ATOMIC_ACQUIRE);
	for (uint32_t i = 0; i < count; i++)
		if (memcmp(&aq_cards[i].uuid, uuid, sizeof(*uuid)) == 0)
			return (int)i;
	return AQ_NO_CARD;
}

int aq_card_add(const CUuuid *uuid, uint32_t share)
{
	int card = aq_card_by_uuid(uuid);
	if (card == AQ_NO_CARD) {
		if (aq_card_count == AQ_MAX_CARDS)
			return AQ_NO_CARD;
		card = (int)aq_card_count;
		aq_cards[card] = (struct aq_card){.uuid = *uuid};
	}
	struct aq_card *entry = &aq_cards[card];
	entry->share[entry->share_count++] = share;
	entry->only = entry->share_count == 1 ? &aq_shares[share] : NULL;
	if (card == (int)aq_card_count)
		__atomic_store_n(&aq_card_count, (uint32_t)card + 1, __ATOMIC_RELEASE);
	return card;
}
