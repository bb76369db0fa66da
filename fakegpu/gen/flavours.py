# SPDX-License-Identifier: Apache-2.0
"""Which names a driver of a given age exports, and what it calls itself.

Pure. Invariant: a flavour's list is a subset of every younger flavour's list, and the full flavour's list is
everything in symbols.json (of a CUDA version later than its own, too: programs built for tomorrow must load).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Exported by every real NVML and in no header.
UNDECLARED = ("nvmlInternalGetExportTable",)


@dataclass(frozen=True)
class Flavour:
    """A driver branch. `full` hides nothing."""

    name: str
    driver_version: str
    cuda_version: int
    nvml_version_major: int
    full: bool = False

    @property
    def branch(self) -> int:
        """580 of "580"."""
        return int(self.name)


FLAVOURS = (
    Flavour("580", "580.65.06", 13000, 13, full=True),
    Flavour("550", "550.163.01", 12040, 12),
    Flavour("525", "525.147.05", 12000, 12),
    Flavour("470", "470.256.02", 11040, 11),
)


def read_since(text: str) -> dict[str, int]:
    """Parses nvml_since.txt: `branch name` lines."""
    rows = (line.split() for line in text.splitlines() if line.strip() and not line.startswith("#"))
    return {name: int(branch) for branch, name in rows}


def nvml_branch(name: str, majors: Iterable[int], since: Mapping[str, int]) -> int:
    """The (approximate) first driver branch with an NVML function; majors are those whose header declares it."""
    if name in since:
        return since[name]
    return {11: 470, 12: 555}.get(min(majors), 580)


def exported(flavour: Flavour, api: str, functions: Mapping[str, Any], since: Mapping[str, int]) -> tuple[str, ...]:
    """The sorted names that `api`'s library of this flavour exports; `functions` is that of symbols.json."""
    names = []
    for name, row in functions.items():
        if row["api"] != api:
            continue
        young = (
            row["since"] > flavour.cuda_version
            if api == "cuda"
            else nvml_branch(name, row["majors"], since) > flavour.branch
        )
        if flavour.full or not young:
            names.append(name)
    if api == "nvml":
        names += UNDECLARED
    return tuple(sorted(names))
