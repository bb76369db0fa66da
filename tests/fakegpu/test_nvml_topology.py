# SPDX-License-Identifier: Apache-2.0
"""Where cards sit: PCIe distance, CPUs and memory near them, NVLink, peer access."""

from __future__ import annotations

import os

import pytest

CARDS = [
    {"profile": "A100-40", "numa": 0, "root_complex": 0, "pcie_switch": 1, "count": 2},
    {"profile": "A100-40", "numa": 0, "root_complex": 0, "pcie_switch": 2},
    {"profile": "A100-40", "numa": 0, "root_complex": 1},
    {"profile": "A100-40", "numa": 1, "root_complex": 2},
]


def test_distance_is_symmetric_and_as_configured(machine):
    code = """
    result = [[nvmlDeviceGetTopologyCommonAncestor(a, b) for b in cards] for a in cards]
    """
    matrix = machine(*CARDS).nvml(code)
    assert matrix[0] == [0, 10, 30, 40, 50]
    assert all(matrix[i][j] == matrix[j][i] for i in range(5) for j in range(5))


def test_nearest_cards_of_a_level(machine):
    code = """
    near = [nvmlDeviceGetTopologyNearestGpus(card, level) for level in (10, 30, 40, 50)]
    result = [[nvmlDeviceGetIndex(d) for d in devices] for devices in near]
    """
    assert machine(*CARDS).nvml(code) == [[1], [2], [3], [4]]


def test_cpus_and_memory_near_a_card(machine):
    code = """
    words = (os.cpu_count() + 63) // 64
    cpus = [[int(w) for w in nvmlDeviceGetCpuAffinity(c, words)] for c in cards]
    memory = [[int(w) for w in nvmlDeviceGetMemoryAffinity(c, 1, NVML_AFFINITY_SCOPE_NODE)] for c in cards]
    by_cpu = [[nvmlDeviceGetIndex(d) for d in nvmlSystemGetTopologyGpuSet(cpu)] for cpu in (0, os.cpu_count() - 1)]
    nodes, refused = [nvmlDeviceGetNumaNodeId(c) for c in cards], error_of(nvmlDeviceGetCpuAffinity, card, 0)
    result = cpus, memory, by_cpu, nodes, refused
    """
    cpus, memory, by_cpu, nodes, refused = machine({"numa": 0}, {"numa": 1}).nvml(code)
    count = os.cpu_count() or 1
    everything = [sum(1 << bit for bit in range(64) if word * 64 + bit < count) for word in range(len(cpus[0]))]
    if count >= 2:
        assert [a & b for a, b in zip(*cpus, strict=True)] == [0] * len(everything)
        assert [a | b for a, b in zip(*cpus, strict=True)] == everything
        assert by_cpu == [[0], [1]]
    assert memory == [[1], [2]]
    assert nodes == [0, 1]
    assert refused == "InvalidArgument"


def test_a_card_without_numa_is_near_every_cpu(machine):
    code = """
    words = (os.cpu_count() + 63) // 64
    near = sum(bin(word).count("1") for word in nvmlDeviceGetCpuAffinity(card, words))
    result = near, error_of(nvmlDeviceGetNumaNodeId, card)
    """
    assert machine({"numa": -1}, {"numa": 1}).nvml(code) == [os.cpu_count(), "NotSupported"]


# ---- NVLink ---------------------------------------------------------------------------------------------

LINKS = """
def links(c):
    found = []
    for link in range(NVML_NVLINK_MAX_LINKS):
        try:
            if nvmlDeviceGetNvLinkState(c, link):
                remote = nvmlDeviceGetNvLinkRemotePciInfo(c, link).busId
                found.append([link, remote, nvmlDeviceGetNvLinkRemoteDeviceType(c, link)])
        except NVMLError:
            break
    return found
"""


def test_links_are_symmetric(machine):
    host = machine(
        {"profile": "A100-40", "count": 3}, links=[{"cards": [0, 1], "count": 4}, {"cards": [1, 2], "count": 8}]
    )
    code = (
        LINKS
        + """
buses = [nvmlDeviceGetPciInfo(c).busId for c in cards]
result = [[sum(remote == bus for _, remote, _ in links(c)) for bus in buses] for c in cards]
"""
    )
    assert host.nvml(code) == [[0, 4, 0], [4, 0, 8], [0, 8, 0]]


def test_links_to_a_switch(machine):
    host = machine({"profile": "H100", "count": 2}, links=[{"cards": [0, 1], "switch": True}])
    code = (
        LINKS
        + """
found = [links(c) for c in cards]
fields = nvmlDeviceGetFieldValues(card, [NVML_FI_DEV_NVLINK_LINK_COUNT, NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT])
result = [len(f) for f in found], {kind for f in found for _, _, kind in f} == {NVML_NVLINK_DEVICE_TYPE_SWITCH}, [
    f.value.uiVal for f in fields], nvmlDeviceGetP2PStatus(*cards, 2)
"""
    )
    assert host.nvml(code) == [[18, 18], True, [18, 18], 0]


def test_a_link_goes_down_with_the_card_at_its_end(machine):
    host = machine({"profile": "A100-40", "count": 2}, links=[{"cards": [0, 1], "count": 2}])
    host.control(cards=[{"card": 1, "lost": True}])
    code = """
    nvmlInit()
    card = nvmlDeviceGetHandleByIndex(0)
    beyond = error_of(nvmlDeviceGetNvLinkState, card, 12)
    result = nvmlDeviceGetNvLinkState(card, 0), nvmlDeviceGetNvLinkState(card, 5), beyond
    """
    assert host.python(code) == [0, 0, "InvalidArgument"]


def test_cards_without_nvlink(machine):
    code = "result = error_of(nvmlDeviceGetNvLinkState, card, 0), nvmlDeviceGetFieldValues(card, [91])[0].value.uiVal"
    assert machine().nvml(code) == ["NotSupported", 0]


@pytest.mark.parametrize(
    ("policy", "same_socket", "other_socket", "joined"),
    [("all", "OK", "not", "OK"), ("nvlink", "not", "not", "OK"), ("none", "not", "not", "not")],
)
def test_peer_access_by_policy(machine, policy, same_socket, other_socket, joined):
    host = machine(
        {"profile": "A100-40", "numa": 0, "count": 3},
        {"profile": "A100-40", "numa": 1, "root_complex": 1},
        p2p=policy,
        links=[{"cards": [0, 2], "count": 1}],
    )
    code = """
    def ok(other, index):
        return "OK" if nvmlDeviceGetP2PStatus(card, other, index) == NVML_P2P_STATUS_OK else "not"
    reads = [ok(c, 0) for c in (cards[1], cards[3], cards[2])]
    links = [ok(c, 2) for c in (cards[1], cards[2])]
    wrong = [error_of(nvmlDeviceGetP2PStatus, card, other, index) for other, index in ((card, 0), (cards[1], 9))]
    result = reads, links, *wrong
    """
    reads, links, same, beyond = host.nvml(code)
    assert reads == [same_socket, other_socket, joined]
    assert links == ["not", joined]
    assert [same, beyond] == ["InvalidArgument", "InvalidArgument"]


def test_pcie_link(machine):
    code = """
    result = [nvmlDeviceGetMaxPcieLinkGeneration(card), nvmlDeviceGetCurrPcieLinkGeneration(card),
        nvmlDeviceGetMaxPcieLinkWidth(card), nvmlDeviceGetPcieReplayCounter(card),
        error_of(nvmlDeviceGetPcieThroughput, card, 2)]
    """
    assert machine({"pcie_gen": 5, "pcie_width": 8}).nvml(code) == [5, 1, 8, 0, "InvalidArgument"]
