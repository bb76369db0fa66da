/* SPDX-License-Identifier: Apache-2.0
 *
 * Which of the machine's cards this process sees, the same for both libraries.
 *
 *   FAKEGPU_VISIBLE_DEVICES set   the cards it lists, in the machine's order: indices, UUIDs (or the
 * beginning of one), "all", "none" or nothing at all. else, /dev/nvidia<minor>      the cards whose node is
 * there; when no card has one, all cards (a plain program on the host, without a container around it).
 *
 * FAKEGPU_DEV_ROOT names another folder than /dev. Nodes that are not NVIDIA's but, say, /dev/null under that
 * name count as well: where mknod is not allowed they stand in for it. Invariant: no card is listed twice.
 */
#ifndef FAKEGPU_VISIBLE_H
#define FAKEGPU_VISIBLE_H

#include <stdint.h>

/* Fills `cards` with indices of fg_card_at, ascending, and returns how many (at most `size`).
 * The state must be open. Looks at files: call it from initialisation, not from fast paths. */
uint32_t fg_visible_cards(uint32_t *cards, uint32_t size);

#endif
