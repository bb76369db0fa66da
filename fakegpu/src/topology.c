/* SPDX-License-Identifier: Apache-2.0
 *
 * How far apart two cards are, and whether one reaches the other's memory. Pure reading of the configuration.
 */
#include "state.h"

enum fg_topology fg_topology_between(uint32_t a, uint32_t b)
{
	const struct fg_card_config *one = &fg_card_at(a)->config, *other = &fg_card_at(b)->config;

	if (a == b)
		return FG_TOPOLOGY_INTERNAL;
	if (one->root_complex == other->root_complex && one->numa == other->numa)
		return one->pcie_switch != 0 && one->pcie_switch == other->pcie_switch
			   ? FG_TOPOLOGY_SINGLE
			   : FG_TOPOLOGY_HOSTBRIDGE;
	return one->numa == other->numa ? FG_TOPOLOGY_NODE : FG_TOPOLOGY_SYSTEM;
}

uint32_t fg_nvlinks_between(uint32_t a, uint32_t b)
{
	const struct fg_card_config *one = &fg_card_at(a)->config, *other = &fg_card_at(b)->config;
	uint32_t direct = 0, up = 0, down = 0;

	if (a == b)
		return 0;
	for (uint32_t i = 0; i < one->nvlink_count; i++) {
		direct += one->nvlink[i].remote_card == b;
		up += one->nvlink[i].remote_card == FG_LINK_SWITCH;
	}
	for (uint32_t i = 0; i < other->nvlink_count; i++)
		down += other->nvlink[i].remote_card == FG_LINK_SWITCH;
	return direct + (up < down ? up : down);
}

int fg_p2p_possible(uint32_t a, uint32_t b)
{
	if (a == b || fg_state->driver.p2p_policy == FG_P2P_NONE || fg_card_at(a)->mig_enabled ||
	    fg_card_at(b)->mig_enabled)
		return 0;
	if (fg_nvlinks_between(a, b) > 0)
		return 1;
	return fg_state->driver.p2p_policy == FG_P2P_ALL && fg_topology_between(a, b) < FG_TOPOLOGY_SYSTEM;
}
