# SPDX-License-Identifier: Apache-2.0
"""The checkpoint's file: read whole or moved aside, written whole or not at all, by one process at a time.

It knows nothing of claims beyond `Content`, and never deletes what it cannot read. A change is appended to the journal
(`checkpoint_journal`); when that is full, or not to be trusted, the file is written whole: temporary file, fsync, the
old file becomes `.previous`, rename, fsync of the folder, and the journal is cleared. A kill between any two steps
leaves either the old or the new content to be found. Between processes a lock file counts, whose lock the kernel
drops with its holder.

Guarded invariant: at any instant the newest durable content is in the file and its journal, or, when the file is
missing, in `.previous`. Calls that read or write need the lock; the caller sees to it that only one thread makes them.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aliquot.api.errors import ConflictError, SettingsError, foreign
from aliquot.api.log import get_logger
from aliquot.node.checkpoint_format import Content, DamagedCheckpointError, decode, encode, encode_change, replay
from aliquot.node.checkpoint_journal import LIMIT, Journal, Signature, signature

_log = get_logger(__name__)

APPEND_STEPS: Final = ("lock", "append", "sync append", "done")
WHOLE_STEPS: Final = ("lock", "write", "sync", "keep", "rename", "sync folder", "clear", "done")
STEPS: Final = (*APPEND_STEPS[:-1], *WHOLE_STEPS[1:])
"""Names passed to `steps`, each before what it names; `done` after all."""

_LOCK_POLL_S: Final = 0.01


class Source(enum.Enum):
    """Where the content came from."""

    FRESH = "fresh"
    """There was no checkpoint."""
    MAIN = "main"
    PREVIOUS = "previous"
    """The file was damaged or missing; `.previous`, one write older, was whole."""
    CUT = "cut"
    """The file was whole, but its journal was not: what changed last may be missing."""
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


class CheckpointFile:
    """One checkpoint file and its companions beside it: `.journal`, `.previous`, `.lock`, `.corrupt-<time>`.

    Makes the folder. `now` gives seconds since the epoch, `steps` is called with each of `STEPS`. Raises
    `SettingsError` when the folder cannot be used.
    """

    def __init__(
        self,
        path: Path,
        *,
        now: Callable[[], float],
        steps: Callable[[str], None],
        lock_timeout_s: float,
        journal_limit: int = LIMIT,
    ) -> None:
        self.path = path
        self._previous = path.with_name(f"{path.name}.previous")
        self._temporary = path.with_name(f".{path.name}.new")
        self._journal = Journal(path.with_name(f"{path.name}.journal"), steps=steps, limit=journal_limit)
        self._damaged_journal = False
        self._now = now
        self._steps = steps
        self._lock_timeout_s = lock_timeout_s
        self._signature: Signature | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as e:
            raise SettingsError(
                f"state folder {path.parent} cannot be used: {foreign(e)}; make it a writable folder on a local disk"
            ) from e

    def close(self) -> None:
        """Let go of the lock file; may be repeated."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        self._journal.close()

    def lock(self, timeout_s: float | None = None) -> None:
        """Keep other processes out; raises `ConflictError` naming the holder after `timeout_s`, or `lock_timeout_s`."""
        self._steps("lock")
        deadline = time.monotonic() + (self._lock_timeout_s if timeout_s is None else timeout_s)
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
                    raise ConflictError(
                        f"checkpoint {self.path} is held by process {holder} for more than {self._lock_timeout_s:g} s; "
                        "end that process if it hangs"
                    ) from None
                # The kernel has no timed flock; the wait is short and only happens while two daemons overlap.
                threading.Event().wait(_LOCK_POLL_S)
        with contextlib.suppress(OSError):  # a full disk costs others our name, nothing else
            os.pwrite(self._lock, b"%-10d\n" % os.getpid(), 0)

    def unlock(self) -> None:
        """Let other processes in."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def read(self) -> tuple[Content | None, Recovery]:
        """What the files say at start; damaged ones are moved aside. Raises `NewerCheckpointError`, `SettingsError`.

        A damaged journal stays until the file was written whole: its first lines may be all that knows of a claim.
        """
        main = self._try_read(self.path)
        if isinstance(main, Content):
            content, reason = self._replayed(main)
            return content, Recovery(Source.CUT, (), reason) if reason else Recovery(Source.MAIN)
        previous = self._try_read(self._previous)
        base = previous if isinstance(previous, Content) else Content()
        content, _ = self._replayed(base)
        self._journal.trust(False)
        # All are judged before anything is moved: a newer version raised above.
        aside: list[Path] = []
        reasons: list[str] = []
        for path, found in ((self.path, main), (self._previous, previous)):
            if isinstance(found, DamagedCheckpointError):
                aside.append(self._quarantine(path))
                reasons.append(str(found))
        if isinstance(previous, Content):
            reasons = reasons or [f"{self.path} is missing"]
            return content, Recovery(Source.PREVIOUS, tuple(aside), "; ".join(reasons))
        if aside or content.sequence:
            reasons = reasons or [f"{self.path} is missing, there is a journal only"]
            return content if content.sequence else None, Recovery(Source.NOTHING, tuple(aside), "; ".join(reasons))
        return None, Recovery(Source.FRESH)

    def read_again(self, known: int) -> Content | None:
        """What another process wrote since this one last read or wrote; None: nothing.

        `known` is the sequence of the content in memory, which counts for more than a file that is older. Raises
        like `read`.
        """
        try:
            same = signature(self.path.stat()) == self._signature
        except FileNotFoundError:
            same = self._signature is None
        except OSError as e:
            raise _unreadable(self.path, e) from e
        if same and not self._journal.changed():
            return None
        base = self._try_read(self.path)
        if isinstance(base, DamagedCheckpointError):
            aside = self._quarantine(self.path)
            _log.warning("checkpoint damaged while running", path=str(self.path), kept=str(aside), reason=str(base))
        if not isinstance(base, Content):
            # Gone or damaged: written whole by the next change. `.previous` counts only when it is newer than what
            # we know: another process was killed before its last rename.
            self._signature = None
            base = self._try_read(self._previous)
        if isinstance(base, Content):
            content, _ = self._replayed(base)
            if content.sequence > known:
                return content
            self._journal.trust(content.sequence == known and not self._damaged_journal)
            if content.sequence == known and self._signature is not None:
                return None
        else:
            self._journal.trust(False)
        _log.warning("checkpoint missing while running, what is in memory counts", path=str(self.path))
        return None

    def _replayed(self, base: Content) -> tuple[Content, str]:
        """`base` with what the journal says, and what is wrong with that."""
        path = self._journal.path
        try:
            lines = self._journal.read()
        except OSError as e:
            raise _unreadable(path, e) from e
        content, reason = replay(base, lines, where=str(path))
        self._damaged_journal = bool(reason)
        self._journal.trust(not reason)
        return content, reason

    @property
    def settled(self) -> bool:
        """Whether the file says all by itself, without its journal."""
        return self._journal.empty

    def write(self, content: Content, changed: Iterable[str]) -> None:
        """Make `content` what the files say, durable on return; only records of `changed` differ. Raises `OSError`."""
        if self._signature is not None and self._journal.takes(line := encode_change(content, changed)):
            self._journal.append(line)
            # Whoever takes this change back must not have the next one counted as the same.
            self._journal.trust(False)
            self._steps("done")
            self._journal.trust(True)
        else:
            self.write_whole(encode(content))

    def write_whole(self, data: bytes) -> None:
        """Make `data` the file's content, durable on return, and the journal empty. Raises `OSError`."""
        self._steps("write")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            file = os.open(self._temporary, flags, 0o600)
        except FileNotFoundError:  # somebody removed the folder
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = os.open(self._temporary, flags, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(file, view) :]
            self._steps("sync")
            os.fsync(file)
            written = signature(os.fstat(file))
        finally:
            os.close(file)
        self._steps("keep")
        # There is none after a start, after damage, or after a kill right here.
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(self._previous)
        self._steps("rename")
        self._temporary.rename(self.path)
        self._signature = written
        self._journal.make()
        self._steps("sync folder")
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self._steps("clear")
        if self._damaged_journal:
            self._journal.move_aside(self._aside(self._journal.path))
            self._damaged_journal = False
        else:
            self._journal.clear()
        self._steps("done")

    def _try_read(self, path: Path) -> Content | DamagedCheckpointError | None:
        """None: not there. Raises `NewerCheckpointError`, `SettingsError`."""
        try:
            with path.open("rb") as file:
                data = file.read()
                found = signature(os.fstat(file.fileno()))
        except FileNotFoundError:
            return None
        except IsADirectoryError:
            return DamagedCheckpointError(f"{path} is a folder")
        except OSError as e:
            raise _unreadable(path, e) from e
        try:
            content = decode(data, where=str(path))
        except DamagedCheckpointError as e:
            return e
        if path == self.path:
            self._signature = found
        return content

    def _quarantine(self, path: Path) -> Path:
        aside = self._aside(path)
        path.rename(aside)
        return aside

    def _aside(self, path: Path) -> Path:
        """A name beside `path` that nothing has yet."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._now()))
        for suffix in ("", *(f"-{n}" for n in range(1, 1000))):
            aside = path.with_name(f"{path.name}.corrupt-{stamp}{suffix}")
            if not aside.exists():
                break
        return aside


def look(path: Path) -> Content:
    """What the checkpoint at `path` says now, for somebody who only wants to see: nothing is locked or changed.

    An absent one says nothing. Raises `OSError`, `NewerCheckpointError`, `DamagedCheckpointError`.
    """
    content = Content()
    for name in (path, path.with_name(f"{path.name}.previous")):
        with contextlib.suppress(FileNotFoundError):
            content = decode(name.read_bytes(), where=str(name))
            break
    journal = path.with_name(f"{path.name}.journal")
    with contextlib.suppress(FileNotFoundError):
        content, reason = replay(content, journal.read_bytes(), where=str(journal))
        if reason:
            raise DamagedCheckpointError(reason)
    return content


def _unreadable(path: Path, e: OSError) -> SettingsError:
    return SettingsError(f"checkpoint {path} cannot be read: {foreign(e)}; repair the disk or its rights")
