/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory and events that several processes share through handles of 64 bytes.
 *
 * A piece of memory that is exported moves, bytes and all, from the process's own reservation into a file
 * beside the state; its address stays. Whoever opens it maps the same file and is charged nothing. The file
 * goes with the piece, or with its process.
 */
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cuda_memory.h"
#include "cuda_mempool.h"
#include "cuda_parts.h"
#include "cuda_shared.h"
#include "cuda_time.h"
#include "shared_file.h"

#define MEMORY_MAGIC 0x4d454d31u
#define EVENT_MAGIC  0x45565431u

struct event_handle {
	uint32_t magic, index, process, generation;
};

void cu_ipc_unmap(struct cu_alloc *alloc)
{
	if (alloc->kind == CU_ALLOC_EXTERNAL)
		return; /* the bytes are the external memory's */
	munmap(alloc->data, cu_round(alloc->size, 4096));
}

CUresult cu_shared_export(struct cu_alloc *alloc, struct cu_shared_memory *name)
{
	uint32_t self = (uint32_t)fg_process_self();

	if (alloc->shared_number == 0) {
		uint64_t size = cu_round(alloc->size, 4096);
		int file = fg_shared_file_make(size, &alloc->shared_number);
		char *map =
		    file < 0 ? MAP_FAILED
			     : mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);

		if (file >= 0)
			close(file);
		if (map == MAP_FAILED) {
			alloc->shared_number = 0;
			return CUDA_ERROR_MAP_FAILED;
		}
		if (alloc->touched) {
			memcpy(map, alloc->data, alloc->size);
			cu_forget_bytes(alloc->data, alloc->size);
		}
		alloc->data = map;
		alloc->foreign = 1;
	}
	*name = (struct cu_shared_memory){.magic = MEMORY_MAGIC,
					  .process = self,
					  .generation = fg_process_at(self)->generation,
					  .number = alloc->shared_number,
					  .size = alloc->size,
					  .boot = fg_state->boot,
					  .card = alloc->device->card};
	return CUDA_SUCCESS;
}

CUresult cu_shared_import(const struct cu_shared_memory *name, enum cu_alloc_kind kind,
			  struct cu_device *device, struct CUctx_st *context, struct cu_alloc **made)
{
	uint64_t size = cu_round(name->size, 4096);
	struct stat info;
	CUresult result;
	char *map;
	int file;

	CU_NEEDS(name->magic == MEMORY_MAGIC && name->boot == fg_state->boot && name->size > 0);
	file = fg_shared_file_open(name->process, name->generation, name->number);
	if (file < 0 || fstat(file, &info) != 0 || (uint64_t)info.st_size < size) {
		if (file >= 0)
			close(file);
		return CUDA_ERROR_INVALID_VALUE; /* its owner has freed it, or is gone */
	}
	map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
	close(file);
	if (map == MAP_FAILED)
		return CUDA_ERROR_MAP_FAILED;
	result = cu_memory_make(device, context, name->size, 0, kind, made);
	if (result != CUDA_SUCCESS) {
		munmap(map, size);
		return result;
	}
	(*made)->data = map;
	(*made)->foreign = 1;
	return CUDA_SUCCESS;
}

/* ---- memory ------------------------------------------------------------------------------------------- */

CUresult CUDAAPI cuIpcGetMemHandle(CUipcMemHandle *pHandle, CUdeviceptr dptr)
{
	CU_ENTER("handle=%p dptr=%#llx", (void *)pHandle, dptr);
	CU_CONTEXT(context);
	struct cu_shared_memory name;
	CUresult result = CUDA_ERROR_INVALID_VALUE;

	CU_NEEDS(pHandle != NULL && context != NULL);
	cu_lock();
	struct cu_alloc *alloc = cu_space_find(dptr);

	if (alloc != NULL && alloc->kind == CU_ALLOC_LINEAR)
		result = cu_shared_export(alloc, &name);
	cu_unlock();
	if (result != CUDA_SUCCESS)
		return result;
	memset(pHandle, 0, sizeof *pHandle);
	memcpy(pHandle->reserved, &name, sizeof name);
	return CUDA_SUCCESS;
}

struct already {
	const struct cu_shared_memory *name;
	struct cu_alloc *found;
};

static void find_opened(struct cu_alloc *alloc, void *argument)
{
	struct already *already = argument;

	if (alloc->kind == CU_ALLOC_IPC && alloc->flags == already->name->number && alloc->charged == 0 &&
	    (uint32_t)alloc->preferred == already->name->process &&
	    (uint32_t)alloc->last_prefetch == already->name->generation)
		already->found = alloc;
}

static CUresult open_memory(CUdeviceptr *pdptr, const CUipcMemHandle *handle, unsigned int flags)
{
	CU_CONTEXT(context);
	struct cu_shared_memory name;
	struct already already = {&name, NULL};
	struct cu_alloc *alloc;
	CUresult result;

	CU_NEEDS(pdptr != NULL && (flags & ~(unsigned)CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) == 0);
	memcpy(&name, handle->reserved, sizeof name);
	if (name.magic == MEMORY_MAGIC && (int)name.process == fg_process_self() &&
	    name.generation == fg_process_at(name.process)->generation && name.boot == fg_state->boot)
		return CUDA_ERROR_INVALID_CONTEXT; /* not in the process that made it */
	cu_lock();
	cu_space_each(find_opened, &already);
	if (already.found != NULL) {
		already.found->resident++; /* how often it is open beside the first time */
		*pdptr = already.found->base;
	}
	cu_unlock();
	if (already.found != NULL)
		return CUDA_SUCCESS;
	result = cu_shared_import(&name, CU_ALLOC_IPC, context->device, context, &alloc);
	if (result != CUDA_SUCCESS)
		return result;
	alloc->flags = name.number;
	alloc->preferred = (int32_t)name.process;
	alloc->last_prefetch = (int32_t)name.generation;
	*pdptr = alloc->base;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuIpcOpenMemHandle_v2(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags)
{
	CU_ENTER("pdptr=%p Flags=%u", (void *)pdptr, Flags);
	return open_memory(pdptr, &handle, Flags);
}

CUresult CUDAAPI cuIpcOpenMemHandle(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags)
{
	CU_ENTER("pdptr=%p Flags=%u", (void *)pdptr, Flags);
	return open_memory(pdptr, &handle, Flags);
}

CUresult CUDAAPI cuIpcCloseMemHandle(CUdeviceptr dptr)
{
	CU_ENTER("dptr=%#llx", dptr);
	CU_CONTEXT(context);
	CUresult result = CUDA_ERROR_INVALID_VALUE;

	cu_context_drain(context);
	cu_lock();
	struct cu_alloc *alloc = cu_space_find(dptr);

	if (alloc != NULL && alloc->kind == CU_ALLOC_IPC && alloc->base == dptr) {
		if (alloc->resident > 0)
			alloc->resident--;
		else
			cu_memory_end(alloc);
		result = CUDA_SUCCESS;
	}
	cu_unlock();
	return result;
}

/* ---- events ------------------------------------------------------------------------------------------- */

static int32_t share_event(void)
{
	uint32_t self = (uint32_t)fg_process_self();

	for (uint32_t i = 0; i < FG_SHARED_EVENTS; i++) {
		struct fg_shared_event *shared = &fg_state->shared_event[i];
		uint32_t free_word = 0;

		if (!__atomic_compare_exchange_n(&shared->in_use, &free_word, 1, 0, __ATOMIC_ACQ_REL,
						 __ATOMIC_RELAXED))
			continue;
		shared->process = self;
		shared->generation = fg_process_at(self)->generation;
		shared->recorded = 0;
		shared->end_ns = 0;
		return (int32_t)i;
	}
	return -1;
}

CUresult CUDAAPI cuIpcGetEventHandle(CUipcEventHandle *pHandle, CUevent event)
{
	CU_ENTER("handle=%p event=%p", (void *)pHandle, (void *)event);
	CU_NEEDS(pHandle != NULL);
	if (!cu_is(event, CU_KIND_EVENT) || (event->flags & CU_EVENT_INTERPROCESS) == 0)
		return CUDA_ERROR_INVALID_HANDLE;
	cu_lock();
	if (event->shared < 0)
		event->shared = share_event();
	cu_unlock();
	if (event->shared < 0)
		return CUDA_ERROR_OUT_OF_MEMORY;
	const struct fg_shared_event *shared = &fg_state->shared_event[event->shared];
	const struct event_handle handle = {EVENT_MAGIC, (uint32_t)event->shared, shared->process,
					    shared->generation};

	memset(pHandle, 0, sizeof *pHandle);
	memcpy(pHandle->reserved, &handle, sizeof handle);
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuIpcOpenEventHandle(CUevent *phEvent, CUipcEventHandle handle)
{
	CU_ENTER("phEvent=%p", (void *)phEvent);
	CU_CONTEXT(context);
	struct event_handle name;
	struct CUevent_st *event;

	CU_NEEDS(phEvent != NULL);
	memcpy(&name, handle.reserved, sizeof name);
	CU_NEEDS(name.magic == EVENT_MAGIC && name.index < FG_SHARED_EVENTS);
	const struct fg_shared_event *shared = &fg_state->shared_event[name.index];

	CU_NEEDS(shared->in_use && shared->process == name.process && shared->generation == name.generation);
	cu_lock();
	event = cu_object_make(CU_KIND_EVENT, sizeof *event);
	if (event != NULL) {
		event->flags = CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING;
		event->context = context;
		event->shared = (int32_t)name.index;
		event->imported = 1;
	}
	cu_unlock();
	if (event == NULL)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*phEvent = event;
	return CUDA_SUCCESS;
}
