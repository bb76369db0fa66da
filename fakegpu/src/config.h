/* SPDX-License-Identifier: Apache-2.0
 *
 * What a machine looks like: the cards and the driver, as the JSON file says.
 *
 * Parsed once, by the process that creates the state, into the plain structs below; they stand in the shared
 * state and never change while it lives. Never holds a pointer, so every process reads them where it mapped
 * them. Invariant: a file that is not understood to the last key changes nothing and is answered with one
 * line that names the key; there is no silent default for a misspelt one.
 *
 * The keys, their units and defaults stand in fakegpu/README.md and fakegpu/CUDA.md.
 */
#ifndef FAKEGPU_CONFIG_H
#define FAKEGPU_CONFIG_H

#include <stddef.h>
#include <stdint.h>

#define FG_NAME_LEN      96u
#define FG_UUID_TEXT_LEN 48u /* "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx" and "MIG-…", NUL-terminated */
#define FG_VERSION_LEN   32u
#define FG_MAX_NVLINKS   18u
#define FG_LINK_NONE     0xffffffffu /* link not connected */
#define FG_LINK_SWITCH   0xfffffffeu /* link ends in an NVSwitch */

enum fg_mig_family { /* which table of MIG profiles a model has */
		     FG_MIG_NONE = 0,
		     FG_MIG_A30,
		     FG_MIG_A100_40,
		     FG_MIG_A100_80,
		     FG_MIG_H100_80,
		     FG_MIG_H100_96,
		     FG_MIG_H200,
		     FG_MIG_B200,
		     FG_MIG_RTX_PRO_6000,
};

enum fg_p2p_policy {
	FG_P2P_ALL = 0, /* every pair under one root complex, and every NVLink pair */
	FG_P2P_NVLINK = 1, /* only pairs joined by NVLink */
	FG_P2P_NONE = 2,
};

/* How far apart two cards are; the numbers are nvmlGpuTopologyLevel_t's. */
enum fg_topology {
	FG_TOPOLOGY_INTERNAL = 0,
	FG_TOPOLOGY_SINGLE = 10,
	FG_TOPOLOGY_MULTIPLE = 20,
	FG_TOPOLOGY_HOSTBRIDGE = 30,
	FG_TOPOLOGY_NODE = 40,
	FG_TOPOLOGY_SYSTEM = 50,
};

struct fg_nvlink {
	uint32_t remote_card; /* index, FG_LINK_NONE or FG_LINK_SWITCH */
	uint32_t remote_link;
};

struct fg_card_config {
	char name[FG_NAME_LEN];
	char uuid_text[FG_UUID_TEXT_LEN];
	uint8_t uuid[16];
	char serial[24];
	char board_part[24];
	char vbios[24];
	uint32_t brand; /* nvmlBrandType_t */
	uint32_t architecture; /* NVML_DEVICE_ARCH_* */
	uint32_t minor; /* N of /dev/nvidiaN; need not be the index */
	int32_t numa; /* -1: none */
	uint32_t pci_domain, pci_bus, pci_device;
	uint32_t pci_device_id; /* device << 16 | vendor 0x10de */
	uint32_t pci_subsystem_id; /* the same way */
	uint32_t root_complex; /* equal = same CPU socket's bridge */
	uint32_t pcie_switch; /* equal and root_complex equal = under one switch; 0 = none */
	uint32_t pcie_gen, pcie_width;

	uint64_t memory_bytes; /* NVML's total */
	uint64_t reserved_bytes; /* part of it that the driver keeps; CUDA's total is the difference */
	uint64_t context_bytes; /* charged once per process while it has a context here */
	uint64_t bar1_bytes;
	uint32_t memory_from_nvml; /* 0: NVML answers NOT_SUPPORTED for memory (unified memory boards) */
	uint32_t memory_bus_bits;
	uint32_t memory_clock_mhz, sm_clock_mhz;

	uint32_t cc_major, cc_minor;
	uint32_t sm_count;
	uint32_t threads_per_sm;
	uint32_t cores_per_sm;
	uint32_t blocks_per_sm;
	uint32_t shared_per_sm, shared_per_block_optin;
	uint64_t l2_bytes;
	uint32_t integrated;

	uint32_t power_min_mw, power_default_mw, power_max_mw;
	uint32_t ecc_capable, ecc_enabled;
	uint32_t display_active;
	uint32_t compute_mode; /* CUcomputemode: 0 default, 2 prohibited, 3 exclusive process */
	uint32_t persistence;

	uint32_t mig_family; /* enum fg_mig_family */
	uint32_t mig_enabled; /* at start */

	uint32_t nvlink_version; /* 0: the card has no NVLink */
	uint32_t nvlink_count;
	struct fg_nvlink nvlink[FG_MAX_NVLINKS];
};

struct fg_driver_config {
	char driver_version[FG_VERSION_LEN]; /* "580.82.07" */
	char nvml_version[FG_VERSION_LEN]; /* "13.580.82.07" */
	uint32_t cuda_version; /* 13000 */
	uint32_t p2p_policy; /* enum fg_p2p_policy */
	uint64_t launch_ns; /* duration of a kernel whose name and environment say nothing */
	uint64_t time_slice_ns; /* a process is put aside for another after this; 0: never */
	uint64_t copy_bytes_per_second; /* 0: copies take no time */
	uint64_t context_create_ns; /* how long cuCtxCreate takes; 0: no time */
	uint64_t alloc_ns; /* how long an allocation or a free takes; 0: no time */
	uint32_t queue_depth; /* launches one process may have outstanding on one card */
	uint32_t fork_refused; /* a child of a process that used CUDA cannot; 0: it starts afresh */
	uint64_t plain_round; /* cuMemAlloc and arrays are rounded to this, 512 */
	uint64_t pitch_align; /* 512 */
	uint64_t vmm_granularity; /* 2 MiB */
	uint64_t pool_grow_bytes; /* a pool takes this much at a time, 32 MiB */
	uint64_t managed_page; /* managed memory comes to the card and leaves it in these, 64 KiB */
};

/* A parsed file. `card` has `card_count` entries and is allocated with malloc; fg_config_free releases it. */
struct fg_config {
	struct fg_driver_config driver;
	uint32_t card_count;
	struct fg_card_config *card;
};

/* Parses `text`. Returns 0, or -1 with one sentence in `error` (what, where, what is allowed). */
int fg_config_parse(const char *text, size_t length, struct fg_config *config, char *error,
		    size_t error_size);
void fg_config_free(struct fg_config *config);

/* Fills `card` with the figures of a model ("A100-80", "T4", …); -1 when there is no such profile. */
int fg_profile_apply(const char *profile, struct fg_card_config *card);
/* Names of the profiles, in order, NULL after the last. */
const char *fg_profile_name(size_t index);

#endif
