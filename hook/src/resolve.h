/* SPDX-License-Identifier: Apache-2.0
 *
 * The driver's own functions, and how a program's look-ups are answered. Nothing here initialises CUDA or
 * NVML, and nothing is looked up before somebody asks for it.
 *
 * Invariant: a program only ever gets a wrapper for a symbol that the driver at hand has, in the very form
 * (version, stream flavour) that the driver itself would have answered with.
 */
#ifndef ALIQUOT_RESOLVE_H
#define ALIQUOT_RESOLVE_H

#include <stdbool.h>

#include "lookup.h"
#include "names.h"

/* Address of the driver's function with that number, or of one that answers "not found". */
void *aq_resolve(unsigned number);

extern void *aq_reals[AQ_NUMBERS];

static inline void *aq_real(unsigned number)
{
	void *real = __atomic_load_n(&aq_reals[number], __ATOMIC_RELAXED);
	return __builtin_expect(real != NULL, 1) ? real : aq_resolve(number);
}

/* True: the driver at hand has the function. */
bool aq_has(unsigned number);

/* The driver's `name`, with its type. */
#define REAL(name) ((__typeof__(&hook_##name))aq_real(AQ_N_##name))
#define HAS(name)  aq_has(AQ_N_##name)

/* Defines the wrapper of a symbol under its internal and its exported name. */
#define HOOK(result, name, parameters)                                                                    \
	extern __typeof__(hook_##name) name __attribute__((alias("hook_" #name), visibility("default"))); \
	result hook_##name parameters

/* Brings `libnvidia-ml.so.1` in if the program has not. False: there is none. */
bool aq_load_nvml(void);

#endif
