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

/* Two functions each: the quick way is a leaf that ends in a jump to the driver's function, with the
 * arguments where they are; everything else is in the slow one. */
#define LAUNCH(look, name, parameters, arguments, function, grid, on_stream)                            \
	static __attribute__((noinline)) CUresult slow_##name parameters                                \
	{                                                                                               \
		struct aq_launch launch = {.key = (function), .blocks = (grid), .stream = (on_stream)}; \
		CUresult result = aq_launch_begin(&launch);                                             \
		if (result == CUDA_SUCCESS) {                                                           \
			result = REAL(name) arguments;                                                  \
			aq_launch_end(&launch, result);                                                 \
		}                                                                                       \
		return result;                                                                          \
	}                                                                                               \
	OPEN_WAY(name, parameters)                                                                      \
	{                                                                                               \
		__typeof__(&hook_##name) real = QUICK_REAL(name);                                       \
		if (__builtin_expect(real != NULL, 1) && __builtin_expect(look((function), (grid)), 1)) \
			return real arguments;                                                          \
		return slow_##name arguments;                                                           \
	}

/* Where nothing limits a launch, even taking its arguments up and laying them down again costs more than the
 * whole look at the gate. So that look is written by hand, over two registers that carry no arguments. */
#ifdef __x86_64__
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define OPEN_WAY(name, parameters)                                                                         \
	static __attribute__((used)) CUresult limited_##name parameters;                                   \
	HOOK(CUresult, name, parameters);                                                                  \
	__attribute__((naked)) CUresult hook_##name parameters                                             \
	{                                                                                                  \
		__asm__("movq aq_gate(%%rip), %%rax\n\t"                                                   \
			"testq %%rax, %%rax\n\t"                                                           \
			"jz limited_" #name "\n\t"                                                         \
			"movq %c1(%%rax), %%r11\n\t"                                                       \
			"orq %c2(%%rax), %%r11\n\t"                                                        \
			"movq %c3(%%rax), %%rax\n\t"                                                       \
			"xorq %c4+aq_gate(%%rip), %%rax\n\t"                                               \
			"orq %%r11, %%rax\n\t"                                                             \
			"jnz limited_" #name "\n\t"                                                        \
			"movq %c0+aq_reals(%%rip), %%r11\n\t"                                              \
			"testq %%r11, %%r11\n\t"                                                           \
			"jz limited_" #name "\n\t"                                                         \
			"cmpl $0, %c5+aq_gate(%%rip)\n\t"                                                  \
			"je limited_" #name "\n\t"                                                         \
			"jmp *%%r11"                                                                       \
			:                                                                                  \
			: "i"(AQ_N_##name * sizeof(void *)), "i"(AQ_GATE_SUSPENDED * sizeof(uint64_t)),    \
			  "i"(AQ_GATE_HOLD * sizeof(uint64_t)), "i"(AQ_GATE_SELECTOR * sizeof(uint64_t)),  \
			  "i"(offsetof(struct aq_gate, generation)), "i"(offsetof(struct aq_gate, open))); \
	}                                                                                                  \
	static CUresult limited_##name parameters
#else
#define OPEN_WAY(name, parameters) HOOK(CUresult, name, parameters)
#endif

/* For the forms that are rarely used: the same look, once. */
static __attribute__((noinline)) bool quick_call(const void *kind, uint64_t grid)
{
	return aq_launch_quick(kind, grid);
}

/* NULL until it was called once. */
#define QUICK_REAL(name) ((__typeof__(&hook_##name))__atomic_load_n(&aq_reals[AQ_N_##name], __ATOMIC_RELAXED))

#define GRID                                                                                           \
	unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, \
	    CUstream stream

LAUNCH(aq_launch_quick, cuLaunchKernel, (CUfunction f, GRID, void **params, void **extra),
       (f, gx, gy, gz, bx, by, bz, shared, stream, params, extra), f, blocks(gx, gy, gz), stream)
LAUNCH(aq_launch_quick, cuLaunchKernel_ptsz, (CUfunction f, GRID, void **params, void **extra),
       (f, gx, gy, gz, bx, by, bz, shared, stream, params, extra), f, blocks(gx, gy, gz), own_thread(stream))
LAUNCH(quick_call, cuLaunchCooperativeKernel, (CUfunction f, GRID, void **params),
       (f, gx, gy, gz, bx, by, bz, shared, stream, params), f, blocks(gx, gy, gz), stream)
LAUNCH(quick_call, cuLaunchCooperativeKernel_ptsz, (CUfunction f, GRID, void **params),
       (f, gx, gy, gz, bx, by, bz, shared, stream, params), f, blocks(gx, gy, gz), own_thread(stream))

static uint64_t config_blocks(const CUlaunchConfig *config)
{
	return config ? blocks(config->gridDimX, config->gridDimY, config->gridDimZ) : 0;
}

LAUNCH(aq_launch_quick, cuLaunchKernelEx,
       (const CUlaunchConfig *config, CUfunction f, void **params, void **extra), (config, f, params, extra),
       f, config_blocks(config), config ? config->hStream : NULL)
LAUNCH(aq_launch_quick, cuLaunchKernelEx_ptsz,
       (const CUlaunchConfig *config, CUfunction f, void **params, void **extra), (config, f, params, extra),
       f, config_blocks(config), own_thread(config ? config->hStream : NULL))

/* Of before CUDA 4: the grid is one block, or flat; the stream NULL. */
LAUNCH(quick_call, cuLaunch, (CUfunction f), (f), f, 1, NULL)
LAUNCH(quick_call, cuLaunchGrid, (CUfunction f, int width, int height), (f, width, height), f,
       (uint64_t)width *(uint64_t)height, NULL)
LAUNCH(quick_call, cuLaunchGridAsync, (CUfunction f, int width, int height, CUstream stream),
       (f, width, height, stream), f, (uint64_t)width *(uint64_t)height, stream)

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

/* A graph may also bring memory of its own. */
static CUresult launch_graph(__typeof__(&hook_cuGraphLaunch) real, CUgraphExec exec, CUstream stream,
			     CUstream named)
{
	struct aq_graph_request memory;
	CUresult verdict = aq_graph_begin(exec, &memory);
	if (verdict != CUDA_SUCCESS)
		return verdict;
	struct aq_launch launch = {.key = exec, .stream = named};
	if (memory.count == 0 && quick_call(exec, 0))
		return real(exec, stream);
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
