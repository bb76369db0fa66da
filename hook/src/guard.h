/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs a step over a mapping that somebody else may cut short while it runs. Only in the node's region
 * library: it takes the process's SIGBUS action, which the hook must never do to a program.
 */
#ifndef ALIQUOT_GUARD_H
#define ALIQUOT_GUARD_H

/* Returns what `step(map, argument)` returns, or -EIO when it touched memory that is not there any more.
 * `step` must hold nothing that would have to be given back. */
int aq_guarded(int (*step)(void *map, void *argument), void *map, void *argument);

#endif
