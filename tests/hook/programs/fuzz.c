/* SPDX-License-Identifier: Apache-2.0
 *
 * Random input to everything of the hook that reads what others wrote: names, sizes, UUIDs, usage files,
 * grant files. `fuzz names|texts|usage|grants ROUNDS SEED [FOLDER]`. Built with sanitizers; it is enough that
 * nothing is reported, and where there is a second way to the right answer it is compared.
 */
#include "../../../hook/src/standalone.c"

#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "crc32.h"
#include "lookup.h"

/* A constant for the sources; here it is what the test says. */
char root[256] __asm__("aq_root");
struct aq_view *aq_view_word;
void *aq_reals[AQ_NUMBERS];

/* What the sources under test would call and never do here. */
void *aq_resolve(unsigned number)
{
	(void)number;
	abort();
}
bool aq_has(unsigned number)
{
	return number == 0;
}
bool aq_load_nvml(void)
{
	return false;
}
void aq_view_open(bool make)
{
	(void)make;
}
struct aq_usage_file *aq_view_account(unsigned index)
{
	(void)index;
	return NULL;
}
void aq_view_describe(unsigned index, const CUuuid *uuid, uint64_t memory, uint32_t cores, uint32_t priority)
{
	(void)index, (void)uuid, (void)memory, (void)cores, (void)priority;
}
void aq_view_describe_grants(void) {}
void aq_complain(int card, enum aq_complaint complaint)
{
	(void)card, (void)complaint;
}
void aq_sigbus_guard(void *map, size_t length)
{
	munmap(map, length); /* grants.c is done with it once it is bound; thousands would add up */
	if (mmap(map, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
	    MAP_FAILED)
		abort();
}
bool aq_sigbus_lost(void)
{
	return false;
}

static uint64_t state;

static uint64_t chance(void)
{
	state ^= state << 13, state ^= state >> 7, state ^= state << 17;
	return state;
}

static void fill(unsigned char *bytes, size_t size)
{
	for (size_t i = 0; i < size; i++)
		bytes[i] = (unsigned char)chance();
}

/* A name near a real one: whole, cut, longer, with another letter. */
static void fuzz_names(long rounds)
{
	char name[80];
	for (long round = 0; round < rounds; round++) {
		unsigned real = (unsigned)(chance() % AQ_NUMBERS);
		snprintf(name, sizeof(name), "%s", aq_name(real));
		size_t length = strlen(name);
		switch (chance() % 6) {
		case 1:
			name[chance() % (length + 1)] = '\0';
			break;
		case 2:
			name[chance() % length] ^= (char)(1 + chance() % 127);
			break;
		case 3:
			snprintf(name + length, sizeof(name) - length, "%s", chance() & 1 ? "_v2" : "_ptsz");
			break;
		case 4:
			fill((unsigned char *)name, length);
			break;
		case 5:
			name[0] = '\0';
			break;
		default:
			break;
		}
		const struct aq_name_cell *cell = aq_lookup(name);
		unsigned number = AQ_NO_NUMBER;
		for (unsigned i = 0; i < AQ_NUMBERS; i++)
			if (strcmp(aq_name(i), name) == 0)
				number = i;
		if (number != AQ_NO_NUMBER ? !cell || cell->number != number
					   : cell && cell->number != AQ_NO_NUMBER) {
			printf("wrong answer for %s\n", name);
			exit(1);
		}
	}
}

static void fuzz_texts(long rounds)
{
	static const char pool[] = "0123456789xXabcdefgGmMkK-+ .GPUMIG\t%\xff";
	CUuuid uuid;
	for (long round = 0; round < rounds; round++) {
		size_t length = chance() % 60;
		char *text = malloc(length + 1);
		for (size_t i = 0; i < length; i++)
			text[i] = pool[chance() % (sizeof(pool) - 1)];
		if (chance() % 3 == 0 && length >= 40)
			memcpy(text, "GPU-01234567-89ab-cdef-0123-456789abcdef", 40);
		text[length] = '\0';
		uint64_t size = parse_size(text);
		if (size != 0 && parse_percent(text) > 99)
			exit(1);
		bool valid = aq_uuid_parse(text, &uuid);
		if (valid != (length == 40 && strncmp(text, "GPU-0123", 8) == 0) && length >= 40 &&
		    strncmp(text, "GPU-0123", 8) == 0)
			exit(1);
		free(text);
	}
}

/* Every byte of a usage file may be anything; sizes and counts of its header must not lead outside of it. */
static void fuzz_usage(long rounds)
{
	size_t size = AQ_USAGE_FILE_SIZE;
	char *map = mmap(NULL, size + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	mprotect(map + size, 4096, PROT_NONE);
	struct aq_usage_file *file = (struct aq_usage_file *)(void *)map;
	for (long round = 0; round < rounds; round++) {
		struct aq_account account;
		blank_usage(file);
		for (unsigned i = 0; i < 1 + chance() % 40; i++) {
			size_t at = chance() % 3 ? chance() % 400 : 4096 + chance() % 1000;
			fill((unsigned char *)map + at, chance() % 9);
		}
		if (chance() % 4) {
			file->magic = AQ_USAGE_MAGIC;
			file->major = AQ_REGION_MAJOR;
		}
		if (aq_account_bind(&account, file, size) < 0)
			continue;
		uint64_t owner, repaired;
		int index = aq_account_claim(&account, (uint32_t)chance(), chance(), chance(), &owner);
		if (index >= 0) {
			struct aq_usage_slot *slot = aq_account_slot(&account, (uint32_t)index);
			aq_account_reserve(&account, slot, chance(), chance());
			aq_account_reserve(&account, slot, chance() % 1000, AQ_UNLIMITED);
			fill((unsigned char *)map + 128, 32);
			aq_account_release(&account, slot, chance());
			aq_account_reap(&account, (uint32_t)(chance() % account.slot_count), owner);
		}
		aq_account_settle(&account, 2, &repaired);
		if (aq_account_units(&account) > AQ_WORD_UNIT_MASK)
			exit(1);
	}
}

/* A grant file of which anything was changed is refused, or read as it was before. */
static void fuzz_grants(long rounds, const char *folder)
{
	char path[512], usage[512];
	struct aq_grant_file whole = {.magic = AQ_GRANT_MAGIC,
				      .major = 1,
				      .file_size = 4096,
				      .slot_offset = AQ_GRANT_SLOT0,
				      .slot_size = AQ_GRANT_SLOT_SIZE,
				      .selector = 2};
	struct aq_grant_slot *slot = &whole.slot[0];
	slot->generation = 2;
	slot->memory_limit = 4ull << 30;
	snprintf(slot->uuid, sizeof(slot->uuid), "GPU-01234567-89ab-cdef-0123-456789abcdef");
	slot->checksum = aq_crc32(slot, offsetof(struct aq_grant_slot, checksum));
	snprintf(root, sizeof(root), "%s", folder);
	snprintf(path, sizeof(path), "%s/grants", folder), mkdir(path, 0755);
	snprintf(path, sizeof(path), "%s/usage", folder), mkdir(path, 0755);
	snprintf(path, sizeof(path), "%s/usage/g", folder), mkdir(path, 0755);
	snprintf(path, sizeof(path), "%s/grants/g", folder);
	snprintf(usage, sizeof(usage), "%s/usage/g/region", folder);
	struct aq_usage_file *empty = calloc(1, AQ_USAGE_FILE_SIZE);
	blank_usage(empty);
	for (long round = 0; round < rounds; round++) {
		struct aq_grant_file file = whole;
		bool touched = false;
		for (unsigned i = chance() % 4; i > 0; i--) {
			size_t at = chance() % 2 ? chance() % 64 : chance() % (512 + 1024);
			((unsigned char *)&file)[at] ^= (unsigned char)(1 + chance() % 255);
			touched = touched || (at >= 512 && at < 1536);
		}
		size_t length = chance() % 8 ? sizeof(file) : chance() % sizeof(file);
		int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
		if (write(fd, &file, length) != (ssize_t)length)
			exit(2);
		close(fd);
		fd = open(usage, O_WRONLY | O_CREAT | O_TRUNC, 0644);
		if (write(fd, empty, AQ_USAGE_FILE_SIZE) != AQ_USAGE_FILE_SIZE)
			exit(2);
		close(fd);
		aq_share_count = aq_card_count = 0;
		enum aq_mode mode = aq_grants_read();
		if (mode == AQ_MODE_GRANT &&
		    (aq_share_count != 1 || aq_shares[0].limit != (4ull << 30) >> AQ_UNIT_SHIFT)) {
			printf("a changed grant was believed\n");
			exit(1);
		}
		if (mode == AQ_MODE_OFF || (mode == AQ_MODE_GRANT && touched) ||
		    (mode == AQ_MODE_REFUSED && !aq_refusal[0]))
			exit(1);
	}
	free(empty);
}

int main(int count, char **words)
{
	if (count < 4)
		return 2;
	long rounds = atol(words[2]);
	state = strtoull(words[3], NULL, 10) * 0x9e3779b97f4a7c15ull + 1;
	if (strcmp(words[1], "names") == 0)
		fuzz_names(rounds);
	else if (strcmp(words[1], "texts") == 0)
		fuzz_texts(rounds);
	else if (strcmp(words[1], "usage") == 0)
		fuzz_usage(rounds);
	else
		fuzz_grants(rounds, words[4]);
	return 0;
}
