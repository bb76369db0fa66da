# SPDX-License-Identifier: Apache-2.0
"""Several processes on one fake machine: one account, whoever dies whenever."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
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


def test_memory_of_a_killed_process_is_gone_at_the_next_look(cuda_machine: Callable[..., Any]) -> None:
    """The neighbour looks at once after the death, having looked just before it: hundreds of times in a row."""
    machine = cuda_machine({"memory_bytes": "1GiB"})
    code = """
import signal
start()
child_code = '''
from cuda_client import *
start()
alloc(512 * MIB)
os.write(1, b"x")
os.read(0, 1)
'''
import subprocess
stale = []
for round in range(20):
    command = [sys.executable, "-c", "import os, sys\\n" + child_code]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.read(1) == b"x"
    before = used()
    child.send_signal(signal.SIGKILL)
    child.wait()
    after = used()
    if (before, after) != (512 * MIB, 0):
        stale.append((before, after))
    child.stdin.close(); child.stdout.close()
result = stale
"""
    assert machine.python(PRELUDE + code) == []


def test_a_request_is_refused_only_after_the_dead_were_removed(cuda_machine: Callable[..., Any]) -> None:
    machine = cuda_machine({"memory_bytes": "1GiB"})
    keeper = hold(
        machine, "start()\nprint('ready', flush=True)\nsys.stdin.readline()\nprint(try_alloc(GIB), flush=True)\n"
    )
    for _ in range(3):
        end(hold(machine))
    out, _ = keeper.communicate("\n", timeout=30)
    assert out.splitlines()[0] == "0"


@pytest.mark.parametrize("way", ["exec", "exit"])
def test_memory_goes_with_the_address_space(cuda_machine: Callable[..., Any], way: str) -> None:
    machine = cuda_machine()
    finish = "os.execv('/bin/sleep', ['sleep', '30'])" if way == "exec" else "os._exit(0)"
    program = hold(machine, HOLD + finish + "\n")
    assert used(machine) == 512 * MIB
    assert program.stdin is not None
    program.stdin.write("\n")
    program.stdin.flush()
    deadline = time.monotonic() + 10
    while used(machine) != 0 and time.monotonic() < deadline:
        pass
    assert used(machine) == 0
    end(program)


def test_closing_every_descriptor_ends_nothing(cuda_machine: Callable[..., Any]) -> None:
    """closefrom, and files of its own under the numbers that the driver had."""
    machine = cuda_machine({"memory_bytes": "1GiB"})
    code = """
start()
alloc(512 * MIB)
os.closerange(3, 5000)
mine = [os.open("/dev/null", os.O_RDWR) for _ in range(1000)]
print("ready", flush=True)
sys.stdin.readline()
print(try_alloc(600 * MIB), used() >> 20, try_alloc(512 * MIB), flush=True)
print([os.readlink(f"/proc/self/fd/{n}") for n in mine] == ["/dev/null"] * 1000, flush=True)
"""
    program = hold(machine, code)
    assert machine.python(PRELUDE + "start()\nresult = [used() >> 20, try_alloc(600 * MIB)]") == [512, 2]
    out, err = program.communicate("\n", timeout=30)
    assert out.splitlines()[:2] == ["2 512 0", "True"], err


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
    child = int(subprocess.run(["pgrep", "-P", str(program.pid)], capture_output=True, text=True, check=True).stdout)
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


def test_killed_in_the_middle_of_anything_the_account_stays_right(cuda_machine: Callable[..., Any]) -> None:
    """SIGKILL at random instants of allocation loops: no one hangs, and the sum is that of the living."""
    machine = cuda_machine({"memory_bytes": "1GiB"})
    churn = """
start()
print("ready", flush=True)
pool = [c_uint64() for _ in range(8)]
while True:
    for address in pool:
        expect(cu.cuMemAlloc_v2(byref(address), 3 * MIB))
    for address in pool:
        expect(cu.cuMemFree_v2(address))
"""
    keeper = hold(machine)
    for round_number in range(12):
        victims = [hold(machine, churn) for _ in range(2)]
        time.sleep(0.002 * round_number)  # the instant of death is what this test varies
        for victim in victims:
            victim.send_signal(signal.SIGKILL)
        for victim in victims:
            victim.communicate(timeout=30)
        assert used(machine) == 512 * MIB
    assert machine.python(PRELUDE + "start()\nresult = [used() >> 20, try_alloc(512 * MIB), try_alloc(513 * MIB)]") == [
        512,
        0,
        2,
    ]
    end(keeper)


def step_and_kill(pid: int, steps: int, stdin: Any) -> bool:
    """Lets a process that waits for a line run so many instructions, then kills it; False when it had ended before."""
    attach, single_step, kill = 16, 9, 9
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    assert libc.ptrace(attach, pid, None, None) == 0
    os.waitpid(pid, 0)
    stdin.write("\n")
    stdin.flush()
    alive = True
    for _ in range(steps):
        if libc.ptrace(single_step, pid, None, None) != 0:
            alive = False
            break
        _, status = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(status):
            return False
    os.kill(pid, kill)
    return alive


@pytest.mark.slow
def test_killed_at_any_instruction_of_an_allocation(cuda_machine: Callable[..., Any]) -> None:
    """Nothing hangs, nothing is lost, and some of the deaths were within a lock."""
    if os.uname().machine != "x86_64":
        pytest.skip("single steps are counted on x86-64")
    machine = cuda_machine({"memory_bytes": "64MiB"})
    probe = str(machine.root.parent / "fakegpu-tools" / "cuda-probe")
    slowest = 0.0
    for steps in range(200, 4200, 23):
        program = subprocess.Popen(
            [probe, "alloc:1M", "free:0", "wait", "alloc:2M", "free:1", "alloc:3M", "wait"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=machine.env(),
        )
        assert program.stdout is not None
        while '"wait"' not in program.stdout.readline():
            pass
        step_and_kill(program.pid, steps, program.stdin)
        program.wait(30)
        program.communicate()
        begin = time.monotonic()
        lines = machine.tool("cuda-probe", "alloc:64M", "free:0", "alloc:65M").stdout.splitlines()
        slowest = max(slowest, time.monotonic() - begin)
        assert [json.loads(line)["code"] for line in lines] == [0, 0, 0, 2]
    assert slowest < 1.0
    status = json.loads(machine.tool("fakegpuctl", "status").stdout)
    assert status["cards"][0]["used"] == 0
    assert status["locks_taken_over"] > 0


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


def test_b179_the_driver_finds_itself(cuda_machine: Callable[..., Any]) -> None:
    assert cuda_machine().python(PRELUDE + "result = cu.cuInit(0)", FAKEGPU_INNER_LOOKUP="1") == 0


def test_killed_while_starting_the_next_one_starts_at_once(cuda_machine: Callable[..., Any]) -> None:
    machine = cuda_machine()
    probe = str(machine.root.parent / "fakegpu-tools" / "cuda-probe")
    slowest = 0.0
    for step in range(60):
        victim = subprocess.Popen([probe, "alloc:1M"], stdout=subprocess.DEVNULL, env=machine.env())
        time.sleep(0.0001 * step)  # as above
        victim.kill()
        victim.wait(30)
        begin = time.monotonic()
        machine.tool("cuda-probe", "alloc:1M")
        slowest = max(slowest, time.monotonic() - begin)
    assert slowest < 1.0
    assert used(machine) == 0


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


def test_accounts_cross_pid_namespaces(cuda_machine: Callable[..., Any]) -> None:
    """Each process is number 1 of its own namespace; deaths in one are seen from the other and from outside."""
    if (
        os.geteuid() != 0
        or subprocess.run(["unshare", "-pf", "true"], check=False, capture_output=True).returncode != 0
    ):
        pytest.skip("needs the right to make PID namespaces")
    machine = cuda_machine({"memory_bytes": "1GiB"})
    probe = str(machine.root.parent / "fakegpu-tools" / "cuda-probe")
    machine.tool("fakegpuctl", "status")  # the state is made outside

    def inside(*steps: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", probe, *steps],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=machine.env(),
        )

    def until(program: subprocess.Popen[str], op: str) -> dict[str, Any]:
        assert program.stdout is not None
        while True:
            line: dict[str, Any] = json.loads(program.stdout.readline())
            if line["op"] == op:
                return line

    one, two = inside("alloc:512M", "wait"), inside("getinfo", "alloc:600M", "wait", "getinfo", "alloc:600M", "wait")
    until(one, "wait")
    assert until(two, "alloc")["code"] in (0, 2)
    until(two, "wait")
    seen = json.loads(machine.tool("fakegpuctl", "status").stdout)["cards"][0]["processes"]
    assert {row["own_pid"] for row in seen} == {1}
    assert all(row["pid"] > 1 and Path(f"/proc/{row['pid']}").exists() for row in seen)

    def end_of(program: subprocess.Popen[str], left: tuple[int, ...]) -> None:
        """Kills the outer process; the inner one dies by the kernel's hand a moment later."""
        program.kill()
        program.wait(30)
        deadline = time.monotonic() + 10
        while used(machine) not in left and time.monotonic() < deadline:
            pass
        assert used(machine) in left

    held = used(machine)
    end_of(one, (held - 512 * MIB,))
    assert two.stdin is not None
    two.stdin.write("\n")
    two.stdin.flush()
    until(two, "wait")
    assert used(machine) in (600 * MIB, 1200 * MIB)
    end_of(two, (0,))
    for program in (one, two):
        for pipe in (program.stdin, program.stdout):
            assert pipe is not None
            pipe.close()
