/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory and semaphores of other APIs. Memory is whatever lies behind the descriptor; it is charged to
 * nobody, for the API that allocated it did that. Semaphores are taken and never hold anything up.
 */
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda_array.h"
#include "cuda_capture.h"
#include "cuda_graph.h"
#include "cuda_memory.h"
#include "cuda_parts.h"
#include "cuda_time.h"

struct CUextMemory_st {
	struct cu_object object;
	char *bytes;
	uint64_t size;
};

struct CUextSemaphore_st {
	struct cu_object object;
	uint64_t value;
};

CUresult CUDAAPI cuImportExternalMemory(CUexternalMemory *extMem_out,
					const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *memHandleDesc)
{
	CU_ENTER("out=%p desc=%p", (void *)extMem_out, (const void *)memHandleDesc);
	CU_CONTEXT(context);
	struct CUextMemory_st *memory;
	void *map;

	CU_NEEDS(extMem_out != NULL && memHandleDesc != NULL && memHandleDesc->size > 0 && context != NULL);
	if (memHandleDesc->type != CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD)
		return CUDA_ERROR_NOT_SUPPORTED;
	map = mmap(NULL, cu_round(memHandleDesc->size, 4096), PROT_READ | PROT_WRITE,
		   MAP_SHARED | MAP_NORESERVE, memHandleDesc->handle.fd, 0);
	if (map == MAP_FAILED)
		return CUDA_ERROR_INVALID_VALUE;
	cu_lock();
	memory = cu_object_make(CU_KIND_EXTERNAL_MEMORY, sizeof *memory);
	if (memory != NULL) {
		memory->bytes = map;
		memory->size = memHandleDesc->size;
	}
	cu_unlock();
	if (memory == NULL) {
		munmap(map, cu_round(memHandleDesc->size, 4096));
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	close(memHandleDesc->handle.fd); /* the descriptor is the driver's once the import has succeeded */
	*extMem_out = memory;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuExternalMemoryGetMappedBuffer(CUdeviceptr *devPtr, CUexternalMemory extMem,
						 const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *bufferDesc)
{
	CU_ENTER("devPtr=%p extMem=%p desc=%p", (void *)devPtr, (void *)extMem, (const void *)bufferDesc);
	CU_CONTEXT(context);
	struct cu_alloc *alloc;
	CUresult result;

	CU_NEEDS(devPtr != NULL && bufferDesc != NULL && bufferDesc->flags == 0 && bufferDesc->size > 0);
	if (!cu_is(extMem, CU_KIND_EXTERNAL_MEMORY))
		return CUDA_ERROR_INVALID_HANDLE;
	CU_NEEDS(bufferDesc->offset <= extMem->size && bufferDesc->size <= extMem->size - bufferDesc->offset);
	result = cu_memory_make(context->device, context, bufferDesc->size, 0, CU_ALLOC_EXTERNAL, &alloc);
	if (result != CUDA_SUCCESS)
		return result;
	alloc->data = extMem->bytes + bufferDesc->offset;
	alloc->foreign = 1;
	alloc->owner = extMem;
	*devPtr = alloc->base;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI
cuExternalMemoryGetMappedMipmappedArray(CUmipmappedArray *mipmap, CUexternalMemory extMem,
					const CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC *mipmapDesc)
{
	CU_ENTER("mipmap=%p extMem=%p desc=%p", (void *)mipmap, (void *)extMem, (const void *)mipmapDesc);
	CU_NEEDS(mipmap != NULL && mipmapDesc != NULL);
	return cu_is(extMem, CU_KIND_EXTERNAL_MEMORY) ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_HANDLE;
}

static void end_buffers(struct cu_alloc *alloc, void *argument)
{
	if (alloc->kind == CU_ALLOC_EXTERNAL && alloc->owner == argument)
		cu_memory_end(alloc);
}

CUresult CUDAAPI cuDestroyExternalMemory(CUexternalMemory extMem)
{
	CU_ENTER("extMem=%p", (void *)extMem);
	CU_CONTEXT(context);
	if (!cu_is(extMem, CU_KIND_EXTERNAL_MEMORY))
		return CUDA_ERROR_INVALID_HANDLE;
	cu_context_drain(context);
	cu_lock();
	/* Buffers should have been freed before; none is left with bytes that are gone. */
	cu_space_each(end_buffers, extMem);
	munmap(extMem->bytes, cu_round(extMem->size, 4096));
	cu_object_end(extMem);
	cu_unlock();
	return CUDA_SUCCESS;
}

/* ---- semaphores --------------------------------------------------------------------------------------- */

CUresult CUDAAPI cuImportExternalSemaphore(CUexternalSemaphore *extSem_out,
					   const CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC *semHandleDesc)
{
	CU_ENTER("out=%p desc=%p", (void *)extSem_out, (const void *)semHandleDesc);
	CU_CONTEXT(context);
	struct CUextSemaphore_st *semaphore;

	CU_NEEDS(extSem_out != NULL && semHandleDesc != NULL && context != NULL);
	if (semHandleDesc->type != CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_OPAQUE_FD &&
	    semHandleDesc->type != CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD)
		return CUDA_ERROR_NOT_SUPPORTED;
	cu_lock();
	semaphore = cu_object_make(CU_KIND_EXTERNAL_SEMAPHORE, sizeof *semaphore);
	cu_unlock();
	if (semaphore == NULL)
		return CUDA_ERROR_OUT_OF_MEMORY;
	close(semHandleDesc->handle.fd);
	*extSem_out = semaphore;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDestroyExternalSemaphore(CUexternalSemaphore extSem)
{
	CU_ENTER("extSem=%p", (void *)extSem);
	if (!cu_is(extSem, CU_KIND_EXTERNAL_SEMAPHORE))
		return CUDA_ERROR_INVALID_HANDLE;
	cu_lock();
	cu_object_end(extSem);
	cu_unlock();
	return CUDA_SUCCESS;
}

static CUresult check_all(const CUexternalSemaphore *semaphores, unsigned int count)
{
	CU_NEEDS(semaphores != NULL && count > 0);
	for (unsigned int i = 0; i < count; i++)
		if (!cu_is(semaphores[i], CU_KIND_EXTERNAL_SEMAPHORE))
			return CUDA_ERROR_INVALID_HANDLE;
	return CUDA_SUCCESS;
}

static CUresult signal_all(const char *name, int per_thread, const CUexternalSemaphore *extSemArray,
			   const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS *paramsArray, unsigned int numExtSems,
			   CUstream hStream)
{
	CU_ENTER_AS(name, "n=%u stream=%p", numExtSems, (void *)hStream);
	CU_STREAM(stream, context, hStream, per_thread);
	CUresult result = check_all(extSemArray, numExtSems);

	CU_NEEDS(paramsArray != NULL && context != NULL);
	if (result != CUDA_SUCCESS)
		return result;
	if (stream->capture != NULL) {
		struct cu_node_params params = {
		    .type = CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL,
		    .u.signal = {(CUexternalSemaphore *)(uintptr_t)extSemArray, paramsArray, numExtSems}};
		CUgraphNode made;

		return cu_capture_add(stream, &params, &made);
	}
	for (unsigned int i = 0; i < numExtSems; i++)
		extSemArray[i]->value = paramsArray[i].params.fence.value;
	return CUDA_SUCCESS;
}
CU_TWINS(cuSignalExternalSemaphoresAsync, cuSignalExternalSemaphoresAsync_ptsz, signal_all,
	 (const CUexternalSemaphore *extSemArray, const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS *paramsArray,
	  unsigned int numExtSems, CUstream stream),
	 extSemArray, paramsArray, numExtSems, stream)

static CUresult wait_all(const char *name, int per_thread, const CUexternalSemaphore *extSemArray,
			 const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS *paramsArray, unsigned int numExtSems,
			 CUstream hStream)
{
	CU_ENTER_AS(name, "n=%u stream=%p", numExtSems, (void *)hStream);
	CU_STREAM(stream, context, hStream, per_thread);
	CUresult result = check_all(extSemArray, numExtSems);

	CU_NEEDS(paramsArray != NULL && context != NULL);
	if (result != CUDA_SUCCESS || stream->capture == NULL)
		return result;
	struct cu_node_params params = {
	    .type = CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT,
	    .u.wait = {(CUexternalSemaphore *)(uintptr_t)extSemArray, paramsArray, numExtSems}};
	CUgraphNode made;

	return cu_capture_add(stream, &params, &made);
}
CU_TWINS(cuWaitExternalSemaphoresAsync, cuWaitExternalSemaphoresAsync_ptsz, wait_all,
	 (const CUexternalSemaphore *extSemArray, const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS *paramsArray,
	  unsigned int numExtSems, CUstream stream),
	 extSemArray, paramsArray, numExtSems, stream)
