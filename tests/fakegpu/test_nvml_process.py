# SPDX-License-Identifier: Apache-2.0
"""Processes on a card: the two-call protocol in all its versions, rows of the control file, who is told of whom."""

from __future__ import annotations

import pytest

ROWS = [
    {"card": 0, "pid": 5001, "memory_bytes": "1GiB", "type": "C", "name": "/bin/train", "sm_utilization": 30},
    {"card": 0, "pid": 5002, "memory_bytes": "2GiB", "type": "C"},
    {"card": 0, "pid": 5003, "memory_bytes": "3GiB", "type": "C"},
    {"card": 0, "pid": 6001, "memory_bytes": "4MiB", "type": "G"},
    {"card": 0, "pid": 7001, "memory_bytes": "5MiB", "type": "M"},
    {"card": 1, "pid": 8001, "memory_bytes": "6MiB", "type": "C"},
]


@pytest.fixture
def busy(machine):
    host = machine({"count": 2})
    host.control(processes=ROWS)
    return host


def test_lists_by_kind_and_card(busy):
    code = """
    def told(call, of):
        return [[p.pid, p.usedGpuMemory >> 20] for p in call(of)]
    result = [told(call, card) for call in (nvmlDeviceGetComputeRunningProcesses_v3,
        nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlDeviceGetMPSComputeRunningProcesses_v3)]
    result.append(told(nvmlDeviceGetComputeRunningProcesses, cards[1]))
    """
    assert busy.nvml(code) == [[[5001, 1024], [5002, 2048], [5003, 3072]], [[6001, 4]], [[7001, 5]], [[8001, 6]]]


@pytest.mark.parametrize(("suffix", "size"), [("", 16), ("_v2", 24), ("_v3", 24)])
@pytest.mark.parametrize("kind", ["Compute", "Graphics", "MPSCompute"])
def test_b191_sizes_and_counts_of_every_version(busy, kind, suffix, size):
    """A buffer for fewer than there are: the needed count, and not a byte written; with room: whole entries."""
    have = {"Compute": 3, "Graphics": 1, "MPSCompute": 1}[kind]
    code = f"""
    call = ctypes.CDLL("libnvidia-ml.so.1")["nvmlDeviceGet{kind}RunningProcesses{suffix}"]
    def ask(count, room):
        count, buffer = ctypes.c_uint(count), (ctypes.c_ubyte * 256)(*[0xaa] * 256)
        code = call(card, ctypes.byref(count), buffer if room else None)
        written = [i for i, byte in enumerate(buffer) if byte != 0xaa]
        return code, count.value, max(written) // {size} + 1 if written else 0
    result = ask(0, False), ask(0, True), ask({have} - 1, True), ask({have}, True), ask(9, True), ask(9, False)
    """
    short = [7, have, 0]
    assert busy.nvml(code) == [short, short, short, [0, have, have], [0, have, have], [2, 9, 0]]


def test_an_entry_carries_instances_only_since_the_second_version(busy):
    code = """
    lib = ctypes.CDLL("libnvidia-ml.so.1")
    new, count = (c_nvmlProcessInfo_v2_t * 4)(), ctypes.c_uint(4)
    lib.nvmlDeviceGetComputeRunningProcesses_v2(card, ctypes.byref(count), new)
    class First(ctypes.Structure):
        _fields_ = [("pid", ctypes.c_uint), ("usedGpuMemory", ctypes.c_ulonglong)]
    old, guard = (First * 4)(), ctypes.c_uint(4)
    lib.nvmlDeviceGetComputeRunningProcesses(card, ctypes.byref(guard), old)
    result = [[p.pid, p.gpuInstanceId, p.computeInstanceId] for p in new[:3]], [
        [p.pid, p.usedGpuMemory >> 20] for p in old[:guard.value]]
    """
    none = 0xFFFFFFFF
    new, old = busy.nvml(code)
    assert new == [[5001, none, none], [5002, none, none], [5003, none, none]]
    assert old == [[5001, 1024], [5002, 2048], [5003, 3072]]


def test_detail_list_by_mode(busy):
    code = """
    def pids(mode):
        listing = nvmlDeviceGetRunningProcessDetailList(card, nvmlProcessDetailList_v1, mode)
        return [(p.pid, p.usedGpuMemory >> 20) for p in listing]
    beyond = error_of(nvmlDeviceGetRunningProcessDetailList, card, nvmlProcessDetailList_v1, 4)
    result = [pids(mode) for mode in range(4)], beyond
    """
    lists, beyond = busy.nvml(code)
    assert [len(one) for one in lists] == [3, 1, 1, 5]
    assert lists[0][1] == [5002, 2048]
    assert beyond == "InvalidArgument"


def test_names_of_processes(busy):
    code = """
    result = nvmlSystemGetProcessName(5001), [error_of(nvmlSystemGetProcessName, pid) for pid in (4, 5002)]
    """
    assert busy.nvml(code) == ["/bin/train", ["NotFound", "NotFound"]]


def test_utilization_samples_are_new_once(busy):
    code = """
    first = nvmlDeviceGetProcessUtilization(card, 0)
    told = [(s.pid, s.smUtil) for s in first]
    again = error_of(nvmlDeviceGetProcessUtilization, card, first[0].timeStamp)
    fresh = abs(time.time() * 1e6 - first[0].timeStamp) < 1e6
    result = told, again, fresh, error_of(nvmlDeviceGetProcessUtilization, cards[1], 0)
    """
    told, again, fresh, idle = busy.nvml(code)
    assert told == [[5001, 30]]
    # A sample ends every tenth of a second; the next may just have come.
    assert again in {"NotFound", "Success"}
    assert fresh
    assert idle == "NotFound"


def test_nothing_runs_on_an_idle_card(machine):
    code = """
    result = [nvmlDeviceGetComputeRunningProcesses(card), nvmlDeviceGetGraphicsRunningProcesses(card),
        error_of(nvmlDeviceGetProcessUtilization, card, 0), nvmlDeviceGetAccountingPids(card)]
    """
    assert machine().nvml(code) == [[], [], "NotFound", []]
