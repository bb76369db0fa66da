# SPDX-License-Identifier: Apache-2.0
"""The layout of grant and usage files, mirrored from `hook/include/region.h`: numbers and tables, nothing that acts.

Invariant: the tables equal the C structs offset by offset (tests/api compiles the header and compares), and what the
names count or mask is what the header says.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Final

from aliquot.api.grant import CorePolicy

GRANT_MAGIC: Final = 0x52475141
USAGE_MAGIC: Final = 0x53555141
MAJOR: Final = 1
MINOR: Final = 1

UUID_LEN: Final = 96
BUS_ID_LEN: Final = 32
NAME_LEN: Final = 192

GRANT_FILE_SIZE: Final = 4096
GRANT_SLOT_SIZE: Final = 1024
GRANT_SLOT0: Final = 512
FLAG_OVERSUBSCRIBE: Final = 1

USAGE_HEADER_SIZE: Final = 4096
USAGE_SLOT_SIZE: Final = 128
USAGE_SLOTS: Final = 1024
USAGE_FILE_SIZE: Final = USAGE_HEADER_SIZE + USAGE_SLOTS * USAGE_SLOT_SIZE

UNIT_SHIFT: Final = 9
UNIT_BYTES: Final = 1 << UNIT_SHIFT
WORD_UNIT_BITS: Final = 33
"""Account and charge words: units in these low bits, a sequence number above."""

# Index into `refused` of a usage file: which call asked for memory that was not there.
REFUSED_LINEAR: Final = 0
REFUSED_PITCHED: Final = 1
REFUSED_MANAGED: Final = 2
REFUSED_ASYNC: Final = 3
REFUSED_HANDLE: Final = 4
REFUSED_ARRAY: Final = 5
REFUSED_MIPMAP: Final = 6
REFUSED_GRAPH: Final = 7
REFUSED_CONTEXT: Final = 8
WAITED: Final = 9
"""Not a refusal: allocations that waited for room (ALIQUOT_MEMORY_WAIT_MS), whatever came of it."""
REFUSALS: Final = 12

# Bits of `complaints` of a usage file: what a hook found that the node's operator should know.
COMPLAINT_CONTEXT: Final = 1 << 0
COMPLAINT_SLOTS: Final = 1 << 1
COMPLAINT_CARD: Final = 1 << 2
COMPLAINT_BLIND: Final = 1 << 3
COMPLAINT_SWITCH: Final = 1 << 4
WORD_UNIT_MASK: Final = (1 << WORD_UNIT_BITS) - 1
WORD_SEQ_ONE: Final = 1 << WORD_UNIT_BITS

OWNER_PID_MASK: Final = (1 << 22) - 1
OWNER_START_SHIFT: Final = 22
RATIO_ONE: Final = 65536
OWNER_GENERATION_SHIFT: Final = 54
OWNER_LIVE: Final = 1 << 62
OWNER_CLAIMING: Final = 1 << 63

CORE_POLICIES: Final = (CorePolicy.DEFAULT, CorePolicy.FORCE, CorePolicy.DISABLE)
"""By their number in the file (`enum aq_core_policy`)."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """One C struct: where each field lies and how `struct` reads it. Little endian only."""

    name: str
    size: int
    fields: dict[str, tuple[int, str]]
    """Offset and `struct` format of each field that means something (reserved space has no entry)."""

    def get(self, data: memoryview | bytes, field: str, base: int = 0) -> int:
        """A number; the caller has checked that `data` reaches that far."""
        offset, code = self.fields[field]
        value: int = struct.unpack_from(f"<{code}", data, base + offset)[0]
        return value

    def put(self, data: bytearray, field: str, value: int | bytes, base: int = 0) -> None:
        """Stores a number, or bytes padded with NULs."""
        offset, code = self.fields[field]
        struct.pack_into(f"<{code}", data, base + offset, value)


GRANT_SLOT: Final = Layout(
    "aq_grant_slot",
    GRANT_SLOT_SIZE,
    {
        "generation": (0, "Q"),
        "memory_limit": (8, "Q"),
        "physical_memory": (16, "Q"),
        "context_overhead": (24, "Q"),
        "core_percent": (32, "I"),
        "core_policy": (36, "I"),
        "priority": (40, "I"),
        "flags": (44, "I"),
        "uuid": (48, f"{UUID_LEN}s"),
        "bus_id": (144, f"{BUS_ID_LEN}s"),
        "name": (176, f"{NAME_LEN}s"),
        "pad": (1016, "I"),
        "checksum": (1020, "I"),
    },
)
GRANT_HINTS: Final = Layout(
    "aq_grant_hints",
    40,
    {
        "suspended": (0, "Q"),
        "burst_until_ns": (8, "Q"),
        "hold_until_ns": (16, "Q"),
        "heartbeat_ns": (24, "Q"),
        "ratio": (32, "Q"),
    },
)
GRANT_FILE: Final = Layout(
    "aq_grant_file",
    GRANT_FILE_SIZE,
    {
        "magic": (0, "I"),
        "major": (4, "H"),
        "minor": (6, "H"),
        "file_size": (8, "I"),
        "slot_offset": (12, "I"),
        "slot_size": (16, "I"),
        "selector": (24, "Q"),
        "hints": (32, "40s"),
        "slot": (GRANT_SLOT0, "2048s"),
    },
)
USAGE_SLOT: Final = Layout(
    "aq_usage_slot",
    USAGE_SLOT_SIZE,
    {
        "owner": (0, "Q"),
        "charge": (8, "Q"),
        "pidns": (16, "Q"),
        "host_pid": (24, "Q"),
        "context_bytes": (32, "Q"),
        "spilled_bytes": (40, "Q"),
        "launches": (48, "Q"),
        "device_ns": (56, "Q"),
        "observed_bytes": (64, "Q"),
    },
)
USAGE_BUCKET: Final = Layout(
    "aq_usage_bucket",
    128,
    {
        "tokens_ns": (0, "q"),
        "refilled_at_ns": (8, "Q"),
        "busy_ns": (16, "Q"),
        "waiters": (24, "Q"),
        "last_launch_ns": (32, "Q"),
        "done_ns": (40, "Q"),
    },
)
USAGE_FILE: Final = Layout(
    "aq_usage_file",
    USAGE_FILE_SIZE,
    {
        "magic": (0, "I"),
        "major": (4, "H"),
        "minor": (6, "H"),
        "file_size": (8, "I"),
        "header_size": (12, "I"),
        "slot_size": (16, "I"),
        "slot_count": (20, "I"),
        "complaints": (24, "Q"),
        "refused": (32, "96s"),
        "account": (128, "Q"),
        "epoch": (136, "Q"),
        "unsettled": (144, "Q"),
        "slots_used": (152, "Q"),
        "bucket": (256, "128s"),
        "slot": (USAGE_HEADER_SIZE, f"{USAGE_SLOTS * USAGE_SLOT_SIZE}s"),
    },
)
LAYOUTS: Final = (GRANT_SLOT, GRANT_HINTS, GRANT_FILE, USAGE_SLOT, USAGE_BUCKET, USAGE_FILE)
