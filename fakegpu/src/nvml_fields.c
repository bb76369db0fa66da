/* SPDX-License-Identifier: Apache-2.0
 *
 * libnvidia-ml: field values, as DCGM and exporters read them, and samples over time.
 */
#include <string.h>

#include "nvml_settings.h"

/* ---- fields ------------------------------------------------------------------------------------------- */

static nvmlReturn_t tell(nvmlFieldValue_t *field, nvmlValueType_t type, unsigned long long value)
{
	memset(&field->value, 0, sizeof(field->value));
	field->valueType = type;
	if (type == NVML_VALUE_TYPE_UNSIGNED_INT)
		field->value.uiVal = (unsigned int)value;
	else if (type == NVML_VALUE_TYPE_SIGNED_INT)
		field->value.siVal = (int)value;
	else
		field->value.ullVal = value;
	return NVML_SUCCESS;
}

#define UINT(value) tell(field, NVML_VALUE_TYPE_UNSIGNED_INT, value)
#define ULL(value)  tell(field, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, value)

static nvmlReturn_t ecc_field(const struct nv_device *of, nvmlFieldValue_t *field)
{
	if (!of->card->config.ecc_capable)
		return NVML_ERROR_NOT_SUPPORTED;
	if (field->fieldId == NVML_FI_DEV_ECC_CURRENT)
		return UINT(of->card->ecc_enabled);
	if (field->fieldId == NVML_FI_DEV_ECC_PENDING)
		return UINT(of->card->ecc_pending);
	if (!of->card->ecc_enabled)
		return NVML_ERROR_NOT_SUPPORTED;
	switch (field->fieldId) { /* all errors are in device memory, and those are the total */
	case NVML_FI_DEV_ECC_SBE_VOL_TOTAL:
	case NVML_FI_DEV_ECC_SBE_VOL_DEV:
		return ULL(nv_ecc_count(of->index, 0, 0));
	case NVML_FI_DEV_ECC_DBE_VOL_TOTAL:
	case NVML_FI_DEV_ECC_DBE_VOL_DEV:
		return ULL(nv_ecc_count(of->index, 1, 0));
	case NVML_FI_DEV_ECC_SBE_AGG_TOTAL:
	case NVML_FI_DEV_ECC_SBE_AGG_DEV:
		return ULL(nv_ecc_count(of->index, 0, 1));
	case NVML_FI_DEV_ECC_DBE_AGG_TOTAL:
	case NVML_FI_DEV_ECC_DBE_AGG_DEV:
		return ULL(nv_ecc_count(of->index, 1, 1));
	default:
		return ULL(0);
	}
}

static nvmlReturn_t retirement_field(const struct nv_device *of, nvmlFieldValue_t *field)
{
	int is_ampere = of->card->config.architecture >= NVML_DEVICE_ARCH_AMPERE;
	int of_rows =
	    field->fieldId >= NVML_FI_DEV_REMAPPED_COR && field->fieldId <= NVML_FI_DEV_REMAPPED_FAILURE;
	if (!of->card->config.ecc_capable || of_rows != is_ampere)
		return NVML_ERROR_NOT_SUPPORTED;
	int64_t pages = fg_control_override(of->index, FG_OVERRIDE_RETIRED_PAGES, 0);
	int64_t rows = fg_control_override(of->index, FG_OVERRIDE_REMAPPED_ROWS, 0);
	switch (field->fieldId) {
	case NVML_FI_DEV_RETIRED_DBE:
		return ULL(pages < 0 ? 0 : (uint64_t)pages);
	case NVML_FI_DEV_REMAPPED_UNC:
		return UINT(rows < 0 ? 0 : (uint64_t)rows);
	default:
		return of_rows ? UINT(0) : ULL(0);
	}
}

static unsigned int link_speed_mbps(const struct fg_card_config *config)
{
	static const unsigned int speeds[] = {0, 20000, 25781, 25781, 26562, 53125};
	uint32_t version = config->nvlink_version;
	return version < sizeof(speeds) / sizeof(speeds[0]) ? speeds[version] : speeds[5];
}

static unsigned int links_to_switches(const struct fg_card_config *config)
{
	unsigned int count = 0;
	for (uint32_t i = 0; i < config->nvlink_count; i++)
		count += config->nvlink[i].remote_card == FG_LINK_SWITCH;
	return count;
}

static nvmlReturn_t nvlink_field(const struct nv_device *of, nvmlFieldValue_t *field)
{
	const struct fg_card_config *config = &of->card->config;
	if (field->fieldId == NVML_FI_DEV_NVLINK_LINK_COUNT)
		return UINT(config->nvlink_version == 0 ? 0 : config->nvlink_count);
	if (config->nvlink_version == 0)
		return NVML_ERROR_NOT_SUPPORTED;
	switch (field->fieldId) {
	case NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON:
		return UINT(link_speed_mbps(config));
	case NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT:
		return UINT(links_to_switches(config));
	case NVML_FI_DEV_NVLINK_GET_SPEED:
	case NVML_FI_DEV_NVLINK_GET_STATE:
	case NVML_FI_DEV_NVLINK_GET_VERSION:
	case NVML_FI_DEV_NVLINK_REMOTE_NVLINK_ID:
		break;
	default:
		return ULL(0); /* counters of errors and bytes */
	}
	if (field->scopeId >= config->nvlink_count)
		return NVML_ERROR_INVALID_ARGUMENT;
	const struct fg_nvlink *link = &config->nvlink[field->scopeId];
	if (field->fieldId == NVML_FI_DEV_NVLINK_GET_VERSION)
		return UINT(config->nvlink_version);
	if (field->fieldId == NVML_FI_DEV_NVLINK_REMOTE_NVLINK_ID)
		return link->remote_card == FG_LINK_NONE ? NVML_ERROR_NOT_SUPPORTED : UINT(link->remote_link);
	int is_up = link->remote_card != FG_LINK_NONE;
	return UINT(field->fieldId == NVML_FI_DEV_NVLINK_GET_SPEED && is_up ? link_speed_mbps(config)
									    : (unsigned)is_up);
}

/* Told by the control file; else what the last Xid that was injected asks for. */
static unsigned int recovery_action(uint32_t card)
{
	int64_t told = fg_control_override(card, FG_OVERRIDE_RECOVERY_ACTION, -1);
	return told >= 0 ? (unsigned int)told : NVML_GPU_RECOVERY_ACTION_NONE;
}

static nvmlReturn_t plain_field(const struct nv_device *of, nvmlFieldValue_t *field)
{
	struct fg_card *card = of->card;
	switch (field->fieldId) {
	case NVML_FI_DEV_MEMORY_TEMP:
		return UINT(nv_temperature(of->index) + 5);
	case NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION:
	case NVML_FI_DEV_ENERGY:
		return ULL(nv_energy_mj(of->index));
	case NVML_FI_DEV_POWER_AVERAGE:
	case NVML_FI_DEV_POWER_INSTANT:
		return UINT(nv_power_mw(of->index));
	case NVML_FI_DEV_POWER_MIN_LIMIT:
		return UINT(card->config.power_min_mw);
	case NVML_FI_DEV_POWER_MAX_LIMIT:
		return UINT(card->config.power_max_mw);
	case NVML_FI_DEV_POWER_DEFAULT_LIMIT:
		return UINT(card->config.power_default_mw);
	case NVML_FI_DEV_POWER_CURRENT_LIMIT:
	case NVML_FI_DEV_POWER_REQUESTED_LIMIT:
		return UINT(nv_power_limit_mw(card));
	case NVML_FI_DEV_PCIE_REPLAY_COUNTER:
	case NVML_FI_DEV_PCIE_REPLAY_ROLLOVER_COUNTER:
	case NVML_FI_DEV_PCIE_L0_TO_RECOVERY_COUNTER:
	case NVML_FI_DEV_RESET_STATUS:
	case NVML_FI_DEV_DRAIN_AND_RESET_STATUS:
	case NVML_FI_DEV_C2C_LINK_COUNT:
		return UINT(0);
	case NVML_FI_DEV_PCIE_COUNT_TX_BYTES:
	case NVML_FI_DEV_PCIE_COUNT_RX_BYTES:
		return ULL(0);
	case NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED:
		return UINT(card->config.mig_family != FG_MIG_NONE &&
			    card->config.architecture >= NVML_DEVICE_ARCH_HOPPER);
	case NVML_FI_DEV_IS_MIG_MODE_INDEPENDENT_MIG_QUERY_CAPABLE:
		return UINT(1);
	case NVML_FI_DEV_GET_GPU_RECOVERY_ACTION:
		return UINT(recovery_action(of->index));
	default:
		return NVML_ERROR_NOT_SUPPORTED;
	}
}

static nvmlReturn_t one_field(const struct nv_device *of, nvmlFieldValue_t *field)
{
	unsigned int id = field->fieldId;
	if (id == 0 || id >= NVML_FI_MAX)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (id <= NVML_FI_DEV_ECC_DBE_AGG_CBU)
		return ecc_field(of, field);
	if (id <= NVML_FI_DEV_RETIRED_PENDING || id == NVML_FI_DEV_RETIRED_PENDING_SBE ||
	    id == NVML_FI_DEV_RETIRED_PENDING_DBE ||
	    (id >= NVML_FI_DEV_REMAPPED_COR && id <= NVML_FI_DEV_REMAPPED_FAILURE))
		return retirement_field(of, field);
	if (id <= NVML_FI_DEV_NVLINK_BANDWIDTH_C1_TOTAL ||
	    (id >= NVML_FI_DEV_NVLINK_SPEED_MBPS_L0 && id <= NVML_FI_DEV_NVLINK_LINK_COUNT) ||
	    (id >= NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_L6 &&
	     id <= NVML_FI_DEV_NVLINK_THROUGHPUT_RAW_RX) ||
	    (id >= NVML_FI_DEV_NVLINK_REMOTE_NVLINK_ID && id <= NVML_FI_DEV_NVLINK_GET_VERSION))
		return nvlink_field(of, field);
	if (id >= NVML_FI_DEV_PERF_POLICY_POWER && id <= NVML_FI_DEV_PERF_POLICY_TOTAL_BASE_CLOCKS)
		return ULL(0);
	if (id >= NVML_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS && id <= NVML_FI_DEV_PCIE_COUNT_LANE_ERROR)
		return UINT(0);
	return plain_field(of, field);
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int valuesCount, nvmlFieldValue_t *values)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	if (valuesCount < 1 || values == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (int i = 0; i < valuesCount; i++) {
		values[i].nvmlReturn = one_field(&of, &values[i]);
		values[i].timestamp = (long long)nv_wall_us();
		values[i].latencyUsec = 0;
	}
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceClearFieldValues(nvmlDevice_t device, int valuesCount, nvmlFieldValue_t *values)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	if (valuesCount < 1 || values == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	NV_ROOT();
	for (int i = 0; i < valuesCount; i++)
		values[i].nvmlReturn =
		    NVML_ERROR_NOT_SUPPORTED; /* none of the fields above can be cleared one by one */
	return NVML_SUCCESS;
}

/* ---- samples ------------------------------------------------------------------------------------------ */

#define SAMPLES 60u /* what the buffer holds: the last 9.6 s; the timeline knows 10 s back */

/* Of the sample period that ended at `end_ns`. */
static nvmlReturn_t sample_at(const struct nv_device *of, nvmlSamplingType_t type, uint64_t end_ns,
			      unsigned int *value)
{
	uint64_t busy = fg_engine_busy(of->index, FG_NO_INSTANCE, end_ns - NV_SAMPLE_NS, end_ns);
	unsigned int percent = (unsigned int)(busy * 100 / NV_SAMPLE_NS);
	const struct fg_card_config *config = &of->card->config;
	switch (type) {
	case NVML_GPU_UTILIZATION_SAMPLES:
		*value = percent;
		return NVML_SUCCESS;
	case NVML_MEMORY_UTILIZATION_SAMPLES:
		*value = percent / 2;
		return NVML_SUCCESS;
	case NVML_TOTAL_POWER_SAMPLES:
		*value = nv_power_mw(of->index);
		return NVML_SUCCESS;
	case NVML_PROCESSOR_CLK_SAMPLES:
		*value = percent > 0 ? config->sm_clock_mhz : nv_clock_mhz(of->index, NVML_CLOCK_SM);
		return NVML_SUCCESS;
	case NVML_MEMORY_CLK_SAMPLES:
		*value = percent > 0 ? config->memory_clock_mhz : nv_clock_mhz(of->index, NVML_CLOCK_MEM);
		return NVML_SUCCESS;
	case NVML_ENC_UTILIZATION_SAMPLES:
	case NVML_DEC_UTILIZATION_SAMPLES:
	case NVML_JPG_UTILIZATION_SAMPLES:
	case NVML_OFA_UTILIZATION_SAMPLES:
		*value = 0;
		return NVML_SUCCESS;
	case NVML_MODULE_POWER_SAMPLES:
		return NVML_ERROR_NOT_SUPPORTED;
	case NVML_SAMPLINGTYPE_COUNT:
	default:
		return NVML_ERROR_INVALID_ARGUMENT;
	}
}

nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, nvmlSamplingType_t type,
				  unsigned long long lastSeenTimeStamp, nvmlValueType_t *sampleValType,
				  unsigned int *sampleCount, nvmlSample_t *samples)
{
	struct nv_device of;
	unsigned int value;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(sampleValType, sampleCount);
	if (of.card->mig_enabled)
		return NVML_ERROR_NOT_SUPPORTED;
	fg_engine_advance(of.index, FG_NO_INSTANCE);
	uint64_t now_ns = fg_now_ns(), now_us = nv_wall_us(), newest = now_ns / NV_SAMPLE_NS * NV_SAMPLE_NS;
	if (newest < (SAMPLES + 1) * NV_SAMPLE_NS)
		return NVML_ERROR_NOT_FOUND;
	nvmlReturn_t result = sample_at(&of, type, newest, &value);
	if (result != NVML_SUCCESS)
		return result;
	*sampleValType = NVML_VALUE_TYPE_UNSIGNED_INT;
	if (samples == NULL) {
		*sampleCount = SAMPLES;
		return NVML_SUCCESS;
	}
	unsigned int room = *sampleCount, count = 0;
	for (unsigned int back = SAMPLES; back-- > 0;) { /* oldest first */
		uint64_t end_ns = newest - back * NV_SAMPLE_NS, end_us = now_us - (now_ns - end_ns) / 1000;
		if (end_us <= lastSeenTimeStamp)
			continue;
		if (count == room)
			return NVML_ERROR_INSUFFICIENT_SIZE;
		sample_at(&of, type, end_ns, &value);
		memset(&samples[count], 0, sizeof(samples[count]));
		samples[count].timeStamp = end_us;
		samples[count++].sampleValue.uiVal = value;
	}
	*sampleCount = count;
	return count > 0 ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}
