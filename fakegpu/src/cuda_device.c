/* SPDX-License-Identifier: Apache-2.0
 *
 * Devices: count, name, UUID, memory, place on the bus.
 */
#include <stdio.h>
#include <string.h>

#include "cuda_core.h"
#include "cuda_parts.h"

#define DEVICE(device, dev)                               \
	struct cu_device *device = cu_device_at(dev);     \
	do {                                              \
		if (device == NULL)                       \
			return CUDA_ERROR_INVALID_DEVICE; \
	} while (0)

CUresult CUDAAPI cuDeviceGetCount(int *count)
{
	CU_ENTER("count=%p", (void *)count);
	CU_NEEDS(count != NULL);
	*count = cu_device_count;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal)
{
	CU_ENTER("device=%p ordinal=%d", (void *)device, ordinal);
	CU_NEEDS(device != NULL);
	if (cu_device_at(ordinal) == NULL)
		return CUDA_ERROR_INVALID_DEVICE;
	*device = ordinal;
	return CUDA_SUCCESS;
}

/* Compute slices of a NVML_{GPU,COMPUTE}_INSTANCE_PROFILE_*; the first numbers mean the same in both. */
static uint32_t slices_of(uint32_t profile)
{
	static const uint8_t slices[] = {1, 2, 3, 4, 7, 8, 6, 1, 2, 1, 1, 2, 4, 1, 2, 1, 2, 3};

	return profile < sizeof slices ? slices[profile] : 1;
}

/* "NVIDIA A100-SXM4-40GB MIG 1g.5gb" for a compute instance, with 1c. in front where it is part of one. */
static void write_name(const struct cu_device *device, char *name, size_t size)
{
	const struct fg_card *card = device->shared;

	if (device->ci >= FG_MAX_INSTANCES) {
		snprintf(name, size, "%s", card->config.name);
		return;
	}
	const struct fg_compute_instance *ci = &card->compute_instance[device->ci];
	const struct fg_gpu_instance *gi = &card->gpu_instance[device->gi];
	uint32_t whole = slices_of(gi->profile), part = slices_of(ci->profile);
	/* The share of the memory as the model's name counts it: 143,771 MiB are 141 GB, an eighth of
	 * that 18. */
	uint64_t total = (card->config.memory_bytes + (UINT64_C(1) << 30) - 1) >> 30;
	uint64_t eighths =
	    card->config.mig_family == FG_MIG_A30 || card->config.mig_family == FG_MIG_RTX_PRO_6000 ? 2 : 1;
	unsigned gigabytes = (unsigned)((total * gi->placement_size * eighths + 4) / 8);

	if (part == whole)
		snprintf(name, size, "%s MIG %ug.%ugb", card->config.name, whole, gigabytes);
	else
		snprintf(name, size, "%s MIG %uc.%ug.%ugb", card->config.name, part, whole, gigabytes);
}

CUresult CUDAAPI cuDeviceGetName(char *name, int len, CUdevice dev)
{
	CU_ENTER("name=%p len=%d dev=%d", (void *)name, len, dev);
	DEVICE(device, dev);
	char text[FG_NAME_LEN + 32];

	CU_NEEDS(name != NULL && len > 0);
	write_name(device, text, sizeof text);
	memset(name, 0, (size_t)len);
	memcpy(name, text, strlen(text) < (size_t)len ? strlen(text) : (size_t)len - 1);
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetUuid(CUuuid *uuid, CUdevice dev)
{
	CU_ENTER("uuid=%p dev=%d", (void *)uuid, dev);
	DEVICE(device, dev);
	CU_NEEDS(uuid != NULL);
	memcpy(uuid->bytes, device->shared->config.uuid, 16);
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice dev)
{
	CU_ENTER("uuid=%p dev=%d", (void *)uuid, dev);
	DEVICE(device, dev);
	CU_NEEDS(uuid != NULL);
	memcpy(uuid->bytes,
	       device->ci < FG_MAX_INSTANCES ? device->shared->compute_instance[device->ci].uuid
					     : device->shared->config.uuid,
	       16);
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetLuid(char *luid, unsigned int *deviceNodeMask, CUdevice dev)
{
	CU_ENTER("luid=%p mask=%p dev=%d", (void *)luid, (void *)deviceNodeMask, dev);
	return CUDA_ERROR_NOT_SUPPORTED; /* there are LUIDs on Windows only */
}

static uint64_t capacity(const struct cu_device *device)
{
	return device->shared->account[device->gi < FG_MAX_INSTANCES ? 1 + device->gi : 0].capacity;
}

CUresult CUDAAPI cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev)
{
	CU_ENTER("bytes=%p dev=%d", (void *)bytes, dev);
	const struct cu_device *device = cu_device_at(dev);

	CU_NEEDS(bytes != NULL);
	if (device == NULL)
		return CUDA_ERROR_INVALID_DEVICE;
	*bytes = capacity(device);
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceTotalMem(unsigned int *bytes, CUdevice dev)
{
	CU_ENTER("bytes=%p dev=%d", (void *)bytes, dev);
	const struct cu_device *device = cu_device_at(dev);

	CU_NEEDS(bytes != NULL);
	if (device == NULL)
		return CUDA_ERROR_INVALID_DEVICE;
	*bytes = capacity(device) > UINT32_MAX ? UINT32_MAX : (unsigned int)capacity(device);
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceComputeCapability(int *major, int *minor, CUdevice dev)
{
	CU_ENTER("major=%p minor=%p dev=%d", (void *)major, (void *)minor, dev);
	DEVICE(device, dev);
	CU_NEEDS(major != NULL && minor != NULL);
	*major = (int)device->shared->config.cc_major;
	*minor = (int)device->shared->config.cc_minor;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetPCIBusId(char *pciBusId, int len, CUdevice dev)
{
	CU_ENTER("pciBusId=%p len=%d dev=%d", (void *)pciBusId, len, dev);
	DEVICE(device, dev);
	const struct fg_card_config *config = &device->shared->config;

	CU_NEEDS(pciBusId != NULL && len >= 13);
	snprintf(pciBusId, (size_t)len, "%04x:%02x:%02x.0", config->pci_domain, config->pci_bus,
		 config->pci_device);
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetByPCIBusId(CUdevice *dev, const char *pciBusId)
{
	CU_ENTER("dev=%p pciBusId=%s", (void *)dev, pciBusId != NULL ? pciBusId : "(null)");
	unsigned domain = 0, bus, device, function = 0;

	CU_NEEDS(dev != NULL && pciBusId != NULL);
	if (sscanf(pciBusId, "%x:%x:%x.%x", &domain, &bus, &device, &function) < 3) {
		domain = 0;
		CU_NEEDS(sscanf(pciBusId, "%x:%x.%x", &bus, &device, &function) >= 2);
	}
	for (int i = 0; i < cu_device_count; i++) {
		const struct fg_card_config *config = &cu_devices[i].shared->config;

		if (config->pci_domain == domain && config->pci_bus == bus && config->pci_device == device) {
			*dev = i;
			return CUDA_SUCCESS;
		}
	}
	return CUDA_ERROR_INVALID_DEVICE;
}

CUresult CUDAAPI cuDeviceGetProperties(CUdevprop *prop, CUdevice dev)
{
	CU_ENTER("prop=%p dev=%d", (void *)prop, dev);
	DEVICE(device, dev);
	CU_NEEDS(prop != NULL);
	*prop = (CUdevprop){.maxThreadsPerBlock = 1024,
			    .maxThreadsDim = {1024, 1024, 64},
			    .maxGridSize = {2147483647, 65535, 65535},
			    .sharedMemPerBlock = 49152,
			    .totalConstantMemory = 65536,
			    .SIMDWidth = 32,
			    .memPitch = 2147483647,
			    .regsPerBlock = 65536,
			    .clockRate = (int)device->shared->config.sm_clock_mhz * 1000,
			    .textureAlign = 512};
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetTexture1DLinearMaxWidth(size_t *maxWidthInElements, CUarray_format format,
						    unsigned numChannels, CUdevice dev)
{
	CU_ENTER("max=%p format=%d channels=%u dev=%d", (void *)maxWidthInElements, (int)format, numChannels,
		 dev);
	DEVICE(device, dev);
	CU_NEEDS(maxWidthInElements != NULL && (numChannels == 1 || numChannels == 2 || numChannels == 4));
	*maxWidthInElements = device != NULL ? 268435456 / numChannels : 0;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetExecAffinitySupport(int *pi, CUexecAffinityType type, CUdevice dev)
{
	CU_ENTER("pi=%p type=%d dev=%d", (void *)pi, (int)type, dev);
	DEVICE(device, dev);
	CU_NEEDS(pi != NULL && device != NULL);
	*pi = 0; /* only under MPS */
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget target,
					    CUflushGPUDirectRDMAWritesScope scope)
{
	CU_ENTER("target=%d scope=%d", (int)target, (int)scope);
	return CUDA_ERROR_NOT_SUPPORTED;
}

/* ---- peers -------------------------------------------------------------------------------------------- */

CUresult CUDAAPI cuDeviceCanAccessPeer(int *canAccessPeer, CUdevice dev, CUdevice peerDev)
{
	CU_ENTER("can=%p dev=%d peer=%d", (void *)canAccessPeer, dev, peerDev);
	DEVICE(device, dev);
	DEVICE(peer, peerDev);
	CU_NEEDS(canAccessPeer != NULL);
	*canAccessPeer = fg_p2p_possible(device->card, peer->card);
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attrib, CUdevice srcDevice,
					 CUdevice dstDevice)
{
	CU_ENTER("value=%p attrib=%d src=%d dst=%d", (void *)value, (int)attrib, srcDevice, dstDevice);
	DEVICE(from, srcDevice);
	DEVICE(to, dstDevice);
	int possible, links;

	CU_NEEDS(value != NULL);
	if (from == to)
		return CUDA_ERROR_INVALID_DEVICE;
	possible = fg_p2p_possible(from->card, to->card);
	links = (int)fg_nvlinks_between(from->card, to->card);
	switch (attrib) {
	case CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK:
		*value = possible ? (links > 0 ? 0 : 1) : 0;
		return CUDA_SUCCESS;
	case CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED:
	case CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED:
		*value = possible;
		return CUDA_SUCCESS;
	case CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED:
		*value = possible && links > 0;
		return CUDA_SUCCESS;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
}

CUresult CUDAAPI cuCtxEnablePeerAccess(CUcontext peerContext, unsigned int Flags)
{
	CU_ENTER("peer=%p Flags=%u", (void *)peerContext, Flags);
	CU_CONTEXT(context);
	CU_NEEDS(Flags == 0);
	if (!cu_is(peerContext, CU_KIND_CONTEXT) || peerContext->device == context->device)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (!fg_p2p_possible(context->device->card, peerContext->device->card))
		return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
	uint64_t bit = UINT64_C(1) << (peerContext->device->ordinal & 63);

	if (__atomic_fetch_or(&context->peers, bit, __ATOMIC_RELAXED) & bit)
		return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
	return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxDisablePeerAccess(CUcontext peerContext)
{
	CU_ENTER("peer=%p", (void *)peerContext);
	CU_CONTEXT(context);
	if (!cu_is(peerContext, CU_KIND_CONTEXT))
		return CUDA_ERROR_INVALID_CONTEXT;
	uint64_t bit = UINT64_C(1) << (peerContext->device->ordinal & 63);

	if ((__atomic_fetch_and(&context->peers, ~bit, __ATOMIC_RELAXED) & bit) == 0)
		return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
	return CUDA_SUCCESS;
}
