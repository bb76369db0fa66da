/* SPDX-License-Identifier: Apache-2.0
 *
 * Single values out of a JSON tree: bounds, units, and complaints that name the place. See json.h.
 */
#include "json.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t write_path(const struct json *at, char *out, size_t size)
{
	size_t used;
	int more;

	if (at == NULL || at->parent == NULL)
		return 0;
	used = write_path(at->parent, out, size);
	if (at->key != NULL)
		more = snprintf(out + used, size - used, "%s%s", used > 0 ? "." : "", at->key);
	else
		more = snprintf(out + used, size - used, "[%" PRIu32 "]", at->index);
	if (more < 0)
		return used;
	return used + (size_t)more < size ? used + (size_t)more : size - 1;
}

int json_complain(struct json_report *report, const struct json *at, const char *format, ...)
{
	char path[160] = "", message[256];
	va_list arguments;

	if (report->failed)
		return -1;
	report->failed = true;
	write_path(at, path, sizeof path);
	va_start(arguments, format);
	vsnprintf(message, sizeof message, format, arguments);
	va_end(arguments);
	snprintf(report->text, report->size, "%s%s%s", path, path[0] != '\0' ? ": " : "", message);
	return -1;
}

struct json *json_member(struct json *object, const char *key)
{
	if (object == NULL || object->kind != JSON_OBJECT)
		return NULL;
	for (struct json *child = object->first; child != NULL; child = child->next)
		if (strcmp(child->key, key) == 0) {
			child->seen = true;
			return child;
		}
	return NULL;
}

int json_no_others(struct json *object, struct json_report *report)
{
	for (const struct json *child = object->first; child != NULL; child = child->next)
		if (!child->seen)
			return json_complain(report, child, "unknown key");
	return report->failed ? -1 : 0;
}

int json_want(const struct json *value, enum json_kind kind, struct json_report *report)
{
	static const char *const names[] = {"null",           "false",  "true",     "a number",
					    "text in quotes", "a list", "an object"};

	if (value == NULL || value->kind == kind)
		return 0;
	return json_complain(report, value, "must be %s", names[kind]);
}

int json_read_i64(struct json *value, int64_t *target, int64_t low, int64_t high, struct json_report *report)
{
	char *end;
	long long number;

	if (value == NULL)
		return 0;
	if (value->kind != JSON_NUMBER)
		return json_complain(report, value, "must be a whole number");
	errno = 0;
	number = strtoll(value->string, &end, 10);
	if (*end != '\0' || errno != 0 || number < low || number > high)
		return json_complain(report, value, "%s is not a whole number from %" PRId64 " to %" PRId64,
				     value->string, low, high);
	*target = number;
	return 0;
}

int json_read_u64(struct json *value, uint64_t *target, uint64_t low, uint64_t high,
		  struct json_report *report)
{
	char *end;
	unsigned long long number;

	if (value == NULL)
		return 0;
	if (value->kind != JSON_NUMBER)
		return json_complain(report, value, "must be a whole number");
	errno = 0;
	number = strtoull(value->string, &end, 10);
	if (value->string[0] == '-' || *end != '\0' || errno != 0 || number < low || number > high)
		return json_complain(report, value, "%s is not a whole number from %" PRIu64 " to %" PRIu64,
				     value->string, low, high);
	*target = number;
	return 0;
}

int json_read_u32(struct json *value, uint32_t *target, uint32_t low, uint32_t high,
		  struct json_report *report)
{
	uint64_t number = *target;

	if (json_read_u64(value, &number, low, high, report))
		return -1;
	if (value != NULL)
		*target = (uint32_t)number;
	return 0;
}

int json_read_bool(struct json *value, uint32_t *target, struct json_report *report)
{
	if (value == NULL)
		return 0;
	if (value->kind != JSON_TRUE && value->kind != JSON_FALSE)
		return json_complain(report, value, "must be true or false");
	*target = value->kind == JSON_TRUE;
	return 0;
}

int json_read_text(struct json *value, char *target, size_t size, struct json_report *report)
{
	if (value == NULL)
		return 0;
	if (value->kind != JSON_STRING)
		return json_complain(report, value, "must be text in quotes");
	if (strlen(value->string) >= size)
		return json_complain(report, value, "longer than %zu bytes", size - 1);
	memset(target, 0, size);
	memcpy(target, value->string, strlen(value->string));
	return 0;
}

int json_read_bytes(struct json *value, uint64_t *target, uint64_t high, struct json_report *report)
{
	static const struct {
		const char *name;
		unsigned shift;
	} units[] = {{"B", 0}, {"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}};
	char *end;
	unsigned long long number;

	if (value == NULL)
		return 0;
	if (value->kind == JSON_NUMBER)
		return json_read_u64(value, target, 0, high, report);
	if (value->kind != JSON_STRING)
		return json_complain(report, value,
				     "must be a number of bytes, or text such as \"24576MiB\"");
	errno = 0;
	number = strtoull(value->string, &end, 10);
	for (size_t i = 0; i < sizeof units / sizeof units[0]; i++)
		if (errno == 0 && value->string[0] >= '0' && value->string[0] <= '9' &&
		    strcmp(end, units[i].name) == 0 && number <= high >> units[i].shift) {
			*target = number << units[i].shift;
			return 0;
		}
	return json_complain(report, value,
			     "\"%s\" is not a size up to %" PRIu64 " bytes in B, KiB, MiB, GiB or TiB",
			     value->string, high);
}
