/* SPDX-License-Identifier: Apache-2.0
 *
 * Units of address space: numbers 0 to count - 1, of which runs are taken and given back. Behind cuda_space.c
 * only.
 *
 * A run whose length is a multiple of CU_BIG_UNITS begins at one. Freed runs are kept by length and given out
 * again at once; what that leaves in pieces is joined only when nothing else is left. Needs cu_lock.
 */
#ifndef FAKEGPU_CUDA_UNITS_H
#define FAKEGPU_CUDA_UNITS_H

#include <stddef.h>
#include <stdint.h>

#define CU_BIG_UNITS 512u

/* Begins anew with `count` units, all free; `is_used` tells, when runs are joined, which are not. */
void cu_units_open(uint32_t count, int (*is_used)(uint32_t unit));
/* The first of `units` units that follow each other, or -1. */
int64_t cu_units_take(uint32_t units);
void cu_units_give(uint32_t unit, uint32_t units);
/* No unit from here on was ever taken. */
uint32_t cu_units_reached(void);
/* Memory for records of this process, never given back; NULL: none left. */
void *cu_units_record(size_t size);

#endif
