# SPDX-License-Identifier: Apache-2.0
"""Several processes on one share: races, ends of every kind, fork, exec, other users, full tables."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

A = "GPU-aaaaaaaa-0000-4000-8000-00000000000a"
CARD_B = "GPU-bbbbbbbb-0000-4000-8000-00000000000b"
GIB, MIB = 1 << 30, 1 << 20


def card_used(box) -> int:
    """What the driver's own account of card A says; nobody stands in front of it here."""
    code = "start()\nsay(used=used())"
    return box.run(code, hooked=False).last["used"]


@pytest.fixture
def racer(compile_c):
    driver = Path(__file__).parents[2] / "build/fakegpu/usr/lib/x86_64-linux-gnu"
    return compile_c(
        "alloc_race.c", "-O2", f"-L{driver}", "-l:libcuda.so.1", "-Wl,--no-as-needed", "-Wl,--allow-shlib-undefined"
    )


def watch(box, commands: list[list[str]]) -> tuple[int, int]:
    """Runs all of them at once; the most that the driver had given out meanwhile, and how often one was refused."""
    code = """
start(); most = 0
import select
print("{}", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    for _ in range(200):
        most = max(most, used())
say(most=most)
"""
    watcher = box.python(code, hooked=False)
    watcher.stdout.readline()
    # They end together: a driver may count a dead process's memory a moment longer than we do.
    racers = [box.popen([*command, "hold"]) for command in commands]
    outs = [p.stdout.readline() for p in racers]
    out, _ = watcher.communicate("\n", timeout=20)
    for process in racers:
        process.communicate("\n", timeout=60)
    refused = 0
    for process, text in zip(racers, outs, strict=True):
        assert process.returncode == 0, text
        counts = json.loads(text)
        assert counts["other"] == 0, text
        refused += counts["refused"]
    return json.loads(out.splitlines()[-1])["most"], refused


@pytest.mark.parametrize(("processes", "threads", "operations"), [(8, 1, 25_000), (4, 4, 10_000)])
def test_behaviour_29_and_b171_racing_processes_never_pass_the_limit(box, racer, processes, threads, operations):
    """10^5 allocations and more; a program without the hook reads the driver's account all the while."""
    box.grant("a", A, 256 * MIB)
    most, refused = watch(
        box, [[str(racer), str(threads), str(operations), str(16 * MIB), str(n)] for n in range(processes)]
    )
    assert most <= 256 * MIB
    assert refused > 1000, "the limit was never reached, so nothing was tested"
    assert box.used("a") in range(256 * MIB + 1)
    owners = slots(box, "a")
    report = box.node.settle(box.region("a"), *owners)
    assert (report.used_bytes, report.unsettled) == (0, 0)


def slots(box, name: str) -> list[int]:
    raw = box.region(name).read_bytes()
    words = (int.from_bytes(raw[4096 + 128 * i : 4104 + 128 * i], "little") for i in range(1024))
    return [w for w in words if w]


def test_behaviour_12_one_share_in_two_pid_namespaces(box, racer, tmp_path):
    """Two pods on one claim: the same usage file at two places, another PID namespace each."""
    box.grant("a", A, 256 * MIB)
    if os.geteuid() != 0:
        pytest.skip("needs root for PID namespaces")
    apart = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    most, refused = watch(box, [[*apart, str(racer), "2", "15000", str(16 * MIB), str(n)] for n in range(6)])
    assert most <= 256 * MIB
    assert refused > 1000, "the limit was never reached, so nothing was tested"
    # Each was pid 1 or 2 of its own namespace: nobody took another's slot for its own.
    assert len(slots(box, "a")) == 6


HOLD = "start()\nsay(rc=alloc({})[0], used=used()); wait()"


def held(box, size: int) -> subprocess.Popen:
    process = box.python(HOLD.format(size))
    assert json.loads(process.stdout.readline())["rc"] == 0
    return process


def finish(*processes: subprocess.Popen) -> None:
    for process in processes:
        process.communicate("\n", timeout=20)


def test_behaviour_26_b172_and_b167_one_limit_for_all(box):
    box.grant("a", A, 10 * GIB)
    first = held(box, 6 * GIB)
    second = box.run("start()\nsay(total=total(), used=used(), rc=[alloc(6*GIB)[0], alloc(4*GIB)[0]])").last
    assert second == {"total": 10 * GIB, "used": 6 * GIB, "rc": [2, 0]}
    finish(first)


@pytest.mark.parametrize("end", ["return", "_exit", "abort", "SIGKILL", "SIGSEGV", "SIGTERM"])
def test_behaviours_27_and_28_what_a_dead_process_held_comes_back(box, end):
    box.grant("a", A, GIB)
    first = held(box, GIB)
    if end.startswith("SIG"):
        first.send_signal(getattr(signal, end))
        first.communicate(timeout=20)
    else:
        first.communicate("\n", timeout=20)
    began = time.monotonic()
    assert box.run("start()\nsay(used=used(), rc=alloc(GIB)[0])").last == {"used": 0, "rc": 0}
    assert time.monotonic() - began < 2


def test_a_neighbour_that_would_be_refused_finds_the_dead_one(box):
    """Nobody's start helps, and no node: the refused one looks for itself."""
    box.grant("a", A, GIB)
    patient = box.python("start()\nsay(rc=alloc(MIB)[0])\nwait()\nsay(rc=alloc(900*MIB)[0])")
    patient.stdout.readline()
    victim = held(box, 900 * MIB)
    victim.kill()
    victim.communicate()
    out, _ = patient.communicate("\n", timeout=20)
    assert json.loads(out) == {"rc": 0}


def test_a_zombie_holds_nothing(box):
    box.grant("a", A, GIB)
    victim = held(box, GIB)
    victim.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT)  # it is dead and stays a zombie
    assert box.run("start()\nsay(rc=alloc(GIB)[0])").last == {"rc": 0}
    victim.communicate()


def test_a_process_whose_first_thread_ended_is_alive(box):
    box.grant("a", A, GIB)
    code = """
import threading, ctypes, time
start(); rc = alloc(GIB)[0]
def rest():
    while open("/proc/self/stat").read().rsplit(")", 1)[1].split()[0] != "Z": pass
    say(rc=rc); wait(); os._exit(0)
threading.Thread(target=rest).start()
ctypes.CDLL(None).pthread_exit(None)
"""
    first = box.python(code)
    assert json.loads(first.stdout.readline()) == {"rc": 0}
    assert box.run("start()\nsay(rc=alloc(MIB)[0])").last == {"rc": 2}
    finish(first)


def test_behaviours_30_and_31_storm_of_kills(box, racer):
    """Processes die while they allocate and while they start; the next one starts at once and nobody hangs."""
    box.grant("a", A, 256 * MIB)
    chance = random.Random(7)
    steady = box.popen([str(racer), "1", "100000000", str(8 * MIB), "1"])
    slowest = 0.0
    for n in range(60):
        victim = box.popen([str(racer), "2", "100000000", str(8 * MIB), str(n)])
        time.sleep(chance.random() * 0.02)
        victim.kill()
        victim.communicate()
        began = time.monotonic()
        probe = box.popen([str(racer), "1", "200", str(MIB), str(n)])
        out, err = probe.communicate(timeout=20)
        slowest = max(slowest, time.monotonic() - began)
        assert json.loads(out)["other"] == 0, err
    assert steady.poll() is None
    steady.kill()
    steady.communicate()
    assert slowest < 2
    assert box.run("start()\nsay(rc=alloc(256*MIB)[0])").last == {"rc": 0}


def test_b169_512_at_once(box, racer):
    box.grant("a", A, 600 * MIB)
    began = time.monotonic()
    running = [box.popen([str(racer), "1", "1", "512", str(n), "hold"]) for n in range(512)]
    for process in running:
        assert json.loads(process.stdout.readline()).get("other") == 0
    took = time.monotonic() - began
    assert len(slots(box, "a")) == 512
    for process in running:
        process.communicate("\n", timeout=30)
    assert took < 60


def test_b169_more_processes_than_slots_are_refused_clearly(box):
    box.grant("a", A, GIB)
    region = box.region("a")
    raw = bytearray(region.read_bytes())
    for i in range(1024):  # living owners of another PID namespace: nobody here may judge them
        raw[4096 + 128 * i : 4120 + 128 * i] = (
            (1 << 62 | 5 << 22 | i + 1).to_bytes(8, "little") + bytes(8) + (77).to_bytes(8, "little")
        )
    raw[152:160] = (1024).to_bytes(8, "little")
    region.write_bytes(raw)
    result = box.run("start()\nsay(rc=[alloc(MIB)[0] for _ in range(3)])")
    assert result.last == {"rc": [2, 2, 2]}
    assert result.err.count("\n") == 1
    assert "as many processes as its usage file has room for" in result.err
    assert box.complaints("a") == 2


# ---- fork, exec, users ------------------------------------------------------------------------------------------


def test_behaviour_32_exit_of_a_forked_child_leaves_its_parent(box):
    box.grant("a", A, GIB)
    got = box.run("""
start(); rc, p = alloc(512*MIB); before = used()
for how in (os._exit, exit):
    pid = os.fork()
    if pid == 0:
        free(p); alloc(1)
        how(0)
    os.waitpid(pid, 0)
say(before=before, after=used(), free=free(p), end=used())
""").last
    assert got == {"before": 512 * MIB, "after": 512 * MIB, "free": 0, "end": 0}


def test_behaviour_33_child_forked_before_cuda(box):
    box.grant("a", A, GIB)
    result = box.run("""
pid = os.fork()
if pid == 0:
    start(); say(child=alloc(512*MIB)[0]); os._exit(0)
os.waitpid(pid, 0)
start(); say(parent=[alloc(512*MIB)[0], alloc(512*MIB)[0], alloc(1)[0]])
""")
    assert result.lines == [{"child": 0}, {"parent": [0, 0, 2]}]


def test_child_forked_after_only_looking(box):
    """The parent has found the driver's functions and read its grant, and then forks: the child is its own process."""
    box.grant("a", A, GIB)
    result = box.run("""
cuda.cuMemAlloc_v2, cuda.cuInit
pids = []
for n in range(3):
    pid = os.fork()
    if pid == 0:
        start(); say(rc=alloc(300*MIB)[0]); wait(); os._exit(0)
    pids.append(pid)
[os.waitpid(p, 0) for p in pids]
""")
    assert result.lines == [{"rc": 0}] * 3
    assert len(slots(box, "a")) >= 1


def test_b176_fork_while_another_thread_allocates(box):
    box.grant("a", A, GIB)
    got = box.run(
        """
import threading, time
stop = False
def work():
    call("cuCtxSetCurrent", here)
    while not stop:
        rc, p = alloc(4096)
        if rc == 0: free(p)
here = start()
thread = threading.Thread(target=work); thread.start()
slow, bad = 0, 0
for _ in range(300):
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        init(); out = c.c_uint64(); call("cuMemAlloc_v2", c.byref(out), c.c_size_t(4096))
        os._exit(7)
    _, status = os.waitpid(pid, 0)
    bad += os.waitstatus_to_exitcode(status) != 7
    slow = max(slow, time.monotonic() - began)
stop = True; thread.join()
say(slow=slow, bad=bad, used=used())
""",
        timeout=110,
    ).last
    assert got["bad"] == 0
    assert got["slow"] < 1
    assert got["used"] == 0


def test_exec_gives_up_what_the_old_image_held(box):
    """A program that allocates and then becomes another one, which uses CUDA too, or never."""
    box.grant("a", A, GIB)
    got = box.run(
        "start(); rc = alloc(900*MIB)[0]\n"
        "os.execv(sys.executable, [sys.executable, '-c', "
        "'from client import *\\nstart()\\nsay(used=used(), rc=alloc(GIB)[0])'])"
    ).last
    assert got == {"used": 0, "rc": 0}
    sleeper = box.python("start(); alloc(900*MIB); say(x=1)\nos.execv('/bin/sh', ['sh', '-c', 'echo {}; read x'])")
    sleeper.stdout.readline()
    assert sleeper.stdout.readline() == "{}\n"
    assert box.run("start()\nsay(rc=alloc(GIB)[0])").last == {"rc": 0}
    finish(sleeper)


@pytest.mark.parametrize("how", ["subprocess", "posix_spawn", "vfork"])
def test_children_made_by_spawn_leave_the_account_alone(box, how, compile_c):
    box.grant("a", A, GIB)
    lines = {
        "subprocess": "import subprocess\nsubprocess.run(['/bin/true'], check=True)",
        "posix_spawn": "pid = os.posix_spawn('/bin/true', ['true'], os.environ)\nos.waitpid(pid, 0)",
        "vfork": "import subprocess\nsubprocess.run(['/bin/true'], check=True, close_fds=False)",
    }
    got = box.run(f"start(); rc, p = alloc(512*MIB)\n{lines[how]}\nsay(used=used(), free=free(p), end=used())").last
    assert got == {"used": 512 * MIB, "free": 0, "end": 0}


def test_setuid_after_start_goes_on(box):
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    box.grant("a", A, GIB)
    got = box.run(
        "start(); rc, p = alloc(512*MIB)\nos.setgid(65534); os.setuid(65534)\n"
        "say(rc=[alloc(512*MIB)[0], alloc(1)[0]], used=used(), free=free(p))"
    ).last
    assert got == {"rc": [0, 2], "used": GIB, "free": 0}


def test_no_proc(box):
    """Without /proc the program is limited all the same; whose its slot is only the node can tell."""
    if os.geteuid() != 0:
        pytest.skip("needs root to hide /proc")
    box.grant("a", A, GIB)
    command = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs none /proc && exec "$0" "$@"',
        sys.executable,
        "-c",
        "from client import *\nstart()\nsay(rc=[alloc(GIB)[0], alloc(1)[0]])",
    ]
    assert box.run(command).last == {"rc": [0, 2]}
    assert box.complaints("a") == 8


def test_two_hundred_processes_one_after_another_leave_nothing(box, racer):
    box.grant("a", A, 64 * MIB)
    for n in range(200):
        out, _ = box.popen([str(racer), "1", "50", str(MIB), str(n)]).communicate(timeout=20)
        assert json.loads(out)["other"] == 0
    assert len(slots(box, "a")) <= 2
    assert box.run("start()\nsay(rc=alloc(64*MIB)[0])").last == {"rc": 0}


def test_b177_clean_environment_and_other_shells(box):
    """The preload is in a file in a real container; here the variable stands for it, and nothing else is needed."""
    box.grant("a", A, GIB)
    env = dict.fromkeys(("HOME", "USER", "CUDA_DEVICE_MEMORY_LIMIT"))
    got = box.run("start()\nsay(total=total(), rc=alloc(2*GIB)[0])", env=env).last
    assert got == {"total": GIB, "rc": 2}


def test_b174_signals_all_the_time(box):
    box.grant("a", A, 256 * MIB)
    code = """
import signal, time
signal.signal(signal.SIGALRM, lambda *_: None); signal.siginterrupt(signal.SIGALRM, True)
start(); bad = 0
signal.setitimer(signal.ITIMER_REAL, 0.0007, 0.0007)
end = time.monotonic() + 3
while time.monotonic() < end:
    rc, p = alloc(8*MIB)
    if rc == 0: bad += free(p) != 0
    else: bad += rc != 2
signal.setitimer(signal.ITIMER_REAL, 0)
say(bad=bad)
"""
    running = [box.python(code) for _ in range(4)]
    for process in running:
        out, err = process.communicate(timeout=60)
        assert (out, err, process.returncode) == ('{"bad": 0}\n', "", 0)
    assert box.node.settle(box.region("a"), *slots(box, "a")).used_bytes == 0


# ---- starts ---------------------------------------------------------------------------------------------------


def test_b162_a_start_that_is_killed_holds_up_nobody(box, racer):
    """Processes die at some moment of their start; sixteen others start meanwhile."""
    box.grant("a", A, 256 * MIB)
    chance = random.Random(9)
    command = [str(racer), "1", "200", str(MIB)]
    for n in range(12):
        victim = box.popen([*command, str(n), "hold"])
        time.sleep(chance.random() * 0.012)
        victim.kill()
        victim.communicate()
    began = time.monotonic()
    waiting = [box.popen([*command, str(n)]) for n in range(16)]
    for process in waiting:
        out, err = process.communicate(timeout=20)
        assert json.loads(out)["other"] == 0, err
    assert time.monotonic() - began < 5, "two seconds, and what the machine adds"
    assert box.run("start()\nsay(rc=alloc(256*MIB)[0])").last == {"rc": 0}


def test_b162_a_start_that_stands_still_holds_up_nobody(stub_box):
    """Processes are stopped at some moment of their start; over a driver that has no lock, none is left to wait for."""
    stub_box.grant("a", "GPU-" + "-".join(["aa" * 4, "aa" * 2, "aa" * 2, "aa" * 2, "aa" * 6]), 256 * MIB)
    chance = random.Random(3)
    stuck = []
    for _ in range(10):
        victim = stub_box.python("start(); say(rc=alloc(MIB)[0]); wait()")
        time.sleep(0.01 + chance.random() * 0.05)
        victim.send_signal(signal.SIGSTOP)
        stuck.append(victim)
    try:
        got = [stub_box.run("start()\nsay(rc=alloc(16*MIB)[0])", timeout=10).last for _ in range(4)]
    finally:
        for victim in stuck:
            victim.kill()
            victim.communicate()
    assert got == [{"rc": 0}] * 4


@pytest.mark.parametrize("visible", ["1", CARD_B])
def test_b166_no_probe_on_any_card_at_start(box, cards, visible):
    """A start makes no context and takes no memory that the program did not ask for, on whichever card."""
    machine = json.loads(cards.read_text())
    machine["context_create_ns"] = 100_000_000
    for row in machine["cards"]:
        row["context_bytes"] = "300MiB"
    cards.write_text(json.dumps(machine))
    box.grant("b", CARD_B, GIB)
    control = Path(__file__).parents[2] / "build/fakegpu-tools/fakegpuctl"

    def held() -> list[list[int]]:
        """Per card, what the driver has given to whom."""
        out = subprocess.run([str(control), "status"], env=box.env, check=True, capture_output=True, timeout=20)
        said = json.loads(out.stdout)
        return [sorted(p["bytes"] for p in card["processes"]) for card in said["cards"]]

    code = "rc = init(); say(rc=rc); wait(); context(); say(rc=alloc(MIB)[0]); wait()"
    env = {"CUDA_VISIBLE_DEVICES": visible}
    process = box.python(code, env=env)
    assert json.loads(process.stdout.readline()) == {"rc": 0}
    assert held() == [[], []]
    process.stdin.write("\n")
    process.stdin.flush()
    assert json.loads(process.stdout.readline()) == {"rc": 0}
    assert held() == [[], [301 * MIB]]
    finish(process)
    began = time.monotonic()
    eight = [box.python("start()\nsay(rc=alloc(MIB)[0])", env=env) for _ in range(8)]
    assert [process.communicate(timeout=20)[0] for process in eight] == ['{"rc": 0}\n'] * 8
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("left", ["lock", "pid", "read-only"])
def test_b170_left_over_locks_block_no_start(box, left):
    """Somebody holds every kind of lock on the usage file; lock files of the dead and of the living lie about."""
    box.grant("a", A, GIB)
    folder = box.region("a").parent
    holder = box.python(
        f"import fcntl\nf = open({str(box.region('a'))!r}, 'r+b'); fcntl.lockf(f, fcntl.LOCK_EX)\n"
        f"g = open({str(box.region('a'))!r}, 'r+b'); fcntl.flock(g, fcntl.LOCK_EX)\nsay(x=1); wait()",
        hooked=False,
    )
    holder.stdout.readline()
    for name in ("lock", "region.lock", ".lock"):
        (folder / name).write_text({"lock": "999999\n", "pid": f"{os.getpid()}\n"}.get(left, ""))
    if left == "read-only":
        folder.chmod(0o555)
    began = time.monotonic()
    assert box.run("start()\nsay(rc=[alloc(600*MIB)[0], alloc(600*MIB)[0]])").last == {"rc": [0, 2]}
    assert time.monotonic() - began < 2
    folder.chmod(0o755)
    finish(holder)
