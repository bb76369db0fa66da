# SPDX-License-Identifier: Apache-2.0
"""The hook itself built with sanitizers, over the fake driver: no report may name it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

A = "GPU-aaaaaaaa-0000-4000-8000-00000000000a"
GIB, MIB = 1 << 30, 1 << 20
ROOT = Path(__file__).parents[2]
DRIVER = ROOT / "build/fakegpu/usr/lib/x86_64-linux-gnu"
PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(scope="module")
def sanitized(hook_builds):
    lock = str(ROOT / "build" / "locks" / "hook")  # as hook_builds does
    command = ["flock", lock, "make", "-s", "-j2", "-f", "hook/build.mk", "sanitized-builds", f"PY={sys.executable}"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    return hook_builds / "test"


@pytest.fixture(params=["asan", "tsan"])
def confined(request, sanitized, box):
    """A container whose hook is built with a sanitizer, and the environment that brings the sanitizer in."""
    library = subprocess.run(
        ["gcc", f"-print-file-name=lib{request.param}.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    box.install(sanitized / request.param / "libvgpu-strict.so")
    box.env |= {
        "LD_PRELOAD": f"{os.path.realpath(library)} {box.library}",
        "ASAN_OPTIONS": "detect_leaks=0:exitcode=77",
        "UBSAN_OPTIONS": "halt_on_error=1:exitcode=77",
        "TSAN_OPTIONS": "detect_deadlocks=0:exitcode=77",
    }
    return box


def test_random_operations(confined):
    confined.grant("a", A, 300 * MIB)
    confined.grant("b", A, 10 * MIB)
    process = confined.popen([sys.executable, str(PROGRAMS / "random_ops.py"), "11", "500"], hooked=False)
    out, err = process.communicate("\n" * 600, timeout=110)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out.splitlines()[-1]) == {"op": "end", "rc": 0, "used": 0, "managed": 0}


def test_racing_threads(confined, compile_c):
    confined.grant("a", A, 64 * MIB)
    racer = compile_c("alloc_race.c", "-O2", f"-L{DRIVER}", "-l:libcuda.so.1", "-Wl,--no-as-needed")
    process = confined.popen([str(racer), "6", "4000", str(4 * MIB), "1"], hooked=False)
    out, err = process.communicate(timeout=110)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out)["other"] == 0


def test_a_broken_region(confined):
    """Every field of the usage file at random, while two threads work on it."""
    confined.grant("a", A, 64 * MIB)
    code = """
import random, threading
start(); here = c.c_void_p(); call("cuCtxGetCurrent", c.byref(here)); stop = False
def work():
    call("cuCtxSetCurrent", here)
    while not stop:
        rc, p = alloc(MIB)
        if rc == 0: free(p)
        info()
threads = [threading.Thread(target=work) for _ in range(2)]; [t.start() for t in threads]
chance = random.Random(5)
with open(sys.argv[1], "r+b", buffering=0) as f:
    for _ in range(4000):
        f.seek(chance.choice([chance.randrange(300), chance.randrange(4096, 4400)])); f.write(chance.randbytes(8))
stop = True; [t.join() for t in threads]
say(done=True)
"""
    command = [sys.executable, "-c", "from client import *\n" + code, str(confined.region("a"))]
    process = confined.popen(command, hooked=False)
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    assert json.loads(out) == {"done": True}
    assert "Sanitizer" not in err
    assert "runtime error" not in err


def test_b136_host_locations_and_devices_that_do_not_exist(confined):
    """No write outside of our tables, whatever place is named."""
    confined.grant("a", A, GIB)
    code = """
start(); seen = [create(2*MIB, device, kind)[0] for kind in (1, 2, 3, 4, 9, -1) for device in (0, 1, 99, -1, 2**31 - 1)]
say(first=seen[0], used=used())
"""
    command = [sys.executable, "-c", "from memory import *\n" + code]
    process = confined.popen(command, hooked=False)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err.replace("\n", "").count("ERROR:")) == (0, 0), err
    assert json.loads(out) == {"first": 0, "used": 2 * MIB}
