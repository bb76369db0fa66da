# SPDX-License-Identifier: Apache-2.0
"""Processes of the fake machine die, at any instant and in any namespace, and what they held goes with them."""

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
    neighbour = hold(machine, HOLD.replace("512", "256"))
    out, err = program.communicate("\n", timeout=30)
    assert out.splitlines()[:2] == ["2 768 2", "True"], err  # and it does not take the living for dead
    end(neighbour)


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

    one = inside("alloc:512M", "wait")
    until(one, "wait")
    two = inside("getinfo", "alloc:600M", "wait", "getinfo", "alloc:600M", "wait")
    assert until(two, "alloc")["code"] == 2
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
    assert used(machine) == 600 * MIB
    end_of(two, (0,))
    for program in (one, two):
        for pipe in (program.stdin, program.stdout):
            assert pipe is not None
            pipe.close()
