# SPDX-License-Identifier: Apache-2.0
"""What the hook's tests stand on: a container's view (grants, usage, the preloaded library) in a folder of its own.

The library under test is a test build whose root path is written into a copy of the file, so that each test has
its own grants without a mount namespace; everything else is what ships.
"""

from __future__ import annotations

import ctypes as c
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HOOK = ROOT / "build" / "hook"
DRIVER = ROOT / "build" / "fakegpu" / "usr" / "lib" / "x86_64-linux-gnu"
AGES = ("470", "525", "550", "580")
PROGRAMS = HERE / "programs"
MARK = b"@AQ_ROOT_PATCHABLE@"
GIB, MIB = 1 << 30, 1 << 20
CARD_A = "GPU-aaaaaaaa-0000-4000-8000-00000000000a"


@pytest.fixture(scope="session")
def hook_builds() -> Path:
    """The test builds, made if they are not there or old."""
    make_hook("all", "test-builds")
    return HOOK


def make_hook(*targets: str) -> None:
    """Build under the lock that `make hook` takes: tests that run side by side must not build into each other."""
    lock = ROOT / "build" / "locks" / "hook"
    lock.parent.mkdir(parents=True, exist_ok=True)
    command = ["flock", str(lock), "make", "-s", "-j2", "-f", "hook/build.mk", *targets, f"PY={sys.executable}"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)


@pytest.fixture(scope="session")
def compile_c(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compiles a program of tests/hook/programs (or a text) once per session."""
    folder = tmp_path_factory.mktemp("programs")
    done: dict[tuple[str, ...], Path] = {}

    def build(source: str, *flags: str, name: str = "") -> Path:
        key = (source, name, *flags)
        if key not in done:
            path = PROGRAMS / source
            if "\n" in source:
                path = folder / f"text{len(done)}.c"
                path.write_text(source)
            out = folder / f"{len(done)}" / (name or path.stem)
            out.parent.mkdir(exist_ok=True)
            subprocess.run(
                ["gcc", "-std=gnu11", "-O1", "-g", "-Wall", "-o", str(out), str(path), *flags, "-ldl", "-lpthread"],
                check=True,
                timeout=120,
            )
            done[key] = out
        return done[key]

    return build


class Region(c.Structure):
    """struct aq_usage_report."""

    _fields_ = [
        *[
            (n, c.c_uint64)
            for n in ("used_bytes", "busy_ns", "done_ns", "last_launch_ns", "complaints", "repaired_bytes")
        ],
        *[(n, c.c_uint32) for n in ("occupied", "reaped", "unsettled", "suspicious")],
    ]


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


class Node:
    """The node's side of the region files."""

    def __init__(self) -> None:
        self.lib = c.CDLL(str(HOOK / "libaliquot-region.so"))

    def create(self, root: Path, name: str, slot: GrantSlot) -> None:
        (root / "grants").mkdir(parents=True, exist_ok=True)
        (root / "usage" / name).mkdir(parents=True, exist_ok=True)
        assert self.lib.aq_grant_create(str(root / "grants" / name).encode(), c.byref(slot)) == 0
        assert self.lib.aq_usage_create(str(root / "usage" / name / "region").encode()) == 0

    def update(self, root: Path, name: str, slot: GrantSlot) -> None:
        assert self.lib.aq_grant_update(str(root / "grants" / name).encode(), c.byref(slot)) == 0

    def settle(self, region: Path, *dead: int) -> Region:
        report = Region()
        words = (c.c_uint64 * max(1, len(dead)))(*dead)
        rc = self.lib.aq_usage_settle(str(region).encode(), words, c.c_size_t(len(dead)), c.byref(report))
        assert rc == 0, rc
        return report

    def used(self, region: Path) -> int:
        return int(self.settle(region).used_bytes)


class Box:
    """One container: its grants, its environment, the hook in front of everything."""

    def __init__(self, folder: Path, library: str, driver: Path, config: Path | None) -> None:
        self.root = folder / "vgpu"
        self.root.mkdir()
        self.node = Node()
        self.slots: dict[str, GrantSlot] = {}
        self.library = folder / Path(library).name
        self.install(HOOK / "test" / library)
        self.driver = driver
        self.config = config
        self.env = {"LD_LIBRARY_PATH": str(driver), "PATH": os.environ["PATH"], "PYTHONPATH": str(PROGRAMS)}
        if config:
            self.env["FAKEGPU_CONFIG"] = str(config)

    def install(self, build: Path) -> None:
        """Puts a copy of a test build, with this container's root in it, where `library` is."""
        source = build.read_bytes()
        place = source.index(MARK)
        path = str(self.root).encode()
        assert len(path) < 250
        self.library.write_bytes(source[:place] + path.ljust(256, b"\0") + source[place + 256 :])
        self.library.chmod(0o755)

    def grant(self, name: str, uuid: str, memory: int, **more: int) -> None:
        slot = GrantSlot(memory_limit=memory, uuid=uuid.encode(), name=name.encode(), **more)
        self.slots[name] = slot
        self.node.create(self.root, name, slot)

    def regrant(self, name: str, **changes: int) -> None:
        for key, value in changes.items():
            setattr(self.slots[name], key, value)
        self.node.update(self.root, name, self.slots[name])

    def region(self, name: str) -> Path:
        return self.root / "usage" / name / "region"

    def used(self, name: str) -> int:
        return self.node.used(self.region(name))

    def complaints(self, name: str) -> int:
        """What hooks told the node through the usage file."""
        return int.from_bytes(self.region(name).read_bytes()[24:32], "little")

    def popen(self, command: list[str], *, hooked: bool = True, **more: object) -> subprocess.Popen[str]:
        env = dict(self.env) | dict(more.pop("env", {}))  # type: ignore[call-overload]
        if hooked:
            env["LD_PRELOAD"] = " ".join(filter(None, [str(self.library), env.get("LD_PRELOAD", "")]))
        env = {k: v for k, v in env.items() if v is not None}
        return subprocess.Popen(
            command,
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **more,  # type: ignore[call-overload]
        )

    def python(self, code: str, **more: object) -> subprocess.Popen[str]:
        return self.popen([sys.executable, "-c", "from client import *\n" + code], **more)

    def run(self, command: list[str] | str, *, ok: bool = True, timeout: float = 60, **more: object) -> Result:
        """Runs a command, or a text of Python with `client` imported, to its end."""
        process = self.python(command, **more) if isinstance(command, str) else self.popen(command, **more)
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
        result = Result(process.returncode, out, err)
        if ok:
            assert result.code == 0, f"exit {result.code}\n{out}\n{err}"
        return result


class Result:
    """How a program ended; `lines` are its lines of JSON, `last` the last of them."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err
        self.lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]

    @property
    def last(self) -> dict:
        return self.lines[-1]


@pytest.fixture(scope="session")
def node(hook_builds: Path) -> Node:
    """The node's side of region files."""
    return Node()


@pytest.fixture(scope="session")
def stub_driver(compile_c: Callable[..., Path]) -> Path:
    """Folder with the smallest driver (programs/driver_stub.c) as libcuda.so.1."""
    return compile_c(
        "driver_stub.c",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
        "-Wl,-Bsymbolic",
        "-Wl,-soname,libcuda.so.1",
        name="libcuda.so.1",
    ).parent


@pytest.fixture
def make_box(tmp_path: Path, hook_builds: Path) -> Callable[..., Box]:
    """A container over a driver of the test's own; the strict build unless another is named."""
    return lambda driver, library="libvgpu-strict.so": Box(tmp_path, library, driver, None)


@pytest.fixture
def stub_box(tmp_path: Path, hook_builds: Path, stub_driver: Path) -> Box:
    return Box(tmp_path, "libvgpu-strict.so", stub_driver, None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests with the mark every_driver run over each age of the fake driver, the others over the newest."""
    if metafunc.definition.get_closest_marker("every_driver"):
        metafunc.parametrize("driver_age", AGES, indirect=True)


@pytest.fixture
def driver_age(request: pytest.FixtureRequest) -> str:
    """Which of AGES the driver of `box` is."""
    return str(getattr(request, "param", AGES[-1]))


@pytest.fixture
def box(tmp_path: Path, hook_builds: Path, cards: Path, driver_age: str) -> Box:
    """A container over the fake driver with two 24 GiB cards, no grant yet; the strict build."""
    root = DRIVER if driver_age == AGES[-1] else Path(str(DRIVER).replace("/fakegpu/", f"/fakegpu-{driver_age}/"))
    assert (root / "libcuda.so.1").exists(), "make fakegpu"
    return Box(tmp_path, "libvgpu-strict.so", root, cards)


@pytest.fixture
def run(box: Box) -> Callable[..., dict]:
    """Runs a text, with the names of programs/memory.py, under one grant on card A."""

    def go(code: str, memory: int = GIB, **grant: int) -> dict:
        box.grant("a", CARD_A, memory, **grant)
        return box.run("from memory import *\n" + code).last

    return go


@pytest.fixture
def free_box(tmp_path: Path, hook_builds: Path, cards: Path) -> Box:
    """The same with the standalone build."""
    return Box(tmp_path, "libvgpu.so", DRIVER, cards)


CARD_B = "GPU-bbbbbbbb-0000-4000-8000-00000000000b"


@pytest.fixture
def cards(tmp_path: Path) -> Iterator[Path]:
    """A machine of its own: configuration of the fake driver with cards A and B."""
    folder = tmp_path / "machine"
    folder.mkdir()
    config = folder / "config.json"
    config.write_text(
        json.dumps(
            {
                "version": 1,
                "cards": [{"profile": "Fake24G", "uuid": CARD_A}, {"profile": "Fake24G", "uuid": CARD_B}],
            }
        )
    )
    yield config
    shutil.rmtree(folder, ignore_errors=True)
