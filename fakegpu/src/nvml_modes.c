/* SPDX-License-Identifier: Apache-2.0
 *
 * libnvidia-ml: modes that can be read and set: persistence, compute, ECC, display, operation, restrictions,
 * drain.
 */
#include "nvml_settings.h"

static nvmlEnableState_t state(uint32_t on)
{
	return on ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
}

static int is_state(nvmlEnableState_t value)
{
	return value == NVML_FEATURE_ENABLED || value == NVML_FEATURE_DISABLED;
}

/* ---- persistence -------------------------------------------------------------------------------------- */

nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(mode);
	*mode = state(__atomic_load_n(&of.card->persistence, __ATOMIC_RELAXED));
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t mode)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	if (!is_state(mode))
		return NVML_ERROR_INVALID_ARGUMENT;
	NV_ROOT();
	__atomic_store_n(&of.card->persistence, mode == NVML_FEATURE_ENABLED, __ATOMIC_RELAXED);
	return NVML_SUCCESS;
}

/* ---- compute mode: the state keeps CUDA's numbers, which NVML's equal (0 default, 2 prohibited, 3
 * exclusive) -------- */

nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, nvmlComputeMode_t *mode)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(mode);
	*mode = (nvmlComputeMode_t)__atomic_load_n(&of.card->compute_mode, __ATOMIC_RELAXED);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t device, nvmlComputeMode_t mode)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	if ((unsigned int)mode >= NVML_COMPUTEMODE_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (mode == NVML_COMPUTEMODE_EXCLUSIVE_THREAD) /* removed from drivers long ago */
		return NVML_ERROR_NOT_SUPPORTED;
	NV_ROOT();
	if (of.card->mig_enabled && mode != NVML_COMPUTEMODE_DEFAULT)
		return NVML_ERROR_NOT_SUPPORTED;
	__atomic_store_n(&of.card->compute_mode, (uint32_t)mode, __ATOMIC_RELAXED);
	return NVML_SUCCESS;
}

/* ---- ECC: a change waits for a reset
 * ------------------------------------------------------------------------ */

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current, nvmlEnableState_t *pending)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(current, pending);
	if (!of.card->config.ecc_capable)
		return NVML_ERROR_NOT_SUPPORTED;
	*current = state(of.card->ecc_enabled);
	*pending = state(of.card->ecc_pending);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDefaultEccMode(nvmlDevice_t device, nvmlEnableState_t *defaultMode)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(defaultMode);
	if (!of.card->config.ecc_capable)
		return NVML_ERROR_NOT_SUPPORTED;
	*defaultMode = NVML_FEATURE_ENABLED;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetEccMode(nvmlDevice_t device, nvmlEnableState_t ecc)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	if (!is_state(ecc))
		return NVML_ERROR_INVALID_ARGUMENT;
	NV_ROOT();
	if (!of.card->config.ecc_capable)
		return NVML_ERROR_NOT_SUPPORTED;
	__atomic_store_n(&of.card->ecc_pending, ecc == NVML_FEATURE_ENABLED, __ATOMIC_RELAXED);
	return NVML_SUCCESS;
}

/* ---- display, operation, boost
 * ------------------------------------------------------------------------------ */

nvmlReturn_t nvmlDeviceGetDisplayMode(nvmlDevice_t device, nvmlEnableState_t *display)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(display);
	*display = state(of.card->config.display_active);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDisplayActive(nvmlDevice_t device, nvmlEnableState_t *isActive)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(isActive);
	*isActive = state(of.card->config.display_active);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAutoBoostedClocksEnabled(nvmlDevice_t device, nvmlEnableState_t *isEnabled,
						   nvmlEnableState_t *defaultIsEnabled)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(isEnabled, defaultIsEnabled);
	*isEnabled = state(!nv_settings_of(of.card)->auto_boost_off);
	*defaultIsEnabled = NVML_FEATURE_ENABLED;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetAutoBoostedClocksEnabled(nvmlDevice_t device, nvmlEnableState_t enabled)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	if (!is_state(enabled))
		return NVML_ERROR_INVALID_ARGUMENT;
	__atomic_store_n(&nv_settings_of(of.card)->auto_boost_off, enabled == NVML_FEATURE_DISABLED,
			 __ATOMIC_RELAXED);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAPIRestriction(nvmlDevice_t device, nvmlRestrictedAPI_t apiType,
					 nvmlEnableState_t *isRestricted)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(isRestricted);
	if ((unsigned int)apiType >= NVML_RESTRICTED_API_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	uint32_t set = nv_settings_of(of.card)->restricted[apiType];
	*isRestricted = set == 0 ? NVML_FEATURE_DISABLED : (nvmlEnableState_t)(set - 1);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetAPIRestriction(nvmlDevice_t device, nvmlRestrictedAPI_t apiType,
					 nvmlEnableState_t isRestricted)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	if ((unsigned int)apiType >= NVML_RESTRICTED_API_COUNT || !is_state(isRestricted))
		return NVML_ERROR_INVALID_ARGUMENT;
	NV_ROOT();
	__atomic_store_n(&nv_settings_of(of.card)->restricted[apiType], 1 + (uint32_t)isRestricted,
			 __ATOMIC_RELAXED);
	return NVML_SUCCESS;
}

/* ---- drain: a drained card takes no new work, which only those who ask see here
 * -------------------------------- */

static nvmlReturn_t card_at_address(const nvmlPciInfo_t *pci, struct fg_card **card)
{
	NV_NEEDS(pci);
	for (uint32_t i = 0; i < nv_visible_count(); i++) {
		struct fg_card *one = fg_card_at(nv_visible_card(i));
		if (one->config.pci_domain == pci->domain && one->config.pci_bus == pci->bus &&
		    one->config.pci_device == pci->device) {
			*card = one;
			return NVML_SUCCESS;
		}
	}
	return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceQueryDrainState(nvmlPciInfo_t *pciInfo, nvmlEnableState_t *currentState)
{
	struct fg_card *card;
	NV_ENTER();
	NV_NEEDS(currentState);
	nvmlReturn_t result = card_at_address(pciInfo, &card);
	if (result == NVML_SUCCESS)
		*currentState = state(nv_settings_of(card)->drained);
	return result;
}

nvmlReturn_t nvmlDeviceModifyDrainState(nvmlPciInfo_t *pciInfo, nvmlEnableState_t newState)
{
	struct fg_card *card;
	NV_ENTER();
	if (!is_state(newState))
		return NVML_ERROR_INVALID_ARGUMENT;
	NV_ROOT();
	nvmlReturn_t result = card_at_address(pciInfo, &card);
	if (result == NVML_SUCCESS)
		__atomic_store_n(&nv_settings_of(card)->drained, newState == NVML_FEATURE_ENABLED,
				 __ATOMIC_RELAXED);
	return result;
}
