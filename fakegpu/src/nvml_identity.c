/* SPDX-License-Identifier: Apache-2.0
 *
 * libnvidia-ml: who a device is.
 */
#include "nvml_core.h"
#include "nvml_mig.h"

#include <stdio.h>
#include <string.h>

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
	struct nv_device of;
	char text[FG_NAME_LEN + 48];
	NV_DEVICE(device, of);
	if (of.ci == FG_NO_INSTANCE)
		return nv_text(of.card->config.name, name, length);
	char profile[32];
	nv_mig_device_profile(of.card, of.ci, profile, sizeof(profile));
	snprintf(text, sizeof(text), "%s MIG %s", of.card->config.name, profile);
	return nv_text(text, name, length);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
	struct nv_device of;
	NV_DEVICE(device, of);
	return nv_text(of.ci == FG_NO_INSTANCE ? of.card->config.uuid_text
					       : of.card->compute_instance[of.ci].uuid_text,
		       uuid, length);
}

nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned int length)
{
	struct nv_device of;
	NV_DEVICE(device, of);
	if (of.card->config.serial[0] == '\0')
		return NVML_ERROR_NOT_SUPPORTED;
	return nv_text(of.card->config.serial, serial, length);
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
	struct nv_device of;
	NV_DEVICE(device, of);
	NV_NEEDS(index);
	*index = of.ci == FG_NO_INSTANCE ? nv_visible_position(of.index)
					 : of.card->compute_instance[of.ci].mig_index;
	return *index == FG_NO_INSTANCE ? NVML_ERROR_NO_PERMISSION : NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minorNumber)
{
	struct nv_device of;
	NV_DEVICE(device, of);
	NV_NEEDS(minorNumber);
	*minorNumber = of.card->config.minor;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, nvmlBrandType_t *type)
{
	struct nv_device of;
	NV_DEVICE(device, of);
	NV_NEEDS(type);
	*type = (nvmlBrandType_t)of.card->config.brand;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, nvmlDeviceArchitecture_t *arch)
{
	struct nv_device of;
	NV_DEVICE(device, of);
	NV_NEEDS(arch);
	*arch = of.card->config.architecture;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
	struct nv_device of;
	NV_DEVICE(device, of);
	NV_NEEDS(major, minor);
	*major = (int)of.card->config.cc_major;
	*minor = (int)of.card->config.cc_minor;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNumGpuCores(nvmlDevice_t device, unsigned int *numCores)
{
	struct nv_device of;
	NV_DEVICE(device, of);
	NV_NEEDS(numCores);
	const struct fg_card *card = of.card;
	uint32_t multiprocessors =
	    of.ci == FG_NO_INSTANCE ? card->config.sm_count : card->compute_instance[of.ci].sm_count;
	*numCores = multiprocessors * card->config.cores_per_sm;
	return NVML_SUCCESS;
}

/* ---- board -------------------------------------------------------------------------------------------- */

nvmlReturn_t nvmlDeviceGetBoardId(nvmlDevice_t device, unsigned int *boardId)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(boardId);
	*boardId =
	    of.card->config.pci_domain << 16 | of.card->config.pci_bus << 8 | of.card->config.pci_device << 3;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetBoardPartNumber(nvmlDevice_t device, char *partNumber, unsigned int length)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	return nv_text(of.card->config.board_part, partNumber, length);
}

nvmlReturn_t nvmlDeviceGetMultiGpuBoard(nvmlDevice_t device, unsigned int *multiGpuBool)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(multiGpuBool);
	*multiGpuBool = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetModuleId(nvmlDevice_t device, unsigned int *moduleId)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(moduleId);
	*moduleId = of.index + 1; /* boards count their sockets from 1 */
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetVbiosVersion(nvmlDevice_t device, char *version, unsigned int length)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	return nv_text(of.card->config.vbios, version, length);
}

nvmlReturn_t nvmlDeviceGetInforomImageVersion(nvmlDevice_t device, char *version, unsigned int length)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	return nv_text("G500.0200.00.05", version, length);
}

nvmlReturn_t nvmlDeviceGetInforomVersion(nvmlDevice_t device, nvmlInforomObject_t object, char *version,
					 unsigned int length)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	switch (object) {
	case NVML_INFOROM_OEM:
		return nv_text("2.1", version, length);
	case NVML_INFOROM_ECC:
		return of.card->config.ecc_capable ? nv_text("7.16", version, length)
						   : NVML_ERROR_NOT_SUPPORTED;
	case NVML_INFOROM_POWER:
	case NVML_INFOROM_DEN:
		return NVML_ERROR_NOT_SUPPORTED;
	case NVML_INFOROM_COUNT:
	default:
		return NVML_ERROR_INVALID_ARGUMENT;
	}
}

nvmlReturn_t nvmlDeviceGetInforomConfigurationChecksum(nvmlDevice_t device, unsigned int *checksum)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(checksum);
	*checksum = 0x5a5a0000u | of.card->config.minor;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceValidateInforom(nvmlDevice_t device)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGspFirmwareVersion(nvmlDevice_t device, char *version)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	if (of.card->config.architecture < NVML_DEVICE_ARCH_TURING)
		return NVML_ERROR_NOT_SUPPORTED;
	return nv_text(nv_driver_version(), version, NVML_GSP_FIRMWARE_VERSION_BUF_SIZE);
}

nvmlReturn_t nvmlDeviceGetGspFirmwareMode(nvmlDevice_t device, unsigned int *isEnabled,
					  unsigned int *defaultMode)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(isEnabled, defaultMode);
	*isEnabled = *defaultMode = of.card->config.architecture >= NVML_DEVICE_ARCH_TURING;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetVirtualizationMode(nvmlDevice_t device, nvmlGpuVirtualizationMode_t *pVirtualMode)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(pVirtualMode);
	*pVirtualMode = NVML_GPU_VIRTUALIZATION_MODE_NONE;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPlatformInfo(nvmlDevice_t device, nvmlPlatformInfo_t *platformInfo)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(platformInfo);
	unsigned int version = platformInfo->version;
	if (version == nvmlPlatformInfo_v1) {
		/* The first word of both versions is the version, the rest of ours is zero but the module. */
		nvmlPlatformInfo_v1_t *first = (nvmlPlatformInfo_v1_t *)(void *)platformInfo;
		memset(first, 0, sizeof(*first));
		first->version = version;
		first->moduleId = (unsigned char)(of.index + 1);
		return NVML_SUCCESS;
	}
	nvmlReturn_t result = nv_version(version, sizeof(*platformInfo), 2);
	if (result != NVML_SUCCESS)
		return result;
	memset(platformInfo, 0, sizeof(*platformInfo));
	platformInfo->version = version;
	platformInfo->moduleId = (unsigned char)(of.index + 1);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAddressingMode(nvmlDevice_t device, nvmlDeviceAddressingMode_t *mode)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(mode);
	nvmlReturn_t result = nv_version(mode->version, sizeof(*mode), 1);
	if (result == NVML_SUCCESS)
		mode->value = of.card->config.integrated ? NVML_DEVICE_ADDRESSING_MODE_ATS
							 : NVML_DEVICE_ADDRESSING_MODE_NONE;
	return result;
}

nvmlReturn_t nvmlDeviceGetC2cModeInfoV(nvmlDevice_t device, nvmlC2cModeInfo_v1_t *c2cModeInfo)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(c2cModeInfo);
	c2cModeInfo->isC2cEnabled = of.card->config.integrated;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPdi(nvmlDevice_t device, nvmlPdi_t *pdi)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(pdi);
	nvmlReturn_t result = nv_version(pdi->version, sizeof(*pdi), 1);
	if (result != NVML_SUCCESS)
		return result;
	unsigned long long value;
	memcpy(&value, of.card->config.uuid, sizeof(value));
	pdi->value = value;
	return NVML_SUCCESS;
}

/* ---- PCI ---------------------------------------------------------------------------------------------- */

static void fill_pci(const struct fg_card_config *config, nvmlPciInfo_t *pci)
{
	memset(pci, 0, sizeof(*pci));
	pci->domain = config->pci_domain;
	pci->bus = config->pci_bus;
	pci->device = config->pci_device;
	pci->pciDeviceId = config->pci_device_id;
	pci->pciSubSystemId = config->pci_subsystem_id;
	nv_bus_id(config, pci->busId, sizeof(pci->busId));
	snprintf(pci->busIdLegacy, sizeof(pci->busIdLegacy), NVML_DEVICE_PCI_BUS_ID_LEGACY_FMT,
		 config->pci_domain & 0xffff, config->pci_bus & 0xff, config->pci_device & 0xff);
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
	struct nv_device of;
	NV_DEVICE(device, of);
	NV_NEEDS(pci);
	fill_pci(&of.card->config, pci);
	return NVML_SUCCESS;
}

/* The first two forms: 16 bytes of bus id, four (five) words; callers of then have no more room than that. */
struct pci_v1 {
	char busId[16];
	unsigned int domain, bus, device, pciDeviceId;
};
struct pci_v2 {
	struct pci_v1 first;
	unsigned int pciSubSystemId;
	unsigned int reserved[4];
};

static void fill_pci_v1(const struct fg_card_config *config, struct pci_v1 *pci)
{
	nvmlPciInfo_t whole;
	fill_pci(config, &whole);
	memcpy(pci->busId, whole.busIdLegacy, sizeof(pci->busId));
	pci->domain = whole.domain;
	pci->bus = whole.bus;
	pci->device = whole.device;
	pci->pciDeviceId = whole.pciDeviceId;
}

nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
	struct nv_device of;
	NV_DEVICE(device, of);
	NV_NEEDS(pci);
	fill_pci_v1(&of.card->config, (struct pci_v1 *)(void *)pci);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
	struct nv_device of;
	NV_DEVICE(device, of);
	NV_NEEDS(pci);
	struct pci_v2 *second = (struct pci_v2 *)(void *)pci;
	fill_pci_v1(&of.card->config, &second->first);
	second->pciSubSystemId = of.card->config.pci_subsystem_id;
	memset(second->reserved, 0, sizeof(second->reserved));
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_t *pci)
{
	struct nv_device of;
	NV_DEVICE(device, of);
	NV_NEEDS(pci);
	unsigned int version = pci->version;
	nvmlReturn_t result = nv_version(version, sizeof(*pci), 1);
	if (result != NVML_SUCCESS)
		return result;
	const struct fg_card_config *config = &of.card->config;
	memset(pci, 0, sizeof(*pci));
	pci->version = version;
	pci->domain = config->pci_domain;
	pci->bus = config->pci_bus;
	pci->device = config->pci_device;
	pci->pciDeviceId = config->pci_device_id;
	pci->pciSubSystemId = config->pci_subsystem_id;
	pci->baseClass = 3; /* display controller */
	pci->subClass = 2; /* 3D controller */
	nv_bus_id(config, pci->busId, sizeof(pci->busId));
	return NVML_SUCCESS;
}
