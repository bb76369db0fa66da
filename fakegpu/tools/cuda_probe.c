/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda-probe [--way WAY] COMMAND…: a small CUDA program that does what it is told and prints one JSON line
 * for each step.
 *
 * It finds the driver's functions in one of the ways programs use, so that whoever stands between program and
 * driver is tested with all of them. Needs nothing but libc; the driver is loaded when it runs
 * (cuda-probe-linked, the same source, is linked to it). It never decides: codes are printed as they come,
 * and the exit status is 0 unless it could not do a step at all.
 *
 * WAY: handle (dlopen and dlsym; the default), default (dlsym with RTLD_DEFAULT), next (RTLD_NEXT), proc
 * (cuGetProcAddress), proc2 (cuGetProcAddress_v2), link (cuda-probe-linked only).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "probe_driver.h"

static const char *const way_names[] = {"handle", "default", "next", "proc", "proc2", "link", NULL};
static const char usage[] =
    "usage: cuda-probe [--way handle|default|next|proc|proc2|link] COMMAND…\n"
    "  info                  every device: UUID, name, total and free by CUDA and by NVML\n"
    "  device:N              use device N's primary context (device:0 is the first step of its own accord)\n"
    "  alloc:SIZE[:KIND]     KIND: mem managed async vmm array host; SIZE like 512M, 1G, 4096\n"
    "  pitch:WIDTH:HEIGHT    cuMemAllocPitch\n"
    "  free:I                the I-th allocation, counted from 0\n"
    "  getinfo               cuMemGetInfo and cuDeviceTotalMem\n"
    "  copy:I                writes into allocation I and reads it back\n"
    "  spin:US[:COUNT]       launches COUNT kernels of US microseconds\n"
    "  graph:US:NODES:COUNT  launches a graph of NODES kernels COUNT times\n"
    "  sync                  cuCtxSynchronize\n"
    "  load:US:MS            kernels of US microseconds, each waited for, for MS milliseconds: how many were "
    "done\n"
    "  sleep:MS              sleeps\n"
    "  wait                  waits for a line on standard input\n";

/* ---- steps -------------------------------------------------------------------------------------------- */

enum kind { KIND_MEM, KIND_MANAGED, KIND_ASYNC, KIND_VMM, KIND_ARRAY, KIND_HOST };
static const char *const kind_names[] = {"mem", "managed", "async", "vmm", "array", "host", NULL};

static struct {
	enum kind kind;
	address_t address;
	size_t size;
} allocs[65536];
static size_t alloc_count;
static int device;
static context_t context;

static int index_of(const char *const *names, const char *name)
{
	for (int i = 0; names[i] != NULL; i++)
		if (strcmp(names[i], name) == 0)
			return i;
	fprintf(stderr, "cuda-probe: \"%s\" is not known\n%s", name, usage);
	exit(2);
}

static uint64_t number(const char *text)
{
	char *end;
	uint64_t value = strtoull(text, &end, 0);
	static const char suffixes[] = "KMGT";
	const char *suffix = *end != '\0' ? strchr(suffixes, *end) : NULL;

	if (end == text || (*end != '\0' && (suffix == NULL || end[1] != '\0'))) {
		fprintf(stderr, "cuda-probe: \"%s\" is no number\n", text);
		exit(2);
	}
	return suffix != NULL ? value << (10 * (suffix - suffixes + 1)) : value;
}

static void use_device(int wanted)
{
	int code = CALL(cuDevicePrimaryCtxRetain, &context, wanted);

	if (code == 0)
		code = CALL(cuCtxSetCurrent, context);
	device = wanted;
	if (code != 0)
		printf("{\"op\":\"device\",\"device\":%d,\"code\":%d}\n", wanted, code);
}

static int create_handle(address_t *handle, size_t size)
{
	struct {
		int type, handle_types, location_type, location_id;
		void *win32;
		unsigned char flags[8];
	} prop = {1, 0, 1, device, NULL, {0}};

	return CALL(cuMemCreate, handle, size, &prop, 0);
}

static int create_array(void **array, size_t size)
{
	const struct {
		size_t width, height;
		int format;
		unsigned channels;
	} descriptor = {size, 0, 1, 1};

	return CALL(cuArrayCreate, array, &descriptor);
}

static void allocate(size_t size, enum kind kind)
{
	address_t address = 0;
	void *pointer = NULL;
	int code = 0;

	switch (kind) {
	case KIND_MEM:
		code = CALL(cuMemAlloc, &address, size);
		break;
	case KIND_MANAGED:
		code = CALL(cuMemAllocManaged, &address, size, 1);
		break;
	case KIND_ASYNC:
		code = CALL(cuMemAllocAsync, &address, size, NULL);
		break;
	case KIND_VMM:
		code = create_handle(&address, size);
		break;
	case KIND_ARRAY:
		code = create_array(&pointer, size);
		break;
	case KIND_HOST:
		code = CALL(cuMemHostAlloc, &pointer, size, 0);
		break;
	}
	if (pointer != NULL)
		address = (address_t)(uintptr_t)pointer;
	printf("{\"op\":\"alloc\",\"kind\":\"%s\",\"size\":%zu,\"code\":%d,\"index\":%zu}\n",
	       kind_names[kind], size, code, alloc_count);
	if (code == 0 && alloc_count < sizeof allocs / sizeof allocs[0]) {
		allocs[alloc_count].kind = kind;
		allocs[alloc_count].address = address;
		allocs[alloc_count++].size = size;
	}
}

static void allocate_pitch(size_t width, size_t height)
{
	address_t address = 0;
	size_t pitch = 0;
	int code = CALL(cuMemAllocPitch, &address, &pitch, width, height, 4);

	printf("{\"op\":\"pitch\",\"width\":%zu,\"height\":%zu,\"pitch\":%zu,\"code\":%d,\"index\":%zu}\n",
	       width, height, pitch, code, alloc_count);
	if (code == 0) {
		allocs[alloc_count].kind = KIND_MEM;
		allocs[alloc_count].address = address;
		allocs[alloc_count++].size = pitch * height;
	}
}

static void release(size_t index)
{
	void *pointer = index < alloc_count ? (void *)(uintptr_t)allocs[index].address : NULL;
	int code = 1;

	if (index < alloc_count)
		switch (allocs[index].kind) {
		case KIND_MEM:
		case KIND_MANAGED:
			code = CALL(cuMemFree, allocs[index].address);
			break;
		case KIND_ASYNC:
			code = CALL(cuMemFreeAsync, allocs[index].address, NULL);
			break;
		case KIND_VMM:
			code = CALL(cuMemRelease, allocs[index].address);
			break;
		case KIND_ARRAY:
			code = CALL(cuArrayDestroy, pointer);
			break;
		case KIND_HOST:
			code = CALL(cuMemFreeHost, pointer);
			break;
		}
	printf("{\"op\":\"free\",\"index\":%zu,\"code\":%d}\n", index, code);
}

static void copy(size_t index)
{
	char out[256], in[256] = {0};
	int code = 1, same;

	for (size_t i = 0; i < sizeof out; i++)
		out[i] = (char)(i * 7 + 1);
	if (index < alloc_count && allocs[index].size >= sizeof out) {
		code = CALL(cuMemcpyHtoD, allocs[index].address, out, sizeof out);
		if (code == 0)
			code = CALL(cuMemcpyDtoH, in, allocs[index].address, sizeof in);
	}
	same = memcmp(in, out, sizeof in) == 0;
	printf("{\"op\":\"copy\",\"index\":%zu,\"code\":%d,\"same\":%s}\n", index, code,
	       same ? "true" : "false");
}

static void get_info(void)
{
	size_t free_bytes = 0, total = 0, device_total = 0;
	int code = CALL(cuMemGetInfo, &free_bytes, &total),
	    total_code = CALL(cuDeviceTotalMem, &device_total, device);

	printf("{\"op\":\"getinfo\",\"code\":%d,\"free\":%zu,\"total\":%zu,\"device_total\":%zu,\"device_"
	       "total_code\":%d}\n",
	       code, free_bytes, total, device_total, total_code);
}

/* ---- what NVML says, where it is there ---------------------------------------------------------------- */

static void nvml_memory(const char *uuid, uint64_t memory[3], int *code)
{
	static void *nvml;
	int (*init)(void), (*by_uuid)(const char *, void **), (*info)(void *, uint64_t *);
	void *handle = NULL;

	*code = -1;
	if (nvml == NULL)
		nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
	if (nvml == NULL)
		return;
	*(void **)&init = dlsym(nvml, "nvmlInit_v2");
	*(void **)&by_uuid = dlsym(nvml, "nvmlDeviceGetHandleByUUID");
	*(void **)&info = dlsym(nvml, "nvmlDeviceGetMemoryInfo");
	*code = init != NULL ? init() : -1;
	if (*code == 0)
		*code = by_uuid(uuid, &handle);
	if (*code == 0)
		*code = info(handle, memory);
}

static void tell_device(int index)
{
	unsigned char uuid[16] = {0};
	char name[256] = "", text[48];
	size_t total = 0, free_bytes = 0, all = 0;
	uint64_t memory[3] = {0};
	int codes[4], nvml_code;
	int before = device;

	codes[0] = CALL(cuDeviceGetUuid, uuid, index);
	codes[1] = CALL(cuDeviceGetName, name, (int)sizeof name, index);
	codes[2] = CALL(cuDeviceTotalMem, &total, index);
	use_device(index);
	codes[3] = CALL(cuMemGetInfo, &free_bytes, &all);
	CALL(cuDevicePrimaryCtxRelease, index);
	use_device(before);
	CALL(cuDevicePrimaryCtxRelease, before);
	snprintf(text, sizeof text,
		 "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", uuid[0], uuid[1],
		 uuid[2], uuid[3], uuid[4], uuid[5], uuid[6], uuid[7], uuid[8], uuid[9], uuid[10], uuid[11],
		 uuid[12], uuid[13], uuid[14], uuid[15]);
	nvml_memory(text, memory, &nvml_code);
	printf("{\"op\":\"info\",\"device\":%d,\"uuid\":\"%s\",\"name\":\"%s\",\"device_total\":%zu,\"free\":"
	       "%zu,"
	       "\"total\":%zu,\"nvml_code\":%d,\"nvml_total\":%" PRIu64 ",\"nvml_free\":%" PRIu64
	       ",\"nvml_used\":%" PRIu64 ",\"codes\":[%d,%d,%d,%d]}\n",
	       index, text, name, total, free_bytes, all, nvml_code, memory[0], memory[1], memory[2],
	       codes[0], codes[1], codes[2], codes[3]);
}

static void tell_all(void)
{
	int count = 0, version = 0, code = CALL(cuDeviceGetCount, &count);

	CALL(cuDriverGetVersion, &version);
	printf("{\"op\":\"devices\",\"code\":%d,\"count\":%d,\"driver\":%d,\"pid\":%d}\n", code, count,
	       version, (int)getpid());
	for (int i = 0; i < count; i++)
		tell_device(i);
}

/* ---- work --------------------------------------------------------------------------------------------- */

static double seconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void *kernel_of(uint64_t us)
{
	static void *module;
	void *function = NULL;
	char name[64];

	snprintf(name, sizeof name, "spin_us_%" PRIu64, us);
	if (module == NULL)
		CALL(cuModuleLoadData, &module, ".version 8.0\n");
	CALL(cuModuleGetFunction, &function, module, name);
	return function;
}

static void spin(uint64_t us, uint64_t count)
{
	void *function = kernel_of(us);
	double begin = seconds();
	int code = 0;
	uint64_t done = 0;

	for (; done < count && code == 0; done++)
		code = CALL(cuLaunchKernel, function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
	printf("{\"op\":\"spin\",\"us\":%" PRIu64 ",\"count\":%" PRIu64 ",\"code\":%d,\"seconds\":%.6f}\n",
	       us, done, code, seconds() - begin);
}

static void run_graph(uint64_t us, uint64_t nodes, uint64_t count)
{
	struct {
		void *function;
		unsigned grid[3], block[3], shared;
		void **params, **extra, *kernel, *context;
	} params = {kernel_of(us), {1, 1, 1}, {1, 1, 1}, 0, NULL, NULL, NULL, NULL};
	void *graph = NULL, *node = NULL, *exec = NULL;
	double begin = seconds();
	int code = CALL(cuGraphCreate, &graph, 0);

	for (uint64_t i = 0; i < nodes && code == 0; i++)
		code = CALL(cuGraphAddKernelNode, &node, graph, i > 0 ? &node : NULL, i > 0, &params);
	if (code == 0)
		code = CALL(cuGraphInstantiateWithFlags, &exec, graph, 0);
	for (uint64_t i = 0; i < count && code == 0; i++)
		code = CALL(cuGraphLaunch, exec, NULL);
	if (code == 0)
		code = CALL(cuCtxSynchronize);
	printf("{\"op\":\"graph\",\"us\":%" PRIu64 ",\"nodes\":%" PRIu64 ",\"count\":%" PRIu64
	       ",\"code\":%d,\"seconds\":%.6f}\n",
	       us, nodes, count, code, seconds() - begin);
}

static void load(uint64_t us, uint64_t ms)
{
	void *function = kernel_of(us);
	double begin = seconds(), end = begin + (double)ms * 1e-3;
	uint64_t done = 0;
	int code = 0;

	while (code == 0 && seconds() < end) {
		code = CALL(cuLaunchKernel, function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
		if (code == 0)
			code = CALL(cuCtxSynchronize);
		done += code == 0;
	}
	printf("{\"op\":\"load\",\"us\":%" PRIu64 ",\"done\":%" PRIu64 ",\"code\":%d,\"seconds\":%.6f}\n", us,
	       done, code, seconds() - begin);
}

/* ---- commands ----------------------------------------------------------------------------------------- */

static void pause_for(uint64_t ms)
{
	struct timespec left = {(time_t)(ms / 1000), (long)(ms % 1000) * 1000000};

	while (nanosleep(&left, &left) != 0)
		;
}

static void step(char *command)
{
	char *part[5] = {strtok(command, ":"), strtok(NULL, ":"), strtok(NULL, ":"), strtok(NULL, ":"), NULL};
	const char *verb = part[0] != NULL ? part[0] : "";

	if (strcmp(verb, "info") == 0)
		tell_all();
	else if (strcmp(verb, "getinfo") == 0)
		get_info();
	else if (strcmp(verb, "sync") == 0)
		printf("{\"op\":\"sync\",\"code\":%d}\n", CALL(cuCtxSynchronize));
	else if (strcmp(verb, "wait") == 0) {
		char line[256];

		printf("{\"op\":\"wait\"}\n");
		fflush(stdout);
		if (fgets(line, sizeof line, stdin) == NULL)
			exit(0);
	} else if (part[1] == NULL) {
		fprintf(stderr, "cuda-probe: \"%s\" is not known or lacks a number\n%s", verb, usage);
		exit(2);
	} else if (strcmp(verb, "device") == 0)
		use_device((int)number(part[1]));
	else if (strcmp(verb, "alloc") == 0)
		allocate(number(part[1]),
			 part[2] != NULL ? (enum kind)index_of(kind_names, part[2]) : KIND_MEM);
	else if (strcmp(verb, "pitch") == 0 && part[2] != NULL)
		allocate_pitch(number(part[1]), number(part[2]));
	else if (strcmp(verb, "free") == 0)
		release(number(part[1]));
	else if (strcmp(verb, "copy") == 0)
		copy(number(part[1]));
	else if (strcmp(verb, "spin") == 0)
		spin(number(part[1]), part[2] != NULL ? number(part[2]) : 1);
	else if (strcmp(verb, "graph") == 0 && part[2] != NULL && part[3] != NULL)
		run_graph(number(part[1]), number(part[2]), number(part[3]));
	else if (strcmp(verb, "load") == 0 && part[2] != NULL)
		load(number(part[1]), number(part[2]));
	else if (strcmp(verb, "sleep") == 0)
		pause_for(number(part[1]));
	else {
		fprintf(stderr, "cuda-probe: \"%s\" is not known\n%s", verb, usage);
		exit(2);
	}
	fflush(stdout);
}

int main(int count, char **argument)
{
	enum probe_way way = WAY_HANDLE;
	int first = 1, code;

	if (count > 2 && strcmp(argument[1], "--way") == 0) {
		way = (enum probe_way)index_of(way_names, argument[2]);
		first = 3;
	}
	if (first >= count) {
		fputs(usage, stderr);
		return 2;
	}
#ifndef LINKED
	if (way == WAY_LINK) {
		fprintf(stderr, "cuda-probe: the way \"link\" is cuda-probe-linked's\n");
		return 2;
	}
#endif
	if (probe_find(way) != 0)
		return 1;
	code = CALL(cuInit, 0);
	printf("{\"op\":\"init\",\"way\":\"%s\",\"code\":%d}\n", way_names[way], code);
	fflush(stdout);
	if (code != 0)
		return 0;
	use_device(0);
	for (int i = first; i < count; i++)
		step(argument[i]);
	return 0;
}
