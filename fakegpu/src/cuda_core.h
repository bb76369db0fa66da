/* SPDX-License-Identifier: Apache-2.0
 *
 * What all of the fake libcuda stands on: objects and handles, the first lines of every function, devices,
 * contexts, and the thread's stack of contexts.
 *
 * Objects live in one arena and are never given back to malloc, so a stale or foreign handle is recognised by
 * its tag and never followed. One mutex guards the tables of the process; it is not held over a wait, a
 * callback or a call into another library. Invariants: what is charged on a card is charged in this process's
 * seat there and nowhere else; nothing here survives fork (the child starts afresh).
 */
#ifndef FAKEGPU_CUDA_CORE_H
#define FAKEGPU_CUDA_CORE_H

/* Every version of every function under its own name, with its own types. */
#define __CUDA_API_VERSION_INTERNAL
#pragma GCC visibility push(default)
#include <cuda.h>
#pragma GCC visibility pop

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "call.h"
#include "export.h"
#include "state.h"

/* ---- objects (cuda_object.c) -------------------------------------------------------------------------- */

enum cu_kind {
	CU_KIND_FREE = 0,
	CU_KIND_CONTEXT = 0x43545831,
	CU_KIND_STREAM,
	CU_KIND_EVENT,
	CU_KIND_MODULE,
	CU_KIND_LIBRARY,
	CU_KIND_FUNCTION,
	CU_KIND_KERNEL,
	CU_KIND_LINK,
	CU_KIND_ARRAY,
	CU_KIND_MIPMAP,
	CU_KIND_POOL,
	CU_KIND_PHYSICAL,
	CU_KIND_EXTERNAL_MEMORY,
	CU_KIND_EXTERNAL_SEMAPHORE,
	CU_KIND_GRAPH,
	CU_KIND_NODE,
	CU_KIND_EXEC,
	CU_KIND_USER_OBJECT,
	CU_KIND_GREEN,
	CU_KIND_TEXTURE_REFERENCE,
	CU_KIND_TEXTURE,
	CU_KIND_SURFACE,
	CU_KIND_MULTICAST,
	CU_KIND_RESOURCE,
	CU_KIND_END
};

/* First member of every object. */
struct cu_object {
	uint32_t kind; /* enum cu_kind; CU_KIND_FREE once it is destroyed */
	uint32_t serial;
};

/* A zeroed object of `size` bytes, or NULL. Needs cu_lock. */
void *cu_object_make(enum cu_kind kind, size_t size);
/* Needs cu_lock. */
void cu_object_end(void *object);
/* 1 when `handle` is a live object of `kind`. Needs no lock, follows no foreign pointer. */
int cu_is(const void *handle, enum cu_kind kind);
/* A number that no other object of this process has had. */
uint64_t cu_next_id(void);

/* ---- devices and contexts ----------------------------------------------------------------------------- */

struct cu_alloc;

/* A card, or a compute instance of one, as this process sees it. */
struct cu_device {
	CUdevice ordinal;
	uint32_t card;
	uint32_t ci, gi; /* FG_NO_INSTANCE for a whole card */
	int seat; /* -1 until something is charged or launched */
	struct fg_card *shared;
	struct CUctx_st *primary;
	uint32_t primary_uses;
	unsigned int primary_flags;
	struct CUmemPoolHandle_st *default_pool, *current_pool, *graph_pool;
	struct CUmemPoolHandle_st *pools; /* all of them */
};

#define CU_LIMITS 16

struct CUctx_st {
	struct cu_object object;
	struct cu_device *device;
	int seat;
	uint32_t epoch; /* of the card when this was made: differs once the card was poisoned */
	uint32_t sticky; /* error that every further call gets */
	uint32_t primary;
	uint32_t attached; /* cuCtxAttach */
	unsigned int flags;
	unsigned int api_version;
	uint64_t id;
	uint64_t last_number; /* newest kernel of any stream */
	uint64_t blocking_number; /* newest kernel of the legacy stream and of streams that wait for it */
	struct CUstream_st *legacy;
	struct CUstream_st *streams; /* all, the legacy and per-thread ones included */
	struct cu_alloc *allocs; /* what goes with the context */
	struct CUmod_st *modules;
	struct CUctx_st *next; /* all contexts of the process */
	struct CUgreenCtx_st *green;
	size_t limit[CU_LIMITS];
	uint64_t peers; /* devices whose memory was made accessible (the first 64) */
	CUfunc_cache cache_config;
	CUsharedconfig shared_config;
};

extern struct cu_device *cu_devices;
extern int cu_device_count;
extern struct CUctx_st *cu_contexts;
extern pthread_mutex_t cu_mutex;
/* 1 between cuInit and fork or exit. */
extern int cu_ready;
/* Callbacks wait for their turn in the next call (cuda_host_function.c). */
extern uint32_t cu_callbacks_waiting;

static inline void cu_lock(void)
{
	pthread_mutex_lock(&cu_mutex);
}

static inline void cu_unlock(void)
{
	pthread_mutex_unlock(&cu_mutex);
}

/* Makes the device's seat when needed; -1: the table is full. */
int cu_seat(struct cu_device *device);
/* NULL when there is no such device. */
static inline struct cu_device *cu_device_at(CUdevice ordinal)
{
	return ordinal >= 0 && ordinal < cu_device_count ? &cu_devices[ordinal] : NULL;
}

/* ---- threads ------------------------------------------------------------------------------------------ */

#define CU_STACK_DEPTH 64

struct cu_thread {
	struct CUctx_st *current;
	struct CUctx_st *stack[CU_STACK_DEPTH]; /* below `current` */
	int depth; /* entries in use below */
	uint32_t generation; /* cu_generation when this was written */
	CUstreamCaptureMode capture_mode;
	uint64_t id;
};
extern __thread struct cu_thread cu_thread_state __attribute__((tls_model("initial-exec")));
/* Changes with every fork: what threads remember of before is void. */
extern uint32_t cu_generation;

struct cu_thread *cu_thread_reset(void);

static inline struct cu_thread *cu_thread(void)
{
	struct cu_thread *thread = &cu_thread_state;

	return __builtin_expect(thread->generation == cu_generation, 1) ? thread : cu_thread_reset();
}

/* ---- the first lines of every function ---------------------------------------------------------------- */

/* Log and faults; then CUDA_ERROR_NOT_INITIALIZED unless cuInit succeeded. */
#define CU_ENTER(...)                               \
	do {                                        \
		FG_CALL(__func__, __VA_ARGS__);     \
		if (__builtin_expect(!cu_ready, 0)) \
			return cu_not_ready();      \
	} while (0)

CUresult cu_not_ready(void);
/* The error that a context's calls get now, 0 while it is sound; runs callbacks that are due. */
CUresult cu_context_trouble(struct CUctx_st *context);

static inline CUresult cu_context_check(struct CUctx_st *context)
{
	if (__builtin_expect(
		context->epoch == __atomic_load_n(&context->device->shared->poison_epoch, __ATOMIC_RELAXED) &&
		    (context->sticky | __atomic_load_n(&cu_callbacks_waiting, __ATOMIC_RELAXED)) == 0,
		1))
		return CUDA_SUCCESS;
	return cu_context_trouble(context);
}

/* Declares `context`, the thread's current one; CUDA_ERROR_INVALID_CONTEXT without. */
#define CU_CONTEXT(context)                                        \
	struct CUctx_st *context = cu_thread()->current;           \
	do {                                                       \
		if (__builtin_expect(context == NULL, 0))          \
			return CUDA_ERROR_INVALID_CONTEXT;         \
		CUresult trouble_ = cu_context_check(context);     \
		if (__builtin_expect(trouble_ != CUDA_SUCCESS, 0)) \
			return trouble_;                           \
	} while (0)

#define CU_NEEDS(condition)                              \
	do {                                             \
		if (__builtin_expect(!(condition), 0))   \
			return CUDA_ERROR_INVALID_VALUE; \
	} while (0)

/* A rim of a stream-taking function and its twin for the per-thread default stream. `work` takes the flavour
 * first: 0 legacy, 1 per-thread. */
#define CU_TWINS(name, twin, work, parameters, ...)   \
	CUresult CUDAAPI name parameters              \
	{                                             \
		return work(#name, 0, __VA_ARGS__);   \
	}                                             \
	FAKE_EXPORT CUresult CUDAAPI twin parameters; \
	CUresult CUDAAPI twin parameters              \
	{                                             \
		return work(#twin, 1, __VA_ARGS__);   \
	}

/* CU_ENTER for a function that does the work of several names. */
#define CU_ENTER_AS(name, ...)                      \
	do {                                        \
		FG_CALL(name, __VA_ARGS__);         \
		if (__builtin_expect(!cu_ready, 0)) \
			return cu_not_ready();      \
	} while (0)

#endif
