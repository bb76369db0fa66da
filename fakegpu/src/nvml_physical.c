/* SPDX-License-Identifier: Apache-2.0
 *
 * libnvidia-ml: heat, power and fans.
 */
#include "nvml_settings.h"

#include <string.h>

/* One figure of a whole card, told by a function of its number. */
#define TELL(name, type, expression)                        \
	nvmlReturn_t name(nvmlDevice_t device, type *value) \
	{                                                   \
		struct nv_device of;                        \
		NV_WHOLE_CARD(device, of);                  \
		NV_NEEDS(value);                            \
		*value = expression;                        \
		return NVML_SUCCESS;                        \
	}

#define SHUTDOWN_CELSIUS 96u
#define SLOWDOWN_CELSIUS 93u
#define MEMORY_CELSIUS   95u
#define TARGET_CELSIUS   85u

/* ---- power -------------------------------------------------------------------------------------------- */

TELL(nvmlDeviceGetPowerUsage, unsigned int, nv_power_mw(of.index))
TELL(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, nv_energy_mj(of.index))
TELL(nvmlDeviceGetPowerManagementLimit, unsigned int, nv_power_limit_mw(of.card))
TELL(nvmlDeviceGetEnforcedPowerLimit, unsigned int, nv_power_limit_mw(of.card))
TELL(nvmlDeviceGetPowerManagementDefaultLimit, unsigned int, of.card->config.power_default_mw)
TELL(nvmlDeviceGetPowerManagementMode, nvmlEnableState_t, NVML_FEATURE_ENABLED)
TELL(nvmlDeviceGetPowerSource, nvmlPowerSource_t, NVML_POWER_SOURCE_AC)

nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned int *minLimit,
							  unsigned int *maxLimit)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(minLimit, maxLimit);
	*minLimit = of.card->config.power_min_mw;
	*maxLimit = of.card->config.power_max_mw;
	return NVML_SUCCESS;
}

static nvmlReturn_t set_power_limit(struct fg_card *card, unsigned int limit)
{
	NV_ROOT();
	if (limit < card->config.power_min_mw || limit > card->config.power_max_mw)
		return NVML_ERROR_INVALID_ARGUMENT;
	__atomic_store_n(&nv_settings_of(card)->power_limit_mw, limit, __ATOMIC_RELAXED);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetPowerManagementLimit(nvmlDevice_t device, unsigned int limit)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	return set_power_limit(of.card, limit);
}

nvmlReturn_t nvmlDeviceSetPowerManagementLimit_v2(nvmlDevice_t device, nvmlPowerValue_v2_t *powerValue)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(powerValue);
	nvmlReturn_t result = nv_version(powerValue->version, sizeof(*powerValue), 2);
	if (result == NVML_SUCCESS && powerValue->powerScope != NVML_POWER_SCOPE_GPU)
		result = NVML_ERROR_NOT_SUPPORTED;
	return result == NVML_SUCCESS ? set_power_limit(of.card, powerValue->powerValueMw) : result;
}

/* P0 while kernels run, P8 at rest, as cards for computing do. */
#define PSTATE (nv_gpu_utilization(of.index, FG_NO_INSTANCE) > 0 ? NVML_PSTATE_0 : NVML_PSTATE_8)
TELL(nvmlDeviceGetPerformanceState, nvmlPstates_t, PSTATE)
TELL(nvmlDeviceGetPowerState, nvmlPstates_t, PSTATE)

nvmlReturn_t nvmlDeviceGetSupportedPerformanceStates(nvmlDevice_t device, nvmlPstates_t *pstates,
						     unsigned int size)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(pstates);
	unsigned int room = size / (unsigned int)sizeof(*pstates);
	if (room < 2)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	for (unsigned int i = 0; i < room; i++)
		pstates[i] = NVML_PSTATE_UNKNOWN;
	pstates[0] = NVML_PSTATE_0;
	pstates[1] = NVML_PSTATE_8;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDynamicPstatesInfo(nvmlDevice_t device, nvmlGpuDynamicPstatesInfo_t *info)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(info);
	memset(info, 0, sizeof(*info));
	info->utilization[NVML_GPU_UTILIZATION_DOMAIN_GPU].bIsPresent = 1;
	info->utilization[NVML_GPU_UTILIZATION_DOMAIN_GPU].percentage =
	    nv_gpu_utilization(of.index, FG_NO_INSTANCE);
	info->utilization[NVML_GPU_UTILIZATION_DOMAIN_FB].bIsPresent = 1;
	info->utilization[NVML_GPU_UTILIZATION_DOMAIN_FB].percentage = nv_memory_utilization(of.index);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetViolationStatus(nvmlDevice_t device, nvmlPerfPolicyType_t perfPolicyType,
					  nvmlViolationTime_t *violTime)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(violTime);
	if ((unsigned int)perfPolicyType >= NVML_PERF_POLICY_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	*violTime = (nvmlViolationTime_t){.referenceTime = nv_wall_us()};
	return NVML_SUCCESS;
}

/* ---- heat --------------------------------------------------------------------------------------------- */

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensorType,
				      unsigned int *temp)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(temp);
	if (sensorType != NVML_TEMPERATURE_GPU)
		return NVML_ERROR_INVALID_ARGUMENT;
	*temp = nv_temperature(of.index);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *temperature)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(temperature);
	nvmlReturn_t result = nv_version(temperature->version, sizeof(*temperature), 1);
	if (result == NVML_SUCCESS && temperature->sensorType != NVML_TEMPERATURE_GPU)
		result = NVML_ERROR_INVALID_ARGUMENT;
	if (result == NVML_SUCCESS)
		temperature->temperature = (int)nv_temperature(of.index);
	return result;
}

nvmlReturn_t nvmlDeviceGetMarginTemperature(nvmlDevice_t device, nvmlMarginTemperature_t *marginTempInfo)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(marginTempInfo);
	nvmlReturn_t result = nv_version(marginTempInfo->version, sizeof(*marginTempInfo), 1);
	if (result == NVML_SUCCESS)
		marginTempInfo->marginTemperature = (int)SLOWDOWN_CELSIUS - (int)nv_temperature(of.index);
	return result;
}

nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, nvmlTemperatureThresholds_t thresholdType,
					       unsigned int *temp)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(temp);
	switch (thresholdType) {
	case NVML_TEMPERATURE_THRESHOLD_SHUTDOWN:
		*temp = SHUTDOWN_CELSIUS;
		return NVML_SUCCESS;
	case NVML_TEMPERATURE_THRESHOLD_SLOWDOWN:
		*temp = SLOWDOWN_CELSIUS;
		return NVML_SUCCESS;
	case NVML_TEMPERATURE_THRESHOLD_MEM_MAX:
		*temp = MEMORY_CELSIUS;
		return NVML_SUCCESS;
	case NVML_TEMPERATURE_THRESHOLD_GPU_MAX:
		*temp = TARGET_CELSIUS;
		return NVML_SUCCESS;
	case NVML_TEMPERATURE_THRESHOLD_ACOUSTIC_MIN:
	case NVML_TEMPERATURE_THRESHOLD_ACOUSTIC_CURR:
	case NVML_TEMPERATURE_THRESHOLD_ACOUSTIC_MAX:
	case NVML_TEMPERATURE_THRESHOLD_GPS_CURR:
		return NVML_ERROR_NOT_SUPPORTED;
	case NVML_TEMPERATURE_THRESHOLD_COUNT:
	default:
		return NVML_ERROR_INVALID_ARGUMENT;
	}
}

nvmlReturn_t nvmlDeviceGetThermalSettings(nvmlDevice_t device, unsigned int sensorIndex,
					  nvmlGpuThermalSettings_t *settings)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(settings);
	if (sensorIndex != 0 && sensorIndex != NVML_THERMAL_TARGET_ALL)
		return NVML_ERROR_INVALID_ARGUMENT;
	memset(settings, 0, sizeof(*settings));
	settings->count = 1;
	settings->sensor[0].controller = NVML_THERMAL_CONTROLLER_GPU_INTERNAL;
	settings->sensor[0].target = NVML_THERMAL_TARGET_GPU;
	settings->sensor[0].defaultMaxTemp = 127;
	settings->sensor[0].currentTemp = (int)nv_temperature(of.index);
	return NVML_SUCCESS;
}

/* ---- fans: cards for servers have none, unless the control file gives them one
 * ------------------------------ */

static unsigned int fans_of(const struct nv_device *of)
{
	unsigned int brand = of->card->config.brand;
	int own = brand == NVML_BRAND_GEFORCE || brand == NVML_BRAND_GEFORCE_RTX ||
		  brand == NVML_BRAND_TITAN || brand == NVML_BRAND_TITAN_RTX || brand == NVML_BRAND_QUADRO ||
		  brand == NVML_BRAND_QUADRO_RTX;
	return own || fg_control_override(of->index, FG_OVERRIDE_FAN, -1) >= 0 ? 1 : 0;
}

static unsigned int fan_percent(const struct nv_device *of)
{
	int64_t told = fg_control_override(of->index, FG_OVERRIDE_FAN, -1);
	uint32_t set = nv_settings_of(of->card)->fan_percent[0];
	return told >= 0  ? (unsigned int)told
	       : set != 0 ? set - 1
			  : 30 + nv_gpu_utilization(of->index, FG_NO_INSTANCE) / 2;
}

TELL(nvmlDeviceGetNumFans, unsigned int, fans_of(&of))

static nvmlReturn_t fan(const char *function, nvmlDevice_t device, unsigned int number, unsigned int *speed)
{
	struct nv_device of;
	nvmlReturn_t result = nv_enter_device(function, device, &of);
	if (result != NVML_SUCCESS)
		return result;
	NV_NEEDS(speed);
	if (of.ci != FG_NO_INSTANCE || fans_of(&of) == 0)
		return NVML_ERROR_NOT_SUPPORTED;
	if (number >= fans_of(&of))
		return NVML_ERROR_INVALID_ARGUMENT;
	*speed = fan_percent(&of);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetFanSpeed(nvmlDevice_t device, unsigned int *speed)
{
	return fan(__func__, device, 0, speed);
}

nvmlReturn_t nvmlDeviceGetFanSpeed_v2(nvmlDevice_t device, unsigned int number, unsigned int *speed)
{
	return fan(__func__, device, number, speed);
}

nvmlReturn_t nvmlDeviceGetTargetFanSpeed(nvmlDevice_t device, unsigned int number, unsigned int *targetSpeed)
{
	return fan(__func__, device, number, targetSpeed);
}

nvmlReturn_t nvmlDeviceGetMinMaxFanSpeed(nvmlDevice_t device, unsigned int *minSpeed, unsigned int *maxSpeed)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(minSpeed, maxSpeed);
	if (fans_of(&of) == 0)
		return NVML_ERROR_NOT_SUPPORTED;
	*minSpeed = 30;
	*maxSpeed = 100;
	return NVML_SUCCESS;
}

static nvmlReturn_t set_fan(const char *function, nvmlDevice_t device, unsigned int number, uint32_t word)
{
	struct nv_device of;
	nvmlReturn_t result = nv_enter_device(function, device, &of);
	if (result != NVML_SUCCESS)
		return result;
	NV_ROOT();
	if (of.ci != FG_NO_INSTANCE || fans_of(&of) == 0)
		return NVML_ERROR_NOT_SUPPORTED;
	if (number >= fans_of(&of) || word > 101)
		return NVML_ERROR_INVALID_ARGUMENT;
	__atomic_store_n(&nv_settings_of(of.card)->fan_percent[number], word, __ATOMIC_RELAXED);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetFanSpeed_v2(nvmlDevice_t device, unsigned int number, unsigned int speed)
{
	return set_fan(__func__, device, number, speed > 100 ? 102 : speed + 1);
}

nvmlReturn_t nvmlDeviceSetDefaultFanSpeed_v2(nvmlDevice_t device, unsigned int number)
{
	return set_fan(__func__, device, number, 0);
}

/* ---- ages --------------------------------------------------------------------------------------------- */

nvmlReturn_t nvmlDeviceGetGpuUptime_v1(nvmlDevice_t device, nvmlGpuUptime_v1_t *uptime)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(uptime);
	uptime->uptime = (unsigned int)(fg_now_ns() / 1000000000ull);
	return NVML_SUCCESS;
}

/* ---- GPM: not here; asked for, it says so instead of failing
 * ------------------------------------------------ */

nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *gpmSupport)
{
	struct nv_device of;
	NV_DEVICE(device, of);
	NV_NEEDS(gpmSupport);
	if (gpmSupport->version != NVML_GPM_SUPPORT_VERSION)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	gpmSupport->isSupportedDevice = 0;
	return NVML_SUCCESS;
}
