/* SPDX-License-Identifier: Apache-2.0
 *
 * What the hook is in this process, decided once, the first time a driver function that matters is asked for.
 */
#ifndef ALIQUOT_MODE_H
#define ALIQUOT_MODE_H

enum aq_mode {
	AQ_MODE_UNDECIDED = 0,
	AQ_MODE_OFF, /* nothing limits this process: it gets the driver's own functions */
	AQ_MODE_GRANT, /* limits come from the grants mounted into the container */
	AQ_MODE_STANDALONE, /* limits come from HAMi's environment variables */
	AQ_MODE_REFUSED, /* no CUDA: there is no grant where there must be one, or it cannot be read */
};

/* Why this process is refused, for people; "" while it is not. */
extern char aq_refusal[512];

/* Sets it from parts, NULL-ended, and returns AQ_MODE_REFUSED. */
enum aq_mode aq_refuse(const char *const *parts);
#define AQ_REFUSE_BECAUSE(...) aq_refuse((const char *const[]){__VA_ARGS__, NULL})

extern int aq_mode_word;
enum aq_mode aq_decide(void);

static inline enum aq_mode aq_mode(void)
{
	enum aq_mode mode = (enum aq_mode)__atomic_load_n(&aq_mode_word, __ATOMIC_ACQUIRE);
	return __builtin_expect(mode != AQ_MODE_UNDECIDED, 1) ? mode : aq_decide();
}

#endif
