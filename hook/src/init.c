/* SPDX-License-Identifier: Apache-2.0
 *
 * The start of CUDA in a process: which ordinals are which cards. The driver says it, by UUID; whatever
 * CUDA_VISIBLE_DEVICES or the order of devices made of the indices does not matter.
 */
#include <string.h>

#include "charge.h"
#include "early.h"
#include "mode.h"
#include "process.h"
#include "resolve.h"
#include "say.h"
#include "standalone.h"
#include "state.h"

AQ_EARLY int aq_active_word;
AQ_EARLY int8_t aq_ordinal_card[AQ_MAX_ORDINALS];
AQ_EARLY int8_t aq_sole_card;

static bool device_uuid(CUdevice device, CUuuid *uuid)
{
	/* The second form tells a MIG device from its card. */
	if (HAS(cuDeviceGetUuid_v2))
		return REAL(cuDeviceGetUuid_v2)(uuid, device) == CUDA_SUCCESS;
	return REAL(cuDeviceGetUuid)(uuid, device) == CUDA_SUCCESS;
}

/* The card that every device is on. */
static int8_t sole(const int8_t *cards, int count)
{
	for (int i = 1; i < count; i++)
		if (i == (int)AQ_MAX_ORDINALS || cards[i] != cards[0])
			return AQ_NO_CARD;
	return cards[0];
}

/* Fills in aq_ordinal_card and aq_sole_card. False: the driver is not initialised (yet). */
static bool discover(enum aq_mode mode)
{
	int8_t cards[AQ_MAX_ORDINALS];
	int count = 0;
	if (REAL(cuDeviceGetCount)(&count) != CUDA_SUCCESS)
		return false;
	memset(cards, AQ_NO_CARD, sizeof(cards));
	for (int i = 0; i < count && i < (int)AQ_MAX_ORDINALS; i++) {
		CUdevice device;
		CUuuid uuid;
		if (REAL(cuDeviceGet)(&device, i) != CUDA_SUCCESS || device < 0 ||
		    device >= (int)AQ_MAX_ORDINALS || !device_uuid(device, &uuid))
			continue;
		if (mode == AQ_MODE_STANDALONE)
			cards[device] =
			    (int8_t)aq_standalone_card(&uuid, aq_standalone_index(&uuid, i, count));
		else if (mode == AQ_MODE_GRANT)
			cards[device] = (int8_t)aq_card_by_uuid(&uuid);
	}
	memcpy(aq_ordinal_card, cards, sizeof(cards));
	aq_sole_card = sole(cards, count);
	return true;
}

int aq_start(void)
{
	enum aq_mode mode = aq_mode();
	int active = 2;
	if (mode != AQ_MODE_OFF) {
		if (!discover(mode))
			return 0;
		active = 1;
	}
	__atomic_store_n(&aq_active_word, active, __ATOMIC_RELEASE);
	return active;
}

bool aq_refuses(CUdevice ordinal)
{
	enum aq_mode mode = aq_mode();
	int count = 0;
	if (mode != AQ_MODE_GRANT && mode != AQ_MODE_REFUSED)
		return false;
	/* What is no device at all is for the driver to say. */
	if (ordinal < 0 || REAL(cuDeviceGetCount)(&count) != CUDA_SUCCESS || ordinal >= count)
		return false;
	char digits[24];
	aq_complain(AQ_NO_CARD, AQ_COMPLAINT_CARD);
	AQ_SAY(AQ_SAY_CARD, "device ", aq_decimal((unsigned)ordinal, digits),
	       " is not among the grants of this container; use one that is");
	return true;
}

static bool any_card(void)
{
	for (unsigned i = 0; i < AQ_MAX_ORDINALS; i++)
		if (aq_ordinal_card[i] != AQ_NO_CARD)
			return true;
	return false;
}

HOOK(CUresult, cuInit, (unsigned flags))
{
	enum aq_mode mode = aq_mode();
	if (mode == AQ_MODE_REFUSED) {
		AQ_SAY(AQ_SAY_REFUSED, "CUDA is refused: ", aq_refusal);
		return CUDA_ERROR_NOT_PERMITTED;
	}
	CUresult result = REAL(cuInit)(flags);
	if (result != CUDA_SUCCESS || mode == AQ_MODE_OFF)
		return result;
	if (aq_start() == 1 && mode == AQ_MODE_GRANT && !any_card()) {
		aq_complain(AQ_NO_CARD, AQ_COMPLAINT_CARD);
		AQ_SAY(AQ_SAY_CARD,
		       "CUDA is refused: no visible device is among the grants of this container; check "
		       "CUDA_VISIBLE_DEVICES and NVIDIA_VISIBLE_DEVICES");
		return CUDA_ERROR_NOT_PERMITTED;
	}
	return result;
}
