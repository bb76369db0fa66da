/* SPDX-License-Identifier: Apache-2.0
 *
 * One card of the configuration file. Between config.c and config_card.c only.
 */
#ifndef FAKEGPU_CONFIG_CARD_H
#define FAKEGPU_CONFIG_CARD_H

#include "config.h"
#include "json.h"

/* Where a card's figures come from, the nearest first: its own object, "defaults", the profile, the seed. */
struct fg_card_source {
	struct json *item;
	struct json *defaults; /* or NULL */
	const char *profile;
	const char *seed;
	uint32_t index; /* of the card */
	uint64_t copy; /* of an object with "count" */
};

int fg_config_card(const struct fg_card_source *source, struct fg_card_config *card,
		   struct json_report *report);
/* Complains when two cards share a UUID, serial, PCI address or minor. */
int fg_config_distinct(const struct fg_card_config *card, uint32_t count, const struct json *at,
		       struct json_report *report);
/* Takes `count` free links of `a` (and of `b`, unless that is FG_LINK_SWITCH, where 1 stands for all); -1:
 * too few. */
int fg_config_join(struct fg_card_config *card, uint32_t a, uint32_t b, uint32_t count);

#endif
