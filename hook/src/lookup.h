/* SPDX-License-Identifier: Apache-2.0
 *
 * Name → number, by the generated perfect hash. A name that is not hooked costs the hash and at most one
 * string comparison. Nothing here is written after the build.
 */
#ifndef ALIQUOT_LOOKUP_H
#define ALIQUOT_LOOKUP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define AQ_NO_NUMBER      UINT16_MAX
#define AQ_NAME_BUCKETS   128u
#define AQ_NAME_CELL_BITS 9u

struct aq_name_cell {
	uint16_t name; /* offset of the name in aq_name_text, plus one; 0 = empty cell */
	uint16_t number; /* AQ_NO_NUMBER: only a base name, no symbol */
	uint16_t group; /* first number of the hooked symbols with the same base name */
	uint16_t group_size; /* 0: none of them is hooked */
};

extern const char aq_name_text[];
extern const uint16_t aq_name_offset[];
extern const uint8_t aq_name_is_nvml[];
extern const uint16_t aq_name_since[]; /* CUDA version that brought the symbol, as cuGetProcAddress counts */
extern const uint8_t aq_name_per_thread[]; /* its stream 0 is the thread's own */
extern const uint16_t aq_name_displacement[];
extern const struct aq_name_cell aq_name_cell[];
extern const int32_t aq_wrapper_offset[];

static inline const char *aq_name(unsigned number)
{
	return aq_name_text + aq_name_offset[number];
}

static inline void *aq_wrapper(unsigned number)
{
	const int32_t *cell = &aq_wrapper_offset[number];
	return (void *)((intptr_t)cell + *cell);
}

/* Compares without libc: whoever looks up may be a library that stands in front of strcmp itself. */
static inline bool aq_same_text(const char *one, const char *other)
{
	while (*one && *one == *other) {
		one++;
		other++;
	}
	return *one == *other;
}

/* NULL: not a name of ours. */
const struct aq_name_cell *aq_lookup(const char *name);

#endif
