# SPDX-License-Identifier: Apache-2.0
"""The account and the table for real: racing processes, killed ones, every instruction, and the sanitizers."""

from __future__ import annotations

import random
import signal
import struct
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INCLUDES = [f"-I{ROOT}/hook/include", f"-I{ROOT}/hook/src"]
ACCOUNT = [*INCLUDES, f"{ROOT}/hook/src/account.c"]
LIMIT = 10_000
KILLS = 80


STUB = "GPU-" + "-".join(["aa" * 4, "aa" * 2, "aa" * 2, "aa" * 2, "aa" * 6])

ADDER = """
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
int main(int n, char **words) /* atomically: others are counting in the file */
{
    int64_t *truth = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, open(words[1], O_RDWR), 0);
    __atomic_fetch_add(truth, atoll(words[2]), __ATOMIC_SEQ_CST);
    return n != 3;
}
"""


@pytest.fixture
def field(tmp_path, hook_builds, node):
    """A usage file, and the truth beside it."""
    region, truth = tmp_path / "region", tmp_path / "truth"
    assert node.lib.aq_usage_create(str(region).encode()) == 0
    truth.write_bytes(bytes(8 * (2 + 4096)))
    return region, truth


def racer(field, program: Path, operations: int, threads: int, seed: int) -> subprocess.Popen:
    command = [str(program), str(field[0]), str(field[1]), str(LIMIT), str(operations), str(threads), str(seed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def truth_of(field) -> tuple[int, int]:
    return struct.unpack("<qQ", field[1].read_bytes()[:16])


@pytest.mark.parametrize(("processes", "threads", "operations"), [(8, 1, 400_000), (3, 4, 150_000), (60, 1, 20_000)])
def test_racing_processes_never_pass_the_limit(field, compile_c, node, processes, threads, operations):
    program = compile_c("account_race.c", *ACCOUNT, "-O2")
    running = [racer(field, program, operations, threads, seed) for seed in range(processes)]
    for process in running:
        process.communicate(timeout=100)
        assert process.returncode == 0, "the truth passed the limit" if process.returncode == 3 else process.returncode
    held, most = truth_of(field)
    assert held == 0
    assert most > LIMIT * 0.98, "the limit was never reached, so nothing was tested"
    assert node.used(field[0]) == 0


def test_storm_of_kills(field, compile_c, node):
    """Processes are killed at random moments; never is more held than the limit, and nothing stays behind."""
    program = compile_c("account_race.c", *ACCOUNT, "-O2")
    adder = compile_c(ADDER)
    chance = random.Random(4)
    running: list[subprocess.Popen] = []
    seed = 0
    for _ in range(KILLS):
        while len(running) < 6:
            seed += 1
            running.append(racer(field, program, 10**15, 2, seed))
        victim = running.pop(chance.randrange(len(running)))
        owner = int(victim.stdout.readline())
        time.sleep(chance.random() * 0.02)
        victim.kill()
        victim.communicate()
        assert victim.returncode == -signal.SIGKILL, "it ended by itself: the truth passed the limit"
        # The driver takes the memory of a dead process back; then the node gives its charge back.
        with field[1].open("r+b") as f:
            f.seek(16 + 8 * (victim.pid % 4096))
            held = struct.unpack("<Q", f.read(8))[0]
            f.seek(16 + 8 * (victim.pid % 4096))
            f.write(bytes(8))
        assert held <= LIMIT
        assert subprocess.run([str(adder), str(field[1]), str(-held)], check=False).returncode == 0
        report = node.settle(field[0], owner)
        assert report.reaped == 1
    for process in running:
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    assert truth_of(field)[1] > LIMIT * 0.98, "the limit was never reached, so nothing was tested"
    owners = [int.from_bytes(field[0].read_bytes()[4096 + 128 * i : 4104 + 128 * i], "little") for i in range(64)]
    report = node.settle(field[0], *[o for o in owners if o])
    assert (report.used_bytes, report.unsettled) == (0, 0)


@pytest.mark.parametrize("operation", ["reserve", "release", "claim", "reap", "settle"])
def test_kill_at_every_instruction(field, compile_c, operation):
    program = compile_c("account_step.c", *ACCOUNT, "-O2", "-static")
    done = subprocess.run(
        [str(program), str(field[0]), operation], check=False, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout
    assert int(done.stdout) > 20


def test_grant_changes_whole_whatever_instruction_its_writer_is_killed_at(tmp_path, hook_builds, compile_c):
    """A resize cut short leaves the grant before or the new one, and the next resize goes through."""
    sources = [f"{ROOT}/hook/src/{s}.c" for s in ("region_grant", "region_map", "guard")]
    program = compile_c("grant_step.c", *INCLUDES, *sources, "-O2", "-static")
    done = subprocess.run([str(program), str(tmp_path)], check=False, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout
    steps, states = map(int, done.stdout.split())
    assert steps > 1000
    assert states > 20


@pytest.mark.parametrize("operation", ["alloc", "refused", "resize", "context"])
def test_the_hook_killed_at_every_instruction(stub_box, stub_driver, compile_c, operation):
    """From a program's call to its return: claim, charge, driver, give back, refusal, a grant that has changed."""
    stub_box.grant("g", STUB, 100 << 20, context_overhead=(3 << 20) * (operation == "context"))
    sources = [f"{ROOT}/hook/src/{s}.c" for s in ("account", "region_grant", "region_map", "guard")]
    link = [f"-L{stub_driver}", "-l:libcuda.so.1", "-Wl,--no-as-needed"]
    program = compile_c("hook_step.c", *INCLUDES, *sources, "-O2", *link)
    grant = stub_box.root / "grants" / "g"
    result = stub_box.run([str(program), str(stub_box.region("g")), str(grant), operation], ok=False, timeout=110)
    assert result.code == 0, result.out
    steps, states = map(int, result.out.split()[-2:])
    assert steps > 1000
    assert states > (1 if operation == "refused" else 4)


SANITIZERS = {"thread": ["-fsanitize=thread"], "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover"]}


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_account_under_sanitizers(field, compile_c, sanitizer):
    program = compile_c("account_race.c", *ACCOUNT, "-O1", *SANITIZERS[sanitizer])
    running = [racer(field, program, 20_000, 3, seed) for seed in range(2)]
    for process in running:
        process.communicate(timeout=100)
        assert process.returncode == 0
    assert truth_of(field)[0] == 0


@pytest.mark.parametrize("sanitizer", [None, *SANITIZERS])
@pytest.mark.parametrize("live", [10, 20_000])
def test_table(hook_builds, compile_c, sanitizer, live):
    flags = SANITIZERS[sanitizer] if sanitizer else ["-O2"]
    program = compile_c("table_check.c", *INCLUDES, f"{ROOT}/hook/src/table.c", *flags)
    done = subprocess.run(
        [str(program), "4", "60000", str(live)], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[1]) > 0
