/* SPDX-License-Identifier: Apache-2.0 */
#include "nvml_core.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "process.h"
#include "visible.h"

/* 63..48 magic, 47..44 kind, 43..28 card, 27..20 slot, 19..0 tag. Not canonical, so nobody can follow it. */
#define HANDLE_MAGIC 0x4e56ull
#define TAG_MASK     0xfffffu

static uint32_t references; /* nvmlInit less nvmlShutdown */
static pthread_mutex_t life = PTHREAD_MUTEX_INITIALIZER;
static uint32_t visible[NV_MAX_VISIBLE];
static uint32_t visible_count;
static uint64_t visible_boot; /* the state that `visible` was made for */

/* ---- handles ------------------------------------------------------------------------------------------ */

void *nv_handle(enum nv_kind kind, uint32_t card, uint32_t slot, uint32_t tag)
{
	uint64_t word = HANDLE_MAGIC << 48 | (uint64_t)kind << 44 | (uint64_t)(card & 0xffff) << 28 |
			(uint64_t)(slot & 0xff) << 20 | (tag & TAG_MASK);
	return (void *)(uintptr_t)word;
}

int nv_handle_parts(const void *handle, enum nv_kind kind, uint32_t *card, uint32_t *slot, uint32_t *tag)
{
	uint64_t word = (uintptr_t)handle;
	if (word >> 48 != HANDLE_MAGIC || (word >> 44 & 0xf) != (uint64_t)kind)
		return 0;
	*card = word >> 28 & 0xffff;
	*slot = word >> 20 & 0xff;
	*tag = word & TAG_MASK;
	return 1;
}

nvmlDevice_t nv_card_handle(uint32_t card)
{
	/* The tag ties the handle to this state: another configuration under the same process is another
	 * machine. */
	return nv_handle(NV_CARD, card, 0, (uint32_t)(fg_state->boot ^ fg_state->boot >> 32));
}

uint32_t nv_instance_tag(const struct fg_compute_instance *instance)
{
	uint32_t hash = 2166136261u;
	for (size_t i = 0; i < sizeof(instance->uuid); i++)
		hash = (hash ^ instance->uuid[i]) * 16777619u;
	return (hash ^ hash >> 20) & TAG_MASK;
}

nvmlDevice_t nv_mig_handle(uint32_t card, uint32_t ci)
{
	return nv_handle(NV_MIG_DEVICE, card, ci, nv_instance_tag(&fg_card_at(card)->compute_instance[ci]));
}

static nvmlReturn_t resolve(nvmlDevice_t handle, struct nv_device *device)
{
	uint32_t card, slot, tag;
	device->ci = device->gi = FG_NO_INSTANCE;
	if (nv_handle_parts(handle, NV_CARD, &card, &slot, &tag)) {
		if (card >= fg_state->card_count || nv_card_handle(card) != handle)
			return NVML_ERROR_INVALID_ARGUMENT;
	} else if (nv_handle_parts(handle, NV_MIG_DEVICE, &card, &slot, &tag)) {
		if (card >= fg_state->card_count || slot >= FG_MAX_INSTANCES)
			return NVML_ERROR_INVALID_ARGUMENT;
		const struct fg_compute_instance *instance = &fg_card_at(card)->compute_instance[slot];
		if (!instance->in_use || nv_instance_tag(instance) != tag)
			return NVML_ERROR_INVALID_ARGUMENT;
		device->ci = slot;
		device->gi = instance->gi;
	} else {
		return NVML_ERROR_INVALID_ARGUMENT;
	}
	device->index = card;
	device->card = fg_card_at(card);
	return NVML_SUCCESS;
}

/* ---- entering ----------------------------------------------------------------------------------------- */

static int is_up(void)
{
	return __atomic_load_n(&references, __ATOMIC_ACQUIRE) != 0;
}

nvmlReturn_t nv_enter(const char *function)
{
	FG_CALL(function, "%s", "");
	return nv_enter_quietly();
}

nvmlReturn_t nv_enter_quietly(void)
{
	if (!is_up())
		return NVML_ERROR_UNINITIALIZED;
	fg_control_follow(fg_coarse_ns());
	return NVML_SUCCESS;
}

nvmlReturn_t nv_enter_device(const char *function, nvmlDevice_t handle, struct nv_device *device)
{
	if (!is_up()) {
		FG_CALL(function, "%s", "");
		return NVML_ERROR_UNINITIALIZED;
	}
	fg_control_follow(fg_coarse_ns());
	nvmlReturn_t result = resolve(handle, device);
	if (result != NVML_SUCCESS) {
		FG_CALL(function, "device=%p", (void *)handle);
		return result;
	}
	FG_CALL_ABOUT(device->index, function, device->ci == FG_NO_INSTANCE ? "card=%u" : "card=%u ci=%u",
		      device->index, device->ci);
	return __atomic_load_n(&device->card->lost, __ATOMIC_RELAXED) ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

nvmlReturn_t nv_resolve_quietly(nvmlDevice_t handle, struct nv_device *device)
{
	nvmlReturn_t result = resolve(handle, device);
	if (result == NVML_SUCCESS && device->ci != FG_NO_INSTANCE)
		result = NVML_ERROR_NOT_SUPPORTED;
	if (result == NVML_SUCCESS && __atomic_load_n(&device->card->lost, __ATOMIC_RELAXED))
		result = NVML_ERROR_GPU_IS_LOST;
	return result;
}

int fake_stub_nvml(const char *name)
{
	FG_CALL(name, "%s", "");
	return is_up() ? NVML_ERROR_NOT_SUPPORTED : NVML_ERROR_UNINITIALIZED;
}

int nv_is_root(void)
{
	return geteuid() == 0;
}

/* ---- life cycle --------------------------------------------------------------------------------------- */

static nvmlReturn_t open_driver(void)
{
	switch (fg_state_open()) {
	case FG_OPEN_OK:
		break;
	case FG_OPEN_NO_CONFIG:
		return NVML_ERROR_DRIVER_NOT_LOADED;
	case FG_OPEN_NO_ACCESS:
		return NVML_ERROR_NO_PERMISSION;
	case FG_OPEN_MISMATCH:
		return NVML_ERROR_LIB_RM_VERSION_MISMATCH;
	case FG_OPEN_BAD_CONFIG:
	default:
		return NVML_ERROR_UNKNOWN;
	}
	return NVML_SUCCESS;
}

/* Nothing is opened or followed while `life` is held: the state has locks of its own, which a fork takes in
 * its order. */
static nvmlReturn_t start(const char *function, unsigned int flags)
{
	nvmlReturn_t result = open_driver();
	if (result != NVML_SUCCESS)
		return result;
	fg_control_follow(fg_coarse_ns());
	FG_CALL(function, "flags=%u", flags);
	pthread_mutex_lock(&life);
	if (visible_boot != fg_state->boot) {
		visible_count = fg_visible_cards(visible, NV_MAX_VISIBLE);
		visible_boot = fg_state->boot;
	}
	__atomic_add_fetch(&references, 1, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&life);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
	if ((flags & ~(unsigned int)(NVML_INIT_FLAG_NO_GPUS | NVML_INIT_FLAG_NO_ATTACH)) != 0)
		return NVML_ERROR_INVALID_ARGUMENT;
	return start(__func__, flags);
}

nvmlReturn_t nvmlInit_v2(void)
{
	return start(__func__, 0);
}

nvmlReturn_t nvmlInit(void)
{
	return start(__func__, 0);
}

nvmlReturn_t nvmlShutdown(void)
{
	FG_CALL(__func__, "%s", "");
	nvmlReturn_t result = NVML_ERROR_UNINITIALIZED;
	pthread_mutex_lock(&life);
	if (references > 0) {
		__atomic_sub_fetch(&references, 1, __ATOMIC_RELEASE);
		result = NVML_SUCCESS;
	}
	if (references == 0)
		visible_boot = 0; /* the next nvmlInit looks at the device nodes again */
	pthread_mutex_unlock(&life);
	return result;
}

/* A fork while another thread starts or stops NVML must not leave the child with a lock that nobody holds. */
static void before_fork(void)
{
	pthread_mutex_lock(&life);
}

static void after_fork(void)
{
	pthread_mutex_unlock(&life);
}

/* Before anything is opened: a fork during the very first nvmlInit must find the handlers. */
__attribute__((constructor)) static void watch_fork(void)
{
	fg_process_watch_fork();
	pthread_atfork(before_fork, after_fork, after_fork);
}

/* ---- visible cards ------------------------------------------------------------------------------------ */

uint32_t nv_visible_count(void)
{
	return visible_count;
}

uint32_t nv_visible_card(uint32_t position)
{
	return visible[position];
}

uint32_t nv_visible_position(uint32_t card)
{
	for (uint32_t i = 0; i < visible_count; i++)
		if (visible[i] == card)
			return i;
	return FG_NO_INSTANCE;
}

/* ---- shared pieces ------------------------------------------------------------------------------------ */

nvmlReturn_t nv_text(const char *text, char *buffer, unsigned int length)
{
	if (buffer == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	size_t needed = strlen(text) + 1;
	if (length < needed)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	memcpy(buffer, text, needed);
	return NVML_SUCCESS;
}

nvmlReturn_t nv_version(unsigned int got, size_t size, unsigned int version)
{
	return got == ((unsigned int)size | version << 24) ? NVML_SUCCESS
							   : NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
}

int nv_list(unsigned int have, unsigned int *count, const void *entries, nvmlReturn_t *result)
{
	if (count == NULL || (*count > 0 && entries == NULL)) {
		*result = NVML_ERROR_INVALID_ARGUMENT;
		return 0;
	}
	int fits = *count >= have;
	*count = have;
	*result = fits ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
	return fits && have > 0;
}

unsigned long long nv_wall_us(void)
{
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	return (unsigned long long)now.tv_sec * 1000000ull + (unsigned long long)now.tv_nsec / 1000ull;
}

const char *nv_driver_version(void)
{
	return fake_flavour.hides_names || fg_state->driver.driver_version[0] == '\0'
		   ? fake_flavour.driver_version
		   : fg_state->driver.driver_version;
}

int nv_cuda_version(void)
{
	return fake_flavour.hides_names || fg_state->driver.cuda_version == 0
		   ? fake_flavour.cuda_version
		   : (int)fg_state->driver.cuda_version;
}

void nv_bus_id(const struct fg_card_config *config, char *text, size_t size)
{
	snprintf(text, size, NVML_DEVICE_PCI_BUS_ID_FMT, config->pci_domain, config->pci_bus,
		 config->pci_device);
}
