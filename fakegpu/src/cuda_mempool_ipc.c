/* SPDX-License-Identifier: Apache-2.0
 *
 * Pools that several processes share: the pool by a descriptor, each piece by an exported pointer.
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda_memory.h"
#include "cuda_mempool.h"
#include "cuda_parts.h"
#include "cuda_shared.h"

/* The file behind a pool's descriptor holds this and nothing else. */
struct pool_name {
	char magic[8];
	uint64_t boot;
	uint32_t process, generation, number, card;
};
#define POOL_MAGIC "FGPOOL1"

static uint32_t last_number;

CUresult CUDAAPI cuMemPoolExportToShareableHandle(void *handle_out, CUmemoryPool pool,
						  CUmemAllocationHandleType handleType,
						  unsigned long long flags)
{
	CU_ENTER("out=%p pool=%p type=%d flags=%llu", handle_out, (void *)pool, (int)handleType, flags);
	uint32_t self = (uint32_t)fg_process_self();
	int descriptor;

	CU_NEEDS(handle_out != NULL && cu_is(pool, CU_KIND_POOL) && flags == 0 && !pool->imported);
	CU_NEEDS(handleType == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR &&
		 (pool->handle_types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0);
	cu_lock();
	if (pool->export_id == 0)
		pool->export_id = ++last_number;
	cu_unlock();
	const struct pool_name name = {.magic = POOL_MAGIC,
				       .boot = fg_state->boot,
				       .process = self,
				       .generation = fg_process_at(self)->generation,
				       .number = pool->export_id,
				       .card = pool->device->card};

	descriptor = memfd_create("fakegpu pool", MFD_ALLOW_SEALING);
	if (descriptor < 0)
		return CUDA_ERROR_OPERATING_SYSTEM;
	if (write(descriptor, &name, sizeof name) != (ssize_t)sizeof name) {
		close(descriptor);
		return CUDA_ERROR_OPERATING_SYSTEM;
	}
	memcpy(handle_out, &descriptor, sizeof descriptor);
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemPoolImportFromShareableHandle(CUmemoryPool *pool_out, void *handle,
						    CUmemAllocationHandleType handleType,
						    unsigned long long flags)
{
	CU_ENTER("pool=%p handle=%p type=%d flags=%llu", (void *)pool_out, handle, (int)handleType, flags);
	struct CUmemPoolHandle_st *pool = NULL;
	struct cu_device *device = NULL;
	struct pool_name name;

	CU_NEEDS(pool_out != NULL && flags == 0 && handleType == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
	CU_NEEDS(pread((int)(intptr_t)handle, &name, sizeof name, 0) == (ssize_t)sizeof name);
	CU_NEEDS(memcmp(name.magic, POOL_MAGIC, sizeof name.magic) == 0 && name.boot == fg_state->boot);
	for (int i = 0; i < cu_device_count; i++)
		if (cu_devices[i].card == name.card)
			device = &cu_devices[i];
	if (device == NULL)
		return CUDA_ERROR_INVALID_DEVICE;
	cu_lock();
	pool = cu_pool_make(device, fg_state->driver.pool_grow_bytes);
	if (pool != NULL) {
		pool->imported = 1;
		pool->export_id = name.number;
	}
	cu_unlock();
	*pool_out = pool;
	return pool != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult CUDAAPI cuMemPoolExportPointer(CUmemPoolPtrExportData *shareData_out, CUdeviceptr ptr)
{
	CU_ENTER("out=%p ptr=%#llx", (void *)shareData_out, ptr);
	struct cu_shared_memory name;
	CUresult result = CUDA_ERROR_INVALID_VALUE;

	CU_NEEDS(shareData_out != NULL);
	cu_lock();
	struct cu_alloc *alloc = cu_space_find(ptr);
	const struct CUmemPoolHandle_st *pool =
	    alloc != NULL && alloc->kind == CU_ALLOC_POOL ? alloc->owner : NULL;

	if (pool != NULL && (pool->handle_types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0)
		result = cu_shared_export(alloc, &name);
	if (result == CUDA_SUCCESS)
		name.pool = pool->export_id;
	cu_unlock();
	if (result != CUDA_SUCCESS)
		return result;
	memset(shareData_out, 0, sizeof *shareData_out);
	memcpy(shareData_out->reserved, &name, sizeof name);
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemPoolImportPointer(CUdeviceptr *ptr_out, CUmemoryPool pool,
					CUmemPoolPtrExportData *shareData)
{
	CU_ENTER("ptr=%p pool=%p data=%p", (void *)ptr_out, (void *)pool, (void *)shareData);
	struct cu_shared_memory name;
	struct cu_alloc *alloc;
	CUresult result;

	CU_NEEDS(ptr_out != NULL && shareData != NULL && cu_is(pool, CU_KIND_POOL) && pool->imported);
	memcpy(&name, shareData->reserved, sizeof name);
	CU_NEEDS(name.pool == pool->export_id);
	result = cu_shared_import(&name, CU_ALLOC_POOL_IMPORT, pool->device, NULL, &alloc);
	if (result != CUDA_SUCCESS)
		return result;
	alloc->owner = pool;
	*ptr_out = alloc->base;
	return CUDA_SUCCESS;
}
