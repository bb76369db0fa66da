/* SPDX-License-Identifier: Apache-2.0
 *
 * The configuration file: the driver, the list of cards, the links between them. See config.h; single cards
 * are read in config_card.c.
 */
#include "config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config_card.h"
#include "json.h"

#define MAX_CARDS 4096u
#define SECOND_NS 1000000000ull

static int read_driver(struct json *root, struct fg_driver_config *driver, struct json_report *report)
{
	struct json *p2p = json_member(root, "p2p"), *version = json_member(root, "cuda_version");
	struct json *fork_mode = json_member(root, "fork");
	char text[16] = "";

	json_read_text(json_member(root, "driver_version"), driver->driver_version,
		       sizeof driver->driver_version, report);
	json_read_text(json_member(root, "nvml_version"), driver->nvml_version, sizeof driver->nvml_version,
		       report);
	json_read_u32(version, &driver->cuda_version, 2000, 99990, report);
	if (json_read_text(p2p, text, sizeof text, report) == 0 && p2p != NULL) {
		driver->p2p_policy = strcmp(text, "all") == 0      ? FG_P2P_ALL
				     : strcmp(text, "nvlink") == 0 ? FG_P2P_NVLINK
								   : FG_P2P_NONE;
		if (driver->p2p_policy == FG_P2P_NONE && strcmp(text, "none") != 0)
			json_complain(report, p2p, "must be \"all\", \"nvlink\" or \"none\"");
	}
	if (json_read_text(fork_mode, text, sizeof text, report) == 0 && fork_mode != NULL) {
		driver->fork_refused = strcmp(text, "refuse") == 0;
		if (!driver->fork_refused && strcmp(text, "restart") != 0)
			json_complain(report, fork_mode, "must be \"restart\" or \"refuse\"");
	}
	json_read_u64(json_member(root, "launch_ns"), &driver->launch_ns, 0, 3600 * SECOND_NS, report);
	json_read_u64(json_member(root, "time_slice_ns"), &driver->time_slice_ns, 0, 3600 * SECOND_NS,
		      report);
	json_read_u64(json_member(root, "copy_bytes_per_second"), &driver->copy_bytes_per_second, 0,
		      1ull << 50, report);
	json_read_u64(json_member(root, "context_create_ns"), &driver->context_create_ns, 0, 60 * SECOND_NS,
		      report);
	json_read_u64(json_member(root, "alloc_ns"), &driver->alloc_ns, 0, 60 * SECOND_NS, report);
	json_read_u32(json_member(root, "queue_depth"), &driver->queue_depth, 1, 1024, report);
	json_read_bytes(json_member(root, "plain_round"), &driver->plain_round, 1ull << 30, report);
	json_read_bytes(json_member(root, "pitch_align"), &driver->pitch_align, 1ull << 20, report);
	json_read_bytes(json_member(root, "vmm_granularity"), &driver->vmm_granularity, 1ull << 30, report);
	json_read_bytes(json_member(root, "pool_grow_bytes"), &driver->pool_grow_bytes, 1ull << 40, report);
	json_read_bytes(json_member(root, "managed_page"), &driver->managed_page, 1ull << 30, report);

	const struct {
		const char *key;
		uint64_t value, least;
	} powers[] = {{"plain_round", driver->plain_round, 256},
		      {"pitch_align", driver->pitch_align, 32},
		      {"vmm_granularity", driver->vmm_granularity, 4096},
		      {"pool_grow_bytes", driver->pool_grow_bytes, 512},
		      {"managed_page", driver->managed_page, 4096}};

	for (size_t i = 0; i < sizeof powers / sizeof powers[0]; i++)
		if (powers[i].value < powers[i].least || (powers[i].value & (powers[i].value - 1)) != 0)
			json_complain(report, json_member(root, powers[i].key),
				      "must be a power of two from %u up", (unsigned)powers[i].least);
	return report->failed ? -1 : 0;
}

static int read_cards(struct json *root, struct fg_config *config, struct json_report *report)
{
	struct json *list = json_member(root, "cards"), *defaults = json_member(root, "defaults");
	char seed[64] = "fakegpu", profile[32] = "Fake24G";
	uint64_t total = 0;

	json_read_text(json_member(root, "seed"), seed, sizeof seed, report);
	json_read_text(json_member(root, "profile"), profile, sizeof profile, report);
	if (list == NULL || list->kind != JSON_ARRAY)
		return json_complain(report, list, "\"cards\" must be a list of cards");
	if (json_want(defaults, JSON_OBJECT, report))
		return -1;
	for (struct json *item = list->first; item != NULL; item = item->next) {
		uint64_t count = 1;

		if (json_want(item, JSON_OBJECT, report) ||
		    json_read_u64(json_member(item, "count"), &count, 0, MAX_CARDS, report))
			return -1;
		total += count;
	}
	if (total > MAX_CARDS)
		return json_complain(report, list, "more than %u cards", MAX_CARDS);
	config->card = calloc(total + 1, sizeof *config->card);
	if (config->card == NULL)
		return json_complain(report, list, "out of memory");
	for (struct json *item = list->first; item != NULL; item = item->next) {
		uint64_t count = 1;

		json_read_u64(json_member(item, "count"), &count, 0, MAX_CARDS, report);
		for (uint64_t copy = 0; copy < count; copy++) {
			struct fg_card_source source = {item, defaults,           profile,
							seed, config->card_count, copy};

			if (fg_config_card(&source, &config->card[config->card_count], report))
				return -1;
			config->card_count++;
		}
	}
	return fg_config_distinct(config->card, config->card_count, list, report);
}

/* {"cards": [0, 1], "count": 12}: that many NVLinks between each two of them; {"cards": […], "switch": true}:
 * all links of each go to NVSwitches. */
static int read_link(struct json *item, struct fg_config *config, struct json_report *report)
{
	struct json *members = json_member(item, "cards");
	uint32_t card[64], cards = 0, count = 1, switched = 0;

	if (json_want(item, JSON_OBJECT, report) || members == NULL || members->kind != JSON_ARRAY)
		return json_complain(report, item, "a link needs \"cards\", a list of indices");
	for (struct json *member = members->first; member != NULL; member = member->next) {
		if (cards == 64)
			return json_complain(report, members, "more than 64 cards in one link");
		if (config->card_count == 0 ||
		    json_read_u32(member, &card[cards++], 0, config->card_count - 1, report))
			return json_complain(report, member, "no such card");
	}
	json_read_u32(json_member(item, "count"), &count, 1, FG_MAX_NVLINKS, report);
	json_read_bool(json_member(item, "switch"), &switched, report);
	if (json_no_others(item, report))
		return -1;
	for (uint32_t i = 0; i < cards; i++)
		for (uint32_t j = switched ? cards - 1 : i + 1; j < cards; j++)
			if (fg_config_join(config->card, card[i], switched ? FG_LINK_SWITCH : card[j], count))
				return json_complain(report, item,
						     "a card has no free NVLink left, or none at all");
	return 0;
}

static int read_root(struct json *root, struct fg_config *config, struct json_report *report)
{
	struct json *links = json_member(root, "links");
	uint32_t version = 1;

	if (json_want(root, JSON_OBJECT, report) ||
	    json_read_u32(json_member(root, "version"), &version, 1, 1, report) ||
	    read_driver(root, &config->driver, report) || read_cards(root, config, report))
		return -1;
	if (links != NULL && links->kind != JSON_ARRAY)
		return json_complain(report, links, "must be a list");
	for (struct json *item = links != NULL ? links->first : NULL; item != NULL; item = item->next)
		if (read_link(item, config, report))
			return -1;
	return json_no_others(root, report);
}

int fg_config_parse(const char *text, size_t length, struct fg_config *config, char *error, size_t error_size)
{
	struct json_report report = {error, error_size, false};
	struct json_document document;
	int bad;

	memset(config, 0, sizeof *config);
	config->driver = (struct fg_driver_config){.time_slice_ns = 2000000,
						   .queue_depth = 1024,
						   .plain_round = 512,
						   .pitch_align = 512,
						   .vmm_granularity = 2u << 20,
						   .pool_grow_bytes = 32u << 20,
						   .managed_page = 64u << 10};
	if (json_parse(text, length, &document, &report))
		return -1;
	bad = read_root(document.root, config, &report);
	json_free(&document);
	if (bad)
		fg_config_free(config);
	return bad;
}

void fg_config_free(struct fg_config *config)
{
	free(config->card);
	config->card = NULL;
	config->card_count = 0;
}
