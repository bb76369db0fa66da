/* SPDX-License-Identifier: Apache-2.0
 *
 * The control file: settings to text, the inverse of control_parse.c. Pure.
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "control.h"
#include "control_file.h"

struct writer {
	char *text;
	size_t size, used;
	int full;
};

static void put(struct writer *writer, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void put(struct writer *writer, const char *format, ...)
{
	va_list arguments;
	int more;

	va_start(arguments, format);
	more = vsnprintf(writer->text + writer->used, writer->size - writer->used, format, arguments);
	va_end(arguments);
	if (more < 0 || (size_t)more >= writer->size - writer->used) {
		writer->full = 1;
		writer->used = writer->size - 1;
		return;
	}
	writer->used += (size_t)more;
}

static void put_text(struct writer *writer, const char *text)
{
	put(writer, "\"");
	for (; *text != '\0'; text++) {
		unsigned char c = (unsigned char)*text;

		if (c == '"' || c == '\\')
			put(writer, "\\%c", c);
		else if (c < 0x20)
			put(writer, "\\u%04x", c);
		else
			put(writer, "%c", c);
	}
	put(writer, "\"");
}

static void put_instance(struct writer *writer, uint32_t gi, uint32_t ci)
{
	if (gi != UINT32_MAX)
		put(writer, ", \"gi\": %" PRIu32, gi);
	if (ci != UINT32_MAX)
		put(writer, ", \"ci\": %" PRIu32, ci);
}

static void put_rules(struct writer *writer, const struct fg_control *control)
{
	put(writer, "{\n \"faults\": [");
	for (uint32_t i = 0; i < control->rule_count; i++) {
		const struct fg_rule *rule = &control->rule[i];

		put(writer, "%s\n  {\"function\": ", i > 0 ? "," : "");
		put_text(writer, rule->function);
		put(writer,
		    ", \"code\": %" PRId32 ", \"slow_us\": %" PRIu32 ", \"after\": %" PRIu64
		    ", \"count\": %" PRIu64 ", \"pid\": %" PRIu32,
		    rule->code, rule->slow_us, rule->after, rule->count, rule->pid);
		if (rule->card != FG_RULE_ANY_CARD)
			put(writer, ", \"card\": %" PRIu32, rule->card);
		put(writer, "}");
	}
	put(writer, "],\n \"missing\": [");
	for (uint32_t i = 0; i < control->missing_count; i++) {
		put(writer, "%s", i > 0 ? ", " : "");
		put_text(writer, control->missing[i]);
	}
	put(writer, "],\n \"forms\": [");
	for (uint32_t i = 0; i < control->form_count; i++) {
		put(writer, "%s\n  {\"name\": ", i > 0 ? "," : "");
		put_text(writer, control->form[i].name);
		put(writer, ", \"from\": %" PRIu32 ", \"give\": %" PRIu32 "}", control->form[i].from,
		    control->form[i].give);
	}
}

static void put_cards(struct writer *writer, const struct fg_control *control)
{
	const char *comma = "";

	put(writer, "],\n \"cards\": [");
	for (uint32_t i = 0; i < control->lost_count; i++, comma = ",")
		put(writer, "%s\n  {\"card\": %" PRIu32 ", \"lost\": true}", comma, control->lost[i]);
	for (uint32_t i = 0; i < control->override_count; i++, comma = ",")
		put(writer, "%s\n  {\"card\": %" PRIu32 ", \"%s\": %" PRId64 "}", comma,
		    control->override[i].card, fg_control_figure(control->override[i].kind),
		    control->override[i].value);
	put(writer, "],\n \"processes\": [");
	for (uint32_t i = 0; i < control->row_count; i++) {
		const struct fg_row *row = &control->row[i];

		put(writer,
		    "%s\n  {\"card\": %" PRIu32 ", \"pid\": %" PRId32 ", \"memory_bytes\": %" PRIu64
		    ", \"type\": \"%c\", \"sm_utilization\": %" PRIu32 ", \"name\": ",
		    i > 0 ? "," : "", row->card, row->pid, row->memory_bytes, (int)row->type,
		    row->sm_utilization);
		put_text(writer, row->name);
		put_instance(writer, row->gi_id, row->ci_id);
		put(writer, "}");
	}
	put(writer, "],\n \"events\": [");
	for (uint32_t i = 0; i < control->event_count; i++) {
		const struct fg_injected_event *event = &control->event[i];

		put(writer,
		    "%s\n  {\"id\": %" PRIu64 ", \"card\": %" PRIu32 ", \"xid\": %" PRIu64
		    ", \"type\": %" PRIu64 ", \"kill\": %" PRIu32,
		    i > 0 ? "," : "", event->id, event->card, event->data, event->type, event->kill_code);
		put_instance(writer, event->gi_id, event->ci_id);
		put(writer, "}");
	}
}

long fg_control_format(const struct fg_control *control, char *text, size_t size)
{
	struct writer writer = {text, size, 0, 0};

	put_rules(&writer, control);
	put_cards(&writer, control);
	put(&writer, "],\n \"forbid_in_capture\": %s,\n \"shut_down\": %s",
	    control->forbid_in_capture ? "true" : "false", control->shut_down ? "true" : "false");
	if (control->launch_ns != FG_CONTROL_UNSET)
		put(&writer, ",\n \"launch_ns\": %" PRIu64, control->launch_ns);
	if (control->log_path[0] != '\0') {
		put(&writer, ",\n \"log\": ");
		put_text(&writer, control->log_path);
	}
	put(&writer, "\n}\n");
	return writer.full ? -1 : (long)writer.used;
}
