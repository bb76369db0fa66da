/* SPDX-License-Identifier: Apache-2.0
 *
 * The compute limiter as the launch wrappers see it. Memory is not its business, and it knows nothing of
 * memory.
 *
 * What is in line here is all that a launch pays while nothing binds: without a limit a look at four words of
 * the grant, with one the length that this kernel is known to have, taken off a credit of this process.
 * Everything else (limits that changed, a credit that is used up, suspension, measuring) is in limiter.c.
 *
 * Never allocates, locks or reads a clock on that path. Invariant: no launch reaches the device uncharged but
 * one that goes into a graph; one that the driver refuses costs its estimate at most.
 */
#ifndef ALIQUOT_LIMITER_H
#define ALIQUOT_LIMITER_H

#include "driver.h"
#include "limiter_key.h"
#include "process.h"
#include "state.h"

struct aq_sample;

/* One card of this process under a compute limit. */
struct aq_limited_card {
	int64_t credit_ns; /* device time taken from the bucket and not yet spent */
	uint64_t taken_at_ns; /* when a launch of this process last went through the bucket */
	int64_t deferred_ns; /* debt of launches whose length was not certain, still to be paid */
	uint64_t charged_ns; /* to this process, before anything was put right */
	uint64_t done_ns; /* how much of that was for launches that are done */
	uint64_t lent_at_ns; /* when work was last seen done that was lent, and not paid for */
	int64_t lent_ns; /* by how much such work has taken more than the limit lately */
	uint64_t reserved[1];
};

/* What the limiter knows in this process; in pages of its own, made with the first limited launch. */
struct aq_limiter {
	struct aq_limited_card card[AQ_MAX_CARDS];
	struct aq_keys keys;
	struct aq_samples *samples; /* limiter_sample.c */
};

/* The cost of a launch while no limit bound, whatever it takes in the end. */
#define AQ_FREE UINT64_MAX

/* What a launch is: the same function and grid take about the same time. */
struct aq_launch {
	const void *key; /* function, or executable graph */
	uint64_t blocks;
	CUstream stream; /* as the driver's functions for the legacy default stream take it */
	struct aq_limited_card *card; /* the limiter's own from here on; NULL: no limit */
	struct aq_key *known;
	struct aq_sample *sample; /* being measured */
	uint64_t charged_ns;
	uint64_t cost_ns; /* what was paid for that; AQ_FREE: nothing */
	uint64_t upto_ns; /* charged_ns of its card with it */
};

/* Which words of which grant say that a launch may go on without further looking. */
struct aq_gate {
	const uint64_t *words; /* selector, suspended, burst, hold; NULL: look (limiter.c) */
	uint64_t generation; /* the selector that `open` is true of */
	uint32_t open; /* no compute limit */
	uint32_t single; /* the number of this process's only card, plus one; 0: there are several */
};

enum { AQ_GATE_SELECTOR = 0, AQ_GATE_SUSPENDED = 1, AQ_GATE_HOLD = 3 };

_Static_assert(offsetof(struct aq_gate, words) == 0, "launch.c looks at it by hand");

extern struct aq_gate aq_gate;

/* True: the launch may go on, and nothing is to be done after it. */
static inline __attribute__((always_inline)) bool aq_launch_quick(const void *kind, uint64_t blocks)
{
	const uint64_t *words = __atomic_load_n(&aq_gate.words, __ATOMIC_ACQUIRE);
	if (__builtin_expect(words == NULL ||
				 __atomic_load_n(&words[AQ_GATE_SELECTOR], __ATOMIC_RELAXED) !=
				     __atomic_load_n(&aq_gate.generation, __ATOMIC_RELAXED) ||
				 (__atomic_load_n(&words[AQ_GATE_SUSPENDED], __ATOMIC_RELAXED) |
				  __atomic_load_n(&words[AQ_GATE_HOLD], __ATOMIC_RELAXED)) != 0,
			     0))
		return false;
	if (__atomic_load_n(&aq_gate.open, __ATOMIC_RELAXED))
		return true;
	/* No call in here: the wrappers are to be leaves that touch no stack. */
	struct aq_process *process = __atomic_load_n(&aq_process_word, __ATOMIC_ACQUIRE);
	struct aq_limiter *limiter = process ? __atomic_load_n(&process->limiter, __ATOMIC_ACQUIRE) : NULL;
	unsigned number = __atomic_load_n(&aq_gate.single, __ATOMIC_RELAXED) - 1;
	if (__builtin_expect(limiter == NULL || number >= AQ_MAX_CARDS, 0))
		return false;
	struct aq_key *key = aq_key_home(&limiter->keys, kind, blocks, number);
	if (__builtin_expect(!aq_key_is(key, kind, blocks, number) ||
				 __atomic_load_n(&key->quick, __ATOMIC_RELAXED) == 0,
			     0))
		return false;
	int64_t length = (int64_t)__atomic_load_n(&key->estimate_ns, __ATOMIC_RELAXED);
	struct aq_limited_card *card = &limiter->card[number];
	if (length > 0 &&
	    __builtin_expect(__atomic_fetch_sub(&card->credit_ns, length, __ATOMIC_RELAXED) < length, 0)) {
		__atomic_fetch_add(&card->credit_ns, length, __ATOMIC_RELAXED);
		return false;
	}
	aq_key_quick(key);
	return true;
}

/* Before any other launch: waits until the share may go on. CUDA_SUCCESS: call the driver. */
CUresult aq_launch_begin(struct aq_launch *launch);

/* After it, with the driver's verdict. */
void aq_launch_end(struct aq_launch *launch, CUresult result);

/* An executable graph was made, changed or ended: what was known of its length is not true any more. */
void aq_limiter_forget(const void *key);

/* A context has ended, and with it the events that were made in it. */
void aq_limiter_context_gone(CUcontext context);

#endif
