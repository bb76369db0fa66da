/* SPDX-License-Identifier: Apache-2.0
 *
 * libnvidia-ml: events. They stand in a ring in the shared state; every set has its own place in it, so each
 * event is handed out once per set. Waiting looks at the ring (and at the control file, from which events
 * come) every few milliseconds: there is no thread here that could wake anybody, and a child after fork can
 * wait as well.
 *
 * Order when a card is lost: what happened before is told first, then GPU_IS_LOST for as long as it is off
 * the bus.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "nvml_core.h"

#define MAX_SETS 128u
#define LOOK_NS  3000000L

struct registration {
	uint32_t card;
	uint64_t types;
	uint64_t after; /* events up to this one came before it */
};

struct event_set {
	uint32_t in_use;
	uint32_t generation;
	uint64_t cursor; /* sequence of the last event that was handed out, or passed over */
	uint32_t count;
	struct registration *registration;
};

static struct event_set sets[MAX_SETS];
static pthread_mutex_t sets_lock = PTHREAD_MUTEX_INITIALIZER;

static void before_fork(void)
{
	pthread_mutex_lock(&sets_lock);
}

static void after_fork(void)
{
	pthread_mutex_unlock(&sets_lock);
}

__attribute__((constructor)) static void watch_fork(void)
{
	pthread_atfork(before_fork, after_fork, after_fork);
}

/* With the lock held. */
static struct event_set *find(nvmlEventSet_t handle)
{
	uint32_t card, slot, tag;
	if (!nv_handle_parts(handle, NV_EVENT_SET, &card, &slot, &tag) || slot >= MAX_SETS ||
	    !sets[slot].in_use || (sets[slot].generation & 0xfffff) != tag)
		return NULL;
	return &sets[slot];
}

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
	NV_ENTER();
	NV_NEEDS(set);
	nvmlReturn_t result = NVML_ERROR_INSUFFICIENT_RESOURCES;
	pthread_mutex_lock(&sets_lock);
	for (uint32_t i = 0; i < MAX_SETS && result != NVML_SUCCESS; i++)
		if (!sets[i].in_use) {
			sets[i] = (struct event_set){
			    .in_use = 1,
			    .generation = sets[i].generation + 1,
			    .cursor = __atomic_load_n(&fg_state->event_sequence, __ATOMIC_ACQUIRE),
			};
			*set = nv_handle(NV_EVENT_SET, 0, i, sets[i].generation & 0xfffff);
			result = NVML_SUCCESS;
		}
	pthread_mutex_unlock(&sets_lock);
	return result;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
	NV_ENTER();
	pthread_mutex_lock(&sets_lock);
	struct event_set *found = find(set);
	if (found != NULL) {
		free(found->registration);
		found->registration = NULL;
		found->count = found->in_use = 0;
	}
	pthread_mutex_unlock(&sets_lock);
	return found != NULL ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

static uint64_t supported(const struct fg_card *card)
{
	uint64_t types = nvmlEventTypeXidCriticalError | nvmlEventTypePState | nvmlEventTypeClock;
	if (card->config.ecc_capable)
		types |= nvmlEventTypeSingleBitEccError | nvmlEventTypeDoubleBitEccError;
	if (card->config.mig_family != FG_MIG_NONE)
		types |= nvmlEventMigConfigChange;
	return types;
}

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *eventTypes)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(eventTypes);
	*eventTypes = supported(of.card);
	return NVML_SUCCESS;
}

static nvmlReturn_t add_registration(struct event_set *set, uint32_t card, uint64_t types)
{
	for (uint32_t i = 0; i < set->count; i++)
		if (set->registration[i].card == card) {
			set->registration[i].types |= types;
			return NVML_SUCCESS;
		}
	struct registration *larger = realloc(set->registration, (set->count + 1) * sizeof(*larger));
	if (larger == NULL)
		return NVML_ERROR_MEMORY;
	larger[set->count++] = (struct registration){
	    .card = card,
	    .types = types,
	    .after = __atomic_load_n(&fg_state->event_sequence, __ATOMIC_ACQUIRE),
	};
	set->registration = larger;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long eventTypes, nvmlEventSet_t set)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	if (eventTypes == 0)
		return NVML_ERROR_INVALID_ARGUMENT;
	if ((eventTypes & ~supported(of.card)) != 0)
		return NVML_ERROR_NOT_SUPPORTED;
	pthread_mutex_lock(&sets_lock);
	struct event_set *found = find(set);
	nvmlReturn_t result =
	    found == NULL ? NVML_ERROR_INVALID_ARGUMENT : add_registration(found, of.index, eventTypes);
	pthread_mutex_unlock(&sets_lock);
	return result;
}

/* ---- waiting ------------------------------------------------------------------------------------------ */

static int wanted(const struct event_set *set, const struct fg_event *event)
{
	for (uint32_t i = 0; i < set->count; i++)
		if (set->registration[i].card == event->card &&
		    set->registration[i].after < event->sequence &&
		    (set->registration[i].types & event->type) != 0)
			return 1;
	return 0;
}

/* The next event of the set; 1 when there is one. Events that were overwritten before anybody looked are
 * lost, as they are when the driver's own queue runs over. */
static int next_event(struct event_set *set, struct fg_event *event)
{
	uint64_t newest = __atomic_load_n(&fg_state->event_sequence, __ATOMIC_ACQUIRE);
	if (newest > FG_EVENT_RING && set->cursor < newest - FG_EVENT_RING)
		set->cursor = newest - FG_EVENT_RING;
	while (set->cursor < newest) {
		uint64_t sequence = ++set->cursor;
		const struct fg_event *slot = &fg_state->event[sequence % FG_EVENT_RING];
		*event = *slot;
		__atomic_thread_fence(__ATOMIC_ACQUIRE);
		if (event->sequence == sequence &&
		    __atomic_load_n(&slot->sequence, __ATOMIC_RELAXED) == sequence && wanted(set, event))
			return 1;
	}
	return 0;
}

static int lost_one(const struct event_set *set)
{
	for (uint32_t i = 0; i < set->count; i++)
		if (__atomic_load_n(&fg_card_at(set->registration[i].card)->lost, __ATOMIC_RELAXED))
			return 1;
	return 0;
}

/* TIMEOUT: nothing yet. */
static nvmlReturn_t look(nvmlEventSet_t handle, struct fg_event *event)
{
	fg_control_follow(fg_now_ns());
	nvmlReturn_t result = NVML_ERROR_TIMEOUT;
	pthread_mutex_lock(&sets_lock);
	struct event_set *set = find(handle);
	if (set == NULL)
		result = NVML_ERROR_INVALID_ARGUMENT;
	else if (next_event(set, event))
		result = NVML_SUCCESS;
	else if (lost_one(set))
		result = NVML_ERROR_GPU_IS_LOST;
	pthread_mutex_unlock(&sets_lock);
	return result;
}

static nvmlReturn_t wait_for(const char *function, nvmlEventSet_t set, unsigned int milliseconds,
			     struct fg_event *event)
{
	nvmlReturn_t result = nv_enter(function);
	if (result != NVML_SUCCESS)
		return result;
	uint64_t until = fg_now_ns() + milliseconds * 1000000ull;
	while ((result = look(set, event)) == NVML_ERROR_TIMEOUT) {
		uint64_t now = fg_now_ns();
		if (now >= until)
			break;
		uint64_t left = until - now;
		struct timespec pause = {.tv_nsec = left < (uint64_t)LOOK_NS ? (long)left : LOOK_NS};
		nanosleep(&pause, NULL);
		if (nv_enter_quietly() != NVML_SUCCESS) /* shut down meanwhile by another thread */
			return NVML_ERROR_UNINITIALIZED;
	}
	return result;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeoutms)
{
	struct fg_event event;
	NV_NEEDS(data);
	nvmlReturn_t result = wait_for(__func__, set, timeoutms, &event);
	if (result == NVML_SUCCESS)
		*data = (nvmlEventData_t){
		    .device = nv_card_handle(event.card),
		    .eventType = event.type,
		    .eventData = event.data,
		    .gpuInstanceId = event.gi_id,
		    .computeInstanceId = event.ci_id,
		};
	return result;
}

/* The first form ended before the instances. */
nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeoutms)
{
	struct fg_event event;
	NV_NEEDS(data);
	nvmlReturn_t result = wait_for(__func__, set, timeoutms, &event);
	if (result == NVML_SUCCESS) {
		data->device = nv_card_handle(event.card);
		data->eventType = event.type;
		data->eventData = event.data;
	}
	return result;
}
