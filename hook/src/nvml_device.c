/* SPDX-License-Identifier: Apache-2.0
 *
 * See nvml_device.h.
 */
#include "nvml_device.h"

#include "mode.h"
#include "resolve.h"
#include "standalone.h"

#define UUID_TEXT 96u

static int look_up(nvmlDevice_t device)
{
	char text[UUID_TEXT];
	CUuuid uuid;
	if (REAL(nvmlDeviceGetUUID)(device, text, sizeof(text)) != NVML_SUCCESS ||
	    !aq_uuid_parse(text, &uuid))
		return AQ_NO_CARD;
	int card = aq_card_by_uuid(&uuid);
	unsigned index;
	if (card == AQ_NO_CARD && aq_mode() == AQ_MODE_STANDALONE &&
	    REAL(nvmlDeviceGetIndex)(device, &index) == NVML_SUCCESS)
		card = aq_standalone_card(&uuid, (int)index);
	return card;
}

int aq_nvml_card(nvmlDevice_t device)
{
	enum aq_mode mode = aq_mode();
	struct aq_process *process = aq_process();
	uint64_t value;
	if (mode != AQ_MODE_GRANT && mode != AQ_MODE_STANDALONE)
		return AQ_NO_CARD;
	if (aq_table_get(&process->nvml_devices, (uintptr_t)device, &value))
		return (int)value - 1;
	int card = look_up(device);
	aq_table_put(&process->nvml_devices, (uintptr_t)device, (uint64_t)(card + 1));
	return card;
}

static void forget(struct aq_table *table, uint64_t key, uint64_t value, void *argument)
{
	(void)argument;
	aq_table_take(table, key, &value);
}

/* Handles are only good until the last shutdown. */
HOOK(nvmlReturn_t, nvmlShutdown, (void))
{
	aq_table_each(&aq_process()->nvml_devices, forget, NULL);
	return REAL(nvmlShutdown)();
}
