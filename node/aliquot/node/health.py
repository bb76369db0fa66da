# SPDX-License-Identifier: Apache-2.0
"""Which cards are fit for use: what faults mean, and when one is over. Pure; `health_watch` brings the events.

A fault stays until it is verified to be over, whatever harmless event comes after it (B115). Verified means: the
driver answers for the card, and says that no recovery action is due; a driver too old to say so is believed only
after it was loaded anew. A fault of one MIG instance is that instance's alone.

Guarded invariant: `Health` only ever changes through `after_event`, `after_check` and `without`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from aliquot.node.inventory import Card

IGNORED_XIDS: Final = frozenset({13, 31, 43, 45, 68, 109})
"""Faults of the application, not of the card (cdi.md 3.3)."""

WHOLE: Final = 0xFFFFFFFF
"""Instance number in an event that is not about a MIG instance."""

RECOVERY_NONE: Final = 0
_RECOVERY_STEPS: Final = {
    1: "reset the card",
    2: "reboot the node",
    3: "drain the card's NVLink peers and reset it",
    4: "drain the card and reset it",
    5: "recover the IMEX domain",
    6: "reset the card's bus",
    7: "reboot the node",
}
"""NVML_GPU_RECOVERY_ACTION_* of nvml.h."""


class FaultKind(enum.Enum):
    """Why a device is not fit for use."""

    XID = "xid"
    LOST = "lost"
    """The driver does not answer for it."""
    RECOVERY = "recovery"
    """The driver says that something has to be done to it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One device's fault."""

    kind: FaultKind
    xid: int | None = None
    text: str = ""
    """For events and taints; says what to do where that is known."""


@dataclass(frozen=True, slots=True)
class Event:
    """A critical Xid, as NVML delivers it."""

    card_uuid: str
    xid: int
    gpu_instance: int = WHOLE
    compute_instance: int = WHOLE


@dataclass(frozen=True, slots=True)
class Check:
    """What the driver said when it was asked about a card."""

    card_uuid: str
    answers: bool
    recovery_action: int | None = None
    """None: the driver is too old to tell."""
    driver_reloaded: bool = False
    """NVML had to be opened anew since the last check because the driver was away."""
    reason: str = ""
    """Why it does not answer."""


_NO_FAULTS: Final[Mapping[str, Fault]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Health:
    """Faults by UUID of card or MIG instance; whoever is not in it is fit."""

    faults: Mapping[str, Fault] = field(default_factory=lambda: _NO_FAULTS)

    def of(self, card: Card, uuid: str | None = None) -> Fault | None:
        """The fault of a card, or of its MIG instance `uuid` (then the card's own counts too)."""
        return self.faults.get(card.uuid) or (self.faults.get(uuid) if uuid else None)


def after_event(health: Health, event: Event, card: Card, ignored: frozenset[int] = IGNORED_XIDS) -> Health:
    """Health after a critical Xid on `card`. An ignored one changes nothing, least of all an earlier fault."""
    if event.xid in ignored:
        return health
    fault = Fault(FaultKind.XID, event.xid, f"Xid {event.xid} on card {card.uuid}; see the kernel log for NVRM: Xid")
    # The first Xid is kept: later ones mostly follow from it. It stands before faults that end by themselves.
    changes: dict[str, Fault | None] = {}
    for uuid in _hit(event, card):
        before = health.faults.get(uuid)
        changes[uuid] = before if before is not None and before.kind is FaultKind.XID else fault
    return _changed(health, changes)


def after_check(health: Health, check: Check, card: Card) -> Health:
    """Health after the driver was asked about `card` as a whole."""
    uuid, before = card.uuid, health.faults.get(card.uuid)
    if not check.answers:
        text = f"card {uuid} does not answer: {check.reason or 'no reason given'}"
        return health if before is not None else _changed(health, {uuid: Fault(FaultKind.LOST, None, text)})
    due = check.recovery_action
    if due not in (None, RECOVERY_NONE):
        step = _RECOVERY_STEPS.get(due or 0, f"recovery action {due}")
        fault = Fault(FaultKind.RECOVERY, None, f"the driver asks to {step} (card {uuid})")
        return health if before is not None else _changed(health, {uuid: fault})
    verified = due == RECOVERY_NONE or check.driver_reloaded
    over: dict[str, Fault | None] = {}
    for device in (uuid, *(instance.uuid for instance in card.mig)):
        fault_now = health.faults.get(device)
        # A lost card that answers again is not lost; an Xid is over only when the driver says so.
        if fault_now is not None and (verified or fault_now.kind is not FaultKind.XID):
            over[device] = None
    return _changed(health, over)


def without(health: Health, present: Iterable[str]) -> Health:
    """Faults of devices that are still there (UUIDs of cards and MIG instances)."""
    keep = frozenset(present)
    return _changed(health, {uuid: None for uuid in health.faults if uuid not in keep})


def _changed(health: Health, changes: Mapping[str, Fault | None]) -> Health:
    faults = {uuid: fault for uuid, fault in {**health.faults, **changes}.items() if fault is not None}
    return health if faults == dict(health.faults) else Health(MappingProxyType(faults))


def _hit(event: Event, card: Card) -> tuple[str, ...]:
    """UUIDs of the devices an event is about: the card, or the MIG instances it names."""
    if event.gpu_instance == WHOLE:
        return (card.uuid,)
    instances = tuple(
        instance.uuid
        for instance in card.mig
        if instance.gpu_instance == event.gpu_instance and event.compute_instance in (WHOLE, instance.compute_instance)
    )
    # An instance made after the inventory was read: better the whole card than nobody.
    return instances or (card.uuid,)
