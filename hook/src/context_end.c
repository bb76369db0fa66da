/* SPDX-License-Identifier: Apache-2.0
 *
 * See context_end.h.
 */
#include "context_end.h"

#include "charge.h"
#include "context.h"
#include "entry.h"
#include "limiter.h"
#include "lock.h"
#include "pages.h"
#include "pool.h"

/* A handle that no context has: the place is taken, and nobody finds it. */
#define HIDDEN ((CUcontext)1)

#define TAKEN_ENTRIES 254u

struct aq_taken {
	struct aq_taken *next;
	uint32_t count;
	struct {
		struct aq_table *table;
		uint64_t key;
		uint64_t entry;
	} of[TAKEN_ENTRIES];
};

struct search {
	struct aq_ending *ending;
	unsigned context;
};

static void take(struct aq_table *table, uint64_t key, uint64_t entry, void *argument)
{
	const struct search *search = argument;
	struct aq_ending *ending = search->ending;
	if (aq_entry_context(entry) != search->context)
		return;
	struct aq_taken *taken = ending->taken;
	if (taken == NULL || taken->count == TAKEN_ENTRIES) {
		taken = aq_pages(sizeof(*taken));
		if (taken == NULL)
			return; /* looked for again when the context has ended */
		taken->next = ending->taken;
		ending->taken = taken;
	}
	if (!aq_table_take(table, key, &entry))
		return;
	taken->of[taken->count].table = table;
	taken->of[taken->count].key = key;
	taken->of[taken->count].entry = entry;
	taken->count++;
}

void aq_ending_add(struct aq_ending *ending, struct aq_context *context)
{
	struct aq_process *process = aq_process();
	if (ending->count == AQ_ENDING_MOST)
		return;
	CUcontext handle = __atomic_exchange_n(&context->handle, HIDDEN, __ATOMIC_ACQ_REL);
	if (handle == NULL || handle == HIDDEN) {
		/* Another thread ends it, or it has ended. */
		__atomic_store_n(&context->handle, handle, __ATOMIC_RELEASE);
		return;
	}
	ending->context[ending->count] = context;
	ending->handle[ending->count++] = handle;
	struct search search = {ending, (unsigned)(context - process->context)};
	aq_table_each(&process->addresses, take, &search);
	aq_table_each(&process->arrays, take, &search);
}

static void lose(struct aq_table *table, uint64_t key, uint64_t entry, void *argument)
{
	const struct search *search = argument;
	if (aq_entry_context(entry) == search->context && aq_table_take(table, key, &entry))
		aq_uncharge_entry(entry);
}

/* The context is no more. */
static void finish(struct aq_context *context, CUcontext handle)
{
	struct aq_process *process = aq_process();
	struct search search = {NULL, (unsigned)(context - process->context)};
	int card = context->card;
	bool counted = context->counted != 0;
	aq_limiter_context_gone(handle);
	aq_table_each(&process->addresses, lose, &search);
	aq_table_each(&process->arrays, lose, &search);
	aq_lock(&process->claiming);
	__atomic_store_n(&context->handle, NULL, __ATOMIC_RELEASE);
	aq_unlock(&process->claiming);
	if (card != AQ_NO_CARD) {
		aq_pools_sync((unsigned)card);
		if (counted)
			aq_context_count_out((unsigned)card);
	}
}

void aq_ending_over(struct aq_ending *ending, bool ended)
{
	for (struct aq_taken *taken = ending->taken; taken;) {
		for (uint32_t i = 0; i < taken->count; i++) {
			if (ended)
				aq_uncharge_entry(taken->of[i].entry);
			else
				aq_table_put(taken->of[i].table, taken->of[i].key, taken->of[i].entry);
		}
		struct aq_taken *next = taken->next;
		aq_pages_give(taken, sizeof(*taken));
		taken = next;
	}
	for (uint32_t i = 0; i < ending->count; i++) {
		if (ended)
			finish(ending->context[i], ending->handle[i]);
		else
			__atomic_store_n(&ending->context[i]->handle, ending->handle[i], __ATOMIC_RELEASE);
	}
}
