# SPDX-License-Identifier: Apache-2.0
"""What has been prepared, on disk: a durable map from claim UID to a record.

It never interprets a record and never decides who may hold what. Several threads and, during a rolling update,
two processes use it at once.

Writing. A line is appended to the journal, now and then the whole file written anew (`checkpoint_file`). Callers share
the cost: whoever finds nobody writing writes everything staged so far, and what arrives meanwhile goes into the next
write (group commit), so forty callers need two writes, not forty.

Reading. At start, and whenever another process has written. `recovery` says when the start was not a clean one, so
that the caller rebuilds from elsewhere what may be missing. Once running, memory is trusted more than a file that
somebody damaged or removed: forgetting a claim would hand out its card twice.

Guarded invariants: a change is durable when `put`, `delete` or `Ticket.wait` returns; one that raised is not in
the map any more. One process at a time is between reading and writing (`session`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from aliquot.api.errors import AliquotError, HardwareError, InternalError, foreign
from aliquot.api.log import get_logger
from aliquot.node.checkpoint_file import APPEND_STEPS, STEPS, WHOLE_STEPS, CheckpointFile, Recovery, Source, look
from aliquot.node.checkpoint_format import Content, Raw, encode, merged, unknown
from aliquot.node.checkpoint_journal import LIMIT as JOURNAL_LIMIT

_log = get_logger(__name__)

R = TypeVar("R")

__all__ = [
    "APPEND_STEPS",
    "STEPS",
    "WHOLE_STEPS",
    "Checkpoint",
    "DamagedRecord",
    "Recovery",
    "Source",
    "Ticket",
    "look",
    "read_boot_id",
]


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
        self.error: Exception | None = None

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
    moved aside); `steps` is called with each of `STEPS`; `observe` gets the seconds each durable write took;
    `journal_limit` is how many bytes of changes stand beside the file (0: it is written whole each time).

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
        journal_limit: int = JOURNAL_LIMIT,
    ) -> None:
        self.path = path
        self._file = CheckpointFile(
            path, now=now, steps=steps, lock_timeout_s=lock_timeout_s, journal_limit=journal_limit
        )
        self._record_type = record_type
        self._boot_id = boot_id
        self._observe = observe
        self._state = threading.Condition()
        self._content = Content(boot_id=boot_id)
        self._view: dict[str, R] = {}
        self._damaged: dict[str, DamagedRecord] = {}
        self._staged: list[Ticket] = []
        self._flushing = False
        self._sessions = 0
        self._entering = False
        try:
            self._file.lock()
            try:
                content, self.recovery = self._file.read()
            finally:
                self._file.unlock()
        except BaseException:
            self._file.close()
            raise
        if content is not None:
            self._content = content
        self._show_all()
        if not self.recovery.complete or self.recovery.quarantined:
            _log.warning(
                "checkpoint recovered",
                path=str(path),
                source=self.recovery.source.value,
                reason=self.recovery.reason,
                kept=[str(p) for p in self.recovery.quarantined],
                claims=len(self._content.claims),
            )

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
        with self.session():
            self.stage(uid, record).wait()

    def delete(self, uid: str) -> None:
        """Forget a claim; durable on return, without a write when it is unknown. Raises like `Ticket.wait`."""
        with self.session():
            self.stage(uid, None).wait()

    def stage(self, uid: str, record: R | None) -> Ticket:
        """Change the map now (every reader of this process sees it) and write it later, in `Ticket.wait`.

        For a caller that plans under a lock of its own: stage inside, wait outside, and forty plans share two
        writes. A change whose wait raises is taken out of the map again. What is there already needs no write, so
        with two daemons on one file this belongs into a `session`, as in `put` and `delete`.
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
                self._file.lock()
                try:
                    found = self._file.read_again(self._content.sequence)
                except BaseException:
                    self._file.unlock()
                    raise
                with self._state:
                    self._sessions += 1
                    if found is not None:
                        self._content = found
                        self._show_all()
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
                    self._file.unlock()

    def close(self) -> None:
        """Write the file whole and let go of it; nothing may be called afterwards.

        What was staged and not waited for is lost. That the disk refuses, or somebody is just writing, loses nothing:
        the journal is read by the next.
        """
        with self._state:
            alone = not (self._sessions or self._entering or self._flushing)
            self._entering = self._entering or alone
        try:
            if alone and not self._file.settled:
                self._file.lock(0.0)
                try:
                    self._file.write_whole(encode(self._file.read_again(self._content.sequence) or self._content))
                finally:
                    self._file.unlock()
        except (AliquotError, OSError) as error:
            _log.info("checkpoint left with its journal", path=str(self.path), reason=foreign(error))
        finally:
            self._file.close()
            with self._state:
                self._entering = self._entering and not alone
                self._state.notify_all()

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
        error: Exception | None = None
        batch: list[Ticket] = []
        try:
            with self.session():
                with self._state:
                    batch = list(self._staged)
                    content = self._next_content(batch)
                started = time.perf_counter()
                self._file.write(content, [ticket.uid for ticket in batch if ticket.uid is not None])
                took = time.perf_counter() - started
                with self._state:  # before anybody else may write, or their content would be taken back here
                    self._content = content
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
                self._finish(batch, None)
            else:
                # Also what was staged since: it may build on a change that is now taken back.
                self._finish(list(self._staged), error)
                self._show_all()
            self._state.notify_all()
        if error is None:
            self._observe(took)

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

    def _finish(self, tickets: list[Ticket], error: Exception | None) -> None:
        for ticket in tickets:
            ticket.error = error
            ticket.done = True
        self._staged = self._staged[len(tickets) :]

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
