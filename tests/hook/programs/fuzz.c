/* SPDX-License-Identifier: Apache-2.0
 *
 * Any input to everything of the hook that reads what others wrote. Built four times, with FUZZ_names,
 * FUZZ_environment, FUZZ_usage or FUZZ_grants, for libFuzzer (clang) or, with ALONE, with a driver of its
 * own: `fuzz ROUNDS SEED`. Built with sanitizers; where there is a second way to the right answer it is
 * compared, and a wrong one aborts.
 *
 * An input is a tape of decisions: what is drawn from it (draw) chooses what is written where. Behind its end
 * stand numbers that follow from it, so that the same input always means the same.
 */
#include <stdint.h>

/* The environment of the sources under test is the input's. */
static char *fuzz_getenv(const char *name);
#define getenv fuzz_getenv
#include "../../../hook/src/standalone.c"
#undef getenv

#include <errno.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "crc32.h"
#include "files.h"
#include "lookup.h"

char root[256] __asm__("aq_root") = "/r";
struct aq_view *aq_view_word;
void *aq_reals[AQ_NUMBERS];

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* ---- what the sources under test would call and never do here --------------------------------------------
 */

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
void aq_wait_read(void) {}
void aq_complain(int card, enum aq_complaint complaint)
{
	(void)card, (void)complaint;
}
void aq_sigbus_guard(void *map, size_t length)
{
	(void)map, (void)length;
}
bool aq_sigbus_lost(void)
{
	return false;
}

/* ---- the tape -------------------------------------------------------------------------------------------
 */

static const uint8_t *tape, *tape_end;
static uint64_t state;

static void rewind_to(const uint8_t *data, size_t size)
{
	tape = data;
	tape_end = data + size;
	state = 0x9e3779b97f4a7c15ull;
	for (size_t i = 0; i < size; i++)
		state = (state ^ data[i]) * 0x100000001b3ull;
	state |= 1;
}

static uint64_t chance(void)
{
	state ^= state << 13, state ^= state >> 7, state ^= state << 17;
	return state;
}

static uint64_t draw(unsigned bytes)
{
	uint64_t value = 0;
	for (unsigned i = 0; i < bytes; i++)
		value = value << 8 | (tape < tape_end ? *tape++ : chance() & 0xff);
	return value;
}

/* The rest of the tape as a text in memory of its own, so that a step beyond its end is noticed. */
static char *rest(size_t most)
{
	size_t length = (size_t)(tape_end - tape) < most ? (size_t)(tape_end - tape) : most;
	char *text = malloc(length + 1);
	for (size_t i = 0; i < length; i++)
		text[i] = (char)draw(1);
	text[length] = '\0';
	return text;
}

#define MUST(condition)                                           \
	do {                                                      \
		if (!(condition)) {                               \
			fprintf(stderr, "not: " #condition "\n"); \
			abort();                                  \
		}                                                 \
	} while (0)

static char *variable_value[4 + 2 * 17];

#ifdef FUZZ_environment
static const char *const variable_name[] = {"CUDA_DEVICE_MEMORY_LIMIT", "CUDA_DEVICE_SM_LIMIT",
					    "GPU_CORE_UTILIZATION_POLICY", "CUDA_TASK_PRIORITY",
					    "CUDA_OVERSUBSCRIBE"};
#endif

/* By number: the five above, then the indexed ones of the first two. */
static char *fuzz_getenv(const char *name)
{
#ifdef FUZZ_environment
	for (unsigned i = 0; i < 5; i++)
		if (strcmp(name, variable_name[i]) == 0)
			return variable_value[i];
	for (unsigned i = 0; i < 2; i++) {
		size_t length = strlen(variable_name[i]);
		if (strncmp(name, variable_name[i], length) == 0 && name[length] == '_')
			return variable_value[5 + i * 16 + (unsigned)atoi(name + length + 1)];
	}
#endif
	(void)name, (void)variable_value;
	return NULL;
}

/* ---- names ------------------------------------------------------------------------------------------------
 */

#ifdef FUZZ_names
static const char *sorted[AQ_NUMBERS];

static int by_text(const void *one, const void *other)
{
	return strcmp(*(const char *const *)one, *(const char *const *)other);
}

/* A name near a real one, or any text. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	if (sorted[0] == NULL) {
		for (unsigned i = 0; i < AQ_NUMBERS; i++)
			sorted[i] = aq_name(i);
		qsort(sorted, AQ_NUMBERS, sizeof(sorted[0]), by_text);
	}
	rewind_to(data, size);
	unsigned how = (unsigned)draw(1) % 7;
	unsigned real = (unsigned)(draw(2) % AQ_NUMBERS);
	char *text = rest(100), *name = malloc(strlen(aq_name(real)) + strlen(text) + 9);
	size_t length = strlen(strcpy(name, how == 6 ? text : aq_name(real)));
	if (how == 1)
		name[draw(1) % (length + 1)] = '\0';
	else if (how == 2)
		name[draw(1) % length] ^= (char)(1 + draw(1) % 127);
	else if (how == 3)
		strcat(name, draw(1) & 1 ? "_v2" : "_ptsz");
	else if (how == 4)
		strcat(name, text);
	else if (how == 5)
		memmove(name, name + 1, length);
	const struct aq_name_cell *cell = aq_lookup(name);
	const char *key = name;
	bool known = bsearch(&key, sorted, AQ_NUMBERS, sizeof(sorted[0]), by_text) != NULL;
	if (known)
		MUST(cell && cell->number < AQ_NUMBERS && strcmp(aq_name(cell->number), name) == 0);
	else
		MUST(!cell || cell->number == AQ_NO_NUMBER);
	free(name);
	free(text);
	return 0;
}
#endif

/* ---- HAMi's variables, and UUIDs ----------------------------------------------------------------------- */

#ifdef FUZZ_environment
/* A value: one that means something, or anything. */
static char *value(void)
{
	static const char *const some[] = {"0",       "1g",   "4096m",    "0x10M",
					   "-1",      "99",   "100",      "force",
					   "DISABLE", "true", "1048576k", "18446744073709551615g"};
	unsigned how = (unsigned)draw(1);
	if (how < 64)
		return strdup(some[how % 12]);
	size_t length = how % 24;
	char *text = malloc(length + 1);
	for (size_t i = 0; i < length; i++)
		text[i] = (char)draw(1);
	text[length] = '\0';
	return text;
}

/* What the text means, found in another way: digits, a base, a suffix, nothing else. */
static uint64_t meant(const char *text)
{
	static const char digits[] = "0123456789abcdef";
	unsigned __int128 number = 0;
	unsigned base = 10;
	while (*text && strchr(" \t\n\v\f\r", *text))
		text++;
	if (*text == '-')
		return UINT64_MAX; /* strtoull takes it after a space; what it makes of that is not told here
				    */
	text += *text == '+';
	if (text[0] == '0' && (text[1] | 32) == 'x' && text[2] && strchr(digits, text[2] | 32) &&
	    text[2] >= '0')
		base = 16, text += 2;
	else if (text[0] == '0')
		base = 8;
	const char *begin = text;
	for (; *text; text++) {
		const char *digit = strchr(digits, *text >= 'A' && *text <= 'Z' ? *text | 32 : *text);
		if (digit == NULL || (unsigned)(digit - digits) >= base)
			break;
		number = number * base + (unsigned)(digit - digits);
		if (number > UINT64_MAX)
			number = UINT64_MAX;
	}
	if (text == begin)
		return 0;
	unsigned shift = 0;
	if (*text && strchr("gmkGMK", *text))
		shift = (*text | 32) == 'g' ? 30 : (*text | 32) == 'm' ? 20 : 10, text++;
	if (*text || number << shift > UINT64_MAX)
		return 0;
	return (uint64_t)(number << shift);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static const char uuid_text[] = "GPU-01234567-89ab-cdef-0123-456789abcdef";
	CUuuid uuid;
	rewind_to(data, size);
	char *text = rest(draw(1) % 64);
	uint64_t expected = meant(text);
	if (expected != UINT64_MAX)
		MUST(parse_size(text) == expected);
	/* A UUID is believed if it is one: four letters, 32 digits, single dashes before pairs. */
	if (draw(1) & 1) {
		char *near = strdup(uuid_text);
		for (unsigned i = draw(1) % 3; i > 0; i--)
			near[draw(1) % 40] = (char)draw(1);
		unsigned digits = 0;
		bool clean = memcmp(near, "GPU-", 4) == 0 || memcmp(near, "MIG-", 4) == 0;
		for (const char *at = near + 4; clean && *at; at++)
			digits += *at != '-';
		if (aq_uuid_parse(near, &uuid))
			MUST(clean && digits == 32);
		MUST(strcmp(near, uuid_text) != 0 || aq_uuid_parse(near, &uuid));
		free(near);
	}
	(void)aq_uuid_parse(text, &uuid);
	for (unsigned i = 0; i < sizeof(variable_value) / sizeof(variable_value[0]); i++)
		variable_value[i] = draw(1) % 3 == 0 ? value() : NULL;
	enum aq_mode mode = aq_standalone_read();
	bool any = false;
	for (unsigned i = 0; i < MOST_INDICES; i++) {
		MUST(limits.cores[i] <= 99);
		any = any || limits.memory[i] || limits.cores[i];
	}
	MUST(mode == (any ? AQ_MODE_STANDALONE : AQ_MODE_OFF));
	MUST(limits.policy <= AQ_CORE_DISABLE && limits.priority <= 1);
	for (unsigned i = 0; i < sizeof(variable_value) / sizeof(variable_value[0]); i++) {
		free(variable_value[i]);
		variable_value[i] = NULL;
	}
	free(text);
	return 0;
}
#endif

/* ---- usage files
 * -------------------------------------------------------------------------------------------- */

/* `size` bytes that end where nothing may be read any more. */
static void *fenced(size_t size)
{
	size_t whole = (size + 4095) / 4096 * 4096;
	char *map = mmap(NULL, whole + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (map == MAP_FAILED || mprotect(map + whole, 4096, PROT_NONE) < 0)
		abort();
	return map + (whole - size);
}

/* Up to 40 places of a usage file get other bytes: mostly in the header, the bucket and the first slots. */
static void scribble(char *map, size_t size)
{
	for (unsigned i = draw(1) % 40; i > 0; i--) {
		unsigned where = (unsigned)draw(1) % 8;
		size_t at = where < 5 ? draw(2) % 400 : where < 7 ? 4096 + draw(2) % 1000 : draw(3) % size;
		for (unsigned length = draw(1) % 9; length > 0 && at < size; length--)
			map[at++] = (char)draw(1);
	}
}

/* Every byte of a usage file may be anything; sizes and counts of its header must not lead outside of it. */
#ifdef FUZZ_usage
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static char *map;
	struct aq_account account;
	uint64_t owner, repaired;
	if (map == NULL)
		map = fenced(AQ_USAGE_FILE_SIZE);
	struct aq_usage_file *file = (struct aq_usage_file *)(void *)map;
	rewind_to(data, size);
	memset(map, 0, AQ_USAGE_FILE_SIZE);
	blank_usage(file);
	scribble(map, AQ_USAGE_FILE_SIZE);
	if (draw(1) % 4) {
		file->magic = AQ_USAGE_MAGIC;
		file->major = AQ_REGION_MAJOR;
	}
	if (aq_account_bind(&account, file, AQ_USAGE_FILE_SIZE) < 0)
		return 0;
	MUST(account.slot_count > 0);
	int index = aq_account_claim(&account, (uint32_t)draw(4), draw(8), draw(8), &owner);
	if (index >= 0) {
		struct aq_usage_slot *slot = aq_account_slot(&account, (uint32_t)index);
		aq_account_reserve(&account, slot, draw(8), draw(8));
		aq_account_reserve(&account, slot, draw(2) % 1000, AQ_UNLIMITED);
		scribble(map, AQ_USAGE_FILE_SIZE);
		uint64_t before = aq_account_units(&account), units = draw(2);
		if (aq_account_reserve(&account, slot, units, 5000) == 0)
			MUST(before + units <= 5000);
		aq_account_release(&account, slot, draw(8));
		aq_account_reap(&account, (uint32_t)(draw(2) % account.slot_count), owner);
		MUST(aq_account_used_slots(&account) <= account.slot_count);
	}
	aq_account_settle(&account, 2, &repaired);
	MUST(aq_account_units(&account) <= AQ_WORD_UNIT_MASK);
	return 0;
}
#endif

/* ---- grant files
 * -------------------------------------------------------------------------------------------- */

/* One grant of which anything may have been changed, and its usage file, as files in memory. */
static struct aq_grant_file *grant_file;
static char *usage_file;
static size_t grant_length, usage_length;
static char grant_name[300];
static unsigned grant_count;

#ifdef FUZZ_grants
bool aq_path(char *out, size_t size, const char *first, const char *second, const char *third)
{
	return snprintf(out, size, "%s/%s%s%s", first, second, third ? "/" : "", third ? third : "") <
	       (int)size;
}

int aq_list_folder(const char *path, void (*visit)(const char *name, void *argument), void *argument)
{
	(void)path;
	for (unsigned i = 0; i < grant_count; i++)
		visit(grant_name, argument);
	return grant_count ? 0 : -ENOENT;
}

int aq_map_file(const char *path, size_t need, bool writable, void **map, size_t *length)
{
	(void)path;
	*length = writable ? usage_length : grant_length;
	*map = writable ? usage_file : (char *)grant_file;
	return *length < need ? -EPROTO : 0;
}

long aq_read_file(const char *path, char *buffer, size_t size)
{
	(void)path, (void)buffer, (void)size;
	return -ENOENT;
}

static void whole_grant(struct aq_grant_file *file)
{
	*file = (struct aq_grant_file){.magic = AQ_GRANT_MAGIC,
				       .major = 1,
				       .file_size = 4096,
				       .slot_offset = AQ_GRANT_SLOT0,
				       .slot_size = AQ_GRANT_SLOT_SIZE,
				       .selector = 2};
	struct aq_grant_slot *slot = &file->slot[0];
	slot->generation = 2;
	slot->memory_limit = 4ull << 30;
	strcpy(slot->uuid, "GPU-01234567-89ab-cdef-0123-456789abcdef");
	slot->checksum = aq_crc32(slot, offsetof(struct aq_grant_slot, checksum));
}

/* It is refused, or read as it was before; with a checksum that fits, nothing that stands in it does harm. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	if (grant_file == NULL) {
		grant_file = fenced(AQ_GRANT_FILE_SIZE);
		usage_file = fenced(AQ_USAGE_FILE_SIZE);
	}
	rewind_to(data, size);
	memset(usage_file, 0, AQ_USAGE_HEADER_SIZE);
	blank_usage((struct aq_usage_file *)(void *)usage_file);
	whole_grant(grant_file);
	unsigned how = (unsigned)draw(1);
	grant_count = how % 16 == 0 ? 0 : how % 16 == 1 ? (unsigned)draw(1) % 70 : 1;
	grant_length = how % 16 == 2 ? draw(2) % 5000 : AQ_GRANT_FILE_SIZE;
	usage_length = how % 16 == 3 ? draw(3) % (2 * AQ_USAGE_FILE_SIZE) : AQ_USAGE_FILE_SIZE;
	if (usage_length > AQ_USAGE_FILE_SIZE)
		usage_length = AQ_USAGE_FILE_SIZE;
	strcpy(grant_name, "g");
	if (how % 16 == 4)
		memset(grant_name, 'n', sizeof(grant_name) - 1);
	bool sealed = how >= 128;
	for (unsigned i = draw(1) % 6; i > 0; i--) {
		size_t at = draw(1) % 2 ? draw(1) % 64 : draw(2) % (AQ_GRANT_SLOT0 + AQ_GRANT_SLOT_SIZE);
		((unsigned char *)grant_file)[at] ^= (unsigned char)(1 + draw(1) % 255);
	}
	struct aq_grant_slot *slot = &grant_file->slot[0];
	if (sealed)
		slot->checksum = aq_crc32(slot, offsetof(struct aq_grant_slot, checksum));
	if (how % 16 == 5)
		scribble(usage_file, AQ_USAGE_FILE_SIZE);
	aq_share_count = aq_card_count = 0;
	aq_refusal[0] = '\0';
	enum aq_mode mode = aq_grants_read();
	MUST(mode == AQ_MODE_GRANT || mode == AQ_MODE_REFUSED || (mode == AQ_MODE_OFF && grant_count == 0));
	MUST(mode != AQ_MODE_REFUSED || aq_refusal[0]);
	if (mode != AQ_MODE_GRANT)
		return 0;
	MUST(grant_count <= AQ_MAX_SHARES && aq_share_count == grant_count && aq_card_count == 1);
	MUST(sealed || aq_shares[0].limit == (4ull << 30) >> AQ_UNIT_SHIFT);
	MUST(sealed || aq_shares[0].core_percent == 0);
	/* It changes under a program that runs: damaged again, it leaves what was in force. */
	uint64_t limit = aq_shares[0].limit;
	grant_file->selector = draw(1) % 4;
	slot->memory_limit ^= draw(8);
	MUST(aq_share_limit(&aq_shares[0]) == limit || grant_file->selector == slot->generation);
	return 0;
}
#else
static inline void unused(void)
{
	(void)grant_file, (void)usage_file, (void)grant_length, (void)usage_length, (void)grant_name,
	    (void)grant_count, (void)fenced, (void)scribble, (void)rest, (void)unused;
}
#endif

#ifdef ALONE
int main(int count, char **words)
{
	uint64_t own = count == 3 ? strtoull(words[2], NULL, 10) * 0x9e3779b97f4a7c15ull + 1 : 1;
	long rounds = count == 3 ? atol(words[1]) : 0;
	for (long round = 0; round < rounds; round++) {
		own ^= own << 13, own ^= own >> 7, own ^= own << 17;
		size_t size = own % 300;
		uint8_t *data = malloc(size + 1);
		uint64_t bits = own;
		for (size_t i = 0; i < size; i++)
			bits = bits * 6364136223846793005ull + 1442695040888963407ull,
			data[i] = (uint8_t)(bits >> 56);
		LLVMFuzzerTestOneInput(data, size);
		free(data);
	}
	printf("%ld\n", rounds);
	return rounds ? 0 : 2;
}
#endif
