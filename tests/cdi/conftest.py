# SPDX-License-Identifier: Apache-2.0
"""What the CDI tests share: the reference library as a program, and a driver installation to look at."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aliquot.cdi.driver_files import CardAddress, DriverFiles, Roots, discover
from aliquot.cdi.model import EMPTY_EDITS, ContainerEdits
from aliquot.e2e import gocompiler
from aliquot.e2e.once import alone
from aliquot.e2e.toolchain import MissingPartError, cache_root

MODULE = Path(__file__).parents[2] / "e2e" / "tools" / "cdi"


def say(text: str) -> None:
    """Progress of a build, past pytest's capture of standard output."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class Reference:
    """The Go library of the runtimes, asked through `e2e/tools/cdi`."""

    def __init__(self, program: Path) -> None:
        self.program = program

    def ask(self, requests: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """One answer per request, in order."""
        lines = [json.dumps(request) for request in requests]
        done = subprocess.run(
            [self.program], input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=120, check=True
        )
        answers = [json.loads(line) for line in done.stdout.rstrip("\n").split("\n")]
        assert len(answers) == len(lines), done.stderr
        assert not [answer for answer in answers if answer["error"].startswith("request:")]
        return answers

    @contextlib.contextmanager
    def session(self) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
        """One process that goes on, for questions whose answers change."""
        with subprocess.Popen([self.program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None

            def ask(request: dict[str, Any]) -> dict[str, Any]:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
                return json.loads(process.stdout.readline())

            try:
                yield ask
            finally:
                process.kill()


@pytest.fixture(scope="session")
def reference() -> Reference:
    """The reference library, built once into the cache; skips where there is no Go and none can be had."""
    sources = [MODULE / name for name in ("main.go", "go.mod", "go.sum")]
    mark = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    program = cache_root() / "tools" / f"cdi-check-{mark}"
    with alone("cdi-check", "waiting for another run that builds cdi-check", say):
        if not program.exists():
            try:
                go = gocompiler.find_or_install(say)
            except MissingPartError as error:
                pytest.skip(f"the reference library cannot be built: {error}")
            program.parent.mkdir(parents=True, exist_ok=True)
            partial = program.with_suffix(".partial")
            build = subprocess.run(
                [go, "build", "-trimpath", "-o", partial, "."],
                cwd=MODULE,
                env={**os.environ, "GOFLAGS": "-mod=readonly", "GOWORK": "off", "GOTOOLCHAIN": "local"},
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            if build.returncode:
                pytest.skip(f"the reference library cannot be built: {build.stderr.strip()[-400:]}")
            partial.rename(program)
    return Reference(program)


def library(soname: str, machine: int = 62) -> bytes:
    """A shared library that consists of nothing but its headers and its name."""
    names = b"\0" + soname.encode() + b"\0"
    header, segment, dynamic = 64, 56, 16
    tables = header + 2 * segment
    text = tables + 3 * dynamic
    size = text + len(names)
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    out = struct.pack("<16sHHIQQQIHHHHHH", ident, 3, machine, 1, 0, header, 0, 0, header, segment, 2, 0, 0, 0)
    out += struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, size, size, 4096)
    out += struct.pack("<IIQQQQQQ", 2, 4, tables, tables, tables, 3 * dynamic, 3 * dynamic, 8)
    out += struct.pack("<qQqQqQ", 5, text, 14 if soname else 0, 1, 0, 0)
    return out + names


class Driver:
    """A driver installation under a folder, changed at will. Device nodes are links to /dev/null: no mknod needed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hook = root.parent / "hook"
        self.hook.mkdir(parents=True)
        (self.hook / "libvgpu.so").write_bytes(library("libvgpu.so"))
        (self.hook / "ld.so.preload").write_text("/usr/local/vgpu/libvgpu.so\n")
        for name in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia0", "nvidia1"):
            self.node(name)
        (root / "usr/bin").mkdir(parents=True)
        (root / "usr/bin/nvidia-smi").write_text("#!/bin/sh\n")
        (root / "proc/driver/nvidia").mkdir(parents=True)

    def node(self, name: str) -> Path:
        """Make /dev/<name>."""
        path = self.root / "dev" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to("/dev/null")
        return path

    def install(self, version: str, folder: str = "usr/lib/x86_64-linux-gnu", *, links: bool = True) -> Path:
        """Libraries of one version, and the links that ldconfig makes."""
        directory = self.root / folder
        directory.mkdir(parents=True, exist_ok=True)
        for stem, soname in (
            ("libcuda", "libcuda.so.1"),
            ("libnvidia-ml", "libnvidia-ml.so.1"),
            ("libnvidia-ptxjitcompiler", "libnvidia-ptxjitcompiler.so.1"),
            ("libnvidia-nvvm", "libnvidia-nvvm.so.4"),
            ("libnvidia-glcore", f"libnvidia-glcore.so.{version}"),
        ):
            (directory / f"{stem}.so.{version}").write_bytes(library(soname))
            if links:
                link = directory / soname
                if link.is_symlink():
                    link.unlink()
                if link.name != f"{stem}.so.{version}":
                    link.symlink_to(f"{stem}.so.{version}")
        if links and not (directory / "libcuda.so").is_symlink():
            (directory / "libcuda.so").symlink_to("libcuda.so.1")
        return directory

    def roots(self, **changes: Any) -> Roots:
        """How production code is told about this tree."""
        return Roots(**{"driver_root": str(self.root), **changes})

    def discover(self, *cards: CardAddress, extra_edits: ContainerEdits = EMPTY_EDITS, **changes: Any) -> DriverFiles:
        """What production code finds here now."""
        return discover(
            self.roots(**changes),
            cards,
            hook_library=str(self.hook / "libvgpu.so"),
            preload_file=str(self.hook / "ld.so.preload"),
            run_dir="/run/aliquot",
            extra_edits=extra_edits,
        )


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    """A driver tree with version 550.163.01 and two cards."""
    tree = Driver(tmp_path / "driver-root")
    tree.install("550.163.01")
    return tree


@pytest.fixture
def make_library() -> Callable[..., bytes]:
    """Bytes of a shared library with a SONAME and a machine."""
    return library
