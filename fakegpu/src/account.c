/* SPDX-License-Identifier: Apache-2.0
 *
 * Who holds how many bytes of which card. See state.h and account.h.
 */
#include "account.h"

#include <string.h>

#include "engine.h"
#include "lock.h"
#include "process.h"

static uint64_t bytes_of(const struct fg_seat *seat)
{
	return seat->context_bytes + seat->data_bytes;
}

/* The account of the GPU instance a seat sits in, or NULL. The card's own account carries it as well. */
static struct fg_account *instance_account(struct fg_card *card, uint32_t gi)
{
	return gi < FG_MAX_INSTANCES ? &card->account[1 + gi] : NULL;
}

static void change(uint64_t *word, uint64_t bytes, int more)
{
	__atomic_store_n(word, more ? *word + bytes : *word - bytes, __ATOMIC_RELAXED);
}

static void change_sums(struct fg_card *card, uint32_t gi, uint64_t bytes, int more)
{
	struct fg_account *instance = instance_account(card, gi);

	change(&card->account[0].used, bytes, more);
	if (instance != NULL)
		change(&instance->used, bytes, more);
}

static int has_room(struct fg_card *card, uint32_t gi, uint64_t bytes)
{
	const struct fg_account *instance = instance_account(card, gi);
	const struct fg_account *whole = &card->account[0];

	if (whole->used > whole->capacity || bytes > whole->capacity - whole->used)
		return 0;
	return instance == NULL ||
	       (instance->used <= instance->capacity && bytes <= instance->capacity - instance->used);
}

void fg_account_repair(struct fg_card *card)
{
	uint32_t index = (uint32_t)(card - fg_card_at(0));

	for (uint32_t part = 0; part < FG_PARTS; part++)
		card->account[part].used = 0;
	for (uint32_t i = 0; i < fg_state->seat_high; i++) {
		const struct fg_seat *seat = fg_seat_at(i);

		if (seat->in_use && seat->card == index)
			change_sums(card, seat->gi, bytes_of(seat), 1);
	}
	fg_engine_repair(card);
}

void fg_account_vacate(uint32_t index)
{
	struct fg_seat *seat = fg_seat_at(index);
	struct fg_card *card = fg_card_at(seat->card);

	fg_card_lock(card);
	change_sums(card, seat->gi, bytes_of(seat), 0);
	fg_engine_leave(index);
	__atomic_store_n(&seat->in_use, 0, __ATOMIC_RELEASE);
	fg_card_unlock(card);
}

void fg_account_layout(uint32_t index)
{
	struct fg_card *card = fg_card_at(index);

	card->account[0].capacity = card->config.memory_bytes - card->config.reserved_bytes;
	for (uint32_t i = 0; i < FG_MAX_INSTANCES; i++)
		card->account[1 + i].capacity =
		    card->gpu_instance[i].in_use ? card->gpu_instance[i].memory_bytes : 0;
}

static int find_seat(uint32_t self, uint32_t card, uint32_t ci)
{
	uint32_t high = __atomic_load_n(&fg_state->seat_high, __ATOMIC_ACQUIRE);

	for (uint32_t i = 0; i < high; i++) {
		const struct fg_seat *seat = fg_seat_at(i);

		if (seat->in_use && seat->process == self && seat->card == card && seat->ci == ci)
			return (int)i;
	}
	return -1;
}

int fg_seat_claim(uint32_t card, uint32_t ci)
{
	int self = fg_process_join(1), found;

	if (self < 0)
		return -1;
	found = find_seat((uint32_t)self, card, ci);
	if (found >= 0)
		return found;
	fg_state_lock();
	for (uint32_t i = 0; i < FG_MAX_SEATS; i++) {
		struct fg_seat *seat = fg_seat_at(i);

		if (seat->in_use)
			continue;
		memset(seat, 0, sizeof *seat);
		seat->process = (uint32_t)self;
		seat->generation = fg_process_at((uint32_t)self)->generation;
		seat->card = card;
		seat->ci = ci;
		seat->gi = ci < FG_MAX_INSTANCES ? fg_card_at(card)->compute_instance[ci].gi : FG_NO_INSTANCE;
		__atomic_store_n(&seat->in_use, 1, __ATOMIC_RELEASE);
		if (fg_state->seat_high <= i)
			__atomic_store_n(&fg_state->seat_high, i + 1, __ATOMIC_RELEASE);
		found = (int)i;
		break;
	}
	fg_state_unlock();
	return found;
}

static int take(struct fg_seat *seat, uint64_t *kind, uint64_t bytes)
{
	struct fg_card *card = fg_card_at(seat->card);
	int done;

	fg_card_lock(card);
	done = has_room(card, seat->gi, bytes);
	if (done) {
		change(kind, bytes, 1);
		change_sums(card, seat->gi, bytes, 1);
		if (bytes_of(seat) > seat->peak_bytes)
			seat->peak_bytes = bytes_of(seat);
	}
	fg_card_unlock(card);
	return done;
}

int fg_account_take(uint32_t index, uint64_t bytes)
{
	struct fg_seat *seat = fg_seat_at(index);

	fg_process_keep_pulse();
	if (__builtin_expect(take(seat, &seat->data_bytes, bytes), 1))
		return 0;
	fg_reap();
	return take(seat, &seat->data_bytes, bytes) ? 0 : -1;
}

void fg_account_give(uint32_t index, uint64_t bytes)
{
	struct fg_seat *seat = fg_seat_at(index);
	struct fg_card *card = fg_card_at(seat->card);

	fg_card_lock(card);
	change(&seat->data_bytes, bytes, 0);
	change_sums(card, seat->gi, bytes, 0);
	fg_card_unlock(card);
}

int fg_account_context_open(uint32_t index)
{
	struct fg_seat *seat = fg_seat_at(index);
	uint64_t bytes = fg_card_at(seat->card)->config.context_bytes;

	if (seat->contexts == 0 && bytes > 0 && !take(seat, &seat->context_bytes, bytes)) {
		fg_reap();
		if (!take(seat, &seat->context_bytes, bytes))
			return -1;
	}
	__atomic_store_n(&seat->contexts, seat->contexts + 1, __ATOMIC_RELAXED);
	return 0;
}

void fg_account_context_close(uint32_t index)
{
	struct fg_seat *seat = fg_seat_at(index);
	struct fg_card *card = fg_card_at(seat->card);

	__atomic_store_n(&seat->contexts, seat->contexts - 1, __ATOMIC_RELAXED);
	if (seat->contexts > 0 || seat->context_bytes == 0)
		return;
	fg_card_lock(card);
	change_sums(card, seat->gi, seat->context_bytes, 0);
	change(&seat->context_bytes, seat->context_bytes, 0);
	fg_card_unlock(card);
}

void fg_account_look(uint32_t index, uint32_t gi, uint64_t *free_bytes, uint64_t *total_bytes)
{
	struct fg_card *card = fg_card_at(index);
	const struct fg_account *account = gi < FG_MAX_INSTANCES ? &card->account[1 + gi] : &card->account[0];
	uint64_t used;

	fg_reap_hinted();
	used = __atomic_load_n(&account->used, __ATOMIC_RELAXED);
	*total_bytes = account->capacity;
	*free_bytes = used < account->capacity ? account->capacity - used : 0;
}
