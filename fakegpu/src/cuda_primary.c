/* SPDX-License-Identifier: Apache-2.0
 *
 * Primary contexts: one a device, shared by all who retain it, gone with the last release or a reset.
 */
#include "cuda_parts.h"

/* One thread at a time makes or ends a primary context; the others wait for it here and nowhere else. */
static pthread_mutex_t changing = PTHREAD_MUTEX_INITIALIZER;

void cu_primary_forget(void)
{
	/* The fork may have caught another thread in here. */
	pthread_mutex_init(&changing, NULL);
}

static void begin(void)
{
	pthread_mutex_lock(&changing);
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
{
	CU_ENTER("pctx=%p dev=%d", (void *)pctx, dev);
	struct cu_device *device = cu_device_at(dev);
	CUresult result = CUDA_SUCCESS;

	CU_NEEDS(pctx != NULL);
	if (device == NULL)
		return CUDA_ERROR_INVALID_DEVICE;
	begin();
	if (device->primary == NULL) {
		struct CUctx_st *made;

		result = cu_context_make(device, device->primary_flags, 3020, &made);
		if (result == CUDA_SUCCESS) {
			made->primary = 1;
			device->primary = made;
		}
	}
	if (result == CUDA_SUCCESS) {
		device->primary_uses++;
		*pctx = device->primary;
	}
	pthread_mutex_unlock(&changing);
	return result;
}

static void end_primary(struct cu_device *device)
{
	struct CUctx_st *primary = device->primary;

	device->primary = NULL;
	device->primary_uses = 0;
	if (primary != NULL)
		cu_context_end(primary);
}

static CUresult release(CUdevice dev)
{
	struct cu_device *device = cu_device_at(dev);
	CUresult result = CUDA_SUCCESS;

	if (device == NULL)
		return CUDA_ERROR_INVALID_DEVICE;
	begin();
	if (device->primary_uses == 0)
		result = CUDA_ERROR_INVALID_CONTEXT;
	else if (--device->primary_uses == 0)
		end_primary(device);
	pthread_mutex_unlock(&changing);
	return result;
}

static CUresult reset(CUdevice dev)
{
	struct cu_device *device = cu_device_at(dev);

	if (device == NULL)
		return CUDA_ERROR_INVALID_DEVICE;
	begin();
	end_primary(device);
	pthread_mutex_unlock(&changing);
	return CUDA_SUCCESS;
}

/* The first form failed while the context was in use; the second changes it for the next use. */
static CUresult set_flags(CUdevice dev, unsigned int flags, int refuse_active)
{
	struct cu_device *device = cu_device_at(dev);

	if (device == NULL)
		return CUDA_ERROR_INVALID_DEVICE;
	CU_NEEDS((flags & ~(unsigned int)CU_CTX_FLAGS_MASK) == 0);
	if (refuse_active && device->primary != NULL)
		return CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE;
	device->primary_flags = flags;
	if (device->primary != NULL)
		device->primary->flags = flags;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease_v2(CUdevice dev)
{
	CU_ENTER("dev=%d", dev);
	return release(dev);
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice dev)
{
	CU_ENTER("dev=%d", dev);
	return release(dev);
}

CUresult CUDAAPI cuDevicePrimaryCtxReset_v2(CUdevice dev)
{
	CU_ENTER("dev=%d", dev);
	return reset(dev);
}

CUresult CUDAAPI cuDevicePrimaryCtxReset(CUdevice dev)
{
	CU_ENTER("dev=%d", dev);
	return reset(dev);
}

CUresult CUDAAPI cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned int flags)
{
	CU_ENTER("dev=%d flags=%u", dev, flags);
	return set_flags(dev, flags, 0);
}

CUresult CUDAAPI cuDevicePrimaryCtxSetFlags(CUdevice dev, unsigned int flags)
{
	CU_ENTER("dev=%d flags=%u", dev, flags);
	return set_flags(dev, flags, 1);
}

CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active)
{
	CU_ENTER("dev=%d flags=%p active=%p", dev, (void *)flags, (void *)active);
	const struct cu_device *device = cu_device_at(dev);

	if (device == NULL)
		return CUDA_ERROR_INVALID_DEVICE;
	CU_NEEDS(flags != NULL && active != NULL);
	*flags = device->primary_flags;
	*active = device->primary != NULL;
	return CUDA_SUCCESS;
}
