/* SPDX-License-Identifier: Apache-2.0
 *
 * The driver as cuda-probe sees it: pointers to its functions, found in the way that was asked for.
 */
#ifndef FAKEGPU_PROBE_DRIVER_H
#define FAKEGPU_PROBE_DRIVER_H

#include <stddef.h>
#include <stdint.h>

typedef struct context *context_t;
typedef uint64_t address_t;

/* Name, symbol that stands for it today, parameters, the CUDA version that it came with. */
#define PROBE_FUNCTIONS(F)                                                                                  \
	F(cuInit, cuInit, (unsigned int), 2000)                                                             \
	F(cuDriverGetVersion, cuDriverGetVersion, (int *), 2020)                                            \
	F(cuDeviceGetCount, cuDeviceGetCount, (int *), 2000)                                                \
	F(cuDeviceGetName, cuDeviceGetName, (char *, int, int), 2000)                                       \
	F(cuDeviceGetUuid, cuDeviceGetUuid, (unsigned char *, int), 9020)                                   \
	F(cuDeviceTotalMem, cuDeviceTotalMem_v2, (size_t *, int), 3020)                                     \
	F(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (context_t *, int), 7000)                     \
	F(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, (int), 11000)                            \
	F(cuCtxSetCurrent, cuCtxSetCurrent, (context_t), 4000)                                              \
	F(cuCtxSynchronize, cuCtxSynchronize, (void), 2000)                                                 \
	F(cuMemGetInfo, cuMemGetInfo_v2, (size_t *, size_t *), 3020)                                        \
	F(cuMemAlloc, cuMemAlloc_v2, (address_t *, size_t), 3020)                                           \
	F(cuMemFree, cuMemFree_v2, (address_t), 3020)                                                       \
	F(cuMemAllocPitch, cuMemAllocPitch_v2, (address_t *, size_t *, size_t, size_t, unsigned int), 3020) \
	F(cuMemAllocManaged, cuMemAllocManaged, (address_t *, size_t, unsigned int), 6000)                  \
	F(cuMemHostAlloc, cuMemHostAlloc, (void **, size_t, unsigned int), 2020)                            \
	F(cuMemFreeHost, cuMemFreeHost, (void *), 2000)                                                     \
	F(cuMemAllocAsync, cuMemAllocAsync, (address_t *, size_t, void *), 11020)                           \
	F(cuMemFreeAsync, cuMemFreeAsync, (address_t, void *), 11020)                                       \
	F(cuMemCreate, cuMemCreate, (address_t *, size_t, const void *, unsigned long long), 10020)         \
	F(cuMemRelease, cuMemRelease, (address_t), 10020)                                                   \
	F(cuArrayCreate, cuArrayCreate_v2, (void **, const void *), 3020)                                   \
	F(cuArrayDestroy, cuArrayDestroy, (void *), 2000)                                                   \
	F(cuMemcpyHtoD, cuMemcpyHtoD_v2, (address_t, const void *, size_t), 3020)                           \
	F(cuMemcpyDtoH, cuMemcpyDtoH_v2, (void *, address_t, size_t), 3020)                                 \
	F(cuModuleLoadData, cuModuleLoadData, (void **, const void *), 2000)                                \
	F(cuModuleGetFunction, cuModuleGetFunction, (void **, void *, const char *), 2000)                  \
	F(cuLaunchKernel, cuLaunchKernel,                                                                   \
	  (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,   \
	   void **),                                                                                        \
	  4000)                                                                                             \
	F(cuGraphCreate, cuGraphCreate, (void **, unsigned int), 10000)                                     \
	F(cuGraphAddKernelNode, cuGraphAddKernelNode_v2,                                                    \
	  (void **, void *, void *const *, size_t, const void *), 12000)                                    \
	F(cuGraphInstantiateWithFlags, cuGraphInstantiateWithFlags, (void **, void *, unsigned long long),  \
	  11040)                                                                                            \
	F(cuGraphLaunch, cuGraphLaunch, (void *, void *), 10000)

#define PROBE_DECLARE(name, symbol, parameters, version) extern int(*call_##name) parameters;
PROBE_FUNCTIONS(PROBE_DECLARE)

/* 500 (not found) for a function that the driver does not have. */
#define CALL(name, ...) (call_##name != NULL ? call_##name(__VA_ARGS__) : 500)

enum probe_way { WAY_HANDLE, WAY_DEFAULT, WAY_NEXT, WAY_PROC, WAY_PROC2, WAY_LINK };

/* Fills the pointers; -1 when there is no driver, with one line on stderr. */
int probe_find(enum probe_way way);

#endif
