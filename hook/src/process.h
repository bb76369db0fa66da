/* SPDX-License-Identifier: Apache-2.0
 *
 * What belongs to this very process and not to its forked children; see state.h.
 */
#ifndef ALIQUOT_PROCESS_H
#define ALIQUOT_PROCESS_H

#include "state.h"
#include "table.h"

#define AQ_MAX_CONTEXTS 256u
#define AQ_MAX_POOLS    256u

struct aq_limiter;

struct aq_context {
	CUcontext handle; /* NULL: free place */
	int16_t ordinal;
	int8_t card; /* AQ_NO_CARD: not one of ours */
	int8_t counted; /* it keeps the card's context overhead charged */
	uint32_t attached; /* cuCtxAttach calls to be undone before cuCtxDetach ends it */
};

struct aq_pool {
	CUmemoryPool handle; /* NULL: free place */
	int16_t card;
	int16_t ordinal;
	uint64_t charged; /* units in the account for it */
	uint64_t pending; /* of these, units of calls that are under way */
	uint64_t claimed; /* units that calls under way take out of what the pool has and does not use */
	uint64_t step; /* in which it grows; 0 = not known */
	uint32_t ending; /* destroyed by the program, kept until what was taken from it is free */
};

/* Per card: its contexts, and the graph memory of the card. */
struct aq_process_card {
	uint32_t lock; /* guards contexts and overhead */
	uint32_t contexts;
	uint64_t overhead; /* units charged for having a context */
	struct aq_pool graph; /* handle unused */
};

/* In the order in which a program comes to need it: what every start touches lies in the first two pages. */
struct aq_process {
	uint32_t deciding; /* lock of aq_decide */
	uint32_t claiming; /* lock of slot claims and of the context table's writers */
	uint32_t known; /* identity below is filled in */
	uint32_t pid;
	uint64_t start;
	uint64_t pidns;
	struct aq_table addresses; /* device address → aq_entry */
	struct aq_table arrays; /* CUarray, CUmipmappedArray → aq_entry */
	struct aq_table handles; /* VMM handle → index of an aq_block */
	struct aq_table mappings; /* mapped address → index of an aq_block and size */
	struct aq_table graph_execs; /* CUgraphExec → aq_entry with the bytes its nodes allocate */
	struct aq_table green; /* CUgreenCtx → ordinal */
	struct aq_table nvml_devices; /* nvmlDevice_t → card + 1 */
	struct aq_limiter *limiter; /* of the first limited launch; NULL before it */
	void *free_blocks; /* records of memory_vmm.c */
	void *free_mappings;
	uint64_t tidied_ms; /* when neighbours were last looked after for the sake of figures */
	uint64_t maps_read_ms; /* when neighbours' mappings were looked at last */
	uint32_t said; /* kinds of message already printed */
	uint32_t pools; /* places of `pool` ever used */
	uint32_t graphs; /* executable graphs with memory of their own were seen */
	uint32_t primary_retains[AQ_MAX_ORDINALS];
	struct aq_usage_slot *slot[AQ_MAX_SHARES]; /* NULL: not claimed */
	struct aq_process_card card[AQ_MAX_CARDS];
	struct aq_context context[AQ_MAX_CONTEXTS];
	struct aq_pool pool[AQ_MAX_POOLS];
};

struct aq_process *aq_process_pages(void);
extern struct aq_process *aq_process_word;

/* Never NULL: when not even a page can be had, a static place serves (and a fork is then seen less well). */
static inline struct aq_process *aq_process(void)
{
	struct aq_process *process = __atomic_load_n(&aq_process_word, __ATOMIC_ACQUIRE);
	return __builtin_expect(process != NULL, 1) ? process : aq_process_pages();
}

/* Fills in who we are (identity.c). */
void aq_identify(struct aq_process *process);

#endif
