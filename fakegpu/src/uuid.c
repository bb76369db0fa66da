/* SPDX-License-Identifier: Apache-2.0
 *
 * UUIDs and the numbers they come from. See uuid.h.
 */
#include "uuid.h"

#include <stdio.h>
#include <string.h>

uint64_t fg_hash(const void *bytes, size_t length)
{
	const unsigned char *at = bytes;
	uint64_t hash = 0xcbf29ce484222325ull;

	for (size_t i = 0; i < length; i++)
		hash = (hash ^ at[i]) * 0x100000001b3ull;
	return hash;
}

uint64_t fg_seed_next(uint64_t *state)
{
	/* SplitMix64. */
	uint64_t z = *state += 0x9e3779b97f4a7c15ull;

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

uint64_t fg_seed(const char *text, uint64_t number)
{
	uint64_t state = fg_hash(text, strlen(text)) ^ (number * 0xd6e8feb86659fd93ull);

	return fg_seed_next(&state);
}

void fg_uuid_make(uint64_t seed, uint8_t uuid[16])
{
	uint64_t words[2] = {fg_seed_next(&seed), fg_seed_next(&seed)};

	memcpy(uuid, words, 16);
	uuid[6] = (uint8_t)((uuid[6] & 0x0f) | 0x40); /* version 4 … */
	uuid[8] = (uint8_t)((uuid[8] & 0x3f) | 0x80); /* … of RFC 4122 */
}

void fg_uuid_format(const char *prefix, const uint8_t uuid[16], char *text, size_t size)
{
	snprintf(text, size, "%s%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", prefix,
		 uuid[0], uuid[1], uuid[2], uuid[3], uuid[4], uuid[5], uuid[6], uuid[7], uuid[8], uuid[9],
		 uuid[10], uuid[11], uuid[12], uuid[13], uuid[14], uuid[15]);
}

static int digit(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	if (c >= 'a' && c <= 'f')
		return c - 'a' + 10;
	if (c >= 'A' && c <= 'F')
		return c - 'A' + 10;
	return -1;
}

int fg_uuid_parse(const char *text, uint8_t uuid[16])
{
	int bytes = 0;

	if (strncmp(text, "GPU-", 4) == 0 || strncmp(text, "MIG-", 4) == 0)
		text += 4;
	while (bytes < 16) {
		if (bytes == 4 || bytes == 6 || bytes == 8 || bytes == 10)
			if (*text++ != '-')
				return -1;
		int high = digit(text[0]);
		int low = high < 0 ? -1 : digit(text[1]);

		if (low < 0)
			return -1;
		uuid[bytes++] = (uint8_t)(high << 4 | low);
		text += 2;
	}
	return *text == '\0' ? 0 : -1;
}
