/* SPDX-License-Identifier: Apache-2.0
 *
 * The table behind cuGetProcAddress, generated from cudaTypedefs.h: which symbol stands for which name at
 * which CUDA version, for the legacy and for the per-thread default stream.
 *
 * Invariant: sorted by name (strcmp), then flavour, then version, so that a binary search finds the name and
 * a short walk the version.
 */
#ifndef FAKEGPU_SYMTAB_H
#define FAKEGPU_SYMTAB_H

#include <stddef.h>
#include <stdint.h>

struct fg_symbol {
	const char *name; /* "cuMemAlloc" */
	const char *symbol; /* "cuMemAlloc_v2" */
	void (*address)(void);
	uint32_t version; /* 3020 */
	uint32_t per_thread; /* 1: `_ptds` or `_ptsz` flavour */
};

extern const struct fg_symbol fg_symtab[];
extern const size_t fg_symtab_count;

#endif
