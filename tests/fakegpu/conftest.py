# SPDX-License-Identifier: Apache-2.0
"""Machines made of a configuration file, and programs that run on them.

Every program is a process of its own: a library stays mapped for the life of a process, and each test wants its own
machine. `machine.python(code)` runs code with the real pynvml and answers with what it put into `result`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

BUILD = Path(__file__).parents[2] / "build"

# Runs before the code of a test: pynvml, and a way to name the error a call ends with.
PRELUDE = """
import ctypes, json, os, sys, time
import pynvml
from pynvml import *

def error_of(call, *arguments, **named):
    try:
        call(*arguments, **named)
    except pynvml.NVMLError as error:
        return type(error).__name__.removeprefix("NVMLError_")
    except pynvml.NVMLLibraryMismatchError:  # no NVMLError: an unversioned name whose newest form the driver lacks
        return "FunctionNotFound"
    return "Success"

result = None
"""
EPILOGUE = """
print("\\n" + json.dumps(result, default=lambda value: value.decode() if isinstance(value, bytes) else str(value)))
"""


@dataclass
class Machine:
    """One fake machine: its configuration, and the driver whose libraries its programs load."""

    config: Path
    root: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def libraries(self) -> Path:
        """Folder of libcuda.so.1 and libnvidia-ml.so.1."""
        return next((self.root / "usr/lib").iterdir())

    def env(self, **extra: str) -> dict[str, str]:
        """The environment of a program on this machine."""
        clean = {
            key: value for key, value in os.environ.items() if not key.startswith(("FAKEGPU_", "CUDA_", "NVIDIA_"))
        }
        clean.update(FAKEGPU_CONFIG=str(self.config), LD_LIBRARY_PATH=str(self.libraries))
        return clean | self.environment | extra

    def control(self, **settings: Any) -> None:
        """Replaces the control file, as an operator would."""
        path = self.config.with_name(self.config.name + ".control")
        partial = path.with_name(path.name + ".new")
        partial.write_text(json.dumps(settings))
        partial.replace(path)

    def start(self, code: str, *arguments: str, **extra: str) -> subprocess.Popen[str]:
        """A Python program on this machine that goes on while the test does."""
        return subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(code) + EPILOGUE, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.env(**extra),
        )

    def python(self, code: str, *arguments: str, **extra: str) -> Any:
        """Runs Python code on this machine and returns its `result`."""
        with self.start(code, *arguments, **extra) as program:
            out, err = program.communicate(timeout=60)
        assert program.returncode == 0, f"exit {program.returncode}\n{out}\n{err}"
        return json.loads(out.strip().splitlines()[-1])

    def nvml(self, code: str, **extra: str) -> Any:
        """The same between nvmlInit and nvmlShutdown; handles are in `cards`, that of the first in `card`."""
        start = "nvmlInit()\ncards = [nvmlDeviceGetHandleByIndex(i) for i in range(nvmlDeviceGetCount())]\n"
        return self.python(
            f"{start}card = cards[0] if cards else None\n{textwrap.dedent(code)}\nnvmlShutdown()\n", **extra
        )

    def tool(self, *command: str, status: int | None = 0, **extra: str) -> subprocess.CompletedProcess[str]:
        """A program of build/fakegpu-tools, e.g. tool("fakegpuctl", "status"); `status` None takes any."""
        path = BUILD / "fakegpu-tools" / command[0]
        done = subprocess.run(
            [str(path), *command[1:]], capture_output=True, text=True, env=self.env(**extra), timeout=60, check=False
        )
        assert status is None or done.returncode == status, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def run(self, *command: str, status: int | None = 0, **extra: str) -> subprocess.CompletedProcess[str]:
        """A program of the driver root, e.g. run("nvidia-smi", "-L"); `status` None takes any."""
        path = self.root / "usr/bin" / command[0]
        done = subprocess.run(
            [str(path), *command[1:]], capture_output=True, text=True, env=self.env(**extra), timeout=60, check=False
        )
        assert status is None or done.returncode == status, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done


@pytest.fixture(scope="session")
def build_dir() -> Path:
    """The build folder; skips when `make fakegpu` has not run."""
    if not (BUILD / "fakegpu/config.json").is_file():
        pytest.skip("the fake driver is not built: make fakegpu")
    return BUILD


@pytest.fixture
def machine(build_dir: Path, tmp_path: Path) -> Callable[..., Machine]:
    """Makes machines: `machine({"profile": "A100-40"}, …, flavour="470", driver settings…)`."""
    made = 0

    def make(*cards: dict[str, Any], flavour: str = "580", **settings: Any) -> Machine:
        nonlocal made
        made += 1
        folder = tmp_path / f"machine{made}"
        folder.mkdir()
        config = folder / "config.json"
        config.write_text(json.dumps({"version": 1, "cards": list(cards) or [{"count": 2}], **settings}))
        root = build_dir / ("fakegpu" if flavour == "580" else f"fakegpu-{flavour}")
        return Machine(config, root, {"FAKEGPU_DEV_ROOT": str(folder / "dev")})

    return make


@pytest.fixture
def cuda_machine(machine: Callable[..., Machine]) -> Callable[..., Machine]:
    """Machines whose programs can `from cuda_client import *`: the driver API by ctypes."""

    def make(*cards: dict[str, Any], flavour: str = "580", **settings: Any) -> Machine:
        made = machine(*cards, flavour=flavour, **settings)
        made.environment["PYTHONPATH"] = str(Path(__file__).parent)
        return made

    return make
