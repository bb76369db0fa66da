# SPDX-License-Identifier: Apache-2.0
"""Who a card is, how it is found, and which of the machine's cards a process sees."""

from __future__ import annotations

import pytest


def test_identity_of_a_card(machine):
    code = """
    pci, ext = nvmlDeviceGetPciInfo(card), nvmlPciInfoExt_v1_t()
    ext.version = nvmlPciInfoExt_v1
    nvmlDeviceGetPciInfoExt(card, ctypes.byref(ext))
    result = {
        "name": nvmlDeviceGetName(card), "uuid": nvmlDeviceGetUUID(card), "serial": nvmlDeviceGetSerial(card),
        "minor": nvmlDeviceGetMinorNumber(card), "index": nvmlDeviceGetIndex(card), "brand": nvmlDeviceGetBrand(card),
        "arch": nvmlDeviceGetArchitecture(card), "cc": nvmlDeviceGetCudaComputeCapability(card),
        "cores": nvmlDeviceGetNumGpuCores(card), "bus": pci.busId, "legacy": pci.busIdLegacy, "id": pci.pciDeviceId,
        "ext": ext.busId, "bits": nvmlDeviceGetMemoryBusWidth(card),
        "board": nvmlDeviceGetBoardPartNumber(card), "vbios": nvmlDeviceGetVbiosVersion(card),
    }
    """
    card = {
        "profile": "A100-40",
        "uuid": "GPU-00000000-1111-2222-3333-444444444444",
        "serial": "123",
        "minor": 5,
        "pci": "00000001:3b:04.0",
    }
    assert machine(card).nvml(code) == {
        "name": "NVIDIA A100-SXM4-40GB",
        "uuid": "GPU-00000000-1111-2222-3333-444444444444",
        "serial": "123",
        "minor": 5,
        "index": 0,
        "brand": 14,
        "arch": 7,
        "cc": [8, 0],
        "cores": 108 * 64,
        "bus": "00000001:3B:04.0",
        "legacy": "0001:3B:04.0",
        "id": 0x20B010DE,
        "ext": "00000001:3B:04.0",
        "bits": 5120,
        "board": "692-2G506-0200-002",
        "vbios": "92.00.45.00.03",
    }


def test_uuids_come_from_the_seed_and_nothing_else(machine):
    code = "result = [nvmlDeviceGetUUID(c) for c in cards]"
    first, same, other = (machine({"count": 3}, seed=seed).nvml(code) for seed in ("node-a", "node-a", "node-b"))
    assert first == same
    assert len({*first, *other}) == 6


def test_a_card_is_found_by_uuid_serial_and_bus_id(machine):
    code = """
    wanted = cards[1]
    bus = nvmlDeviceGetPciInfo(wanted).busId
    handles = [
        nvmlDeviceGetHandleByUUID(nvmlDeviceGetUUID(wanted)), nvmlDeviceGetHandleBySerial(nvmlDeviceGetSerial(wanted)),
        nvmlDeviceGetHandleByPciBusId(bus), nvmlDeviceGetHandleByPciBusId(bus.lower()[4:]),
        nvmlDeviceGetHandleByPciBusId(bus[9:]),
    ]
    result = [nvmlDeviceGetIndex(h) for h in handles], [
        error_of(nvmlDeviceGetHandleByUUID, "GPU-none"), error_of(nvmlDeviceGetHandleBySerial, "none"),
        error_of(nvmlDeviceGetHandleByPciBusId, "00000000:7f:00.0"), error_of(nvmlDeviceGetHandleByPciBusId, "7f"),
        error_of(nvmlDeviceGetHandleByPciBusId, bus + "0"),
    ]
    """
    found, missed = machine({"count": 3}).nvml(code)
    assert found == [1] * 5
    assert missed == ["NotFound", "NotFound", "NotFound", "InvalidArgument", "InvalidArgument"]


def test_superseded_forms_write_no_more_than_their_callers_have(machine):
    """nvmlDeviceGetPciInfo was 16 bytes and four words, its _v2 five words more; NvLinkRemotePciInfo the same."""
    code = """
    lib = ctypes.CDLL("libnvidia-ml.so.1")
    def written(function, *arguments):
        buffer = (ctypes.c_ubyte * 256)(*[0xaa] * 256)
        code = lib[function](card, *arguments, buffer)
        return code, max(i for i, byte in enumerate(buffer) if byte != 0xaa) + 1, bytes(buffer[:12])
    result = [
        written("nvmlDeviceGetPciInfo"), written("nvmlDeviceGetPciInfo_v2"), written("nvmlDeviceGetPciInfo_v3"),
        written("nvmlDeviceGetNvLinkRemotePciInfo", 0), written("nvmlDeviceGetNvLinkRemotePciInfo_v2", 0),
    ]
    """
    host = machine({"profile": "A100-40", "count": 2}, links=[{"cards": [0, 1], "count": 2}])
    assert host.nvml(code) == [
        [0, 32, "0000:01:00.0"],
        [0, 52, "0000:01:00.0"],
        [0, 68, "0000:01:00.0"],
        [0, 32, "0000:02:00.0"],
        [0, 68, "0000:02:00.0"],
    ]


def test_text_that_does_not_fit_says_so(machine):
    code = """
    lib = ctypes.CDLL("libnvidia-ml.so.1")
    buffer = ctypes.create_string_buffer(b"x" * 10)
    result = lib.nvmlDeviceGetName(card, buffer, 5), buffer.raw[5:7], lib.nvmlDeviceGetName(card, None, 5)
    """
    assert machine().nvml(code) == [7, "xx", 2]


def test_versions_of_driver_and_library(machine):
    code = "result = nvmlSystemGetDriverVersion(), nvmlSystemGetNVMLVersion(), nvmlSystemGetCudaDriverVersion()"
    assert machine().nvml(code) == ["580.65.06", "13.580.65.06", 13000]
    assert machine(driver_version="590.1.2", cuda_version=13010).nvml(code) == ["590.1.2", "13.590.1.2", 13010]
    assert machine(flavour="525").nvml(code) == ["525.147.05", "12.525.147.05", 12000]


# ---- visibility -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listed", "minors"),
    [("0,2", [0, 2]), ("2,0", [0, 2]), ("all", [0, 1, 2]), ("none", []), ("", []), ("1,1,7", [1]), ("GPU-", [])],
)
def test_visible_by_a_list_of_indices(machine, listed, minors):
    code = "result = [nvmlDeviceGetMinorNumber(c) for c in cards]"
    assert machine({"count": 3}).nvml(code, FAKEGPU_VISIBLE_DEVICES=listed) == minors


def test_visible_by_uuid_and_numbered_anew(machine):
    host = machine({"count": 3})
    uuid = host.nvml("result = nvmlDeviceGetUUID(cards[2])")
    code = "result = [(nvmlDeviceGetIndex(c), nvmlDeviceGetMinorNumber(c)) for c in cards]"
    assert host.nvml(code, FAKEGPU_VISIBLE_DEVICES=uuid) == [[0, 2]]
    assert host.nvml(code, FAKEGPU_VISIBLE_DEVICES=uuid[:12]) == [[0, 2]]


def test_visible_by_device_nodes(machine):
    """Links to /dev/null stand for the nodes, as they do where mknod is not allowed."""
    host = machine({"count": 3, "minor": 4})
    dev = host.config.parent / "dev"
    dev.mkdir()
    code = "result = [nvmlDeviceGetMinorNumber(c) for c in cards]"
    assert host.nvml(code) == [4, 5, 6]
    (dev / "nvidia5").symlink_to("/dev/null")
    assert host.nvml(code) == [5]
    (dev / "nvidia6").write_text("no device node")
    assert host.nvml(code) == [5]
    (dev / "nvidia4").symlink_to("/dev/null")
    assert host.nvml(code) == [4, 5]
    assert host.nvml(code, FAKEGPU_VISIBLE_DEVICES="all") == [4, 5, 6]


def test_hidden_cards_are_found_by_nothing(machine):
    host = machine({"count": 2})
    uuid, bus = host.nvml("result = nvmlDeviceGetUUID(cards[1]), nvmlDeviceGetPciInfo(cards[1]).busId")
    code = f"result = error_of(nvmlDeviceGetHandleByUUID, '{uuid}'), error_of(nvmlDeviceGetHandleByPciBusId, '{bus}')"
    assert host.nvml(code, FAKEGPU_VISIBLE_DEVICES="0") == ["NotFound", "NotFound"]
