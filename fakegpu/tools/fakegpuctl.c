/* SPDX-License-Identifier: Apache-2.0
 *
 * fakegpuctl: the hand that reaches into the fake machine. Shows what is held by whom, and changes the
 * control file (written anew in one step, then poked, so that every process follows before its next call).
 *
 * The machine is that of FAKEGPU_CONFIG, else of /run/fakegpu/config.json, as for the libraries. Exit status:
 * 0 done, 1 refused or failed (one line says why), 2 not understood.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "control_file.h"
#include "ctl_status.h"
#include "state.h"
#include "state_make.h"

static const char usage[] =
    "usage: fakegpuctl COMMAND\n"
    "  status                         cards, memory and processes, as JSON\n"
    "  xid CARD XID [gi=N] [ci=N] [kill=CODE]\n"
    "                                 delivers an Xid event; kill: contexts on the card get this CUresult "
    "from now on\n"
    "  lose CARD | recover CARD       takes a card off the bus, and back\n"
    "  fault FUNCTION CODE [after=N] [count=N] [slow_us=N] [pid=N]\n"
    "                                 calls of FUNCTION (exact, or a beginning and *) return CODE\n"
    "  slow FUNCTION MICROSECONDS     calls of FUNCTION take that much longer\n"
    "  missing NAME…                  cuGetProcAddress does not find these\n"
    "  form NAME FROM GIVE            asked for NAME at version FROM or later it answers as at version GIVE "
    "(0: not)\n"
    "  set CARD FIGURE VALUE          e.g. set 0 temperature 80 (see CUDA.md)\n"
    "  process CARD PID BYTES [name]  a row more in the card's process table\n"
    "  launch NANOSECONDS             kernels that say nothing take that long\n"
    "  forbid-in-capture on|off       synchronising and asking for memory breaks captures\n"
    "  shut-down on|off               every CUDA call answers CUDA_ERROR_DEINITIALIZED\n"
    "  log PATH | log off             every call is written down there\n"
    "  load FILE                      takes a whole control file, if it is understood\n"
    "  show                           the control file in force\n"
    "  clear                          no faults, no overrides, no log; lost cards return\n"
    "  poke                           has every process look at the control file now\n";

static int refuse(const char *what, const char *why)
{
	fprintf(stderr, "fakegpuctl: %s: %s\n", what, why);
	return 1;
}

static int misunderstood(void)
{
	fputs(usage, stderr);
	return 2;
}

/* ---- the control file --------------------------------------------------------------------------------- */

static struct fg_control control; /* far too large for a stack */

static int read_control(void)
{
	char path[560], error[400];
	struct stat file;
	size_t length = 0;
	char *text;
	int bad;

	fg_control_path(path, sizeof path);
	text = fg_read_file(path, &length, &file);
	bad = fg_control_parse(text != NULL ? text : "{}", text != NULL ? length : 2, fg_state->card_count,
			       &control, error, sizeof error);
	free(text);
	return bad ? refuse(path, error) : 0;
}

static int write_text(const char *text, size_t length)
{
	char path[560], partial[600];
	int file;

	fg_control_path(path, sizeof path);
	snprintf(partial, sizeof partial, "%s.%d", path, (int)getpid());
	file = open(partial, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
	if (file < 0)
		return refuse(partial, strerror(errno));
	fchmod(file, 0666);
	if (write(file, text, length) != (ssize_t)length || close(file) != 0 || rename(partial, path) != 0) {
		int failed = errno;

		unlink(partial);
		return refuse(path, strerror(failed));
	}
	fg_control_poke();
	fg_control_follow(0);
	return 0;
}

static int write_control(void)
{
	static char text[1 << 20], error[400];
	static struct fg_control again;
	long length = fg_control_format(&control, text, sizeof text);

	if (length < 0)
		return refuse("control file", "too long");
	/* What was typed is held to the same rules as a file. */
	if (fg_control_parse(text, (size_t)length, fg_state->card_count, &again, error, sizeof error))
		return refuse("not written", error);
	return write_text(text, (size_t)length);
}

static int load(const char *path)
{
	static struct fg_control fresh;
	char error[400];
	struct stat file;
	size_t length = 0;
	char *text = fg_read_file(path, &length, &file);
	int bad;

	if (text == NULL)
		return refuse(path, "cannot be read");
	bad = fg_control_parse(text, length, fg_state->card_count, &fresh, error, sizeof error);
	bad = bad ? refuse(path, error) : write_text(text, length);
	free(text);
	return bad;
}

static int show(void)
{
	static char text[1 << 20];
	long length = fg_control_format(fg_control_now(), text, sizeof text);

	if (length < 0)
		return refuse("control file", "too long");
	fwrite(text, 1, (size_t)length, stdout);
	return 0;
}

/* ---- words of a command ------------------------------------------------------------------------------- */

static int read_number(const char *text, uint64_t *number)
{
	char *end;

	errno = 0;
	*number = strtoull(text, &end, 0);
	return *text >= '0' && *text <= '9' && *end == '\0' && errno == 0 ? 0 : -1;
}

static int read_card(const char *text, uint32_t *card)
{
	uint64_t number;

	if (read_number(text, &number) || number >= fg_state->card_count)
		return refuse(text, "no such card");
	*card = (uint32_t)number;
	return 0;
}

/* The value of "key=N" among the rest of the words, or `otherwise`. */
static uint64_t option(char **word, int count, const char *key, uint64_t otherwise)
{
	for (int i = 0; i < count; i++) {
		size_t length = strlen(key);
		uint64_t number;

		if (strncmp(word[i], key, length) == 0 && word[i][length] == '=' &&
		    read_number(word[i] + length + 1, &number) == 0)
			otherwise = number;
	}
	return otherwise;
}

static int xid(char **word, int count)
{
	struct fg_injected_event *event;
	uint64_t number;
	uint32_t card;

	if (count < 2 || read_number(word[1], &number))
		return misunderstood();
	if (read_card(word[0], &card))
		return 1;
	/* Delivered ones are of no use any more; keep the file short. */
	control.event_count = 0;
	event = &control.event[control.event_count++];
	*event = (struct fg_injected_event){.id = fg_state->last_control_event + 1,
					    .type = 8, /* critical Xid */
					    .data = number,
					    .card = card,
					    .gi_id = (uint32_t)option(word + 2, count - 2, "gi", UINT32_MAX),
					    .ci_id = (uint32_t)option(word + 2, count - 2, "ci", UINT32_MAX),
					    .kill_code = (uint32_t)option(word + 2, count - 2, "kill", 0)};
	return write_control();
}

static int set_lost(const char *text, int lost)
{
	uint32_t card, kept = 0;

	if (read_card(text, &card))
		return 1;
	for (uint32_t i = 0; i < control.lost_count; i++)
		if (control.lost[i] != card)
			control.lost[kept++] = control.lost[i];
	if (lost && kept < FG_MAX_OVERRIDES)
		control.lost[kept++] = card;
	control.lost_count = kept;
	return write_control();
}

static int fault(const char *function, uint64_t code, uint64_t slow_us, char **word, int count)
{
	struct fg_rule *rule = &control.rule[control.rule_count];

	if (control.rule_count == FG_MAX_RULES)
		return refuse(function, "too many faults; clear some");
	*rule = (struct fg_rule){.code = (int32_t)code,
				 .slow_us = (uint32_t)option(word, count, "slow_us", slow_us),
				 .after = option(word, count, "after", 0),
				 .count = option(word, count, "count", 0),
				 .pid = (uint32_t)option(word, count, "pid", 0),
				 .card = FG_RULE_ANY_CARD};
	snprintf(rule->function, sizeof rule->function, "%s", function);
	control.rule_count++;
	return write_control();
}

static int set_figure(const char *card_text, const char *figure, const char *value_text)
{
	uint32_t card, kind, kept = 0;
	uint64_t value;

	if (read_number(value_text, &value))
		return misunderstood();
	if (read_card(card_text, &card))
		return 1;
	for (kind = 1; strcmp(fg_control_figure(kind), figure) != 0; kind++)
		if (fg_control_figure(kind)[0] == '\0')
			return refuse(figure, "no such figure");
	for (uint32_t i = 0; i < control.override_count; i++)
		if (control.override[i].card != card || control.override[i].kind != kind)
			control.override[kept++] = control.override[i];
	if (kept == FG_MAX_OVERRIDES)
		return refuse(figure, "too many figures; clear some");
	control.override[kept++] = (struct fg_override){card, kind, (int64_t)value};
	control.override_count = kept;
	return write_control();
}

static int add_process(char **word, int count)
{
	struct fg_row *row = &control.row[control.row_count];
	uint64_t pid, bytes;
	uint32_t card;

	if (count < 3 || read_number(word[1], &pid) || read_number(word[2], &bytes))
		return misunderstood();
	if (read_card(word[0], &card))
		return 1;
	if (control.row_count == FG_MAX_ROWS)
		return refuse("process", "too many rows; clear some");
	*row = (struct fg_row){.card = card,
			       .pid = (int32_t)pid,
			       .memory_bytes = bytes,
			       .type = 'C',
			       .gi_id = UINT32_MAX,
			       .ci_id = UINT32_MAX};
	if (count > 3)
		snprintf(row->name, sizeof row->name, "%s", word[3]);
	control.row_count++;
	return write_control();
}

static int set_missing(char **word, int count)
{
	for (int i = 0; i < count; i++) {
		if (control.missing_count == FG_MAX_MISSING)
			return refuse(word[i], "too many names; clear some");
		snprintf(control.missing[control.missing_count++], FG_FUNCTION_LEN, "%s", word[i]);
	}
	return write_control();
}

static int set_form(const char *name, const char *from_text, const char *give_text)
{
	struct fg_form *form = &control.form[control.form_count];
	uint64_t from, give;

	if (read_number(from_text, &from) || read_number(give_text, &give))
		return misunderstood();
	if (control.form_count == FG_MAX_FORMS)
		return refuse(name, "too many forms; clear some");
	snprintf(form->name, sizeof form->name, "%s", name);
	form->from = (uint32_t)from;
	form->give = (uint32_t)give;
	control.form_count++;
	return write_control();
}

static int read_switch(const char *text, uint32_t *on)
{
	*on = strcmp(text, "on") == 0;
	return *on || strcmp(text, "off") == 0 ? 0 : -1;
}

static int change(const char *verb, char **word, int count)
{
	uint64_t number = 0;
	uint32_t on = 0;

	if (strcmp(verb, "xid") == 0)
		return xid(word, count);
	if (strcmp(verb, "lose") == 0 && count == 1)
		return set_lost(word[0], 1);
	if (strcmp(verb, "recover") == 0 && count == 1)
		return set_lost(word[0], 0);
	if (strcmp(verb, "fault") == 0 && count >= 2 && read_number(word[1], &number) == 0)
		return fault(word[0], number, 0, word + 2, count - 2);
	if (strcmp(verb, "slow") == 0 && count == 2 && read_number(word[1], &number) == 0)
		return fault(word[0], 0, number, NULL, 0);
	if (strcmp(verb, "missing") == 0 && count >= 1)
		return set_missing(word, count);
	if (strcmp(verb, "form") == 0 && count == 3)
		return set_form(word[0], word[1], word[2]);
	if (strcmp(verb, "set") == 0 && count == 3)
		return set_figure(word[0], word[1], word[2]);
	if (strcmp(verb, "process") == 0)
		return add_process(word, count);
	if (strcmp(verb, "launch") == 0 && count == 1 && read_number(word[0], &number) == 0) {
		control.launch_ns = number;
		return write_control();
	}
	if (strcmp(verb, "forbid-in-capture") == 0 && count == 1 && read_switch(word[0], &on) == 0) {
		control.forbid_in_capture = on;
		return write_control();
	}
	if (strcmp(verb, "shut-down") == 0 && count == 1 && read_switch(word[0], &on) == 0) {
		control.shut_down = on;
		return write_control();
	}
	if (strcmp(verb, "log") == 0 && count == 1) {
		snprintf(control.log_path, sizeof control.log_path, "%s",
			 strcmp(word[0], "off") == 0 ? "" : word[0]);
		return write_control();
	}
	return misunderstood();
}

int main(int count, char **word)
{
	const char *verb = count > 1 ? word[1] : "";
	enum fg_open_result opened;

	if (count < 2)
		return misunderstood();
	opened = fg_state_open();
	if (opened == FG_OPEN_NO_CONFIG)
		return refuse("no machine", "set FAKEGPU_CONFIG to its configuration file");
	if (opened != FG_OPEN_OK)
		return refuse("machine", "cannot be opened (see above)");
	if (strcmp(verb, "status") == 0 && count == 2)
		return ctl_status();
	if (strcmp(verb, "show") == 0 && count == 2)
		return show();
	if (strcmp(verb, "load") == 0 && count == 3)
		return load(word[2]);
	if (strcmp(verb, "clear") == 0 && count == 2)
		return write_text("{}\n", 3);
	if (strcmp(verb, "poke") == 0 && count == 2) {
		fg_control_poke();
		fg_control_follow(0);
		return 0;
	}
	if (read_control())
		return 1;
	return change(verb, word + 2, count - 2);
}
