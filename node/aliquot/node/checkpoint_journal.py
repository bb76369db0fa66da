# SPDX-License-Identifier: Apache-2.0
"""The checkpoint's journal: what changed since the file was last written whole, one line a change, appended.

It knows nothing of what the lines say. A line costs one write and one flush of a few hundred bytes, where the whole
file costs twelve system calls and two flushes. Invariant: a line that `append` returned for is durable; after one that
raised nothing is appended any more until `clear`, because nobody knows what of it the disk has.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

Signature = tuple[int, int, int]
"""Inode, time of change in ns, size: tells whether somebody else wrote."""

LIMIT: Final = 256 << 10
"""Bytes after which the file is written whole again: read in 2 ms at a start, and one prepare in 180 pays for it."""


class Journal:
    """One file of lines. For one thread at a time, under the checkpoint's lock."""

    def __init__(self, path: Path, *, steps: Callable[[str], None], limit: int = LIMIT) -> None:
        """`steps` is called with `append` and `sync append`, each before it is done. `limit` 0: never used."""
        self.path = path
        self._steps = steps
        self._limit = limit
        self._file = -1
        self._signature: Signature | None = None
        self._usable = False

    def takes(self, line: bytes) -> bool:
        """Whether the line may be appended: the lines before are known and whole, and there is room."""
        size = self._signature[2] if self._signature else 0
        return self._usable and self._file >= 0 and size + len(line) <= self._limit

    @property
    def empty(self) -> bool:
        """Whether it held no line when it was last read or written here."""
        return self._signature is None or not self._signature[2]

    def changed(self) -> bool:
        """Whether somebody else wrote, replaced or removed it since it was last read or written here."""
        try:
            return signature(self.path.stat()) != self._signature
        except FileNotFoundError:
            return self._signature is not None

    def read(self) -> bytes:
        """All lines; nothing when there is no journal. Raises `OSError`."""
        self._let_go()
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        except FileNotFoundError:
            return b""
        data = bytearray()
        while chunk := os.pread(self._file, 1 << 20, len(data)):
            data += chunk
        self._signature = signature(os.fstat(self._file))
        return bytes(data)

    def trust(self, whole: bool) -> None:
        """Say whether what was read may be continued; if not, the next change goes elsewhere and `clear`s this."""
        self._usable = whole and self._file >= 0

    def append(self, line: bytes) -> None:
        """One line, durable on return. Raises `OSError`."""
        self._usable = False
        before = self._signature[2] if self._signature else 0
        self._steps("append")
        try:
            view = memoryview(line)
            while view:
                view = view[os.write(self._file, view) :]
            self._steps("sync append")
            os.fdatasync(self._file)
        except OSError:
            # Another process would take the line for one that counts.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, before)
            raise
        self._signature = signature(os.fstat(self._file))
        self._usable = True

    def make(self) -> None:
        """Have the file, before its folder is made durable. Raises `OSError`."""
        if self._limit and (self._file < 0 or self.changed()):
            self._let_go()
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def clear(self) -> None:
        """Forget all lines: what they say is durable elsewhere. Lines that come back are older than that."""
        if self._file < 0:
            return
        os.ftruncate(self._file, 0)
        self._signature = signature(os.fstat(self._file))
        self._usable = True

    def move_aside(self, aside: Path) -> None:
        """Keep a damaged journal under another name. Raises `OSError`."""
        self._let_go()
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(aside)

    def close(self) -> None:
        """Let go of the file; may be repeated."""
        self._let_go()

    def _let_go(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        self._signature = None
        self._usable = False


def signature(stat: os.stat_result) -> Signature:
    """What tells one state of a file from the next."""
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
