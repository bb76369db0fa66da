/* SPDX-License-Identifier: Apache-2.0
 *
 * Where an allocation of the calling thread would go: its current context, and that context's card.
 */
#ifndef ALIQUOT_PLACE_H
#define ALIQUOT_PLACE_H

#include "driver.h"

enum aq_verdict {
	AQ_PASS, /* none of our business: let the driver speak */
	AQ_CHARGE, /* charge `card` */
	AQ_REFUSE, /* a card that this container was not granted */
};

struct aq_place {
	unsigned card;
	unsigned context; /* for aq_entry */
	CUdevice ordinal;
};

/* Of the calling thread. */
enum aq_verdict aq_place_here(struct aq_place *place);

/* Of a device named by its ordinal; no context needed. */
enum aq_verdict aq_place_device(CUdevice ordinal, struct aq_place *place);

/* Of a stream: the device of its context. Null and the two special streams mean the calling thread's. */
enum aq_verdict aq_place_stream(CUstream stream, struct aq_place *place);

#endif
