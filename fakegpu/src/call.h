/* SPDX-License-Identifier: Apache-2.0
 *
 * What every exported function does first: one load and a branch that is never taken while nobody asked for
 * faults or a log.
 *
 *	CUresult cuFoo(int a, void *b)
 *	{
 *		FG_CALL("cuFoo", "a=%d b=%p", a, b);
 *		…
 *
 * When a rule of the control file matches, FG_CALL returns the rule's code from the calling function. The log
 * gets one JSON line per call, before the rule is applied: {"n":1,"pid":7,"tid":7,"t":…,"f":"cuFoo","a":"…"}.
 */
#ifndef FAKEGPU_CALL_H
#define FAKEGPU_CALL_H

#include <stdint.h>

#define FG_ATTENTION_RULES   1u /* there are rules */
#define FG_ATTENTION_LOG     2u /* calls are logged */
#define FG_ATTENTION_CONTROL 4u /* poked: the control file is to be read again */

/* Points into the shared state once that is open, at a zero before. */
extern const uint32_t *fg_attention;
/* The same bits for this process alone (FAKEGPU_LOG). */
extern uint32_t fg_attention_here;

/* Reads FAKEGPU_LOG, once. */
void fg_call_start(void);

/* Logs, waits and returns the code of the rule that matches; 0: go on. `card`: FG_RULE_ANY_CARD when unknown.
 */
int fg_call_slow(const char *function, uint32_t card, const char *format, ...)
    __attribute__((format(printf, 3, 4), cold));

#define FG_CALL_ABOUT(card, function, ...)                                                                \
	do {                                                                                              \
		if (__builtin_expect(                                                                     \
			(__atomic_load_n(fg_attention, __ATOMIC_RELAXED) | fg_attention_here) != 0, 0)) { \
			int fg_code_ = fg_call_slow(function, card, __VA_ARGS__);                         \
			if (fg_code_ != 0)                                                                \
				return fg_code_;                                                          \
		}                                                                                         \
	} while (0)
/* FG_RULE_ANY_CARD, so that this header needs no other. */
#define FG_CALL(function, ...) FG_CALL_ABOUT(0xffffffffu, function, __VA_ARGS__)

#endif
