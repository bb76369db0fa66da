/* SPDX-License-Identifier: Apache-2.0
 *
 * libnvidia-ml: where cards sit: PCIe, distance from each other, nearness to CPUs and memory.
 *
 * CPUs are shared out evenly over the NUMA nodes that the configuration names, whatever the machine has: with
 * 2 CPUs and cards on nodes 0 and 1, CPU 0 is near the one and CPU 1 near the other.
 */
#include "nvml_settings.h"

#include <string.h>
#include <unistd.h>

/* ---- PCIe --------------------------------------------------------------------------------------------- */

#define PCIE(name, expression)                                      \
	nvmlReturn_t name(nvmlDevice_t device, unsigned int *value) \
	{                                                           \
		struct nv_device of;                                \
		NV_WHOLE_CARD(device, of);                          \
		NV_NEEDS(value);                                    \
		*value = expression;                                \
		return NVML_SUCCESS;                                \
	}

/* A link at rest falls back to the first generation. */
static unsigned int link_generation(const struct nv_device *of)
{
	return nv_gpu_utilization(of->index, FG_NO_INSTANCE) > 0 ? of->card->config.pcie_gen : 1;
}

static unsigned int lane_mbps(unsigned int generation)
{
	static const unsigned int speeds[] = {0, 2500, 5000, 8000, 16000, 32000, 64000, 128000};
	return generation < sizeof(speeds) / sizeof(speeds[0]) ? speeds[generation] : 0;
}

PCIE(nvmlDeviceGetMaxPcieLinkGeneration, of.card->config.pcie_gen)
PCIE(nvmlDeviceGetGpuMaxPcieLinkGeneration, of.card->config.pcie_gen)
PCIE(nvmlDeviceGetMaxPcieLinkWidth, of.card->config.pcie_width)
PCIE(nvmlDeviceGetCurrPcieLinkGeneration, link_generation(&of))
PCIE(nvmlDeviceGetCurrPcieLinkWidth, of.card->config.pcie_width)
PCIE(nvmlDeviceGetPcieLinkMaxSpeed, lane_mbps(of.card->config.pcie_gen))
PCIE(nvmlDeviceGetPcieSpeed, lane_mbps(link_generation(&of)))
PCIE(nvmlDeviceGetPcieReplayCounter, 0)
PCIE(nvmlDeviceGetIrqNum, 32 + of.index)
PCIE(nvmlDeviceGetBusType, NVML_BUS_TYPE_PCIE)

nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, nvmlPcieUtilCounter_t counter,
					 unsigned int *value)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(value);
	if ((unsigned int)counter >= NVML_PCIE_UTIL_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	/* KB/s; copies do not pass a real bus, so this only tells busy from idle. */
	*value = nv_gpu_utilization(of.index, FG_NO_INSTANCE) * 1000;
	return NVML_SUCCESS;
}

/* ---- distance ----------------------------------------------------------------------------------------- */

/* Two devices at once; `result` of the function that uses it. */
#define TWO_CARDS(first, second, a, b)                                \
	struct nv_device a, b;                                        \
	NV_WHOLE_CARD(first, a);                                      \
	{                                                             \
		nvmlReturn_t other_ = nv_resolve_quietly(second, &b); \
		if (other_ != NVML_SUCCESS)                           \
			return other_;                                \
	}

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t device1, nvmlDevice_t device2,
						 nvmlGpuTopologyLevel_t *pathInfo)
{
	TWO_CARDS(device1, device2, a, b);
	NV_NEEDS(pathInfo);
	*pathInfo = (nvmlGpuTopologyLevel_t)fg_topology_between(a.index, b.index);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(nvmlDevice_t device, nvmlGpuTopologyLevel_t level,
					      unsigned int *count, nvmlDevice_t *deviceArray)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	NV_NEEDS(count);
	unsigned int have = 0, room = *count;
	for (uint32_t i = 0; i < nv_visible_count(); i++) {
		uint32_t card = nv_visible_card(i);
		if (card == of.index || fg_topology_between(of.index, card) != (enum fg_topology)level)
			continue;
		if (deviceArray != NULL && have < room)
			deviceArray[have] = nv_card_handle(card);
		have++;
	}
	/* Without room for all, the first are given; the count tells how many there are when none was asked
	 * for. */
	*count = room == 0 ? have : have < room ? have : room;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceOnSameBoard(nvmlDevice_t device1, nvmlDevice_t device2, int *onSameBoard)
{
	TWO_CARDS(device1, device2, a, b);
	NV_NEEDS(onSameBoard);
	*onSameBoard = a.index == b.index;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t device1, nvmlDevice_t device2,
				    nvmlGpuP2PCapsIndex_t p2pIndex, nvmlGpuP2PStatus_t *p2pStatus)
{
	TWO_CARDS(device1, device2, a, b);
	NV_NEEDS(p2pStatus);
	if (a.index == b.index || (unsigned int)p2pIndex >= NVML_P2P_CAPS_INDEX_UNKNOWN)
		return NVML_ERROR_INVALID_ARGUMENT;
	int joined = fg_nvlinks_between(a.index, b.index) > 0, possible = fg_p2p_possible(a.index, b.index);
	if (p2pIndex == NVML_P2P_CAPS_INDEX_NVLINK || p2pIndex == NVML_P2P_CAPS_INDEX_ATOMICS)
		possible = possible && joined;
	*p2pStatus = possible                                     ? NVML_P2P_STATUS_OK
		     : fg_state->driver.p2p_policy == FG_P2P_NONE ? NVML_P2P_STATUS_DISABLED_BY_REGKEY
		     : p2pIndex == NVML_P2P_CAPS_INDEX_NVLINK     ? NVML_P2P_STATUS_NOT_SUPPORTED
								  : NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED;
	return NVML_SUCCESS;
}

/* ---- CPUs and memory ---------------------------------------------------------------------------------- */

static uint32_t node_count(void)
{
	int32_t most = 0;
	for (uint32_t i = 0; i < fg_state->card_count; i++)
		if (fg_card_at(i)->config.numa > most)
			most = fg_card_at(i)->config.numa;
	return (uint32_t)most + 1;
}

static int cpu_is_near(const struct fg_card_config *config, uint32_t cpu, uint32_t cpus)
{
	uint32_t nodes = node_count();
	if (config->numa < 0 || nodes == 1)
		return 1;
	if (cpus < nodes)
		return cpu == (uint32_t)config->numa % cpus;
	return cpu * nodes / cpus == (uint32_t)config->numa;
}

static uint32_t cpu_count(void)
{
	long count = sysconf(_SC_NPROCESSORS_CONF);
	return count > 0 ? (uint32_t)count : 1;
}

#define WORD_BITS (8u * sizeof(unsigned long))

static nvmlReturn_t cpu_set(const struct fg_card_config *config, unsigned int words, unsigned long *set)
{
	if (set == NULL || words == 0)
		return NVML_ERROR_INVALID_ARGUMENT;
	uint32_t cpus = cpu_count();
	if (words * WORD_BITS < cpus)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	memset(set, 0, words * sizeof(*set));
	for (uint32_t cpu = 0; cpu < cpus; cpu++)
		if (cpu_is_near(config, cpu, cpus))
			set[cpu / WORD_BITS] |= 1ul << cpu % WORD_BITS;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned int cpuSetSize, unsigned long *cpuSet)
{
	struct nv_device of;
	NV_DEVICE(device, of);
	return cpu_set(&of.card->config, cpuSetSize, cpuSet);
}

nvmlReturn_t nvmlDeviceGetCpuAffinityWithinScope(nvmlDevice_t device, unsigned int cpuSetSize,
						 unsigned long *cpuSet, nvmlAffinityScope_t scope)
{
	struct nv_device of;
	NV_DEVICE(device, of);
	if (scope != NVML_AFFINITY_SCOPE_NODE && scope != NVML_AFFINITY_SCOPE_SOCKET)
		return NVML_ERROR_INVALID_ARGUMENT;
	return cpu_set(&of.card->config, cpuSetSize, cpuSet);
}

nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned int nodeSetSize,
					 unsigned long *nodeSet, nvmlAffinityScope_t scope)
{
	struct nv_device of;
	NV_DEVICE(device, of);
	NV_NEEDS(nodeSet);
	if (nodeSetSize == 0 || (scope != NVML_AFFINITY_SCOPE_NODE && scope != NVML_AFFINITY_SCOPE_SOCKET))
		return NVML_ERROR_INVALID_ARGUMENT;
	uint32_t node = of.card->config.numa < 0 ? 0 : (uint32_t)of.card->config.numa;
	if (nodeSetSize * WORD_BITS <= node)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	memset(nodeSet, 0, nodeSetSize * sizeof(*nodeSet));
	nodeSet[node / WORD_BITS] |= 1ul << node % WORD_BITS;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNumaNodeId(nvmlDevice_t device, unsigned int *node)
{
	struct nv_device of;
	NV_DEVICE(device, of);
	NV_NEEDS(node);
	if (of.card->config.numa < 0)
		return NVML_ERROR_NOT_SUPPORTED;
	*node = (unsigned int)of.card->config.numa;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetCpuAffinity(nvmlDevice_t device)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	return NVML_SUCCESS; /* a machine of our making has no CPU that is really near */
}

nvmlReturn_t nvmlDeviceClearCpuAffinity(nvmlDevice_t device)
{
	struct nv_device of;
	NV_WHOLE_CARD(device, of);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetTopologyGpuSet(unsigned int cpuNumber, unsigned int *count,
					 nvmlDevice_t *deviceArray)
{
	NV_ENTER();
	NV_NEEDS(count);
	if (cpuNumber >= cpu_count())
		return NVML_ERROR_INVALID_ARGUMENT;
	unsigned int have = 0, room = *count;
	for (uint32_t i = 0; i < nv_visible_count(); i++) {
		uint32_t card = nv_visible_card(i);
		if (!cpu_is_near(&fg_card_at(card)->config, cpuNumber, cpu_count()))
			continue;
		if (deviceArray != NULL && have < room)
			deviceArray[have] = nv_card_handle(card);
		have++;
	}
	*count = room == 0 ? have : have < room ? have : room;
	return NVML_SUCCESS;
}
