/* SPDX-License-Identifier: Apache-2.0
 *
 * Libraries and kernels: modules that belong to no context and take form in each context that uses them.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda_memory.h"
#include "cuda_module.h"
#include "cuda_parts.h"

static CUresult load(CUlibrary *library, const void *image)
{
	struct CUlib_st *made;

	CU_NEEDS(library != NULL);
	cu_lock();
	made = cu_object_make(CU_KIND_LIBRARY, sizeof *made);
	if (made != NULL && image != NULL)
		made->ptx = cu_image_text(image);
	cu_unlock();
	if (made == NULL)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*library = made;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jitOptions,
				   void **jitOptionsValues, unsigned int numJitOptions,
				   CUlibraryOption *libraryOptions, void **libraryOptionValues,
				   unsigned int numLibraryOptions)
{
	CU_ENTER("library=%p code=%p", (void *)library, code);
	CU_NEEDS(code != NULL && (numJitOptions == 0 || (jitOptions != NULL && jitOptionsValues != NULL)));
	CU_NEEDS(numLibraryOptions == 0 || (libraryOptions != NULL && libraryOptionValues != NULL));
	return load(library, code);
}

CUresult CUDAAPI cuLibraryLoadFromFile(CUlibrary *library, const char *fileName, CUjit_option *jitOptions,
				       void **jitOptionsValues, unsigned int numJitOptions,
				       CUlibraryOption *libraryOptions, void **libraryOptionValues,
				       unsigned int numLibraryOptions)
{
	CU_ENTER("library=%p fileName=%s", (void *)library, fileName != NULL ? fileName : "(null)");
	CU_NEEDS(fileName != NULL &&
		 (numJitOptions == 0 || (jitOptions != NULL && jitOptionsValues != NULL)));
	CU_NEEDS(numLibraryOptions == 0 || (libraryOptions != NULL && libraryOptionValues != NULL));
	if (access(fileName, R_OK) != 0)
		return CUDA_ERROR_FILE_NOT_FOUND;
	return load(library, NULL);
}

CUresult CUDAAPI cuLibraryUnload(CUlibrary library)
{
	CU_ENTER("library=%p", (void *)library);
	if (!cu_is(library, CU_KIND_LIBRARY))
		return CUDA_ERROR_INVALID_HANDLE;
	cu_lock();
	while (library->modules != NULL)
		cu_module_end(library->modules);
	while (library->kernels != NULL) {
		struct CUkern_st *kernel = library->kernels;

		library->kernels = kernel->next;
		free(kernel->name);
		cu_object_end(kernel);
	}
	free(library->ptx);
	cu_object_end(library);
	cu_unlock();
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLibraryGetKernel(CUkernel *pKernel, CUlibrary library, const char *name)
{
	CU_ENTER("pKernel=%p library=%p name=%s", (void *)pKernel, (void *)library,
		 name != NULL ? name : "(null)");
	struct CUkern_st *kernel;

	CU_NEEDS(pKernel != NULL && name != NULL);
	if (!cu_is(library, CU_KIND_LIBRARY))
		return CUDA_ERROR_INVALID_HANDLE;
	if (name[0] == '\0' || !cu_image_has(library->ptx, name))
		return CUDA_ERROR_NOT_FOUND;
	cu_lock();
	for (kernel = library->kernels; kernel != NULL; kernel = kernel->next)
		if (strcmp(kernel->name, name) == 0)
			break;
	if (kernel == NULL && (kernel = cu_object_make(CU_KIND_KERNEL, sizeof *kernel)) != NULL) {
		kernel->name = strdup(name);
		kernel->library = library;
		kernel->next = library->kernels;
		library->kernels = kernel;
		library->kernel_count++;
	}
	cu_unlock();
	if (kernel == NULL || kernel->name == NULL)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*pKernel = kernel;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLibraryGetKernelCount(unsigned int *count, CUlibrary lib)
{
	CU_ENTER("count=%p library=%p", (void *)count, (void *)lib);
	CU_NEEDS(count != NULL);
	if (!cu_is(lib, CU_KIND_LIBRARY))
		return CUDA_ERROR_INVALID_HANDLE;
	*count = lib->kernel_count;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLibraryEnumerateKernels(CUkernel *kernels, unsigned int numKernels, CUlibrary lib)
{
	CU_ENTER("kernels=%p n=%u library=%p", (void *)kernels, numKernels, (void *)lib);
	CU_NEEDS(kernels != NULL);
	if (!cu_is(lib, CU_KIND_LIBRARY))
		return CUDA_ERROR_INVALID_HANDLE;
	cu_lock();
	for (struct CUkern_st *kernel = lib->kernels; kernel != NULL && numKernels > 0;
	     kernel = kernel->next, numKernels--)
		*kernels++ = kernel;
	cu_unlock();
	return CUDA_SUCCESS;
}

/* The form of a library in a context. Needs cu_lock. */
static struct CUmod_st *module_in(struct CUlib_st *library, struct CUctx_st *context)
{
	struct CUmod_st *module;

	for (module = library->modules; module != NULL; module = module->next_of_library)
		if (module->context == context)
			return module;
	module = cu_module_make(context);
	if (module != NULL) {
		module->library = library;
		module->ptx = library->ptx != NULL ? strdup(library->ptx) : NULL;
		module->next_of_library = library->modules;
		library->modules = module;
	}
	return module;
}

struct CUfunc_st *cu_function_of(CUfunction handle, struct CUctx_st *context)
{
	struct CUkern_st *kernel = (struct CUkern_st *)(void *)handle;
	struct CUfunc_st *function = NULL;

	if (__builtin_expect(cu_is(handle, CU_KIND_FUNCTION), 1))
		return handle;
	if (!cu_is(kernel, CU_KIND_KERNEL))
		return NULL;
	cu_lock();
	struct CUmod_st *module = module_in(kernel->library, context);

	if (module != NULL)
		function = cu_module_function(module, kernel->name, kernel);
	cu_unlock();
	return function;
}

CUresult CUDAAPI cuLibraryGetModule(CUmodule *pMod, CUlibrary library)
{
	CU_ENTER("pMod=%p library=%p", (void *)pMod, (void *)library);
	CU_CONTEXT(context);
	CU_NEEDS(pMod != NULL);
	if (!cu_is(library, CU_KIND_LIBRARY))
		return CUDA_ERROR_INVALID_HANDLE;
	cu_lock();
	*pMod = module_in(library, context);
	cu_unlock();
	return *pMod != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult CUDAAPI cuLibraryGetGlobal(CUdeviceptr *dptr, size_t *bytes, CUlibrary library, const char *name)
{
	CU_ENTER("dptr=%p library=%p name=%s", (void *)dptr, (void *)library, name != NULL ? name : "(null)");
	CU_CONTEXT(context);
	struct CUmod_st *module;

	if (!cu_is(library, CU_KIND_LIBRARY))
		return CUDA_ERROR_INVALID_HANDLE;
	cu_lock();
	module = module_in(library, context);
	cu_unlock();
	return module != NULL ? cu_module_global(dptr, bytes, module, name) : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult CUDAAPI cuLibraryGetManaged(CUdeviceptr *dptr, size_t *bytes, CUlibrary library, const char *name)
{
	CU_ENTER("dptr=%p bytes=%p library=%p name=%s", (void *)dptr, (void *)bytes, (void *)library,
		 name != NULL ? name : "(null)");
	return CUDA_ERROR_NOT_FOUND; /* images are not read, so none has managed variables */
}

CUresult CUDAAPI cuLibraryGetUnifiedFunction(void **fptr, CUlibrary library, const char *symbol)
{
	CU_ENTER("fptr=%p library=%p symbol=%s", (void *)fptr, (void *)library,
		 symbol != NULL ? symbol : "(null)");
	return CUDA_ERROR_NOT_FOUND;
}

/* ---- kernels ------------------------------------------------------------------------------------------ */

CUresult CUDAAPI cuKernelGetFunction(CUfunction *pFunc, CUkernel kernel)
{
	CU_ENTER("pFunc=%p kernel=%p", (void *)pFunc, (void *)kernel);
	CU_CONTEXT(context);
	CU_NEEDS(pFunc != NULL);
	if (!cu_is(kernel, CU_KIND_KERNEL))
		return CUDA_ERROR_INVALID_HANDLE;
	*pFunc = cu_function_of((CUfunction)(void *)kernel, context);
	return *pFunc != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult CUDAAPI cuKernelGetLibrary(CUlibrary *pLib, CUkernel kernel)
{
	CU_ENTER("pLib=%p kernel=%p", (void *)pLib, (void *)kernel);
	CU_NEEDS(pLib != NULL);
	if (!cu_is(kernel, CU_KIND_KERNEL))
		return CUDA_ERROR_INVALID_HANDLE;
	*pLib = kernel->library;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuKernelGetName(const char **name, CUkernel hfunc)
{
	CU_ENTER("name=%p kernel=%p", (void *)name, (void *)hfunc);
	CU_NEEDS(name != NULL);
	if (!cu_is(hfunc, CU_KIND_KERNEL))
		return CUDA_ERROR_INVALID_HANDLE;
	*name = hfunc->name;
	return CUDA_SUCCESS;
}

/* A kernel's attributes are those of its function in the device's primary context, or in the current one. */
static struct CUfunc_st *function_on(CUkernel kernel, CUdevice dev)
{
	struct CUctx_st *context = cu_thread()->current;
	struct cu_device *device = cu_device_at(dev);

	if (device == NULL || !cu_is(kernel, CU_KIND_KERNEL))
		return NULL;
	if (context == NULL || context->device != device || !cu_is(context, CU_KIND_CONTEXT))
		context = device->primary;
	return context != NULL ? cu_function_of((CUfunction)(void *)kernel, context) : NULL;
}

CUresult CUDAAPI cuKernelGetAttribute(int *pi, CUfunction_attribute attrib, CUkernel kernel, CUdevice dev)
{
	CU_ENTER("pi=%p attrib=%d kernel=%p dev=%d", (void *)pi, (int)attrib, (void *)kernel, dev);
	const struct CUfunc_st *function = function_on(kernel, dev);

	CU_NEEDS(pi != NULL && (unsigned)attrib < CU_FUNC_ATTRIBUTE_MAX);
	if (function == NULL)
		return cu_is(kernel, CU_KIND_KERNEL) ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_INVALID_HANDLE;
	*pi = function->attribute[attrib];
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuKernelSetAttribute(CUfunction_attribute attrib, int val, CUkernel kernel, CUdevice dev)
{
	CU_ENTER("attrib=%d val=%d kernel=%p dev=%d", (int)attrib, val, (void *)kernel, dev);
	struct CUfunc_st *function = function_on(kernel, dev);

	CU_NEEDS((unsigned)attrib < CU_FUNC_ATTRIBUTE_MAX);
	if (function == NULL)
		return cu_is(kernel, CU_KIND_KERNEL) ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_INVALID_HANDLE;
	return cu_function_set(function, attrib, val);
}

CUresult CUDAAPI cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice dev)
{
	CU_ENTER("kernel=%p config=%d dev=%d", (void *)kernel, (int)config, dev);
	struct CUfunc_st *function = function_on(kernel, dev);

	if (function == NULL)
		return cu_is(kernel, CU_KIND_KERNEL) ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_INVALID_HANDLE;
	function->cache_config = config;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuKernelGetParamInfo(CUkernel kernel, size_t paramIndex, size_t *paramOffset,
				      size_t *paramSize)
{
	CU_ENTER("kernel=%p index=%zu offset=%p size=%p", (void *)kernel, paramIndex, (void *)paramOffset,
		 (void *)paramSize);
	/* Images are not read: a kernel has no parameters as far as anybody knows. */
	return cu_is(kernel, CU_KIND_KERNEL) ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
}

CUresult CUDAAPI cuKernelGetParamCount(CUkernel kernel, size_t *paramCount)
{
	CU_ENTER("kernel=%p count=%p", (void *)kernel, (void *)paramCount);
	CU_NEEDS(paramCount != NULL);
	if (!cu_is(kernel, CU_KIND_KERNEL))
		return CUDA_ERROR_INVALID_HANDLE;
	*paramCount = 0;
	return CUDA_SUCCESS;
}
