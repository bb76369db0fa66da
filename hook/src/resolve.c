/* SPDX-License-Identifier: Apache-2.0
 *
 * See resolve.h. Four ways lead to a driver function: linking against it (our exported name comes first),
 * dlsym/dlvsym, dlopen + dlsym, and cuGetProcAddress. The last three all ask the driver first and then map
 * what it answered.
 */
#include "resolve.h"

#include <dlfcn.h>
#include <errno.h>
#include <string.h>

#include "early.h"
#include "mode.h"
#include "objects.h"

enum { CUDA = 0, NVML = 1 };

struct library {
	void *handle; /* stored last; NULL: not bound */
	uintptr_t start;
	uintptr_t end;
};

AQ_EARLY static struct library libraries[2];
static const char *const sonames[2] = {"libcuda.so.1", "libnvidia-ml.so.1"};

AQ_EARLY void *aq_reals[AQ_NUMBERS];

/* ---- libc's own ------------------------------------------------------------------------------- */

typedef void *dlsym_type(void *, const char *);
typedef void *dlvsym_type(void *, const char *, const char *);
typedef void *dlopen_type(const char *, int);

enum { DLSYM, DLVSYM, DLOPEN };
AQ_EARLY static void *libc_functions[3];

static void *libc_function(unsigned which)
{
	static const char *const names[] = {"dlsym", "dlvsym", "dlopen"};
	/* Since 2.34 in libc itself; before that in libdl, which the caller has if it can call us in earnest.
	 */
	static const char *const places[] = {"libdl.so", "libdl-", "libc.so", "libc-", NULL};
	void *function = __atomic_load_n(&libc_functions[which], __ATOMIC_RELAXED);
	if (function == NULL) {
		function = aq_elf_function(places, names[which]);
		__atomic_store_n(&libc_functions[which], function, __ATOMIC_RELAXED);
	}
	return function;
}

static void *real_dlsym(void *handle, const char *name)
{
	dlsym_type *function = (dlsym_type *)libc_function(DLSYM);
	return function ? function(handle, name) : NULL;
}

static void *real_dlopen(const char *path, int mode)
{
	dlopen_type *function = (dlopen_type *)libc_function(DLOPEN);
	return function ? function(path, mode) : NULL;
}

/* ---- the driver's libraries ------------------------------------------------------------------- */

static bool inside(const struct library *library, const void *address)
{
	return (uintptr_t)address >= library->start && (uintptr_t)address < library->end;
}

static struct library *bound(unsigned kind)
{
	struct library *library = &libraries[kind];
	return __atomic_load_n(&library->handle, __ATOMIC_ACQUIRE) ? library : NULL;
}

/* Which of the two a loaded object is, whatever its file is called; -1: neither. */
static int kind_of(const struct aq_object *object)
{
	for (unsigned kind = 0; object->soname && kind < 2; kind++)
		if (strncmp(object->soname, sonames[kind], strlen(sonames[kind])) == 0)
			return (int)kind;
	return -1;
}

/* Keeps the object as the one that our wrappers call. Threads that race here find the same object. */
static struct library *bind(unsigned kind, const struct aq_object *object)
{
	struct library *library = &libraries[kind];
	/* Never unloaded any more: programs hold wrappers that lead into it. */
	void *handle = real_dlopen(object->path, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
	if (handle == NULL)
		return NULL;
	__atomic_store_n(&library->start, object->start, __ATOMIC_RELAXED);
	__atomic_store_n(&library->end, object->end, __ATOMIC_RELAXED);
	__atomic_store_n(&library->handle, handle, __ATOMIC_RELEASE);
	return library;
}

/* Binds what lies at `address` if it is a driver library of that kind. */
static struct library *bind_at(unsigned kind, const void *address)
{
	struct aq_object object;
	if (!aq_elf_object_of(address, &object) || kind_of(&object) != (int)kind)
		return NULL;
	return bind(kind, &object);
}

/* The library if it is loaded, by whatever name and scope; with `load` also if it is not yet. */
static struct library *find(unsigned kind, bool load)
{
	static const char *const probes[2] = {"cuInit", "nvmlInit_v2"};
	struct library *library = bound(kind);
	if (library)
		return library;
	int saved = errno;
	void *symbol = real_dlsym(RTLD_NEXT, probes[kind]);
	if (symbol == NULL) {
		void *handle = real_dlopen(sonames[kind], RTLD_LAZY | (load ? RTLD_LOCAL : RTLD_NOLOAD));
		if (handle)
			symbol = real_dlsym(handle, probes[kind]);
	}
	library = symbol ? bind_at(kind, symbol) : NULL;
	errno = saved;
	return library;
}

bool aq_load_nvml(void)
{
	return find(NVML, true) != NULL;
}

static CUresult missing_cuda(void)
{
	return CUDA_ERROR_NOT_FOUND;
}

static nvmlReturn_t missing_nvml(void)
{
	return NVML_ERROR_FUNCTION_NOT_FOUND;
}

static void *missing(unsigned number)
{
	return aq_name_is_nvml[number] ? (void *)missing_nvml : (void *)missing_cuda;
}

void *aq_resolve(unsigned number)
{
	const struct library *library = find(aq_name_is_nvml[number], true);
	if (library == NULL)
		return missing(number);
	void *real = real_dlsym(library->handle, aq_name(number));
	if (real == NULL)
		real = missing(number);
	__atomic_store_n(&aq_reals[number], real, __ATOMIC_RELAXED);
	return real;
}

bool aq_has(unsigned number)
{
	return aq_real(number) != missing(number);
}

/* ---- answers ---------------------------------------------------------------------------------- */

struct aq_answer {
	uintptr_t value;
	void *jump;
};

struct aq_answer aq_route_dlsym(void *handle, const char *name, const void *caller);
struct aq_answer aq_route_dlvsym(void *handle, const char *name, const char *version, const void *caller);
struct aq_answer aq_route_dlopen(const char *path, int mode);

static struct aq_answer give(void *value)
{
	return (struct aq_answer){(uintptr_t)value, NULL};
}

static struct aq_answer go_on(unsigned which)
{
	void *function = libc_function(which);
	/* No libdl in this process: as if the symbol were not there. */
	return function ? (struct aq_answer){0, function} : give(NULL);
}

/* Number of a name that this program gets a wrapper for, or -1. */
static int hooked(const char *name)
{
	const struct aq_name_cell *cell = name ? aq_lookup(name) : NULL;
	if (cell == NULL || cell->number >= AQ_HOOKED || aq_mode() == AQ_MODE_OFF)
		return -1;
	return cell->number;
}

/* True for code of the driver itself: it must find its own functions, never us. */
static bool is_driver(unsigned number, const void *address)
{
	unsigned kind = aq_name_is_nvml[number];
	const struct library *library = bound(kind);
	return library ? inside(library, address) : bind_at(kind, address) != NULL;
}

/* What a program gets when the driver's side found `found` under that name. */
static void *answer(unsigned number, void *found)
{
	unsigned kind = aq_name_is_nvml[number];
	void *wrapper = aq_wrapper(number);
	if (found == NULL || found == wrapper)
		return found;
	const struct library *library = bound(kind);
	if (library == NULL)
		library = bind_at(kind, found);
	if (library && inside(library, found)) {
		__atomic_store_n(&aq_reals[number], found, __ATOMIC_RELAXED);
		return wrapper;
	}
	/* Another copy of the driver leads to the first; anything else is a tool's own function. */
	struct aq_object object;
	if (aq_elf_object_of(found, &object) && kind_of(&object) == (int)kind)
		return wrapper;
	return found;
}

/* RTLD_DEFAULT and RTLD_NEXT: our own exports must not be what is found, the driver's may be. */
static void *answer_global(unsigned number)
{
	void *found = real_dlsym(RTLD_NEXT, aq_name(number));
	if (found == NULL) {
		const struct library *library = find(aq_name_is_nvml[number], false);
		if (library)
			found = real_dlsym(library->handle, aq_name(number));
	}
	return answer(number, found);
}

struct aq_answer aq_route_dlsym(void *handle, const char *name, const void *caller)
{
	int number = hooked(name);
	if (number < 0 || is_driver((unsigned)number, caller))
		return go_on(DLSYM);
	if (handle == RTLD_DEFAULT || handle == RTLD_NEXT)
		return give(answer_global((unsigned)number));
	void *found = real_dlsym(handle, name);
	/* dlopen(NULL) is the global scope again, with us in front. */
	if (found == aq_wrapper((unsigned)number))
		return give(answer_global((unsigned)number));
	return give(answer((unsigned)number, found));
}

struct aq_answer aq_route_dlvsym(void *handle, const char *name, const char *version, const void *caller)
{
	int number = hooked(name);
	if (number < 0 || is_driver((unsigned)number, caller))
		return go_on(DLVSYM);
	if (handle == RTLD_DEFAULT || handle == RTLD_NEXT)
		return give(answer_global((unsigned)number));
	dlvsym_type *function = (dlvsym_type *)libc_function(DLVSYM);
	return give(function ? answer((unsigned)number, function(handle, name, version)) : NULL);
}

struct aq_answer aq_route_dlopen(const char *path, int mode)
{
	void *function = libc_function(DLOPEN);
	const char *slash = path ? strrchr(path, '/') : NULL;
	const char *file = slash ? slash + 1 : path;
	/* Deep binding would let the driver's library be found before us by what it brings along. */
	if (file && (mode & RTLD_DEEPBIND) &&
	    (strncmp(file, "libcuda.so", 10) == 0 || strncmp(file, "libnvidia-ml.so", 15) == 0))
		mode &= ~RTLD_DEEPBIND;
	return function ? (struct aq_answer){(uintptr_t)(unsigned)mode, function} : give(NULL);
}

/* ---- cuGetProcAddress ------------------------------------------------------------------------- */

#define PER_THREAD_DEFAULT_STREAM 2u

/* The driver gave out an address that it does not export: the headers say which form that version has. */
static int by_header(const struct aq_name_cell *cell, int version, cuuint64_t flags)
{
	int best = -1;
	bool per_thread = (flags & PER_THREAD_DEFAULT_STREAM) != 0;
	for (unsigned i = cell->group; i < cell->group + cell->group_size; i++) {
		if (aq_name_since[i] > version || (aq_name_per_thread[i] && !per_thread))
			continue;
		if (best < 0 || aq_name_since[i] > aq_name_since[best] ||
		    (per_thread && aq_name_per_thread[i] && aq_name_since[i] >= aq_name_since[best]))
			best = (int)i;
	}
	return best;
}

static void *wrapped(const char *name, void *found, int version, cuuint64_t flags)
{
	const struct aq_name_cell *cell = aq_lookup(name);
	if (found == NULL || cell == NULL || cell->group_size == 0 || aq_mode() == AQ_MODE_OFF)
		return found;
	for (unsigned i = cell->group; i < (unsigned)cell->group + cell->group_size; i++)
		if (aq_real(i) == found || aq_wrapper(i) == found)
			return aq_wrapper(i);
	int number = by_header(cell, version, flags);
	if (number < 0)
		return found;
	if (!aq_has((unsigned)number))
		__atomic_store_n(&aq_reals[number], found, __ATOMIC_RELAXED);
	return aq_wrapper((unsigned)number);
}

HOOK(CUresult, cuGetProcAddress, (const char *name, void **function, int version, cuuint64_t flags))
{
	CUresult result = REAL(cuGetProcAddress)(name, function, version, flags);
	if (result == CUDA_SUCCESS && name && function)
		*function = wrapped(name, *function, version, flags);
	return result;
}

HOOK(CUresult, cuGetProcAddress_v2,
     (const char *name, void **function, int version, cuuint64_t flags, void *status))
{
	CUresult result = REAL(cuGetProcAddress_v2)(name, function, version, flags, status);
	if (result == CUDA_SUCCESS && name && function)
		*function = wrapped(name, *function, version, flags);
	return result;
}
