/* SPDX-License-Identifier: Apache-2.0
 *
 * Which card an NVML handle is: found by its UUID, remembered until NVML is shut down.
 */
#ifndef ALIQUOT_NVML_DEVICE_H
#define ALIQUOT_NVML_DEVICE_H

#include "process.h"

/* Index into aq_cards, or AQ_NO_CARD. */
int aq_nvml_card(nvmlDevice_t device);

#endif
