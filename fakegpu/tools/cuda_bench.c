/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda-bench [ROUNDS]: what calls of the driver cost, in nanoseconds: the best and the median of 9
 * repetitions, as a table. Everything is reached through cuGetProcAddress, as the runtime does.
 */
#include <cuda.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define REPEATS 9

static CUresult (*get)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);

static void *entry(const char *name, int version)
{
	void *address = NULL;

	if (get(name, &address, version, 0, NULL) != CUDA_SUCCESS || address == NULL) {
		fprintf(stderr, "cuda-bench: the driver has no %s\n", name);
		exit(1);
	}
	return address;
}

static uint64_t now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static int compare(const void *a, const void *b)
{
	double one = *(const double *)a, other = *(const double *)b;

	return (one > other) - (one < other);
}

#define BENCH(name, rounds, ...)                                                   \
	do {                                                                       \
		double each[REPEATS];                                              \
		for (int repeat = 0; repeat < REPEATS; repeat++) {                 \
			uint64_t begin = now();                                    \
			for (long i = 0; i < (rounds); i++) {                      \
				__VA_ARGS__;                                       \
			}                                                          \
			each[repeat] = (double)(now() - begin) / (double)(rounds); \
		}                                                                  \
		qsort(each, REPEATS, sizeof each[0], compare);                     \
		printf("%-34s %9.1f %9.1f\n", name, each[0], each[REPEATS / 2]);   \
	} while (0)

#define CHECK(call)                                                                \
	do {                                                                       \
		int code_ = (int)(call);                                           \
		if (code_ != 0) {                                                  \
			fprintf(stderr, "cuda-bench: %s gave %d\n", #call, code_); \
			exit(1);                                                   \
		}                                                                  \
	} while (0)

int main(int count, char **argument)
{
	long rounds = count > 1 ? atol(argument[1]) : 200000;
	void *library = dlopen("libcuda.so.1", RTLD_NOW);

	if (library == NULL || rounds < 1) {
		fprintf(stderr, "cuda-bench: %s\n",
			library == NULL ? dlerror() : "ROUNDS must be a number above 0");
		return 1;
	}
	*(void **)&get = dlsym(library, "cuGetProcAddress_v2");
	CUresult (*init)(unsigned) = entry("cuInit", 2000);
	CUresult (*create)(CUcontext *, unsigned, CUdevice) = entry("cuCtxCreate", 3020);
	CUresult (*get_device)(CUdevice *) = entry("cuCtxGetDevice", 2000);
	CUresult (*get_info)(size_t *, size_t *) = entry("cuMemGetInfo", 3020);
	CUresult (*total)(size_t *, CUdevice) = entry("cuDeviceTotalMem", 3020);
	CUresult (*allocate)(CUdeviceptr *, size_t) = entry("cuMemAlloc", 3020);
	CUresult (*release)(CUdeviceptr) = entry("cuMemFree", 3020);
	CUresult (*allocate_async)(CUdeviceptr *, size_t, CUstream) = entry("cuMemAllocAsync", 11020);
	CUresult (*release_async)(CUdeviceptr, CUstream) = entry("cuMemFreeAsync", 11020);
	CUresult (*make)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *,
			 unsigned long long) = entry("cuMemCreate", 10020);
	CUresult (*unmake)(CUmemGenericAllocationHandle) = entry("cuMemRelease", 10020);
	CUresult (*load)(CUmodule *, const void *) = entry("cuModuleLoadData", 2000);
	CUresult (*function_of)(CUfunction *, CUmodule, const char *) = entry("cuModuleGetFunction", 2000);
	CUresult (*launch)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
			   CUstream, void **, void **) = entry("cuLaunchKernel", 4000);
	CUresult (*to_device)(CUdeviceptr, const void *, size_t, CUstream) = entry("cuMemcpyHtoDAsync", 3020);
	CUresult (*stream_sync)(CUstream) = entry("cuStreamSynchronize", 2000);
	CUresult (*event_create)(CUevent *, unsigned) = entry("cuEventCreate", 2000);
	CUresult (*event_record)(CUevent, CUstream) = entry("cuEventRecord", 2000);
	CUcontext context;
	CUmodule module;
	CUfunction function, timed;
	CUdeviceptr pointer, other;
	CUdevice device;
	CUevent event, untimed;
	CUmemGenericAllocationHandle handle;
	CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
				    .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
	size_t free_bytes, total_bytes;
	static CUdeviceptr live[10000];
	char word[8] = {0};
	void *found;

	CHECK(init(0));
	CHECK(create(&context, 0, 0));
	CHECK(load(&module, "image"));
	CHECK(function_of(&function, module, "kernel"));
	CHECK(function_of(&timed, module, "spin_ns_1"));
	CHECK(allocate(&pointer, 4096));
	CHECK(event_create(&event, 0));
	CHECK(event_create(&untimed, CU_EVENT_DISABLE_TIMING));
	CHECK(allocate_async(&other, 1 << 20, NULL));
	printf("%-34s %9s %9s\n", "ns a call", "best", "median");
	BENCH("cuCtxGetDevice", rounds, get_device(&device));
	BENCH("cuDeviceTotalMem", rounds, total(&total_bytes, 0));
	BENCH("cuMemGetInfo", rounds, get_info(&free_bytes, &total_bytes));
	BENCH("cuLaunchKernel, no length", rounds, launch(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
	BENCH("cuLaunchKernel, 1 ns", rounds, launch(timed, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
	CHECK(stream_sync(NULL));
	BENCH("cuMemcpyHtoDAsync, 8 bytes", rounds, to_device(pointer, word, sizeof word, NULL));
	BENCH("cuStreamSynchronize, idle", rounds, stream_sync(NULL));
	BENCH("cuEventRecord", rounds, event_record(event, NULL));
	BENCH("cuEventRecord, no timing", rounds, event_record(untimed, NULL));
	BENCH("cuMemAlloc + cuMemFree, 512 B", rounds, allocate(&pointer, 512); release(pointer));
	BENCH("cuMemAlloc + cuMemFree, 1 MiB", rounds, allocate(&pointer, 1 << 20); release(pointer));
	BENCH("cuMemAlloc + cuMemFree, 64 MiB", rounds, allocate(&pointer, 64 << 20); release(pointer));
	BENCH("cuMemAllocAsync + cuMemFreeAsync", rounds, allocate_async(&other, 1 << 16, NULL);
	      release_async(other, NULL));
	BENCH("cuMemCreate + cuMemRelease", rounds, make(&handle, 2 << 20, &prop, 0); unmake(handle));
	BENCH("cuGetProcAddress", rounds, get("cuMemAlloc", &found, 13000, 0, NULL));
	BENCH("cuGetProcAddress, no such name", rounds, get("cuNoSuchName", &found, 13000, 0, NULL));
	for (size_t i = 0; i < sizeof live / sizeof live[0]; i++)
		CHECK(allocate(&live[i], 4096));
	BENCH("cuMemAlloc + cuMemFree, 10,000 live", rounds, allocate(&pointer, 4096); release(pointer));
	return 0;
}
