# SPDX-License-Identifier: Apache-2.0
"""`libaliquot-region.so` from Python: `hook/include/region_node.h`, function by function.

It holds no policy and no path of its own. Each function is one C call that survives a file cut short under it,
so nothing here ever maps a region file in Python. Invariant: the structures below have the C compiler's layout
(tests/node compiles the header and compares).
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from aliquot.api.errors import HardwareError, InternalError, foreign
from aliquot.api.grant import Grant
from aliquot.api.region import pack_slot, unpack_slot
from aliquot.api.region_layout import GRANT_SLOT_SIZE, USAGE_SLOTS

UNCHANGED: Final = (1 << 64) - 1
"""A hint with this value is left as it is."""

OWNER_CLAIMING: Final = 1 << 63
"""In an owner word: the slot is being claimed; its owner may not be looked for yet."""

PROCESS_WORDS: Final = 10
"""64-bit words of one `UsageProcess`, for readers that take the buffer as an array."""


class UsageProcess(ctypes.Structure):
    """`struct aq_usage_process`: one occupied slot."""

    _fields_ = (
        ("owner", ctypes.c_uint64),
        ("pidns", ctypes.c_uint64),
        ("start_time", ctypes.c_uint64),
        ("pid", ctypes.c_uint32),
        ("index", ctypes.c_uint32),
        ("host_pid", ctypes.c_uint64),
        ("used_bytes", ctypes.c_uint64),
        ("context_bytes", ctypes.c_uint64),
        ("spilled_bytes", ctypes.c_uint64),
        ("launches", ctypes.c_uint64),
        ("device_ns", ctypes.c_uint64),
    )


class UsageReport(ctypes.Structure):
    """`struct aq_usage_report`: a usage file as a whole."""

    _fields_ = (
        ("used_bytes", ctypes.c_uint64),
        ("busy_ns", ctypes.c_uint64),
        ("done_ns", ctypes.c_uint64),
        ("last_launch_ns", ctypes.c_uint64),
        ("complaints", ctypes.c_uint64),
        ("repaired_bytes", ctypes.c_uint64),
        ("occupied", ctypes.c_uint32),
        ("reaped", ctypes.c_uint32),
        ("unsettled", ctypes.c_uint32),
        ("suspicious", ctypes.c_uint32),
    )


class _Hints(ctypes.Structure):
    _fields_ = (
        ("suspended", ctypes.c_uint64),
        ("burst_until_ns", ctypes.c_uint64),
        ("hold_until_ns", ctypes.c_uint64),
        ("heartbeat_ns", ctypes.c_uint64),
        ("ratio", ctypes.c_uint64),
    )


class UsageReading:
    """Room for one reading of a usage file, reused from call to call by one thread.

    After `RegionLibrary.usage_read`: `report`, and `count` entries of `processes`.
    """

    def __init__(self, capacity: int = USAGE_SLOTS) -> None:
        self.report = UsageReport()
        self.capacity = capacity
        self.processes = (UsageProcess * capacity)()
        self.count = 0

    def owners(self) -> list[int]:
        """The owner words, in the order of the slots."""
        return self._column(0)

    def _column(self, word: int) -> list[int]:
        # A strided view costs 50 ns an entry, an attribute of each structure ten times that.
        words = memoryview(self.processes).cast("B").cast("Q")
        return words[word : self.count * PROCESS_WORDS : PROCESS_WORDS].tolist()


class RegionLibrary:
    """The loaded library. Functions raise `OSError` with the C function's errno unless they say otherwise.

    `EPROTO`: not a file of a version this library reads. `EBADMSG`: no version of the grant has a right
    checksum. `EIO`: the file was cut short during the call. Raises `HardwareError` when it cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
        except OSError as e:
            raise HardwareError(f"{path} cannot be loaded: {foreign(e)}; build it anew with `make hook`") from e
        text, number, pointer = ctypes.c_char_p, ctypes.c_uint64, ctypes.c_void_p
        for name, arguments in (
            ("aq_grant_create", (text, pointer)),
            ("aq_grant_update", (text, pointer)),
            ("aq_grant_read", (text, pointer)),
            ("aq_grant_hint", (text, ctypes.POINTER(_Hints))),
            ("aq_usage_create", (text,)),
            ("aq_usage_read", (text, ctypes.POINTER(UsageReport), pointer, ctypes.c_size_t)),
            ("aq_usage_settle", (text, pointer, ctypes.c_size_t, ctypes.POINTER(UsageReport))),
            ("aq_usage_reap", (text, ctypes.c_uint32, number)),
            ("aq_usage_set_host_pid", (text, ctypes.c_uint32, number, number)),
        ):
            try:
                function = getattr(library, name)
            except AttributeError:
                raise HardwareError(f"{path} has no {name}; build it anew with `make hook`") from None
            function.argtypes = arguments
            function.restype = ctypes.c_int
        self._c = library

    def grant_create(self, path: Path, grant: Grant) -> None:
        """A complete new grant file; `FileExistsError` if there is one. Raises `RequestError` like `pack_slot`."""
        _check(self._c.aq_grant_create(os.fsencode(path), pack_slot(grant, 0)), path)

    def grant_update(self, path: Path, grant: Grant) -> None:
        """Change a live grant in place; nothing is written when it says so already."""
        _check(self._c.aq_grant_update(os.fsencode(path), pack_slot(grant, 0)), path)

    def grant_read(self, path: Path) -> Grant:
        """The valid version. `EBADMSG` also when its content is no grant."""
        slot = ctypes.create_string_buffer(GRANT_SLOT_SIZE)
        _check(self._c.aq_grant_read(os.fsencode(path), slot), path)
        found = unpack_slot(slot.raw)
        if found is None:
            raise OSError(errno.EBADMSG, os.strerror(errno.EBADMSG), str(path))
        return found[0]

    def grant_hint(
        self,
        path: Path,
        *,
        suspended: int = UNCHANGED,
        burst_until_ns: int = UNCHANGED,
        hold_until_ns: int = UNCHANGED,
        heartbeat_ns: int = UNCHANGED,
        ratio: int = UNCHANGED,
    ) -> None:
        """Store the hints that are given; times are CLOCK_MONOTONIC in nanoseconds."""
        hints = _Hints(suspended, burst_until_ns, hold_until_ns, heartbeat_ns, ratio)
        _check(self._c.aq_grant_hint(os.fsencode(path), ctypes.byref(hints)), path)

    def usage_create(self, path: Path) -> None:
        """An empty usage file that every user may write; `FileExistsError` if there is one."""
        _check(self._c.aq_usage_create(os.fsencode(path)), path)

    def usage_read(self, path: Path, into: UsageReading) -> None:
        """Read report and occupied slots. On `EPROTO`, `EIO`, `ELOOP` the report still says `suspicious`."""
        into.count = 0
        into.count = _check(
            self._c.aq_usage_read(os.fsencode(path), ctypes.byref(into.report), into.processes, into.capacity), path
        )

    def usage_settle(self, path: Path, dead: Sequence[int], report: UsageReport) -> None:
        """Give back what the `dead` owner words hold and set the account to the sum of the charges."""
        words = (ctypes.c_uint64 * len(dead))(*dead)
        _check(self._c.aq_usage_settle(os.fsencode(path), words, len(dead), ctypes.byref(report)), path)

    def usage_reap(self, path: Path, index: int, owner: int) -> None:
        """Give back one slot of a dead owner, nothing if it is not `owner`'s any more; settle afterwards."""
        _check(self._c.aq_usage_reap(os.fsencode(path), index, owner), path)

    def usage_set_host_pid(self, path: Path, index: int, owner: int, host_pid: int) -> None:
        """Tell a slot's owner its PID on the host. `ESRCH`: the slot is not `owner`'s any more."""
        _check(self._c.aq_usage_set_host_pid(os.fsencode(path), index, owner, host_pid), path)


def _check(result: int, path: Path) -> int:
    if result < 0:
        raise OSError(-result, os.strerror(-result), str(path))
    return result


if ctypes.sizeof(UsageProcess) != PROCESS_WORDS * 8:
    raise InternalError("struct aq_usage_process has another size than region_library.py says; report this")
