/* SPDX-License-Identifier: Apache-2.0 */
#include "visible.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

#include "state.h"

/* One word of the list against one card. */
static int word_names(const char *word, size_t length, uint32_t index, const struct fg_card_config *card)
{
	if (length == 3 && strncasecmp(word, "all", 3) == 0)
		return 1;
	if (length > 4 && strncasecmp(word, "GPU-", 4) == 0)
		return length <= strlen(card->uuid_text) && strncasecmp(word, card->uuid_text, length) == 0;
	char *end;
	unsigned long number = strtoul(word, &end, 10);
	return length > 0 && end == word + length && number == index;
}

static int list_names(const char *list, uint32_t index, const struct fg_card_config *card)
{
	while (*list != '\0') {
		size_t length = strcspn(list, ",");
		if (word_names(list, length, index, card))
			return 1;
		list += length + (list[length] == ',');
	}
	return 0;
}

static int has_node(const struct fg_card_config *card)
{
	const char *root = getenv("FAKEGPU_DEV_ROOT");
	char path[512];
	struct stat found;
	if (snprintf(path, sizeof(path), "%s/nvidia%u", root != NULL && *root != '\0' ? root : "/dev",
		     card->minor) >= (int)sizeof(path))
		return 0;
	return stat(path, &found) == 0 && S_ISCHR(found.st_mode);
}

uint32_t fg_visible_cards(uint32_t *cards, uint32_t size)
{
	const char *list = getenv("FAKEGPU_VISIBLE_DEVICES");
	uint32_t count = 0;
	for (uint32_t i = 0; i < fg_state->card_count && count < size; i++) {
		const struct fg_card_config *card = &fg_card_at(i)->config;
		if (list != NULL ? list_names(list, i, card) : has_node(card))
			cards[count++] = i;
	}
	if (list == NULL && count == 0)
		for (; count < fg_state->card_count && count < size; count++)
			cards[count] = count;
	return count;
}
