# SPDX-License-Identifier: Apache-2.0
"""libaliquot-region.so, as a node daemon uses it: grant files, usage files, reaping, and files that a tenant broke."""

from __future__ import annotations

import ctypes as c
import errno
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


class GrantSlot(c.Structure):
    _fields_ = [
        ("generation", c.c_uint64),
        ("memory_limit", c.c_uint64),
        ("physical_memory", c.c_uint64),
        ("context_overhead", c.c_uint64),
        ("core_percent", c.c_uint32),
        ("core_policy", c.c_uint32),
        ("priority", c.c_uint32),
        ("flags", c.c_uint32),
        ("uuid", c.c_char * 96),
        ("bus_id", c.c_char * 32),
        ("name", c.c_char * 192),
        ("reserved", c.c_uint8 * (1024 - 48 - 96 - 32 - 192 - 8)),
        ("pad", c.c_uint32),
        ("checksum", c.c_uint32),
    ]


class Hints(c.Structure):
    _fields_ = [(n, c.c_uint64) for n in ("suspended", "burst_until_ns", "hold_until_ns", "heartbeat_ns", "ratio")]


class Process(c.Structure):
    _fields_ = [
        ("owner", c.c_uint64),
        ("pidns", c.c_uint64),
        ("start_time", c.c_uint64),
        ("pid", c.c_uint32),
        ("index", c.c_uint32),
        *[
            (n, c.c_uint64)
            for n in ["host_pid", "used_bytes", "context_bytes", "spilled_bytes", "launches", "device_ns"]
        ],
    ]


class Report(c.Structure):
    _fields_ = [
        *[
            (n, c.c_uint64)
            for n in ["used_bytes", "busy_ns", "done_ns", "last_launch_ns", "complaints", "repaired_bytes"]
        ],
        *[(n, c.c_uint32) for n in ["occupied", "reaped", "unsettled", "suspicious"]],
    ]


@pytest.fixture(scope="module")
def lib():
    return c.CDLL(str(ROOT / "build/hook/libaliquot-region.so"))


def grant(memory: int = 4096 * MIB, cores: int = 50) -> GrantSlot:
    return GrantSlot(memory_limit=memory, core_percent=cores, uuid=b"GPU-a", name=b"c-u1-gpu-0")


def write_word(path: Path, offset: int, value: int) -> None:
    with path.open("r+b") as f:
        f.seek(offset)
        f.write(value.to_bytes(8, "little"))


def owner_word(pid: int, start: int, generation: int = 0) -> int:
    return 1 << 62 | generation << 54 | (start & 0xFFFFFFFF) << 22 | pid


def occupy(path: Path, index: int, units: int, pid: int = 77, start: int = 5) -> int:
    """A slot as a hook leaves it, and the account raised by its charge."""
    base = 4096 + 128 * index
    owner = owner_word(pid, start)
    write_word(path, base, owner)
    write_word(path, base + 8, units | 7 << 33)
    write_word(path, base + 16, 4026531836)
    raw = path.read_bytes()
    account = int.from_bytes(raw[128:136], "little")
    write_word(path, 128, account + units)
    write_word(path, 152, index + 1)
    return owner


@pytest.fixture
def usage(lib, tmp_path) -> Path:
    path = tmp_path / "region"
    assert lib.aq_usage_create(str(path).encode()) == 0
    return path


def settle(lib, path: Path, *dead: int) -> tuple[int, Report]:
    report = Report()
    words = (c.c_uint64 * max(1, len(dead)))(*dead)
    return lib.aq_usage_settle(str(path).encode(), words, c.c_size_t(len(dead)), c.byref(report)), report


def read(lib, path: Path) -> tuple[int, Report, list[Process]]:
    report, processes = Report(), (Process * 1024)()
    n = lib.aq_usage_read(str(path).encode(), c.byref(report), processes, c.c_size_t(1024))
    return n, report, list(processes[: max(n, 0)])


def test_grant_is_created_whole_and_only_once(lib, tmp_path):
    path = tmp_path / "g"
    old = os.umask(0o077)
    try:
        assert lib.aq_grant_create(str(path).encode(), c.byref(grant())) == 0
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o7777 == 0o444
    assert path.stat().st_size == 4096
    raw = path.read_bytes()
    assert zlib.crc32(raw[512 : 512 + 1020]) == int.from_bytes(raw[512 + 1020 : 512 + 1024], "little")
    assert lib.aq_grant_create(str(path).encode(), c.byref(grant(1))) == -errno.EEXIST
    assert path.read_bytes() == raw
    assert [p.name for p in tmp_path.iterdir()] == ["g"]


def test_grant_changes_in_place(lib, tmp_path):
    path = tmp_path / "g"
    lib.aq_grant_create(str(path).encode(), c.byref(grant()))
    inode = path.stat().st_ino
    out = GrantSlot()
    for megabytes in (100, 200, 300):
        assert lib.aq_grant_update(str(path).encode(), c.byref(grant(megabytes * MIB))) == 0
        assert lib.aq_grant_read(str(path).encode(), c.byref(out)) == 0
        assert (out.memory_limit, out.core_percent, out.name) == (megabytes * MIB, 50, b"c-u1-gpu-0")
    before = path.read_bytes()
    assert lib.aq_grant_update(str(path).encode(), c.byref(grant(300 * MIB))) == 0
    assert path.read_bytes() == before, "an update without a change wrote something"
    assert path.stat().st_ino == inode


def test_writer_killed_while_filling_a_slot_leaves_the_old_one(lib, tmp_path):
    path = tmp_path / "g"
    lib.aq_grant_create(str(path).encode(), c.byref(grant(100 * MIB)))
    with path.open("r+b") as f:  # selector is 2, so the next version goes to slot 1
        f.seek(512 + 1024)
        f.write(b"\xaa" * 700)
    out = GrantSlot()
    assert lib.aq_grant_read(str(path).encode(), c.byref(out)) == 0
    assert out.memory_limit == 100 * MIB
    assert lib.aq_grant_update(str(path).encode(), c.byref(grant(200 * MIB))) == 0
    assert lib.aq_grant_read(str(path).encode(), c.byref(out)) == 0
    assert out.memory_limit == 200 * MIB


def test_grant_with_both_slots_damaged_is_refused(lib, tmp_path):
    path = tmp_path / "g"
    lib.aq_grant_create(str(path).encode(), c.byref(grant()))
    with path.open("r+b") as f:
        f.seek(600)
        f.write(b"\xff" * 2000)
    assert lib.aq_grant_read(str(path).encode(), c.byref(GrantSlot())) == -errno.EBADMSG


def test_hints_change_only_what_is_named(lib, tmp_path):
    path = tmp_path / "g"
    keep = 2**64 - 1
    lib.aq_grant_create(str(path).encode(), c.byref(grant()))
    assert lib.aq_grant_hint(str(path).encode(), c.byref(Hints(1, keep, 77, keep, keep))) == 0
    assert lib.aq_grant_hint(str(path).encode(), c.byref(Hints(keep, 5, keep, keep, 9))) == 0
    raw = path.read_bytes()
    assert [int.from_bytes(raw[32 + 8 * i : 40 + 8 * i], "little") for i in range(5)] == [1, 5, 77, 0, 9]


def test_usage_file_is_open_to_every_user_of_the_container(lib, tmp_path):
    old = os.umask(0o077)
    try:
        assert lib.aq_usage_create(str(tmp_path / "r").encode()) == 0
    finally:
        os.umask(old)
    assert (tmp_path / "r").stat().st_mode & 0o7777 == 0o666
    assert lib.aq_usage_create(str(tmp_path / "r").encode()) == -errno.EEXIST


def test_dead_owner_is_given_back_and_others_stay(lib, usage):
    dead = occupy(usage, 0, 1000)
    occupy(usage, 3, 500, pid=78)
    n, report, processes = read(lib, usage)
    assert (n, report.used_bytes, report.occupied, report.unsettled) == (2, 1500 * 512, 2, 0)
    assert [(p.pid, p.index, p.used_bytes, p.start_time) for p in processes] == [(77, 0, 512000, 5), (78, 3, 256000, 5)]
    rc, report = settle(lib, usage, dead)
    assert (rc, report.reaped, report.used_bytes, report.repaired_bytes) == (0, 1, 500 * 512, 1000 * 512)
    assert [p.pid for p in read(lib, usage)[2]] == [78]


def test_slot_claimed_since_the_look_is_not_touched(lib, usage):
    occupy(usage, 0, 1000)
    rc, report = settle(lib, usage, owner_word(77, 5, generation=9))
    assert (rc, report.reaped, report.used_bytes) == (0, 0, 512000)


def test_units_that_a_killed_process_left_in_the_account_are_taken_off(lib, usage):
    occupy(usage, 0, 1000)
    raw = usage.read_bytes()
    write_word(usage, 128, int.from_bytes(raw[128:136], "little") + 300)
    assert read(lib, usage)[1].unsettled == 1
    rc, report = settle(lib, usage)
    assert (rc, report.repaired_bytes, report.used_bytes, report.unsettled) == (0, 300 * 512, 512000, 0)


def test_host_pid_only_for_the_owner_it_was_found_for(lib, usage):
    owner = occupy(usage, 2, 10)
    call = lib.aq_usage_set_host_pid
    call.argtypes = [c.c_char_p, c.c_uint32, c.c_uint64, c.c_uint64]
    assert call(str(usage).encode(), 2, owner, 4711) == 0
    assert call(str(usage).encode(), 2, owner + 1, 1) == -errno.ESRCH
    assert call(str(usage).encode(), 5000, owner, 1) == -errno.ERANGE
    assert read(lib, usage)[2][0].host_pid == 4711


@pytest.mark.parametrize("fill", [0x00, 0xFF, 0xAA])
@pytest.mark.parametrize("start", [0, 8, 16, 128, 256, 4096])
def test_scribbled_file_is_read_as_far_as_it_is_sane(lib, usage, fill, start):
    with usage.open("r+b") as f:
        f.seek(start)
        f.write(bytes([fill]) * (135168 - start))
    n, report, _ = read(lib, usage)
    assert n == -errno.EPROTO or 0 <= n <= 1024
    assert n >= 0 or report.suspicious
    rc, _ = settle(lib, usage, 0xFFFFFFFFFFFFFFFF, 1)
    assert rc in (0, -errno.EPROTO)


@pytest.mark.parametrize("size", [0, 10, 4096, 135167])
def test_truncated_file(lib, usage, size):
    os.truncate(usage, size)
    n, report, _ = read(lib, usage)
    assert (n, report.suspicious) == (-errno.EPROTO, 1)
    assert settle(lib, usage)[0] == -errno.EPROTO


def test_file_cut_short_under_a_running_call(lib, usage, tmp_path):
    """SIGBUS inside a call ends that call only; a hole in the header forces it without a race."""
    script = f"""
import ctypes as c, os, signal, threading
lib = c.CDLL({str(ROOT / "build/hook/libaliquot-region.so")!r})
path = {str(usage)!r}
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGBUS])
stop = threading.Event()
def cut():
    while not stop.is_set():
        os.truncate(path, 0)
        os.truncate(path, 135168)
        with open(path, "r+b") as f:
            f.write({usage.read_bytes()[:4096]!r})
thread = threading.Thread(target=cut)
thread.start()
seen = set()
report = (c.c_uint64 * 8)()
words = (c.c_uint64 * 1)()
try:
    for _ in range(20000):
        seen.add(lib.aq_usage_settle(path.encode(), words, c.c_size_t(0), report))
finally:
    stop.set()
    thread.join()
print(sorted(seen))
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert set(eval(done.stdout)) <= {0, -errno.EIO, -errno.EPROTO}


def test_link_fifo_and_directory_are_refused_without_waiting(lib, tmp_path, usage):
    (tmp_path / "link").symlink_to(usage)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "dir").mkdir()
    assert read(lib, tmp_path / "link")[0] == -errno.ELOOP
    assert read(lib, tmp_path / "fifo")[0] == -errno.EPROTO
    assert read(lib, tmp_path / "dir")[0] in (-errno.EPROTO, -errno.ENODEV)
    assert read(lib, tmp_path / "nothing")[0] == -errno.ENOENT


def test_later_minor_with_longer_slots_is_read(lib, usage):
    raw = bytearray(usage.read_bytes()[:4096])
    raw[6:8] = (9).to_bytes(2, "little")
    raw[8:12] = (8192 + 256 * 64).to_bytes(4, "little")
    raw[12:16] = (8192).to_bytes(4, "little")
    raw[16:20] = (256).to_bytes(4, "little")
    raw[20:24] = (64).to_bytes(4, "little")
    usage.write_bytes(bytes(raw) + bytes(4096 + 256 * 64 + 200000))
    write_word(usage, 8192 + 256 * 5, owner_word(77, 5))
    write_word(usage, 8192 + 256 * 5 + 8, 40)
    write_word(usage, 152, 6)
    n, _, processes = read(lib, usage)
    assert (n, processes[0].index, processes[0].used_bytes) == (1, 5, 40 * 512)


def test_other_major_is_refused(lib, usage):
    with usage.open("r+b") as f:
        f.seek(4)
        f.write(b"\x02\x00")
    assert read(lib, usage)[0] == -errno.EPROTO
