# SPDX-License-Identifier: Apache-2.0
"""The standalone build: HAMi's variables, HAMi's region."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

A = "GPU-aaaaaaaa-0000-4000-8000-00000000000a"
B = "GPU-bbbbbbbb-0000-4000-8000-00000000000b"
GIB, MIB = 1 << 30, 1 << 20
MORE = "from memory import *\n"


@pytest.fixture
def region(tmp_path):
    return tmp_path / "vgpu.cache"


@pytest.fixture
def run(free_box, region):
    def go(code: str, **env: str):
        return free_box.run(MORE + code, env={"CUDA_DEVICE_MEMORY_SHARED_CACHE": str(region)} | env)

    return go


def test_no_limit_means_the_drivers_own_functions(free_box, run, region):
    code = """
from ctypes import CDLL, c_char_p, c_void_p
dlsym = CDLL(None).dlsym; dlsym.restype, dlsym.argtypes = c_void_p, [c_void_p, c_char_p]
start()
where = [line for line in open("/proc/self/maps") if "r-x" in line or "r-xp" in line]
def owner(name):
    at = dlsym(cuda._handle, name)
    for line in where:
        low, high = (int(x, 16) for x in line.split()[0].split("-"))
        if low <= at < high: return line.split()[-1].rsplit("/", 1)[1].split(".so")[0]
p = c_void_p(); call("cuGetProcAddress_v2", b"cuMemAlloc", byref(p), 12000, c_uint64(0), None)
say(owners=sorted({owner(n) for n in (b"cuMemAlloc_v2", b"cuLaunchKernel", b"cuMemGetInfo_v2", b"cuInit")}),
    same=p.value == dlsym(cuda._handle, b"cuMemAlloc_v2"), total=total(), rc=alloc(20*GIB)[0])
"""
    got = run(code).last
    assert got == {"owners": ["libcuda"], "same": True, "total": 24 * GIB, "rc": 0}
    assert not region.exists(), "a region was made for nobody"


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("1g", GIB), ("1G", GIB), ("1024m", GIB), ("1024M", GIB), ("1048576k", GIB), ("0x40000000", GIB),
        ("1073741824", GIB), ("0", 0), ("0m", 0), ("", 0), ("nonsense", 0), ("1t", 0), ("-1", 0), ("1gg", 0),
        ("18446744073709551615g", 0), ("30g", 24 * GIB),
    ],
)  # fmt: skip
def test_b141_one_meaning_of_every_text(run, text, limit):
    got = run("start()\nsay(cuda=total(), nvml=nvml()[0], info=info()[1])", CUDA_DEVICE_MEMORY_LIMIT=text).last
    assert set(got.values()) == {limit or 24 * GIB}


def test_limit_by_index_is_by_the_cards_number_in_the_container(run):
    limits = {"CUDA_DEVICE_MEMORY_LIMIT_0": "1g", "CUDA_DEVICE_MEMORY_LIMIT_1": "2g"}
    code = "init()\nsay(cuda=[total(i) for i in range({})], nvml=[nvml(0)[0], nvml(1)[0]])"
    assert run(code.format(2), **limits).last == {"cuda": [GIB, 2 * GIB], "nvml": [GIB, 2 * GIB]}
    assert run(code.format(1), CUDA_VISIBLE_DEVICES="1", **limits).last["cuda"] == [2 * GIB]
    assert run(code.format(2), CUDA_VISIBLE_DEVICES="1,0", **limits).last["cuda"] == [2 * GIB, GIB]
    assert run(code.format(1), CUDA_VISIBLE_DEVICES=B, **limits).last["cuda"] == [2 * GIB]
    only = {"CUDA_DEVICE_MEMORY_LIMIT_1": "2g"}
    assert run(code.format(2), **only).last == {"cuda": [24 * GIB, 2 * GIB], "nvml": [24 * GIB, 2 * GIB]}


def test_processes_share_the_limit_through_the_region(free_box, run, region):
    env = {"CUDA_DEVICE_MEMORY_SHARED_CACHE": str(region), "CUDA_DEVICE_MEMORY_LIMIT": "1g"}
    first = free_box.python(MORE + "start()\nsay(rc=alloc(700*MIB)[0]); wait()", env=env)
    assert json.loads(first.stdout.readline()) == {"rc": 0}
    code = "start()\nsay(used=used(), rc=[alloc(400*MIB)[0], alloc(324*MIB)[0], alloc(1)[0]])"
    limit = {"CUDA_DEVICE_MEMORY_LIMIT": "1g"}
    assert run(code, **limit).last == {"used": 700 * MIB, "rc": [2, 0, 2]}
    first.kill()
    first.communicate()
    assert run(code, **limit).last == {"used": 0, "rc": [0, 0, 0]}


def v1(region) -> dict:
    """What HAMi's monitor reads: offsets of hook.md 1.6."""
    raw = region.read_bytes()
    assert len(raw) >= 2008952
    magic, major, minor = struct.unpack_from("<iII", raw, 0)
    count, priority = struct.unpack_from("<i", raw, 2008896)[0], struct.unpack_from("<i", raw, 2008908)[0]
    used = [0] * 16
    context = [0] * 16
    for i in range(max(0, min(count, 1024))):
        at = 1856 + 1960 * i
        if struct.unpack_from("<i", raw, at + 1928)[0] == 0:
            continue
        for card in range(16):
            c, module, data, offset, total = struct.unpack_from("<5Q", raw, at + 8 + 64 * card)
            assert c + module + data + offset == total
            used[card] += total
            context[card] += c
    return {
        "head": (magic, major, minor),
        "devices": struct.unpack_from("<Q", raw, 56)[0],
        "uuids": [raw[64 + 96 * i : 64 + 96 * i + 40].decode() for i in range(2)],
        "limit": list(struct.unpack_from("<2Q", raw, 1600)),
        "cores": list(struct.unpack_from("<2Q", raw, 1728)),
        "used": used[:2],
        "context": context[:2],
        "priority": priority,
    }


def test_hami_monitor_sees_what_is_in_use(free_box, run, region):
    env = {
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(region), "CUDA_DEVICE_MEMORY_LIMIT_0": "1g",
        "CUDA_DEVICE_MEMORY_LIMIT_1": "2g", "CUDA_DEVICE_SM_LIMIT": "30", "CUDA_TASK_PRIORITY": "1",
    }  # fmt: skip
    code = (
        MORE
        + """
start(0); rc, p = alloc(300*MIB); context(1); alloc(100*MIB)
say(x=1); wait(); free(p); say(x=2); wait()
"""
    )
    first = free_box.python(code, env=env)
    first.stdout.readline()
    second = free_box.python(MORE + "start(); alloc(50*MIB); say(x=1); wait()", env=env)
    second.stdout.readline()
    seen = v1(region)
    assert seen["head"] == (19920718, 1, 2)
    assert seen["devices"] == 2
    assert seen["uuids"] == [A, B]
    assert seen["limit"] == [GIB, 2 * GIB]
    assert seen["cores"] == [30, 30]
    assert seen["used"] == [350 * MIB, 100 * MIB]
    assert seen["priority"] == 1
    first.stdin.write("\n")
    first.stdin.flush()
    first.stdout.readline()
    assert v1(region)["used"] == [50 * MIB, 100 * MIB]
    first.kill()
    first.communicate()
    second.communicate("\n", timeout=20)
    run("start(0); context(1); alloc(MIB); os._exit(0)", **env)
    assert v1(region)["used"] == [0, MIB]


def test_region_of_an_older_process_of_hami_is_taken_over(run, region):
    region.write_bytes(struct.pack("<iII", 19920718, 1, 2) + bytes(2008952 - 12 + 1))
    got = run("start()\nsay(rc=[alloc(GIB)[0], alloc(1)[0]])", CUDA_DEVICE_MEMORY_LIMIT="1g").last
    assert got == {"rc": [0, 2]}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda p: p.mkdir(),
        os.mkfifo,
        lambda p: p.symlink_to("/etc/passwd"),
        lambda p: p.write_bytes(b"\xff" * (2097152 + 16 * 135168)),
        lambda p: p.write_bytes(b"x"),
    ],
)
def test_b173_a_region_that_cannot_be_had_leaves_a_limit_of_its_own(run, region, spoil):
    before = Path("/etc/passwd").read_bytes()
    spoil(region)
    got = run("start()\nsay(total=total(), rc=[alloc(GIB)[0], alloc(1)[0]])", CUDA_DEVICE_MEMORY_LIMIT="1g")
    assert got.last == {"total": GIB, "rc": [0, 2]}
    assert Path("/etc/passwd").read_bytes() == before


def test_region_is_for_every_user_whatever_the_umask(run, region):
    run("os.umask(0o077); start(); alloc(1)", CUDA_DEVICE_MEMORY_LIMIT="1g")
    assert region.stat().st_mode & 0o777 == 0o666


def test_a_grant_wins_over_the_variables(free_box, run):
    free_box.grant("a", A, GIB)
    got = run("start()\nsay(total=total(), rc=alloc(2*GIB)[0])", CUDA_DEVICE_MEMORY_LIMIT="10g").last
    assert got == {"total": GIB, "rc": 2}


def test_in_grant_mode_hami_monitor_sees_it_too(box, region):
    """The legacy door writes HAMi's variables beside the grant, since the monitor may be HAMi's."""
    box.grant("a", A, GIB)
    env = {"CUDA_DEVICE_MEMORY_SHARED_CACHE": str(region)}
    process = box.python("start(); alloc(300*MIB); say(x=1); wait()", env=env)
    process.stdout.readline()
    seen = v1(region)
    assert seen["used"][0] == 300 * MIB
    assert seen["limit"][0] == GIB
    assert seen["uuids"][0] == A
    process.communicate("\n", timeout=20)


def test_the_dead_vanish_from_the_figures_without_a_node(free_box, region):
    env = {"CUDA_DEVICE_MEMORY_SHARED_CACHE": str(region), "CUDA_DEVICE_MEMORY_LIMIT": "1g"}
    watcher = free_box.python(
        MORE
        + """
import time
start(); alloc(MIB); say(x=1); wait(); before = used()
wait(); end = time.monotonic() + 5
while used() != MIB and time.monotonic() < end: pass
say(before=before, after=used())
""",
        env=env,
    )
    watcher.stdout.readline()
    other = free_box.python(MORE + "start(); alloc(300*MIB); say(x=1); wait()", env=env)
    other.stdout.readline()
    watcher.stdin.write("\n")
    watcher.stdin.flush()
    other.kill()
    other.communicate()
    out, _ = watcher.communicate("\n", timeout=20)
    got = json.loads(out)
    assert got["after"] == MIB
    assert got["before"] in (MIB, 301 * MIB)
