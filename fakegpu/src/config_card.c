/* SPDX-License-Identifier: Apache-2.0
 *
 * One card of the configuration file: a profile, overridden key by key. See config_card.h.
 */
#include "config_card.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "uuid.h"

enum kind { NUMBER, NUMBER64, BYTES, FLAG, TEXT };

struct key {
	const char *name;
	enum kind kind;
	size_t offset, size;
	uint64_t low, high;
};

#define FIELD(member) offsetof(struct fg_card_config, member), sizeof((struct fg_card_config *)0)->member
#define MAX_BYTES     (1ull << 44) /* 16 TiB */

static const struct key keys[] = {
    {"name", TEXT, FIELD(name), 0, 0},
    {"board_part", TEXT, FIELD(board_part), 0, 0},
    {"vbios", TEXT, FIELD(vbios), 0, 0},
    {"brand", NUMBER, FIELD(brand), 0, 64},
    {"architecture", NUMBER, FIELD(architecture), 0, 64},
    {"pci_device_id", NUMBER, FIELD(pci_device_id), 0, UINT32_MAX},
    {"pci_subsystem_id", NUMBER, FIELD(pci_subsystem_id), 0, UINT32_MAX},
    {"root_complex", NUMBER, FIELD(root_complex), 0, 1023},
    {"pcie_switch", NUMBER, FIELD(pcie_switch), 0, 1023},
    {"pcie_gen", NUMBER, FIELD(pcie_gen), 1, 7},
    {"pcie_width", NUMBER, FIELD(pcie_width), 1, 32},
    {"memory_bytes", BYTES, FIELD(memory_bytes), 0, MAX_BYTES},
    {"reserved_bytes", BYTES, FIELD(reserved_bytes), 0, MAX_BYTES},
    {"context_bytes", BYTES, FIELD(context_bytes), 0, MAX_BYTES},
    {"bar1_bytes", BYTES, FIELD(bar1_bytes), 0, MAX_BYTES},
    {"memory_from_nvml", FLAG, FIELD(memory_from_nvml), 0, 0},
    {"memory_bus_bits", NUMBER, FIELD(memory_bus_bits), 32, 16384},
    {"memory_clock_mhz", NUMBER, FIELD(memory_clock_mhz), 1, 100000},
    {"sm_clock_mhz", NUMBER, FIELD(sm_clock_mhz), 1, 100000},
    {"sm_count", NUMBER, FIELD(sm_count), 1, 4096},
    {"threads_per_sm", NUMBER, FIELD(threads_per_sm), 32, 65536},
    {"cores_per_sm", NUMBER, FIELD(cores_per_sm), 1, 4096},
    {"blocks_per_sm", NUMBER, FIELD(blocks_per_sm), 1, 4096},
    {"shared_per_sm", NUMBER, FIELD(shared_per_sm), 1024, 1u << 30},
    {"shared_per_block_optin", NUMBER, FIELD(shared_per_block_optin), 1024, 1u << 30},
    {"l2_bytes", BYTES, FIELD(l2_bytes), 0, 1ull << 30},
    {"integrated", FLAG, FIELD(integrated), 0, 0},
    {"power_min_mw", NUMBER, FIELD(power_min_mw), 0, 100000000},
    {"power_default_mw", NUMBER, FIELD(power_default_mw), 0, 100000000},
    {"power_max_mw", NUMBER, FIELD(power_max_mw), 0, 100000000},
    {"ecc_capable", FLAG, FIELD(ecc_capable), 0, 0},
    {"ecc_enabled", FLAG, FIELD(ecc_enabled), 0, 0},
    {"display_active", FLAG, FIELD(display_active), 0, 0},
    {"persistence", FLAG, FIELD(persistence), 0, 0},
    {"mig_enabled", FLAG, FIELD(mig_enabled), 0, 0},
    {"nvlink_version", NUMBER, FIELD(nvlink_version), 0, 16},
    {"nvlink_count", NUMBER, FIELD(nvlink_count), 0, FG_MAX_NVLINKS},
};

static int read_key(const struct key *key, struct json *value, char *card, struct json_report *report)
{
	char *target = card + key->offset;

	switch (key->kind) {
	case TEXT:
		return json_read_text(value, target, key->size, report);
	case BYTES:
		return json_read_bytes(value, (uint64_t *)(void *)target, key->high, report);
	case FLAG:
		return json_read_bool(value, (uint32_t *)(void *)target, report);
	case NUMBER64:
		return json_read_u64(value, (uint64_t *)(void *)target, key->low, key->high, report);
	case NUMBER:
		break;
	}
	return json_read_u32(value, (uint32_t *)(void *)target,
			     key->low > UINT32_MAX ? 0 : (uint32_t)key->low,
			     key->high > UINT32_MAX ? UINT32_MAX : (uint32_t)key->high, report);
}

static int read_word(struct json *value, const char *const *words, uint32_t *target,
		     struct json_report *report)
{
	if (value == NULL)
		return 0;
	for (uint32_t i = 0; value->kind == JSON_STRING && words[i] != NULL; i++)
		if (words[i][0] != '\0' && strcmp(words[i], value->string) == 0) {
			*target = i;
			return 0;
		}
	return json_complain(report, value, "unknown word");
}

static int read_compute_capability(struct json *value, struct fg_card_config *card,
				   struct json_report *report)
{
	unsigned major, minor;
	char rest;

	if (value == NULL)
		return 0;
	if (value->kind != JSON_STRING || sscanf(value->string, "%2u.%2u%c", &major, &minor, &rest) != 2)
		return json_complain(report, value, "must be text such as \"8.6\"");
	card->cc_major = major;
	card->cc_minor = minor;
	return 0;
}

static int read_pci(struct json *value, struct fg_card_config *card, struct json_report *report)
{
	unsigned domain, bus, device, function = 0;
	char rest;

	if (value == NULL)
		return 0;
	if (value->kind != JSON_STRING ||
	    sscanf(value->string, "%8x:%2x:%2x.%1u%c", &domain, &bus, &device, &function, &rest) != 4 ||
	    function != 0 || device > 31)
		return json_complain(report, value, "must be text such as \"00000000:3b:00.0\"");
	card->pci_domain = domain;
	card->pci_bus = bus;
	card->pci_device = device;
	return 0;
}

/* Keys that make no sense for several cards at once, so neither in "defaults" nor, but for a fixed step, with
 * "count". */
static int read_identity(const struct fg_card_source *source, struct fg_card_config *card,
			 struct json_report *report)
{
	struct json *uuid = json_member(source->item, "uuid"), *serial = json_member(source->item, "serial");
	struct json *minor = json_member(source->item, "minor"), *pci = json_member(source->item, "pci");
	char text[FG_UUID_TEXT_LEN] = "";

	if (source->copy > 0 && (uuid != NULL || serial != NULL || pci != NULL))
		return json_complain(report, source->item,
				     "uuid, serial and pci name one card, \"count\" makes several");
	if (uuid != NULL) {
		if (json_read_text(uuid, text, sizeof text, report))
			return -1;
		if (strncmp(text, "GPU-", 4) != 0 || fg_uuid_parse(text, card->uuid))
			return json_complain(report, uuid, "must be GPU- and a UUID");
	}
	fg_uuid_format("GPU-", card->uuid, card->uuid_text, sizeof card->uuid_text);
	if (json_read_text(serial, card->serial, sizeof card->serial, report) ||
	    read_pci(pci, card, report) || json_read_u32(minor, &card->minor, 0, 0xfffff, report))
		return -1;
	if (minor != NULL)
		card->minor += (uint32_t)source->copy;
	return 0;
}

static int read_figures(struct json *object, struct fg_card_config *card, struct json_report *report)
{
	static const char *const modes[] = {"default", "", "prohibited", "exclusive", NULL};
	static const char *const families[] = {"none",    "A30",  "A100-40", "A100-80",      "H100-80",
					       "H100-96", "H200", "B200",    "RTX-PRO-6000", NULL};
	int64_t numa = card->numa;

	if (object == NULL)
		return 0;
	for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
		if (read_key(&keys[i], json_member(object, keys[i].name), (char *)card, report))
			return -1;
	if (read_compute_capability(json_member(object, "compute_capability"), card, report) ||
	    read_word(json_member(object, "compute_mode"), modes, &card->compute_mode, report) ||
	    read_word(json_member(object, "mig_family"), families, &card->mig_family, report) ||
	    json_read_i64(json_member(object, "numa"), &numa, -1, 1023, report))
		return -1;
	card->numa = (int32_t)numa;
	return 0;
}

int fg_config_card(const struct fg_card_source *source, struct fg_card_config *card,
		   struct json_report *report)
{
	char profile[32];
	struct json *named = json_member(source->item, "profile");
	struct json *fallback = json_member(source->defaults, "profile");
	uint64_t serial;

	snprintf(profile, sizeof profile, "%s", source->profile);
	if (json_read_text(named != NULL ? named : fallback, profile, sizeof profile, report))
		return -1;
	if (fg_profile_apply(profile, card)) {
		char known[160] = "";

		for (size_t i = 0; fg_profile_name(i) != NULL; i++) {
			strncat(known, i > 0 ? ", " : "", sizeof known - strlen(known) - 1);
			strncat(known, fg_profile_name(i), sizeof known - strlen(known) - 1);
		}
		return json_complain(report, named != NULL ? named : source->item,
				     "no profile \"%s\"; there are %s", profile, known);
	}
	card->minor = source->index;
	card->pci_bus = 1 + source->index % 255;
	card->pci_domain = source->index / 255;
	card->numa = 0;
	fg_uuid_make(fg_seed(source->seed, source->index), card->uuid);
	serial = fg_seed(source->seed, source->index + 0x100000u) % UINT64_C(10000000000000);
	snprintf(card->serial, sizeof card->serial, "%013" PRIu64, serial);
	if (read_figures(source->defaults, card, report) || read_figures(source->item, card, report) ||
	    read_identity(source, card, report))
		return -1;
	if ((source->defaults != NULL && json_no_others(source->defaults, report)) ||
	    json_no_others(source->item, report))
		return -1;
	if (card->reserved_bytes > card->memory_bytes)
		return json_complain(report, source->item, "reserved_bytes is more than memory_bytes");
	if (card->mig_enabled && card->mig_family == FG_MIG_NONE)
		return json_complain(report, source->item,
				     "mig_enabled on a card without MIG (see mig_family)");
	if (card->power_default_mw > card->power_max_mw || card->power_min_mw > card->power_default_mw)
		return json_complain(report, source->item,
				     "power_min_mw, power_default_mw, power_max_mw must not fall");
	return 0;
}

int fg_config_distinct(const struct fg_card_config *card, uint32_t count, const struct json *at,
		       struct json_report *report)
{
	for (uint32_t i = 0; i < count; i++)
		for (uint32_t j = i + 1; j < count; j++) {
			const char *what = NULL;

			if (memcmp(card[i].uuid, card[j].uuid, 16) == 0)
				what = "UUID";
			else if (strcmp(card[i].serial, card[j].serial) == 0)
				what = "serial";
			else if (card[i].minor == card[j].minor)
				what = "minor";
			else if (card[i].pci_domain == card[j].pci_domain &&
				 card[i].pci_bus == card[j].pci_bus &&
				 card[i].pci_device == card[j].pci_device)
				what = "PCI address";
			if (what != NULL)
				return json_complain(report, at,
						     "cards %" PRIu32 " and %" PRIu32 " have the same %s", i,
						     j, what);
		}
	return 0;
}

int fg_config_join(struct fg_card_config *card, uint32_t a, uint32_t b, uint32_t count)
{
	uint32_t done = 0;

	if (b == FG_LINK_SWITCH)
		count = card[a].nvlink_count;
	for (uint32_t i = 0; i < card[a].nvlink_count && done < count; i++) {
		uint32_t other = FG_LINK_NONE;

		if (card[a].nvlink[i].remote_card != FG_LINK_NONE)
			continue;
		if (b != FG_LINK_SWITCH) {
			for (uint32_t j = 0; j < card[b].nvlink_count && other == FG_LINK_NONE; j++)
				if (card[b].nvlink[j].remote_card == FG_LINK_NONE && (a != b || j != i))
					other = j;
			if (other == FG_LINK_NONE || a == b)
				return -1;
			card[b].nvlink[other] = (struct fg_nvlink){a, i};
		}
		card[a].nvlink[i] = (struct fg_nvlink){b, other};
		done++;
	}
	return done == count && count > 0 ? 0 : -1;
}
