/* SPDX-License-Identifier: Apache-2.0
 *
 * See limiter_sample.h.
 */
/* Small before quick: nothing in here is on a hot path, and every process of a container maps it. */
#pragma GCC optimize("Os")

#include "limiter_sample.h"

#include "pages.h"
#include "priority.h"
#include "resolve.h"

#define SAMPLES 128u
#define QUERIES 4u /* measurements per round that turn out not to be done */
#define RELAXED 2 /* CU_STREAM_CAPTURE_MODE_RELAXED */
#define WARM    8u
#define NO_TIME (-1.0f)

enum state {
	FREE = 0,
	CLAIMED, /* its launch is being made */
	RUNNING,
	LATEST, /* learned from; its end is where the next one may have begun */
};

struct aq_sample {
	uint32_t state;
	uint32_t card;
	CUcontext context; /* of the events; NULL: there are none */
	CUevent begin, end;
	struct aq_key *entry;
	uint32_t epoch; /* of the entry then; it may have been given to another since */
	uint32_t ticket; /* older launches have smaller ones */
	uint64_t charged_ns, cost_ns, upto_ns; /* as in struct aq_launch */
	uint64_t launched_at_ns; /* just before the launch, if its stream was idle; else 0 */
	uint64_t gap_ns; /* host's time between the first event and the launch on an idle stream */
};

struct aq_samples {
	struct aq_sample sample[SAMPLES];
	uint32_t collecting; /* one thread at a time, nobody waits */
	uint32_t running;
	uint32_t next;
	struct aq_sample *latest;
	uint64_t gap_ns; /* what a launch on an idle stream takes the host, at least */
	uint32_t gaps; /* how often that was seen */
};

struct aq_samples *aq_samples_make(void)
{
	return aq_pages(sizeof(struct aq_samples));
}

/* Calls that a capture in global mode forbids to everybody are allowed to this thread for a moment. */
static int relax(int mode)
{
	if (REAL(cuThreadExchangeStreamCaptureMode)(&mode) != CUDA_SUCCESS)
		return RELAXED;
	return mode;
}

bool aq_stream_captures(CUstream stream)
{
	int status = 0;
	CUresult result = REAL(cuStreamIsCapturing)(stream, &status);
	/* CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: the legacy stream beside one that captures. */
	return (result == CUDA_SUCCESS && status != 0) || result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
}

/* True: what was launched is still what the entry stands for. */
static bool ours(const struct aq_sample *sample)
{
	return __atomic_load_n(&sample->entry->epoch, __ATOMIC_RELAXED) == sample->epoch;
}

static struct aq_sample *claim(struct aq_samples *samples, CUcontext context)
{
	uint32_t ticket = __atomic_fetch_add(&samples->next, 1, __ATOMIC_RELAXED);
	/* First one whose events fit, then one that has none, then any. */
	for (unsigned wish = 0; wish < 3; wish++)
		for (unsigned i = 0; i < SAMPLES; i++) {
			struct aq_sample *sample = &samples->sample[i];
			uint32_t state = FREE;
			if ((wish == 0 && sample->context != context) ||
			    (wish == 1 && sample->context != NULL) ||
			    !__atomic_compare_exchange_n(&sample->state, &state, CLAIMED, false,
							 __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
				continue;
			sample->ticket = ticket;
			return sample;
		}
	return NULL;
}

static void give_up(struct aq_sample *sample)
{
	__atomic_store_n(&sample->state, FREE, __ATOMIC_RELEASE);
}

static void drop_events(struct aq_sample *sample)
{
	REAL(cuEventDestroy_v2)(sample->begin);
	REAL(cuEventDestroy_v2)(sample->end);
	sample->context = NULL;
}

/* In the stream's context: two events, and the first of them recorded. */
static bool begin_here(struct aq_sample *sample, CUcontext context, CUstream stream)
{
	if (sample->context != NULL && sample->context != context)
		drop_events(sample);
	if (sample->context == NULL) {
		if (REAL(cuEventCreate)(&sample->begin, 0) != CUDA_SUCCESS)
			return false;
		if (REAL(cuEventCreate)(&sample->end, 0) != CUDA_SUCCESS) {
			REAL(cuEventDestroy_v2)(sample->begin);
			return false;
		}
		sample->context = context;
	}
	bool idle = REAL(cuStreamQuery)(stream) == CUDA_SUCCESS;
	if (REAL(cuEventRecord)(sample->begin, stream) != CUDA_SUCCESS)
		return false;
	sample->launched_at_ns = idle ? aq_now_ns() : 0;
	return true;
}

static bool begin(struct aq_sample *sample, CUcontext context, CUcontext current, CUstream stream)
{
	if (context == current)
		return begin_here(sample, context, stream);
	if (REAL(cuCtxPushCurrent_v2)(context) != CUDA_SUCCESS)
		return false;
	bool begun = begin_here(sample, context, stream);
	REAL(cuCtxPopCurrent_v2)(&current);
	return begun;
}

struct aq_sample *aq_sample_begin(struct aq_limiter *limiter, const struct aq_launch *launch, unsigned card)
{
	struct aq_sample *sample = NULL;
	CUcontext current = NULL, context = NULL;
	int mode = relax(RELAXED);
	if (!aq_stream_captures(launch->stream) && REAL(cuCtxGetCurrent)(&current) == CUDA_SUCCESS &&
	    current) {
		if ((uintptr_t)launch->stream <= 2 ||
		    REAL(cuStreamGetCtx)(launch->stream, &context) != CUDA_SUCCESS || context == NULL)
			context = current;
		sample = claim(limiter->samples, context);
		if (sample && !begin(sample, context, current, launch->stream)) {
			give_up(sample);
			sample = NULL;
		}
	}
	relax(mode);
	if (sample) {
		sample->card = card;
		sample->entry = launch->known;
		sample->epoch = __atomic_load_n(&launch->known->epoch, __ATOMIC_RELAXED);
		sample->charged_ns = launch->charged_ns;
		sample->cost_ns = launch->cost_ns;
		sample->upto_ns = launch->upto_ns;
	}
	return sample;
}

void aq_sample_end(struct aq_limiter *limiter, struct aq_sample *sample, CUstream stream, bool launched)
{
	uint64_t since = sample->launched_at_ns;
	sample->gap_ns = since ? aq_now_ns() - since : 0;
	bool running = false;
	if (launched) {
		int mode = relax(RELAXED);
		running = REAL(cuEventRecord)(sample->end, stream) == CUDA_SUCCESS;
		relax(mode);
	}
	if (!running) {
		give_up(sample);
		return;
	}
	if (ours(sample))
		__atomic_fetch_add(&sample->entry->pending, 1, __ATOMIC_RELAXED);
	__atomic_fetch_add(&limiter->samples->running, 1, __ATOMIC_RELAXED);
	__atomic_store_n(&sample->state, RUNNING, __ATOMIC_RELEASE);
}

static uint64_t between(CUevent from, CUevent to, bool *known)
{
	float milliseconds = NO_TIME;
	CUresult result = HAS(cuEventElapsedTime_v2) ? REAL(cuEventElapsedTime_v2)(&milliseconds, from, to)
						     : REAL(cuEventElapsedTime)(&milliseconds, from, to);
	*known = result == CUDA_SUCCESS && milliseconds >= 0 && milliseconds < 1e9f;
	return *known ? (uint64_t)((double)milliseconds * 1e6) : 0;
}

/* On an idle stream the first event is done before the launch has reached the device. The host's time in
 * between is no part of the work; but the host may have been put aside just then, so the least that was ever
 * seen counts, and slowly grows should launches have become slower. */
static uint64_t gap(struct aq_samples *samples, const struct aq_sample *sample)
{
	if (sample->gap_ns == 0)
		return 0;
	if (samples->gaps == 0 || sample->gap_ns < samples->gap_ns)
		samples->gap_ns = sample->gap_ns;
	else
		samples->gap_ns += samples->gap_ns / 256;
	/* Nothing in a process is as slow as the first time. */
	if (samples->gaps < WARM) {
		samples->gaps++;
		return 0;
	}
	return samples->gap_ns;
}

static void learn(struct aq_limiter *limiter, struct aq_sample *sample, uint64_t now)
{
	struct aq_samples *samples = limiter->samples;
	struct aq_sample *latest = samples->latest;
	bool known, after = false;
	uint64_t took = between(sample->begin, sample->end, &known);
	bool still = ours(sample);
	if (still && __atomic_load_n(&sample->entry->pending, __ATOMIC_RELAXED) > 0)
		__atomic_fetch_sub(&sample->entry->pending, 1, __ATOMIC_RELAXED);
	if (!known)
		return;
	uint64_t host = gap(samples, sample);
	took -= host < took ? host : took;
	enum aq_measured how = aq_limiter_company(sample->card, now);
	if (latest && latest->context == sample->context && latest->card == sample->card) {
		uint64_t since = between(latest->end, sample->end, &after);
		/* The latest one ended while this one was under way, on another stream: its time is paid for.
		 */
		if (after && since < took) {
			took = since;
			how = AQ_MEASURED_PART;
		}
	}
	struct aq_settlement settlement = {
	    .charged_ns = sample->charged_ns,
	    .cost_ns = sample->cost_ns,
	    .upto_ns = sample->upto_ns,
	    .took_ns = took,
	    .lately_ns = took,
	};
	if (still) {
		settlement.took_ns = aq_key_learn(&limiter->keys, sample->entry, took, how);
		/* The estimate: a single measurement may have others' turns in it. */
		aq_key_settled(sample->entry, aq_key_charge(&limiter->keys, sample->entry), now);
		settlement.lately_ns = aq_key_lately(sample->entry, settlement.took_ns);
	}
	aq_limiter_settle(limiter, sample->card, &settlement, now);
}

static void collect_one(struct aq_limiter *limiter, struct aq_sample *sample, uint64_t now, CUresult state)
{
	struct aq_samples *samples = limiter->samples;
	__atomic_fetch_sub(&samples->running, 1, __ATOMIC_RELAXED);
	if (state == CUDA_SUCCESS)
		learn(limiter, sample, now);
	if (samples->latest)
		give_up(samples->latest);
	samples->latest = sample;
	__atomic_store_n(&sample->state, LATEST, __ATOMIC_RELEASE);
}

/* The oldest of those under way that are not older than `from`. NULL: none. */
static struct aq_sample *oldest(struct aq_samples *samples, uint32_t from)
{
	struct aq_sample *found = NULL;
	for (unsigned i = 0; i < SAMPLES; i++) {
		struct aq_sample *sample = &samples->sample[i];
		if (__atomic_load_n(&sample->state, __ATOMIC_ACQUIRE) == RUNNING &&
		    (int32_t)(sample->ticket - from) >= 0 &&
		    (found == NULL || (int32_t)(sample->ticket - found->ticket) < 0))
			found = sample;
	}
	return found;
}

void aq_samples_collect(struct aq_limiter *limiter)
{
	struct aq_samples *samples = limiter->samples;
	if (__atomic_load_n(&samples->running, __ATOMIC_RELAXED) == 0 ||
	    __atomic_exchange_n(&samples->collecting, 1, __ATOMIC_ACQUIRE))
		return;
	int mode = relax(RELAXED);
	uint64_t now = aq_now_ns();
	unsigned busy = 0;
	/* In the order of the launches: behind one that is not done, only another stream's may be. Half of
	 * all tickets lie behind any; none under way is as old as that. */
	uint32_t from = __atomic_load_n(&samples->next, __ATOMIC_RELAXED) - (UINT32_MAX / 2);
	for (struct aq_sample *sample; busy < QUERIES && (sample = oldest(samples, from)) != NULL;) {
		from = sample->ticket + 1;
		CUresult state = REAL(cuEventQuery)(sample->end);
		if (state == CUDA_ERROR_NOT_READY)
			busy++;
		else
			collect_one(limiter, sample, now, state);
	}
	relax(mode);
	__atomic_store_n(&samples->collecting, 0, __ATOMIC_RELEASE);
}

unsigned aq_samples_running(const struct aq_samples *samples)
{
	return __atomic_load_n(&samples->running, __ATOMIC_RELAXED);
}

void aq_samples_drop(struct aq_samples *samples, CUcontext context)
{
	for (unsigned i = 0; i < SAMPLES; i++) {
		struct aq_sample *sample = &samples->sample[i];
		if (sample->context != context)
			continue;
		sample->context = NULL;
		uint32_t state = RUNNING;
		if (__atomic_compare_exchange_n(&sample->state, &state, CLAIMED, false, __ATOMIC_ACQUIRE,
						__ATOMIC_RELAXED)) {
			__atomic_fetch_sub(&samples->running, 1, __ATOMIC_RELAXED);
			if (ours(sample) && __atomic_load_n(&sample->entry->pending, __ATOMIC_RELAXED) > 0)
				__atomic_fetch_sub(&sample->entry->pending, 1, __ATOMIC_RELAXED);
			give_up(sample);
		}
	}
}
