/* SPDX-License-Identifier: Apache-2.0
 *
 * See objects.h. Reads only what the loader has mapped and relocated; allocates nothing.
 */
#include "objects.h"

#include <elf.h>
#include <link.h>
#include <string.h>

struct dynamic {
	const char *strings;
	const ElfW(Sym) * symbols;
	const uint32_t *gnu_hash;
	const uint32_t *sysv_hash;
	const char *soname;
};

/* Loaders differ in whether they relocate the addresses in the dynamic section. */
static const void *at(uintptr_t base, uintptr_t value)
{
	return (const void *)(value < base ? base + value : value);
}

static bool read_dynamic(const struct dl_phdr_info *info, struct dynamic *out)
{
	const ElfW(Dyn) *entry = NULL;
	uintptr_t base = info->dlpi_addr;
	uintptr_t soname = UINTPTR_MAX;
	memset(out, 0, sizeof(*out));
	for (int i = 0; i < info->dlpi_phnum; i++)
		if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
			entry = (const ElfW(Dyn) *)(base + info->dlpi_phdr[i].p_vaddr);
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
	return out->strings && out->symbols;
}

static const ElfW(Sym) * matches(const struct dynamic *dynamic, uint32_t index, const char *name)
{
	const ElfW(Sym) *symbol = &dynamic->symbols[index];
	if (symbol->st_shndx == SHN_UNDEF || ELF64_ST_TYPE(symbol->st_info) != STT_FUNC)
		return NULL;
	return strcmp(dynamic->strings + symbol->st_name, name) == 0 ? symbol : NULL;
}

static const ElfW(Sym) * find_gnu(const struct dynamic *dynamic, const char *name)
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
			const ElfW(Sym) *symbol = matches(dynamic, index, name);
			if (symbol)
				return symbol;
		}
		if (link & 1)
			return NULL;
	}
}

static const ElfW(Sym) * find_sysv(const struct dynamic *dynamic, const char *name)
{
	for (uint32_t index = 0; index < dynamic->sysv_hash[1]; index++) {
		const ElfW(Sym) *symbol = matches(dynamic, index, name);
		if (symbol)
			return symbol;
	}
	return NULL;
}

struct function_search {
	const char *const *libraries;
	const char *name;
	void *found;
};

static bool file_begins(const char *path, const char *prefix)
{
	const char *slash = strrchr(path, '/');
	const char *file = slash ? slash + 1 : path;
	return strncmp(file, prefix, strlen(prefix)) == 0;
}

static int search_function(struct dl_phdr_info *info, size_t size, void *data)
{
	struct function_search *search = data;
	struct dynamic dynamic;
	(void)size;
	for (const char *const *library = search->libraries; *library; library++) {
		if (!file_begins(info->dlpi_name, *library) || !read_dynamic(info, &dynamic))
			continue;
		const ElfW(Sym) *symbol = NULL;
		if (dynamic.gnu_hash)
			symbol = find_gnu(&dynamic, search->name);
		else if (dynamic.sysv_hash)
			symbol = find_sysv(&dynamic, search->name);
		if (symbol) {
			search->found = (void *)(info->dlpi_addr + symbol->st_value);
			return 1;
		}
	}
	return 0;
}

void *aq_elf_function(const char *const *libraries, const char *name)
{
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
	read_dynamic(info, &dynamic);
	*search->out = (struct aq_object){info->dlpi_name, dynamic.soname, start, end};
	return 1;
}

bool aq_elf_object_of(const void *address, struct aq_object *out)
{
	struct object_search search = {(uintptr_t)address, out};
	return dl_iterate_phdr(search_object, &search) == 1;
}
