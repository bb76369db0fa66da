/* SPDX-License-Identifier: Apache-2.0
 *
 * cuDeviceGetAttribute: what a device can do, from the card's configuration and, for what is the same on all
 * cards of the last ten years, from the tables of the programming guide.
 */
#include "cuda_core.h"
#include "cuda_parts.h"

#define A(name) CU_DEVICE_ATTRIBUTE_##name

struct fixed {
	int attribute, value;
};

/* The same on every card since Volta. */
static const struct fixed fixed[] = {
    {A(MAX_THREADS_PER_BLOCK), 1024},
    {A(MAX_BLOCK_DIM_X), 1024},
    {A(MAX_BLOCK_DIM_Y), 1024},
    {A(MAX_BLOCK_DIM_Z), 64},
    {A(MAX_GRID_DIM_X), 2147483647},
    {A(MAX_GRID_DIM_Y), 65535},
    {A(MAX_GRID_DIM_Z), 65535},
    {A(MAX_SHARED_MEMORY_PER_BLOCK), 49152},
    {A(TOTAL_CONSTANT_MEMORY), 65536},
    {A(WARP_SIZE), 32},
    {A(MAX_PITCH), 2147483647},
    {A(MAX_REGISTERS_PER_BLOCK), 65536},
    {A(MAX_REGISTERS_PER_MULTIPROCESSOR), 65536},
    {A(TEXTURE_ALIGNMENT), 512},
    {A(TEXTURE_PITCH_ALIGNMENT), 32},
    {A(SURFACE_ALIGNMENT), 512},
    {A(GPU_OVERLAP), 1},
    {A(KERNEL_EXEC_TIMEOUT), 0},
    {A(CAN_MAP_HOST_MEMORY), 1},
    {A(MAXIMUM_TEXTURE1D_WIDTH), 131072},
    {A(MAXIMUM_TEXTURE1D_LINEAR_WIDTH), 268435456},
    {A(MAXIMUM_TEXTURE1D_LAYERED_WIDTH), 32768},
    {A(MAXIMUM_TEXTURE1D_LAYERED_LAYERS), 2048},
    {A(MAXIMUM_TEXTURE1D_MIPMAPPED_WIDTH), 32768},
    {A(MAXIMUM_TEXTURE2D_WIDTH), 131072},
    {A(MAXIMUM_TEXTURE2D_HEIGHT), 65536},
    {A(MAXIMUM_TEXTURE2D_LAYERED_WIDTH), 32768},
    {A(MAXIMUM_TEXTURE2D_LAYERED_HEIGHT), 32768},
    {A(MAXIMUM_TEXTURE2D_LAYERED_LAYERS), 2048},
    {A(MAXIMUM_TEXTURE2D_LINEAR_WIDTH), 131072},
    {A(MAXIMUM_TEXTURE2D_LINEAR_HEIGHT), 65000},
    {A(MAXIMUM_TEXTURE2D_LINEAR_PITCH), 2097120},
    {A(MAXIMUM_TEXTURE2D_MIPMAPPED_WIDTH), 32768},
    {A(MAXIMUM_TEXTURE2D_MIPMAPPED_HEIGHT), 32768},
    {A(MAXIMUM_TEXTURE2D_GATHER_WIDTH), 32768},
    {A(MAXIMUM_TEXTURE2D_GATHER_HEIGHT), 32768},
    {A(MAXIMUM_TEXTURE3D_WIDTH), 16384},
    {A(MAXIMUM_TEXTURE3D_HEIGHT), 16384},
    {A(MAXIMUM_TEXTURE3D_DEPTH), 16384},
    {A(MAXIMUM_TEXTURE3D_WIDTH_ALTERNATE), 8192},
    {A(MAXIMUM_TEXTURE3D_HEIGHT_ALTERNATE), 8192},
    {A(MAXIMUM_TEXTURE3D_DEPTH_ALTERNATE), 32768},
    {A(MAXIMUM_TEXTURECUBEMAP_WIDTH), 32768},
    {A(MAXIMUM_TEXTURECUBEMAP_LAYERED_WIDTH), 32768},
    {A(MAXIMUM_TEXTURECUBEMAP_LAYERED_LAYERS), 2046},
    {A(MAXIMUM_SURFACE1D_WIDTH), 32768},
    {A(MAXIMUM_SURFACE1D_LAYERED_WIDTH), 32768},
    {A(MAXIMUM_SURFACE1D_LAYERED_LAYERS), 2048},
    {A(MAXIMUM_SURFACE2D_WIDTH), 131072},
    {A(MAXIMUM_SURFACE2D_HEIGHT), 65536},
    {A(MAXIMUM_SURFACE2D_LAYERED_WIDTH), 32768},
    {A(MAXIMUM_SURFACE2D_LAYERED_HEIGHT), 32768},
    {A(MAXIMUM_SURFACE2D_LAYERED_LAYERS), 2048},
    {A(MAXIMUM_SURFACE3D_WIDTH), 16384},
    {A(MAXIMUM_SURFACE3D_HEIGHT), 16384},
    {A(MAXIMUM_SURFACE3D_DEPTH), 16384},
    {A(MAXIMUM_SURFACECUBEMAP_WIDTH), 32768},
    {A(MAXIMUM_SURFACECUBEMAP_LAYERED_WIDTH), 32768},
    {A(MAXIMUM_SURFACECUBEMAP_LAYERED_LAYERS), 2046},
    {A(CONCURRENT_KERNELS), 1},
    {A(TCC_DRIVER), 0},
    {A(ASYNC_ENGINE_COUNT), 3},
    {A(UNIFIED_ADDRESSING), 1},
    {A(CAN_TEX2D_GATHER), 1},
    {A(STREAM_PRIORITIES_SUPPORTED), 1},
    {A(GLOBAL_L1_CACHE_SUPPORTED), 1},
    {A(LOCAL_L1_CACHE_SUPPORTED), 1},
    {A(MANAGED_MEMORY), 1},
    {A(MULTI_GPU_BOARD), 0},
    {A(HOST_NATIVE_ATOMIC_SUPPORTED), 0},
    {A(PAGEABLE_MEMORY_ACCESS), 0},
    {A(CONCURRENT_MANAGED_ACCESS), 1},
    {A(COMPUTE_PREEMPTION_SUPPORTED), 1},
    {A(CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM), 1},
    {A(CAN_USE_STREAM_MEM_OPS_V1), 1},
    {A(CAN_USE_64_BIT_STREAM_MEM_OPS_V1), 1},
    {A(CAN_USE_STREAM_WAIT_VALUE_NOR_V1), 1},
    {A(CAN_USE_64_BIT_STREAM_MEM_OPS), 1},
    {A(CAN_USE_STREAM_WAIT_VALUE_NOR), 1},
    {A(COOPERATIVE_LAUNCH), 1},
    {A(COOPERATIVE_MULTI_DEVICE_LAUNCH), 1},
    {A(CAN_FLUSH_REMOTE_WRITES), 0},
    {A(HOST_REGISTER_SUPPORTED), 1},
    {A(PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES), 0},
    {A(DIRECT_MANAGED_MEM_ACCESS_FROM_HOST), 0},
    {A(VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED), 1},
    {A(HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED), 1},
    {A(HANDLE_TYPE_WIN32_HANDLE_SUPPORTED), 0},
    {A(HANDLE_TYPE_WIN32_KMT_HANDLE_SUPPORTED), 0},
    {A(HANDLE_TYPE_FABRIC_SUPPORTED), 0},
    {A(GENERIC_COMPRESSION_SUPPORTED), 0},
    {A(MAX_ACCESS_POLICY_WINDOW_SIZE), 134213632},
    {A(GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED), 0},
    {A(SPARSE_CUDA_ARRAY_SUPPORTED), 0},
    {A(READ_ONLY_HOST_REGISTER_SUPPORTED), 1},
    {A(TIMELINE_SEMAPHORE_INTEROP_SUPPORTED), 1},
    {A(MEMORY_POOLS_SUPPORTED), 1},
    {A(GPU_DIRECT_RDMA_SUPPORTED), 0},
    {A(MEMPOOL_SUPPORTED_HANDLE_TYPES), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR},
    {A(DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED), 0},
    {A(DMA_BUF_SUPPORTED), 0},
    {A(IPC_EVENT_SUPPORTED), 1},
    {A(UNIFIED_FUNCTION_POINTERS), 0},
    {A(NUMA_CONFIG), 0},
    {A(NUMA_ID), -1},
    {A(MPS_ENABLED), 0},
    {A(D3D12_CIG_SUPPORTED), 0},
    {A(VULKAN_CIG_SUPPORTED), 0},
    {A(HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED), 1},
    {A(HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED), 1},
    {A(HOST_NUMA_MEMORY_POOLS_SUPPORTED), 1},
    {A(HOST_MEMORY_POOLS_SUPPORTED), 1},
};

static int saturate(uint64_t value)
{
	return value > 2147483647 ? 2147483647 : (int)value;
}

static uint32_t sm_count(const struct cu_device *device)
{
	return device->ci < FG_MAX_INSTANCES ? device->shared->compute_instance[device->ci].sm_count
					     : device->shared->config.sm_count;
}

/* Attributes that hang on the configuration; 0: not one of them. */
static int from_config(const struct cu_device *device, int attribute, int *value)
{
	const struct fg_card_config *config = &device->shared->config;
	int since_ampere = config->cc_major >= 8, since_hopper = config->cc_major >= 9;

	switch (attribute) {
	case A(CLOCK_RATE):
		*value = (int)config->sm_clock_mhz * 1000;
		break;
	case A(MEMORY_CLOCK_RATE):
		*value = (int)config->memory_clock_mhz * 1000;
		break;
	case A(GLOBAL_MEMORY_BUS_WIDTH):
		*value = (int)config->memory_bus_bits;
		break;
	case A(MULTIPROCESSOR_COUNT):
		*value = (int)sm_count(device);
		break;
	case A(MAX_THREADS_PER_MULTIPROCESSOR):
		*value = (int)config->threads_per_sm;
		break;
	case A(MAX_BLOCKS_PER_MULTIPROCESSOR):
		*value = (int)config->blocks_per_sm;
		break;
	case A(MAX_SHARED_MEMORY_PER_MULTIPROCESSOR):
		*value = (int)config->shared_per_sm;
		break;
	case A(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN):
		*value = (int)config->shared_per_block_optin;
		break;
	case A(RESERVED_SHARED_MEMORY_PER_BLOCK):
		*value = since_ampere ? 1024 : 0;
		break;
	case A(L2_CACHE_SIZE):
		*value = saturate(config->l2_bytes);
		break;
	case A(MAX_PERSISTING_L2_CACHE_SIZE):
		*value = since_ampere ? saturate(config->l2_bytes / 4 * 3) : 0;
		break;
	case A(INTEGRATED):
		*value = (int)config->integrated;
		break;
	case A(COMPUTE_MODE):
		*value = (int)device->shared->compute_mode;
		break;
	case A(ECC_ENABLED):
		*value = (int)device->shared->ecc_enabled;
		break;
	case A(PCI_BUS_ID):
		*value = (int)config->pci_bus;
		break;
	case A(PCI_DEVICE_ID):
		*value = (int)config->pci_device;
		break;
	case A(PCI_DOMAIN_ID):
		*value = (int)config->pci_domain;
		break;
	case A(GPU_PCI_DEVICE_ID):
		*value = (int)config->pci_device_id;
		break;
	case A(GPU_PCI_SUBSYSTEM_ID):
		*value = (int)config->pci_subsystem_id;
		break;
	case A(COMPUTE_CAPABILITY_MAJOR):
		*value = (int)config->cc_major;
		break;
	case A(COMPUTE_CAPABILITY_MINOR):
		*value = (int)config->cc_minor;
		break;
	case A(SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO):
		*value = config->cc_minor == 0 && config->cc_major < 12 ? 2 : 64;
		break;
	case A(MULTI_GPU_BOARD_GROUP_ID):
		*value = device->ordinal;
		break;
	case A(CLUSTER_LAUNCH):
	case A(TENSOR_MAP_ACCESS_SUPPORTED):
		*value = since_hopper;
		break;
	case A(MEM_SYNC_DOMAIN_COUNT):
		*value = since_hopper ? 4 : 1;
		break;
	case A(MULTICAST_SUPPORTED):
		*value = config->nvlink_count > 0 && config->nvlink[0].remote_card == FG_LINK_SWITCH &&
			 since_hopper;
		break;
	case A(HOST_NUMA_ID):
		*value = config->numa;
		break;
	default:
		return 0;
	}
	return 1;
}

int cu_attribute(const struct cu_device *device, int attribute)
{
	int value = 0;

	if (from_config(device, attribute, &value))
		return value;
	for (size_t i = 0; i < sizeof fixed / sizeof fixed[0]; i++)
		if (fixed[i].attribute == attribute)
			return fixed[i].value;
	return 0;
}

CUresult CUDAAPI cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev)
{
	CU_ENTER("pi=%p attrib=%d dev=%d", (void *)pi, (int)attrib, dev);
	const struct cu_device *device = cu_device_at(dev);

	CU_NEEDS(pi != NULL && attrib >= CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK &&
		 attrib < CU_DEVICE_ATTRIBUTE_MAX);
	if (device == NULL)
		return CUDA_ERROR_INVALID_DEVICE;
	*pi = cu_attribute(device, (int)attrib);
	return CUDA_SUCCESS;
}
