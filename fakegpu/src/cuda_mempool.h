/* SPDX-License-Identifier: Apache-2.0
 *
 * Pools of stream-ordered memory. A pool takes memory from the card in steps of `pool_grow_bytes` and keeps
 * it until it is trimmed, or, beyond its release threshold, until the next synchronisation. What it took is
 * what is charged; where pieces lie within it does not matter, so a pool never fails for lack of one long
 * enough.
 *
 * Invariant (under cu_lock): used <= reserved, and reserved is what is charged for the pool.
 */
#ifndef FAKEGPU_CUDA_MEMPOOL_H
#define FAKEGPU_CUDA_MEMPOOL_H

#include "cuda_space.h"
#include "cuda_time.h"

struct CUmemPoolHandle_st {
	struct cu_object object;
	struct cu_device *device;
	struct CUmemPoolHandle_st *next; /* of the same device */
	uint64_t grow;
	uint64_t reserved, reserved_high;
	uint64_t used, used_high;
	uint64_t threshold;
	uint64_t max_size; /* 0: none */
	uint64_t access; /* devices that may read and write it, the first 64 */
	uint32_t pieces; /* live */
	uint32_t ended; /* destroyed while pieces live */
	uint32_t is_default;
	uint32_t is_graph;
	uint32_t imported;
	uint32_t host; /* of host memory: charged nowhere */
	int reuse[3]; /* CU_MEMPOOL_ATTR_REUSE_* */
	CUmemAllocationHandleType handle_types;
	CUmemLocation location;
	uint32_t export_id; /* names it to importers; 0: never exported */
};

struct CUmemPoolHandle_st *cu_pool_make(struct cu_device *device, uint64_t grow);
/* The device's default, current, and graph pool, made when needed. Need cu_lock. */
struct CUmemPoolHandle_st *cu_pool_default(struct cu_device *device);
struct CUmemPoolHandle_st *cu_pool_current(struct cu_device *device);
struct CUmemPoolHandle_st *cu_pool_graph(struct cu_device *device);
/* Takes `size` bytes out of the pool, which grows when needed. Needs cu_lock. */
CUresult cu_pool_reserve(struct CUmemPoolHandle_st *pool, uint64_t size);
void cu_pool_unreserve(struct CUmemPoolHandle_st *pool, uint64_t size);
/* Ends a piece, a graph's included. Needs cu_lock. */
CUresult cu_pool_free(struct cu_alloc *alloc);
/* Gives back what is above `keep` and not in use. Needs cu_lock. */
void cu_pool_trim(struct CUmemPoolHandle_st *pool, uint64_t keep);
/* At a synchronisation: pools give back what is above their threshold. */
void cu_pools_settle(struct cu_device *device);
/* The last context of the device is gone, and with it everything in its pools. Needs cu_lock. */
void cu_pools_end(struct cu_device *device);
/* Piece of a pool in the order of a stream. */
CUresult cu_pool_take(struct CUmemPoolHandle_st *pool, size_t size, struct cu_alloc **made);
/* 1 while some pool holds more than its threshold. */
extern uint32_t cu_pools_loose;

#endif
