# SPDX-License-Identifier: Apache-2.0
"""What NVML tells of programs that use CUDA: processes, memory and time, across processes, until they die."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

# A program that takes memory, runs kernels, and says so. CUDA through ctypes, like any program without a runtime.
CUDA = """
cu = ctypes.CDLL("libcuda.so.1")
def check(code):
    assert code == 0, code
check(cu.cuInit(0))
context, pointer, stream = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_void_p()
check(cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
check(cu.cuCtxSetCurrent(context))
"""
# Ends like a program that was asked to: on a line, or the end, of standard input.
HOLD = """
print("ready", flush=True)
sys.stdin.readline()
"""
MIB = 1 << 20


def alloc(mib: int) -> str:
    return f"check(cu.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t({mib} << 20)))\n"


def ready(program) -> None:
    line = program.stdout.readline().strip()
    assert line == "ready", line + program.stderr.read()


LISTED = "result = [[p.pid, p.usedGpuMemory >> 20] for p in nvmlDeviceGetComputeRunningProcesses(card)]"


def test_a_program_is_listed_with_what_it_holds(machine):
    host = machine({"profile": "A100-40"})
    with host.start(CUDA + alloc(1000) + HOLD) as program:
        ready(program)
        code = """
        told = [[p.pid, p.usedGpuMemory >> 20] for p in nvmlDeviceGetComputeRunningProcesses(card)]
        memory = nvmlDeviceGetMemoryInfo(card, version=nvmlMemory_v2)
        result = told, memory.used >> 20, (memory.used + memory.free + memory.reserved) >> 20
        """
        told, used, whole = host.nvml(code)
        name = host.nvml(f"result = nvmlSystemGetProcessName({program.pid})")
        program.communicate("go\n", timeout=30)
    assert told == [[program.pid, 1000 + 418]]  # 418 MiB is what a context takes on this card
    assert used == 1418
    assert whole == 40960
    assert Path(name).name.startswith("python")
    assert host.nvml(LISTED) == []


def test_a_killed_program_is_gone_at_once(machine):
    host = machine({"profile": "A100-40"})
    with host.start(CUDA + alloc(500) + HOLD) as program:
        ready(program)
        assert host.nvml(LISTED) == [[program.pid, 918]]
        program.send_signal(signal.SIGKILL)
        program.wait(timeout=30)
        code = LISTED + "\nresult = result, nvmlDeviceGetMemoryInfo(card, version=nvmlMemory_v2).used"
        assert host.nvml(code) == [[], 0]


def test_two_programs_and_two_cards(machine):
    host = machine({"count": 2})
    with (
        host.start(CUDA + alloc(100) + HOLD) as first,
        host.start(CUDA + alloc(200) + HOLD) as second,
        host.start(CUDA + alloc(300) + HOLD, CUDA_VISIBLE_DEVICES="1") as third,
    ):
        for program in (first, second, third):
            ready(program)
        code = """
        lists = [nvmlDeviceGetComputeRunningProcesses(c) for c in cards]
        result = [sorted([p.pid, p.usedGpuMemory >> 20] for p in listed) for listed in lists]
        """
        told = host.nvml(code)
        for program in (first, second, third):
            program.communicate("go\n", timeout=30)
    assert told == [sorted([[first.pid, 100], [second.pid, 200]]), [[third.pid, 300]]]


def test_a_row_of_the_control_file_adds_to_a_live_program(machine):
    host = machine()
    with host.start(CUDA + alloc(100) + HOLD) as program:
        ready(program)
        host.control(processes=[{"card": 0, "pid": program.pid, "memory_bytes": "50MiB"}])
        told = host.nvml(LISTED)
        program.communicate("go\n", timeout=30)
    assert told == [[program.pid, 150]]


def test_exclusive_mode_lets_one_program_in(machine):
    if os.geteuid() != 0:
        pytest.skip("only root may set the mode")
    host = machine()
    host.run("nvidia-smi", "-c", "3")
    with host.start(CUDA + HOLD) as program:
        ready(program)
        code = """
        cu = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        here = ctypes.byref(context)
        result = cu.cuInit(0), cu.cuDevicePrimaryCtxRetain(here, 0), cu.cuCtxCreate_v2(here, 0, 0)
        """
        refused = host.python(code)
        program.communicate("go\n", timeout=30)
    assert refused[0] == 0
    assert 0 not in refused[1:]


# Keeps a share of the card busy: kernels of 10 ms, then a pause.
BUSY = """
module, function = ctypes.c_void_p(), ctypes.c_void_p()
check(cu.cuModuleLoadData(ctypes.byref(module), b"// busy"))
check(cu.cuModuleGetFunction(ctypes.byref(function), module, b"busy"))
print("ready", flush=True)
until = time.monotonic() + SECONDS
while time.monotonic() < until:
    for _ in range(AHEAD):
        check(cu.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, None, None))
    check(cu.cuCtxSynchronize())
    time.sleep(PAUSE)
"""


def busy(seconds: float, pause: float, ahead: int = 1) -> str:
    """`ahead` kernels are queued at a time, so that a slow machine does not leave the card idle between them."""
    return CUDA + BUSY.replace("SECONDS", str(seconds)).replace("PAUSE", str(pause)).replace("AHEAD", str(ahead))


def test_utilization_is_the_time_kernels_ran(machine):
    """At most half of the time busy, less on a slow machine: card, program, samples agree; power and clocks follow."""
    host = machine({"profile": "A100-40"}, launch_ns=10_000_000)
    with host.start(busy(20, 0.010)) as program:
        ready(program)
        code = """
        time.sleep(1.3)
        rates, samples = [], []
        for _ in range(5):
            rates.append(nvmlDeviceGetUtilizationRates(card).gpu)
            time.sleep(0.16)
        told = nvmlDeviceGetProcessUtilization(card, int(time.time() * 1e6) - 1_000_000)
        kind, buffer = nvmlDeviceGetSamples(card, NVML_GPU_UTILIZATION_SAMPLES, 0)
        result = {
            "rates": sum(rates) / 5, "process": [[s.pid, s.smUtil] for s in told],
            "samples": sum(s.sampleValue.uiVal for s in buffer[-5:]) / 5,
            "power": nvmlDeviceGetPowerUsage(card), "clock": nvmlDeviceGetClockInfo(card, NVML_CLOCK_SM),
            "state": nvmlDeviceGetPerformanceState(card), "heat": nvmlDeviceGetTemperature(card, 0),
        }
        """
        told = host.nvml(code)
        program.kill()
    assert 15 <= told["rates"] <= 55
    assert 15 <= told["samples"] <= 55
    assert told["process"][0][0] == program.pid
    assert 15 <= told["process"][0][1] <= 55
    assert 50_000 < told["power"] < 400_000
    assert told["clock"] == 1410
    assert told["state"] == 0
    assert told["heat"] > 30


def test_processes_share_the_time_of_a_card(machine):
    host = machine(launch_ns=5_000_000)
    with host.start(busy(20, 0, 40)) as one, host.start(busy(20, 0, 40)) as two:
        ready(one)
        ready(two)
        code = """
        time.sleep(1.2)
        told = nvmlDeviceGetProcessUtilization(card, int(time.time() * 1e6) - 1_000_000)
        result = {s.pid: s.smUtil for s in told}, nvmlDeviceGetUtilizationRates(card).gpu
        """
        told, card = host.nvml(code)
        one.kill()
        two.kill()
    assert set(map(int, told)) == {one.pid, two.pid}
    assert all(30 <= share <= 65 for share in told.values()), told
    assert 85 <= sum(told.values()) <= 101
    assert card >= 85


def test_accounting_remembers_who_was_there(machine):
    if os.geteuid() != 0:
        pytest.skip("only root may turn accounting on")
    host = machine()
    host.run("nvidia-smi", "-am", "1")
    stats = """
    stats = nvmlDeviceGetAccountingStats(card, {pid})
    result = nvmlDeviceGetAccountingPids(card), stats.isRunning, stats.maxMemoryUsage >> 20, stats.time > 0
    """
    with host.start(CUDA + alloc(64) + HOLD) as program:
        ready(program)
        alive = host.nvml(stats.format(pid=program.pid))
        program.communicate("go\n", timeout=30)
    dead = host.nvml(stats.format(pid=program.pid))
    assert alive == [[program.pid], 1, 64, False]
    assert dead == [[program.pid], 0, 64, True]
    if os.geteuid() == 0:
        cleared = host.nvml("nvmlDeviceClearAccountingPids(card); result = nvmlDeviceGetAccountingPids(card)")
        assert cleared == []


def test_a_program_on_a_mig_device(machine):
    if os.geteuid() != 0:
        pytest.skip("only root may change MIG")
    host = machine({"profile": "A100-40", "mig_enabled": True})
    host.run("nvidia-smi", "mig", "-cgi", "3g.20gb,1g.5gb", "-C")
    uuids = host.nvml("result = [nvmlDeviceGetUUID(nvmlDeviceGetMigDeviceHandleByIndex(card, i)) for i in (0, 1)]")
    with host.start(CUDA + alloc(100) + HOLD, CUDA_VISIBLE_DEVICES=uuids[1]) as program:
        ready(program)
        code = """
        devices = [nvmlDeviceGetMigDeviceHandleByIndex(card, i) for i in (0, 1)]
        listed = [[[p.pid, p.gpuInstanceId, p.computeInstanceId] for p in nvmlDeviceGetComputeRunningProcesses(d)]
            for d in [card, *devices]]
        used = [nvmlDeviceGetMemoryInfo(d, version=nvmlMemory_v2).used >> 20 for d in devices]
        gi = nvmlDeviceGetGpuInstanceById(card, 11)
        ci = nvmlGpuInstanceGetComputeInstanceById(gi, 0)
        result = listed, used, error_of(nvmlComputeInstanceDestroy, ci)
        """
        listed, used, busy_error = host.nvml(code)
        program.communicate("go\n", timeout=30)
    row = [program.pid, 11, 0]
    assert listed == [[row], [], [row]]
    assert used == [0, 518]
    assert busy_error == "InUse"


def test_b192_both_libraries_agree_on_memory_and_cards(machine):
    """The same totals and, at one instant, the same free memory, by CUDA and by NVML."""
    host = machine({"profile": "A100-40", "count": 3})
    code = (
        CUDA
        + alloc(700)
        + """
    free, total, count = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_int()
    check(cu.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
    check(cu.cuDeviceGetCount(ctypes.byref(count)))
    second = nvmlDeviceGetMemoryInfo(card, version=nvmlMemory_v2)
    result = free.value == second.free, total.value == second.total - second.reserved, count.value, len(cards)
    """.replace("\n    ", "\n")
    )
    start = (
        "nvmlInit()\ncards = [nvmlDeviceGetHandleByIndex(i) for i in range(nvmlDeviceGetCount())]\ncard = cards[0]\n"
    )
    assert host.python(start + code) == [True, True, 3, 3]
    assert host.python(start + code, FAKEGPU_VISIBLE_DEVICES="0,2") == [True, True, 2, 2]
