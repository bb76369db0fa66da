# SPDX-License-Identifier: Apache-2.0
"""Long-running programs that a cluster consists of, each with its own log file, none ever left behind.

Never interprets what a program does. Invariant: a program started here dies with the thread that started it or with
the namespaces it was put in (see `Place`), so a crashed or killed test run leaves nothing running.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from aliquot.api.errors import ClusterError
from aliquot.e2e.place import Here, Place, children

POLL_S: Final = 0.02
"""How often a condition is looked at while waiting; far below anything we measure."""
_KILL_WAIT_S: Final = 10.0


class Server:
    """One program with its arguments, restartable, its output appended to `log`."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str | Path],
        log: Path,
        *,
        place: Place | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.argv = [str(a) for a in argv]
        self.log = log
        self._env = dict(env) if env is not None else None
        self._place = place or Here()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """PID of the program itself as this process sees it. Raises `ClusterError` when it is not running."""
        if self._process is None or not self.running:
            raise ClusterError(f"{self.name} is not running")
        if isinstance(self._place, Here):
            return self._process.pid
        inner = children(self._process.pid)
        if len(inner) != 1:
            raise ClusterError(f"{self.name} is not running")
        return inner[0]

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts the program; the caller's thread has to live as long as the program is to live."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._place.argv(self.argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,  # Ctrl-C is for us; what it ends is ours to decide
            )

    def stop(self, *, polite_s: float = 0.0) -> None:
        """Ends the program: SIGTERM and up to `polite_s` seconds where that is asked for, then SIGKILL."""
        if self._process is None:
            return
        if polite_s > 0:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(polite_s)
        self.signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_WAIT_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the program itself; one that has ended is fine."""
        with contextlib.suppress(ClusterError, ProcessLookupError):
            os.kill(self.pid, number)

    def tail(self, lines: int = 15) -> str:
        """The last lines of its log, for an error message."""
        try:
            text = self.log.read_text(errors="replace")
        except OSError:
            return "(no log)"
        return "\n".join(text.splitlines()[-lines:])


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str, *servers: Server) -> None:
    """Returns as soon as `condition()` holds.

    Raises `ClusterError` naming `what` after `timeout_s` seconds, or at once, with the end of its log, when one of
    `servers` has ended.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        for server in servers:
            if not server.running:
                raise ClusterError(f"{server.name} ended while waiting for {what}; its log ends:\n{server.tail()}")
        if time.monotonic() > deadline:
            logs = "".join(f"\n{s.name} said:\n{s.tail()}" for s in servers)
            raise ClusterError(f"{what} did not happen within {timeout_s:g} s{logs}")
        time.sleep(POLL_S)


def free_ports(count: int) -> list[int]:
    """`count` different TCP ports of 127.0.0.1 that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [int(s.getsockname()[1]) for s in sockets]
    finally:
        for s in sockets:
            s.close()


def find_processes(program: str, environment: Mapping[str, str]) -> list[int]:
    """PIDs, as this process sees them, of processes that have `program` in their command line and these variables."""
    wanted = {f"{k}={v}".encode() for k, v in environment.items()}
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                if program.encode() in command and wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                    found.append(int(entry.name))
    return sorted(found)
