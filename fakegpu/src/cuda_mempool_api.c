/* SPDX-License-Identifier: Apache-2.0
 *
 * Stream-ordered memory and its pools, as programs call them.
 */
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda_graph.h"
#include "cuda_memory.h"
#include "cuda_mempool.h"
#include "cuda_parts.h"

#define POOL(handle)                                     \
	do {                                             \
		if (!cu_is(handle, CU_KIND_POOL))        \
			return CUDA_ERROR_INVALID_VALUE; \
	} while (0)

static CUresult take(struct CUstream_st *stream, CUdeviceptr *dptr, size_t bytes,
		     struct CUmemPoolHandle_st *pool)
{
	struct cu_alloc *alloc;
	CUresult result;

	CU_NEEDS(dptr != NULL);
	if (bytes == 0)
		return CUDA_ERROR_INVALID_VALUE;
	fg_control_follow(fg_coarse_ns());
	if (stream->capture != NULL)
		return cu_capture_add_alloc(stream, bytes,
					    pool != NULL ? pool->device : stream->context->device, dptr);
	cu_memory_delay();
	if (pool == NULL) {
		cu_lock();
		pool = cu_pool_current(stream->context->device);
		cu_unlock();
	}
	if (pool == NULL)
		return CUDA_ERROR_OUT_OF_MEMORY;
	result = cu_pool_take(pool, bytes, &alloc);
	if (result == CUDA_SUCCESS)
		*dptr = alloc->base;
	return result;
}

static CUresult alloc_async(const char *name, int per_thread, CUdeviceptr *dptr, size_t bytesize,
			    CUstream hStream)
{
	CU_ENTER_AS(name, "dptr=%p bytesize=%zu stream=%p", (void *)dptr, bytesize, (void *)hStream);
	CU_STREAM(stream, context, hStream, per_thread);
	return context != NULL ? take(stream, dptr, bytesize, NULL) : CUDA_ERROR_INVALID_CONTEXT;
}
CU_TWINS(cuMemAllocAsync, cuMemAllocAsync_ptsz, alloc_async,
	 (CUdeviceptr * dptr, size_t bytesize, CUstream hStream), dptr, bytesize, hStream)

static CUresult alloc_from(const char *name, int per_thread, CUdeviceptr *dptr, size_t bytesize,
			   CUmemoryPool pool, CUstream hStream)
{
	CU_ENTER_AS(name, "dptr=%p bytesize=%zu pool=%p stream=%p", (void *)dptr, bytesize, (void *)pool,
		    (void *)hStream);
	CU_STREAM(stream, context, hStream, per_thread);
	POOL(pool);
	CU_NEEDS(!pool->imported && context != NULL);
	return take(stream, dptr, bytesize, pool);
}
CU_TWINS(cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz, alloc_from,
	 (CUdeviceptr * dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream), dptr, bytesize, pool,
	 hStream)

static CUresult free_async(const char *name, int per_thread, CUdeviceptr dptr, CUstream hStream)
{
	CU_ENTER_AS(name, "dptr=%#llx stream=%p", dptr, (void *)hStream);
	CU_STREAM(stream, context, hStream, per_thread);
	struct cu_alloc *alloc;
	CUresult result = CUDA_ERROR_INVALID_VALUE;

	if (dptr == 0)
		return CUDA_SUCCESS;
	if (stream->capture != NULL && context != NULL)
		return cu_capture_add_free(stream, dptr);
	cu_memory_delay();
	cu_lock();
	alloc = cu_space_find(dptr);
	if (alloc != NULL && alloc->base == dptr)
		switch (alloc->kind) {
		case CU_ALLOC_POOL:
		case CU_ALLOC_POOL_IMPORT:
		case CU_ALLOC_GRAPH:
			result = cu_pool_free(alloc);
			break;
		case CU_ALLOC_LINEAR:
			cu_memory_end(alloc);
			result = CUDA_SUCCESS;
			break;
		default:
			break;
		}
	cu_unlock();
	return result;
}
CU_TWINS(cuMemFreeAsync, cuMemFreeAsync_ptsz, free_async, (CUdeviceptr dptr, CUstream hStream), dptr, hStream)

/* ---- pools -------------------------------------------------------------------------------------------- */

static struct cu_device *device_of(const CUmemLocation *location)
{
	switch (location->type) {
	case CU_MEM_LOCATION_TYPE_DEVICE:
		return cu_device_at(location->id);
	case CU_MEM_LOCATION_TYPE_HOST:
	case CU_MEM_LOCATION_TYPE_HOST_NUMA:
	case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
		return cu_device_at(0); /* only to have a place; a pool of host memory is charged nowhere */
	default:
		return NULL;
	}
}

CUresult CUDAAPI cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *poolProps)
{
	CU_ENTER("pool=%p props=%p", (void *)pool, (const void *)poolProps);
	struct CUmemPoolHandle_st *made;
	struct cu_device *device;

	CU_NEEDS(pool != NULL && poolProps != NULL);
	CU_NEEDS(poolProps->allocType == CU_MEM_ALLOCATION_TYPE_PINNED ||
		 poolProps->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED);
	CU_NEEDS((poolProps->handleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == 0);
	device = device_of(&poolProps->location);
	if (poolProps->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED && device == NULL)
		device = cu_device_at(0);
	if (device == NULL)
		return CUDA_ERROR_INVALID_DEVICE;
	cu_lock();
	made = cu_pool_make(device, fg_state->driver.pool_grow_bytes);
	if (made != NULL) {
		made->host = poolProps->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
			     poolProps->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED;
		made->location = poolProps->location;
		made->max_size = poolProps->maxSize;
		made->handle_types = poolProps->handleTypes;
	}
	cu_unlock();
	*pool = made;
	return made != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult CUDAAPI cuMemPoolDestroy(CUmemoryPool pool)
{
	CU_ENTER("pool=%p", (void *)pool);
	POOL(pool);
	CU_NEEDS(!pool->is_default && !pool->is_graph && !pool->ended);
	cu_lock();
	if (pool->device->current_pool == pool)
		pool->device->current_pool = NULL; /* the default one from here on */
	pool->ended = 1;
	if (pool->pieces == 0)
		cu_pool_unreserve(pool, 0);
	else
		cu_pool_trim(pool, 0);
	cu_unlock();
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemPoolTrimTo(CUmemoryPool pool, size_t minBytesToKeep)
{
	CU_ENTER("pool=%p keep=%zu", (void *)pool, minBytesToKeep);
	POOL(pool);
	cu_lock();
	cu_pool_trim(pool, minBytesToKeep);
	cu_unlock();
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value)
{
	CU_ENTER("pool=%p attr=%d value=%p", (void *)pool, (int)attr, value);
	POOL(pool);
	CU_NEEDS(value != NULL);
	cuuint64_t number = 0;
	CUresult result = CUDA_SUCCESS;

	cu_lock();
	switch (attr) {
	case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
		memcpy(&pool->reuse[attr - 1], value, sizeof(int));
		break;
	case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
		memcpy(&pool->threshold, value, sizeof pool->threshold);
		if (pool->reserved > pool->threshold)
			cu_pools_loose = 1;
		break;
	case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
	case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
		/* Only to be set back to what is now. */
		memcpy(&number, value, sizeof number);
		if (number != 0)
			result = CUDA_ERROR_INVALID_VALUE;
		else if (attr == CU_MEMPOOL_ATTR_USED_MEM_HIGH)
			pool->used_high = pool->used;
		else
			pool->reserved_high = pool->reserved;
		break;
	default:
		result = CUDA_ERROR_INVALID_VALUE;
	}
	cu_unlock();
	return result;
}

static CUresult get_attribute(const struct CUmemPoolHandle_st *pool, CUmemPool_attribute attr, void *value)
{
	cuuint64_t number = 0;
	int small = 0;

	switch (attr) {
	case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
	case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
		memcpy(value, &pool->reuse[attr - 1], sizeof(int));
		return CUDA_SUCCESS;
	case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
		number = pool->threshold;
		break;
	case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
		number = pool->reserved;
		break;
	case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
		number = pool->reserved_high;
		break;
	case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
		number = pool->used;
		break;
	case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
		number = pool->used_high;
		break;
	case CU_MEMPOOL_ATTR_MAX_POOL_SIZE:
		number = pool->max_size;
		break;
	case CU_MEMPOOL_ATTR_ALLOCATION_TYPE:
		small = CU_MEM_ALLOCATION_TYPE_PINNED;
		memcpy(value, &small, sizeof small);
		return CUDA_SUCCESS;
	case CU_MEMPOOL_ATTR_EXPORT_HANDLE_TYPES:
		small = (int)pool->handle_types;
		memcpy(value, &small, sizeof small);
		return CUDA_SUCCESS;
	case CU_MEMPOOL_ATTR_LOCATION_ID:
		small = pool->location.id;
		memcpy(value, &small, sizeof small);
		return CUDA_SUCCESS;
	case CU_MEMPOOL_ATTR_LOCATION_TYPE:
		small = (int)pool->location.type;
		memcpy(value, &small, sizeof small);
		return CUDA_SUCCESS;
	case CU_MEMPOOL_ATTR_HW_DECOMPRESS_ENABLED:
		memcpy(value, &small, sizeof small);
		return CUDA_SUCCESS;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
	memcpy(value, &number, sizeof number);
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value)
{
	CU_ENTER("pool=%p attr=%d value=%p", (void *)pool, (int)attr, value);
	POOL(pool);
	CU_NEEDS(value != NULL);
	cu_lock();
	CUresult result = get_attribute(pool, attr, value);

	cu_unlock();
	return result;
}

CUresult CUDAAPI cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *map, size_t count)
{
	CU_ENTER("pool=%p map=%p count=%zu", (void *)pool, (const void *)map, count);
	POOL(pool);
	CU_NEEDS(map != NULL || count == 0);
	for (size_t i = 0; i < count; i++) {
		const struct cu_device *device = cu_device_at(map[i].location.id);

		if (map[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || device == NULL)
			return CUDA_ERROR_INVALID_DEVICE;
		CU_NEEDS(device != pool->device || map[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
		if (device != pool->device && map[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE &&
		    !fg_p2p_possible(device->card, pool->device->card))
			return CUDA_ERROR_INVALID_DEVICE;
	}
	for (size_t i = 0; i < count; i++) {
		uint64_t bit = UINT64_C(1) << (map[i].location.id & 63);

		if (map[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
			__atomic_fetch_or(&pool->access, bit, __ATOMIC_RELAXED);
		else
			__atomic_fetch_and(&pool->access, ~bit, __ATOMIC_RELAXED);
	}
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool memPool, CUmemLocation *location)
{
	CU_ENTER("flags=%p pool=%p location=%p", (void *)flags, (void *)memPool, (void *)location);
	POOL(memPool);
	CU_NEEDS(flags != NULL && location != NULL && location->type == CU_MEM_LOCATION_TYPE_DEVICE);
	if (cu_device_at(location->id) == NULL)
		return CUDA_ERROR_INVALID_DEVICE;
	*flags = memPool->access >> (location->id & 63) & 1 ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
							    : CU_MEM_ACCESS_FLAGS_PROT_NONE;
	return CUDA_SUCCESS;
}

/* ---- which pool a device uses ------------------------------------------------------------------------- */

static CUresult get_pool(CUmemoryPool *pool, struct cu_device *device, int current)
{
	CU_NEEDS(pool != NULL);
	if (device == NULL)
		return CUDA_ERROR_INVALID_DEVICE;
	cu_lock();
	*pool = current ? cu_pool_current(device) : cu_pool_default(device);
	cu_unlock();
	return *pool != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult set_pool(struct cu_device *device, CUmemoryPool pool)
{
	if (device == NULL)
		return CUDA_ERROR_INVALID_DEVICE;
	POOL(pool);
	CU_NEEDS(pool->device == device && !pool->imported && !pool->ended);
	cu_lock();
	device->current_pool = pool;
	cu_unlock();
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetDefaultMemPool(CUmemoryPool *pool_out, CUdevice dev)
{
	CU_ENTER("pool=%p dev=%d", (void *)pool_out, dev);
	return get_pool(pool_out, cu_device_at(dev), 0);
}

CUresult CUDAAPI cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice dev)
{
	CU_ENTER("pool=%p dev=%d", (void *)pool, dev);
	return get_pool(pool, cu_device_at(dev), 1);
}

CUresult CUDAAPI cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool)
{
	CU_ENTER("dev=%d pool=%p", dev, (void *)pool);
	return set_pool(cu_device_at(dev), pool);
}

static int is_device(const CUmemLocation *location)
{
	return location != NULL && location->type == CU_MEM_LOCATION_TYPE_DEVICE;
}

CUresult CUDAAPI cuMemGetDefaultMemPool(CUmemoryPool *pool_out, CUmemLocation *location,
					CUmemAllocationType type)
{
	CU_ENTER("pool=%p location=%p type=%d", (void *)pool_out, (void *)location, (int)type);
	CU_NEEDS(location != NULL && type == CU_MEM_ALLOCATION_TYPE_PINNED);
	return is_device(location) ? get_pool(pool_out, cu_device_at(location->id), 0)
				   : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult CUDAAPI cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type)
{
	CU_ENTER("pool=%p location=%p type=%d", (void *)pool, (void *)location, (int)type);
	CU_NEEDS(location != NULL && type == CU_MEM_ALLOCATION_TYPE_PINNED);
	return is_device(location) ? get_pool(pool, cu_device_at(location->id), 1) : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult CUDAAPI cuMemSetMemPool(CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool)
{
	CU_ENTER("location=%p type=%d pool=%p", (void *)location, (int)type, (void *)pool);
	CU_NEEDS(location != NULL && type == CU_MEM_ALLOCATION_TYPE_PINNED);
	return is_device(location) ? set_pool(cu_device_at(location->id), pool) : CUDA_ERROR_NOT_SUPPORTED;
}

/* ---- memory of graphs, as a pool of its own ----------------------------------------------------------- */

CUresult CUDAAPI cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attr, void *value)
{
	CU_ENTER("dev=%d attr=%d value=%p", device, (int)attr, value);
	struct cu_device *on = cu_device_at(device);
	cuuint64_t number = 0;

	CU_NEEDS(value != NULL && (unsigned)attr <= CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH);
	if (on == NULL)
		return CUDA_ERROR_INVALID_DEVICE;
	cu_lock();
	const struct CUmemPoolHandle_st *pool = on->graph_pool;

	if (pool != NULL)
		number = attr == CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT       ? pool->used
			 : attr == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH        ? pool->used_high
			 : attr == CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT ? pool->reserved
									  : pool->reserved_high;
	cu_unlock();
	memcpy(value, &number, sizeof number);
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attr, void *value)
{
	CU_ENTER("dev=%d attr=%d value=%p", device, (int)attr, value);
	struct cu_device *on = cu_device_at(device);
	cuuint64_t number = 1;

	CU_NEEDS(value != NULL &&
		 (attr == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH || attr == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH));
	if (on == NULL)
		return CUDA_ERROR_INVALID_DEVICE;
	memcpy(&number, value, sizeof number);
	CU_NEEDS(number == 0);
	cu_lock();
	if (on->graph_pool != NULL && attr == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH)
		on->graph_pool->used_high = on->graph_pool->used;
	else if (on->graph_pool != NULL)
		on->graph_pool->reserved_high = on->graph_pool->reserved;
	cu_unlock();
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGraphMemTrim(CUdevice device)
{
	CU_ENTER("dev=%d", device);
	struct cu_device *on = cu_device_at(device);

	if (on == NULL)
		return CUDA_ERROR_INVALID_DEVICE;
	cu_lock();
	if (on->graph_pool != NULL)
		cu_pool_trim(on->graph_pool, 0);
	cu_unlock();
	return CUDA_SUCCESS;
}
