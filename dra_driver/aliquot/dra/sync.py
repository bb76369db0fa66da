# SPDX-License-Identifier: Apache-2.0
"""What has to be written so that the stored slices of a pool become the desired ones. Pure.

Never compares text where numbers are meant: the server stores `1024Mi` as `1Gi`, and a driver that sees a
difference there writes for ever (dra.md 7.8, T9). Invariant: applied to its own result the plan is empty, so at
rest nothing is written; and whoever watches sees either the old pool or the new one, or one that is openly
incomplete, never a mixture that passes for whole (generation rules of dra.md 7.5).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from aliquot.api import names, quantity
from aliquot.api.errors import RequestError
from aliquot.dra.slices import DesiredPool, content_hash

ANNOTATION_VERSION: Final = f"{names.ANNOTATION_PREFIX}version"
ANNOTATION_CONTENT: Final = f"{names.ANNOTATION_PREFIX}content"
ANNOTATION_STARTED: Final = f"{names.ANNOTATION_PREFIX}instance-started"

_INDEX: Final = re.compile(r"([0-9a-f]{5,})-")
_NAME_LIMIT: Final = 253

Slice = Mapping[str, Any]
"""A ResourceSlice as the API server gave it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Author:
    """Who writes: goes into annotations, for people and for the other instance in a rolling update."""

    version: str
    started_ns: int
    """Wall clock of the instance's start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPlan:
    """Writes in the order in which they have to be made: deletes, updates, creates."""

    generation: int
    deletes: tuple[Slice, ...] = field(default=(), hash=False)
    updates: tuple[dict[str, Any], ...] = field(default=(), hash=False)
    """Whole objects, with the resourceVersion they were made from."""
    creates: tuple[dict[str, Any], ...] = field(default=(), hash=False)
    yields_to_newer: bool = False
    """Nothing is to be written now: a later started instance wrote what is there (dra.md 1.6)."""

    @property
    def empty(self) -> bool:
        """Whether the pool is as desired."""
        return not (self.deletes or self.updates or self.creates)


def slice_name(index: int, node_name: str) -> str:
    """Name of slice `index` of a node's pool: the same from every instance, so that two never create it twice.

    It begins with the index in hexadecimal, at least five digits, which keeps the scheduler's order (dra.md 3.2).
    """
    name = f"{index:05x}-{names.DRIVER}-{node_name}"
    if len(name) <= _NAME_LIMIT:
        return name
    return f"{index:05x}-{names.DRIVER}-{hashlib.sha256(node_name.encode()).hexdigest()[:32]}"


def slice_index(name: str) -> int | None:
    """The index that a slice's name begins with, None for a name that was not made so."""
    match = _INDEX.match(name)
    return int(match[1], 16) if match else None


def plan_sync(
    stored: Sequence[Slice],
    desired: DesiredPool,
    *,
    author: Author,
    owner: Mapping[str, Any] | None,
    last_generation: int = 0,
    accepted: Mapping[str, str] | None = None,
    yield_to_newer: bool = False,
) -> SyncPlan:
    """The writes that make `stored` (every slice of our driver on this node) into `desired`.

    `owner` is the owner reference to the Node, None where it is not known. `last_generation` is the highest one
    this process has seen, so that a pool that was deleted comes back with a higher one. `accepted` maps the
    fingerprint of what we sent to that of what the server made of it, for servers that drop fields. With
    `yield_to_newer` slices that a later started instance wrote are left as they are.
    """
    current, deletes = _match(stored, desired)
    newest = max((s["spec"]["pool"].get("generation", 0) for s in stored), default=0)
    generation = max((s["spec"]["pool"].get("generation", 0) for s in current.values()), default=0)
    wanted = range(len(desired.devices))
    new = [index for index in wanted if index not in current]
    changed = [
        index
        for index in wanted
        if index in current
        and (
            not _as_desired(current[index], desired.spec(index, generation), accepted or {})
            or _owner_differs(current[index], owner)
        )
    ]
    if not (new or changed or deletes):
        return SyncPlan(generation=generation)
    if yield_to_newer and any(_started(s) > author.started_ns for s in stored):
        return SyncPlan(generation=generation, yields_to_newer=True)
    stale = any(s["spec"]["pool"].get("generation", 0) != generation for s in current.values())
    if new or len(changed) > 1 or stale:
        generation = max(newest, last_generation) + 1
        changed = [index for index in wanted if index in current]
    return SyncPlan(
        generation=generation,
        deletes=tuple(deletes),
        updates=tuple(_updated(current[index], desired.spec(index, generation), author, owner) for index in changed),
        creates=tuple(
            _created(slice_name(index, desired.node_name), desired.spec(index, generation), author, owner)
            for index in new
        ),
    )


def fingerprint(spec: Mapping[str, Any]) -> str:
    """Equal for two specs that say the same, however the server writes quantities; blind to the generation."""
    return content_hash([_canonical(spec)])


def _match(stored: Sequence[Slice], desired: DesiredPool) -> tuple[dict[int, Slice], list[Slice]]:
    """Stored slices by the index in their name, and those that have no place in the pool."""
    current: dict[int, Slice] = {}
    surplus: list[Slice] = []
    for item in sorted(stored, key=lambda s: (-s["spec"]["pool"].get("generation", 0), s["metadata"]["name"])):
        index = slice_index(item["metadata"]["name"])
        same_pool = item["spec"]["pool"]["name"] == desired.name and item["spec"].get("nodeName") == desired.node_name
        if index is None or index >= len(desired.devices) or index in current or not same_pool:
            surplus.append(item)
        else:
            current[index] = item
    return current, surplus


def _as_desired(stored: Slice, spec: Mapping[str, Any], accepted: Mapping[str, str]) -> bool:
    is_there, wanted = fingerprint(stored["spec"]), fingerprint(spec)
    return is_there == wanted or accepted.get(wanted) == is_there


def _owner_differs(stored: Slice, owner: Mapping[str, Any] | None) -> bool:
    """Whether the Node of that name is another object now; the old reference would have the slice collected."""
    if owner is None:
        return False
    return owner["uid"] not in {o.get("uid") for o in stored["metadata"].get("ownerReferences") or ()}


def _started(stored: Slice) -> int:
    text = (stored["metadata"].get("annotations") or {}).get(ANNOTATION_STARTED, "")
    return int(text) if text.isascii() and text.isdigit() else 0


def _annotations(spec: Mapping[str, Any], author: Author) -> dict[str, str]:
    return {
        ANNOTATION_VERSION: author.version,
        ANNOTATION_CONTENT: content_hash(spec["devices"]),
        ANNOTATION_STARTED: str(author.started_ns),
    }


def _created(name: str, spec: dict[str, Any], author: Author, owner: Mapping[str, Any] | None) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name, "annotations": _annotations(spec, author)}
    if owner is not None:
        metadata["ownerReferences"] = [dict(owner)]
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": metadata, "spec": spec}


def _updated(stored: Slice, spec: dict[str, Any], author: Author, owner: Mapping[str, Any] | None) -> dict[str, Any]:
    """The stored object with our spec; whatever others put into its metadata stays."""
    metadata = dict(stored["metadata"])
    metadata["annotations"] = (metadata.get("annotations") or {}) | _annotations(spec, author)
    metadata.pop("managedFields", None)
    if owner is not None:
        others = [o for o in metadata.get("ownerReferences") or () if o.get("kind") != owner["kind"]]
        metadata["ownerReferences"] = [dict(owner), *others]
    times = {
        (device["name"], taint["key"]): taint["timeAdded"]
        for device in stored["spec"].get("devices") or ()
        for taint in device.get("taints") or ()
        if "timeAdded" in taint
    }
    devices = [
        device
        | {
            "taints": [
                taint | ({"timeAdded": at} if (at := times.get((device["name"], taint["key"]))) else {})
                for taint in device["taints"]
            ]
        }
        if device.get("taints")
        else device
        for device in spec["devices"]
    ]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": metadata,
        "spec": spec | {"devices": devices},
    }


def _canonical(spec: Mapping[str, Any]) -> dict[str, Any]:
    pool = spec["pool"]
    return {
        **{key: value for key, value in spec.items() if key not in ("pool", "devices") and value not in (None, [], {})},
        "pool": {key: value for key, value in pool.items() if key != "generation"},
        "devices": [_canonical_device(device) for device in spec.get("devices") or ()],
    }


def _canonical_device(device: Mapping[str, Any]) -> dict[str, Any]:
    out = {key: value for key, value in device.items() if value not in (None, [], {})}
    if "capacity" in out:
        out["capacity"] = {name: _canonical_capacity(value) for name, value in out["capacity"].items()}
    if "taints" in out:
        out["taints"] = [{k: v for k, v in taint.items() if k != "timeAdded"} for taint in out["taints"]]
    return out


def _canonical_capacity(value: Any) -> Any:
    """Every quantity below as an exact number; keys as they are."""
    if isinstance(value, Mapping):
        return {key: _canonical_capacity(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_canonical_capacity(inner) for inner in value]
    try:
        return str(quantity.parse_exact(str(value)))
    except RequestError:
        return value
