# SPDX-License-Identifier: Apache-2.0
"""Where a program runs and from where a connection goes out: this host, or the namespaces of a local cluster.

Never starts anything. Invariant: whoever is given a `Place` needs not know which of the two it is.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

_CLONE_NEWNET: Final = 0x40000000

Connect = Callable[[str, int, float], socket.socket]
"""host, port, timeout in seconds → a connected TCP socket."""


class Place(Protocol):
    """A set of namespaces that programs can be started in and servers reached in."""

    def argv(self, argv: Sequence[str | Path]) -> list[str]:
        """The command line that runs `argv` there."""

    def connect(self, host: str, port: int, timeout_s: float) -> socket.socket:
        """A TCP connection from there. Raises `OSError`."""

    def path(self, path: Path | str) -> Path:
        """How this process reaches an absolute path of that place."""


class Here:
    """This process's own namespaces; a program dies with the thread that started it."""

    def argv(self, argv: Sequence[str | Path]) -> list[str]:
        return ["setpriv", "--pdeathsig", "KILL", "--", *map(str, argv)]

    def connect(self, host: str, port: int, timeout_s: float) -> socket.socket:
        return socket.create_connection((host, port), timeout=timeout_s)

    def path(self, path: Path | str) -> Path:
        return Path(path)


@dataclass(frozen=True)
class Inside:
    """The network, mount and PID namespaces of one process, named by its PID as this process sees it.

    A program started there dies with its `nsenter`, and everything dies with the first process of the PID namespace.
    """

    pid: int
    _door: concurrent.futures.ThreadPoolExecutor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # setns moves one thread only, so sockets are made by a thread that lives in the other network.
        door = concurrent.futures.ThreadPoolExecutor(1, "netns", initializer=_enter_network, initargs=(self.pid,))
        object.__setattr__(self, "_door", door)

    def argv(self, argv: Sequence[str | Path]) -> list[str]:
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--net", "--pid", "--root", "--wd=/", "--"]
        return [*enter, "setpriv", "--pdeathsig", "KILL", "--", *map(str, argv)]

    def connect(self, host: str, port: int, timeout_s: float) -> socket.socket:
        return self._door.submit(socket.create_connection, (host, port), timeout_s).result()

    def path(self, path: Path | str) -> Path:
        return Path(f"/proc/{self.pid}/root") / str(path).lstrip("/")

    def close(self) -> None:
        """Ends the thread that lives in the other network."""
        self._door.shutdown(wait=True)


def _enter_network(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(handle, _CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot enter the network namespace of process {pid}: {os.strerror(code)}")
    finally:
        os.close(handle)


def children(pid: int) -> list[int]:
    """PIDs of the direct children, by reading every /proc/PID/stat (the kernel's own list is optional there)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            # pid (command with any bytes) state ppid …
            if int(stat.rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.name))
    return found
