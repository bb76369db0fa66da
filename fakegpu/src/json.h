/* SPDX-License-Identifier: Apache-2.0
 *
 * A strict reader of JSON: RFC 8259 without exceptions, no duplicate keys, no depth beyond 16.
 *
 * The tree borrows one block of memory that json_free releases. Nothing here interprets a value; the readers
 * below refuse what they were not asked for and say where it stands ("cards[2].memory_bytes").
 */
#ifndef FAKEGPU_JSON_H
#define FAKEGPU_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum json_kind { JSON_NULL, JSON_FALSE, JSON_TRUE, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT };

struct json {
	enum json_kind kind;
	const char *key; /* name within an object, else NULL */
	const char *string; /* JSON_STRING: decoded, NUL-terminated, no NUL inside; JSON_NUMBER: as written */
	struct json *first; /* children of arrays and objects */
	struct json *next; /* sibling */
	struct json *parent;
	uint32_t index; /* among its siblings */
	bool seen; /* asked for by a reader: what stays unseen is an unknown key */
};

struct json_document {
	struct json *root;
	void *memory;
};

/* Collects the first complaint; later ones are dropped. */
struct json_report {
	char *text;
	size_t size;
	bool failed;
};

/* 0, or -1 with line and column in `report`. */
int json_parse(const char *text, size_t length, struct json_document *document, struct json_report *report);
void json_free(struct json_document *document);

/* Writes "<path>: <message>" unless something was reported before. Returns -1. */
int json_complain(struct json_report *report, const struct json *at, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The member `key` of an object, marked as seen, or NULL. */
struct json *json_member(struct json *object, const char *key);
/* Complains about the first member nobody asked for. */
int json_no_others(struct json *object, struct json_report *report);

/* Readers of one value; `value` NULL (absent) leaves the target alone. -1 after a complaint. */
int json_read_u64(struct json *value, uint64_t *target, uint64_t low, uint64_t high,
		  struct json_report *report);
int json_read_u32(struct json *value, uint32_t *target, uint32_t low, uint32_t high,
		  struct json_report *report);
int json_read_i64(struct json *value, int64_t *target, int64_t low, int64_t high, struct json_report *report);
int json_read_bool(struct json *value, uint32_t *target, struct json_report *report);
int json_read_text(struct json *value, char *target, size_t size, struct json_report *report);
/* Bytes: an integer, or text with a unit ("24576MiB", "80GiB", "512KiB"). */
int json_read_bytes(struct json *value, uint64_t *target, uint64_t high, struct json_report *report);
int json_want(const struct json *value, enum json_kind kind, struct json_report *report);

#endif
