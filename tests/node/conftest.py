# SPDX-License-Identifier: Apache-2.0
"""What the tests of a node daemon share: region files in a folder of their own, and real processes that hold memory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from aliquot.api.grant import CorePolicy, Grant
from aliquot.hook import REGION, library
from aliquot.node.regions import Regions

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def region_library() -> Path:
    try:
        return library(REGION)
    except FileNotFoundError as e:
        pytest.skip(f"{e}")


@pytest.fixture
def regions(as_root: None, tmp_path: Path, region_library: Path) -> Regions:
    return Regions(tmp_path / "run", region_library)


@pytest.fixture(scope="session")
def owner_program(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: apt-get install gcc")
    program = tmp_path_factory.mktemp("owner") / "owner"
    sources = [str(HERE / "owner.c"), str(repository / "hook/src/account.c")]
    include = [f"-I{repository / 'hook' / folder}" for folder in ("include", "src")]
    subprocess.run([compiler, "-O1", "-pthread", *include, *sources, "-o", str(program)], check=True)
    return program


@dataclass
class Owner:
    """A process that holds a slot of a usage file."""

    process: subprocess.Popen[str]
    index: int
    pid: int
    word: int

    def do(self, command: str) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def owner(owner_program: Path) -> Iterator[Callable[..., Owner]]:
    """Start a process on a usage file; `prefix` is put before its command (unshare …), `more` after it."""
    started: list[Owner] = []

    def start(path: Path, *, prefix: Sequence[str] = (), more: Sequence[str] = ()) -> Owner:
        command = [*prefix, str(owner_program), str(path), *more]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        index, pid, word = (int(n) for n in process.stdout.readline().split())
        started.append(Owner(process, index, pid, word))
        return started[-1]

    yield start
    for one in started:
        one.end()


def a_grant(name: str = "c-1-gpu-0", **changes: object) -> Grant:
    values: dict[str, object] = {
        "name": name,
        "card_uuid": "GPU-a",
        "memory_bytes": 1 << 30,
        "core_percent": 50,
        "core_policy": CorePolicy.DEFAULT,
    }
    return Grant(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def grant() -> Callable[..., Grant]:
    return a_grant


@pytest.fixture
def until() -> Callable[..., float]:
    """Wait until a condition holds and return how long that took; fails after `within` seconds."""

    def wait(condition: Callable[[], bool], *, within: float) -> float:
        started = time.monotonic()
        while not condition():
            if time.monotonic() - started > within:
                pytest.fail(f"not so within {within} s")
            select_for_a_moment()
        return time.monotonic() - started

    return wait


def select_for_a_moment() -> None:
    """Polling a file that another process changes has nothing to wait on; 2 ms keep the processor free."""
    import select  # noqa: PLC0415

    select.select([], [], [], 0.002)


@pytest.fixture
def python() -> str:
    return sys.executable


class FakeDriver:
    """A machine of the fake driver with cards of its own; programs on it run in processes of their own.

    One process can use one NVML library in its life, and so one configuration.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self.nvml = root / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
        self.cuda = root / "usr/lib/x86_64-linux-gnu/libcuda.so.1"
        self.config = folder / "config.json"
        self.control_file = folder / "config.json.control"
        self.environment = {**os.environ, "FAKEGPU_CONFIG": str(self.config)}

    def cards(self, *cards: dict[str, object], **settings: object) -> None:
        self.config.write_text(json.dumps({"cards": list(cards), **settings}))

    def control(self, **settings: object) -> None:
        """Change the machine while it runs; the file is replaced whole."""
        fresh = self.control_file.with_suffix(".new")
        fresh.write_text(json.dumps(settings))
        fresh.rename(self.control_file)

    def start(self, program: str, *arguments: object) -> subprocess.Popen[str]:
        """`program` finds the paths of libnvidia-ml and libcuda in `NVML` and `CUDA`, and says lines of JSON."""
        head = (
            "import json, sys\nfrom pathlib import Path\nNVML, CUDA = Path(sys.argv[1]), Path(sys.argv[2])\n"
            "def say(value): print(json.dumps(value), flush=True)\n"
        )
        command = [sys.executable, "-c", head + textwrap.dedent(program), str(self.nvml), str(self.cuda)]
        return subprocess.Popen(
            [*command, *(str(a) for a in arguments)],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, program: str, *arguments: object) -> list[object]:
        """All that the program says."""
        process = self.start(program, *arguments)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0, f"program ended with {process.returncode}: {out}"
        return [json.loads(line) for line in out.splitlines()]


@pytest.fixture
def fake(fake_driver_root: Path, tmp_path: Path) -> FakeDriver:
    folder = tmp_path / "machine"
    folder.mkdir()
    return FakeDriver(fake_driver_root, folder)
