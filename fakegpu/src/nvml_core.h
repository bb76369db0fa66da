/* SPDX-License-Identifier: Apache-2.0
 *
 * What all of the fake libnvidia-ml stands on: its life cycle, its handles, and the first line of every
 * function.
 *
 * A handle is a number, never an address: magic, kind, card, slot and a tag made from the object's identity.
 * So a handle of an object that is gone, or of another kind, is recognised (INVALID_ARGUMENT) instead of
 * followed, and handles stay good after fork. Invariants: no function blocks but nvmlEventSetWait; nothing is
 * kept per process but the reference count, the list of visible cards and event sets; figures come from the
 * shared state.
 */
#ifndef FAKEGPU_NVML_CORE_H
#define FAKEGPU_NVML_CORE_H

/* Superseded functions are declared with their own old types, under their own names. */
#define NVML_NO_UNVERSIONED_FUNC_DEFS 1
#pragma GCC visibility push(default)
#include <nvml.h>
#pragma GCC visibility pop

#include <stddef.h>
#include <stdint.h>

#include "call.h"
#include "export.h"
#include "state.h"

#define NV_MAX_VISIBLE FG_MAX_CARDS

enum nv_kind {
	NV_CARD = 1,
	NV_MIG_DEVICE = 2,
	NV_GPU_INSTANCE = 3,
	NV_COMPUTE_INSTANCE = 4,
	NV_EVENT_SET = 5
};

/* What a device handle stands for. */
struct nv_device {
	struct fg_card *card;
	uint32_t index; /* of the card, in the machine */
	uint32_t ci; /* index into card->compute_instance[] for a MIG device, else FG_NO_INSTANCE */
	uint32_t gi; /* index into card->gpu_instance[], likewise */
};

/* ---- handles ------------------------------------------------------------------------------------------ */

void *nv_handle(enum nv_kind kind, uint32_t card, uint32_t slot, uint32_t tag);
/* Takes a handle apart; 0 when it is none of `kind`. */
int nv_handle_parts(const void *handle, enum nv_kind kind, uint32_t *card, uint32_t *slot, uint32_t *tag);
nvmlDevice_t nv_card_handle(uint32_t card);
nvmlDevice_t nv_mig_handle(uint32_t card, uint32_t ci);
/* The tag of a compute instance: changes when the slot is used for another one. */
uint32_t nv_instance_tag(const struct fg_compute_instance *instance);

/* ---- the first line of every function -------------------------------------------------------------------
 */

/* Log, faults, initialised? */
nvmlReturn_t nv_enter(const char *function);
/* Initialised? For functions that have logged and asked for faults themselves. */
nvmlReturn_t nv_enter_quietly(void);
/* The same for a function about one device, and the handle. A lost card answers GPU_IS_LOST. */
nvmlReturn_t nv_enter_device(const char *function, nvmlDevice_t handle, struct nv_device *device);
/* The second device of a function that has entered with its first. */
nvmlReturn_t nv_resolve_quietly(nvmlDevice_t handle, struct nv_device *device);

#define NV_ENTER()                                          \
	do {                                                \
		nvmlReturn_t entered_ = nv_enter(__func__); \
		if (entered_ != NVML_SUCCESS)               \
			return entered_;                    \
	} while (0)

#define NV_DEVICE(handle, device)                                                     \
	do {                                                                          \
		nvmlReturn_t entered_ = nv_enter_device(__func__, handle, &(device)); \
		if (entered_ != NVML_SUCCESS)                                         \
			return entered_;                                              \
	} while (0)

/* For what only a whole card has. */
#define NV_WHOLE_CARD(handle, device)                    \
	do {                                             \
		NV_DEVICE(handle, device);               \
		if ((device).ci != FG_NO_INSTANCE)       \
			return NVML_ERROR_NOT_SUPPORTED; \
	} while (0)

#define NV_NEEDS(...)                                                                \
	do {                                                                         \
		const void *const needed_[] = {__VA_ARGS__};                         \
		for (size_t i_ = 0; i_ < sizeof(needed_) / sizeof(needed_[0]); i_++) \
			if (needed_[i_] == NULL)                                     \
				return NVML_ERROR_INVALID_ARGUMENT;                  \
	} while (0)

/* For what root alone may change. */
#define NV_ROOT()                                        \
	do {                                             \
		if (!nv_is_root())                       \
			return NVML_ERROR_NO_PERMISSION; \
	} while (0)

int nv_is_root(void);

/* ---- visible cards ------------------------------------------------------------------------------------ */

uint32_t nv_visible_count(void);
uint32_t nv_visible_card(uint32_t position);
/* Position of a card in the list; FG_NO_INSTANCE when it is not visible. */
uint32_t nv_visible_position(uint32_t card);

/* ---- shared pieces ---------------------------------------------------------------------------------------
 */

/* Copies a text of any length into the caller's buffer; INSUFFICIENT_SIZE when it does not fit. */
nvmlReturn_t nv_text(const char *text, char *buffer, unsigned int length);
/* Checks the version word that newer structures begin with. */
nvmlReturn_t nv_version(unsigned int got, size_t size, unsigned int version);
/* The two-call protocol of lists. 1: fill `infos` with `have` entries; 0: return *result. */
int nv_list(unsigned int have, unsigned int *count, const void *entries, nvmlReturn_t *result);
/* Microseconds since the epoch, as sample timestamps count. */
unsigned long long nv_wall_us(void);
/* The driver's version as told: the configuration's under the full flavour, else the flavour's. */
const char *nv_driver_version(void);
int nv_cuda_version(void);
void nv_bus_id(const struct fg_card_config *config, char *text, size_t size);

#endif
