/* SPDX-License-Identifier: Apache-2.0
 *
 * Physical pieces: cuMemCreate to cuMemRelease, and passing them between processes as descriptors.
 */
#include "cuda_physical.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cuda_parts.h"

/* What a descriptor of ours is called: /proc/self/fd/N → "/memfd:fakegpu <card>". */
#define FILE_NAME "fakegpu"

struct cu_physical *cu_physical_of(CUmemGenericAllocationHandle handle)
{
	struct cu_physical *physical = (struct cu_physical *)(uintptr_t)handle;

	return cu_is(physical, CU_KIND_PHYSICAL) && physical->handles > 0 ? physical : NULL;
}

static int is_shareable(const struct cu_physical *physical)
{
	return (physical->prop.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0;
}

static int make_file(struct cu_physical *physical)
{
	char name[64];

	if (physical->file >= 0)
		return 0;
	snprintf(name, sizeof name, FILE_NAME " %d",
		 physical->device != NULL ? (int)physical->device->card : -1);
	physical->file = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (physical->file < 0)
		return -1;
	if (ftruncate(physical->file, (off_t)physical->size) != 0 ||
	    fcntl(physical->file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
		close(physical->file);
		physical->file = -1;
		return -1;
	}
	return 0;
}

char *cu_physical_bytes(struct cu_physical *physical)
{
	void *map;

	if (physical->bytes != NULL)
		return physical->bytes;
	if (is_shareable(physical) || physical->file >= 0) {
		if (make_file(physical) != 0)
			return NULL;
		map = mmap(NULL, physical->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
			   physical->file, 0);
	} else {
		map = mmap(NULL, physical->size, PROT_READ | PROT_WRITE,
			   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	}
	if (map == MAP_FAILED)
		return NULL;
	physical->bytes = map;
	return physical->bytes;
}

void cu_physical_settle(struct cu_physical *physical)
{
	if (physical->handles > 0 || physical->mappings > 0)
		return;
	if (physical->bytes != NULL)
		munmap(physical->bytes, physical->size);
	if (physical->file >= 0)
		close(physical->file);
	if (physical->seat >= 0)
		fg_account_give((uint32_t)physical->seat, physical->size);
	cu_object_end(physical);
}

static CUresult check_prop(const CUmemAllocationProp *prop, struct cu_device **device)
{
	*device = NULL;
	CU_NEEDS(prop != NULL && (prop->type == CU_MEM_ALLOCATION_TYPE_PINNED ||
				  prop->type == CU_MEM_ALLOCATION_TYPE_MANAGED));
	CU_NEEDS((prop->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == 0 ||
		 (prop->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC) != 0);
	if (prop->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC)
		return CUDA_ERROR_NOT_SUPPORTED;
	switch (prop->location.type) {
	case CU_MEM_LOCATION_TYPE_DEVICE:
		*device = cu_device_at(prop->location.id);
		return *device != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
	case CU_MEM_LOCATION_TYPE_HOST:
	case CU_MEM_LOCATION_TYPE_HOST_NUMA:
	case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
		return CUDA_SUCCESS;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
			     const CUmemAllocationProp *prop, unsigned long long flags)
{
	CU_ENTER("handle=%p size=%zu type=%d id=%d flags=%llu", (void *)handle, size,
		 prop != NULL ? (int)prop->location.type : -1, prop != NULL ? prop->location.id : -1, flags);
	struct cu_device *device;
	struct cu_physical *physical;
	int seat = -1;
	CUresult result = check_prop(prop, &device);

	CU_NEEDS(handle != NULL && flags == 0);
	if (result != CUDA_SUCCESS)
		return result;
	CU_NEEDS(size > 0 && size % (device != NULL ? fg_state->driver.vmm_granularity : 4096) == 0);
	fg_control_follow(fg_coarse_ns());
	cu_memory_delay();
	if (device != NULL) {
		cu_lock();
		seat = cu_seat(device);
		cu_unlock();
		if (seat < 0 || fg_account_take((uint32_t)seat, size) != 0)
			return CUDA_ERROR_OUT_OF_MEMORY;
	}
	cu_lock();
	physical = cu_object_make(CU_KIND_PHYSICAL, sizeof *physical);
	if (physical != NULL) {
		physical->handles = 1;
		physical->device = device;
		physical->seat = seat;
		physical->size = size;
		physical->file = -1;
		physical->prop = *prop;
	}
	cu_unlock();
	if (physical == NULL) {
		if (seat >= 0)
			fg_account_give((uint32_t)seat, size);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*handle = (CUmemGenericAllocationHandle)(uintptr_t)physical;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle)
{
	CU_ENTER("handle=%#llx", handle);
	struct cu_physical *physical;

	cu_memory_delay();
	cu_lock();
	physical = cu_physical_of(handle);
	if (physical != NULL) {
		physical->handles--;
		cu_physical_settle(physical);
	}
	cu_unlock();
	return physical != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
					       CUmemAllocationGranularity_flags option)
{
	CU_ENTER("granularity=%p prop=%p option=%d", (void *)granularity, (const void *)prop, (int)option);
	struct cu_device *device;
	CUresult result = check_prop(prop, &device);

	CU_NEEDS(granularity != NULL && (option == CU_MEM_ALLOC_GRANULARITY_MINIMUM ||
					 option == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
	if (result != CUDA_SUCCESS)
		return result;
	*granularity = fg_state->driver.vmm_granularity;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop,
							CUmemGenericAllocationHandle handle)
{
	CU_ENTER("prop=%p handle=%#llx", (void *)prop, handle);
	const struct cu_physical *physical = cu_physical_of(handle);

	CU_NEEDS(prop != NULL && physical != NULL);
	*prop = physical->prop;
	return CUDA_SUCCESS;
}

/* ---- between processes -------------------------------------------------------------------------------- */

CUresult CUDAAPI cuMemExportToShareableHandle(void *shareableHandle, CUmemGenericAllocationHandle handle,
					      CUmemAllocationHandleType handleType, unsigned long long flags)
{
	CU_ENTER("out=%p handle=%#llx type=%d flags=%llu", shareableHandle, handle, (int)handleType, flags);
	struct cu_physical *physical = cu_physical_of(handle);
	int descriptor = -1;

	CU_NEEDS(shareableHandle != NULL && physical != NULL && flags == 0);
	if (handleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return CUDA_ERROR_NOT_SUPPORTED;
	CU_NEEDS(is_shareable(physical) || physical->imported);
	cu_lock();
	if (make_file(physical) == 0)
		descriptor = fcntl(physical->file, F_DUPFD, 0);
	cu_unlock();
	if (descriptor < 0)
		return CUDA_ERROR_OPERATING_SYSTEM;
	memcpy(shareableHandle, &descriptor, sizeof descriptor);
	return CUDA_SUCCESS;
}

/* The card a descriptor of ours says it lies on; -2: it is none of ours. */
static int card_of_file(int descriptor)
{
	char path[64], target[128];
	ssize_t length;
	int card = -2;

	snprintf(path, sizeof path, "/proc/self/fd/%d", descriptor);
	length = readlink(path, target, sizeof target - 1);
	if (length <= 0)
		return -2;
	target[length] = '\0';
	if (sscanf(target, "/memfd:" FILE_NAME " %d", &card) != 1)
		return -2;
	return card;
}

CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *osHandle,
						CUmemAllocationHandleType shHandleType)
{
	CU_ENTER("handle=%p osHandle=%p type=%d", (void *)handle, osHandle, (int)shHandleType);
	int descriptor = (int)(intptr_t)osHandle, card = card_of_file(descriptor);
	struct cu_physical *physical;
	struct stat info;

	CU_NEEDS(handle != NULL);
	if (shHandleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return CUDA_ERROR_NOT_SUPPORTED;
	CU_NEEDS(card != -2 && fstat(descriptor, &info) == 0 && info.st_size > 0);
	descriptor = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
	if (descriptor < 0)
		return CUDA_ERROR_OPERATING_SYSTEM;
	cu_lock();
	physical = cu_object_make(CU_KIND_PHYSICAL, sizeof *physical);
	if (physical != NULL) {
		physical->handles = 1;
		physical->seat = -1; /* charged where it was made */
		physical->imported = 1;
		physical->size = (uint64_t)info.st_size;
		physical->file = descriptor;
		physical->prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
		physical->prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
		physical->prop.location.type = CU_MEM_LOCATION_TYPE_HOST;
		for (int i = 0; i < cu_device_count; i++)
			if ((int)cu_devices[i].card == card) {
				physical->device = &cu_devices[i];
				physical->prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
				physical->prop.location.id = i;
			}
	}
	cu_unlock();
	if (physical == NULL) {
		close(descriptor);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*handle = (CUmemGenericAllocationHandle)(uintptr_t)physical;
	return CUDA_SUCCESS;
}
