# SPDX-License-Identifier: Apache-2.0
"""The decision of NodePrepareResources: what a claim gets of this node's cards, or why not and who has it. Pure.

Never trusts the scheduler alone: it can be raced, restarted and wrong (dra.md 3.5), and two holders of one card's
memory are the one thing that must not happen. Invariants, whatever the scheduler says (dra.md 10.5): a card has
either one exclusive holder, or holders of different fixed parts, or shares whose memory and number stay within what
the card offers; one allocation result belongs to one claim; admin access is outside both: it gets no limit and
blocks nobody. A refusal names the claim, the device, the other holder, and what happens next, because it is all
that the pod's owner will read.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from aliquot.api import names, quantity
from aliquot.api.errors import ClusterError, ConflictError, HardwareError, RequestError
from aliquot.api.grant import Grant
from aliquot.api.quantity import format_bytes
from aliquot.api.share import Limiter, Share, share_for
from aliquot.dra.devices import Device, Kind, Offer
from aliquot.dra.layout import Mode
from aliquot.dra.records import Asked, ClaimRecord, Held, State, Terms
from aliquot.kube.objects import AllocationResult, ResourceClaim


class HeldError(ConflictError):
    """Somebody else holds what the claim was given; `holders` are the UIDs of their claims."""

    def __init__(self, text: str, holders: Sequence[str]) -> None:
        super().__init__(text)
        self.holders = tuple(dict.fromkeys(holders))


_NAMED_HOLDERS: Final = 3
"""Holders named in a refusal; more would drown the next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRef:
    """How kubelet names a claim."""

    uid: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"claim {self.namespace}/{self.name} (UID {self.uid})"


class Action(enum.Enum):
    """What has to be done for a claim."""

    NEW = "new"
    """Nothing of it exists."""
    CONTINUE = "continue"
    """An earlier try was cut off; do all of it again, each step being idempotent."""
    REDO = "redo"
    """An earlier try for another allocation was cut off; undo that first."""
    ADOPT = "adopt"
    """It was prepared, but its record was lost; what exists is taken over."""
    REPEAT = "repeat"
    """It is prepared; make sure that everything is still there and answer the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do and what will then be true."""

    action: Action
    record: ClaimRecord
    """As it is to be remembered before the first step: `started`, or as it was where nothing changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    """Who holds what on this node."""

    records: Mapping[str, ClaimRecord] = field(hash=False)
    unreadable: Mapping[str, frozenset[str]] = field(default_factory=dict, hash=False)
    """Claim UID → cards it names (none: they could not be read either), of records that do not decode."""


def plan_prepare(
    ref: ClaimRef, claim: ResourceClaim, book: Book, offered: Offer, *, pool: str, boot_id: str = ""
) -> Plan:
    """The plan for the claim that kubelet calls `ref`.

    `claim` is the API server's answer just now, `offered` what the node has, `pool` the node's own pool.

    Raises `RequestError` for parameters that are wrong, `ClusterError` for a claim that is not (any more) what
    kubelet meant, `HardwareError` for a device that is not there, `HeldError` for one that somebody else holds,
    `ConflictError` for a claim that is prepared here under another allocation.
    """
    asked = asked_of(ref, claim, pool=pool)
    known = book.records.get(ref.uid)
    if known is not None and tuple(held.asked for held in known.results) == asked:
        if known.boot_id != boot_id:
            # No container of the earlier boot lives, and the next one gets the driver of today.
            known = msgspec.structs.replace(known, driver_version=offered.driver_version)
        return Plan(action=Action.REPEAT if known.completed else Action.CONTINUE, record=known)
    if known is not None and known.completed and not known.pieced_together:
        raise ConflictError(
            f"{ref} is prepared on this node as {_devices_of(known)}, but its allocation now says "
            f"{', '.join(_asked_text(a) for a in asked) or 'nothing of this driver'}; kubelet has to unprepare it "
            "first: delete the pods that still use the earlier allocation"
        )
    holders = [
        _Holder(uid, record, held)
        for uid, record in book.records.items()
        if uid != ref.uid
        for held in record.results
        if not held.asked.admin
    ]
    results: list[Held] = []
    for one in asked:
        device = offered.by_name.get(one.device)
        if device is None:
            raise _not_offered(ref, one, offered, pool)
        if not one.admin:
            _refuse_unreadable(ref, one, device, book)
            own = [_Holder(ref.uid, None, held) for held in results if not held.asked.admin]
            _refuse_overlap(ref, one, device, [*holders, *own])
        twin = sum((held.asked.device, held.asked.share_id) == (one.device, one.share_id) for held in results)
        results.append(_held(ref, one, device, twin))
    record = ClaimRecord(
        state=State.STARTED,
        namespace=ref.namespace,
        name=ref.name,
        results=tuple(results),
        boot_id=boot_id,
        driver_version=offered.driver_version,
    )
    action = Action.NEW if known is None else Action.ADOPT if known.pieced_together else Action.REDO
    return Plan(action=action, record=record)


def asked_of(ref: ClaimRef, claim: ResourceClaim, *, pool: str) -> tuple[Asked, ...]:
    """What of the claim's allocation concerns this driver on this node, in allocation order.

    Raises `ClusterError` or `RequestError` as `plan_prepare` does.
    """
    if claim.metadata.uid != ref.uid:
        raise ClusterError(
            f"{ref}: the API server has a claim of that name with UID {claim.metadata.uid or 'none'}, so it was "
            "deleted and made anew; the pod that wanted the old one has to be deleted"
        )
    if claim.allocation is None:
        raise ClusterError(f"{ref} is not allocated (any more); kubelet retries, and the scheduler has to allocate it")
    if claim.metadata.deletion_timestamp is not None and not claim.status.reserved_for:
        raise ClusterError(f"{ref} is being deleted and reserved for no pod, so it is not prepared again")
    out: list[Asked] = []
    for result in claim.allocation.results:
        if result.driver != names.DRIVER:
            continue
        if result.pool != pool:
            raise ClusterError(
                f"{ref}: device {result.device} is of pool {result.pool}, this node's is {pool}; the pod is on the "
                "wrong node: delete it so that it is scheduled anew"
            )
        share = share_for(claim.allocation.config, result.request, where=f"{ref}, request {result.request}")
        out.append(
            Asked(
                request=result.request,
                pool=result.pool,
                device=result.device,
                share_id=result.share_id or "",
                admin=bool(result.admin_access),
                consumed=_consumed(ref, result),
                terms=_terms(share),
            )
        )
    return tuple(out)


def grant_name(uid: str, device: str, share_id: str, twin: int = 0) -> str:
    """Name of a grant, its files and its CDI device: `c-<claim uid>-<device>[-<share id>]`.

    `twin` tells results apart that would have one name, as admin access to a device that the claim holds too.
    """
    parts = ["c", uid, device, *([share_id.lower()] if share_id else []), *([f"t{twin}"] if twin else [])]
    return "-".join(parts)


def _not_offered(ref: ClaimRef, one: Asked, offered: Offer, pool: str) -> HardwareError:
    why = offered.problem or "the card is gone, unreadable or cut in another way since the scheduler chose it"
    return HardwareError(
        f"{ref}: device {one.device} is not offered by node pool {pool} now: {why}; if that does not pass, see "
        "`kubectl get resourceslices` and delete the pod so that it is scheduled anew"
    )


def _consumed(ref: ClaimRef, result: AllocationResult) -> dict[str, int]:
    """Amounts as whole numbers, names without our own domain."""
    out: dict[str, int] = {}
    for name, amount in (result.consumed_capacity or {}).items():
        try:
            out[name.removeprefix(f"{names.DRIVER}/")] = quantity.parse(amount)
        except RequestError as err:
            raise ClusterError(f"{ref}: consumedCapacity {name} of device {result.device}: {err}") from err
    return out


def _terms(share: Share) -> Terms:
    return Terms(
        hook=share.limiter is Limiter.HOOK,
        core_policy=share.core_policy,
        priority=share.priority,
        oversubscribe=share.memory_oversubscribe,
        env=dict(share.env),
    )


def _held(ref: ClaimRef, one: Asked, device: Device, twin: int) -> Held:
    memory, cores = _amounts(ref, one, device)
    if not one.terms.hook and (memory or cores):
        raise RequestError(
            f'{ref}, request {one.request}: "limiter": "none" would leave a part of card {device.card_uuid} '
            "unlimited; it is allowed for whole devices only: remove it or ask for a whole device"
        )
    return Held(
        asked=one,
        kind=device.kind,
        card_uuid=device.card_uuid,
        grant=Grant(
            name=grant_name(ref.uid, one.device, one.share_id, twin),
            card_uuid=device.grant_uuid,
            card_bus_id=device.bus_id,
            memory_bytes=memory,
            physical_bytes=device.physical_bytes,
            context_overhead_bytes=device.context_overhead_bytes,
            core_percent=cores,
            core_policy=one.terms.core_policy,
            priority=one.terms.priority,
            oversubscribe=one.terms.oversubscribe,
        ),
        layout=device.layout,
    )


def _amounts(ref: ClaimRef, one: Asked, device: Device) -> tuple[int, int]:
    """(memory in bytes, compute in percent) of the grant; 0 = no limit."""
    if one.admin or device.kind in (Kind.WHOLE, Kind.MIG):
        return 0, 0
    if device.kind is Kind.SLOT:
        return device.memory_bytes, device.cores
    if not one.share_id:
        # The server forgot that the device is shareable and gave it away whole.
        return device.memory_bytes, 0
    memory = one.consumed.get(names.CAPACITY_MEMORY, 0)
    cores = one.consumed.get(names.CAPACITY_CORES, 0)
    if not 0 < memory <= device.memory_bytes or cores > 100:
        raise ClusterError(
            f"{ref}: the scheduler gave {format_bytes(memory)} of memory and {cores} % of compute on device "
            f"{device.name}, which has {format_bytes(device.memory_bytes)} and {device.cores} %; delete the pod so "
            "that it is scheduled anew"
        )
    return memory, cores


@dataclass(frozen=True, slots=True)
class _Holder:
    """One result that somebody holds already; `record` is None for an earlier result of the same claim."""

    uid: str
    record: ClaimRecord | None
    held: Held

    def __str__(self) -> str:
        who = self.record.described(self.uid) if self.record else "the same claim"
        return f"{who} ({self.held.asked.device})"


def _refuse_unreadable(ref: ClaimRef, one: Asked, device: Device, book: Book) -> None:
    for uid, cards in book.unreadable.items():
        if uid != ref.uid and (not cards or device.card_uuid in cards):
            raise HeldError(
                f"{ref}: device {one.device} may be held by the claim with UID {uid}, whose stored record cannot be "
                "read; it is free when that claim's last pod is gone from this node; kubelet retries",
                [uid],
            )


def _refuse_overlap(ref: ClaimRef, one: Asked, device: Device, holders: Sequence[_Holder]) -> None:
    """Raise `HeldError` unless what is asked for fits beside what is held."""
    same_result = [
        h
        for h in holders
        if (h.held.asked.device, h.held.asked.share_id) == (one.device, one.share_id) and one.share_id
    ]
    if same_result:
        raise _conflict(ref, one, f"its share {one.share_id} belongs to", same_result)
    # A record that was put together from names may lack the card's UUID; its device names it as well.
    there = [
        h
        for h in holders
        if h.held.card_uuid in (device.card_uuid, device.grant_uuid) or h.held.asked.device == device.name
    ]
    if not there:
        return
    if device.kind in (Kind.SLOT, Kind.MIG):
        others = [h for h in there if h.held.kind is not device.kind or h.held.asked.device == one.device]
        if others:
            raise _conflict(ref, one, "it is held by", others)
        return
    if device.kind is Kind.WHOLE or not one.share_id:
        raise _conflict(ref, one, "it is held by", there)
    alone = [h for h in there if not h.held.shared]
    if alone:
        raise _conflict(ref, one, "its card is held whole by", alone)
    _refuse_overbooking(ref, one, device, there)


def _refuse_overbooking(ref: ClaimRef, one: Asked, device: Device, there: Sequence[_Holder]) -> None:
    layout = device.layout
    assert layout.mode is Mode.SHARED
    taken = sum(h.held.memory_bytes for h in there)
    wanted = one.consumed.get(names.CAPACITY_MEMORY, 0)
    if taken + wanted > layout.memory_bytes:
        raise _conflict(
            ref,
            one,
            f"{format_bytes(wanted)} were allocated, but of {format_bytes(layout.memory_bytes)} only "
            f"{format_bytes(max(layout.memory_bytes - taken, 0))} are free beside",
            there,
        )
    places = sum(h.held.slots for h in there)
    if places + one.consumed.get(names.CAPACITY_SLOTS, 1) > layout.max_shares:
        raise _conflict(ref, one, f"all of its {layout.max_shares} places are taken by", there)


def _conflict(ref: ClaimRef, one: Asked, what: str, others: Sequence[_Holder]) -> HeldError:
    shown = ", ".join(str(h) for h in others[:_NAMED_HOLDERS])
    more = f" and {len(others) - _NAMED_HOLDERS} more" if len(others) > _NAMED_HOLDERS else ""
    return HeldError(
        f"{ref}: device {one.device} cannot be prepared: {what} {shown}{more}; it is free when the last pod of "
        "that claim is gone from this node; kubelet retries",
        [other.uid for other in others if other.record is not None],
    )


def _devices_of(record: ClaimRecord) -> str:
    return ", ".join(_asked_text(held.asked) for held in record.results) or "nothing"


def _asked_text(asked: Asked) -> str:
    memory = asked.consumed.get(names.CAPACITY_MEMORY)
    share = f" share {asked.share_id}" if asked.share_id else ""
    return f"{asked.device}{share}{f' with {format_bytes(memory)}' if memory else ''}"
