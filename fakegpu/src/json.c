/* SPDX-License-Identifier: Apache-2.0
 *
 * The JSON reader: text to tree. See json.h; the readers of single values are in json_read.c.
 */
#include "json.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DEPTH 16

struct parser {
	const char *at, *end, *start;
	struct json *nodes;
	size_t used, room;
	char *strings;
	struct json_report *report;
};

static int fail(struct parser *parser, const char *what)
{
	unsigned line = 1, column = 1;

	for (const char *c = parser->start; c < parser->at; c++) {
		column = *c == '\n' ? 1 : column + 1;
		line += *c == '\n';
	}
	if (!parser->report->failed)
		snprintf(parser->report->text, parser->report->size, "line %u column %u: %s", line, column,
			 what);
	parser->report->failed = true;
	return -1;
}

static void skip_space(struct parser *parser)
{
	while (parser->at < parser->end && memchr(" \t\r\n", *parser->at, 4) != NULL)
		parser->at++;
}

static int read_hex4(struct parser *parser, unsigned *code)
{
	*code = 0;
	if (parser->end - parser->at < 4)
		return fail(parser, "\\u needs four hexadecimal digits");
	for (int i = 0; i < 4; i++, parser->at++) {
		unsigned char c = (unsigned char)*parser->at;

		if (!isxdigit(c))
			return fail(parser, "\\u needs four hexadecimal digits");
		*code = *code * 16 + (unsigned)(isdigit(c) ? c - '0' : (c | 32) - 'a' + 10);
	}
	return 0;
}

static void put_utf8(struct parser *parser, unsigned code)
{
	unsigned char *out = (unsigned char *)parser->strings;

	if (code < 0x80) {
		*out++ = (unsigned char)code;
	} else if (code < 0x800) {
		*out++ = (unsigned char)(0xc0 | code >> 6);
		*out++ = (unsigned char)(0x80 | (code & 63));
	} else if (code < 0x10000) {
		*out++ = (unsigned char)(0xe0 | code >> 12);
		*out++ = (unsigned char)(0x80 | (code >> 6 & 63));
		*out++ = (unsigned char)(0x80 | (code & 63));
	} else {
		*out++ = (unsigned char)(0xf0 | code >> 18);
		*out++ = (unsigned char)(0x80 | (code >> 12 & 63));
		*out++ = (unsigned char)(0x80 | (code >> 6 & 63));
		*out++ = (unsigned char)(0x80 | (code & 63));
	}
	parser->strings = (char *)out;
}

static int read_unicode(struct parser *parser)
{
	unsigned code, low;

	if (read_hex4(parser, &code))
		return -1;
	if (code == 0)
		return fail(parser, "a string may not hold NUL");
	if (code >= 0xd800 && code < 0xdc00) {
		if (parser->end - parser->at < 2 || parser->at[0] != '\\' || parser->at[1] != 'u')
			return fail(parser, "half of a surrogate pair");
		parser->at += 2;
		if (read_hex4(parser, &low))
			return -1;
		if (low < 0xdc00 || low > 0xdfff)
			return fail(parser, "half of a surrogate pair");
		code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
	} else if (code >= 0xdc00 && code < 0xe000) {
		return fail(parser, "half of a surrogate pair");
	}
	put_utf8(parser, code);
	return 0;
}

/* Decodes the string at `at` (behind its opening quote); decoded text is never longer than the source. */
static const char *read_string(struct parser *parser)
{
	static const char escapes[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
	char *text = parser->strings;

	while (parser->at < parser->end && *parser->at != '"') {
		unsigned char c = (unsigned char)*parser->at++;

		if (c < 0x20) {
			fail(parser, "control character in a string");
			return NULL;
		}
		if (c != '\\') {
			*parser->strings++ = (char)c;
			continue;
		}
		if (parser->at >= parser->end)
			break;
		c = (unsigned char)*parser->at++;
		if (c == 'u') {
			if (read_unicode(parser))
				return NULL;
			continue;
		}
		const char *known = c != 0 ? strchr(escapes, c) : NULL;

		if (known == NULL) {
			fail(parser, "unknown escape in a string");
			return NULL;
		}
		*parser->strings++ = meanings[known - escapes];
	}
	if (parser->at >= parser->end) {
		fail(parser, "a string that does not end");
		return NULL;
	}
	parser->at++;
	*parser->strings++ = '\0';
	return text;
}

static int read_number(struct parser *parser, struct json *node)
{
	const char *from = parser->at;

#define DIGIT (parser->at < parser->end && isdigit((unsigned char)*parser->at))
	if (*parser->at == '-')
		parser->at++;
	if (!DIGIT)
		return fail(parser, "not a JSON value");
	if (*parser->at == '0')
		parser->at++;
	else
		while (DIGIT)
			parser->at++;
	if (parser->at < parser->end && *parser->at == '.') {
		parser->at++;
		if (!DIGIT)
			return fail(parser, "a number ends in its point");
		while (DIGIT)
			parser->at++;
	}
	if (parser->at < parser->end && (*parser->at | 32) == 'e') {
		parser->at++;
		if (parser->at < parser->end && (*parser->at == '+' || *parser->at == '-'))
			parser->at++;
		if (!DIGIT)
			return fail(parser, "a number ends in its exponent");
		while (DIGIT)
			parser->at++;
	}
#undef DIGIT
	size_t length = (size_t)(parser->at - from);

	node->kind = JSON_NUMBER;
	node->string = memcpy(parser->strings, from, length);
	parser->strings[length] = '\0';
	parser->strings += length + 1;
	return 0;
}

static struct json *read_value(struct parser *parser, int depth);

static int read_children(struct parser *parser, struct json *node, char close, int depth)
{
	struct json **link = &node->first;
	uint32_t index = 0;

	skip_space(parser);
	if (parser->at < parser->end && *parser->at == close) {
		parser->at++;
		return 0;
	}
	for (;;) {
		const char *key = NULL;

		skip_space(parser);
		if (node->kind == JSON_OBJECT) {
			if (parser->at >= parser->end || *parser->at != '"')
				return fail(parser, "a key in double quotes is wanted here");
			parser->at++;
			key = read_string(parser);
			if (key == NULL)
				return -1;
			for (struct json *other = node->first; other != NULL; other = other->next)
				if (strcmp(other->key, key) == 0)
					return fail(parser, "this key stands here twice");
			skip_space(parser);
			if (parser->at >= parser->end || *parser->at != ':')
				return fail(parser, "a colon is wanted here");
			parser->at++;
		}
		struct json *child = read_value(parser, depth + 1);

		if (child == NULL)
			return -1;
		child->key = key;
		child->parent = node;
		child->index = index++;
		*link = child;
		link = &child->next;
		skip_space(parser);
		if (parser->at < parser->end && *parser->at == ',') {
			parser->at++;
			continue;
		}
		if (parser->at < parser->end && *parser->at == close) {
			parser->at++;
			return 0;
		}
		return fail(parser,
			    close == '}' ? "a comma or } is wanted here" : "a comma or ] is wanted here");
	}
}

static int read_word(struct parser *parser, struct json *node, const char *word, enum json_kind kind)
{
	size_t length = strlen(word);

	if ((size_t)(parser->end - parser->at) < length || memcmp(parser->at, word, length) != 0)
		return fail(parser, "not a JSON value");
	parser->at += length;
	node->kind = kind;
	return 0;
}

static struct json *read_value(struct parser *parser, int depth)
{
	skip_space(parser);
	if (parser->at >= parser->end || depth > MAX_DEPTH || parser->used == parser->room) {
		fail(parser, depth > MAX_DEPTH ? "nested too deep" : "the text ends too early");
		return NULL;
	}
	struct json *node = &parser->nodes[parser->used++];
	int bad;

	memset(node, 0, sizeof *node);
	switch (*parser->at) {
	case '{':
	case '[':
		node->kind = *parser->at == '{' ? JSON_OBJECT : JSON_ARRAY;
		parser->at++;
		bad = read_children(parser, node, node->kind == JSON_OBJECT ? '}' : ']', depth);
		break;
	case '"':
		parser->at++;
		node->kind = JSON_STRING;
		node->string = read_string(parser);
		bad = node->string == NULL ? -1 : 0;
		break;
	case 't':
		bad = read_word(parser, node, "true", JSON_TRUE);
		break;
	case 'f':
		bad = read_word(parser, node, "false", JSON_FALSE);
		break;
	case 'n':
		bad = read_word(parser, node, "null", JSON_NULL);
		break;
	default:
		bad = read_number(parser, node);
	}
	return bad ? NULL : node;
}

int json_parse(const char *text, size_t length, struct json_document *document, struct json_report *report)
{
	/* Every value takes at least two bytes of text (itself and a separator), every string its quotes. */
	size_t nodes = length / 2 + 2;
	char *memory = malloc(nodes * sizeof(struct json) + 2 * length + 16);

	document->root = NULL;
	document->memory = memory;
	if (memory == NULL)
		return json_complain(report, NULL, "out of memory");
	struct parser parser = {text, text + length, text, (struct json *)(void *)memory,
				0,    nodes,         NULL, report};

	parser.strings = memory + nodes * sizeof(struct json);
	document->root = read_value(&parser, 0);
	if (document->root != NULL) {
		skip_space(&parser);
		if (parser.at != parser.end) {
			fail(&parser, "text after the end of the value");
			document->root = NULL;
		}
	}
	if (document->root == NULL) {
		json_free(document);
		return -1;
	}
	return 0;
}

void json_free(struct json_document *document)
{
	free(document->memory);
	document->memory = NULL;
	document->root = NULL;
}
