/* SPDX-License-Identifier: Apache-2.0
 *
 * Following the control file, and putting into force what it says. See control.h.
 */
#include "control.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "call.h"
#include "control_file.h"
#include "lock.h"
#include "state_make.h"

#define LOOK_NS 2000000u

void fg_control_path(char *path, size_t size)
{
	snprintf(path, size, "%s.control", fg_config_path());
}

void fg_control_poke(void)
{
	__atomic_fetch_add(&fg_state->poke, 1, __ATOMIC_RELEASE);
	__atomic_fetch_or(&fg_state->attention, FG_ATTENTION_CONTROL, __ATOMIC_RELEASE);
}

const struct fg_control *fg_control_now(void)
{
	return &fg_state->control[__atomic_load_n(&fg_state->control_index, __ATOMIC_ACQUIRE) & 1];
}

int64_t fg_control_override(uint32_t card, uint32_t kind, int64_t otherwise)
{
	const struct fg_control *control = fg_control_now();

	for (uint32_t i = 0; i < control->override_count; i++)
		if (control->override[i].card == card && control->override[i].kind == kind)
			return control->override[i].value;
	return otherwise;
}

int fg_control_is_missing(const char *name)
{
	const struct fg_control *control = fg_control_now();

	for (uint32_t i = 0; i < control->missing_count; i++)
		if (strcmp(control->missing[i], name) == 0)
			return 1;
	return 0;
}

static int is_read_already(uint64_t poke, const struct stat *file)
{
	return fg_state->control_poke == poke && fg_state->control_inode == file->st_ino &&
	       fg_state->control_size == (uint64_t)file->st_size &&
	       fg_state->control_time_ns ==
		   (uint64_t)file->st_mtim.tv_sec * 1000000000u + (uint64_t)file->st_mtim.tv_nsec;
}

static void note_read(uint64_t poke, const struct stat *file)
{
	fg_state->control_inode = file->st_ino;
	fg_state->control_size = (uint64_t)file->st_size;
	fg_state->control_time_ns =
	    (uint64_t)file->st_mtim.tv_sec * 1000000000u + (uint64_t)file->st_mtim.tv_nsec;
	fg_state->control_poke = poke;
}

/* A rule that was there before goes on counting where it was. */
static void keep_counts(struct fg_control *fresh, const struct fg_control *old)
{
	for (uint32_t i = 0; i < fresh->rule_count; i++)
		for (uint32_t j = 0; j < old->rule_count; j++) {
			struct fg_rule same = old->rule[j];

			same.seen = 0;
			if (memcmp(&fresh->rule[i], &same, sizeof same) == 0)
				fresh->rule[i].seen = old->rule[j].seen;
		}
}

static void poison(struct fg_card *card, uint32_t code)
{
	card->poison_code = code;
	__atomic_fetch_add(&card->poison_epoch, 1, __ATOMIC_RELEASE);
}

static void apply_lost(const struct fg_control *control)
{
	for (uint32_t i = 0; i < fg_state->card_count; i++) {
		struct fg_card *card = fg_card_at(i);
		uint32_t lost = 0;

		for (uint32_t j = 0; j < control->lost_count; j++)
			lost |= control->lost[j] == i;
		if (lost && !card->lost)
			poison(card, 999); /* CUDA_ERROR_UNKNOWN */
		__atomic_store_n(&card->lost, lost, __ATOMIC_RELEASE);
	}
}

static void deliver(const struct fg_control *control)
{
	uint64_t highest = fg_state->last_control_event;

	for (uint32_t i = 0; i < control->event_count; i++) {
		const struct fg_injected_event *from = &control->event[i];
		uint64_t sequence = fg_state->event_sequence + 1;
		struct fg_event *event = &fg_state->event[sequence % FG_EVENT_RING];

		if (from->id <= fg_state->last_control_event)
			continue;
		*event = (struct fg_event){.time_ns = fg_now_ns(),
					   .type = from->type,
					   .data = from->data,
					   .card = from->card,
					   .gi_id = from->gi_id,
					   .ci_id = from->ci_id};
		__atomic_store_n(&event->sequence, sequence, __ATOMIC_RELEASE);
		__atomic_store_n(&fg_state->event_sequence, sequence, __ATOMIC_RELEASE);
		if (from->kill_code != 0)
			poison(fg_card_at(from->card), from->kill_code);
		if (from->id > highest)
			highest = from->id;
	}
	fg_state->last_control_event = highest;
}

static void put_into_force(const struct fg_control *fresh)
{
	uint32_t next = (fg_state->control_index + 1) & 1, attention = 0;
	struct fg_control *slot = &fg_state->control[next];

	*slot = *fresh;
	keep_counts(slot, fg_control_now());
	__atomic_store_n(&fg_state->control_index, next, __ATOMIC_RELEASE);
	__atomic_store_n(&fg_state->launch_ns,
			 slot->launch_ns != FG_CONTROL_UNSET ? slot->launch_ns : fg_state->driver.launch_ns,
			 __ATOMIC_RELAXED);
	apply_lost(slot);
	deliver(slot);
	if (slot->rule_count > 0 || slot->shut_down)
		attention |= FG_ATTENTION_RULES;
	if (slot->log_on)
		attention |= FG_ATTENTION_LOG;
	__atomic_store_n(&fg_state->attention, attention, __ATOMIC_RELEASE);
}

static void read_again(uint64_t poke)
{
	char path[560], error[400] = "";
	struct fg_control *fresh = malloc(sizeof *fresh);
	struct stat file = {0};
	size_t length = 0;
	char *text;
	int bad = 0;

	fg_control_path(path, sizeof path);
	text = fg_read_file(path, &length, &file);
	if (fresh == NULL || (fg_process_self() < 0 && fg_process_join(0) < 0)) {
		free(text);
		free(fresh);
		return;
	}
	bad = fg_control_parse(text != NULL ? text : "{}", text != NULL ? length : 2, fg_state->card_count,
			       fresh, error, sizeof error);
	fg_state_lock();
	if (!is_read_already(poke, &file)) {
		note_read(poke, &file);
		if (bad) {
			fg_state_complain(path, error);
			__atomic_fetch_and(&fg_state->attention, ~FG_ATTENTION_CONTROL, __ATOMIC_RELEASE);
		} else {
			put_into_force(fresh);
		}
	}
	if (__atomic_load_n(&fg_state->poke, __ATOMIC_ACQUIRE) != poke)
		__atomic_fetch_or(&fg_state->attention, FG_ATTENTION_CONTROL, __ATOMIC_RELEASE);
	fg_state_unlock();
	free(text);
	free(fresh);
}

void fg_control_follow(uint64_t now_ns)
{
	uint64_t poke = __atomic_load_n(&fg_state->poke, __ATOMIC_ACQUIRE);
	char path[560];
	struct stat file = {0};

	if (now_ns != 0 && poke == fg_state->control_poke &&
	    now_ns - __atomic_load_n(&fg_state->control_checked_ns, __ATOMIC_RELAXED) < LOOK_NS)
		return;
	__atomic_store_n(&fg_state->control_checked_ns, now_ns != 0 ? now_ns : fg_coarse_ns(),
			 __ATOMIC_RELAXED);
	int before = errno;

	fg_control_path(path, sizeof path);
	if (stat(path, &file) != 0)
		memset(&file, 0, sizeof file);
	if (!is_read_already(poke, &file))
		read_again(poke);
	errno = before;
}
