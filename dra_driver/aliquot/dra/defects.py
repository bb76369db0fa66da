# SPDX-License-Identifier: Apache-2.0
"""What released control planes are known to get wrong with devices like ours: a table, and questions to it. Pure.

Never a substitute for probing: a field that is kept can still be counted wrongly, and that is all this knows.
Invariant: a version that cannot be read, or is older than the table, counts as having every defect.

Source: dra.md 3.5 (verified against the allocator library's tags up to 0.36.2, later ones from the issue threads).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

Version = tuple[int, int, int]

_OLDEST: Final = (1, 34)
"""Oldest minor that was looked at; what is older counts as having every defect."""

_VERSION: Final = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Defect:
    """One accounting defect of kube-scheduler's allocator."""

    issue: str
    effect: str
    concerns: frozenset[str]
    """What a device must have to be hit: `shares`, `counters`; both named means both together."""
    fixed: dict[int, int | None]
    """Minor → first sound patch, None = none known; minors not named are sound."""

    def hits(self, version: Version) -> bool:
        """Whether the defect is in this version."""
        major, minor, patch = version
        if (major, minor) < _OLDEST:
            return True
        if major != 1 or minor not in self.fixed:
            return False
        first_sound = self.fixed[minor]
        return first_sound is None or patch < first_sound


DEFECTS: Final = (
    Defect(
        "kubernetes/kubernetes#134100",
        "a second share of a device that draws from counters is charged twice and refused",
        frozenset({"shares", "counters"}),
        {34: None},
    ),
    Defect(
        "kubernetes/kubernetes#139034",
        "shares already given are forgotten when counters are rebuilt: overlapping parts are handed out",
        frozenset({"shares", "counters"}),
        {34: None, 35: None, 36: 2},
    ),
    Defect(
        "kubernetes/kubernetes#140433",
        "a share without an amount is charged to the counters again and refused",
        frozenset({"shares", "counters"}),
        {35: None, 36: None},
    ),
    Defect(
        "kubernetes/kubernetes#140434",
        "counters of two drivers with one pool name are mixed up",
        frozenset({"counters"}),
        {35: None, 36: 3},
    ),
    Defect(
        "kubernetes/kubernetes#136269",
        "two claims scheduled in quick succession can be given one device",
        frozenset({"shares"}),
        {34: 4, 35: 1},
    ),
)


def parse_version(text: str) -> Version | None:
    """`v1.36.3-rc.0+abc` → (1, 36, 3); None where it is no version. A pre-release counts as its release."""
    match = _VERSION.match(text)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def defects_of(version_text: str, properties: frozenset[str]) -> tuple[Defect, ...]:
    """Defects that hit devices with `properties` on a server of this version.

    A version that cannot be read is taken for one that has them all.
    """
    version = parse_version(version_text)
    return tuple(
        defect for defect in DEFECTS if defect.concerns <= properties and (version is None or defect.hits(version))
    )
