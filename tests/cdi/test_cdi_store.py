# SPDX-License-Identifier: Apache-2.0
"""Spec files on disk: whole or not at all, ours and nobody else's, gone when the claim is."""

from __future__ import annotations

import concurrent.futures
import ctypes
import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aliquot.api.errors import ConflictError, HardwareError, InternalError, SettingsError
from aliquot.api.grant import Grant
from aliquot.cdi import codec
from aliquot.cdi.driver_files import CardAddress
from aliquot.cdi.edits import spec_for
from aliquot.cdi.load import load_spec
from aliquot.cdi.model import ContainerEdits, Device, Spec
from aliquot.cdi.scan import scan
from aliquot.cdi.store import SpecStore
from aliquot.cdi.validate import Level

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


# --- writing ------------------------------------------------------------------------------------------------------


def test_a_file_holds_the_spec_and_everyone_may_read_it(store: SpecStore) -> None:
    old = os.umask(0o077)
    try:
        path = store.write(claim(), U1)
    finally:
        os.umask(old)
    assert path.name == f"gpu.aliquot.dev-claim_{U1}.json"
    assert load_spec(path, Level.STRICT) == claim()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert names(store.directory) == [path.name]


def test_a_second_write_replaces_the_first(store: SpecStore) -> None:
    store.write(claim(value="1"), U1)
    path = store.write(claim(value="2"), U1)
    assert load_spec(path) == claim(value="2")


def test_the_same_content_again_touches_nothing(store: SpecStore) -> None:
    path = store.write(claim(), U1)
    before = path.stat()
    assert store.write(claim(), U1) == path
    after = path.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_file_with_another_mode_or_another_content_is_put_right(store: SpecStore) -> None:
    path = store.write(claim(), U1)
    path.chmod(0o600)
    store.write(claim(), U1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    path.write_text("{}")
    store.write(claim(), U1)
    assert load_spec(path) == claim()


def test_a_link_in_our_place_is_replaced_and_its_target_left_alone(store: SpecStore, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    store.path(U1).symlink_to(victim)
    path = store.write(claim(), U1)
    assert not path.is_symlink()
    assert victim.read_text() == "precious"


def test_a_directory_that_vanished_is_made_again(store: SpecStore) -> None:
    store.directory.rmdir()
    assert load_spec(store.write(claim(), U1)) == claim()
    assert stat.S_IMODE(store.directory.stat().st_mode) == 0o755


def test_b123_at_return_the_name_resolves_in_a_fresh_look_at_the_directories(store: SpecStore, driver: Any) -> None:
    """Whole cards, a MIG instance and a share, all in one claim."""
    table = driver.root / "proc/driver/nvidia-caps/mig-minors"
    table.parent.mkdir(parents=True)
    table.write_text("gpu1/gi2/access 21\ngpu1/gi2/ci0/access 22\n")
    for number in (21, 22):
        driver.node(f"nvidia-caps/nvidia-cap{number}")
    ga, gb, mig = "GPU-aaaaaaaa", "GPU-bbbbbbbb", "MIG-cccccccc"
    files = driver.discover(
        CardAddress(uuid=ga, minor=0),
        CardAddress(uuid=gb, minor=1),
        CardAddress(uuid=mig, minor=1, gpu_instance=2, compute_instance=0),
    )
    grants = [
        Grant(name=f"c-{U1}-gpu-aaaaaaaa", card_uuid=ga),
        Grant(name=f"c-{U1}-gpu-bbbbbbbb", card_uuid=gb),
        Grant(name=f"c-{U1}-gpu-bbbbbbbb-mig-1g-10gb-0", card_uuid=mig),
        Grant(name=f"c-{U1}-gpu-aaaaaaaa-shared-7e57", card_uuid=ga, memory_bytes=4 << 30, core_percent=30),
    ]
    spec = spec_for([(grant, "hook") for grant in grants], files)
    store.write(spec, U1)
    seen = scan([store.directory])
    assert not seen.errors
    assert tuple(seen.devices) == spec.qualified_names() == tuple(f"{KIND}={grant.name}" for grant in grants)


def test_b121_a_device_without_edits_is_never_written(store: SpecStore) -> None:
    empty = msgspec.structs.replace(claim().devices[0], container_edits=ContainerEdits())
    with pytest.raises(InternalError, match="changes nothing"):
        store.write(msgspec.structs.replace(claim(), devices=(empty,)), U1)
    assert names(store.directory) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cdi_version": "0.5.0"}, "exactly '0.3.0'"),
        ({"kind": "gpu.aliquot.dev/other"}, "does not belong"),
        ({"devices": ()}, "at least one"),
    ],
)
def test_a_spec_of_ours_that_is_wrong_is_our_own_mistake_and_not_written(
    store: SpecStore, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InternalError, match=words):
        store.write(msgspec.structs.replace(claim(), **changes), U1)
    assert names(store.directory) == []


def test_a_spec_of_more_than_a_megabyte_is_not_written(store: SpecStore) -> None:
    with pytest.raises(InternalError, match="1048576"):
        store.write(claim(value="x" * (1 << 20)), U1)
    assert names(store.directory) == []


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".", "..", "a\0b", "-x", "a" * 200, "x y"])
def test_an_id_that_is_no_claims_is_refused(store: SpecStore, name: str) -> None:
    for call in (lambda: store.write(claim(), name), lambda: store.remove(name)):
        with pytest.raises(InternalError, match="claim UID"):
            call()


# --- conflicts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
@pytest.mark.parametrize("where", ["same directory", "other directory"])
def test_a_foreign_file_with_a_name_of_ours_is_a_conflict_that_names_it(
    tmp_path: Path, suffix: str, where: str
) -> None:
    other = tmp_path / "etc-cdi"
    other.mkdir()
    store = SpecStore(tmp_path / "cdi", also_read=(other,))
    store.prepare()
    thief = (store.directory if where == "same directory" else other) / f"thief{suffix}"
    thief.write_text(f"kind: {KIND}\ndevices:\n- name: c-{U1}-gpu-0\n")
    with pytest.raises(ConflictError, match=str(thief)):
        store.write(claim(U1), U1)
    store.write(claim(U2), U2)
    thief.unlink()
    store.write(claim(U1), U1)


def test_a_foreign_file_with_a_similar_name_is_no_conflict(store: SpecStore) -> None:
    (store.directory / "near.json").write_text(f'{{"kind": "{KIND}", "name": "c-{U1}-gpu-01", "x": "ac-{U1}-gpu-0"}}')
    (store.directory / "kind.json").write_text(f'{{"kind": "nvidia.com/gpu", "name": "c-{U1}-gpu-0"}}')
    store.write(claim(), U1)


def test_a_foreign_file_is_read_again_when_it_changes(store: SpecStore) -> None:
    path = store.directory / "other.json"
    path.write_text("{}")
    store.write(claim(value="1"), U1)
    path.write_text(f'{{"kind": "{KIND}", "name": "c-{U1}-gpu-0"}}')
    with pytest.raises(ConflictError):
        store.write(claim(value="2"), U1)


# --- removing -----------------------------------------------------------------------------------------------------


def test_removing_twice_or_what_never_was_is_no_error(store: SpecStore) -> None:
    store.write(claim(), U1)
    assert store.remove(U1) is True
    assert store.remove(U1) is False
    assert store.remove(U2) is False
    store.directory.rmdir()
    assert store.remove(U1) is False


def test_b125_only_claim_files_of_ours_without_a_live_claim_are_removed(store: SpecStore) -> None:
    for number in range(101):
        store.write(claim(uid(number)), uid(number))
    keep = {
        "nvidia.yaml": "kind: nvidia.com/gpu\n",
        f"nvidia.com-claim_{U1}.json": codec.encode(msgspec.structs.replace(claim(), kind="nvidia.com/claim")).decode(),
        # Written by hand for our vendor: a plain one, one named like a claim's, one with other devices.
        "gpu.aliquot.dev-claim.json": codec.encode(claim()).decode(),
        "gpu.aliquot.dev-claim_mine.json": '{"cdiVersion": "0.3.0", "kind": "gpu.aliquot.dev/claim"}',
        f"gpu.aliquot.dev-claim_{uid(500)}.json": codec.encode(
            msgspec.structs.replace(
                claim(), devices=(Device(name="by-hand", container_edits=ContainerEdits(env=("A=b",))),)
            )
        ).decode(),
        f"gpu.aliquot.dev-other_{U1}.json": codec.encode(claim()).decode(),
        f"gpu.aliquot.dev-claim_{U1}.json.bak": "x",
        f".gpu.aliquot.dev-other_{U1}.json.abc.tmp": "x",
        "README": "x",
    }
    for name, text in keep.items():
        (store.directory / name).write_text(text)
    (store.directory / f"gpu.aliquot.dev-claim_{uid(600)}.json").mkdir()
    (store.directory / f"gpu.aliquot.dev-claim_{uid(601)}.json").symlink_to("/etc/passwd")
    live = uid(7)
    assert store.sweep({live}) == tuple(uid(number) for number in range(101) if number != 7)
    assert store.list_own() == (live,)
    assert set(names(store.directory)) == {
        *keep,
        f"gpu.aliquot.dev-claim_{live}.json",
        f"gpu.aliquot.dev-claim_{uid(600)}.json",
        f"gpu.aliquot.dev-claim_{uid(601)}.json",
    }
    assert (store.directory / "nvidia.yaml").read_text() == keep["nvidia.yaml"]


def test_a_damaged_claim_file_does_not_stay_for_ever(store: SpecStore) -> None:
    store.path(U1).write_text('{"cdiVersion": "0.3')
    assert store.list_own() == (U1,)
    assert store.sweep(()) == (U1,)


def test_a_missing_directory_holds_nothing(tmp_path: Path) -> None:
    store = SpecStore(tmp_path / "none", also_read=())
    assert store.list_own() == ()
    assert store.sweep(()) == ()


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


# --- directories that do not work ---------------------------------------------------------------------------------


def test_b126_a_missing_directory_is_made_with_mode_0755_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        SpecStore(tmp_path / "a/b/cdi", also_read=()).prepare()
    finally:
        os.umask(old)
    for name in ("a", "a/b", "a/b/cdi"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o755
    assert names(tmp_path / "a/b/cdi") == []


def test_b126_an_existing_directory_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "cdi").mkdir(mode=0o700)
    SpecStore(tmp_path / "cdi", also_read=()).prepare()
    assert stat.S_IMODE((tmp_path / "cdi").stat().st_mode) == 0o700


def test_a_file_in_the_place_of_the_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "cdi").touch()
    store = SpecStore(tmp_path / "cdi", also_read=())
    for call in (store.prepare, lambda: store.write(claim(), U1), store.list_own):
        with pytest.raises(SettingsError, match=rf"{tmp_path / 'cdi'}.*Not a directory"):
            call()


ON_A_MOUNT = """
import os, sys
from pathlib import Path
from aliquot.cdi import codec
from aliquot.cdi.model import Spec
from aliquot.cdi.store import SpecStore
small, large = (Spec.from_dict(codec.decode_json(Path(name).read_bytes(), name)) for name in sys.argv[2:4])
store = SpecStore(Path(sys.argv[1]), also_read=())
uid = sys.argv[4]
for call in sys.argv[5:]:
    try:
        print(eval(call))
    except Exception as error:
        print(type(error).__name__, error)
"""


def on_a_mount(tmp_path: Path, options: str, *calls: str) -> list[str]:
    """What each of `calls` prints with a small file system of its own on <tmp_path>/cdi, in a private namespace."""
    target = tmp_path / "cdi"
    target.mkdir()
    (tmp_path / "small.json").write_bytes(codec.encode(claim()))
    (tmp_path / "large.json").write_bytes(codec.encode(claim(size=3000)))
    command = f'mount -t tmpfs {options} tmpfs "$2" && exec "$0" -c "$1" "$2" small.json large.json {U1} "${{@:3}}"'
    apart = ["unshare", "--mount", "--propagation", "private", "bash", "-c", command]
    done = subprocess.run(
        [*apart, sys.executable, ON_A_MOUNT, target, *calls],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.node
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_read_only_directory_is_named_with_the_next_step(tmp_path: Path) -> None:
    for line in on_a_mount(tmp_path, "-o ro", "store.prepare()", "store.write(small, uid)"):
        assert line.startswith(f"SettingsError CDI directory {tmp_path / 'cdi'}: cannot ")
        assert "Read-only file system; it has to be a directory that this process can write" in line


@pytest.mark.node
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_is_named_and_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    lines = on_a_mount(
        tmp_path,
        "-o size=32k",
        "store.write(small, uid).name",
        "store.write(large, uid)",
        "os.listdir(store.directory)",
        "store.path(uid).read_bytes() == codec.encode(small)",
    )
    name = f"gpu.aliquot.dev-claim_{U1}.json"
    assert lines[0] == name
    assert lines[1].startswith(f"HardwareError CDI directory {tmp_path / 'cdi'}: cannot write")
    assert "No space left" in lines[1]
    assert lines[2:] == [f"['{name}']", "True"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change to another user")
def test_an_unreadable_directory_is_named() -> None:
    with tempfile.TemporaryDirectory() as top:
        Path(top).chmod(0o755)
        directory = Path(top) / "cdi"
        directory.mkdir(mode=0o700)
        results = as_nobody(SpecStore(directory, also_read=()))
    assert len(results) == 3
    assert all(text.startswith(f"CDI directory {directory}: cannot") for text in results), results
    assert all("Permission denied" in text for text in results)


def as_nobody(store: SpecStore) -> list[str]:
    """What each operation says to a process without rights; run in a thread that alone changes its user."""
    results: list[str] = []

    def run() -> None:
        # The system call is made bare: libc's own function would change every thread of this process.
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syscall({"x86_64": 117, "aarch64": 147}[os.uname().machine], -1, 65534, -1) != 0:
            results.append(f"setresuid: {errno.errorcode[ctypes.get_errno()]}")
            return
        for call in (store.prepare, store.list_own, lambda: store.write(claim(), U1)):
            try:
                call()
                results.append("no error")
            except SettingsError as error:
                results.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results


def test_errors_of_the_disk_are_told_from_errors_of_the_operator(store: SpecStore) -> None:
    for number, kind in ((errno.EIO, HardwareError), (errno.ENOSPC, HardwareError), (errno.EACCES, SettingsError)):
        with pytest.raises(kind, match="cannot look"), store._reporting("look"):
            raise OSError(number, os.strerror(number))
