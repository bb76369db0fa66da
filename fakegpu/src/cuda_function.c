/* SPDX-License-Identifier: Apache-2.0
 *
 * Functions: attributes, names, and how many blocks of one fit on a multiprocessor.
 */
#include "cuda_module.h"
#include "cuda_parts.h"

#define FUNCTION(handle) CU_NEEDS_HANDLE(cu_is(handle, CU_KIND_FUNCTION))
#define CU_NEEDS_HANDLE(condition)                        \
	do {                                              \
		if (!(condition))                         \
			return CUDA_ERROR_INVALID_HANDLE; \
	} while (0)

CUresult cu_function_set(struct CUfunc_st *function, CUfunction_attribute attribute, int value)
{
	const struct fg_card_config *config = &function->module->context->device->shared->config;

	switch (attribute) {
	case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
		CU_NEEDS(value >= 0 && (unsigned)value <= config->shared_per_block_optin);
		break;
	case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
		CU_NEEDS(value >= -1 && value <= 100);
		break;
	case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
	case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
	case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
	case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
	case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
		break;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
	function->attribute[attribute] = value;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncGetAttribute(int *pi, CUfunction_attribute attrib, CUfunction hfunc)
{
	CU_ENTER("pi=%p attrib=%d func=%p", (void *)pi, (int)attrib, (void *)hfunc);
	CU_NEEDS(pi != NULL && (unsigned)attrib < CU_FUNC_ATTRIBUTE_MAX);
	struct CUctx_st *context = cu_thread()->current;
	const struct CUfunc_st *function =
	    context != NULL || cu_is(hfunc, CU_KIND_FUNCTION) ? cu_function_of(hfunc, context) : NULL;

	CU_NEEDS_HANDLE(function != NULL);
	*pi = function->attribute[attrib];
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncSetAttribute(CUfunction hfunc, CUfunction_attribute attrib, int value)
{
	CU_ENTER("func=%p attrib=%d value=%d", (void *)hfunc, (int)attrib, value);
	CU_NEEDS((unsigned)attrib < CU_FUNC_ATTRIBUTE_MAX);
	FUNCTION(hfunc);
	return cu_function_set(hfunc, attrib, value);
}

CUresult CUDAAPI cuFuncSetCacheConfig(CUfunction hfunc, CUfunc_cache config)
{
	CU_ENTER("func=%p config=%d", (void *)hfunc, (int)config);
	FUNCTION(hfunc);
	hfunc->cache_config = config;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncSetSharedMemConfig(CUfunction hfunc, CUsharedconfig config)
{
	CU_ENTER("func=%p config=%d", (void *)hfunc, (int)config);
	FUNCTION(hfunc);
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncGetModule(CUmodule *hmod, CUfunction hfunc)
{
	CU_ENTER("hmod=%p func=%p", (void *)hmod, (void *)hfunc);
	CU_NEEDS(hmod != NULL);
	FUNCTION(hfunc);
	*hmod = hfunc->module;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncGetName(const char **name, CUfunction hfunc)
{
	CU_ENTER("name=%p func=%p", (void *)name, (void *)hfunc);
	CU_NEEDS(name != NULL);
	FUNCTION(hfunc);
	*name = hfunc->name;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncGetParamInfo(CUfunction func, size_t paramIndex, size_t *paramOffset,
				    size_t *paramSize)
{
	CU_ENTER("func=%p index=%zu offset=%p size=%p", (void *)func, paramIndex, (void *)paramOffset,
		 (void *)paramSize);
	FUNCTION(func);
	return CUDA_ERROR_INVALID_VALUE; /* images are not read: no parameters */
}

CUresult CUDAAPI cuFuncGetParamCount(CUfunction func, size_t *paramCount)
{
	CU_ENTER("func=%p count=%p", (void *)func, (void *)paramCount);
	CU_NEEDS(paramCount != NULL);
	FUNCTION(func);
	*paramCount = 0;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncIsLoaded(CUfunctionLoadingState *state, CUfunction function)
{
	CU_ENTER("state=%p func=%p", (void *)state, (void *)function);
	CU_NEEDS(state != NULL);
	FUNCTION(function);
	*state = CU_FUNCTION_LOADING_STATE_LOADED;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncLoad(CUfunction function)
{
	CU_ENTER("func=%p", (void *)function);
	FUNCTION(function);
	return CUDA_SUCCESS;
}

/* ---- occupancy ---------------------------------------------------------------------------------------- */

static int blocks_that_fit(const struct CUfunc_st *function, int block_size, size_t shared)
{
	const struct fg_card_config *config = &function->module->context->device->shared->config;
	uint64_t warps = ((uint64_t)block_size + 31) / 32,
		 registers = (uint64_t)function->attribute[CU_FUNC_ATTRIBUTE_NUM_REGS];
	uint64_t fit = config->threads_per_sm / 32 / warps;
	uint64_t by_registers = 65536 / (registers * 32 * warps);
	uint64_t bytes = shared + (uint64_t)function->attribute[CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES] +
			 (config->cc_major >= 8 ? 1024 : 0);

	if (fit > by_registers)
		fit = by_registers;
	if (bytes > 0 && fit > config->shared_per_sm / bytes)
		fit = config->shared_per_sm / bytes;
	if (fit > config->blocks_per_sm)
		fit = config->blocks_per_sm;
	return (int)fit;
}

static CUresult active_blocks(int *numBlocks, CUfunction func, int blockSize, size_t shared)
{
	const struct CUfunc_st *function = cu_function_of(func, cu_thread()->current);

	CU_NEEDS(numBlocks != NULL && blockSize > 0);
	CU_NEEDS_HANDLE(function != NULL);
	*numBlocks = blockSize <= function->attribute[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK]
			 ? blocks_that_fit(function, blockSize, shared)
			 : 0;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuOccupancyMaxActiveBlocksPerMultiprocessor(int *numBlocks, CUfunction func, int blockSize,
							     size_t dynamicSMemSize)
{
	CU_ENTER("func=%p blockSize=%d shared=%zu", (void *)func, blockSize, dynamicSMemSize);
	CU_CONTEXT(context);
	return context != NULL ? active_blocks(numBlocks, func, blockSize, dynamicSMemSize)
			       : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult CUDAAPI cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *numBlocks, CUfunction func,
								      int blockSize, size_t dynamicSMemSize,
								      unsigned int flags)
{
	CU_ENTER("func=%p blockSize=%d shared=%zu flags=%u", (void *)func, blockSize, dynamicSMemSize, flags);
	CU_CONTEXT(context);
	CU_NEEDS(flags <= 1 && context != NULL);
	return active_blocks(numBlocks, func, blockSize, dynamicSMemSize);
}

static CUresult potential(int *minGridSize, int *blockSize, CUfunction func, CUoccupancyB2DSize shared_of,
			  size_t shared, int limit)
{
	CU_CONTEXT(context);
	const struct CUfunc_st *function = cu_function_of(func, context);
	int best = 0, best_threads = 0, best_blocks = 0;

	CU_NEEDS(minGridSize != NULL && blockSize != NULL);
	CU_NEEDS_HANDLE(function != NULL);
	if (limit <= 0 || limit > function->attribute[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK])
		limit = function->attribute[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK];
	for (int size = limit / 32 * 32; size > 0; size -= 32) {
		int blocks = blocks_that_fit(function, size, shared_of != NULL ? shared_of(size) : shared);

		if (blocks * size > best_threads) {
			best = size;
			best_blocks = blocks;
			best_threads = blocks * size;
		}
	}
	*blockSize = best;
	*minGridSize = best_blocks * cu_attribute(context->device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuOccupancyMaxPotentialBlockSize(int *minGridSize, int *blockSize, CUfunction func,
						  CUoccupancyB2DSize blockSizeToDynamicSMemSize,
						  size_t dynamicSMemSize, int blockSizeLimit)
{
	CU_ENTER("func=%p shared=%zu limit=%d", (void *)func, dynamicSMemSize, blockSizeLimit);
	return potential(minGridSize, blockSize, func, blockSizeToDynamicSMemSize, dynamicSMemSize,
			 blockSizeLimit);
}

CUresult CUDAAPI cuOccupancyMaxPotentialBlockSizeWithFlags(int *minGridSize, int *blockSize, CUfunction func,
							   CUoccupancyB2DSize blockSizeToDynamicSMemSize,
							   size_t dynamicSMemSize, int blockSizeLimit,
							   unsigned int flags)
{
	CU_ENTER("func=%p shared=%zu limit=%d flags=%u", (void *)func, dynamicSMemSize, blockSizeLimit,
		 flags);
	CU_NEEDS(flags <= 1);
	return potential(minGridSize, blockSize, func, blockSizeToDynamicSMemSize, dynamicSMemSize,
			 blockSizeLimit);
}

CUresult CUDAAPI cuOccupancyAvailableDynamicSMemPerBlock(size_t *dynamicSmemSize, CUfunction func,
							 int numBlocks, int blockSize)
{
	CU_ENTER("func=%p blocks=%d blockSize=%d", (void *)func, numBlocks, blockSize);
	CU_CONTEXT(context);
	const struct fg_card_config *config = &context->device->shared->config;
	size_t each;

	CU_NEEDS(dynamicSmemSize != NULL && numBlocks > 0 && blockSize > 0);
	CU_NEEDS_HANDLE(cu_function_of(func, context) != NULL);
	each = config->shared_per_sm / (unsigned)numBlocks;
	each -= config->cc_major >= 8 && each >= 1024 ? 1024 : 0;
	*dynamicSmemSize = each < config->shared_per_block_optin ? each : config->shared_per_block_optin;
	return CUDA_SUCCESS;
}

static CUresult clusters(int *answer, CUfunction func, const CUlaunchConfig *config, int value)
{
	CU_CONTEXT(context);
	CU_NEEDS(answer != NULL && config != NULL);
	CU_NEEDS_HANDLE(cu_function_of(func, context) != NULL);
	if (context->device->shared->config.cc_major < 9)
		return CUDA_ERROR_NOT_SUPPORTED;
	*answer = value;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuOccupancyMaxPotentialClusterSize(int *clusterSize, CUfunction func,
						    const CUlaunchConfig *config)
{
	CU_ENTER("func=%p config=%p", (void *)func, (const void *)config);
	return clusters(clusterSize, func, config, 8);
}

CUresult CUDAAPI cuOccupancyMaxActiveClusters(int *numClusters, CUfunction func, const CUlaunchConfig *config)
{
	CU_ENTER("func=%p config=%p", (void *)func, (const void *)config);
	const struct CUctx_st *context = cu_thread()->current;

	return clusters(numClusters, func, config,
			context != NULL ? (int)context->device->shared->config.sm_count / 2 : 0);
}
