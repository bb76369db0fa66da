# SPDX-License-Identifier: Apache-2.0
"""Memory as NVML tells it: both structures, their sum rules, version words; ECC and what it takes out of use."""

from __future__ import annotations


def test_sum_rules_of_both_structures(machine):
    """v1: total = used + free (the reserve counts as used); v2: total = reserved + used + free."""
    code = """
    first, second = nvmlDeviceGetMemoryInfo(card), nvmlDeviceGetMemoryInfo(card, version=nvmlMemory_v2)
    result = [first.total, first.used, first.free], [second.total, second.reserved, second.used, second.free]
    """
    first, second = machine({"profile": "A100-40"}).nvml(code)
    mib = 1 << 20
    assert first == [40960 * mib, 424 * mib, (40960 - 424) * mib]
    assert second == [40960 * mib, 424 * mib, 0, (40960 - 424) * mib]


def test_a_wrong_version_word_gives_the_drivers_code_and_writes_nothing(machine):
    code = """
    lib = ctypes.CDLL("libnvidia-ml.so.1")
    codes = []
    for version in (0, 1, 0x01000028, 0x02000020, 0x03000028, 0x02000028):
        memory = c_nvmlMemory_v2_t()
        memory.version, memory.total = version, 77
        codes.append((lib.nvmlDeviceGetMemoryInfo_v2(card, ctypes.byref(memory)), memory.total))
    result = codes
    """
    assert machine().nvml(code) == [[25, 77]] * 5 + [[0, 24 << 30]]


def test_cards_with_unified_memory_tell_no_size(machine):
    code = """
    result = error_of(nvmlDeviceGetMemoryInfo, card), error_of(nvmlDeviceGetMemoryInfo, card, version=nvmlMemory_v2)
    """
    assert machine({"memory_from_nvml": False, "integrated": True}).nvml(code) == ["NotSupported", "NotSupported"]


def test_bar1(machine):
    code = "bar = nvmlDeviceGetBAR1MemoryInfo(card); result = bar.bar1Total, bar.bar1Used + bar.bar1Free"
    total, both = machine().nvml(code)
    assert total == both == 32 << 30


def test_ecc_counts_follow_the_control_file_and_can_be_cleared(as_root, machine):
    code = """
    def counts():
        return [nvmlDeviceGetTotalEccErrors(card, kind, counter) for kind in (0, 1) for counter in (0, 1)]
    steps = [counts(), nvmlDeviceGetMemoryErrorCounter(card, 1, 0, NVML_MEMORY_LOCATION_DRAM)]
    nvmlDeviceClearEccErrorCounts(card, NVML_VOLATILE_ECC)
    steps.append(counts())
    result = steps
    """
    host = machine({"profile": "A100-40"})
    host.control(cards=[{"card": 0, "ecc_corrected": 5, "ecc_uncorrected": 2}])
    assert host.nvml(code) == [[5, 5, 2, 2], 2, [0, 5, 0, 2]]


def test_cards_without_ecc_have_none_of_it(machine):
    code = """
    result = [error_of(call, card) for call in (nvmlDeviceGetEccMode, nvmlDeviceGetRemappedRows,
        nvmlDeviceGetRetiredPagesPendingStatus)] + [error_of(nvmlDeviceGetTotalEccErrors, card, 0, 0)]
    """
    assert machine().nvml(code) == ["NotSupported"] * 4


def test_rows_are_remapped_since_ampere_and_pages_retired_before(machine):
    code = """
    rows = error_of(nvmlDeviceGetRemappedRows, card)
    pages = error_of(nvmlDeviceGetRetiredPages, card, NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR)
    result = rows, pages
    """
    assert machine({"profile": "A100-40"}).nvml(code) == ["Success", "NotSupported"]
    assert machine({"profile": "T4"}).nvml(code) == ["NotSupported", "Success"]


def test_counts_of_rows_and_pages(machine):
    host = machine({"profile": "A100-40"}, {"profile": "T4"})
    host.control(cards=[{"card": 0, "remapped_rows": 3}, {"card": 1, "retired_pages": 2}])
    code = """
    pages = nvmlDeviceGetRetiredPages_v2(cards[1], NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR)
    single = nvmlDeviceGetRetiredPages(cards[1], NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS)
    result = nvmlDeviceGetRemappedRows(cards[0]), len(pages), len(single)
    """
    assert host.nvml(code) == [[0, 3, 0, 0], 2, 0]
