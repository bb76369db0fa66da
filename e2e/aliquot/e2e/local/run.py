# SPDX-License-Identifier: Apache-2.0
"""What one cluster leaves outside its namespaces: a directory and a cgroup, and how both go away again.

Never touches the directory or cgroup of a cluster that lives. Invariant: a cluster holds the lock of its directory
through an open file of its first process, so the lock is free exactly when everything inside is dead; whoever
starts next sweeps what has a free lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aliquot.e2e.toolchain import cache_root

_CGROUPS: Final = Path("/sys/fs/cgroup")
_PREFIX: Final = "aliquot-"
_CONTAINERS: Final = "k8s.io"
"""The group in which containerd puts what kubelet names no group for; shared by all clusters, and never removed."""
_WATCHERS: Final = Path("/proc/sys/fs/inotify/max_user_instances")
_WATCHERS_NEEDED: Final = 512
_CONTROLLERS: Final = ("cpuset", "cpu", "io", "memory", "pids")


def runs_dir() -> Path:
    """Where each living cluster has its directory."""
    return cache_root() / "clusters"


@dataclass(frozen=True)
class Run:
    """One cluster's traces on the host. `lock` is the descriptor to hand to its first process."""

    name: str
    directory: Path
    lock: int

    @property
    def cgroup(self) -> str:
        """As kubelet's `cgroupRoot` wants it."""
        return f"/{_PREFIX}{self.name}"

    def remove(self) -> None:
        """Removes directory and cgroup; everything inside has to be dead."""
        _remove(self.directory)


def start_run() -> Run:
    """Sweeps what earlier runs left, then makes a directory and a cgroup for a new one."""
    sweep()
    name = secrets.token_hex(4)
    directory = runs_dir() / name
    with _alone():  # else a sweep could come between the folder and its lock
        directory.mkdir(mode=0o755)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
    for parent in _hierarchies():
        (parent / f"{_PREFIX}{name}").mkdir()
    if (_CGROUPS / "cgroup.controllers").exists():
        _hand_down_controllers(_CGROUPS / f"{_PREFIX}{name}")
    _weigh_pods()
    _allow_watches()
    return Run(name, directory, lock)


def _weigh_pods() -> None:
    """All containers together weigh what the machine's cores do, as kubelet sees to where it makes a group for pods.

    Here it makes none (`cgroupsPerQOS: false`), so containerd's own group has to: without, a driver in a container
    got a tenth of what any daemon beside it gets.
    """
    cores = os.cpu_count() or 1
    for group, file, weight in (
        (_CGROUPS / "cpu" / _CONTAINERS, "cpu.shares", 1024 * cores),
        (_CGROUPS / _CONTAINERS, "cpu.weight", min(100 * cores, 10_000)),
    ):
        if (group.parent / "cgroup.procs").exists():
            group.mkdir(exist_ok=True)
            if (group / file).exists():
                (group / file).write_text(str(weight))


def _allow_watches() -> None:
    """Make room for the inotify instances of several clusters: two nodes have about thirty, Debian allows a user 128.

    A kubelet that gets none registers no plugin, and says so in its log only. Where the number may not be changed it
    stays as it is.
    """
    with contextlib.suppress(OSError):
        if int(_WATCHERS.read_text()) < _WATCHERS_NEEDED:
            _WATCHERS.write_text(str(_WATCHERS_NEEDED))


def sweep() -> list[str]:
    """Removes the traces of every cluster whose lock is free; returns their names."""
    swept = []
    with _alone():
        for directory in sorted(d for d in runs_dir().iterdir() if d.is_dir()):
            with (directory / "lock").open("a+") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                _remove(directory)
                swept.append(directory.name)
    return swept


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    runs_dir().mkdir(parents=True, exist_ok=True)
    with (runs_dir() / ".lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove(directory: Path) -> None:
    for parent in _hierarchies():
        top = parent / f"{_PREFIX}{directory.name}"
        if top.is_dir():
            for group, _, _ in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):  # a process still on its way out; the next sweep gets it
                    Path(group).rmdir()
    shutil.rmtree(directory, ignore_errors=True)


def _hierarchies() -> Iterator[Path]:
    """The roots under which a cgroup has to be made: one on v2, one per controller on v1 and hybrid."""
    if (_CGROUPS / "cgroup.controllers").exists():
        yield _CGROUPS
        return
    for entry in sorted(_CGROUPS.iterdir()):
        # cpu and cpuacct may be links to one hierarchy; "unified" has no controllers in the hybrid layout.
        if entry.is_dir() and not entry.is_symlink() and entry.name not in {"unified", "systemd"}:
            yield entry


def _hand_down_controllers(group: Path) -> None:
    """On cgroup v2: containers below `group` get the controllers that exist here."""
    for parent in (group.parent, group):
        available = (parent / "cgroup.controllers").read_text().split()
        for controller in _CONTROLLERS:
            if controller in available:
                with contextlib.suppress(OSError):
                    (parent / "cgroup.subtree_control").write_text(f"+{controller}")
