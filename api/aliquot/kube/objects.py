# SPDX-License-Identifier: Apache-2.0
"""The fields we read of Kubernetes objects, and no others.

Pure. These structs are for reading only: whoever writes takes the raw JSON (`Document`), changes what is theirs and
keeps the rest, because a struct written back would silently delete every field it does not know. Invariant: an
unknown field never fails a decode, a missing one gets its zero value; small structs without cyclic collection are
what lets 20 000 pods be listed in a tenth of a second (engineering.md 1).

Quantities stay text here; `aliquot.api.quantity` reads them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import msgspec

from aliquot.api.share import ConfigEntry


class OwnerReference(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Who an object goes away with."""

    kind: str = ""
    name: str = ""
    uid: str = ""


class ObjectMeta(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """`metadata`, as far as anything of ours looks at it."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: tuple[OwnerReference, ...] = ()

    @property
    def key(self) -> str:
        """`namespace/name`, or the name of a cluster-scoped object: unique within one resource."""
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class Object(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Any object, metadata only. The others add fields to it."""

    metadata: ObjectMeta = ObjectMeta()


# ---- resource.k8s.io/v1 ----------------------------------------------------------------------------------------


class AllocationResult(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """One device that the scheduler gave to one request of a claim (`results[]`)."""

    request: str = ""
    """`main`, or `main/sub` where the request offered alternatives."""
    driver: str = ""
    pool: str = ""
    device: str = ""
    admin_access: bool | None = None
    share_id: str | None = msgspec.field(default=None, name="shareID")
    consumed_capacity: dict[str, str] | None = None

    @property
    def main_request(self) -> str:
        """What kubelet knows the request by."""
        return self.request.partition("/")[0]


class Allocation(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """`status.allocation.devices`: results in the order that fixes the container's device order."""

    results: tuple[AllocationResult, ...] = ()
    config: tuple[ConfigEntry, ...] = ()


class _AllocationStatus(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    devices: Allocation = Allocation()


class Consumer(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Who may use a claim now (`reservedFor[]`)."""

    resource: str = ""
    name: str = ""
    uid: str = ""


class _ClaimStatus(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    allocation: _AllocationStatus | None = None
    reserved_for: tuple[Consumer, ...] = ()


class ResourceClaim(Object, frozen=True, gc=False, rename="camel"):
    """A ResourceClaim as a driver needs it."""

    status: _ClaimStatus = _ClaimStatus()

    @property
    def allocation(self) -> Allocation | None:
        """None: not allocated (any more)."""
        return self.status.allocation.devices if self.status.allocation is not None else None


class PoolRef(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Which pool a slice is part of; only the newest generation counts, and only when complete."""

    name: str = ""
    generation: int = 0
    resource_slice_count: int = 0


class CapacityValue(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """An amount a device has."""

    value: str = "0"


class AttributeValue(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Exactly one of these is set."""

    string: str | None = None
    int_: int | None = msgspec.field(default=None, name="int")
    bool_: bool | None = msgspec.field(default=None, name="bool")
    version: str | None = None

    @property
    def value(self) -> str | int | bool | None:
        """Whichever is set."""
        options = (self.string, self.int_, self.bool_, self.version)
        return next((option for option in options if option is not None), None)


class SliceDevice(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A device as published."""

    name: str = ""
    attributes: dict[str, AttributeValue] = {}
    capacity: dict[str, CapacityValue] = {}
    allow_multiple_allocations: bool | None = None


class _SliceSpec(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    driver: str = ""
    pool: PoolRef = PoolRef()
    node_name: str = ""
    devices: tuple[SliceDevice, ...] = ()


class ResourceSlice(Object, frozen=True, gc=False, rename="camel"):
    """A ResourceSlice for looking at; to compare or rewrite one, read it as a `Document`."""

    spec: _SliceSpec = _SliceSpec()


# ---- core/v1 ---------------------------------------------------------------------------------------------------


class _NodeInfo(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    kubelet_version: str = ""


class _NodeStatus(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    node_info: _NodeInfo = _NodeInfo()
    allocatable: dict[str, str] = {}


class Node(Object, frozen=True, gc=False, rename="camel"):
    """A Node: its UID is what our slices hang on."""

    status: _NodeStatus = _NodeStatus()


class _PodSpec(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    node_name: str = ""


class _PodStatus(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    phase: str = ""


class Pod(Object, frozen=True, gc=False, rename="camel"):
    """A Pod: where it is and whether it is over."""

    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()


class ServerVersion(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """`/version`. Tells which known defects a server has, never which fields it keeps: that is probed."""

    major: str = ""
    minor: str = ""
    git_version: str = ""


# ---- whole objects ---------------------------------------------------------------------------------------------


class Document(Object, frozen=True, gc=False):
    """An object with everything in it, as JSON decodes it, for comparing and for writing back."""

    body: dict[str, Any] = {}

    def changed(self, change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """A copy of the whole object with `change` applied; the cached one stays as it was."""
        body = copy.deepcopy(self.body)
        change(body)
        return body


# ---- decoding --------------------------------------------------------------------------------------------------

T = TypeVar("T", bound=Object)


class ListMeta(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """`metadata` of a list."""

    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")
    remaining_item_count: int | None = None


class ListOf(msgspec.Struct, Generic[T]):
    """One page of a list."""

    items: list[T] | None = None
    """None: a Go server writes an empty list so now and then."""
    metadata: ListMeta = ListMeta()


class _RawList(msgspec.Struct):
    items: list[msgspec.Raw] | None = None
    metadata: ListMeta = ListMeta()


class WatchEvent(msgspec.Struct, gc=False):
    """One line of a watch."""

    type: str = ""
    object: msgspec.Raw = msgspec.Raw(b"{}")


class Decoder(Generic[T]):
    """Reads items of one type, single or by the page. `Document` is read whole, anything else field by field."""

    def __init__(self, item: type[T]) -> None:
        self.item = item
        self._one: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Object if item is Document else item)
        page = _RawList if item is Document else ListOf[item]  # type: ignore[valid-type]
        self._page: msgspec.json.Decoder[Any] = msgspec.json.Decoder(page)

    def one(self, data: bytes | msgspec.Raw) -> T:
        """One object. Raises `msgspec.MsgspecError` or `UnicodeDecodeError` when it is none."""
        if self.item is Document:
            return Document(self._one.decode(data).metadata, msgspec.json.decode(data))  # type: ignore[return-value]
        decoded: T = self._one.decode(data)
        return decoded

    def page(self, data: bytes) -> tuple[list[T], ListMeta, list[str]]:
        """Items of a page, its metadata, and what was wrong with items that could not be read (those are left out).

        Raises as `one` does when the page itself is no list.
        """
        if self.item is not Document:
            try:
                page = self._page.decode(data)
            except msgspec.ValidationError:
                pass  # one of the items, most likely: find out which
            else:
                return page.items or [], page.metadata, []
        raw = _RAW_LIST.decode(data)
        items, problems = [], []
        for text in raw.items or []:
            try:
                items.append(self.one(text))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                problems.append(f"{_name_of(text)}: {error}")
        return items, raw.metadata, problems


_RAW_LIST: Final = msgspec.json.Decoder(_RawList)
_OBJECT: Final = msgspec.json.Decoder(Object)


def _name_of(text: msgspec.Raw) -> str:
    try:
        return _OBJECT.decode(text).metadata.key or "unnamed"
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return "unnamed"
