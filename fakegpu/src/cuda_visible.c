/* SPDX-License-Identifier: Apache-2.0
 *
 * Which devices a process sees, and in what order: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
 *
 * The list is taken as the documentation says: indices into the devices in enumeration order, or UUIDs (a
 * beginning that only one has), or MIG devices; everything from the first word on that names nothing is
 * dropped; a device that stands there twice leaves none. A card in MIG mode is seen through one compute
 * instance; one per process.
 */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "cuda_core.h"
#include "cuda_parts.h"
#include "visible.h"

struct list {
	struct cu_device *device;
	int count;
	int mig_taken;
};

static uint64_t speed(uint32_t card)
{
	const struct fg_card_config *config = &fg_card_at(card)->config;

	return (uint64_t)config->sm_count * config->cores_per_sm * config->sm_clock_mhz;
}

static uint64_t address(uint32_t card)
{
	const struct fg_card_config *config = &fg_card_at(card)->config;

	return (uint64_t)config->pci_domain << 32 | config->pci_bus << 8 | config->pci_device;
}

/* CUDA_DEVICE_ORDER: PCI_BUS_ID, or the default, the fastest first and the rest as on the bus. */
static void order(uint32_t *card, uint32_t count)
{
	const char *wanted = getenv("CUDA_DEVICE_ORDER");
	int by_bus = wanted != NULL && strcmp(wanted, "PCI_BUS_ID") == 0;

	for (uint32_t i = 1; i < count; i++)
		for (uint32_t j = i; j > 0; j--) {
			uint32_t a = card[j - 1], b = card[j];

			if (by_bus || speed(a) == speed(b) ? address(a) <= address(b) : speed(a) > speed(b))
				break;
			card[j - 1] = b;
			card[j] = a;
		}
	if (by_bus)
		return;
	/* Only the first place goes by speed. */
	for (uint32_t i = 2; i < count; i++)
		for (uint32_t j = i; j > 1 && address(card[j - 1]) > address(card[j]); j--) {
			uint32_t other = card[j];

			card[j] = card[j - 1];
			card[j - 1] = other;
		}
}

static int add(struct list *list, uint32_t card, uint32_t ci)
{
	struct cu_device *device = &list->device[list->count];

	for (int i = 0; i < list->count; i++)
		if (list->device[i].card == card && list->device[i].ci == ci)
			return -1;
	memset(device, 0, sizeof *device);
	device->ordinal = list->count++;
	device->card = card;
	device->ci = ci;
	device->gi = ci < FG_MAX_INSTANCES ? fg_card_at(card)->compute_instance[ci].gi : FG_NO_INSTANCE;
	device->seat = -1;
	device->shared = fg_card_at(card);
	return 0;
}

static uint32_t first_instance(uint32_t card)
{
	const struct fg_card *shared = fg_card_at(card);
	uint32_t best = FG_NO_INSTANCE;

	for (uint32_t i = 0; i < FG_MAX_INSTANCES; i++)
		if (shared->compute_instance[i].in_use &&
		    (best == FG_NO_INSTANCE ||
		     shared->compute_instance[i].mig_index < shared->compute_instance[best].mig_index))
			best = i;
	return best;
}

/* Adds a card, or, in MIG mode, its first compute instance; cards with neither add nothing. */
static int add_card(struct list *list, uint32_t card)
{
	uint32_t ci;

	if (!fg_card_at(card)->mig_enabled)
		return add(list, card, FG_NO_INSTANCE);
	ci = first_instance(card);
	if (ci == FG_NO_INSTANCE || list->mig_taken)
		return 0;
	list->mig_taken = 1;
	return add(list, card, ci);
}

static int same_uuid(const char *word, size_t length, const char *uuid)
{
	return length <= strlen(uuid) && strncasecmp(word, uuid, length) == 0;
}

/* "MIG-<uuid>", or "MIG-GPU-<uuid>/<gi>/<ci>" as drivers before 470 wrote it. -1: names nothing, or not one.
 */
static int add_mig(struct list *list, const uint32_t *card, uint32_t cards, const char *word, size_t length)
{
	uint32_t found_card = 0, found_ci = FG_NO_INSTANCE, found = 0;

	for (uint32_t i = 0; i < cards; i++)
		for (uint32_t ci = 0; ci < FG_MAX_INSTANCES; ci++) {
			const struct fg_card *shared = fg_card_at(card[i]);
			const struct fg_compute_instance *instance = &shared->compute_instance[ci];
			char old_name[FG_UUID_TEXT_LEN + 32];

			if (!instance->in_use)
				continue;
			snprintf(old_name, sizeof old_name, "MIG-%s/%u/%u", shared->config.uuid_text,
				 shared->gpu_instance[instance->gi].id, instance->id);
			if (!same_uuid(word, length, instance->uuid_text) &&
			    !(length == strlen(old_name) && strncasecmp(word, old_name, length) == 0))
				continue;
			found_card = card[i];
			found_ci = ci;
			found++;
		}
	if (found != 1)
		return -1;
	if (list->mig_taken)
		return 0; /* a process has one MIG device, the first it names */
	list->mig_taken = 1;
	return add(list, found_card, found_ci);
}

/* 0: go on with the next word; -1: the list ends here; -2: nothing is visible at all. */
static int add_word(struct list *list, const uint32_t *card, uint32_t cards, const char *word, size_t length)
{
	uint32_t found = cards;

	if (length >= 4 && strncasecmp(word, "MIG-", 4) == 0)
		return add_mig(list, card, cards, word, length);
	if (length > 4 && strncasecmp(word, "GPU-", 4) == 0) {
		for (uint32_t i = 0; i < cards; i++)
			if (same_uuid(word, length, fg_card_at(card[i])->config.uuid_text)) {
				if (found != cards)
					return -1;
				found = i;
			}
	} else {
		char *end;
		unsigned long number = strtoul(word, &end, 10);

		if (length > 0 && isdigit((unsigned char)word[0]) && end == word + length && number < cards)
			found = (uint32_t)number;
	}
	if (found == cards)
		return -1;
	return add_card(list, card[found]) == 0 ? 0 : -2;
}

static void add_list(struct list *list, const uint32_t *card, uint32_t cards, const char *text)
{
	while (*text != '\0') {
		size_t length = strcspn(text, ","), skip = strspn(text, " \t"), word = length;
		int result;

		if (skip > length)
			skip = length;
		while (word > skip && (text[word - 1] == ' ' || text[word - 1] == '\t'))
			word--;
		result = add_word(list, card, cards, text + skip, word - skip);
		if (result == -2)
			list->count = 0;
		if (result != 0)
			return;
		text += length + (text[length] == ',');
	}
}

struct cu_device *cu_visible_devices(int *count)
{
	const char *text = getenv("CUDA_VISIBLE_DEVICES");
	uint32_t *card = calloc(fg_state->card_count + 1, sizeof *card), cards, plain = 0;
	struct list list = {calloc(fg_state->card_count + 1, sizeof *list.device), 0, 0};

	*count = 0;
	if (card == NULL || list.device == NULL) {
		free(card);
		free(list.device);
		return NULL;
	}
	cards = fg_visible_cards(card, fg_state->card_count);
	for (uint32_t i = 0; i < cards; i++)
		if (fg_card_at(card[i])->lost)
			memmove(&card[i], &card[i + 1], (--cards - i) * sizeof *card), i--;
	order(card, cards);
	for (uint32_t i = 0; i < cards; i++)
		plain += !fg_card_at(card[i])->mig_enabled;
	if (text != NULL)
		add_list(&list, card, cards, text);
	else
		for (uint32_t i = 0; i < cards; i++)
			if (plain == 0 || !fg_card_at(card[i])->mig_enabled)
				add_card(&list, card[i]);
	free(card);
	*count = list.count;
	if (list.count > 0)
		return list.device;
	free(list.device);
	return NULL;
}
