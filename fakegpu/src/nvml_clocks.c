/* SPDX-License-Identifier: Apache-2.0
 *
 * libnvidia-ml: clocks and how busy the engines are.
 */
#include <string.h>

#include "nvml_settings.h"

#define STEP_MHZ     15u
#define LEAST_SM_MHZ 210u
#define IDLE_MEM_MHZ 405u

static uint32_t top_mhz(const struct fg_card *card, nvmlClockType_t type)
{
	uint32_t sm = card->config.sm_clock_mhz;
	return type == NVML_CLOCK_MEM     ? card->config.memory_clock_mhz
	       : type == NVML_CLOCK_VIDEO ? sm * 9 / 10
					  : sm;
}

/* Clocks of a card: enter, look at the type, then `*value = expression`. */
#define CLOCK(name, expression)                                                           \
	nvmlReturn_t name(nvmlDevice_t device, nvmlClockType_t type, unsigned int *value) \
	{                                                                                 \
		struct nv_device of;                                                      \
		NV_WHOLE_CARD(device, of);                                                \
		NV_NEEDS(value);                                                          \
		if ((unsigned int)type >= NVML_CLOCK_COUNT)                               \
			return NVML_ERROR_INVALID_ARGUMENT;                               \
		*value = expression;                                                      \
		return NVML_SUCCESS;                                                      \
	}

CLOCK(nvmlDeviceGetClockInfo, nv_clock_mhz(of.index, type))
CLOCK(nvmlDeviceGetMaxClockInfo, top_mhz(of.card, type))
CLOCK(nvmlDeviceGetMaxCustomerBoostClock, top_mhz(of.card, type))
CLOCK(nvmlDeviceGetDefaultApplicationsClock, top_mhz(of.card, type))

static uint32_t application_mhz(struct fg_card *card, nvmlClockType_t type)
{
	const struct nv_settings *settings = nv_settings_of(card);
	uint32_t set =
	    type == NVML_CLOCK_MEM ? settings->application_memory_mhz : settings->application_sm_mhz;
	return set != 0 ? set : top_mhz(card, type);
}

CLOCK(nvmlDeviceGetApplicationsClock, application_mhz(of.card, type))

nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, nvmlClockType_t clockType, nvmlClockId_t clockId,
				unsigned int *clockMHz)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(clockMHz);
	if ((unsigned int)clockType >= NVML_CLOCK_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	switch (clockId) {
	case NVML_CLOCK_ID_CURRENT:
		*clockMHz = nv_clock_mhz(of.index, clockType);
		return NVML_SUCCESS;
	case NVML_CLOCK_ID_APP_CLOCK_TARGET:
		*clockMHz = application_mhz(of.card, clockType);
		return NVML_SUCCESS;
	case NVML_CLOCK_ID_APP_CLOCK_DEFAULT:
	case NVML_CLOCK_ID_CUSTOMER_BOOST_MAX:
		*clockMHz = top_mhz(of.card, clockType);
		return NVML_SUCCESS;
	case NVML_CLOCK_ID_COUNT:
	default:
		return NVML_ERROR_INVALID_ARGUMENT;
	}
}

nvmlReturn_t nvmlDeviceGetSupportedMemoryClocks(nvmlDevice_t device, unsigned int *count,
						unsigned int *clocksMHz)
{
	struct nv_device of;
	nvmlReturn_t result;
	NV_WHOLE_CARD(device, of);
	unsigned int top = of.card->config.memory_clock_mhz, have = top > IDLE_MEM_MHZ ? 2 : 1;
	if (nv_list(have, count, clocksMHz, &result)) {
		clocksMHz[0] = top;
		if (have == 2)
			clocksMHz[1] = IDLE_MEM_MHZ;
	}
	return result;
}

nvmlReturn_t nvmlDeviceGetSupportedGraphicsClocks(nvmlDevice_t device, unsigned int memoryClockMHz,
						  unsigned int *count, unsigned int *clocksMHz)
{
	struct nv_device of;
	nvmlReturn_t result;
	NV_WHOLE_CARD(device, of);
	unsigned int top = of.card->config.sm_clock_mhz;
	if (memoryClockMHz != of.card->config.memory_clock_mhz && memoryClockMHz != IDLE_MEM_MHZ)
		return NVML_ERROR_NOT_FOUND;
	unsigned int have = top > LEAST_SM_MHZ ? (top - LEAST_SM_MHZ) / STEP_MHZ + 1 : 1;
	if (nv_list(have, count, clocksMHz, &result))
		for (unsigned int i = 0; i < have; i++)
			clocksMHz[i] = top - i * STEP_MHZ;
	return result;
}

nvmlReturn_t nvmlDeviceGetMinMaxClockOfPState(nvmlDevice_t device, nvmlClockType_t type, nvmlPstates_t pstate,
					      unsigned int *minClockMHz, unsigned int *maxClockMHz)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(minClockMHz, maxClockMHz);
	if ((unsigned int)type >= NVML_CLOCK_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (pstate != NVML_PSTATE_0 && pstate != NVML_PSTATE_8)
		return NVML_ERROR_NOT_SUPPORTED;
	uint32_t least = type == NVML_CLOCK_MEM ? IDLE_MEM_MHZ : LEAST_SM_MHZ;
	*minClockMHz = least < top_mhz(of.card, type) ? least : top_mhz(of.card, type);
	*maxClockMHz = pstate == NVML_PSTATE_0 ? top_mhz(of.card, type) : *minClockMHz;
	return NVML_SUCCESS;
}

/* ---- setting clocks ----------------------------------------------------------------------------------- */

nvmlReturn_t nvmlDeviceSetApplicationsClocks(nvmlDevice_t device, unsigned int memClockMHz,
					     unsigned int graphicsClockMHz)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_ROOT();
	if (memClockMHz > of.card->config.memory_clock_mhz ||
	    graphicsClockMHz > of.card->config.sm_clock_mhz || memClockMHz == 0 ||
	    graphicsClockMHz < LEAST_SM_MHZ)
		return NVML_ERROR_INVALID_ARGUMENT;
	struct nv_settings *settings = nv_settings_of(of.card);
	__atomic_store_n(&settings->application_memory_mhz, memClockMHz, __ATOMIC_RELAXED);
	__atomic_store_n(&settings->application_sm_mhz, graphicsClockMHz, __ATOMIC_RELAXED);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceResetApplicationsClocks(nvmlDevice_t device)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_ROOT();
	struct nv_settings *settings = nv_settings_of(of.card);
	__atomic_store_n(&settings->application_memory_mhz, 0, __ATOMIC_RELAXED);
	__atomic_store_n(&settings->application_sm_mhz, 0, __ATOMIC_RELAXED);
	return NVML_SUCCESS;
}

#define LOCK_CLOCKS(name, word)                                                           \
	nvmlReturn_t name(nvmlDevice_t device, unsigned int least, unsigned int most)     \
	{                                                                                 \
		struct nv_device of;                                                      \
		NV_WHOLE_CARD(device, of);                                                \
		NV_ROOT();                                                                \
		if (least > most || most == 0)                                            \
			return NVML_ERROR_INVALID_ARGUMENT;                               \
		__atomic_store_n(&nv_settings_of(of.card)->word, most, __ATOMIC_RELAXED); \
		return NVML_SUCCESS;                                                      \
	}
#define UNLOCK_CLOCKS(name, word)                                                      \
	nvmlReturn_t name(nvmlDevice_t device)                                         \
	{                                                                              \
		struct nv_device of;                                                   \
		NV_WHOLE_CARD(device, of);                                             \
		NV_ROOT();                                                             \
		__atomic_store_n(&nv_settings_of(of.card)->word, 0, __ATOMIC_RELAXED); \
		return NVML_SUCCESS;                                                   \
	}
LOCK_CLOCKS(nvmlDeviceSetGpuLockedClocks, locked_sm_mhz)
UNLOCK_CLOCKS(nvmlDeviceResetGpuLockedClocks, locked_sm_mhz)
LOCK_CLOCKS(nvmlDeviceSetMemoryLockedClocks, locked_memory_mhz)
UNLOCK_CLOCKS(nvmlDeviceResetMemoryLockedClocks, locked_memory_mhz)

/* ---- why clocks are low ------------------------------------------------------------------------------- */

#define REASONS(name, expression)                                           \
	nvmlReturn_t name(nvmlDevice_t device, unsigned long long *reasons) \
	{                                                                   \
		struct nv_device of;                                        \
		NV_WHOLE_CARD(device, of);                                  \
		NV_NEEDS(reasons);                                          \
		*reasons = expression;                                      \
		return NVML_SUCCESS;                                        \
	}
#define ALL_REASONS                                                                            \
	(nvmlClocksThrottleReasonGpuIdle | nvmlClocksThrottleReasonApplicationsClocksSetting | \
	 nvmlClocksThrottleReasonSwPowerCap | nvmlClocksThrottleReasonHwSlowdown |             \
	 nvmlClocksThrottleReasonSyncBoost | nvmlClocksThrottleReasonSwThermalSlowdown |       \
	 nvmlClocksThrottleReasonHwThermalSlowdown | nvmlClocksThrottleReasonHwPowerBrakeSlowdown)

REASONS(nvmlDeviceGetCurrentClocksThrottleReasons, nv_throttle_reasons(of.index))
REASONS(nvmlDeviceGetCurrentClocksEventReasons, nv_throttle_reasons(of.index))
REASONS(nvmlDeviceGetSupportedClocksThrottleReasons, ALL_REASONS)
REASONS(nvmlDeviceGetSupportedClocksEventReasons, ALL_REASONS)

/* ---- how busy ----------------------------------------------------------------------------------------- */

/* Not told in MIG mode, neither of the card nor of an instance: as on the real one. */
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(utilization);
	if (of.card->mig_enabled)
		return NVML_ERROR_NOT_SUPPORTED;
	utilization->gpu = nv_gpu_utilization(of.index, FG_NO_INSTANCE);
	utilization->memory = nv_memory_utilization(of.index);
	return NVML_SUCCESS;
}

static uint32_t engine_percent(uint32_t card, uint32_t kind)
{
	int64_t told = kind == 0 ? 0 : fg_control_override(card, kind, 0);
	return told < 0 ? 0 : told > 100 ? 100 : (uint32_t)told;
}

#define ENGINE_UTILIZATION(name, kind)                                                                    \
	nvmlReturn_t name(nvmlDevice_t device, unsigned int *utilization, unsigned int *samplingPeriodUs) \
	{                                                                                                 \
		struct nv_device of;                                                                      \
		NV_WHOLE_CARD(device, of);                                                                \
		NV_NEEDS(utilization, samplingPeriodUs);                                                  \
		if (of.card->mig_enabled)                                                                 \
			return NVML_ERROR_NOT_SUPPORTED;                                                  \
		*utilization = engine_percent(of.index, kind);                                            \
		*samplingPeriodUs = NV_SAMPLE_NS / 1000;                                                  \
		return NVML_SUCCESS;                                                                      \
	}
ENGINE_UTILIZATION(nvmlDeviceGetEncoderUtilization, FG_OVERRIDE_ENCODER_UTILIZATION)
ENGINE_UTILIZATION(nvmlDeviceGetDecoderUtilization, FG_OVERRIDE_DECODER_UTILIZATION)
ENGINE_UTILIZATION(nvmlDeviceGetJpgUtilization, 0)
ENGINE_UTILIZATION(nvmlDeviceGetOfaUtilization, 0)

/* ---- encoders and frame capture: nobody uses them
 * ----------------------------------------------------------- */

nvmlReturn_t nvmlDeviceGetEncoderStats(nvmlDevice_t device, unsigned int *sessionCount,
				       unsigned int *averageFps, unsigned int *averageLatency)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(sessionCount, averageFps, averageLatency);
	*sessionCount = *averageFps = *averageLatency = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetEncoderSessions(nvmlDevice_t device, unsigned int *sessionCount,
					  nvmlEncoderSessionInfo_t *sessionInfos)
{
	struct nv_device of;
	(void)sessionInfos;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(sessionCount);
	*sessionCount = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetEncoderCapacity(nvmlDevice_t device, nvmlEncoderType_t encoderQueryType,
					  unsigned int *encoderCapacity)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(encoderCapacity);
	if ((unsigned int)encoderQueryType > NVML_ENCODER_QUERY_HEVC)
		return NVML_ERROR_INVALID_ARGUMENT;
	*encoderCapacity = 100;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetFBCStats(nvmlDevice_t device, nvmlFBCStats_t *fbcStats)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(fbcStats);
	memset(fbcStats, 0, sizeof(*fbcStats));
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetFBCSessions(nvmlDevice_t device, unsigned int *sessionCount,
				      nvmlFBCSessionInfo_t *sessionInfo)
{
	struct nv_device of;
	(void)sessionInfo;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(sessionCount);
	*sessionCount = 0;
	return NVML_SUCCESS;
}
