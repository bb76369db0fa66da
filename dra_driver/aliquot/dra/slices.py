# SPDX-License-Identifier: Apache-2.0
"""From devices to ResourceSlices: the specs that we want stored, complete but for the generation. Pure.

Never leaves anything to the server that the server would refuse: names, lengths and counts are checked here, and a
device that breaks a rule is named and left out rather than taking the node's whole slice with it. Invariant: same
devices in, same bytes out, whatever process computes it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aliquot.api import names
from aliquot.api.quantity import format_bytes
from aliquot.dra.attributes import ENTRIES_LIMIT, NAME, STRING_LIMIT
from aliquot.dra.devices import Device, Offer

SLICE_LIMIT: Final = 128
"""Devices in a slice (dra.md 2.3)."""
TAINTED_SLICE_LIMIT: Final = 64
"""Devices in a slice of which one carries taints (dra.md 2.3, from 1.35)."""
_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredPool:
    """What the pool is to hold."""

    name: str
    node_name: str
    devices: tuple[tuple[Mapping[str, Any], ...], ...] = field(hash=False)
    """Per slice its devices, in the API's own form; at least one slice, perhaps without devices."""
    left_out: tuple[str, ...] = ()
    """Why devices were not published, one sentence each."""

    def spec(self, index: int, generation: int) -> dict[str, Any]:
        """`spec` of slice `index`."""
        return {
            "driver": names.DRIVER,
            "pool": {"name": self.name, "generation": generation, "resourceSliceCount": len(self.devices)},
            "nodeName": self.node_name,
            "devices": [dict(device) for device in self.devices[index]],
        }


def pool_for(offered: Offer, *, node_name: str, pool: str, taints_kept: bool = False) -> DesiredPool:
    """The pool of a node that offers these devices.

    Where the server drops taints, a tainted device stays in (a claim may hold it) without them.
    """
    left_out: list[str] = []
    devices: list[Mapping[str, Any]] = []
    seen: set[str] = set()
    for device in offered.devices:
        problem = _problem(device, seen)
        if problem:
            left_out.append(problem)
            continue
        seen.add(device.name)
        devices.append(_published(device, taints_kept=taints_kept))
    limit = TAINTED_SLICE_LIMIT if any("taints" in device for device in devices) else SLICE_LIMIT
    parts = tuple(tuple(devices[at : at + limit]) for at in range(0, len(devices), limit)) or ((),)
    return DesiredPool(name=pool, node_name=node_name, devices=parts, left_out=tuple(left_out))


def content_hash(devices: Iterable[Mapping[str, Any]]) -> str:
    """A short name for what a slice holds, for an annotation that people can compare between nodes."""
    raw = json.dumps(list(devices), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(raw.encode()).hexdigest()[:16]


def _problem(device: Device, seen: set[str]) -> str:
    if not _LABEL.fullmatch(device.name):
        return f"device {device.name!r} has no DNS label as its name"
    if device.name in seen:
        return f"device {device.name} exists twice"
    for name, value in device.attributes.items():
        if not NAME.fullmatch(name):
            return f"device {device.name}: attribute {name!r} is no C identifier of at most 32 characters"
        for text in value.values():
            if isinstance(text, str) and not 0 < len(text.encode()) <= STRING_LIMIT:
                return f"device {device.name}: attribute {name} has {len(text.encode())} bytes of {STRING_LIMIT}"
    entries = len(device.attributes) + len(_capacity(device))
    if entries > ENTRIES_LIMIT:
        return f"device {device.name} has {entries} attributes and capacities of {ENTRIES_LIMIT}"
    return ""


def _published(device: Device, *, taints_kept: bool) -> dict[str, Any]:
    out: dict[str, Any] = {"name": device.name, "attributes": dict(sorted(device.attributes.items()))}
    capacity = _capacity(device)
    if capacity:
        out["capacity"] = capacity
    if device.taints and taints_kept:
        out["taints"] = [{"key": t.key, "value": t.value, "effect": t.effect} for t in device.taints]
    if device.shareable:
        out["allowMultipleAllocations"] = True
    return out


def _capacity(device: Device) -> dict[str, Any]:
    """Capacities; with policies on a shareable device, without on all others, where they are forbidden."""
    capacity: dict[str, Any] = {}
    layout = device.layout
    if device.memory_bytes:
        capacity[names.CAPACITY_MEMORY] = {"value": format_bytes(device.memory_bytes)}
    capacity[names.CAPACITY_CORES] = {"value": str(device.cores)}
    if device.shareable:
        capacity[names.CAPACITY_MEMORY]["requestPolicy"] = {
            "default": format_bytes(layout.default_memory_bytes),
            "validRange": {"min": "1Mi", "step": "1Mi", "max": format_bytes(device.memory_bytes)},
        }
        capacity[names.CAPACITY_CORES]["requestPolicy"] = {
            "default": str(layout.default_cores),
            "validRange": {"min": "0", "step": "1", "max": str(device.cores)},
        }
        # A range must hold at least one step (dra.md 2.4), which 1 to 1 does not.
        some = {"validRange": {"min": "1", "step": "1", "max": str(layout.max_shares)}}
        one = {"validValues": ["1"]}
        capacity[names.CAPACITY_SLOTS] = {
            "value": str(layout.max_shares),
            "requestPolicy": {"default": "1"} | (some if layout.max_shares > 1 else one),
        }
    return capacity
