/* SPDX-License-Identifier: Apache-2.0
 *
 * See nvml_process.h.
 */
/* Small before quick: nothing in here is on a hot path, and every process of a container maps it. */
#pragma GCC optimize("Os")

#include "account.h"
#include "identity.h"
#include "lock.h"
#include "mode.h"
#include "nvml_process.h"
#include "pages.h"

#define LIST_SIZE (AQ_MOST_OWN * sizeof(struct aq_own))

bool aq_nvml_filters(void)
{
	enum aq_mode mode = aq_mode();
	return mode == AQ_MODE_GRANT || mode == AQ_MODE_STANDALONE;
}

static void add(struct aq_own *list, uint32_t *count, const struct aq_usage_slot *slot, uint64_t owner)
{
	uint32_t pid = (uint32_t)(owner & AQ_OWNER_PID_MASK), place = 0;
	while (place < *count && list[place].pid != pid)
		place++;
	if (place == AQ_MOST_OWN)
		return;
	if (place == *count) {
		list[place] = (struct aq_own){.pid = pid};
		++*count;
	}
	uint64_t host = __atomic_load_n(&slot->host_pid, __ATOMIC_RELAXED);
	if (host != 0 && host <= UINT32_MAX)
		list[place].host_pid = (uint32_t)host;
	/* Several shares of one card add up. */
	list[place].bytes += aq_word_units(__atomic_load_n(&slot->charge, __ATOMIC_RELAXED)) << AQ_UNIT_SHIFT;
	list[place].device_ns += __atomic_load_n(&slot->device_ns, __ATOMIC_RELAXED);
}

static void add_share(struct aq_own *list, uint32_t *count, const struct aq_share *share)
{
	const struct aq_process *process = aq_process();
	uint32_t used = aq_account_used_slots(&share->account);
	for (uint32_t i = 0; i < used; i++) {
		const struct aq_usage_slot *slot = aq_account_slot(&share->account, i);
		uint64_t owner = __atomic_load_n(&slot->owner, __ATOMIC_SEQ_CST);
		uint64_t pidns = __atomic_load_n(&slot->pidns, __ATOMIC_SEQ_CST);
		/* A second container on the same claim has processes of its own in here. */
		if ((owner & AQ_OWNER_LIVE) && pidns == process->pidns &&
		    !aq_owner_gone(process, owner, pidns))
			add(list, count, slot, owner);
	}
}

struct aq_own *aq_own_list(int card, uint32_t *count)
{
	struct aq_process *process = aq_process();
	struct aq_own *list = aq_pages(LIST_SIZE);
	*count = 0;
	if (list == NULL)
		return NULL;
	aq_lock(&process->claiming);
	if (!process->known)
		aq_identify(process);
	aq_unlock(&process->claiming);
	for (uint32_t i = 0; i < aq_share_count && card == AQ_NO_CARD; i++)
		add_share(list, count, &aq_shares[i]);
	for (uint32_t i = 0; card != AQ_NO_CARD && i < aq_cards[card].share_count; i++)
		add_share(list, count, &aq_shares[aq_cards[card].share[i]]);
	return list;
}

void aq_own_give(struct aq_own *list)
{
	if (list)
		aq_pages_give(list, LIST_SIZE);
}

const struct aq_own *aq_own_find(const struct aq_own *list, uint32_t count, uint32_t pid)
{
	/* The host's pid decides; where the node has not said it (yet), the container may share the host's
	 * pids. */
	for (uint32_t i = 0; i < count; i++)
		if (list[i].host_pid == pid)
			return &list[i];
	for (uint32_t i = 0; i < count; i++)
		if (list[i].host_pid == 0 && list[i].pid == pid)
			return &list[i];
	return NULL;
}
