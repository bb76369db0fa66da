/* SPDX-License-Identifier: Apache-2.0
 *
 * Finding things in loaded objects without the functions the hook stands in for: `dlsym` of libc itself can
 * only be found by reading libc's symbol table, since every ordinary way of naming it leads back to us.
 */
#ifndef ALIQUOT_OBJECTS_H
#define ALIQUOT_OBJECTS_H

#include <stdbool.h>
#include <stdint.h>

struct aq_object {
	const char *path; /* as the loader names it; "" = the program */
	const char *soname; /* NULL: none */
	uintptr_t start; /* lowest and one past the highest mapped address */
	uintptr_t end;
};

/* Address of a function in the first loaded object whose file name begins with one of `libraries`
 * (NULL-ended). */
void *aq_elf_function(const char *const *libraries, const char *name);

/* The object that `address` lies in. False: in none. */
bool aq_elf_object_of(const void *address, struct aq_object *out);

#endif
