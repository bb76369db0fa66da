# SPDX-License-Identifier: Apache-2.0
"""The grant: what a container has been given of one card. The ONE value that both doors produce.

Pure data. Invariant: a `Grant` that exists is well formed, so nobody downstream checks it again; and it is
always about exactly one card (one allocation result of a claim, or one container's share of one card), a
container that holds several cards holds several grants (design.md 5).
"""

from __future__ import annotations

import enum
import re
from typing import Annotated, Final

import msgspec

from aliquot.api.errors import RequestError

MIB: Final = 1 << 20
MAX_MEMORY_BYTES: Final = ((1 << 33) - 1) << 9
"""What the account word of a usage region can hold (hook/include/region.h): just under 4 TiB."""

_NAME: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_NAME_LIMIT: Final = 191


class CorePolicy(enum.Enum):
    """When a compute limit binds (HAMi's GPU_CORE_UTILIZATION_POLICY)."""

    DEFAULT = "default"
    """Only while somebody else wants the card."""
    FORCE = "force"
    """Always."""
    DISABLE = "disable"
    """Never."""


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """One share of one card.

    Raises `RequestError` when constructed with a name, size or percentage that no region file can carry.
    """

    name: str
    """CDI device name and file name: `c-<claim uid>-<device>[-<share id>]`, at most 191 characters of a-z 0-9 -."""
    card_uuid: str
    """UUID as NVML spells it: `GPU-…` or `MIG-…`."""
    card_bus_id: str = ""
    memory_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Limit in bytes; 0 = the whole card, no memory limit."""
    physical_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Memory of the card in bytes; 0 = unknown."""
    context_overhead_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    """What one process's context takes on this card; 0 = the hook measures it."""
    core_percent: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0
    """Compute limit in percent of the card; 0 = none."""
    core_policy: CorePolicy = CorePolicy.DEFAULT
    priority: Annotated[int, msgspec.Meta(ge=0, le=1)] = 0
    """0 high, 1 low (HAMi's CUDA_TASK_PRIORITY)."""
    oversubscribe: bool = False

    def __post_init__(self) -> None:
        if len(self.name) > _NAME_LIMIT or not _NAME.fullmatch(self.name):
            raise RequestError(
                f"grant name {self.name!r} is not a CDI device name of ours: use at most {_NAME_LIMIT} characters "
                "a-z, 0-9 and single dashes, beginning with a letter"
            )
        if not 0 <= self.memory_bytes <= MAX_MEMORY_BYTES:
            raise RequestError(
                f"grant {self.name}: memory {self.memory_bytes} bytes is outside 0..{MAX_MEMORY_BYTES}; "
                "ask for less than 4 TiB"
            )
        if not 0 <= self.core_percent <= 100:
            raise RequestError(f"grant {self.name}: {self.core_percent} % compute is outside 0..100")
        if self.priority not in {0, 1}:
            raise RequestError(f"grant {self.name}: priority {self.priority} is neither 0 (high) nor 1 (low)")
        if not (0 <= self.physical_bytes < 1 << 63 and 0 <= self.context_overhead_bytes < 1 << 63):
            raise RequestError(
                f"grant {self.name}: card memory {self.physical_bytes} or context overhead "
                f"{self.context_overhead_bytes} is outside 0..2^63 bytes"
            )
