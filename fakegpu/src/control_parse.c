/* SPDX-License-Identifier: Apache-2.0
 *
 * The control file: text to settings. Pure. See control.h.
 */
#include "control.h"

#include <stdio.h>
#include <string.h>

#include "control_file.h"
#include "json.h"

#define CRITICAL_XID 8u /* nvmlEventTypeXidCriticalError */

struct reader {
	struct fg_control *control;
	uint32_t card_count;
	struct json_report *report;
};

static const struct {
	const char *key;
	enum fg_override_kind kind;
} figures[] = {
    {"gpu_utilization", FG_OVERRIDE_GPU_UTILIZATION},
    {"memory_utilization", FG_OVERRIDE_MEMORY_UTILIZATION},
    {"temperature", FG_OVERRIDE_TEMPERATURE},
    {"power_mw", FG_OVERRIDE_POWER},
    {"sm_clock_mhz", FG_OVERRIDE_SM_CLOCK},
    {"memory_clock_mhz", FG_OVERRIDE_MEMORY_CLOCK},
    {"fan", FG_OVERRIDE_FAN},
    {"encoder_utilization", FG_OVERRIDE_ENCODER_UTILIZATION},
    {"decoder_utilization", FG_OVERRIDE_DECODER_UTILIZATION},
    {"ecc_corrected", FG_OVERRIDE_ECC_CORRECTED},
    {"ecc_uncorrected", FG_OVERRIDE_ECC_UNCORRECTED},
    {"throttle_reasons", FG_OVERRIDE_THROTTLE_REASONS},
    {"retired_pages", FG_OVERRIDE_RETIRED_PAGES},
    {"remapped_rows", FG_OVERRIDE_REMAPPED_ROWS},
    {"recovery_action", FG_OVERRIDE_RECOVERY_ACTION},
};

const char *fg_control_figure(uint32_t kind)
{
	for (size_t i = 0; i < sizeof figures / sizeof figures[0]; i++)
		if (figures[i].kind == kind)
			return figures[i].key;
	return "";
}

static int read_card_index(struct reader *reader, struct json *item, uint32_t *card)
{
	struct json *value = json_member(item, "card");

	if (value == NULL)
		return json_complain(reader->report, item, "needs \"card\", an index");
	if (reader->card_count == 0)
		return json_complain(reader->report, value, "there are no cards");
	return json_read_u32(value, card, 0, reader->card_count - 1, reader->report);
}

static int read_rule(struct reader *reader, struct json *item)
{
	struct fg_control *control = reader->control;
	struct fg_rule *rule = &control->rule[control->rule_count];
	struct json *name = json_member(item, "function"), *card = json_member(item, "card");
	int64_t code = 0;

	if (control->rule_count == FG_MAX_RULES)
		return json_complain(reader->report, item, "more than %u faults", FG_MAX_RULES);
	if (name == NULL)
		return json_complain(reader->report, item, "needs \"function\", a name or a beginning and *");
	*rule = (struct fg_rule){.card = FG_RULE_ANY_CARD};
	if (json_read_text(name, rule->function, sizeof rule->function, reader->report) ||
	    json_read_i64(json_member(item, "code"), &code, 0, 100000, reader->report) ||
	    json_read_u32(json_member(item, "slow_us"), &rule->slow_us, 0, 600000000, reader->report) ||
	    json_read_u64(json_member(item, "after"), &rule->after, 0, UINT64_MAX / 2, reader->report) ||
	    json_read_u64(json_member(item, "count"), &rule->count, 0, UINT64_MAX / 2, reader->report) ||
	    json_read_u32(json_member(item, "pid"), &rule->pid, 0, INT32_MAX, reader->report) ||
	    (card != NULL && read_card_index(reader, item, &rule->card)))
		return -1;
	const char *star = strchr(rule->function, '*');

	if (rule->function[0] == '\0' || (star != NULL && star[1] != '\0'))
		return json_complain(reader->report, name, "a name, or a beginning and one * at the end");
	if (code == 0 && rule->slow_us == 0)
		return json_complain(reader->report, item, "needs \"code\" or \"slow_us\"");
	rule->code = (int32_t)code;
	control->rule_count++;
	return 0;
}

static int read_form(struct reader *reader, struct json *item)
{
	struct fg_control *control = reader->control;
	struct fg_form *form = &control->form[control->form_count];

	if (control->form_count == FG_MAX_FORMS)
		return json_complain(reader->report, item, "more than %u forms", FG_MAX_FORMS);
	if (json_member(item, "name") == NULL || json_member(item, "from") == NULL ||
	    json_member(item, "give") == NULL)
		return json_complain(reader->report, item, "needs \"name\", \"from\" and \"give\"");
	if (json_read_text(json_member(item, "name"), form->name, sizeof form->name, reader->report) ||
	    json_read_u32(json_member(item, "from"), &form->from, 0, 1000000, reader->report) ||
	    json_read_u32(json_member(item, "give"), &form->give, 0, 1000000, reader->report))
		return -1;
	control->form_count++;
	return 0;
}

static int read_card(struct reader *reader, struct json *item)
{
	struct fg_control *control = reader->control;
	uint32_t card = 0, lost = 0;

	if (read_card_index(reader, item, &card) ||
	    json_read_bool(json_member(item, "lost"), &lost, reader->report))
		return -1;
	if (lost) {
		if (control->lost_count == FG_MAX_OVERRIDES)
			return json_complain(reader->report, item, "more than %u lost cards",
					     FG_MAX_OVERRIDES);
		control->lost[control->lost_count++] = card;
	}
	for (size_t i = 0; i < sizeof figures / sizeof figures[0]; i++) {
		struct json *value = json_member(item, figures[i].key);
		int64_t number = 0;

		if (value == NULL)
			continue;
		if (control->override_count == FG_MAX_OVERRIDES)
			return json_complain(reader->report, item, "more than %u figures", FG_MAX_OVERRIDES);
		if (json_read_i64(value, &number, 0, INT64_MAX, reader->report))
			return -1;
		control->override[control->override_count++] =
		    (struct fg_override){card, (uint32_t)figures[i].kind, number};
	}
	return 0;
}

static int read_row(struct reader *reader, struct json *item)
{
	struct fg_control *control = reader->control;
	struct fg_row *row = &control->row[control->row_count];
	char type[2] = "C";
	uint32_t pid = 0;

	if (control->row_count == FG_MAX_ROWS)
		return json_complain(reader->report, item, "more than %u processes", FG_MAX_ROWS);
	*row = (struct fg_row){.gi_id = UINT32_MAX, .ci_id = UINT32_MAX};
	if (json_member(item, "pid") == NULL)
		return json_complain(reader->report, item, "needs \"pid\"");
	if (read_card_index(reader, item, &row->card) ||
	    json_read_u32(json_member(item, "pid"), &pid, 1, INT32_MAX, reader->report) ||
	    json_read_bytes(json_member(item, "memory_bytes"), &row->memory_bytes, 1ull << 44,
			    reader->report) ||
	    json_read_text(json_member(item, "type"), type, sizeof type, reader->report) ||
	    json_read_u32(json_member(item, "gi"), &row->gi_id, 0, UINT32_MAX, reader->report) ||
	    json_read_u32(json_member(item, "ci"), &row->ci_id, 0, UINT32_MAX, reader->report) ||
	    json_read_u32(json_member(item, "sm_utilization"), &row->sm_utilization, 0, 100,
			  reader->report) ||
	    json_read_text(json_member(item, "name"), row->name, sizeof row->name, reader->report))
		return -1;
	if (type[0] == '\0' || strchr("CGM", type[0]) == NULL)
		return json_complain(reader->report, json_member(item, "type"),
				     "must be \"C\", \"G\" or \"M\"");
	row->type = (uint32_t)type[0];
	row->pid = (int32_t)pid;
	control->row_count++;
	return 0;
}

static int read_event(struct reader *reader, struct json *item)
{
	struct fg_control *control = reader->control;
	struct fg_injected_event *event = &control->event[control->event_count];

	if (control->event_count == FG_MAX_INJECTED)
		return json_complain(reader->report, item, "more than %u events", FG_MAX_INJECTED);
	*event = (struct fg_injected_event){.type = CRITICAL_XID, .gi_id = UINT32_MAX, .ci_id = UINT32_MAX};
	if (json_member(item, "id") == NULL || json_member(item, "xid") == NULL)
		return json_complain(reader->report, item, "needs \"id\" and \"xid\"");
	if (read_card_index(reader, item, &event->card) ||
	    json_read_u64(json_member(item, "id"), &event->id, 1, UINT64_MAX - 1, reader->report) ||
	    json_read_u64(json_member(item, "xid"), &event->data, 0, UINT64_MAX, reader->report) ||
	    json_read_u64(json_member(item, "type"), &event->type, 0, UINT64_MAX, reader->report) ||
	    json_read_u32(json_member(item, "gi"), &event->gi_id, 0, UINT32_MAX, reader->report) ||
	    json_read_u32(json_member(item, "ci"), &event->ci_id, 0, UINT32_MAX, reader->report) ||
	    json_read_u32(json_member(item, "kill"), &event->kill_code, 0, 100000, reader->report))
		return -1;
	control->event_count++;
	return 0;
}

static int read_list(struct reader *reader, struct json *root, const char *key,
		     int (*read_item)(struct reader *, struct json *))
{
	struct json *list = json_member(root, key);

	if (json_want(list, JSON_ARRAY, reader->report))
		return -1;
	for (struct json *item = list != NULL ? list->first : NULL; item != NULL; item = item->next)
		if (json_want(item, JSON_OBJECT, reader->report) || read_item(reader, item) ||
		    json_no_others(item, reader->report))
			return -1;
	return 0;
}

static int read_missing(struct reader *reader, struct json *root)
{
	struct fg_control *control = reader->control;
	struct json *list = json_member(root, "missing");

	if (json_want(list, JSON_ARRAY, reader->report))
		return -1;
	for (struct json *item = list != NULL ? list->first : NULL; item != NULL; item = item->next) {
		if (control->missing_count == FG_MAX_MISSING)
			return json_complain(reader->report, item, "more than %u names", FG_MAX_MISSING);
		if (json_read_text(item, control->missing[control->missing_count++], FG_FUNCTION_LEN,
				   reader->report))
			return -1;
	}
	return 0;
}

int fg_control_parse(const char *text, size_t length, uint32_t card_count, struct fg_control *control,
		     char *error, size_t error_size)
{
	struct json_report report = {error, error_size, false};
	struct reader reader = {control, card_count, &report};
	struct json_document document;
	int bad;

	memset(control, 0, sizeof *control);
	control->launch_ns = FG_CONTROL_UNSET;
	if (json_parse(text, length, &document, &report))
		return -1;
	struct json *root = document.root;

	bad =
	    json_want(root, JSON_OBJECT, &report) || read_list(&reader, root, "faults", read_rule) ||
	    read_list(&reader, root, "forms", read_form) || read_list(&reader, root, "cards", read_card) ||
	    read_list(&reader, root, "processes", read_row) ||
	    read_list(&reader, root, "events", read_event) || read_missing(&reader, root) ||
	    json_read_bool(json_member(root, "forbid_in_capture"), &control->forbid_in_capture, &report) ||
	    json_read_bool(json_member(root, "shut_down"), &control->shut_down, &report) ||
	    json_read_text(json_member(root, "log"), control->log_path, sizeof control->log_path, &report) ||
	    json_read_u64(json_member(root, "launch_ns"), &control->launch_ns, 0, UINT64_C(3600000000000),
			  &report) ||
	    json_no_others(root, &report);
	control->log_on = control->log_path[0] != '\0';
	json_free(&document);
	return bad ? -1 : 0;
}
