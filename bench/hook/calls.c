/* SPDX-License-Identifier: Apache-2.0
 *
 * What the driver's calls cost: ns per call of each kind, the median of short rounds. Run with the hook in
 * front and without; the difference is the hook's. Prints one line of JSON.
 *
 *   calls all [LIVE]   every kind, with LIVE allocations held meanwhile (10,000 when not given)
 *   calls start        a context and one allocation, then ends (for starts.c)
 *   calls idle         the same, then waits for the end of its input
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define ROUNDS 31

typedef int (*launch_fn)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
			 void **, void **);
static void *cuda, *nvml;
static int (*get_proc)(const char *, void **, int, uint64_t, int *);

static uint64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void check(int rc, const char *what)
{
	if (rc != 0) {
		fprintf(stderr, "calls: %s: %d\n", what, rc);
		exit(3);
	}
}

/* As the runtime finds them. */
static void *entry(const char *name)
{
	void *found = NULL;
	int status = 0;
	check(get_proc(name, &found, 12080, 0, &status), name);
	return found;
}

static int order(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

static const char *separator = "{";

#define MEASURE(name, times, body)                                               \
	do {                                                                     \
		double cost_[ROUNDS];                                            \
		for (int round_ = -3; round_ < ROUNDS; round_++) {               \
			uint64_t from_ = now();                                  \
			for (int i_ = 0; i_ < (times); i_++) {                   \
				body;                                            \
			}                                                        \
			uint64_t to_ = now();                                    \
			if (round_ >= 0)                                         \
				cost_[round_] = (double)(to_ - from_) / (times); \
		}                                                                \
		qsort(cost_, ROUNDS, sizeof(double), order);                     \
		printf("%s\"%s\": %.2f", separator, name, cost_[ROUNDS / 2]);    \
		separator = ", ";                                                \
	} while (0)

static void *context, *function;

static void start(void)
{
	void *module;
	cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
	if (cuda == NULL) {
		fprintf(stderr, "calls: %s\n", dlerror());
		exit(2);
	}
	*(void **)&get_proc = dlsym(cuda, "cuGetProcAddress_v2");
	check(((int (*)(unsigned))entry("cuInit"))(0), "cuInit");
	check(((int (*)(void **, unsigned, int))dlsym(cuda, "cuCtxCreate_v2"))(&context, 0, 0),
	      "cuCtxCreate");
	check(((int (*)(void **, const void *))entry("cuModuleLoadData"))(&module, "calls"),
	      "cuModuleLoadData");
	check(((int (*)(void **, void *, const char *))entry("cuModuleGetFunction"))(&function, module,
										     "spin_ns_0"),
	      "cuModuleGetFunction");
}

static void all(int live)
{
	int (*device)(int *) = (int (*)(int *))entry("cuCtxGetDevice");
	launch_fn launch = (launch_fn)entry("cuLaunchKernel");
	int (*alloc)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))entry("cuMemAlloc");
	int (*release)(uint64_t) = (int (*)(uint64_t))entry("cuMemFree");
	int (*info)(size_t *, size_t *) = (int (*)(size_t *, size_t *))entry("cuMemGetInfo");
	int (*synchronize)(void) = (int (*)(void))entry("cuCtxSynchronize");
	int number, status;
	size_t free_bytes, total_bytes;
	uint64_t address;
	void *found, *handle;

	MEASURE("pass", 20000, device(&number));
	MEASURE("launch", 20000, launch(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
	check(synchronize(), "synchronize");
	MEASURE("alloc_free", 4000, if (alloc(&address, 4096) == 0) release(address));
	MEASURE("memory_info", 4000, info(&free_bytes, &total_bytes));
	MEASURE("look_up", 4000, get_proc("cuMemAlloc", &found, 12080, 0, &status));
	MEASURE("look_up_other", 4000, get_proc("cuCtxGetDevice", &found, 12080, 0, &status));
	MEASURE("dlsym", 4000, found = dlsym(cuda, "cuMemAlloc_v2"));
	MEASURE("dlsym_other", 4000, found = dlsym(cuda, "cuCtxGetDevice"));
	nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
	if (nvml && ((int (*)(void))dlsym(nvml, "nvmlInit_v2"))() == 0 &&
	    ((int (*)(unsigned, void **))dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2"))(0, &handle) == 0) {
		int (*memory)(void *, uint64_t *) =
		    (int (*)(void *, uint64_t *))dlsym(nvml, "nvmlDeviceGetMemoryInfo");
		uint64_t figures[3];
		MEASURE("nvml_memory", 2000, memory(handle, figures));
	}
	for (int i = 0; i < live; i++)
		check(alloc(&address, 512), "alloc");
	MEASURE("alloc_free_live", 4000, if (alloc(&address, 4096) == 0) release(address));
	puts("}");
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "all";
	uint64_t address;
	start();
	if (strcmp(what, "all") == 0) {
		all(argc > 2 ? atoi(argv[2]) : 10000);
		return 0;
	}
	check(((int (*)(uint64_t *, size_t))entry("cuMemAlloc"))(&address, 1 << 20), "cuMemAlloc");
	if (strcmp(what, "idle") == 0) {
		char byte;
		puts("ready");
		fflush(stdout);
		while (read(0, &byte, 1) > 0)
			;
	}
	return 0;
}
