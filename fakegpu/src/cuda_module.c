/* SPDX-License-Identifier: Apache-2.0
 *
 * Modules and their functions and variables. See cuda_module.h.
 */
#include "cuda_module.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda_memory.h"
#include "cuda_parts.h"
#include "cuda_time.h"

#define VARIABLE_BYTES 4096u /* every variable that is asked for has this size */

struct CUmod_st *cu_module_make(struct CUctx_st *context)
{
	struct CUmod_st *module = cu_object_make(CU_KIND_MODULE, sizeof *module);

	if (module != NULL) {
		module->context = context;
		module->next = context->modules;
		context->modules = module;
	}
	return module;
}

void cu_module_end(struct CUmod_st *module)
{
	while (module->functions != NULL) {
		struct CUfunc_st *function = module->functions;

		module->functions = function->next;
		free(function->name);
		cu_object_end(function);
	}
	while (module->variables != NULL) {
		struct cu_variable *variable = module->variables;

		module->variables = variable->next;
		cu_memory_end(variable->alloc);
		free(variable);
	}
	for (struct CUmod_st **link = &module->context->modules; *link != NULL; link = &(*link)->next)
		if (*link == module) {
			*link = module->next;
			break;
		}
	if (module->library != NULL)
		for (struct CUmod_st **link = &module->library->modules; *link != NULL;
		     link = &(*link)->next_of_library)
			if (*link == module) {
				*link = module->next_of_library;
				break;
			}
	free(module->ptx);
	cu_object_end(module);
}

char *cu_image_text(const void *image)
{
	const char *text = image;

	/* PTX begins with comments or its version; everything else begins with a magic number. */
	while (*text == ' ' || *text == '\n' || *text == '\r' || *text == '\t')
		text++;
	if (strncmp(text, "//", 2) != 0 && strncmp(text, ".version", 8) != 0)
		return NULL;
	return strstr(text, ".entry") != NULL ? strdup(text) : NULL;
}

static int is_word(char c)
{
	return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
	       c == '$';
}

int cu_image_has(const char *ptx, const char *name)
{
	size_t length = strlen(name);

	if (ptx == NULL)
		return 1;
	for (const char *at = strstr(ptx, name); at != NULL; at = strstr(at + 1, name))
		if (at > ptx && !is_word(at[-1]) && !is_word(at[length]))
			return 1;
	return 0;
}

static void set_attributes(struct CUfunc_st *function)
{
	const struct fg_card_config *config = &function->module->context->device->shared->config;
	int version = (int)(config->cc_major * 10 + config->cc_minor);

	function->attribute[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK] = 1024;
	function->attribute[CU_FUNC_ATTRIBUTE_NUM_REGS] = 32;
	function->attribute[CU_FUNC_ATTRIBUTE_PTX_VERSION] = version;
	function->attribute[CU_FUNC_ATTRIBUTE_BINARY_VERSION] = version;
	function->attribute[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES] = 49152;
	function->attribute[CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT] = -1;
}

struct CUfunc_st *cu_module_function(struct CUmod_st *module, const char *name, struct CUkern_st *kernel)
{
	struct CUfunc_st *function;

	for (function = module->functions; function != NULL; function = function->next)
		if (strcmp(function->name, name) == 0)
			return function;
	function = cu_object_make(CU_KIND_FUNCTION, sizeof *function);
	if (function == NULL)
		return NULL;
	function->name = strdup(name);
	if (function->name == NULL) {
		cu_object_end(function);
		return NULL;
	}
	function->module = module;
	function->kernel = kernel;
	function->work_ns = cu_duration_of_name(name);
	set_attributes(function);
	function->next = module->functions;
	module->functions = function;
	module->function_count++;
	return function;
}

/* ---- loading ------------------------------------------------------------------------------------------ */

static CUresult load(CUmodule *module, const void *image, int is_text)
{
	CU_CONTEXT(context);
	CU_UNSAFE_IN_CAPTURE(context);
	CU_NEEDS(module != NULL && image != NULL);
	cu_lock();
	struct CUmod_st *made = cu_module_make(context);

	if (made != NULL && is_text)
		made->ptx = cu_image_text(image);
	cu_unlock();
	if (made == NULL)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*module = made;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuModuleLoad(CUmodule *module, const char *fname)
{
	CU_ENTER("module=%p fname=%s", (void *)module, fname != NULL ? fname : "(null)");
	CU_NEEDS(fname != NULL);
	if (access(fname, R_OK) != 0)
		return CUDA_ERROR_FILE_NOT_FOUND;
	return load(module, fname, 0);
}

CUresult CUDAAPI cuModuleLoadData(CUmodule *module, const void *image)
{
	CU_ENTER("module=%p image=%p", (void *)module, image);
	return load(module, image, 1);
}

CUresult CUDAAPI cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int numOptions,
				    CUjit_option *options, void **optionValues)
{
	CU_ENTER("module=%p image=%p options=%u", (void *)module, image, numOptions);
	CU_NEEDS(numOptions == 0 || (options != NULL && optionValues != NULL));
	return load(module, image, 1);
}

CUresult CUDAAPI cuModuleLoadFatBinary(CUmodule *module, const void *fatCubin)
{
	CU_ENTER("module=%p image=%p", (void *)module, fatCubin);
	return load(module, fatCubin, 0);
}

CUresult CUDAAPI cuModuleUnload(CUmodule hmod)
{
	CU_ENTER("module=%p", (void *)hmod);
	CU_CONTEXT(context);
	if (!cu_is(hmod, CU_KIND_MODULE) || hmod->library != NULL || context == NULL)
		return CUDA_ERROR_INVALID_HANDLE;
	cu_context_drain(hmod->context);
	cu_lock();
	cu_module_end(hmod);
	cu_unlock();
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuModuleGetLoadingMode(CUmoduleLoadingMode *mode)
{
	CU_ENTER("mode=%p", (void *)mode);
	const char *text = getenv("CUDA_MODULE_LOADING");

	CU_NEEDS(mode != NULL);
	*mode = text != NULL && strcmp(text, "EAGER") == 0 ? CU_MODULE_EAGER_LOADING : CU_MODULE_LAZY_LOADING;
	return CUDA_SUCCESS;
}

/* ---- what is in a module ------------------------------------------------------------------------------ */

CUresult CUDAAPI cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name)
{
	CU_ENTER("hfunc=%p module=%p name=%s", (void *)hfunc, (void *)hmod, name != NULL ? name : "(null)");
	struct CUfunc_st *function;

	CU_NEEDS(hfunc != NULL && name != NULL);
	if (!cu_is(hmod, CU_KIND_MODULE))
		return CUDA_ERROR_INVALID_HANDLE;
	if (name[0] == '\0' || !cu_image_has(hmod->ptx, name))
		return CUDA_ERROR_NOT_FOUND;
	cu_lock();
	function = cu_module_function(hmod, name, NULL);
	cu_unlock();
	if (function == NULL)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*hfunc = function;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuModuleGetFunctionCount(unsigned int *count, CUmodule mod)
{
	CU_ENTER("count=%p module=%p", (void *)count, (void *)mod);
	CU_NEEDS(count != NULL);
	if (!cu_is(mod, CU_KIND_MODULE))
		return CUDA_ERROR_INVALID_HANDLE;
	*count = mod->function_count;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuModuleEnumerateFunctions(CUfunction *functions, unsigned int numFunctions, CUmodule mod)
{
	CU_ENTER("functions=%p n=%u module=%p", (void *)functions, numFunctions, (void *)mod);
	CU_NEEDS(functions != NULL);
	if (!cu_is(mod, CU_KIND_MODULE))
		return CUDA_ERROR_INVALID_HANDLE;
	cu_lock();
	for (struct CUfunc_st *function = mod->functions; function != NULL && numFunctions > 0;
	     function = function->next, numFunctions--)
		*functions++ = function;
	cu_unlock();
	return CUDA_SUCCESS;
}

CUresult cu_module_global(CUdeviceptr *dptr, size_t *bytes, struct CUmod_st *module, const char *name)
{
	struct cu_variable *variable;
	struct cu_alloc *alloc;
	CUresult result;

	CU_NEEDS(name != NULL);
	if (!cu_is(module, CU_KIND_MODULE))
		return CUDA_ERROR_INVALID_HANDLE;
	if (name[0] == '\0' || !cu_image_has(module->ptx, name))
		return CUDA_ERROR_NOT_FOUND;
	for (variable = module->variables; variable != NULL; variable = variable->next)
		if (strcmp(variable->name, name) == 0)
			break;
	if (variable == NULL) {
		result = cu_memory_make(module->context->device, module->context, VARIABLE_BYTES,
					VARIABLE_BYTES, CU_ALLOC_LINEAR, &alloc);
		if (result != CUDA_SUCCESS)
			return result;
		variable = malloc(sizeof *variable + strlen(name) + 1);
		cu_lock();
		if (variable == NULL) {
			cu_memory_end(alloc);
			cu_unlock();
			return CUDA_ERROR_OUT_OF_MEMORY;
		}
		memcpy(variable->name, name, strlen(name) + 1);
		variable->alloc = alloc;
		variable->next = module->variables;
		module->variables = variable;
		cu_unlock();
	}
	if (dptr != NULL)
		*dptr = variable->alloc->base;
	if (bytes != NULL)
		*bytes = variable->alloc->size;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuModuleGetGlobal_v2(CUdeviceptr *dptr, size_t *bytes, CUmodule hmod, const char *name)
{
	CU_ENTER("dptr=%p module=%p name=%s", (void *)dptr, (void *)hmod, name != NULL ? name : "(null)");
	return cu_module_global(dptr, bytes, hmod, name);
}

CUresult CUDAAPI cuModuleGetGlobal(CUdeviceptr_v1 *dptr, unsigned int *bytes, CUmodule hmod, const char *name)
{
	CU_ENTER("dptr=%p module=%p name=%s", (void *)dptr, (void *)hmod, name != NULL ? name : "(null)");
	CUdeviceptr address;
	size_t size;
	CUresult result = cu_module_global(&address, &size, hmod, name);

	if (result != CUDA_SUCCESS)
		return result;
	if (dptr != NULL)
		*dptr = (CUdeviceptr_v1)address;
	if (bytes != NULL)
		*bytes = (unsigned int)size;
	return CUDA_SUCCESS;
}
