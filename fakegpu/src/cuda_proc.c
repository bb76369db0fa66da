/* SPDX-License-Identifier: Apache-2.0
 *
 * Finding entry points: cuGetProcAddress in both forms, and export tables, of which there are none.
 */
#include <string.h>

#include "cuda_parts.h"
#include "symtab.h"

/* Rows of `name` in the table; the count, and the first through *first. */
static size_t rows_of(const char *name, const struct fg_symbol **first)
{
	size_t low = 0, high = fg_symtab_count, count = 0;

	while (low < high) {
		size_t middle = (low + high) / 2;

		if (strcmp(fg_symtab[middle].name, name) < 0)
			low = middle + 1;
		else
			high = middle;
	}
	*first = &fg_symtab[low];
	while (low + count < fg_symtab_count && strcmp(fg_symtab[low + count].name, name) == 0)
		count++;
	return count;
}

/* The control file may make the driver answer as if another version had been asked for. */
static int asked_version(const char *name, int version)
{
	const struct fg_control *control;
	int given = version, from = -1;

	if (fg_state == NULL || fg_state->magic != FG_STATE_MAGIC)
		return version;
	control = fg_control_now();
	for (uint32_t i = 0; i < control->form_count; i++)
		if ((int)control->form[i].from <= version && (int)control->form[i].from > from &&
		    strcmp(control->form[i].name, name) == 0) {
			given = (int)control->form[i].give;
			from = (int)control->form[i].from;
		}
	return given;
}

static CUdriverProcAddressQueryResult find(const char *name, int version, int per_thread,
					   void (**address)(void))
{
	const struct fg_symbol *row, *best = NULL;
	int driver = cu_driver_version();
	size_t count = rows_of(name, &row), of_driver = 0;

	*address = NULL;
	if (count == 0 ||
	    (fg_state != NULL && fg_state->magic == FG_STATE_MAGIC && fg_control_is_missing(name)))
		return CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
	version = asked_version(name, version);
	for (size_t i = 0; i < count; i++, row++) {
		if ((int)row->version > driver)
			continue;
		of_driver++;
		if ((int)row->version > version || (row->per_thread && !per_thread))
			continue;
		/* The youngest form that is not too young; of the same age, the per-thread one when it may
		 * be. */
		if (best == NULL ||
		    (row->per_thread == best->per_thread ? row->version >= best->version
							 : row->per_thread > best->per_thread))
			best = row;
	}
	if (best != NULL) {
		*address = best->address;
		return CU_GET_PROC_ADDRESS_SUCCESS;
	}
	return of_driver > 0 ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
			     : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
}

static CUresult check(const char *symbol, void **pfn, cuuint64_t flags)
{
	CU_NEEDS(symbol != NULL && pfn != NULL);
	CU_NEEDS((flags & ~(cuuint64_t)3) == 0 && flags != 3);
	return CUDA_SUCCESS;
}

static void put(void **pfn, void (*address)(void))
{
	memcpy(pfn, &address, sizeof address);
}

/* Programs look functions up before cuInit, and the control file has a say in that. */
static void open_once(void)
{
	if (__builtin_expect(fg_state == NULL, 0))
		fg_state_open();
}

CUresult CUDAAPI cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags,
				     CUdriverProcAddressQueryResult *symbolStatus)
{
	open_once();
	FG_CALL(__func__, "symbol=%s version=%d flags=%llu", symbol != NULL ? symbol : "(null)", cudaVersion,
		(unsigned long long)flags);
	CUdriverProcAddressQueryResult status;
	CUresult result = check(symbol, pfn, flags);
	void (*address)(void);

	if (result != CUDA_SUCCESS)
		return result;
	status =
	    find(symbol, cudaVersion, (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0, &address);
	put(pfn, address);
	if (symbolStatus != NULL)
		*symbolStatus = status;
	/* From CUDA 12 on, a name that is not there is no error: the pointer and the status tell. */
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags)
{
	open_once();
	FG_CALL(__func__, "symbol=%s version=%d flags=%llu", symbol != NULL ? symbol : "(null)", cudaVersion,
		(unsigned long long)flags);
	CUresult result = check(symbol, pfn, flags);
	void (*address)(void);

	if (result != CUDA_SUCCESS)
		return result;
	find(symbol, cudaVersion, (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0, &address);
	put(pfn, address);
	return address != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult CUDAAPI cuGetExportTable(const void **ppExportTable, const CUuuid *pExportTableId)
{
	FG_CALL(__func__, "table=%p id=%p", (const void *)ppExportTable, (const void *)pExportTableId);
	CU_NEEDS(ppExportTable != NULL && pExportTableId != NULL);
	/* The tables are undocumented; programs that ask for one must live without it. */
	*ppExportTable = NULL;
	return CUDA_ERROR_NOT_FOUND;
}
