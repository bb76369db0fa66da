# SPDX-License-Identifier: Apache-2.0
"""CDI directories that are missing, read-only, full or not for us: what is said, and what is left as it was."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from aliquot.api.errors import HardwareError, SettingsError
from aliquot.cdi import codec
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


def test_b126_a_missing_directory_is_made_with_mode_0755_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        SpecStore(tmp_path / "a/b/cdi", also_read=()).prepare()
    finally:
        os.umask(old)
    for name in ("a", "a/b", "a/b/cdi"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o755
    assert names(tmp_path / "a/b/cdi") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="to become another user one has to be root")
def test_a_file_that_another_user_may_not_read_is_named_and_the_others_count() -> None:
    """A rootless runtime reads as its user; ours are for everybody (cdi.md 5.1)."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # noqa: PTH101
        store = SpecStore(Path(folder) / "cdi", also_read=())
        store.prepare()
        store.write(claim(U1), U1)
        hidden = store.write(claim(U2), U2)

        assert len(scan([store.directory]).devices) == 2  # as root, which also imports what the other user may not

        def read() -> tuple[int, list[str]]:
            os.seteuid(65534)
            try:
                seen = scan([store.directory])
            finally:
                os.seteuid(0)
            return len(seen.devices), [path.name for path in seen.errors]

        assert read() == (2, [])
        hidden.chmod(0o600)
        assert read() == (1, [hidden.name])


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
