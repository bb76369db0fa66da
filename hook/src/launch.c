/* SPDX-License-Identifier: Apache-2.0
 *
 * Every way to start work on a card. Each is one call of the limiter around one call of the driver.
 */
#include "graph.h"
#include "limiter.h"
#include "resolve.h"

static uint64_t blocks(unsigned x, unsigned y, unsigned z)
{
	return (uint64_t)x * y * z;
}

/* The default stream of the `_ptsz` functions, as the others name it. */
static CUstream own_thread(CUstream stream)
{
	return stream ? stream : CU_STREAM_PER_THREAD;
}

#define LAUNCH(function, grid, on_stream, call)                         \
	struct aq_launch launch = {.key = (function), .blocks = (grid), .stream = (on_stream)}; \
	CUresult result = aq_launch_begin(&launch);                     \
	if (result == CUDA_SUCCESS) {                                   \
		result = call;                                          \
		aq_launch_end(&launch, result);                         \
	}                                                               \
	return result

HOOK(CUresult, cuLaunchKernel,
     (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
      unsigned shared, CUstream stream, void **params, void **extra))
{
	LAUNCH(f, blocks(gx, gy, gz), stream,
	       REAL(cuLaunchKernel)(f, gx, gy, gz, bx, by, bz, shared, stream, params, extra));
}

HOOK(CUresult, cuLaunchKernel_ptsz,
     (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
      unsigned shared, CUstream stream, void **params, void **extra))
{
	LAUNCH(f, blocks(gx, gy, gz), own_thread(stream),
	       REAL(cuLaunchKernel_ptsz)(f, gx, gy, gz, bx, by, bz, shared, stream, params, extra));
}

HOOK(CUresult, cuLaunchKernelEx, (const CUlaunchConfig *config, CUfunction f, void **params, void **extra))
{
	LAUNCH(f, config ? blocks(config->gridDimX, config->gridDimY, config->gridDimZ) : 0,
	       config ? config->hStream : NULL, REAL(cuLaunchKernelEx)(config, f, params, extra));
}

HOOK(CUresult, cuLaunchKernelEx_ptsz,
     (const CUlaunchConfig *config, CUfunction f, void **params, void **extra))
{
	LAUNCH(f, config ? blocks(config->gridDimX, config->gridDimY, config->gridDimZ) : 0,
	       own_thread(config ? config->hStream : NULL),
	       REAL(cuLaunchKernelEx_ptsz)(config, f, params, extra));
}

HOOK(CUresult, cuLaunchCooperativeKernel,
     (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
      unsigned shared, CUstream stream, void **params))
{
	LAUNCH(f, blocks(gx, gy, gz), stream,
	       REAL(cuLaunchCooperativeKernel)(f, gx, gy, gz, bx, by, bz, shared, stream, params));
}

HOOK(CUresult, cuLaunchCooperativeKernel_ptsz,
     (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
      unsigned shared, CUstream stream, void **params))
{
	LAUNCH(f, blocks(gx, gy, gz), own_thread(stream),
	       REAL(cuLaunchCooperativeKernel_ptsz)(f, gx, gy, gz, bx, by, bz, shared, stream, params));
}

HOOK(CUresult, cuLaunchCooperativeKernelMultiDevice,
     (CUDA_LAUNCH_PARAMS * list, unsigned count, unsigned flags))
{
	struct aq_launch launch[AQ_MAX_CARDS];
	unsigned begun = 0;
	CUresult result = CUDA_SUCCESS;
	/* Each device pays for its part. A list that no driver takes is the driver's to refuse. */
	for (; list && count <= AQ_MAX_CARDS && begun < count && result == CUDA_SUCCESS; begun++) {
		const CUDA_LAUNCH_PARAMS *part = &list[begun];
		launch[begun] = (struct aq_launch){
		    .key = part->function,
		    .blocks = blocks(part->gridDimX, part->gridDimY, part->gridDimZ),
		    .stream = part->hStream,
		};
		result = aq_launch_begin(&launch[begun]);
	}
	if (result == CUDA_SUCCESS)
		result = REAL(cuLaunchCooperativeKernelMultiDevice)(list, count, flags);
	while (begun-- > 0)
		aq_launch_end(&launch[begun], result);
	return result;
}

HOOK(CUresult, cuLaunch, (CUfunction f))
{
	LAUNCH(f, 1, NULL, REAL(cuLaunch)(f));
}

HOOK(CUresult, cuLaunchGrid, (CUfunction f, int width, int height))
{
	LAUNCH(f, (uint64_t)width * (uint64_t)height, NULL, REAL(cuLaunchGrid)(f, width, height));
}

HOOK(CUresult, cuLaunchGridAsync, (CUfunction f, int width, int height, CUstream stream))
{
	LAUNCH(f, (uint64_t)width * (uint64_t)height, stream,
	       REAL(cuLaunchGridAsync)(f, width, height, stream));
}

/* A graph may also bring memory of its own. */
static CUresult launch_graph(__typeof__(&hook_cuGraphLaunch) real, CUgraphExec exec, CUstream stream,
			     CUstream named)
{
	struct aq_graph_request memory;
	CUresult verdict = aq_graph_begin(exec, &memory);
	if (verdict != CUDA_SUCCESS)
		return verdict;
	struct aq_launch launch = {.key = exec, .stream = named};
	verdict = aq_launch_begin(&launch);
	if (verdict == CUDA_SUCCESS) {
		verdict = real(exec, stream);
		aq_launch_end(&launch, verdict);
	}
	aq_graph_end(&memory);
	return verdict;
}

HOOK(CUresult, cuGraphLaunch, (CUgraphExec exec, CUstream stream))
{
	return launch_graph(REAL(cuGraphLaunch), exec, stream, stream);
}

HOOK(CUresult, cuGraphLaunch_ptsz, (CUgraphExec exec, CUstream stream))
{
	return launch_graph(REAL(cuGraphLaunch_ptsz), exec, stream, own_thread(stream));
}
