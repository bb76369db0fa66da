# SPDX-License-Identifier: Apache-2.0
"""What has been prepared, on disk: a durable map from claim UID to a record.

It never interprets a record and never decides who may hold what. Several threads and, during a rolling update,
two processes use it at once.

Writing. The whole file is written anew: temporary file, fsync, the old file becomes `.previous`, rename, fsync
of the folder. A kill between any two of these leaves either the old or the new content to be found. Callers
share the cost: whoever finds nobody writing writes everything staged so far, and what arrives meanwhile goes
into the next write (group commit), so forty callers need two writes, not forty.

Reading. At start, and whenever another process has written: a damaged file is moved aside, never deleted, and
`.previous` is used; `recovery` says so, so that the caller rebuilds from elsewhere what may be missing. A file
of a newer major version is refused before anything is touched. Once running, memory is trusted more than a file
that somebody damaged or removed: forgetting a claim would hand out its card twice.

Guarded invariants: a change is durable when `put`, `delete` or `Ticket.wait` returns; one that raised is not in
the map any more. One process at a time is between reading and writing (`session`, a lock file whose lock the
kernel drops with its holder).
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from aliquot.api.errors import ConflictError, HardwareError, InternalError, SettingsError, foreign
from aliquot.api.log import get_logger
from aliquot.node.checkpoint_format import (
    Content,
    DamagedCheckpointError,
    Raw,
    decode,
    encode,
    merged,
    unknown,
)

_log = get_logger(__name__)

R = TypeVar("R")

STEPS: Final = ("lock", "write", "sync", "keep", "rename", "sync folder", "done")
"""Names passed to `steps`, each before what it names; `done` after all."""

_LOCK_POLL_S: Final = 0.01


class Source(enum.Enum):
    """Where the content came from."""

    FRESH = "fresh"
    """There was no checkpoint."""
    MAIN = "main"
    PREVIOUS = "previous"
    """The file was damaged or missing; `.previous`, one write older, was whole."""
    NOTHING = "nothing"
    """Files were there, none was whole."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """How reading went."""

    source: Source
    quarantined: tuple[Path, ...] = ()
    """Damaged files, under the names they were moved to."""
    reason: str = ""

    @property
    def complete(self) -> bool:
        """Whether every claim that was ever durable is known; if not, rebuild from the API and the CDI folder."""
        return self.source in (Source.FRESH, Source.MAIN)


@dataclass(frozen=True, slots=True)
class DamagedRecord:
    """A record of a whole file that does not read as `record_type`: kept, and deletable."""

    raw: Raw
    reason: str


class Ticket:
    """A staged change. `wait` returns when it is durable and raises what kept it from becoming so."""

    __slots__ = ("_checkpoint", "done", "error", "raw", "uid")

    def __init__(self, checkpoint: Checkpoint[Any], uid: str | None, raw: Raw | None, *, done: bool = False) -> None:
        self._checkpoint = checkpoint
        self.uid = uid  # None: it is the boot id that changes
        self.raw = raw
        self.done = done
        self.error: BaseException | None = None

    def wait(self) -> None:
        """Until durable. Raises `HardwareError` (disk), `ConflictError` (another process holds the file)."""
        self._checkpoint._settle(self)  # noqa: SLF001 - the two are one thing


def read_boot_id(proc: Path = Path("/proc")) -> str:
    """The kernel's id of this boot; empty where it cannot be read (then no reboot is ever noticed)."""
    try:
        return (proc / "sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


class Checkpoint(Generic[R]):
    """The durable map. `record_type` is what records are read as: a msgspec struct, or `dict` for plain data.

    Opening reads the file. `boot_id` is the current boot's; `now` gives seconds since the epoch (names of files
    moved aside); `steps` is called with each of `STEPS`; `observe` gets the seconds each durable write took.

    Raises `NewerCheckpointError`, `SettingsError` (unreadable folder), `ConflictError` (locked for too long).
    """

    def __init__(
        self,
        path: Path,
        record_type: type[R],
        *,
        boot_id: str,
        now: Callable[[], float] = time.time,
        steps: Callable[[str], None] = lambda _step: None,
        observe: Callable[[float], None] = lambda _seconds: None,
        lock_timeout_s: float = 10.0,
    ) -> None:
        self.path = path
        self._previous = path.with_name(f"{path.name}.previous")
        self._temporary = path.with_name(f".{path.name}.new")
        self._record_type = record_type
        self._boot_id = boot_id
        self._now = now
        self._steps = steps
        self._observe = observe
        self._lock_timeout_s = lock_timeout_s
        self._state = threading.Condition()
        self._content = Content(boot_id=boot_id)
        self._view: dict[str, R] = {}
        self._damaged: dict[str, DamagedRecord] = {}
        self._staged: list[Ticket] = []
        self._flushing = False
        self._sessions = 0
        self._entering = False
        self._signature: tuple[int, int, int] | None = None
        self.recovery = Recovery(Source.FRESH)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock_file = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as e:
            raise SettingsError(
                f"state folder {path.parent} cannot be used: {foreign(e)}; make it a writable folder on a local disk"
            ) from e
        try:
            self._acquire_file()
            try:
                self._first_read()
            finally:
                fcntl.flock(self._lock_file, fcntl.LOCK_UN)
        except BaseException:
            os.close(self._lock_file)
            raise

    # ---- reading

    @property
    def rebooted(self) -> bool:
        """Whether the node has booted since the file was written; stays so until `accept_boot`."""
        with self._state:
            return bool(self._content.boot_id and self._boot_id and self._content.boot_id != self._boot_id)

    def get(self, uid: str) -> R | None:
        """The record of a claim, staged changes included."""
        with self._state:
            return self._view.get(uid)

    def records(self) -> dict[str, R]:
        """All records, staged changes included; the dict is the caller's."""
        with self._state:
            return dict(self._view)

    def damaged(self) -> dict[str, DamagedRecord]:
        """Records that cannot be read; whoever plans has to take their cards as held."""
        with self._state:
            return dict(self._damaged)

    # ---- changing

    def put(self, uid: str, record: R) -> None:
        """Set a record; durable on return. Raises like `Ticket.wait`."""
        self.stage(uid, record).wait()

    def delete(self, uid: str) -> None:
        """Forget a claim; durable on return, at once when it is unknown. Raises like `Ticket.wait`."""
        self.stage(uid, None).wait()

    def stage(self, uid: str, record: R | None) -> Ticket:
        """Change the map now (every reader of this process sees it) and write it later, in `Ticket.wait`.

        For a caller that plans under a lock of its own: stage inside, wait outside, and forty plans share two
        writes. A change whose wait raises is taken out of the map again.
        """
        with self._state:
            old = self._latest_raw(uid)
            raw = None if record is None else self._encoded(record, old)
            if raw == old:
                pending = [t for t in self._staged if t.uid == uid]
                return pending[-1] if pending else Ticket(self, uid, raw, done=True)
            ticket = Ticket(self, uid, raw)
            self._staged.append(ticket)
            self._show(uid, raw)
            return ticket

    def accept_boot(self) -> None:
        """Record the current boot as the one the content belongs to; durable on return. Raises like `wait`."""
        with self._state:
            if self._content.boot_id == self._boot_id:
                return
            ticket = Ticket(self, None, None)
            self._staged.append(ticket)
        ticket.wait()

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """While inside, this process alone reads and writes the file, and sees what others wrote before.

        Nests and is shared by the threads of the process; every write opens one itself. Whoever plans on the
        content needs one around reading, staging and waiting. Raises `ConflictError` after `lock_timeout_s`.
        """
        with self._state:
            self._state.wait_for(lambda: not self._entering)
            first = self._sessions == 0
            if first:
                self._entering = True
            else:
                self._sessions += 1
        if first:
            try:
                self._acquire_file()
                try:
                    self._refresh()
                except BaseException:
                    fcntl.flock(self._lock_file, fcntl.LOCK_UN)
                    raise
                with self._state:
                    self._sessions += 1
            finally:
                with self._state:
                    self._entering = False
                    self._state.notify_all()
        try:
            yield
        finally:
            with self._state:
                self._sessions -= 1
                if self._sessions == 0:
                    fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the lock file; nothing may be called afterwards. What was staged and not waited for is lost."""
        with self._state:
            if self._lock_file >= 0:
                os.close(self._lock_file)
                self._lock_file = -1

    # ---- group commit

    def _settle(self, ticket: Ticket) -> None:
        with self._state:
            self._state.wait_for(lambda: ticket.done or not self._flushing)
            if not ticket.done:
                self._flushing = True
        if not ticket.done:
            self._flush()
        if ticket.error is not None:
            raise ticket.error

    def _flush(self) -> None:
        """Write everything staged; called by one thread at a time, without the state lock."""
        error: BaseException | None = None
        batch: list[Ticket] = []
        content = self._content
        try:
            with self.session():
                with self._state:
                    batch = list(self._staged)
                    content = self._next_content(batch)
                started = time.perf_counter()
                self._write(encode(content))
                self._observe(time.perf_counter() - started)
        except OSError as e:
            error = HardwareError(
                f"checkpoint {self.path} cannot be written: {foreign(e)}; make room on that disk or repair it"
            )
            error.__cause__ = e
        except Exception as e:
            error = e
        except BaseException as e:
            error = InternalError(f"writing checkpoint {self.path} was interrupted; the change was not kept, repeat it")
            error.__cause__ = e
        with self._state:
            self._flushing = False
            if error is None:
                self._content = content
                self._finish(batch, None)
            else:
                # Also what was staged since: it may build on a change that is now taken back.
                self._finish(list(self._staged), error)
                self._show_all()
            self._state.notify_all()

    def _next_content(self, batch: list[Ticket]) -> Content:
        claims = dict(self._content.claims)
        boot_id = self._content.boot_id
        for ticket in batch:
            if ticket.uid is None:
                boot_id = self._boot_id
            elif ticket.raw is None:
                claims.pop(ticket.uid, None)
            else:
                claims[ticket.uid] = ticket.raw
        return self._content.following(claims, boot_id)

    def _finish(self, tickets: list[Ticket], error: BaseException | None) -> None:
        for ticket in tickets:
            ticket.error = error
            ticket.done = True
        self._staged = self._staged[len(tickets) :]

    def _write(self, data: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._steps("write")
        file = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(file, view) :]
            self._steps("sync")
            os.fsync(file)
            signature = _signature(os.fstat(file))
        finally:
            os.close(file)
        self._steps("keep")
        # There is none after a start, after damage, or after a kill right here.
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(self._previous)
        self._steps("rename")
        self._temporary.rename(self.path)
        self._signature = signature
        self._steps("sync folder")
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self._steps("done")

    # ---- the lock between processes

    def _acquire_file(self) -> None:
        self._steps("lock")
        deadline = time.monotonic() + self._lock_timeout_s
        while True:
            try:
                fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(self._lock_file, 32, 0).decode("ascii", "replace").strip() or "unknown"
                    raise ConflictError(
                        f"checkpoint {self.path} is held by process {holder} for more than {self._lock_timeout_s:g} s; "
                        "end that process if it hangs"
                    ) from None
                # The kernel has no timed flock; the wait is short and only happens while two daemons overlap.
                threading.Event().wait(_LOCK_POLL_S)
        os.pwrite(self._lock_file, b"%-10d\n" % os.getpid(), 0)

    # ---- files

    def _first_read(self) -> None:
        content, self.recovery = self._read_files()
        if content is not None:
            self._content = content
        self._show_all()
        if not self.recovery.complete or self.recovery.quarantined:
            _log.warning(
                "checkpoint recovered",
                path=str(self.path),
                source=self.recovery.source.value,
                reason=self.recovery.reason,
                kept=[str(p) for p in self.recovery.quarantined],
                claims=len(self._content.claims),
            )

    def _refresh(self) -> None:
        """Take over what another process wrote since we last read or wrote."""
        try:
            if _signature(self.path.stat()) == self._signature:
                return
        except FileNotFoundError:
            if self._signature is None:
                return
        found = self._try_read(self.path)
        if isinstance(found, DamagedCheckpointError):
            aside = self._quarantine(self.path)
            _log.warning("checkpoint damaged while running", path=str(self.path), kept=str(aside), reason=str(found))
        if not isinstance(found, Content):
            # Gone or damaged. `.previous` counts only when it is newer than what we know: another process was
            # killed before its last rename. Else memory does, and the next change writes it.
            self._signature = None
            found = self._try_read(self._previous)
            if not isinstance(found, Content) or found.sequence <= self._content.sequence:
                _log.warning("checkpoint missing while running, what is in memory counts", path=str(self.path))
                return
        with self._state:
            self._content = found
            self._show_all()

    def _read_files(self) -> tuple[Content | None, Recovery]:
        mains = self._try_read(self.path)
        if isinstance(mains, Content):
            return mains, Recovery(Source.MAIN)
        previous = self._try_read(self._previous)
        # Both are judged before anything is moved: a newer version raised above.
        aside: list[Path] = []
        reasons: list[str] = []
        for path, found in ((self.path, mains), (self._previous, previous)):
            if isinstance(found, DamagedCheckpointError):
                aside.append(self._quarantine(path))
                reasons.append(str(found))
        if isinstance(previous, Content):
            reasons = reasons or [f"{self.path} is missing"]
            return previous, Recovery(Source.PREVIOUS, tuple(aside), "; ".join(reasons))
        if aside:
            return None, Recovery(Source.NOTHING, tuple(aside), "; ".join(reasons))
        return None, Recovery(Source.FRESH)

    def _try_read(self, path: Path) -> Content | DamagedCheckpointError | None:
        """None: not there. Raises `NewerCheckpointError`, `SettingsError`."""
        try:
            with path.open("rb") as file:
                data = file.read()
                signature = _signature(os.fstat(file.fileno()))
        except FileNotFoundError:
            return None
        except IsADirectoryError:
            return DamagedCheckpointError(f"{path} is a folder")
        except OSError as e:
            raise SettingsError(f"checkpoint {path} cannot be read: {foreign(e)}; repair the disk or its rights") from e
        try:
            content = decode(data, where=str(path))
        except DamagedCheckpointError as e:
            return e
        if path == self.path:
            self._signature = signature
        return content

    def _quarantine(self, path: Path) -> Path:
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._now()))
        for suffix in ("", *(f"-{n}" for n in range(1, 1000))):
            aside = path.with_name(f"{path.name}.corrupt-{stamp}{suffix}")
            if not aside.exists():
                break
        path.rename(aside)
        return aside

    # ---- the readable view

    def _latest_raw(self, uid: str) -> Raw | None:
        for ticket in reversed(self._staged):
            if ticket.uid == uid:
                return ticket.raw
        return self._content.claims.get(uid)

    def _encoded(self, record: R, old: Raw | None) -> Raw:
        """`record` as JSON, with the fields of the stored record that only a newer release knows."""
        plain = msgspec.json.encode(record)
        if old is None or old == plain:
            return plain
        try:
            known = msgspec.json.decode(msgspec.json.encode(msgspec.json.decode(old, type=self._record_type)))
        except (msgspec.MsgspecError, ValueError):
            return plain
        lost = unknown(msgspec.json.decode(old), known)
        return plain if not lost else msgspec.json.encode(merged(msgspec.json.decode(plain), lost))

    def _show(self, uid: str, raw: Raw | None) -> None:
        self._view.pop(uid, None)
        self._damaged.pop(uid, None)
        if raw is None:
            return
        try:
            self._view[uid] = msgspec.json.decode(raw, type=self._record_type)
        except (msgspec.MsgspecError, ValueError) as e:
            self._damaged[uid] = DamagedRecord(raw, foreign(e))

    def _show_all(self) -> None:
        self._view.clear()
        self._damaged.clear()
        for uid, raw in self._content.claims.items():
            self._show(uid, raw)
        for ticket in self._staged:
            if ticket.uid is not None:
                self._show(ticket.uid, ticket.raw)


def _signature(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
