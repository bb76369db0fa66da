/* SPDX-License-Identifier: Apache-2.0
 *
 * nvidia-smi topo -m: how far cards are from each other, and which CPUs are near.
 */
#include <string.h>
#include <unistd.h>

#include "smi.h"

/* NVLinks from one card that end at another one, or at a switch that the other one is joined to as well. */
static unsigned int links_between(nvmlDevice_t one, nvmlDevice_t other)
{
	nvmlPciInfo_t there;
	unsigned int direct = 0, up = 0, down = 0;
	if (NVML(DeviceGetPciInfo_v3, other, &there) != NVML_SUCCESS)
		return 0;
	for (unsigned int link = 0; link < NVML_NVLINK_MAX_LINKS; link++) {
		nvmlEnableState_t state;
		nvmlPciInfo_t remote;
		nvmlIntNvLinkDeviceType_t type = NVML_NVLINK_DEVICE_TYPE_UNKNOWN;
		if (NVML(DeviceGetNvLinkState, one, link, &state) == NVML_SUCCESS &&
		    state == NVML_FEATURE_ENABLED) {
			NVML(DeviceGetNvLinkRemoteDeviceType, one, link, &type);
			if (type == NVML_NVLINK_DEVICE_TYPE_SWITCH)
				up++;
			else if (NVML(DeviceGetNvLinkRemotePciInfo_v2, one, link, &remote) == NVML_SUCCESS)
				direct += strcmp(remote.busId, there.busId) == 0;
		}
		type = NVML_NVLINK_DEVICE_TYPE_UNKNOWN;
		if (NVML(DeviceGetNvLinkState, other, link, &state) == NVML_SUCCESS &&
		    state == NVML_FEATURE_ENABLED &&
		    NVML(DeviceGetNvLinkRemoteDeviceType, other, link, &type) == NVML_SUCCESS)
			down += type == NVML_NVLINK_DEVICE_TYPE_SWITCH;
	}
	return direct + (up < down ? up : down);
}

static void relation(const struct smi_device *one, const struct smi_device *other, char *text, size_t size)
{
	nvmlGpuTopologyLevel_t level;
	unsigned int links;
	if (one == other) {
		snprintf(text, size, " X ");
		return;
	}
	if (one->state != NVML_SUCCESS || other->state != NVML_SUCCESS ||
	    NVML(DeviceGetTopologyCommonAncestor, one->handle, other->handle, &level) != NVML_SUCCESS) {
		snprintf(text, size, "N/A");
		return;
	}
	if ((links = links_between(one->handle, other->handle)) > 0) {
		snprintf(text, size, "NV%u", links);
		return;
	}
	switch (level) {
	case NVML_TOPOLOGY_INTERNAL:
	case NVML_TOPOLOGY_SINGLE:
		snprintf(text, size, "PIX");
		break;
	case NVML_TOPOLOGY_MULTIPLE:
		snprintf(text, size, "PXB");
		break;
	case NVML_TOPOLOGY_HOSTBRIDGE:
		snprintf(text, size, "PHB");
		break;
	case NVML_TOPOLOGY_NODE:
		snprintf(text, size, "NODE");
		break;
	case NVML_TOPOLOGY_SYSTEM:
	default:
		snprintf(text, size, "SYS");
	}
}

/* "0-3,8" from a bit set. */
static void ranges(const unsigned long *set, unsigned int bits, char *text, size_t size)
{
	const unsigned int word = 8 * sizeof(*set);
	size_t used = 0;
	*text = '\0';
	for (unsigned int i = 0; i < bits; i++) {
		unsigned int first = i;
		if ((set[i / word] >> i % word & 1) == 0)
			continue;
		while (i + 1 < bits && (set[(i + 1) / word] >> (i + 1) % word & 1) != 0)
			i++;
		int more = snprintf(text + used, size - used, first == i ? "%s%u" : "%s%u-%u",
				    used > 0 ? "," : "", first, i);
		if (more < 0 || used + (size_t)more >= size)
			return;
		used += (size_t)more;
	}
}

int smi_topology(const struct smi_devices *devices)
{
	for (unsigned int i = 0; i < devices->count; i++)
		printf("\tGPU%u", devices->device[i].index);
	printf("\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n");
	for (unsigned int i = 0; i < devices->count; i++) {
		const struct smi_device *one = &devices->device[i];
		unsigned long cpus[16] = {0}, nodes[2] = {0};
		char cpu_text[128] = "", node_text[64] = "";
		printf("GPU%u", one->index);
		for (unsigned int j = 0; j < devices->count; j++) {
			char text[16];
			relation(one, &devices->device[j], text, sizeof(text));
			printf("\t%s", text);
		}
		if (one->state == NVML_SUCCESS &&
		    NVML(DeviceGetCpuAffinity, one->handle, 16, cpus) == NVML_SUCCESS)
			ranges(cpus, 16 * 8 * sizeof(*cpus), cpu_text, sizeof(cpu_text));
		if (one->state == NVML_SUCCESS && NVML(DeviceGetMemoryAffinity, one->handle, 2, nodes,
						       NVML_AFFINITY_SCOPE_NODE) == NVML_SUCCESS)
			ranges(nodes, 2 * 8 * sizeof(*nodes), node_text, sizeof(node_text));
		printf("\t%s\t%s\t\tN/A\n", *cpu_text != '\0' ? cpu_text : "N/A",
		       *node_text != '\0' ? node_text : "N/A");
	}
	printf(
	    "\nLegend:\n\n"
	    "  X    = Self\n"
	    "  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., "
	    "QPI/UPI)\n"
	    "  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges "
	    "within a NUMA "
	    "node\n"
	    "  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)\n"
	    "  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)\n"
	    "  PIX  = Connection traversing at most a single PCIe bridge\n"
	    "  NV#  = Connection traversing a bonded set of # NVLinks\n");
	return 0;
}
