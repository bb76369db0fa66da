/* SPDX-License-Identifier: Apache-2.0
 *
 * See objects.h. Reads only what the loader has mapped and relocated; allocates nothing.
 *
 * Finding a function of libc calls nothing of libc: a sanitizer or another preload that asks us for the
 * addresses of strcmp, dl_iterate_phdr and the like stands in front of them itself, and is not ready yet.
 */
#include "objects.h"

#include <elf.h>
#include <link.h>

#include "lookup.h"

typedef ElfW(Sym) symbol_type;
typedef ElfW(Dyn) dynamic_type;

struct dynamic {
	const char *strings;
	const symbol_type *symbols;
	const uint32_t *gnu_hash;
	const uint32_t *sysv_hash;
	const char *soname;
};

/* Loaders differ in whether they relocate the addresses in the dynamic section. */
static const void *at(uintptr_t base, uintptr_t value)
{
	return (const void *)(value < base ? base + value : value);
}

static void read_dynamic(uintptr_t base, const dynamic_type *entry, struct dynamic *out)
{
	uintptr_t soname = UINTPTR_MAX;
	out->strings = NULL;
	out->symbols = NULL;
	out->gnu_hash = NULL;
	out->sysv_hash = NULL;
	out->soname = NULL;
	for (; entry && entry->d_tag != DT_NULL; entry++) {
		if (entry->d_tag == DT_STRTAB)
			out->strings = at(base, entry->d_un.d_ptr);
		else if (entry->d_tag == DT_SYMTAB)
			out->symbols = at(base, entry->d_un.d_ptr);
		else if (entry->d_tag == DT_GNU_HASH)
			out->gnu_hash = at(base, entry->d_un.d_ptr);
		else if (entry->d_tag == DT_HASH)
			out->sysv_hash = at(base, entry->d_un.d_ptr);
		else if (entry->d_tag == DT_SONAME)
			soname = entry->d_un.d_val;
	}
	if (out->strings && soname != UINTPTR_MAX)
		out->soname = out->strings + soname;
}

static const symbol_type *matches(const struct dynamic *dynamic, uint32_t index, const char *name)
{
	const symbol_type *symbol = &dynamic->symbols[index];
	if (symbol->st_shndx == SHN_UNDEF || ELF64_ST_TYPE(symbol->st_info) != STT_FUNC)
		return NULL;
	return aq_same_text(dynamic->strings + symbol->st_name, name) ? symbol : NULL;
}

static const symbol_type *find_gnu(const struct dynamic *dynamic, const char *name)
{
	const uint32_t *table = dynamic->gnu_hash;
	uint32_t buckets = table[0], first = table[1], bloom_words = table[2];
	const uint32_t *bucket = table + 4 + (size_t)bloom_words * (sizeof(ElfW(Addr)) / 4);
	const uint32_t *chain = bucket + buckets;
	uint32_t hash = 5381;
	for (const char *byte = name; *byte; byte++)
		hash = hash * 33 + (unsigned char)*byte;
	uint32_t index = bucket[hash % buckets];
	if (index < first)
		return NULL;
	for (;; index++) {
		uint32_t link = chain[index - first];
		if ((link | 1) == (hash | 1)) {
			const symbol_type *symbol = matches(dynamic, index, name);
			if (symbol)
				return symbol;
		}
		if (link & 1)
			return NULL;
	}
}

static const symbol_type *find_sysv(const struct dynamic *dynamic, const char *name)
{
	for (uint32_t index = 0; index < dynamic->sysv_hash[1]; index++) {
		const symbol_type *symbol = matches(dynamic, index, name);
		if (symbol)
			return symbol;
	}
	return NULL;
}

static bool file_begins(const char *path, const char *prefix)
{
	const char *file = path;
	for (; *path; path++)
		if (*path == '/')
			file = path + 1;
	for (; *prefix && *file == *prefix; prefix++)
		file++;
	return *prefix == '\0';
}

/* The function in an object, if its file is one of `libraries`. */
static void *function_in(const char *path, uintptr_t base, const dynamic_type *entry,
			 const char *const *libraries, const char *name)
{
	struct dynamic dynamic;
	for (; *libraries; libraries++) {
		if (!file_begins(path, *libraries))
			continue;
		const symbol_type *symbol = NULL;
		read_dynamic(base, entry, &dynamic);
		if (dynamic.strings && dynamic.symbols && dynamic.gnu_hash)
			symbol = find_gnu(&dynamic, name);
		else if (dynamic.strings && dynamic.symbols && dynamic.sysv_hash)
			symbol = find_sysv(&dynamic, name);
		if (symbol)
			return (void *)(base + symbol->st_value);
	}
	return NULL;
}

static const dynamic_type *dynamic_of(const struct dl_phdr_info *info)
{
	for (int i = 0; i < info->dlpi_phnum; i++)
		if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
			return (const dynamic_type *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
	return NULL;
}

struct function_search {
	const char *const *libraries;
	const char *name;
	void *found;
};

static int search_function(struct dl_phdr_info *info, size_t size, void *data)
{
	struct function_search *search = data;
	(void)size;
	search->found =
	    function_in(info->dlpi_name, info->dlpi_addr, dynamic_of(info), search->libraries, search->name);
	return search->found != NULL;
}

/* The loader's list of objects, as debuggers read it. Weak: it lies in the loader, which the hook does not
 * name as a library that it needs. */
extern struct r_debug _r_debug __attribute__((weak));

void *aq_elf_function(const char *const *libraries, const char *name)
{
	/* libc is among the first in the list and never leaves it, so nothing has to be locked. */
	struct r_debug *loader = &_r_debug;
	for (const struct link_map *map = loader ? loader->r_map : NULL; map; map = map->l_next) {
		void *found = NULL;
		if (map->l_name)
			found = function_in(map->l_name, map->l_addr, map->l_ld, libraries, name);
		if (found)
			return found;
	}
	struct function_search search = {libraries, name, NULL};
	dl_iterate_phdr(search_function, &search);
	return search.found;
}

struct object_search {
	uintptr_t address;
	struct aq_object *out;
};

static int search_object(struct dl_phdr_info *info, size_t size, void *data)
{
	const struct object_search *search = data;
	uintptr_t start = UINTPTR_MAX, end = 0;
	bool inside = false;
	(void)size;
	for (int i = 0; i < info->dlpi_phnum; i++) {
		if (info->dlpi_phdr[i].p_type != PT_LOAD)
			continue;
		uintptr_t from = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
		uintptr_t to = from + info->dlpi_phdr[i].p_memsz;
		inside = inside || (search->address >= from && search->address < to);
		start = from < start ? from : start;
		end = to > end ? to : end;
	}
	if (!inside)
		return 0;
	struct dynamic dynamic;
	read_dynamic(info->dlpi_addr, dynamic_of(info), &dynamic);
	*search->out = (struct aq_object){info->dlpi_name, dynamic.soname, start, end};
	return 1;
}

bool aq_elf_object_of(const void *address, struct aq_object *out)
{
	struct object_search search = {(uintptr_t)address, out};
	return dl_iterate_phdr(search_object, &search) == 1;
}
