# SPDX-License-Identifier: Apache-2.0
"""Spec files while others look, write, sweep and die: nobody ever sees half of one, nothing stays behind."""

from __future__ import annotations

import concurrent.futures
import ctypes
import fcntl
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aliquot.api.errors import SettingsError
from aliquot.cdi import codec
from aliquot.cdi.load import load_spec
from aliquot.cdi.model import ContainerEdits, Device, Spec
from aliquot.cdi.scan import scan
from aliquot.cdi.store import SpecStore

U1 = "0b1c2d3e-0000-4000-8000-000000000001"
U2 = "0b1c2d3e-0000-4000-8000-000000000002"
KIND = "gpu.aliquot.dev/claim"


def claim(uid: str = U1, value: str = "1", size: int = 1) -> Spec:
    """A spec of a claim; `size` makes it long enough that a reader could catch it half written."""
    edits = ContainerEdits(env=tuple(f"N{index}={value}" for index in range(size)))
    return Spec(cdi_version="0.3.0", kind=KIND, devices=(Device(name=f"c-{uid}-gpu-0", container_edits=edits),))


@pytest.fixture
def store(tmp_path: Path) -> SpecStore:
    made = SpecStore(tmp_path / "cdi", also_read=())
    made.prepare()
    return made


def uid(number: int) -> str:
    return f"0b1c2d3e-0000-4000-8000-{number:012x}"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_sweep_takes_what_a_dead_writer_left_and_leaves_what_a_live_one_holds(store: SpecStore) -> None:
    dead = store.directory / f".gpu.aliquot.dev-claim_{U1}.json.0011.tmp"
    dead.write_text("half")
    held = store.directory / f".gpu.aliquot.dev-claim_{U1}.json.2233.tmp"
    held.write_text("half")
    with held.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        store.sweep(())
        assert names(store.directory) == [held.name]
    store.sweep(())
    assert names(store.directory) == []


WRITER = """
import sys
from pathlib import Path
from aliquot.cdi import codec
from aliquot.cdi.model import Spec
from aliquot.cdi.store import SpecStore
store = SpecStore(Path(sys.argv[1]), also_read=())
spec = Spec.from_dict(codec.decode_json(Path(sys.argv[2]).read_bytes(), "spec"))
print("ready", flush=True)
while True:
    store.write(spec, sys.argv[3])
    store.remove(sys.argv[3])
"""


def test_a_writer_killed_anywhere_leaves_a_whole_file_or_none(store: SpecStore, tmp_path: Path) -> None:
    source = tmp_path / "spec.json"
    source.write_bytes(codec.encode(claim(size=2000)))
    for round_ in range(12):
        argv = [sys.executable, "-c", WRITER, str(store.directory), str(source), U1]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            # Different points of its loop, found by counting entries of the directory rather than by waiting.
            for _ in range(round_ * 40):
                names(store.directory)
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        seen = scan([store.directory])
        assert not seen.errors
        assert set(seen.devices) <= {f"{KIND}=c-{U1}-gpu-0"}
        store.sweep(())
        assert names(store.directory) == []


def test_b124_no_reader_ever_sees_half_a_file_or_a_temporary_one(store: SpecStore) -> None:
    """500 claims come and go by 8 workers, under a reader that loads every file that a runtime would load."""
    done = threading.Event()
    faults: list[str] = []
    reads = 0

    def read() -> None:
        nonlocal reads
        while not done.is_set():
            for path in store.directory.iterdir():
                if path.suffix not in {".json", ".yaml"}:
                    continue
                try:
                    data = path.read_bytes()
                except FileNotFoundError:
                    continue
                reads += 1
                if not path.name.startswith("gpu.aliquot.dev-claim_"):
                    faults.append(f"a temporary file is visible: {path.name}")
                try:
                    Spec.from_dict(codec.decode_json(data, path.name))
                except SettingsError as error:
                    faults.append(str(error))

    def pair(number: int) -> None:
        who = uid(number)  # calls for one claim are serialised by those who make them
        store.write(claim(who, "1", size=400), who)
        store.write(claim(who, "2", size=400), who)
        if number % 25:
            store.remove(who)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as workers:
            list(workers.map(pair, range(500)))
    finally:
        done.set()
        reader.join()
    assert faults == []
    assert reads > 100
    assert store.list_own() == tuple(uid(number) for number in range(0, 500, 25))
    assert len(names(store.directory)) == 20


class SweptStore(SpecStore):
    """A store that another process sweeps just when a temporary file is made but not locked yet."""

    sweeps = 2

    def _lock(self, descriptor: int) -> None:
        if self.sweeps:
            self.sweeps -= 1
            SpecStore(self.directory, also_read=()).sweep({U1})
            assert os.fstat(descriptor).st_nlink == 0
        super()._lock(descriptor)


def test_a_writer_whose_temporary_file_was_swept_takes_another(store: SpecStore) -> None:
    swept = SweptStore(store.directory, also_read=())
    assert load_spec(swept.write(claim(), U1)) == claim()
    assert swept.sweeps == 0
    assert names(store.directory) == [swept.path(U1).name]


def test_sweeps_and_writers_do_not_get_in_each_others_way(store: SpecStore) -> None:
    stop = threading.Event()

    def sweep() -> None:
        while not stop.is_set():
            store.sweep({uid(number) for number in range(16)})

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as workers:
            list(workers.map(lambda n: [store.write(claim(uid(n), str(i)), uid(n)) for i in range(12)], range(16)))
    finally:
        stop.set()
        sweeper.join()
    assert store.list_own() == tuple(uid(number) for number in range(16))
    assert len(names(store.directory)) == 16


def test_a_running_runtime_notices_each_write_and_each_removal_by_itself(store: SpecStore, reference: Any) -> None:
    """The reference library as a runtime keeps it, told nothing: it has to see our renames and unlinks."""
    with reference.session() as ask:

        def devices() -> list[str]:
            return ask({"op": "live", "dirs": [str(store.directory)]}).get("devices") or []

        def comes(wanted: list[str]) -> bool:
            deadline = time.monotonic() + 10
            while devices() != wanted and time.monotonic() < deadline:
                pass
            return devices() == wanted

        assert devices() == []
        for round_ in range(5):
            store.write(claim(U1, str(round_)), U1)
            assert comes([f"{KIND}=c-{U1}-gpu-0"])
            store.write(claim(U2, str(round_)), U2)
            assert comes([f"{KIND}=c-{U1}-gpu-0", f"{KIND}=c-{U2}-gpu-0"])
            store.remove(U1)
            assert comes([f"{KIND}=c-{U2}-gpu-0"])
            store.sweep(())
            assert comes([])


class Runtime:
    """The reference library as a runtime keeps it, and a fresh look of ours at the same directory."""

    def __init__(self, ask: Any, directory: Path) -> None:
        self._ask, self._directory = ask, directory

    def devices(self) -> list[str]:
        found: list[str] = self._ask({"op": "live", "dirs": [str(self._directory)]}).get("devices") or []
        return [name.partition("=")[2] for name in found]

    def comes_to(self, wanted: list[str]) -> bool:
        deadline = time.monotonic() + 10
        while self.devices() != wanted and time.monotonic() < deadline:
            pass
        return self.devices() == wanted

    def stays_at(self, wanted: list[str]) -> bool:
        deadline = time.monotonic() + 0.15  # it notices within a millisecond what it notices at all
        while self.devices() == wanted and time.monotonic() < deadline:
            pass
        return self.devices() == wanted

    def fresh(self) -> list[str]:
        return sorted(name.partition("=")[2] for name in scan([self._directory]).devices)


@pytest.fixture
def runtime(store: SpecStore, reference: Any) -> Iterator[Runtime]:
    """A runtime that has seen the first claim's file, written by the store."""
    with reference.session() as ask:
        made = Runtime(ask, store.directory)
        assert made.devices() == []
        store.write(claim(U1), U1)
        assert made.comes_to([NAME1])
        yield made


NAME1, NAME2 = f"c-{U1}-gpu-0", f"c-{U2}-gpu-0"


def test_style_rename_within_the_directory_is_noticed(store: SpecStore, runtime: Runtime) -> None:
    part = store.directory / "x.tmp"
    part.write_bytes(codec.encode(claim(U2)))
    assert runtime.stays_at([NAME1])
    assert runtime.fresh() == [NAME1]
    part.rename(store.directory / "x.json")
    assert runtime.comes_to([NAME1, NAME2])
    assert runtime.fresh() == [NAME1, NAME2]


def test_style_write_in_place_is_noticed_and_half_of_it_harms_no_other(store: SpecStore, runtime: Runtime) -> None:
    data = codec.encode(claim(U2, size=50))
    path = store.directory / "x.json"
    with path.open("wb", buffering=0) as file:
        file.write(data[: len(data) // 2])
        assert runtime.stays_at([NAME1])
        seen = scan([store.directory])
        assert runtime.fresh() == [NAME1]
        assert list(seen.errors) == [path]
        store.write(claim(U1, "2"), U1)  # and the store works on beside it
        file.write(data[len(data) // 2 :])
    assert runtime.comes_to([NAME1, NAME2])
    assert runtime.fresh() == [NAME1, NAME2]
    assert not scan([store.directory]).errors


def test_style_unlink_is_noticed(store: SpecStore, runtime: Runtime) -> None:
    store.path(U1).unlink()
    assert runtime.comes_to([])
    assert runtime.fresh() == []


@pytest.mark.parametrize("style", ["moved in from another directory", "hard link of a finished file"])
def test_style_of_files_finished_elsewhere_is_noticed_by_the_newest_runtimes(
    store: SpecStore, runtime: Runtime, tmp_path: Path, style: str
) -> None:
    """Libraries up to 1.1.0 sleep through both until something else happens, so the store does neither (below)."""
    elsewhere = tmp_path / "x.json"
    elsewhere.write_bytes(codec.encode(claim(U2)))
    if style.startswith("moved"):
        elsewhere.rename(store.directory / "x.json")
    else:
        (store.directory / "x.json").hardlink_to(elsewhere)
    assert runtime.fresh() == [NAME1, NAME2]
    assert runtime.comes_to([NAME1, NAME2])


MOVED_FROM, MOVED_TO, CREATE, DELETE = 0x40, 0x80, 0x100, 0x200


def test_the_store_writes_in_the_style_that_every_runtime_notices(store: SpecStore) -> None:
    """A rename within the directory, and an unlink: the kernel's own record of what happened to the file."""
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        assert libc.inotify_add_watch(watch, os.fsencode(store.directory), 0x3C0) > 0
        final = store.write(claim(), U1).name
        store.write(claim(value="2"), U1)
        store.remove(U1)
        data = os.read(watch, 1 << 16)
    finally:
        os.close(watch)
    events = []
    while data:
        _, mask, cookie, length = struct.unpack_from("iIII", data)
        events.append((mask, cookie, data[16 : 16 + length].rstrip(b"\0").decode()))
        data = data[16 + length :]
    assert [mask for mask, _, _ in events] == [CREATE, MOVED_FROM, MOVED_TO] * 2 + [DELETE]
    for made, source, target in (events[:3], events[3:6]):
        assert made[2] == source[2] != final == target[2]
        assert made[2].endswith(".tmp")  # no runtime looks at it
        assert source[1] == target[1] != 0
    assert events[6][2] == final
