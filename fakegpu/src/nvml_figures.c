/* SPDX-License-Identifier: Apache-2.0
 *
 * How busy, warm and hungry a card is: everything follows from the time kernels ran on it, unless the control
 * file says otherwise. See nvml_settings.h.
 */
#include "nvml_settings.h"

#define IDLE_SM_MHZ     210u
#define IDLE_MEMORY_MHZ 405u
#define IDLE_CELSIUS    30u
#define RISE_CELSIUS    45u /* from idle to full load */

static uint32_t clamp_percent(int64_t value)
{
	return value < 0 ? 0 : value > 100 ? 100 : (uint32_t)value;
}

static uint32_t computed_utilization(uint32_t card, uint32_t ci)
{
	/* Whole sample periods, as the sampler of the real one has them: two looks in one period agree. */
	uint64_t end = fg_now_ns() / NV_SAMPLE_NS * NV_SAMPLE_NS;
	if (end < NV_SAMPLE_NS)
		return 0;
	fg_engine_advance(card, ci);
	uint64_t busy = fg_engine_busy(card, ci, end - NV_SAMPLE_NS, end);
	return clamp_percent((int64_t)((busy * 100 + NV_SAMPLE_NS / 2) / NV_SAMPLE_NS));
}

uint32_t nv_gpu_utilization(uint32_t card, uint32_t ci)
{
	int64_t told = fg_control_override(card, FG_OVERRIDE_GPU_UTILIZATION, -1);
	if (told >= 0)
		return clamp_percent(told);
	if (ci != FG_NO_INSTANCE || !fg_card_at(card)->mig_enabled)
		return computed_utilization(card, ci);
	/* A card in MIG mode is as busy as its instances, weighed by their multiprocessors. */
	const struct fg_card *of = fg_card_at(card);
	uint64_t sum = 0;
	for (uint32_t i = 0; i < FG_MAX_INSTANCES; i++)
		if (of->compute_instance[i].in_use)
			sum += (uint64_t)computed_utilization(card, i) * of->compute_instance[i].sm_count;
	return clamp_percent((int64_t)(sum / of->config.sm_count));
}

/* Kernels here read and write nothing; half of their time stands for the traffic that real ones make. */
uint32_t nv_memory_utilization(uint32_t card)
{
	int64_t told = fg_control_override(card, FG_OVERRIDE_MEMORY_UTILIZATION, -1);
	return told >= 0 ? clamp_percent(told) : nv_gpu_utilization(card, FG_NO_INSTANCE) / 2;
}

static uint32_t idle_mw(const struct fg_card_config *config)
{
	return config->power_max_mw / 8;
}

uint32_t nv_power_limit_mw(struct fg_card *card)
{
	uint32_t set = __atomic_load_n(&nv_settings_of(card)->power_limit_mw, __ATOMIC_RELAXED);
	return set != 0 ? set : card->config.power_default_mw;
}

uint32_t nv_power_mw(uint32_t card)
{
	struct fg_card *of = fg_card_at(card);
	uint32_t idle = idle_mw(&of->config), limit = nv_power_limit_mw(of);
	uint64_t span = limit > idle ? limit - idle : 0;
	uint64_t now = idle + span * nv_gpu_utilization(card, FG_NO_INSTANCE) / 100;
	int64_t told = fg_control_override(card, FG_OVERRIDE_POWER, -1);
	return told >= 0 ? (uint32_t)told : (uint32_t)now;
}

/* Idle power since boot, and the rest of full power for the time that kernels ran. Never runs backwards. */
uint64_t nv_energy_mj(uint32_t card)
{
	struct fg_card *of = fg_card_at(card);
	uint32_t idle = idle_mw(&of->config), full = of->config.power_default_mw;
	uint64_t busy = 0;
	for (uint32_t part = 0; part < FG_PARTS; part++)
		busy += __atomic_load_n(&of->engine[part].busy_ns, __ATOMIC_RELAXED);
	uint64_t milliseconds = fg_now_ns() / 1000000;
	return milliseconds * idle / 1000 + busy / 1000000 * (full > idle ? full - idle : 0) / 1000;
}

uint32_t nv_temperature(uint32_t card)
{
	int64_t told = fg_control_override(card, FG_OVERRIDE_TEMPERATURE, -1);
	return told >= 0 ? (uint32_t)told
			 : IDLE_CELSIUS + RISE_CELSIUS * nv_gpu_utilization(card, FG_NO_INSTANCE) / 100;
}

static uint32_t at_most(uint32_t value, uint32_t limit)
{
	return limit != 0 && value > limit ? limit : value;
}

uint32_t nv_clock_mhz(uint32_t card, nvmlClockType_t type)
{
	struct fg_card *of = fg_card_at(card);
	const struct nv_settings *settings = nv_settings_of(of);
	int busy = nv_gpu_utilization(card, FG_NO_INSTANCE) > 0;
	if (type == NVML_CLOCK_MEM) {
		uint32_t top = at_most(at_most(of->config.memory_clock_mhz, settings->application_memory_mhz),
				       settings->locked_memory_mhz);
		int64_t told = fg_control_override(card, FG_OVERRIDE_MEMORY_CLOCK, -1);
		return told >= 0 ? (uint32_t)told : busy ? top : at_most(IDLE_MEMORY_MHZ, top);
	}
	uint32_t top =
	    at_most(at_most(of->config.sm_clock_mhz, settings->application_sm_mhz), settings->locked_sm_mhz);
	int64_t told = fg_control_override(card, FG_OVERRIDE_SM_CLOCK, -1);
	uint32_t now = told >= 0 ? (uint32_t)told : busy ? top : at_most(IDLE_SM_MHZ, top);
	return type == NVML_CLOCK_VIDEO ? now * 9 / 10 : now;
}

uint64_t nv_throttle_reasons(uint32_t card)
{
	int64_t told = fg_control_override(card, FG_OVERRIDE_THROTTLE_REASONS, -1);
	if (told >= 0)
		return (uint64_t)told;
	const struct nv_settings *settings = nv_settings_of(fg_card_at(card));
	uint64_t reasons =
	    nv_gpu_utilization(card, FG_NO_INSTANCE) == 0 ? nvmlClocksThrottleReasonGpuIdle : 0;
	if (settings->application_sm_mhz != 0)
		reasons |= nvmlClocksThrottleReasonApplicationsClocksSetting;
	return reasons;
}
