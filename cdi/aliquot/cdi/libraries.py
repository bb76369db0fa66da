# SPDX-License-Identifier: Apache-2.0
"""The driver's libraries and tools on the host, and the names under which a container sees them.

Which files there are is looked up on every call; only the answer for directories that have not changed since is
remembered, because one of them may hold thousands of files. A directory that changed within the last seconds is
not remembered at all: its time stamp could not tell a further change (as git treats its index). Invariant: what
is returned was complete, of one driver version, and is what a fresh look would say.

No ldconfig runs anywhere: each library is mounted under every name that somebody asks for, its own, its SONAME
and the links that the host has to it, in directories that the loaders of images look into by themselves.
"""

from __future__ import annotations

import functools
import os
import posixpath
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from aliquot.api.errors import HardwareError
from aliquot.cdi import elf
from aliquot.cdi.host import HostTree

LIBRARY_DIRS: Final = (
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
    "/lib64",
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/local/nvidia/lib64",
    "/usr/lib",
)
"""Where distributions, driver containers and cloud images put the driver's libraries, under the driver root."""

CONTAINER_DIRS: Final = {
    elf.X86_64: ("/usr/lib/x86_64-linux-gnu", "/usr/lib64"),
    elf.AARCH64: ("/usr/lib/aarch64-linux-gnu", "/usr/lib64"),
}
"""Directories that the loaders of Debian's and of Red Hat's kind look into by themselves, so no ldconfig, no hook
and no LD_LIBRARY_PATH is needed. An image has a loader of one kind, so each library goes to both."""

BINARY_DIRS: Final = ("/usr/bin", "/usr/sbin", "/bin", "/sbin", "/usr/local/bin", "/opt/bin", "/usr/local/nvidia/bin")
BINARIES: Final = ("nvidia-smi", "nvidia-debugdump")
"""Tools that read. Not the MPS daemon: work handed to a server of the tenant's own would run outside its share."""

VERSION: Final = r"[0-9]{3,}\.[0-9]+(?:\.[0-9]+)?"
_SETTLED_S: Final = 2.0
"""Age from which a directory's time stamp tells every later change, whatever the clock of its file system."""


class HostFile(msgspec.Struct, frozen=True):
    """A file of the host and every path at which a container sees it."""

    host: str
    container: tuple[str, ...]


class Installation(msgspec.Struct, frozen=True):
    """Where the libraries are: the directory of libcuda itself, then the one with the link to it."""

    directories: tuple[str, ...]
    version: str

    @property
    def cuda(self) -> str:
        """Host path of libcuda itself."""
        return f"{self.directories[0]}/libcuda.so.{self.version}"


def find_installation(tree: HostTree, root: str, first: Iterable[str] = ()) -> Installation:
    """The first directory under `root` that has libcuda; NVML has to be there in the same version.

    Raises `HardwareError` when there is none, or when a driver update is only half done.
    """
    for name in (*first, *LIBRARY_DIRS):
        directory = tree.find(name, root)
        cuda = _in_use(tree, root, directory, "libcuda") if directory else ""
        if not cuda:
            continue
        version = cuda.partition(".so.")[2]
        management = _in_use(tree, root, directory, "libnvidia-ml").partition(".so.")[2]
        if management != version:
            raise HardwareError(
                f"{directory} has libcuda of driver {version} but libnvidia-ml of {management or 'none'}; "
                "wait for the driver update to end, or install the driver again"
            )
        # Debian keeps the files in nvidia/current and only links to them in the directory that loaders look into.
        return Installation(tuple(dict.fromkeys((posixpath.dirname(cuda), directory))), version)
    raise HardwareError(
        f"no libcuda.so.<version> in any library directory under driver root {tree.local(root)}; "
        "install the NVIDIA driver, or name its root (and, for an unusual place, its library directory)"
    )


def find_libraries(
    tree: HostTree, found: Installation, *, now: Callable[[], float] = time.time
) -> tuple[HostFile, ...]:
    """Every library of that version next to libcuda, with all its names. Raises `HardwareError` for a broken one."""
    marks = []
    youngest = 0.0
    for directory in found.directories:
        status = tree.local(directory).stat()
        marks.append((status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns))
        youngest = max(youngest, status.st_mtime, status.st_ctime)
    look = _libraries if abs(now() - youngest) > _SETTLED_S else _libraries.__wrapped__
    return look(tree.prefix, found, tuple(marks))


def find_binaries(tree: HostTree, root: str) -> Iterator[HostFile]:
    """The tools that are there; none of them is needed."""
    for name in BINARIES:
        for directory in BINARY_DIRS:
            host = tree.find(f"{directory}/{name}", root)
            if host and tree.is_file(host):
                yield HostFile(host, (f"/usr/bin/{name}",))
                break


def _in_use(tree: HostTree, root: str, directory: str, stem: str) -> str:
    """The library that programs get, "" for none: what `<stem>.so.1` leads to, else the only version there is."""
    pattern = re.compile(rf"{stem}\.so\.({VERSION})")
    linked = tree.find(f"{directory[len(root.rstrip('/')) :]}/{stem}.so.1", root)
    if linked and pattern.fullmatch(posixpath.basename(linked)):
        return linked
    found = sorted(entry.name for entry in tree.entries(directory) if pattern.fullmatch(entry.name))
    if len(found) > 1:
        raise HardwareError(
            f"{directory} has {' and '.join(found)}, and no link {stem}.so.1 says which one is in use; "
            "remove the old driver, or run ldconfig"
        )
    return f"{directory}/{found[0]}" if found else ""


@functools.lru_cache(maxsize=8)
def _libraries(prefix: str, found: Installation, _marks: tuple[tuple[int, ...], ...]) -> tuple[HostFile, ...]:
    tree = HostTree(prefix)
    pattern = re.compile(rf"lib[^/]+\.so\.{re.escape(found.version)}|libnvidia-nvvm70\.so\.[0-9.]+")
    files: dict[str, str] = {}
    candidates: list[os.DirEntry[str]] = []
    for directory in found.directories:
        for entry in tree.entries(directory):
            if entry.is_symlink():
                candidates.append(entry)
            elif pattern.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                files.setdefault(entry.name, f"{directory}/{entry.name}")
    stems = {name.partition(".so")[0] for name in files}
    links: dict[str, set[str]] = {}
    for entry in candidates:
        if entry.name.partition(".so")[0] in stems:
            target = posixpath.basename(Path(entry.path).readlink())
            links.setdefault(target, set()).add(entry.name)
    machine = _machine(tree, found.cuda)
    out: list[HostFile] = []
    for name in sorted(files):
        library = elf.read_library(tree.local(files[name]))
        if library is None or library.machine != machine:
            continue  # a 32-bit companion, or a linker script
        names = {name, *_aliases(name, links)}
        if library.soname and "/" not in library.soname:
            names.add(library.soname)
        paths = tuple(f"{place}/{alias}" for place in CONTAINER_DIRS[machine] for alias in sorted(names))
        out.append(HostFile(files[name], paths))
    return tuple(out)


def _aliases(name: str, links: Mapping[str, set[str]]) -> set[str]:
    """Links to `name`, links to those, and so on."""
    found: set[str] = set()
    pending = [name]
    while pending:
        for alias in links.get(pending.pop(), set()) - found:
            found.add(alias)
            pending.append(alias)
    return found


def _machine(tree: HostTree, path: str) -> int:
    library = elf.read_library(tree.local(path))
    if library is None or library.machine not in CONTAINER_DIRS:
        raise HardwareError(f"{path} is no library for x86-64 or arm64; install the driver again")
    return library.machine
