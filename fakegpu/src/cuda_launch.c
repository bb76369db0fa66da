/* SPDX-License-Identifier: Apache-2.0
 *
 * Launching kernels, in all forms. A kernel computes nothing; it keeps the card busy for as long as
 * cuda_duration.c says.
 */
#include <string.h>

#include "cuda_graph.h"
#include "cuda_module.h"
#include "cuda_parts.h"
#include "cuda_time.h"

/* Checks of the documentation that all forms share. */
static CUresult check_shape(const struct CUfunc_st *function, const CUDA_KERNEL_NODE_PARAMS *params)
{
	const struct fg_card_config *config = &function->module->context->device->shared->config;
	uint64_t threads = (uint64_t)params->blockDimX * params->blockDimY * params->blockDimZ;

	CU_NEEDS(params->gridDimX > 0 && params->gridDimY > 0 && params->gridDimZ > 0 && threads > 0);
	CU_NEEDS(params->gridDimX <= 2147483647u && params->gridDimY <= 65535 && params->gridDimZ <= 65535);
	CU_NEEDS(params->blockDimX <= 1024 && params->blockDimY <= 1024 && params->blockDimZ <= 64);
	CU_NEEDS(threads <= (uint64_t)function->attribute[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK]);
	CU_NEEDS(params->sharedMemBytes <= config->shared_per_block_optin);
	CU_NEEDS(params->sharedMemBytes <=
		 (unsigned)function->attribute[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES]);
	return CUDA_SUCCESS;
}

static CUresult check_cooperative(const struct CUfunc_st *function, const CUDA_KERNEL_NODE_PARAMS *params)
{
	const struct cu_device *device = function->module->context->device;
	uint64_t threads = (uint64_t)params->blockDimX * params->blockDimY * params->blockDimZ;
	uint64_t blocks = (uint64_t)params->gridDimX * params->gridDimY * params->gridDimZ;
	uint64_t fit = device->shared->config.threads_per_sm / threads;

	if (fit > device->shared->config.blocks_per_sm)
		fit = device->shared->config.blocks_per_sm;
	if (blocks > fit * (uint64_t)cu_attribute(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT))
		return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
	return CUDA_SUCCESS;
}

static CUresult launch(struct CUstream_st *stream, const CUDA_KERNEL_NODE_PARAMS *params, int cooperative)
{
	struct CUctx_st *context = stream->context;
	const struct CUfunc_st *function = cu_function_of(params->func, context);
	CUresult result;
	uint64_t work_ns;

	if (__builtin_expect(function == NULL || function->module->context != context, 0))
		return CUDA_ERROR_INVALID_HANDLE;
	result = check_shape(function, params);
	if (result == CUDA_SUCCESS && cooperative)
		result = check_cooperative(function, params);
	if (__builtin_expect(result != CUDA_SUCCESS, 0))
		return result;
	if (__builtin_expect(stream->capture != NULL, 0))
		return cu_capture_add_kernel(stream, params);
	if (stream->is_legacy)
		CU_UNSAFE_IN_CAPTURE(context);
	work_ns = cu_duration(function->work_ns);
	if (work_ns != 0)
		fg_control_follow(fg_coarse_ns());
	cu_stream_push(stream, work_ns);
	return CUDA_SUCCESS;
}

static CUresult launch_kernel(const char *name, int per_thread, CUfunction f, unsigned int gridDimX,
			      unsigned int gridDimY, unsigned int gridDimZ, unsigned int blockDimX,
			      unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes,
			      CUstream hStream, void **kernelParams, void **extra)
{
	CU_ENTER_AS(name, "func=%p grid=%u,%u,%u block=%u,%u,%u shared=%u stream=%p", (void *)f, gridDimX,
		    gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, (void *)hStream);
	CU_STREAM(stream, context, hStream, per_thread);
	const CUDA_KERNEL_NODE_PARAMS params = {.func = f,
						.gridDimX = gridDimX,
						.gridDimY = gridDimY,
						.gridDimZ = gridDimZ,
						.blockDimX = blockDimX,
						.blockDimY = blockDimY,
						.blockDimZ = blockDimZ,
						.sharedMemBytes = sharedMemBytes,
						.kernelParams = kernelParams,
						.extra = extra,
						.ctx = context};

	CU_NEEDS(kernelParams == NULL || extra == NULL);
	return launch(stream, &params, 0);
}
CU_TWINS(cuLaunchKernel, cuLaunchKernel_ptsz, launch_kernel,
	 (CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
	  unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes,
	  CUstream hStream, void **kernelParams, void **extra),
	 f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream,
	 kernelParams, extra)

static CUresult launch_cooperative(const char *name, int per_thread, CUfunction f, unsigned int gridDimX,
				   unsigned int gridDimY, unsigned int gridDimZ, unsigned int blockDimX,
				   unsigned int blockDimY, unsigned int blockDimZ,
				   unsigned int sharedMemBytes, CUstream hStream, void **kernelParams)
{
	CU_ENTER_AS(name, "func=%p grid=%u,%u,%u block=%u,%u,%u shared=%u stream=%p", (void *)f, gridDimX,
		    gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, (void *)hStream);
	CU_STREAM(stream, context, hStream, per_thread);
	const CUDA_KERNEL_NODE_PARAMS params = {.func = f,
						.gridDimX = gridDimX,
						.gridDimY = gridDimY,
						.gridDimZ = gridDimZ,
						.blockDimX = blockDimX,
						.blockDimY = blockDimY,
						.blockDimZ = blockDimZ,
						.sharedMemBytes = sharedMemBytes,
						.kernelParams = kernelParams,
						.ctx = context};

	return launch(stream, &params, 1);
}
CU_TWINS(cuLaunchCooperativeKernel, cuLaunchCooperativeKernel_ptsz, launch_cooperative,
	 (CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
	  unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes,
	  CUstream hStream, void **kernelParams),
	 f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream,
	 kernelParams)

static CUresult record_events(const CUlaunchConfig *config, struct CUstream_st *stream)
{
	for (unsigned int i = 0; i < config->numAttrs; i++) {
		const CUlaunchAttribute *attribute = &config->attrs[i];
		CUevent event = NULL;

		if (attribute->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT)
			event = attribute->value.programmaticEvent.event;
		else if (attribute->id == CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT)
			event = attribute->value.launchCompletionEvent.event;
		else
			continue;
		if (!cu_is(event, CU_KIND_EVENT))
			return CUDA_ERROR_INVALID_HANDLE;
		if (stream->capture == NULL)
			cu_event_mark(event, stream);
	}
	return CUDA_SUCCESS;
}

static CUresult launch_ex(const char *name, int per_thread, const CUlaunchConfig *config, CUfunction f,
			  void **kernelParams, void **extra)
{
	CU_ENTER_AS(name, "config=%p func=%p", (const void *)config, (void *)f);
	int cooperative = 0;

	CU_NEEDS(config != NULL && (config->numAttrs == 0 || config->attrs != NULL));
	CU_STREAM(stream, context, config->hStream, per_thread);
	const CUDA_KERNEL_NODE_PARAMS params = {.func = f,
						.gridDimX = config->gridDimX,
						.gridDimY = config->gridDimY,
						.gridDimZ = config->gridDimZ,
						.blockDimX = config->blockDimX,
						.blockDimY = config->blockDimY,
						.blockDimZ = config->blockDimZ,
						.sharedMemBytes = config->sharedMemBytes,
						.kernelParams = kernelParams,
						.extra = extra,
						.ctx = context};
	CUresult result;

	for (unsigned int i = 0; i < config->numAttrs; i++)
		if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
			cooperative = config->attrs[i].value.cooperative != 0;
	result = launch(stream, &params, cooperative);
	return result == CUDA_SUCCESS && config->numAttrs > 0 ? record_events(config, stream) : result;
}
CU_TWINS(cuLaunchKernelEx, cuLaunchKernelEx_ptsz, launch_ex,
	 (const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra), config, f,
	 kernelParams, extra)

CUresult CUDAAPI cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *launchParamsList,
						      unsigned int numDevices, unsigned int flags)
{
	CU_ENTER("list=%p devices=%u flags=%u", (void *)launchParamsList, numDevices, flags);
	CU_CONTEXT(context);
	CU_NEEDS(launchParamsList != NULL && numDevices > 0 && numDevices <= (unsigned)cu_device_count &&
		 context != NULL);
	for (unsigned int i = 0; i < numDevices; i++) {
		const CUDA_LAUNCH_PARAMS *one = &launchParamsList[i];

		if (!cu_is(one->function, CU_KIND_FUNCTION) || !cu_is(one->hStream, CU_KIND_STREAM))
			return CUDA_ERROR_INVALID_HANDLE;
		for (unsigned int j = 0; j < i; j++)
			CU_NEEDS(launchParamsList[j].hStream->context->device !=
				 one->hStream->context->device);
	}
	for (unsigned int i = 0; i < numDevices; i++) {
		const CUDA_LAUNCH_PARAMS *one = &launchParamsList[i];
		const CUDA_KERNEL_NODE_PARAMS params = {.func = one->function,
							.gridDimX = one->gridDimX,
							.gridDimY = one->gridDimY,
							.gridDimZ = one->gridDimZ,
							.blockDimX = one->blockDimX,
							.blockDimY = one->blockDimY,
							.blockDimZ = one->blockDimZ,
							.sharedMemBytes = one->sharedMemBytes,
							.kernelParams = one->kernelParams};
		CUresult result = launch(one->hStream, &params, 1);

		if (result != CUDA_SUCCESS)
			return result;
	}
	return CUDA_SUCCESS;
}

/* ---- the forms of CUDA 2 ------------------------------------------------------------------------------ */

static CUresult launch_grid(CUfunction f, int width, int height, CUstream hStream)
{
	CU_STREAM(stream, context, hStream, 0);
	CU_NEEDS(width > 0 && height > 0);
	if (!cu_is(f, CU_KIND_FUNCTION))
		return CUDA_ERROR_INVALID_HANDLE;
	CU_NEEDS(f->block[0] > 0 && f->block[1] > 0 && f->block[2] > 0);
	const CUDA_KERNEL_NODE_PARAMS params = {.func = f,
						.gridDimX = (unsigned)width,
						.gridDimY = (unsigned)height,
						.gridDimZ = 1,
						.blockDimX = (unsigned)f->block[0],
						.blockDimY = (unsigned)f->block[1],
						.blockDimZ = (unsigned)f->block[2],
						.ctx = context};

	return launch(stream, &params, 0);
}

CUresult CUDAAPI cuLaunch(CUfunction f)
{
	CU_ENTER("func=%p", (void *)f);
	return launch_grid(f, 1, 1, NULL);
}

CUresult CUDAAPI cuLaunchGrid(CUfunction f, int grid_width, int grid_height)
{
	CU_ENTER("func=%p grid=%d,%d", (void *)f, grid_width, grid_height);
	return launch_grid(f, grid_width, grid_height, NULL);
}

CUresult CUDAAPI cuLaunchGridAsync(CUfunction f, int grid_width, int grid_height, CUstream hStream)
{
	CU_ENTER("func=%p grid=%d,%d stream=%p", (void *)f, grid_width, grid_height, (void *)hStream);
	return launch_grid(f, grid_width, grid_height, hStream);
}

CUresult CUDAAPI cuFuncSetBlockShape(CUfunction hfunc, int x, int y, int z)
{
	CU_ENTER("func=%p block=%d,%d,%d", (void *)hfunc, x, y, z);
	if (!cu_is(hfunc, CU_KIND_FUNCTION))
		return CUDA_ERROR_INVALID_HANDLE;
	CU_NEEDS(x > 0 && y > 0 && z > 0);
	hfunc->block[0] = x;
	hfunc->block[1] = y;
	hfunc->block[2] = z;
	return CUDA_SUCCESS;
}

/* What only says something to a kernel, which computes nothing here. */
static CUresult told(CUfunction hfunc)
{
	return cu_is(hfunc, CU_KIND_FUNCTION) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult CUDAAPI cuFuncSetSharedSize(CUfunction hfunc, unsigned int bytes)
{
	CU_ENTER("func=%p bytes=%u", (void *)hfunc, bytes);
	return told(hfunc);
}

CUresult CUDAAPI cuParamSetSize(CUfunction hfunc, unsigned int numbytes)
{
	CU_ENTER("func=%p bytes=%u", (void *)hfunc, numbytes);
	return told(hfunc);
}

CUresult CUDAAPI cuParamSeti(CUfunction hfunc, int offset, unsigned int value)
{
	CU_ENTER("func=%p offset=%d value=%u", (void *)hfunc, offset, value);
	return told(hfunc);
}

CUresult CUDAAPI cuParamSetf(CUfunction hfunc, int offset, float value)
{
	CU_ENTER("func=%p offset=%d value=%g", (void *)hfunc, offset, (double)value);
	return told(hfunc);
}

CUresult CUDAAPI cuParamSetv(CUfunction hfunc, int offset, void *ptr, unsigned int numbytes)
{
	CU_ENTER("func=%p offset=%d ptr=%p bytes=%u", (void *)hfunc, offset, ptr, numbytes);
	return told(hfunc);
}
