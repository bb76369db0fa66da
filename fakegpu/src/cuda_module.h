/* SPDX-License-Identifier: Apache-2.0
 *
 * Modules, libraries, kernels and functions. Any image is taken: nothing is compiled or run. A function
 * exists as soon as someone asks a module for its name, and its name says how long it runs (see CUDA.md).
 */
#ifndef FAKEGPU_CUDA_MODULE_H
#define FAKEGPU_CUDA_MODULE_H

#include "cuda_core.h"
#include "cuda_space.h"

struct cu_variable { /* of a module, made when asked for */
	struct cu_variable *next;
	struct cu_alloc *alloc;
	char name[];
};

struct CUmod_st {
	struct cu_object object;
	struct CUctx_st *context;
	struct CUmod_st *next; /* of the same context */
	struct CUfunc_st *functions;
	struct cu_variable *variables;
	struct CUlib_st *library; /* that this is the form of in one context; NULL: none */
	struct CUmod_st *next_of_library;
	uint32_t function_count;
	char *ptx; /* a copy of an image that is PTX: only what it defines can be found; NULL: anything can */
};

struct CUfunc_st {
	struct cu_object object;
	struct CUmod_st *module;
	struct CUfunc_st *next;
	struct CUkern_st *kernel; /* NULL: of a module proper */
	char *name;
	uint64_t work_ns; /* or CU_DURATION_DEFAULT */
	int attribute[CU_FUNC_ATTRIBUTE_MAX];
	CUfunc_cache cache_config;
	int block[3]; /* cuFuncSetBlockShape */
};

struct CUlib_st {
	struct cu_object object;
	struct CUkern_st *kernels;
	struct CUmod_st *modules; /* one a context, made when needed */
	uint32_t kernel_count;
	char *ptx; /* as of a module */
};

struct CUkern_st {
	struct cu_object object;
	struct CUlib_st *library;
	struct CUkern_st *next;
	char *name;
};

/* A copy of the image when it is PTX text, else NULL. */
char *cu_image_text(const void *image);
/* 1 when PTX text defines an entry, or a variable, of that name; also when there is no text to look at. */
int cu_image_has(const char *ptx, const char *name);

/* Need cu_lock. */
struct CUmod_st *cu_module_make(struct CUctx_st *context);
void cu_module_end(struct CUmod_st *module);
/* The function of that name, made when needed; NULL: out of memory. */
struct CUfunc_st *cu_module_function(struct CUmod_st *module, const char *name, struct CUkern_st *kernel);

/* What launches take, CUfunction or CUkernel cast to it, in the given context; NULL: neither. Takes cu_lock
 * when it is a kernel. */
struct CUfunc_st *cu_function_of(CUfunction handle, struct CUctx_st *context);
CUresult cu_function_set(struct CUfunc_st *function, CUfunction_attribute attribute, int value);
/* A variable of a module, made when asked for. Takes cu_lock. */
CUresult cu_module_global(CUdeviceptr *dptr, size_t *bytes, struct CUmod_st *module, const char *name);

#endif
