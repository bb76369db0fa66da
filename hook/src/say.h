/* SPDX-License-Identifier: Apache-2.0
 *
 * The hook's only voice: one line on stderr per kind of trouble and process, and only where a program is
 * refused something for a reason that it cannot tell by itself. Everything else is silent.
 */
#ifndef ALIQUOT_SAY_H
#define ALIQUOT_SAY_H

enum aq_trouble {
	AQ_SAY_REFUSED = 0, /* no usable grant */
	AQ_SAY_CARD, /* a card outside the grant */
	AQ_SAY_SLOTS, /* no room for another process */
	AQ_SAY_CONTEXT, /* the limit is smaller than a context */
	AQ_SAY_REGION, /* the usage file was damaged while in use */
};

/* Writes "aliquot: " and the parts (NULL-ended), once per kind. */
void aq_say(enum aq_trouble kind, const char *const *parts);

#define AQ_SAY(kind, ...) aq_say(kind, (const char *const[]){__VA_ARGS__, NULL})

/* Decimal text of a number in the caller's buffer. */
const char *aq_decimal(unsigned long long value, char buffer[24]);

#endif
