# SPDX-License-Identifier: Apache-2.0
"""Brings the driver's C headers: pinned wheels from PyPI, of which only the headers are unpacked.

Never installs a wheel, never runs anything out of one, and never writes a header outside the build folder: the
headers are NVIDIA's and are not part of this repository. Invariant: what lies in the cache has the hash that
`headers.requirements.txt` names, whoever put it there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("headers.requirements.txt")

# What is taken out of a wheel. The interop headers only add names; they are parsed where they exist.
HEADERS = (
    "cuda.h",
    "cudaTypedefs.h",
    "cudaEGL.h",
    "cudaEGLTypedefs.h",
    "cudaGL.h",
    "cudaGLTypedefs.h",
    "cudaProfilerTypedefs.h",
    "cudaVDPAU.h",
    "cudaVDPAUTypedefs.h",
    "nvml.h",
)
REQUIRED = {"nvidia-cuda-runtime": ("cuda.h", "cudaTypedefs.h"), "nvidia-nvml-dev": ("nvml.h",)}
NEEDED_BYTES = 64 << 20


class MissingError(Exception):
    """Something outside is missing; the text is one sentence with the next step."""


@dataclass(frozen=True)
class Pin:
    """One line of the requirements file."""

    project: str
    version: str
    sha256: str

    @property
    def major(self) -> int:
        """CUDA's major version, which names the folder of the headers."""
        return int(self.version.split(".", 1)[0])

    @property
    def family(self) -> str:
        """The project's name without the `-cu12` kind of suffix."""
        return re.sub(r"-cu\d+$", "", self.project)


def read_pins(path: Path = REQUIREMENTS) -> tuple[Pin, ...]:
    """Parses `name==version --hash=sha256:…` lines; comments and empty lines are skipped."""
    pins = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        match = re.fullmatch(r"(\S+)==(\S+) --hash=sha256:([0-9a-f]{64})", line.strip())
        if match is None:
            raise MissingError(f"{path.name}: cannot read {line!r}; write name==version --hash=sha256:…")
        pins.append(Pin(match[1], match[2], match[3]))
    return tuple(pins)


def cache_dir() -> Path:
    """`${XDG_CACHE_HOME:-~/.cache}/aliquot/headers`, created."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    path = Path(base) / "aliquot" / "headers"
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`; a second run waits here and then finds the work done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached(pins: tuple[Pin, ...], cache: Path) -> dict[Pin, Path]:
    """The pinned wheels that lie in the cache with the right hash."""
    by_hash = {pin.sha256: pin for pin in pins}
    found = {}
    for wheel in sorted(cache.glob("*.whl")):
        pin = by_hash.get(digest(wheel))
        if pin is not None:
            found[pin] = wheel
    return found


def pip(cache: Path) -> list[str]:
    """How to run pip: this Python's, else that of a virtual environment made in the cache.

    Raises MissingError where there is neither pip nor what makes one.
    """
    scratch = cache / "pip"
    for python in (sys.executable, str(scratch / "bin" / "python")):
        command = [python, "-m", "pip"]
        with contextlib.suppress(OSError):
            if subprocess.run([*command, "--version"], capture_output=True, check=False).returncode == 0:
                return command
    made = subprocess.run([sys.executable, "-m", "venv", str(scratch)], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise MissingError(f"{sys.executable} has neither pip nor venv: install python3-venv and run this again")
    return [str(scratch / "bin" / "python"), "-m", "pip"]


def download(pins: tuple[Pin, ...], cache: Path) -> dict[Pin, Path]:
    """Returns a wheel in the cache for every pin, fetching what is absent.

    Raises MissingError in one sentence when PyPI cannot be reached, pip is absent or a hash differs.
    """
    found = cached(pins, cache)
    absent = [pin for pin in pins if pin not in found]
    if not absent:
        return found
    if shutil.disk_usage(cache).free < NEEDED_BYTES:
        raise MissingError(f"{cache} has less than 64 MiB free: make room there or set XDG_CACHE_HOME elsewhere")
    lines = cache / f"wanted-{os.getpid()}.txt"
    lines.write_text(
        "".join(f"{pin.project}=={pin.version} --hash=sha256:{pin.sha256}\n" for pin in absent), encoding="utf-8"
    )
    command = [*pip(cache), "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--only-binary", ":all:", "--python-version", "3"]
    for tag in ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux1_x86_64"):
        command += ["--platform", tag]
    try:
        run = subprocess.run(
            [*command, "-r", str(lines), "-d", str(cache)], capture_output=True, text=True, check=False
        )
    finally:
        lines.unlink()
    found = cached(pins, cache)
    still = [f"{pin.project} {pin.version}" for pin in pins if pin not in found]
    if still:
        last = (run.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise MissingError(
            f"the header wheels {', '.join(still)} could not be downloaded ({last}): connect to PyPI once, or put "
            f"the wheels into {cache}"
        )
    return found


def unpack(wheels: dict[Pin, Path], target: Path) -> None:
    """Writes `target/<major>/<header>` for every header of every wheel; MissingError if a needed one is not in it."""
    for pin, wheel in wheels.items():
        folder = target / str(pin.major)
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            members = {Path(name).name: name for name in archive.namelist() if "/include/" in name}
            for header in HEADERS:
                if header in members:
                    partial = folder / f".{header}.{os.getpid()}"
                    partial.write_bytes(archive.read(members[header]))
                    partial.replace(folder / header)
            for header in REQUIRED[pin.family]:
                if header not in members:
                    raise MissingError(f"{wheel.name} holds no {header}: pin another version in {REQUIREMENTS.name}")
