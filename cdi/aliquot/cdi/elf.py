# SPDX-License-Identifier: Apache-2.0
"""The two facts about a shared library that decide where it is mounted: its SONAME and its machine.

Reads the headers only; never maps or runs anything. Invariant: a damaged or hostile file gives None, not an
exception and not an endless loop: every offset and size is checked by reading it from the file.
"""

from __future__ import annotations

import functools
import struct
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

X86_64: Final = 62
AARCH64: Final = 183

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_STRTAB, _DT_SONAME = 0, 5, 14
_HEADER: Final = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT: Final = struct.Struct("<IIQQQQQQ")
_DYNAMIC: Final = struct.Struct("<qQ")
_LIMIT: Final = 1 << 20
"""Bytes of a table that we are willing to read; real ones are far smaller."""
_NAME_LIMIT: Final = 256


class Library(NamedTuple):
    """A 64-bit little-endian shared object."""

    machine: int
    soname: str
    """"" when it has none."""


def read_library(path: Path) -> Library | None:
    """What `path` is, or None when it is no 64-bit little-endian ELF file. Remembered until the file changes."""
    status = path.stat()
    return _read(path, status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=1024)
def _read(path: Path, _device: int, _inode: int, _modified_ns: int, size: int) -> Library | None:
    with path.open("rb") as file:
        try:
            return _parse(file, size)
        except (struct.error, UnicodeDecodeError):
            return None


def _parse(file: BinaryIO, file_size: int) -> Library | None:
    ident, _, machine, _, _, offset, _, _, _, entry_size, count, *_ = _HEADER.unpack(file.read(_HEADER.size))
    if ident[:4] != b"\x7fELF" or ident[4] != 2 or ident[5] != 1 or entry_size != _SEGMENT.size:
        return None
    segments = list(_SEGMENT.iter_unpack(_at(file, file_size, offset, entry_size * count)))
    loads = [(address, start, size) for kind, _, start, address, _, size, _, _ in segments if kind == _PT_LOAD]
    for kind, _, start, _, _, size, _, _ in segments:
        if kind != _PT_DYNAMIC:
            continue
        entries: dict[int, int] = {}
        for tag, value in _DYNAMIC.iter_unpack(_at(file, file_size, start, size - size % _DYNAMIC.size)):
            if tag == _DT_NULL:
                break
            entries.setdefault(tag, value)
        if _DT_SONAME in entries and _DT_STRTAB in entries:
            place = _place(entries[_DT_STRTAB], loads) + entries[_DT_SONAME]
            name = _at(file, file_size, place, min(_NAME_LIMIT, max(file_size - place, 0)))
            return Library(machine, name.partition(b"\0")[0].decode("ascii"))
    return Library(machine, "")


def _place(address: int, loads: list[tuple[int, int, int]]) -> int:
    """Where in the file the byte lies that is loaded at `address`."""
    for base, start, size in loads:
        if base <= address < base + size:
            return address - base + start
    raise struct.error("address outside of every segment")


def _at(file: BinaryIO, file_size: int, offset: int, size: int) -> bytes:
    if size > _LIMIT or offset + size > file_size:
        raise struct.error("table outside of the file")
    file.seek(offset)
    data = file.read(size)
    if len(data) != size:
        raise struct.error("file cut while it was read")
    return data
