/* SPDX-License-Identifier: Apache-2.0
 *
 * UUIDs: out of a seed, out of text, into text. Pure functions; the same seed and number give the same UUID
 * on every machine.
 */
#ifndef FAKEGPU_UUID_H
#define FAKEGPU_UUID_H

#include <stddef.h>
#include <stdint.h>

/* A stream of numbers from a text and a number. */
uint64_t fg_seed(const char *text, uint64_t number);
uint64_t fg_seed_next(uint64_t *state);
/* FNV-1a, to tell texts apart. */
uint64_t fg_hash(const void *bytes, size_t length);

void fg_uuid_make(uint64_t seed, uint8_t uuid[16]);
/* Writes `prefix` ("GPU-", "MIG-") and the UUID; `size` at least FG_UUID_TEXT_LEN. */
void fg_uuid_format(const char *prefix, const uint8_t uuid[16], char *text, size_t size);
/* Reads "GPU-…" or "MIG-…" or a bare UUID; -1 when it is none. */
int fg_uuid_parse(const char *text, uint8_t uuid[16]);

#endif
