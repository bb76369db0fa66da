# SPDX-License-Identifier: Apache-2.0
"""What the bytes of grant and usage files mean; `region_layout` says where they lie.

Pure: bytes in, values out, no file is opened here. Never believes a usage file, which the tenant can write: every
size, count and index is checked against the real length first, and what does not make sense becomes a `problem`,
never an exception. Invariant: files of the same major and any minor version are read, because containers outlive
upgrades.

Writing live files is C (`hook/include/region_node.h`), since it takes atomic stores; `pack_slot` makes the bytes.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Iterator
from typing import Final

from aliquot.api.errors import InternalError, RequestError
from aliquot.api.grant import Grant
from aliquot.api.region_layout import (
    BUS_ID_LEN,
    CORE_POLICIES,
    FLAG_OVERSUBSCRIBE,
    GRANT_FILE,
    GRANT_FILE_SIZE,
    GRANT_HINTS,
    GRANT_MAGIC,
    GRANT_SLOT,
    GRANT_SLOT0,
    GRANT_SLOT_SIZE,
    MAJOR,
    MINOR,
    NAME_LEN,
    OWNER_CLAIMING,
    OWNER_LIVE,
    OWNER_PID_MASK,
    OWNER_START_SHIFT,
    UNIT_SHIFT,
    USAGE_BUCKET,
    USAGE_FILE,
    USAGE_FILE_SIZE,
    USAGE_HEADER_SIZE,
    USAGE_MAGIC,
    USAGE_SLOT_SIZE,
    USAGE_SLOTS,
    UUID_LEN,
    WORD_UNIT_MASK,
)

# ---- grant ----------------------------------------------------------------------------------------------------


def pack_slot(grant: Grant, generation: int) -> bytes:
    """The 1024 bytes of one version of a grant, checksum included.

    Raises `RequestError` when a text does not fit into the file, `InternalError` for a generation no file can hold.
    """
    if not 0 <= generation < 1 << 64:
        raise InternalError(f"grant {grant.name}: generation {generation} does not fit into 64 bits; report this")
    slot = bytearray(GRANT_SLOT_SIZE)
    numbers = {
        "generation": generation,
        "memory_limit": grant.memory_bytes,
        "physical_memory": grant.physical_bytes,
        "context_overhead": grant.context_overhead_bytes,
        "core_percent": grant.core_percent,
        "core_policy": CORE_POLICIES.index(grant.core_policy),
        "priority": grant.priority,
        "flags": FLAG_OVERSUBSCRIBE if grant.oversubscribe else 0,
    }
    for field, value in numbers.items():
        GRANT_SLOT.put(slot, field, value)
    for field, text, limit in (
        ("uuid", grant.card_uuid, UUID_LEN),
        ("bus_id", grant.card_bus_id, BUS_ID_LEN),
        ("name", grant.name, NAME_LEN),
    ):
        encoded = text.encode("utf-8", "surrogatepass")
        if len(encoded) >= limit or b"\0" in encoded:
            raise RequestError(
                f"grant {grant.name}: {field} {text!r} does not fit into the grant file: at most {limit - 1} bytes "
                "without NUL"
            )
        GRANT_SLOT.put(slot, field, encoded)
    GRANT_SLOT.put(slot, "checksum", _checksum(slot))
    return bytes(slot)


def _checksum(slot: bytes | bytearray | memoryview) -> int:
    return zlib.crc32(memoryview(slot)[: GRANT_SLOT_SIZE - 4])


def unpack_slot(slot: bytes | memoryview) -> tuple[Grant, int] | None:
    """Grant and generation of one slot; None unless it is whole, its checksum right and its content a grant."""
    if len(slot) < GRANT_SLOT_SIZE or GRANT_SLOT.get(slot, "checksum") != _checksum(slot[:GRANT_SLOT_SIZE]):
        return None
    policy = GRANT_SLOT.get(slot, "core_policy")
    if policy >= len(CORE_POLICIES):
        return None
    try:
        grant = Grant(
            name=_text(slot, "name"),
            card_uuid=_text(slot, "uuid"),
            card_bus_id=_text(slot, "bus_id"),
            memory_bytes=GRANT_SLOT.get(slot, "memory_limit"),
            physical_bytes=GRANT_SLOT.get(slot, "physical_memory"),
            context_overhead_bytes=GRANT_SLOT.get(slot, "context_overhead"),
            core_percent=GRANT_SLOT.get(slot, "core_percent"),
            core_policy=CORE_POLICIES[policy],
            priority=GRANT_SLOT.get(slot, "priority"),
            oversubscribe=bool(GRANT_SLOT.get(slot, "flags") & FLAG_OVERSUBSCRIBE),
        )
    except (RequestError, UnicodeDecodeError):
        return None
    return grant, GRANT_SLOT.get(slot, "generation")


def _text(slot: bytes | memoryview, field: str) -> str:
    offset, code = GRANT_SLOT.fields[field]
    return bytes(slot[offset : offset + int(code[:-1])]).partition(b"\0")[0].decode()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hints:
    """What the node refreshes beside the grant; times are CLOCK_MONOTONIC in nanoseconds."""

    suspended: int = 0
    burst_until_ns: int = 0
    hold_until_ns: int = 0
    heartbeat_ns: int = 0
    ratio: int = 0
    """Device time seen by NVML for each that was charged, times `RATIO_ONE`; 0 = not known."""


@dataclasses.dataclass(frozen=True)
class GrantFile:
    """A grant file that reads: the valid version of its grant."""

    grant: Grant
    generation: int
    hints: Hints
    minor: int


def parse_grant_file(data: bytes) -> GrantFile | None:
    """The valid grant of a grant file; None when the bytes are not a grant file of a version we read.

    Readers in the hook fall back to the other slot when the selected one is torn; so does this.
    """
    if len(data) < GRANT_FILE_SIZE or GRANT_FILE.get(data, "magic") != GRANT_MAGIC:
        return None
    offset, size = GRANT_FILE.get(data, "slot_offset"), GRANT_FILE.get(data, "slot_size")
    if GRANT_FILE.get(data, "major") != MAJOR or size < GRANT_SLOT_SIZE or offset + 2 * size > len(data):
        return None
    selector = GRANT_FILE.get(data, "selector")
    view = memoryview(data)
    for index in (selector & 1, ~selector & 1):
        found = unpack_slot(view[offset + index * size : offset + (index + 1) * size])
        if found is not None and found[1] & 1 == index:
            base = GRANT_FILE.fields["hints"][0]
            hints = Hints(**{name: GRANT_HINTS.get(data, name, base) for name in GRANT_HINTS.fields})
            return GrantFile(found[0], found[1], hints, GRANT_FILE.get(data, "minor"))
    return None


def pack_grant_file(grant: Grant, generation: int = 1, hints: Hints | None = None) -> bytes:
    """A complete grant file with this one version in it, as `aq_grant_create` makes it."""
    data = bytearray(GRANT_FILE_SIZE)
    for field, value in (
        ("magic", GRANT_MAGIC),
        ("major", MAJOR),
        ("minor", MINOR),
        ("file_size", GRANT_FILE_SIZE),
        ("slot_offset", GRANT_SLOT0),
        ("slot_size", GRANT_SLOT_SIZE),
        ("selector", generation),
    ):
        GRANT_FILE.put(data, field, value)
    if hints is not None:
        for field, value in dataclasses.asdict(hints).items():
            GRANT_HINTS.put(data, field, value, GRANT_FILE.fields["hints"][0])
    start = GRANT_SLOT0 + (generation & 1) * GRANT_SLOT_SIZE
    data[start : start + GRANT_SLOT_SIZE] = pack_slot(grant, generation)
    return bytes(data)


# ---- usage ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUsage:
    """One occupied slot: what one process of the container says it holds. Claims of the tenant, not facts."""

    index: int
    owner: int
    """The owner word as it stands: the identity to compare with."""
    pid: int
    """As the process's own PID namespace sees it."""
    start_time: int
    """Low 32 bits of its start time in clock ticks."""
    live: bool
    """False: it is just claiming the slot; only then may its PID namespace still be unknown."""
    pidns: int
    """Inode of its PID namespace."""
    host_pid: int
    """As the node wrote it; 0: not known."""
    used_bytes: int
    context_bytes: int
    spilled_bytes: int
    launches: int
    device_ns: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """What a usage file says. `problems` is empty for a file that only our own code has written."""

    used_bytes: int = 0
    """The account: at least what all processes hold."""
    unsettled: bool = False
    """The account may be too large until the next settle."""
    busy_ns: int = 0
    last_launch_ns: int = 0
    tokens_ns: int = 0
    complaints: int = 0
    """Bits that hooks have set about this file."""
    minor: int = 0
    processes: tuple[ProcessUsage, ...] = ()
    readable: bool = False
    """False: no usage file of a version we read; all figures are 0."""
    problems: tuple[str, ...] = ()
    """Constant phrases, fit for a log field or a label."""


def parse_usage(data: bytes | memoryview) -> Usage:
    """Reads a copy of a usage file, of whatever length and content. Raises nothing.

    Account and slots of one copy need not add up: processes go on while it is made. Whether they do is judged where
    both can be looked at twice, in `aq_usage_settle`.
    """
    view = memoryview(data)
    problem = _header_problem(view)
    if problem is not None:
        return Usage(problems=(problem,))
    problems = []
    first, size, count = (USAGE_FILE.get(view, field) for field in ("header_size", "slot_size", "slot_count"))
    if USAGE_FILE.get(view, "minor") <= MINOR and (first, size, count) != _OUR_SIZES:
        # Nothing of ours writes other sizes with this version; a smaller count would hide processes.
        problems.append("header changed")
        first, size, count = _OUR_SIZES
    whole = (len(view) - first) // size
    if whole < count:
        problems.append("file truncated")
    processes = tuple(_processes(view[first : first + min(whole, count) * size], size))
    if any(bool(process.owner & OWNER_CLAIMING) == process.live for process in processes):
        problems.append("unknown slot state")  # a slot is claiming or live, never both or neither
    bucket = USAGE_FILE.fields["bucket"][0]
    return Usage(
        used_bytes=(USAGE_FILE.get(view, "account") & WORD_UNIT_MASK) << UNIT_SHIFT,
        unsettled=bool(USAGE_FILE.get(view, "unsettled")),
        busy_ns=USAGE_BUCKET.get(view, "busy_ns", bucket),
        last_launch_ns=USAGE_BUCKET.get(view, "last_launch_ns", bucket),
        tokens_ns=USAGE_BUCKET.get(view, "tokens_ns", bucket),
        complaints=USAGE_FILE.get(view, "complaints"),
        minor=USAGE_FILE.get(view, "minor"),
        processes=processes,
        readable=True,
        problems=tuple(problems),
    )


_OUR_SIZES: Final = (USAGE_HEADER_SIZE, USAGE_SLOT_SIZE, USAGE_SLOTS)


def _header_problem(view: memoryview) -> str | None:
    """Why the rest of the file cannot be read, or None. Sizes may only grow within a major version."""
    if len(view) < USAGE_HEADER_SIZE:
        return "file shorter than its header"
    if USAGE_FILE.get(view, "magic") != USAGE_MAGIC:
        return "not a usage file"
    if USAGE_FILE.get(view, "major") != MAJOR:
        return "unknown major version"
    if USAGE_FILE.get(view, "minor") <= MINOR:
        return None  # sizes are known, whatever the header says
    header, size = USAGE_FILE.get(view, "header_size"), USAGE_FILE.get(view, "slot_size")
    if not USAGE_HEADER_SIZE <= header <= len(view) or not USAGE_SLOT_SIZE <= size <= USAGE_HEADER_SIZE or size % 8:
        return "impossible sizes in header"
    return None


def _processes(slots: memoryview, size: int) -> Iterator[ProcessUsage]:
    words = struct.Struct(f"<8Q{size - 64}x")
    for index, word in enumerate(words.iter_unpack(slots)):
        owner, charge, pidns, host_pid, context, spilled, launches, device_ns = word
        if owner == 0:
            continue
        yield ProcessUsage(
            index=index,
            owner=owner,
            pid=owner & OWNER_PID_MASK,
            start_time=owner >> OWNER_START_SHIFT & 0xFFFFFFFF,
            live=bool(owner & OWNER_LIVE),
            pidns=pidns,
            host_pid=host_pid,
            used_bytes=(charge & WORD_UNIT_MASK) << UNIT_SHIFT,
            context_bytes=context,
            spilled_bytes=spilled,
            launches=launches,
            device_ns=device_ns,
        )


def pack_usage_file() -> bytes:
    """An empty usage file, as `aq_usage_create` makes it."""
    data = bytearray(USAGE_FILE_SIZE)
    for field, value in (
        ("magic", USAGE_MAGIC),
        ("major", MAJOR),
        ("minor", MINOR),
        ("file_size", USAGE_FILE_SIZE),
        ("header_size", USAGE_HEADER_SIZE),
        ("slot_size", USAGE_SLOT_SIZE),
        ("slot_count", USAGE_SLOTS),
    ):
        USAGE_FILE.put(data, field, value)
    return bytes(data)
