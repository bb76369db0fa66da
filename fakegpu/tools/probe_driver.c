/* SPDX-License-Identifier: Apache-2.0
 *
 * Finding the driver's functions in each of the ways that programs use. See probe_driver.h.
 */
#define _GNU_SOURCE
#include "probe_driver.h"

#include <dlfcn.h>
#include <stdio.h>

#define DEFINE(name, symbol, parameters, version) int(*call_##name) parameters;
PROBE_FUNCTIONS(DEFINE)

static enum probe_way way;
static int (*proc)(const char *, void **, int, uint64_t);
static int (*proc_2)(const char *, void **, int, uint64_t, int *);

#ifdef LINKED
/* Only their addresses are taken, so any type does. */
#define EXTERN(name, symbol, parameters, version) extern void symbol(void);
PROBE_FUNCTIONS(EXTERN)
#endif

static void *find(const char *name, const char *symbol, int version)
{
	static void *handle;
	void *address = NULL;

	switch (way) {
	case WAY_HANDLE:
		if (handle == NULL)
			handle = dlopen("libcuda.so.1", RTLD_NOW);
		return handle != NULL ? dlsym(handle, symbol) : NULL;
	case WAY_NEXT:
		return dlsym(RTLD_NEXT, symbol);
	case WAY_PROC:
		return proc != NULL && proc(name, &address, version, 0) == 0 ? address : NULL;
	case WAY_PROC2:
		return proc_2 != NULL && proc_2(name, &address, version, 0, NULL) == 0 ? address : NULL;
	case WAY_DEFAULT:
	case WAY_LINK:
		break;
	}
	return dlsym(RTLD_DEFAULT, symbol);
}

int probe_find(enum probe_way wanted)
{
	int mode = RTLD_NOW | (wanted == WAY_DEFAULT || wanted == WAY_NEXT ? RTLD_GLOBAL : 0);
	void *handle = dlopen("libcuda.so.1", mode);

	way = wanted;

	if (handle == NULL) {
		fprintf(stderr, "cuda-probe: %s\n", dlerror());
		return -1;
	}
	*(void **)&proc = dlsym(handle, "cuGetProcAddress");
	*(void **)&proc_2 = dlsym(handle, "cuGetProcAddress_v2");
#ifdef LINKED
#define FIND(name, symbol, parameters, version) \
	*(void **)&call_##name = way == WAY_LINK ? (void *)symbol : find(#name, #symbol, version);
#else
#define FIND(name, symbol, parameters, version) *(void **)&call_##name = find(#name, #symbol, version);
#endif
	PROBE_FUNCTIONS(FIND)
	return 0;
}
