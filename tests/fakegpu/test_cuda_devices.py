# SPDX-License-Identifier: Apache-2.0
"""Devices, contexts and versions of the fake libcuda, as a program that uses ctypes sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

PRELUDE = "from cuda_client import *\n"
GA, GB = "GPU-aaaaaaaa-0000-4000-8000-00000000000a", "GPU-bbbbbbbb-0000-4000-8000-00000000000b"
LIST = """
code = cu.cuInit(0)
found = []
count = c_int()
if code == 0:
    expect(cu.cuDeviceGetCount(byref(count)))
for i in range(count.value):
    uuid = ctypes.create_string_buffer(16)
    expect(cu.cuDeviceGetUuid_v2(uuid, i))
    found.append(uuid.raw.hex())
result = [code, found]
"""


def listed(machine: Any, **env: str) -> tuple[int, list[str]]:
    """Code of cuInit, and the first letters of the UUIDs of what is visible."""
    code, found = machine.python(PRELUDE + LIST, **env)
    return code, [uuid[:2] for uuid in found]


@pytest.fixture
def four(cuda_machine: Callable[..., Any]) -> Any:
    """Cards aa, bb, cc, dd; cc is the fastest."""
    cards = [
        {"uuid": f"GPU-{letter * 8}-0000-4000-8000-00000000000{letter}", "sm_count": 90 if letter == "c" else 84}
        for letter in "abcd"
    ]
    return cuda_machine(*cards)


def test_every_call_before_init_is_refused(cuda_machine: Callable[..., Any]) -> None:
    code = """
    count, free = c_int(), c_size_t()
    result = [cu.cuDeviceGetCount(byref(count)), cu.cuMemGetInfo_v2(byref(free), None), cu.cuCtxSynchronize()]
    """
    assert cuda_machine().python(PRELUDE + "\n".join(line.strip() for line in code.splitlines())) == [3, 3, 3]


def test_init_takes_no_flags(cuda_machine: Callable[..., Any]) -> None:
    assert cuda_machine().python(PRELUDE + "result = [cu.cuInit(1), cu.cuInit(0), cu.cuInit(0)]") == [1, 0, 0]


def test_without_a_configuration_there_is_no_device(cuda_machine: Callable[..., Any]) -> None:
    machine = cuda_machine()
    machine.config.unlink()
    assert machine.python(PRELUDE + "result = cu.cuInit(0)") == 100


def test_the_fastest_card_comes_first_and_the_rest_as_on_the_bus(four: Any) -> None:
    assert listed(four) == (0, ["cc", "aa", "bb", "dd"])
    assert listed(four, CUDA_DEVICE_ORDER="PCI_BUS_ID") == (0, ["aa", "bb", "cc", "dd"])


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        ("2,0", ["cc", "aa"]),
        ("1", ["bb"]),
        (" 1 , 3 ", ["bb", "dd"]),
        ("3,9,0", ["dd"]),  # the list ends at the first word that names nothing
        ("0,-1,1", ["aa"]),
        ("GPU-bb", ["bb"]),  # the beginning of a UUID is enough
        (f"{GB},{GA}", ["bb", "aa"]),
        ("gpu-BBBB", ["bb"]),
        ("0,GPU-dddd,1", ["aa", "dd", "bb"]),
        ("0,x,1", ["aa"]),
        ("1,1", None),  # a device that stands there twice leaves none
        ("", None),
        ("GPU-", None),
        ("NoDevFiles", None),
    ],
)
def test_visible_devices(four: Any, value: str, seen: list[str] | None) -> None:
    wanted = (0, seen) if seen is not None else (100, [])
    assert listed(four, CUDA_VISIBLE_DEVICES=value, CUDA_DEVICE_ORDER="PCI_BUS_ID") == wanted


def test_device_nodes_decide_what_is_there_and_the_list_counts_among_those(cuda_machine: Callable[..., Any]) -> None:
    machine = cuda_machine({"count": 3, "minor": 4})
    code = """
count, uuids = c_int(), []
code = cu.cuInit(0)
if code == 0:
    expect(cu.cuDeviceGetCount(byref(count)))
for index in range(count.value):
    uuid = ctypes.create_string_buffer(16)
    expect(cu.cuDeviceGetUuid(uuid, index))
    uuids.append(uuid.raw.hex())
result = [code, uuids]
"""
    nodes = machine.config.parent / "dev"
    nodes.mkdir()
    whole = machine.python(PRELUDE + code)[1]
    assert len(set(whole)) == 3  # no node at all: a plain program on the host
    (nodes / "nvidia5").symlink_to("/dev/null")
    (nodes / "nvidia6").symlink_to("/dev/null")
    assert machine.python(PRELUDE + code) == [0, whole[1:]]
    assert machine.python(PRELUDE + code, CUDA_VISIBLE_DEVICES="1") == [0, whole[2:]]
    assert machine.python(PRELUDE + code, CUDA_VISIBLE_DEVICES="2") == [100, []]
    assert machine.python(PRELUDE + code, FAKEGPU_VISIBLE_DEVICES="0") == [0, whole[:1]]


def test_a_uuid_beginning_that_two_cards_have_names_none(cuda_machine: Callable[..., Any]) -> None:
    machine = cuda_machine(*({"uuid": f"GPU-aaaaaaaa-0000-4000-8000-00000000000{i}"} for i in range(2)))
    assert listed(machine, CUDA_VISIBLE_DEVICES="GPU-aaaaaaaa")[0] == 100
    assert listed(machine, CUDA_VISIBLE_DEVICES="GPU-aaaaaaaa-0000-4000-8000-000000000001") == (0, ["aa"])


def test_what_a_device_says_of_itself(cuda_machine: Callable[..., Any]) -> None:
    machine = cuda_machine(
        {"profile": "H100", "pci": "0001:3b:00.0", "reserved_bytes": "1GiB", "memory_bytes": "80GiB"}
    )
    found = machine.python(
        PRELUDE
        + """
expect(cu.cuInit(0))
name, bus, total, device = ctypes.create_string_buffer(96), ctypes.create_string_buffer(20), c_size_t(), c_int()
narrow = c_uint()
expect(cu.cuDeviceGetName(name, 96, 0))
expect(cu.cuDeviceGetPCIBusId(bus, 20, 0))
expect(cu.cuDeviceTotalMem_v2(byref(total), 0))
expect(cu.cuDeviceTotalMem(byref(narrow), 0))
expect(cu.cuDeviceGetByPCIBusId(byref(device), bus.value))
result = {"name": name.value.decode(), "bus": bus.value.decode(), "total": total.value, "narrow": narrow.value,
          "found": device.value, "sms": attribute(16), "major": attribute(75), "minor": attribute(76),
          "threads": attribute(39), "cluster": attribute(120), "bad": cu.cuDeviceGetName(name, 96, 7)}
"""
    )
    assert found == {
        "name": "NVIDIA H100 80GB HBM3",
        "bus": "0001:3b:00.0",
        "total": 79 << 30,
        "narrow": 0xFFFFFFFF,  # the first form has 32 bits
        "found": 0,
        "sms": 132,
        "major": 9,
        "minor": 0,
        "threads": 2048,
        "cluster": 1,
        "bad": 101,
    }


def test_old_flavours_are_as_old_as_they_say(cuda_machine: Callable[..., Any]) -> None:
    code = PRELUDE + "version = c_int()\nexpect(cu.cuDriverGetVersion(byref(version)))\nresult = version.value"
    found = [cuda_machine(flavour=flavour).python(code) for flavour in ("470", "525", "550", "580")]
    assert found == [11040, 12000, 12040, 13000]
    assert cuda_machine(cuda_version=12080).python(code) == 12080


CONTEXTS = """
expect(cu.cuInit(0))
result = {}
a, b, top, version = c_void_p(), c_void_p(), c_void_p(), c_uint()
expect(cu.cuCtxCreate_v2(byref(a), 0, 0))
expect(cu.cuCtxCreate_v4(byref(b), None, 0, 1))
expect(cu.cuCtxGetCurrent(byref(top)))
result["newest on top"] = top.value == b.value
device = c_int()
expect(cu.cuCtxGetDevice(byref(device)))
result["device"] = device.value
expect(cu.cuCtxPopCurrent_v2(byref(top)))
expect(cu.cuCtxGetCurrent(byref(top)))
result["below"] = top.value == a.value
expect(cu.cuCtxGetApiVersion(a, byref(version)))
result["api"] = version.value
result["destroy"] = cu.cuCtxDestroy_v2(b)
result["destroy again"] = cu.cuCtxDestroy_v2(b)
result["push destroyed"] = cu.cuCtxPushCurrent_v2(b)
result["set none"] = cu.cuCtxSetCurrent(None)
result["no context"] = [cu.cuCtxSynchronize(), cu.cuCtxGetDevice(byref(device)), cu.cuCtxPopCurrent_v2(byref(top))]
address = c_uint64()
result["alloc without"] = cu.cuMemAlloc_v2(byref(address), 10)
result["nonsense"] = cu.cuCtxSetCurrent(c_void_p(0x1234))
"""


def test_the_stack_of_contexts(cuda_machine: Callable[..., Any]) -> None:
    found = cuda_machine({}, {}).python(PRELUDE + CONTEXTS)
    assert found == {
        "newest on top": True,
        "device": 1,
        "below": True,
        "api": 3020,
        "destroy": 0,
        "destroy again": 201,
        "push destroyed": 201,
        "set none": 0,
        "no context": [201, 201, 201],
        "alloc without": 201,
        "nonsense": 201,
    }


def test_context_memory_is_charged_once_a_process(cuda_machine: Callable[..., Any]) -> None:
    """However many contexts it has, of whatever kind, and given back with the last."""
    found = cuda_machine({"context_bytes": "300MiB"}).python(
        PRELUDE
        + """
first = start()
after = [used() >> 20]
second, primary = c_void_p(), c_void_p()
expect(cu.cuCtxCreate_v3(byref(second), None, 0, 0, 0))
expect(cu.cuDevicePrimaryCtxRetain(byref(primary), 0))
after.append(used() >> 20)
expect(cu.cuCtxDestroy_v2(second))
expect(cu.cuCtxDestroy_v2(first))
expect(cu.cuCtxSetCurrent(primary))
after.append(used() >> 20)
expect(cu.cuDevicePrimaryCtxRelease_v2(0))
start()
after.append(used() >> 20)
result = after
"""
    )
    assert found == [300, 300, 300, 300]


def test_a_context_that_does_not_fit_is_refused(cuda_machine: Callable[..., Any]) -> None:
    found = cuda_machine({"memory_bytes": "1GiB", "context_bytes": "2GiB"}).python(
        PRELUDE + "expect(cu.cuInit(0))\ncontext = c_void_p()\nresult = cu.cuCtxCreate_v2(byref(context), 0, 0)"
    )
    assert found == 2


def test_what_a_context_held_goes_with_it(cuda_machine: Callable[..., Any]) -> None:
    found = cuda_machine().python(
        PRELUDE
        + """
keep = start()
other = start()
alloc(100 * MIB)
before = used()
current = c_void_p()
expect(cu.cuCtxDestroy_v2(other))
expect(cu.cuCtxGetCurrent(byref(current)))
result = [before >> 20, used() >> 20, current.value == keep.value]
"""
    )
    assert found == [100, 0, True]


def test_another_thread_learns_that_its_context_was_destroyed(cuda_machine: Callable[..., Any]) -> None:
    found = cuda_machine().python(
        PRELUDE
        + """
import threading
context = start()
ready, gone, said = threading.Event(), threading.Event(), []
def other():
    expect(cu.cuCtxSetCurrent(context))
    ready.set()
    gone.wait(10)
    said.append(cu.cuCtxSynchronize())
thread = threading.Thread(target=other)
thread.start()
ready.wait(10)
expect(cu.cuCtxDestroy_v2(context))
gone.set()
thread.join(10)
result = said
"""
    )
    assert found == [709]


def test_compute_modes(cuda_machine: Callable[..., Any]) -> None:
    code = PRELUDE + "expect(cu.cuInit(0))\ncontext = c_void_p()\nresult = cu.cuCtxCreate_v2(byref(context), 0, 0)"
    assert cuda_machine({"compute_mode": "prohibited"}).python(code) == 46
    machine = cuda_machine({"compute_mode": "exclusive"})
    with machine.start(PRELUDE + "start()\nprint('ready', flush=True)\nsys.stdin.readline()") as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        assert machine.python(code) == 46
        holder.communicate("\n", timeout=30)
    assert machine.python(code) == 0


def test_peers_follow_the_topology(cuda_machine: Callable[..., Any]) -> None:
    code = PRELUDE + (
        "expect(cu.cuInit(0))\nanswer = c_int()\nresult = []\n"
        "for a in range(3):\n    for b in range(3):\n"
        "        expect(cu.cuDeviceCanAccessPeer(byref(answer), a, b))\n        result.append(answer.value)"
    )
    cards = [{"profile": "A100-40", "numa": numa, "root_complex": numa} for numa in (0, 0, 1)]
    assert cuda_machine(*cards).python(code) == [0, 1, 0, 1, 0, 0, 0, 0, 0]
    linked = cuda_machine(*cards, links=[{"cards": [0, 2], "count": 4}], p2p="nvlink")
    assert linked.python(code) == [0, 0, 1, 0, 0, 0, 1, 0, 0]
    assert cuda_machine(*cards, p2p="none").python(code) == [0] * 9


def test_errors_have_names(cuda_machine: Callable[..., Any]) -> None:
    found = cuda_machine().python(
        PRELUDE
        + """
text = c_char_p()
result = []
for code in (0, 2, 201, 500, 900):
    expect(cu.cuGetErrorName(code, byref(text)))
    result.append(text.value.decode())
result += [cu.cuGetErrorName(12345, byref(text)), text.value]
"""
    )
    assert found == [
        "CUDA_SUCCESS",
        "CUDA_ERROR_OUT_OF_MEMORY",
        "CUDA_ERROR_INVALID_CONTEXT",
        "CUDA_ERROR_NOT_FOUND",
        "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        1,
        None,
    ]
