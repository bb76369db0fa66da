# SPDX-License-Identifier: Apache-2.0
"""Several processes on one fake machine: one account, forks, threads, a changed configuration."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PRELUDE = "from cuda_client import *\n"
HOLD = "start()\nalloc(512 * MIB)\nprint('ready', flush=True)\nsys.stdin.readline()\n"
MIB = 1 << 20


def hold(machine: Any, code: str = HOLD) -> subprocess.Popen[str]:
    """A process that has done `code` up to its line of output."""
    program: subprocess.Popen[str] = machine.start(PRELUDE + code)
    assert program.stdout is not None
    line = program.stdout.readline()
    assert line == "ready\n", (line, program.stderr.read() if program.stderr and not line else "")
    return program


def end(program: subprocess.Popen[str]) -> None:
    program.kill()
    program.communicate(timeout=30)


def used(machine: Any, card: int = 0) -> int:
    """What the machine says is in use, by a process that holds nothing."""
    status: int = json.loads(machine.tool("fakegpuctl", "status").stdout)["cards"][card]["used"]
    return status


def test_all_processes_share_the_card(cuda_machine: Callable[..., Any]) -> None:
    machine = cuda_machine({"memory_bytes": "1GiB", "context_bytes": "10MiB"})
    one = hold(machine)
    assert machine.python(PRELUDE + "start()\nresult = [used() >> 20, try_alloc(512 * MIB), try_alloc(492 * MIB)]") == [
        532,
        2,
        0,
    ]
    one.communicate("\n", timeout=30)  # leaves without freeing
    assert machine.python(PRELUDE + "start()\nresult = [used() >> 20, try_alloc(1014 * MIB)]") == [10, 0]


def test_a_forked_child_neither_keeps_nor_gives_back(cuda_machine: Callable[..., Any]) -> None:
    machine = cuda_machine()
    code = """
start()
alloc(512 * MIB)
child = os.fork()
if child == 0:
    while True:
        time.sleep(60)
gone = os.fork()
if gone == 0:
    os._exit(0)
os.waitpid(gone, 0)
print("ready", flush=True)
sys.stdin.readline()
"""
    program = hold(machine, code)
    assert used(machine) == 512 * MIB  # the other child's exit changed nothing
    (child,) = map(int, Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split())
    try:
        program.send_signal(signal.SIGKILL)
        program.wait(30)
        assert used(machine) == 0  # and the living child keeps nothing
    finally:
        os.kill(child, signal.SIGKILL)
        program.communicate(timeout=30)


FORKS = """
context = start()
address = alloc(100 * MIB)
def in_child(work):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as lines:
        said = json.load(lines)
    os.waitpid(child, 0)
    return said
def again():
    before = cu.cuCtxSynchronize()
    code = cu.cuInit(0)
    if code != 0:
        return [before, code]
    start()
    alloc(50 * MIB)
    return [before, code, used() >> 20, cu.cuMemFree_v2(address), cu.cuCtxSetCurrent(context)]
result = [in_child(again), used() >> 20, in_child(again), cu.cuMemFree_v2(address), used()]
"""


def test_a_child_of_a_process_with_cuda_starts_afresh_or_is_refused(cuda_machine: Callable[..., Any]) -> None:
    assert cuda_machine().python(PRELUDE + FORKS) == [[3, 0, 150, 1, 201], 100, [3, 0, 150, 1, 201], 0, 0]
    assert cuda_machine(fork="refuse").python(PRELUDE + FORKS) == [[3, 3], 100, [3, 3], 0, 0]


def test_fork_before_cuda_is_harmless(cuda_machine: Callable[..., Any]) -> None:
    code = """
expect(cu.cuDriverGetVersion(byref(c_int())))
child = os.fork()
if child == 0:
    start()
    alloc(MIB)
    os._exit(7 if used() == MIB else 1)
result = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
start()
result = [result, used()]
"""
    assert cuda_machine().python(PRELUDE + code) == [7, 0]


def test_b176_forking_while_another_thread_allocates(cuda_machine: Callable[..., Any]) -> None:
    code = """
import threading
start()
context = c_void_p()
expect(cu.cuCtxGetCurrent(byref(context)))
stop = []
def worker():
    expect(cu.cuCtxSetCurrent(context))
    while not stop:
        expect(cu.cuMemFree_v2(alloc(MIB)))
thread = threading.Thread(target=worker)
thread.start()
bad, slowest = [], 0
for _ in range(150):
    begin = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            start()
            alloc(MIB)
            os._exit(0)
        except BaseException:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    slowest = max(slowest, time.monotonic() - begin)
    if status:
        bad.append(status)
stop.append(1)
thread.join()
result = [bad, slowest < 1.0, used()]
"""
    assert cuda_machine().python(PRELUDE + code) == [[], True, 0]


@pytest.mark.slow
def test_b171_racing_processes_never_hold_more_than_the_card(cuda_machine: Callable[..., Any]) -> None:
    """10^5 allocations from eight processes that fill the card; then everything is back to nothing."""
    machine = cuda_machine({"memory_bytes": "64MiB"})
    code = """
import random
random.seed(int(sys.argv[1]))
start()
held, refused, over = [], 0, 0
for step in range(12500):
    address = c_uint64()
    size = random.choice((512, 4096, 100000, MIB, 5 * MIB, 10 * MIB))
    code = cu.cuMemAlloc_v2(byref(address), size)
    if code == 0:
        held.append(address)
    else:
        expect(code, 2)
        refused += 1
        while len(held) > 3:
            expect(cu.cuMemFree_v2(held.pop()))
    if step % 100 == 0:
        free, total = info()
        over += free > total
for address in held:
    expect(cu.cuMemFree_v2(address))
result = [refused > 0, over]
"""
    programs = [machine.start(PRELUDE + code, str(seed)) for seed in range(8)]
    peak = 0
    while any(program.poll() is None for program in programs):
        status = json.loads(machine.tool("fakegpuctl", "status").stdout)["cards"][0]
        peak = max(peak, status["used"])
    for program in programs:
        out, err = program.communicate(timeout=60)
        assert program.returncode == 0, err
        assert json.loads(out.splitlines()[-1]) == [True, 0]
    assert peak <= 64 * MIB
    assert used(machine) == 0


def test_threads_do_everything_at_once(cuda_machine: Callable[..., Any]) -> None:
    code = """
import threading
context = start()
function, problems = kernel("spin_us_5"), []
def work(seed):
    import random
    dice = random.Random(seed)
    try:
        expect(cu.cuCtxSetCurrent(context))
        for _ in range(150):
            own, begin, end = stream(dice.choice((0, 1))), event(), event()
            piece, a = c_uint64(), alloc(dice.choice((100, 70000, 3 * MIB)))
            expect(cu.cuMemAllocAsync(byref(piece), 5 * MIB, own))
            expect(cu.cuMemsetD8Async(a, seed, 100, own))
            expect(cu.cuEventRecord(begin, own))
            for _ in range(5):
                expect(launch(function, own))
            expect(cu.cuEventRecord(end, own))
            handle = create(2 * MIB)
            expect(cu.cuEventSynchronize(end))
            if elapsed(begin, end) < 0.02:
                problems.append("too quick")
            back = ctypes.create_string_buffer(100)
            expect(cu.cuMemcpyDtoH_v2(back, a, 100))
            if back.raw != bytes([seed]) * 100:
                problems.append("bytes")
            expect(cu.cuMemFreeAsync(piece, own))
            expect(cu.cuStreamSynchronize(own))
            for code in (cu.cuMemFree_v2(a), cu.cuMemRelease(handle), cu.cuEventDestroy_v2(begin),
                    cu.cuEventDestroy_v2(end),
                         cu.cuStreamDestroy_v2(own)):
                expect(code)
    except BaseException as error:
        problems.append(repr(error))
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 7)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
expect(cu.cuCtxSynchronize())
result = [problems, used()]
"""
    assert cuda_machine().python(PRELUDE + code) == [[], 0]


def test_the_driver_starts_no_thread_whatever_runs_on_it(cuda_machine: Callable[..., Any]) -> None:
    code = """
before = os.listdir("/proc/self/task")
start()
own, function = stream(1), kernel("spin_ms_3")
piece = c_uint64()
expect(cu.cuMemAllocAsync(byref(piece), MIB, own))
called = []
CALL = ctypes.CFUNCTYPE(None, c_void_p)
back = CALL(lambda _: called.append(len(os.listdir("/proc/self/task"))))
expect(launch(function, own))
expect(cu.cuLaunchHostFunc(own, back, None))
during = os.listdir("/proc/self/task")
expect(cu.cuStreamSynchronize(own))
result = [before == during == os.listdir("/proc/self/task"), called]
"""
    assert cuda_machine().python(PRELUDE + code) == [True, [1]]


def test_b179_the_driver_finds_itself(cuda_machine: Callable[..., Any]) -> None:
    assert cuda_machine().python(PRELUDE + "result = cu.cuInit(0)", FAKEGPU_INNER_LOOKUP="1") == 0


def test_the_configuration_may_change_when_nobody_uses_it(cuda_machine: Callable[..., Any]) -> None:
    machine = cuda_machine()
    ask = "count = c_int()\ncode = cu.cuInit(0)\ncu.cuDeviceGetCount(byref(count))\nresult = [code, count.value]"
    program = hold(machine)
    machine.config.write_text('{"cards": [{"count": 5}]}')
    assert machine.python(PRELUDE + ask) == [803, 0]
    program.communicate("\n", timeout=30)
    assert machine.python(PRELUDE + ask) == [0, 5]
    text = machine.config.read_text()
    program = hold(machine)
    machine.config.unlink()
    machine.config.write_text(text)  # another file, the same text: nothing changed
    assert machine.python(PRELUDE + "start()\nresult = used() >> 20") == 512
    end(program)
