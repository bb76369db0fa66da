# SPDX-License-Identifier: Apache-2.0
"""The folders `<run dir>/grants` and `<run dir>/usage`: which grants are live on this node.

It never decides what a grant says and never replaces a file that a container may have mounted: a grant file is
changed in place, a usage file is left alone once it exists, even when its tenant has damaged it (a fresh one
would forget what the tenant's processes hold, so scribbling would buy memory).

Guarded invariant: a grant file exists only while its usage file does, so whoever sees the grant can account.
"""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aliquot.api.errors import HardwareError, InternalError, foreign
from aliquot.api.grant import Grant
from aliquot.api.names import USAGE_FILE
from aliquot.node.region_library import UNCHANGED, RegionLibrary, UsageReading

_UNREADABLE: Final = frozenset({errno.EPROTO, errno.EBADMSG, errno.EIO, errno.ELOOP, errno.EISDIR, errno.EINVAL})

_NAME: Final = re.compile(r"[a-z0-9-]{1,191}")
"""What a name of ours consists of; anything else in the folders is not ours, and no path leads out of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """What one process says it holds: the tenant's word, not a fact."""

    pid: int
    """As its own PID namespace sees it."""
    host_pid: int | None
    used_bytes: int
    context_bytes: int
    spilled_bytes: int
    launches: int
    device_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a usage file says at one moment. `problem` is None when it reads; then the figures are 0."""

    used_bytes: int = 0
    """The account: what counts against the limit."""
    busy_ns: int = 0
    """Device time ever charged to the share."""
    last_launch_ns: int = 0
    """CLOCK_MONOTONIC of the latest launch; 0 = none yet."""
    complaints: int = 0
    suspicious: bool = False
    """It reads, but says things no hook would write."""
    processes: tuple[Process, ...] = ()
    problem: str | None = None


class Regions:
    """The region files below `run_dir`; safe to call from many threads.

    `library` is `libaliquot-region.so` (its path, or loaded). Raises `HardwareError` when the folders cannot be
    made or written, which every method may raise.
    """

    def __init__(self, run_dir: Path, library: Path | RegionLibrary) -> None:
        self.run_dir = run_dir
        self.library = library if isinstance(library, RegionLibrary) else RegionLibrary(library)
        self._grants_dir = run_dir / "grants"
        self._usage_dir = run_dir / "usage"
        self._local = threading.local()
        self._make_folders()

    def grant_file(self, name: str) -> Path:
        """Where the grant of that name lies on the host."""
        return self._grants_dir / name

    def usage_dir(self, name: str) -> Path:
        """The folder that is mounted into the containers of that grant."""
        return self._usage_dir / name

    def usage_file(self, name: str) -> Path:
        """Where the usage of that grant lies on the host."""
        return self._usage_dir / name / USAGE_FILE

    def create(self, grant: Grant) -> None:
        """Make the files of a grant; what is there already is kept, a grant that says something else is changed.

        Raises `InternalError` when a file of that name is there that another release wrote or that is no grant.
        """
        with _naming(grant.name):
            self._make_folders()
            folder = self.usage_dir(grant.name)
            # The folder is the container's, but only its file may be written by whatever user it runs as.
            folder.mkdir(exist_ok=True)
            folder.chmod(0o755)  # whatever the umask
            self._make_usage(self.usage_file(grant.name))
            path = self.grant_file(grant.name)
            _drop_empty_folder(path)
            try:
                self.library.grant_create(path, grant)
            except FileExistsError:
                self._change(path, grant)

    def update(self, grant: Grant) -> None:
        """Change a live grant; containers see it at once. Raises `HardwareError` when there is none."""
        with _naming(grant.name):
            self._change(self.grant_file(grant.name), grant)

    def remove(self, name: str) -> None:
        """Remove the files of a grant whose containers are gone; nothing happens when there are none."""
        with _naming(name):
            path = self.grant_file(name)
            _drop_empty_folder(path)
            path.unlink(missing_ok=True)
            for left in self._grants_dir.glob(f"{name}.*.tmp"):  # of a process killed while it created the grant
                left.unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.usage_dir(name))

    def names(self) -> frozenset[str]:
        """Every grant of which anything is there, half made or half removed ones included."""
        found: set[str] = set()
        for folder in (self._grants_dir, self._usage_dir):
            with contextlib.suppress(FileNotFoundError):
                found.update(entry.name for entry in folder.iterdir() if _NAME.fullmatch(entry.name))
        return frozenset(found)

    def grant(self, name: str) -> Grant | None:
        """What the grant file says; None when there is none. Raises `InternalError` when it cannot be read."""
        with _naming(name):
            try:
                return self.library.grant_read(self.grant_file(name))
            except FileNotFoundError:
                return None

    def grants(self, among: Collection[str] | None = None) -> dict[str, Grant]:
        """All grants (or those `among` them) that can be read; a file that cannot is the reaper's to report."""
        found: dict[str, Grant] = {}
        for name in sorted(self.names() if among is None else among):
            with contextlib.suppress(OSError):
                found[name] = self.library.grant_read(self.grant_file(name))
        return found

    def on_card(self, uuid: str) -> tuple[str, ...]:
        """Names of the live grants of a card."""
        return tuple(name for name, grant in self.grants().items() if grant.card_uuid == uuid)

    def usage(self, name: str) -> Usage:
        """What the usage file says; whatever a tenant did to it, the answer is a `Usage`."""
        if not _NAME.fullmatch(name):
            raise InternalError(f"{name!r} is not the name of a grant; report this")
        reading = self._reading()
        try:
            self.library.usage_read(self.usage_file(name), reading)
        except OSError as e:
            return Usage(problem=problem_of(e))
        report = reading.report
        return Usage(
            used_bytes=report.used_bytes,
            busy_ns=report.busy_ns,
            last_launch_ns=report.last_launch_ns,
            complaints=report.complaints,
            suspicious=bool(report.suspicious),
            processes=tuple(
                Process(
                    pid=p.pid,
                    host_pid=p.host_pid or None,
                    used_bytes=p.used_bytes,
                    context_bytes=p.context_bytes,
                    spilled_bytes=p.spilled_bytes,
                    launches=p.launches,
                    device_ns=p.device_ns,
                )
                for p in reading.processes[: reading.count]
            ),
        )

    def suspend(self, name: str, suspended: bool) -> None:
        """Make every launch and allocation of a grant wait, or let them go on. Raises `HardwareError`."""
        self.hint(name, suspended=int(suspended))

    def hint(
        self,
        name: str,
        *,
        suspended: int = UNCHANGED,
        burst_until_ns: int = UNCHANGED,
        hold_until_ns: int = UNCHANGED,
        heartbeat_ns: int = UNCHANGED,
        ratio: int = UNCHANGED,
    ) -> None:
        """Store the hints that are given (region.h, `aq_grant_hints`). Raises `HardwareError`, `InternalError`."""
        with _naming(name):
            self.library.grant_hint(
                self.grant_file(name),
                suspended=suspended,
                burst_until_ns=burst_until_ns,
                hold_until_ns=hold_until_ns,
                heartbeat_ns=heartbeat_ns,
                ratio=ratio,
            )

    def _make_folders(self) -> None:
        try:
            # Nobody but root has a way to the files by these names; containers get them by mounts.
            for folder in (self.run_dir, self._grants_dir, self._usage_dir):
                folder.mkdir(mode=0o700 if folder is not self.run_dir else 0o755, parents=True, exist_ok=True)
        except OSError as e:
            raise HardwareError(
                f"run folder {self.run_dir} cannot be used: {foreign(e)}; make it a folder that root may write"
            ) from e

    def _make_usage(self, path: Path) -> None:
        _drop_empty_folder(path)
        with contextlib.suppress(FileExistsError):
            self.library.usage_create(path)

    def _change(self, path: Path, grant: Grant) -> None:
        self.library.grant_update(path, grant)

    def _reading(self) -> UsageReading:
        reading: UsageReading | None = getattr(self._local, "reading", None)
        if reading is None:
            reading = self._local.reading = UsageReading()
        return reading


PROBLEMS: Final[Mapping[int, str]] = {
    errno.ENOENT: "missing",
    errno.EPROTO: "not a usage file of a version we read",
    errno.EIO: "cut short while it was read",
    errno.ELOOP: "a symbolic link",
    errno.EISDIR: "a folder",
}
"""What can be wrong with a usage file, in words from a fixed list (log fields, metric labels)."""


def problem_of(e: OSError) -> str:
    """The word for why a usage file does not read."""
    return PROBLEMS.get(e.errno or 0, "unreadable")


def _drop_empty_folder(path: Path) -> None:
    """A runtime that found no file to mount may have made a folder in its place (B081)."""
    with contextlib.suppress(OSError):
        path.rmdir()


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Foreign errors of one grant's files become ours, with the grant's name."""
    if not _NAME.fullmatch(name):
        raise InternalError(f"{name!r} is not the name of a grant; report this")
    try:
        yield
    except OSError as e:
        if e.errno in _UNREADABLE:
            raise InternalError(
                f"grant {name}: {e.filename} is not a grant file that this release reads ({foreign(e.strerror)}) "
                "and was left as it is; end the pods of its claim, then remove the file"
            ) from e
        raise HardwareError(
            f"grant {name}: {e.filename}: {foreign(e.strerror)}; look after that folder's disk and rights"
        ) from e
