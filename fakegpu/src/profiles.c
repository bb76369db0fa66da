/* SPDX-License-Identifier: Apache-2.0
 *
 * Figures of common models, from their data sheets and what nvidia-smi and deviceQuery print of them.
 *
 * Only a starting point: every key of a card overrides its profile. Reserved and context sizes are typical
 * values, since they differ a little from driver to driver.
 */
#include <stdio.h>
#include <string.h>

#include "config.h"

#define MIB(n)  ((uint64_t)(n) << 20)
#define PCI(id) ((uint32_t)(id) << 16 | 0x10deu)
enum { BRAND_TESLA = 2, BRAND_NVIDIA_RTX = 13, BRAND_NVIDIA = 14 };
enum { TURING = 6, AMPERE = 7, ADA = 8, HOPPER = 9, BLACKWELL = 10 };

static const struct profile {
	const char *profile, *name, *board_part, *vbios;
	uint32_t brand, architecture, device_id, subsystem_id;
	uint32_t memory_mib, reserved_mib, context_mib;
	uint32_t cc_major, cc_minor, sm_count, threads_per_sm, cores_per_sm, blocks_per_sm;
	uint32_t shared_per_sm_kib, shared_optin_kib, l2_mib;
	uint32_t bus_bits, memory_clock, sm_clock;
	uint32_t power_min_w, power_max_w, ecc, pcie_gen, mig_family, nvlink_version, nvlink_count;
} profiles[] = {
    {"Fake24G",
     "NVIDIA-Fake24G",
     "900-00000-0000-000",
     "00.00.00.00.24",
     BRAND_NVIDIA,
     AMPERE,
     0x2230,
     0x1459,
     24576,
     0,
     0,
     8,
     6,
     84,
     1536,
     128,
     16,
     100,
     99,
     6,
     384,
     9751,
     1695,
     100,
     350,
     0,
     4,
     FG_MIG_NONE,
     0,
     0},
    {"T4",
     "Tesla T4",
     "900-2G183-0000-001",
     "90.04.38.00.03",
     BRAND_TESLA,
     TURING,
     0x1eb8,
     0x12a2,
     15360,
     450,
     104,
     7,
     5,
     40,
     1024,
     64,
     16,
     64,
     64,
     4,
     256,
     5001,
     1590,
     60,
     70,
     1,
     3,
     FG_MIG_NONE,
     0,
     0},
    {"A30",
     "NVIDIA A30",
     "900-21001-0040-000",
     "92.00.66.00.05",
     BRAND_NVIDIA,
     AMPERE,
     0x20b7,
     0x1532,
     24576,
     404,
     366,
     8,
     0,
     56,
     2048,
     64,
     32,
     164,
     163,
     24,
     3072,
     1215,
     1440,
     100,
     165,
     1,
     4,
     FG_MIG_A30,
     3,
     4},
    {"A100-40",
     "NVIDIA A100-SXM4-40GB",
     "692-2G506-0200-002",
     "92.00.45.00.03",
     BRAND_NVIDIA,
     AMPERE,
     0x20b0,
     0x144e,
     40960,
     424,
     418,
     8,
     0,
     108,
     2048,
     64,
     32,
     164,
     163,
     40,
     5120,
     1215,
     1410,
     100,
     400,
     1,
     4,
     FG_MIG_A100_40,
     3,
     12},
    {"A100-80",
     "NVIDIA A100-SXM4-80GB",
     "692-2G506-0210-002",
     "92.00.95.00.01",
     BRAND_NVIDIA,
     AMPERE,
     0x20b2,
     0x147f,
     81920,
     639,
     418,
     8,
     0,
     108,
     2048,
     64,
     32,
     164,
     163,
     40,
     5120,
     1593,
     1410,
     100,
     400,
     1,
     4,
     FG_MIG_A100_80,
     3,
     12},
    {"H100",
     "NVIDIA H100 80GB HBM3",
     "692-2G520-0200-000",
     "96.00.99.00.01",
     BRAND_NVIDIA,
     HOPPER,
     0x2330,
     0x16c1,
     81559,
     476,
     530,
     9,
     0,
     132,
     2048,
     128,
     32,
     228,
     227,
     50,
     5120,
     2619,
     1980,
     200,
     700,
     1,
     5,
     FG_MIG_H100_80,
     4,
     18},
    {"H200",
     "NVIDIA H200",
     "692-2G520-0280-001",
     "96.00.af.00.01",
     BRAND_NVIDIA,
     HOPPER,
     0x2335,
     0x18be,
     143771,
     624,
     530,
     9,
     0,
     132,
     2048,
     128,
     32,
     228,
     227,
     60,
     6144,
     3201,
     1980,
     200,
     700,
     1,
     5,
     FG_MIG_H200,
     4,
     18},
    {"B200",
     "NVIDIA B200",
     "692-2G525-0220-000",
     "97.00.82.00.18",
     BRAND_NVIDIA,
     BLACKWELL,
     0x2901,
     0x1999,
     183359,
     712,
     590,
     10,
     0,
     148,
     2048,
     128,
     32,
     228,
     227,
     126,
     7680,
     3996,
     1965,
     200,
     1000,
     1,
     5,
     FG_MIG_B200,
     5,
     18},
    {"L40S",
     "NVIDIA L40S",
     "900-2G133-0080-000",
     "95.02.66.00.02",
     BRAND_NVIDIA,
     ADA,
     0x26b9,
     0x1851,
     46068,
     479,
     310,
     8,
     9,
     142,
     1536,
     128,
     24,
     100,
     99,
     96,
     384,
     9001,
     2520,
     100,
     350,
     1,
     4,
     FG_MIG_NONE,
     0,
     0},
    {"RTX-PRO-6000",
     "NVIDIA RTX PRO 6000 Blackwell Server Edition",
     "900-2G153-0000-000",
     "98.02.66.00.01",
     BRAND_NVIDIA_RTX,
     BLACKWELL,
     0x2bb5,
     0x204e,
     97887,
     638,
     520,
     12,
     0,
     188,
     1536,
     128,
     24,
     100,
     99,
     128,
     512,
     12481,
     2430,
     300,
     600,
     1,
     5,
     FG_MIG_RTX_PRO_6000,
     0,
     0},
};

const char *fg_profile_name(size_t index)
{
	return index < sizeof profiles / sizeof profiles[0] ? profiles[index].profile : NULL;
}

int fg_profile_apply(const char *profile, struct fg_card_config *card)
{
	const struct profile *from = NULL;

	for (size_t i = 0; i < sizeof profiles / sizeof profiles[0]; i++)
		if (strcmp(profiles[i].profile, profile) == 0)
			from = &profiles[i];
	if (from == NULL)
		return -1;
	memset(card, 0, sizeof *card);
	snprintf(card->name, sizeof card->name, "%s", from->name);
	snprintf(card->board_part, sizeof card->board_part, "%s", from->board_part);
	snprintf(card->vbios, sizeof card->vbios, "%s", from->vbios);
	card->brand = from->brand;
	card->architecture = from->architecture;
	card->pci_device_id = PCI(from->device_id);
	card->pci_subsystem_id = PCI(from->subsystem_id);
	card->memory_bytes = MIB(from->memory_mib);
	card->reserved_bytes = MIB(from->reserved_mib);
	card->context_bytes = MIB(from->context_mib);
	for (card->bar1_bytes = MIB(256); card->bar1_bytes < card->memory_bytes; card->bar1_bytes *= 2)
		;
	card->memory_from_nvml = 1;
	card->memory_bus_bits = from->bus_bits;
	card->memory_clock_mhz = from->memory_clock;
	card->sm_clock_mhz = from->sm_clock;
	card->cc_major = from->cc_major;
	card->cc_minor = from->cc_minor;
	card->sm_count = from->sm_count;
	card->threads_per_sm = from->threads_per_sm;
	card->cores_per_sm = from->cores_per_sm;
	card->blocks_per_sm = from->blocks_per_sm;
	card->shared_per_sm = from->shared_per_sm_kib << 10;
	card->shared_per_block_optin = from->shared_optin_kib << 10;
	card->l2_bytes = MIB(from->l2_mib);
	card->power_min_mw = from->power_min_w * 1000;
	card->power_default_mw = card->power_max_mw = from->power_max_w * 1000;
	card->ecc_capable = card->ecc_enabled = from->ecc;
	card->pcie_gen = from->pcie_gen;
	card->pcie_width = 16;
	card->persistence = 1;
	card->mig_family = from->mig_family;
	card->nvlink_version = from->nvlink_version;
	card->nvlink_count = from->nvlink_count;
	for (unsigned i = 0; i < FG_MAX_NVLINKS; i++)
		card->nvlink[i] = (struct fg_nvlink){FG_LINK_NONE, FG_LINK_NONE};
	return 0;
}
