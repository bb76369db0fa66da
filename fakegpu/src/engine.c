/* SPDX-License-Identifier: Apache-2.0
 *
 * Replaying what a card did since somebody last looked. See engine.h.
 */
#include "engine.h"

#include <string.h>

#include "lock.h"

static struct fg_engine *engine_of(struct fg_card *card, uint32_t ci)
{
	return &card->engine[ci < FG_MAX_INSTANCES ? 1 + ci : 0];
}

static struct fg_work *entry_of(uint32_t seat, uint64_t number)
{
	return &fg_queue_at(seat)[(number - 1) % FG_QUEUE_ENTRIES];
}

static uint64_t later(uint64_t a, uint64_t b)
{
	return a > b ? a : b;
}

static void set_waiting(struct fg_engine *engine, uint32_t seat, int waits)
{
	uint64_t bit = UINT64_C(1) << (seat % 64);

	if (waits)
		engine->waiting[seat / 64] |= bit;
	else
		engine->waiting[seat / 64] &= ~bit;
}

/* The next waiting seat at or after `from`, round the end once; -1: none. */
static int next_waiting(const struct fg_engine *engine, uint32_t from)
{
	uint32_t words = (fg_state->seat_high + 63) / 64;

	if (words == 0)
		return -1;
	from = from % (words * 64);
	for (uint32_t step = 0; step <= words; step++) {
		uint32_t word = (from / 64 + step) % words;
		uint64_t bits = engine->waiting[word];

		if (step == 0)
			bits &= ~UINT64_C(0) << (from % 64);
		else if (step == words)
			bits &= ~(~UINT64_C(0) << (from % 64));
		if (bits != 0)
			return (int)(word * 64 + (uint32_t)__builtin_ctzll(bits));
	}
	return -1;
}

static int others_wait(const struct fg_engine *engine, uint32_t seat)
{
	int other = next_waiting(engine, seat + 1);

	return other >= 0 && (uint32_t)other != seat;
}

static void add_busy(uint64_t *bucket, uint32_t buckets, uint64_t width, uint64_t from, uint64_t to)
{
	/* Older than the ring is long: of no interest any more. */
	if (to - from > width * buckets)
		from = to - width * buckets;
	while (from < to) {
		uint64_t number = from / width, end = (number + 1) * width;
		uint64_t part = (end < to ? end : to) - from;
		uint64_t *word = &bucket[number % buckets];
		uint64_t old = *word >> 32 == (number & UINT32_MAX) ? *word & UINT32_MAX : 0;

		__atomic_store_n(word, (number & UINT32_MAX) << 32 | (old + part), __ATOMIC_RELAXED);
		from += part;
	}
}

static uint64_t sum_busy(const uint64_t *bucket, uint32_t buckets, uint64_t width, uint64_t from, uint64_t to)
{
	uint64_t sum = 0, first = from / width, last = (to + width - 1) / width;

	if (last - first > buckets)
		first = last - buckets;
	for (uint64_t number = first; number < last; number++) {
		uint64_t word = __atomic_load_n(&bucket[number % buckets], __ATOMIC_RELAXED);
		uint64_t begin = later(number * width, from), end = (number + 1) * width;

		if (word >> 32 != (number & UINT32_MAX))
			continue;
		if (end > to)
			end = to;
		/* The busy time of a bucket that is only half asked for is taken to lie evenly in it. */
		sum += (word & UINT32_MAX) * (end - begin) / width;
	}
	return sum;
}

/* Books the running segment up to `until` and takes it off the kernel. */
static void book(struct fg_engine *engine, uint32_t seat_index, uint64_t until)
{
	struct fg_seat *seat = fg_seat_at(seat_index);
	uint64_t length = until - engine->segment_start;

	add_busy(engine->bucket, FG_CARD_BUCKETS, FG_CARD_BUCKET_NS, engine->segment_start, until);
	add_busy(seat->bucket, FG_SEAT_BUCKETS, FG_SEAT_BUCKET_NS, engine->segment_start, until);
	engine->busy_ns += length;
	seat->busy_ns += length;
	seat->left_ns -= length < seat->left_ns ? length : seat->left_ns;
	engine->segment_start = until;
}

static void finish_segment(struct fg_engine *engine)
{
	uint32_t index = engine->running - 1;
	struct fg_seat *seat = fg_seat_at(index);

	book(engine, index, engine->segment_end);
	engine->last = engine->running;
	engine->running = 0;
	if (seat->left_ns > 0)
		return;
	entry_of(index, seat->done + 1)->time_ns = engine->segment_end;
	engine->kernels++;
	__atomic_store_n(&seat->done, seat->done + 1, __ATOMIC_RELEASE);
	if (seat->done == seat->head)
		set_waiting(engine, index, 0);
}

/* Chooses who runs next from time `free` on, when the card is idle since then. 0: nobody waits. */
static int choose(const struct fg_engine *engine, uint64_t free, uint32_t *seat, uint64_t *start)
{
	/* The one whose turn it is goes on until its time is over; then the next in the round. */
	uint32_t from = engine->last > 0 && free < engine->turn_end ? engine->last - 1 : engine->last;
	int first = next_waiting(engine, from), at = first;

	if (first < 0)
		return 0;
	*start = UINT64_MAX;
	do {
		uint64_t ready =
		    later(free, entry_of((uint32_t)at, fg_seat_at((uint32_t)at)->done + 1)->time_ns);

		if (ready < *start) {
			*start = ready;
			*seat = (uint32_t)at;
		}
		at = next_waiting(engine, (uint32_t)at + 1);
	} while (at != first && *start > free);
	return 1;
}

static void start_segment(struct fg_engine *engine, uint32_t index, uint64_t start)
{
	struct fg_seat *seat = fg_seat_at(index);
	uint64_t slice = fg_state->driver.time_slice_ns;

	if (seat->left_ns == 0)
		seat->left_ns = entry_of(index, seat->done + 1)->work_ns;
	if (engine->last != index + 1 || start >= engine->turn_end)
		engine->turn_end = start + slice;
	engine->running = index + 1;
	engine->segment_start = start;
	engine->segment_end = start + seat->left_ns;
	if (slice > 0 && engine->segment_end > engine->turn_end && others_wait(engine, index))
		engine->segment_end = engine->turn_end;
}

static void advance(struct fg_engine *engine, uint64_t now)
{
	for (;;) {
		uint32_t seat = 0;
		uint64_t start;

		if (engine->running != 0) {
			if (engine->segment_end > now)
				return;
			finish_segment(engine);
		}
		if (!choose(engine, engine->segment_end, &seat, &start) || start > now)
			return;
		start_segment(engine, seat, start);
	}
}

uint64_t fg_engine_launch(uint32_t index, uint64_t work_ns, uint64_t not_before_ns)
{
	struct fg_seat *seat = fg_seat_at(index);
	struct fg_card *card = fg_card_at(seat->card);
	struct fg_engine *engine = engine_of(card, seat->ci);
	uint64_t now = fg_now_ns(), number;

	for (;;) {
		fg_card_lock(card);
		advance(engine, now);
		if (seat->head - seat->done < fg_state->driver.queue_depth)
			break;
		number = seat->done + 1;
		fg_card_unlock(card);
		fg_engine_wait(index, number, 0);
		now = fg_now_ns();
	}
	number = seat->head + 1;
	*entry_of(index, number) = (struct fg_work){work_ns > 0 ? work_ns : 1, later(now, not_before_ns)};
	seat->head = number;
	set_waiting(engine, index, 1);
	if (fg_state->driver.time_slice_ns > 0 && engine->running != 0 && engine->running != index + 1 &&
	    engine->segment_end > engine->turn_end)
		engine->segment_end = later(now + 1, engine->turn_end);
	fg_card_unlock(card);
	return number;
}

int fg_engine_is_done(uint32_t index, uint64_t number, uint64_t *end_ns)
{
	struct fg_seat *seat = fg_seat_at(index);

	*end_ns = 0;
	if (number == 0)
		return 1;
	if (__atomic_load_n(&seat->done, __ATOMIC_ACQUIRE) < number) {
		struct fg_card *card = fg_card_at(seat->card);

		fg_card_lock(card);
		advance(engine_of(card, seat->ci), fg_now_ns());
		fg_card_unlock(card);
		if (seat->done < number)
			return 0;
	}
	if (seat->head - number < FG_QUEUE_ENTRIES)
		*end_ns = entry_of(index, number)->time_ns;
	return 1;
}

uint64_t fg_engine_estimate(uint32_t index, uint64_t number)
{
	const struct fg_seat *seat = fg_seat_at(index);
	struct fg_card *card = fg_card_at(seat->card);
	struct fg_engine *engine = engine_of(card, seat->ci);
	uint64_t at, n;

	fg_card_lock(card);
	n = seat->done + 1;
	at = engine->segment_end;
	if (engine->running == index + 1) {
		at = engine->segment_start + seat->left_ns;
		n++;
	} else if (seat->left_ns > 0 && n <= number) {
		at = later(at, fg_now_ns()) + seat->left_ns;
		n++;
	}
	for (; n <= number && n <= seat->head; n++)
		at = later(at, entry_of(index, n)->time_ns) + entry_of(index, n)->work_ns;
	fg_card_unlock(card);
	return at;
}

uint64_t fg_engine_wait(uint32_t index, uint64_t number, int may_spin)
{
	uint64_t end;

	while (!fg_engine_is_done(index, number, &end))
		fg_sleep_until(fg_engine_estimate(index, number), may_spin);
	return end;
}

void fg_engine_advance(uint32_t index, uint32_t ci)
{
	struct fg_card *card = fg_card_at(index);
	struct fg_engine *engine = engine_of(card, ci);
	uint64_t now = fg_now_ns();

	if (fg_process_self() < 0 && fg_process_join(0) < 0)
		return;
	fg_reap_hinted();
	fg_card_lock(card);
	advance(engine, now);
	/* What runs is booked so far as it has run. */
	if (engine->running != 0 && engine->segment_start < now)
		book(engine, engine->running - 1, now);
	fg_card_unlock(card);
}

uint64_t fg_engine_busy(uint32_t index, uint32_t ci, uint64_t from_ns, uint64_t to_ns)
{
	return sum_busy(engine_of(fg_card_at(index), ci)->bucket, FG_CARD_BUCKETS, FG_CARD_BUCKET_NS, from_ns,
			to_ns);
}

uint64_t fg_seat_busy(uint32_t seat, uint64_t from_ns, uint64_t to_ns)
{
	return sum_busy(fg_seat_at(seat)->bucket, FG_SEAT_BUCKETS, FG_SEAT_BUCKET_NS, from_ns, to_ns);
}

void fg_engine_leave(uint32_t index)
{
	struct fg_seat *seat = fg_seat_at(index);
	struct fg_engine *engine = engine_of(fg_card_at(seat->card), seat->ci);
	uint64_t now = fg_now_ns();

	advance(engine, now);
	if (engine->running == index + 1) {
		if (engine->segment_start < now)
			book(engine, index, now);
		engine->segment_end = later(engine->segment_start, now);
		engine->running = 0;
		engine->last = index + 1;
		engine->turn_end = 0;
	}
	seat->done = seat->head;
	seat->left_ns = 0;
	set_waiting(engine, index, 0);
}

void fg_engine_repair(struct fg_card *card)
{
	uint32_t index = (uint32_t)(card - fg_card_at(0));

	for (uint32_t part = 0; part < FG_PARTS; part++)
		memset(card->engine[part].waiting, 0, sizeof card->engine[part].waiting);
	for (uint32_t i = 0; i < fg_state->seat_high; i++) {
		const struct fg_seat *seat = fg_seat_at(i);

		if (seat->in_use && seat->card == index && seat->head > seat->done)
			set_waiting(engine_of(card, seat->ci), i, 1);
	}
	for (uint32_t part = 0; part < FG_PARTS; part++) {
		struct fg_engine *engine = &card->engine[part];
		uint32_t seat = engine->running - 1;

		if (engine->running != 0 && (engine->waiting[seat / 64] >> (seat % 64) & 1) == 0)
			engine->running = 0;
	}
}
