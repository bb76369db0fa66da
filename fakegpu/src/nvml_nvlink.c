/* SPDX-License-Identifier: Apache-2.0
 *
 * libnvidia-ml: NVLink and the fabric. Links are what the configuration says, symmetric by construction; a
 * link is up while both of its ends are on the bus.
 */
#include "nvml_core.h"

#include <stdio.h>
#include <string.h>

/* A link that the card has. */
static nvmlReturn_t enter_link(const char *function, nvmlDevice_t device, unsigned int link,
			       struct nv_device *of)
{
	nvmlReturn_t result = nv_enter_device(function, device, of);
	if (result != NVML_SUCCESS)
		return result;
	if (of->ci != FG_NO_INSTANCE || of->card->config.nvlink_version == 0)
		return NVML_ERROR_NOT_SUPPORTED;
	return link < of->card->config.nvlink_count ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

#define NV_LINK(handle, link, of)                                                  \
	do {                                                                       \
		nvmlReturn_t entered_ = enter_link(__func__, handle, link, &(of)); \
		if (entered_ != NVML_SUCCESS)                                      \
			return entered_;                                           \
	} while (0)

static int is_up(const struct fg_nvlink *link)
{
	if (link->remote_card == FG_LINK_NONE)
		return 0;
	return link->remote_card == FG_LINK_SWITCH ||
	       !__atomic_load_n(&fg_card_at(link->remote_card)->lost, __ATOMIC_RELAXED);
}

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, nvmlEnableState_t *isActive)
{
	struct nv_device of;
	NV_LINK(device, link, of);
	NV_NEEDS(isActive);
	*isActive = is_up(&of.card->config.nvlink[link]) ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned int link, unsigned int *version)
{
	struct nv_device of;
	NV_LINK(device, link, of);
	NV_NEEDS(version);
	*version = of.card->config.nvlink_version;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t device, unsigned int link,
					   nvmlNvLinkCapability_t capability, unsigned int *capResult)
{
	struct nv_device of;
	NV_LINK(device, link, of);
	NV_NEEDS(capResult);
	switch (capability) {
	case NVML_NVLINK_CAP_P2P_SUPPORTED:
	case NVML_NVLINK_CAP_SYSMEM_ACCESS:
	case NVML_NVLINK_CAP_P2P_ATOMICS:
	case NVML_NVLINK_CAP_VALID:
		*capResult = 1;
		return NVML_SUCCESS;
	case NVML_NVLINK_CAP_SYSMEM_ATOMICS:
	case NVML_NVLINK_CAP_SLI_BRIDGE:
		*capResult = 0;
		return NVML_SUCCESS;
	case NVML_NVLINK_CAP_COUNT:
	default:
		return NVML_ERROR_INVALID_ARGUMENT;
	}
}

nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link,
						 nvmlIntNvLinkDeviceType_t *pNvLinkDeviceType)
{
	struct nv_device of;
	NV_LINK(device, link, of);
	NV_NEEDS(pNvLinkDeviceType);
	uint32_t remote = of.card->config.nvlink[link].remote_card;
	*pNvLinkDeviceType = remote == FG_LINK_NONE     ? NVML_NVLINK_DEVICE_TYPE_UNKNOWN
			     : remote == FG_LINK_SWITCH ? NVML_NVLINK_DEVICE_TYPE_SWITCH
							: NVML_NVLINK_DEVICE_TYPE_GPU;
	return NVML_SUCCESS;
}

/* Switches sit on a bus of their own, where no card is: c0 and up. */
static void switch_address(unsigned int link, nvmlPciInfo_t *pci)
{
	pci->bus = 0xc0 + link % 6;
	pci->pciDeviceId = 0x22a310deu;
	snprintf(pci->busId, sizeof(pci->busId), NVML_DEVICE_PCI_BUS_ID_FMT, pci->domain, pci->bus,
		 pci->device);
}

static nvmlReturn_t remote_pci(const char *function, nvmlDevice_t device, unsigned int link,
			       nvmlPciInfo_t *pci, int is_v1)
{
	struct nv_device of;
	nvmlReturn_t result = enter_link(function, device, link, &of);
	if (result != NVML_SUCCESS)
		return result;
	NV_NEEDS(pci);
	nvmlPciInfo_t whole;
	uint32_t remote = of.card->config.nvlink[link].remote_card;
	memset(&whole, 0, sizeof(whole));
	if (remote == FG_LINK_NONE)
		return NVML_ERROR_NOT_FOUND;
	if (remote == FG_LINK_SWITCH) {
		switch_address(link, &whole);
	} else {
		const struct fg_card_config *other = &fg_card_at(remote)->config;
		whole.domain = other->pci_domain;
		whole.bus = other->pci_bus;
		whole.device = other->pci_device;
		whole.pciDeviceId = other->pci_device_id;
		whole.pciSubSystemId = other->pci_subsystem_id;
		nv_bus_id(other, whole.busId, sizeof(whole.busId));
	}
	snprintf(whole.busIdLegacy, sizeof(whole.busIdLegacy), NVML_DEVICE_PCI_BUS_ID_LEGACY_FMT,
		 whole.domain & 0xffff, whole.bus & 0xff, whole.device & 0xff);
	/* The first form: bus id of 16 bytes, four words. */
	memcpy(pci, &whole, is_v1 ? offsetof(nvmlPciInfo_t, pciSubSystemId) : sizeof(whole));
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci)
{
	return remote_pci(__func__, device, link, pci, 1);
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci)
{
	return remote_pci(__func__, device, link, pci, 0);
}

/* ---- counters: links here never fail --------------------------------------------------------------------
 */

nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned int link,
					     nvmlNvLinkErrorCounter_t counter,
					     unsigned long long *counterValue)
{
	struct nv_device of;
	NV_LINK(device, link, of);
	NV_NEEDS(counterValue);
	if ((unsigned int)counter >= NVML_NVLINK_ERROR_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	*counterValue = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceResetNvLinkErrorCounters(nvmlDevice_t device, unsigned int link)
{
	struct nv_device of;
	NV_LINK(device, link, of);
	NV_ROOT();
	return NVML_SUCCESS;
}

/* ---- fabric: there is no fabric manager here --------------------------------------------------------------
 */

static nvmlReturn_t enter_fabric(const char *function, nvmlDevice_t device, const void *info)
{
	struct nv_device of;
	nvmlReturn_t result = nv_enter_device(function, device, &of);
	if (result != NVML_SUCCESS)
		return result;
	NV_NEEDS(info);
	return of.ci == FG_NO_INSTANCE && of.card->config.architecture >= NVML_DEVICE_ARCH_HOPPER
		   ? NVML_SUCCESS
		   : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *gpuFabricInfo)
{
	nvmlReturn_t result = enter_fabric(__func__, device, gpuFabricInfo);
	if (result == NVML_SUCCESS)
		*gpuFabricInfo = (nvmlGpuFabricInfo_t){.state = NVML_GPU_FABRIC_STATE_NOT_SUPPORTED};
	return result;
}

nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfoV_t *gpuFabricInfo)
{
	nvmlReturn_t result = enter_fabric(__func__, device, gpuFabricInfo);
	if (result != NVML_SUCCESS)
		return result;
	unsigned int version = gpuFabricInfo->version;
	if (version == nvmlGpuFabricInfo_v2)
		*(nvmlGpuFabricInfo_v2_t *)(void *)gpuFabricInfo = (nvmlGpuFabricInfo_v2_t){
		    .version = version, .state = NVML_GPU_FABRIC_STATE_NOT_SUPPORTED};
	else if (version == nvmlGpuFabricInfo_v3)
		*gpuFabricInfo =
		    (nvmlGpuFabricInfoV_t){.version = version, .state = NVML_GPU_FABRIC_STATE_NOT_SUPPORTED};
	else
		result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	return result;
}
