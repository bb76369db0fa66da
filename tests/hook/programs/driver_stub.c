/* SPDX-License-Identifier: Apache-2.0
 *
 * A driver as small as one can be, for tests of how symbols are resolved: what it exports and what it answers
 * to cuGetProcAddress is up to the test. STUB_FORMS: "version:form,…", which form of cuCtxCreate it gives for
 * that version (0 = the plain one). STUB_SLOW: microseconds that each look-up takes.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

static int last_form = -1;
static long live;
static void *inner;

API int cuInit(unsigned flags)
{
	(void)flags;
	/* As a driver does that finds its own functions by name: it must get its own. */
	void *self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
	inner = self ? dlsym(self, "cuMemAlloc_v2") : NULL;
	return 0;
}

API void *stub_inner(void)
{
	return inner;
}

API int stub_last_form(void)
{
	return last_form;
}

/* Where it counts what it has given out: for who watches it from outside. */
API long *stub_live(void)
{
	return &live;
}

API int cuDriverGetVersion(int *version)
{
	*version = 13000;
	return 0;
}

API int cuDeviceGetCount(int *count)
{
	*count = 1;
	return 0;
}

API int cuDeviceGet(int *device, int ordinal)
{
	*device = ordinal;
	return ordinal == 0 ? 0 : 101;
}

API int cuDeviceGetUuid(unsigned char *uuid, int device)
{
	(void)device;
	memset(uuid, 0xaa, 16);
	return 0;
}

static void *context;

API int cuCtxGetCurrent(void **out)
{
	*out = context;
	return 0;
}

API int cuCtxGetDevice(int *device)
{
	*device = 0;
	return context ? 0 : 201;
}

static int make(void **out, int form)
{
	last_form = form;
	*out = context = (void *)0x1000;
	return 0;
}

API int cuCtxCreate(void **out, unsigned flags, int device)
{
	(void)flags, (void)device;
	return make(out, 0);
}

API int cuCtxCreate_v2(void **out, unsigned flags, int device)
{
	(void)flags, (void)device;
	return make(out, 2);
}

#ifndef STUB_OLD
API int cuCtxCreate_v3(void **out, void *affinity, int count, unsigned flags, int device)
{
	(void)affinity, (void)count, (void)flags, (void)device;
	return make(out, count == 77 && flags == 5 ? 3 : -3);
}

API int cuCtxCreate_v4(void **out, void *parameters, unsigned flags, int device)
{
	(void)parameters, (void)device;
	return make(out, flags == 5 ? 4 : -4);
}
#endif

static uint64_t next = 0x700000000000ull;

API int cuMemAlloc_v2(uint64_t *out, size_t bytes)
{
	if (!context)
		return 201;
	*out = next;
	next += (bytes + 511) & ~511ull;
	live++;
	return 0;
}

API int cuMemFree_v2(uint64_t address)
{
	if (address < 0x700000000000ull || address >= next)
		return 1;
	live--;
	return 0;
}

API int cuMemGetInfo_v2(size_t *free, size_t *total)
{
	*free = 20ull << 30;
	*total = 24ull << 30;
	return 0;
}

API int cuDeviceTotalMem_v2(size_t *bytes, int device)
{
	(void)device;
	*bytes = 24ull << 30;
	return 0;
}

API int cuProfilerStart(void)
{
	return 0;
}

static void *form_for(int version)
{
	const char *table = getenv("STUB_FORMS");
	int best = -1;
	for (const char *at = table; at && *at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
		int from, form;
		if (sscanf(at, "%d:%d", &from, &form) == 2 && from <= version)
			best = form;
	}
	switch (best) {
	case 0:
		return (void *)cuCtxCreate;
	case 2:
		return (void *)cuCtxCreate_v2;
#ifndef STUB_OLD
	case 3:
		return (void *)cuCtxCreate_v3;
	case 4:
		return (void *)cuCtxCreate_v4;
#endif
	default:
		return NULL;
	}
}

static int look_up(const char *name, void **out, int version)
{
	static void *self;
	const char *slow = getenv("STUB_SLOW");
	if (slow)
		usleep((unsigned)atoi(slow));
	if (strcmp(name, "cuCtxCreate") == 0) {
		*out = form_for(version);
	} else {
		char longer[128];
		if (!self)
			self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
		snprintf(longer, sizeof(longer), "%s_v2", name);
		*out = dlsym(self, longer);
		if (!*out)
			*out = dlsym(self, name);
	}
	return *out ? 0 : 500;
}

API int cuGetProcAddress(const char *name, void **out, int version, uint64_t flags)
{
	(void)flags;
	return look_up(name, out, version);
}

#ifndef STUB_OLD
API int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status)
{
	(void)flags;
	int rc = look_up(name, out, version);
	if (status)
		*status = rc ? 1 : 0;
	return rc;
}
#endif
