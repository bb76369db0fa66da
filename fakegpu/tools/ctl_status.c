/* SPDX-License-Identifier: Apache-2.0
 *
 * The machine as JSON: cards, what is used, and who uses it. See ctl_status.h.
 */
#include "ctl_status.h"

#include <inttypes.h>
#include <stdio.h>

#include "state.h"

static void print_text(const char *text)
{
	putchar('"');
	for (; *text != '\0'; text++)
		if (*text == '"' || *text == '\\')
			printf("\\%c", *text);
		else if ((unsigned char)*text < 0x20)
			printf("\\u%04x", *text);
		else
			putchar(*text);
	putchar('"');
}

static void print_seats(uint32_t card)
{
	const char *comma = "";

	for (uint32_t i = 0; i < fg_state->seat_high; i++) {
		const struct fg_seat *seat = fg_seat_at(i);
		const struct fg_process *process = fg_process_at(seat->process);

		if (!seat->in_use || seat->card != card)
			continue;
		printf("%s\n    {\"pid\": %d, \"own_pid\": %d, \"name\": ", comma,
		       fg_process_reported_pid(seat->process), process->pid);
		print_text(process->name);
		printf(", \"bytes\": %" PRIu64 ", \"context_bytes\": %" PRIu64 ", \"data_bytes\": %" PRIu64
		       ", \"peak_bytes\": %" PRIu64 ", \"contexts\": %u, \"launches\": %" PRIu64
		       ", \"done\": %" PRIu64 ", \"busy_ns\": %" PRIu64 "}",
		       seat->context_bytes + seat->data_bytes, seat->context_bytes, seat->data_bytes,
		       seat->peak_bytes, seat->contexts, seat->head, seat->done, seat->busy_ns);
		comma = ",";
	}
}

static void print_card(uint32_t index)
{
	const struct fg_card *card = fg_card_at(index);
	uint64_t now = fg_now_ns();

	fg_engine_advance(index, FG_NO_INSTANCE);
	printf("  {\"card\": %u, \"uuid\": \"%s\", \"name\": ", index, card->config.uuid_text);
	print_text(card->config.name);
	printf(", \"memory\": %" PRIu64 ", \"capacity\": %" PRIu64 ", \"used\": %" PRIu64
	       ", \"lost\": %s, \"mig\": %s"
	       ", \"busy_ns\": %" PRIu64 ", \"busy_percent_1s\": %.1f, \"kernels\": %" PRIu64
	       ", \"processes\": [",
	       card->config.memory_bytes, card->account[0].capacity, card->account[0].used,
	       card->lost ? "true" : "false", card->mig_enabled ? "true" : "false", card->engine[0].busy_ns,
	       (double)fg_engine_busy(index, FG_NO_INSTANCE, now - 1000000000u, now) / 1e7,
	       card->engine[0].kernels);
	print_seats(index);
	printf("]}");
}

int ctl_status(void)
{
	uint32_t taken_over = fg_state->lock.taken_over;

	fg_reap();
	fg_resolve_host_pids();
	printf("{\"config\": ");
	print_text(fg_config_path());
	/* How often a lock was found with a dead holder. */
	for (uint32_t i = 0; i < fg_state->card_count; i++)
		taken_over += fg_card_at(i)->lock.taken_over;
	printf(", \"boot\": %" PRIu64 ", \"locks_taken_over\": %u, \"cards\": [", fg_state->boot, taken_over);
	for (uint32_t i = 0; i < fg_state->card_count; i++) {
		printf("%s\n", i > 0 ? "," : "");
		print_card(i);
	}
	printf("\n]}\n");
	return 0;
}
