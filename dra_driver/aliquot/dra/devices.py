# SPDX-License-Identifier: Apache-2.0
"""From cards to devices: what the scheduler may hand out, and what each of it is worth. Pure.

Never orders by anything that changes between two runs on the same hardware, because two instances of the driver
publish into one pool and must agree to the byte (dra.md 1.6). Invariants: a device name names one device of the
node for as long as the card is in it (it comes from the UUID, never from an index); no device is both shareable
and charged to counters (dra.md 3.5); every capacity of a shareable device has a policy, for one without is eaten
whole by the first claim (dra.md 3.4).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from aliquot.dra.attributes import Attribute, card_attributes, mig_attributes
from aliquot.dra.config import CardSettings
from aliquot.dra.layout import Choice, Layout, Mode, align
from aliquot.node.inventory import Card, Inventory, MigInstance

_SHORT: Final = 8
_NOT_HEX: Final = re.compile(r"[^0-9a-f]")
_NOT_LABEL: Final = re.compile(r"[^a-z0-9]")

TAINT_UNHEALTHY: Final = "gpu.aliquot.dev/unhealthy"


class Kind(enum.Enum):
    """What a device is; the value is its `type` attribute."""

    WHOLE = "gpu"
    SLOT = "gpu-slot"
    SHARED = "gpu-shared"
    MIG = "mig"


@dataclass(frozen=True, slots=True)
class Taint:
    """Keeps new claims off a device."""

    key: str
    value: str
    effect: str = "NoSchedule"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One entry of a ResourceSlice, and what the node has to know to prepare it."""

    name: str
    kind: Kind
    grant_uuid: str
    """What the holder gets: the card, or the MIG instance."""
    card_uuid: str
    """The physical card."""
    bus_id: str
    memory_bytes: int
    """Capacity `memory`; 0 = unknown, then it is not published."""
    physical_bytes: int
    """Memory of the card or instance; 0 = unknown."""
    cores: int
    """Capacity `cores`, percent of the card."""
    context_overhead_bytes: int
    layout: Layout
    attributes: Mapping[str, Attribute] = field(hash=False)
    taints: tuple[Taint, ...] = ()

    @property
    def shareable(self) -> bool:
        """Whether several claims may hold it."""
        return self.kind is Kind.SHARED


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """All that the node has to offer at one moment."""

    devices: tuple[Device, ...]
    choices: Mapping[str, Choice] = field(hash=False)
    """Card UUID → how it is cut and why."""
    problem: str = ""
    """Why there is nothing, or not everything."""
    driver_version: str = ""
    """Of the GPU driver; empty: not known."""
    by_name: Mapping[str, Device] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {device.name: device for device in self.devices})


EMPTY_OFFER: Final = Offer(devices=(), choices={})


def offer(
    inventory: Inventory,
    settings: Callable[[Card], CardSettings],
    choose: Callable[[Card, CardSettings], Choice],
    sick: Mapping[str, str] | None = None,
) -> Offer:
    """The devices of all cards, small ones first so that first fit does not burn a large one (dra.md 10.2).

    `sick` maps the UUID of a card or MIG instance that is not fit for use to the reason, and taints its devices.
    """
    names = card_names(card.uuid for card in inventory.cards)
    choices: dict[str, Choice] = {}
    ranked: list[tuple[tuple[int, int, int, int], Device]] = []
    for rank, card in enumerate(inventory.cards):
        wanted = settings(card)
        choice = choices[card.uuid] = choose(card, wanted)
        whole = Device(
            name=names[card.uuid],
            kind=Kind.WHOLE,
            grant_uuid=card.uuid,
            card_uuid=card.uuid,
            bus_id=card.bus_id,
            memory_bytes=choice.layout.memory_bytes,
            physical_bytes=card.memory_bytes or wanted.memory_bytes,
            cores=100,
            context_overhead_bytes=wanted.context_overhead_bytes,
            layout=choice.layout,
            attributes=card_attributes(card, inventory) | _mode_attributes(choice) | _type(Kind.WHOLE),
        )
        for part, piece in enumerate(_cut(whole, card, inventory, choice)):
            unfit = sick is not None and (piece.card_uuid in sick or piece.grant_uuid in sick)
            device = replace(piece, taints=(Taint(TAINT_UNHEALTHY, "true"),)) if unfit else piece
            ranked.append(((_ORDER[device.kind], device.memory_bytes, rank, part), device))
    ranked.sort(key=lambda pair: pair[0])
    devices = tuple(device for _, device in ranked)
    return Offer(devices=devices, choices=choices, driver_version=inventory.driver_version or "")


_ORDER: Final = {Kind.MIG: 0, Kind.SLOT: 1, Kind.SHARED: 2, Kind.WHOLE: 3}


def card_names(uuids: Iterable[str]) -> dict[str, str]:
    """UUID → `gpu-<first 8 hex digits>`; all digits for cards whose first 8 are not theirs alone."""
    digits = {uuid: _digits(uuid) for uuid in uuids}
    short = [text[:_SHORT] for text in digits.values()]
    return {
        uuid: f"gpu-{text[:_SHORT] if short.count(text[:_SHORT]) == 1 else text[:32]}" for uuid, text in digits.items()
    }


def _digits(uuid: str) -> str:
    lower = uuid.lower()
    return _NOT_HEX.sub("", lower.removeprefix("gpu-").removeprefix("mig-")) or "0"


def _type(kind: Kind) -> dict[str, Attribute]:
    return {"type": {"string": kind.value}}


def _mode_attributes(choice: Choice) -> dict[str, Attribute]:
    return {"mode": {"string": choice.layout.mode.value}, "modeReason": {"string": choice.reason}}


def _cut(whole: Device, card: Card, inventory: Inventory, choice: Choice) -> list[Device]:
    """The devices that a card is offered as; `whole` is the card as one device."""
    mode = choice.layout.mode
    if mode is Mode.EXCLUSIVE:
        return [whole]
    if mode is Mode.SHARED:
        attributes = {**whole.attributes, **_type(Kind.SHARED)}
        return [replace(whole, name=f"{whole.name}-shared", kind=Kind.SHARED, attributes=attributes)]
    if mode is Mode.SLOTS:
        return [_slot(whole, position) for position in range(len(choice.layout.slots))]
    return [_instance(whole, card, instance, inventory, choice) for instance in card.mig]


def _slot(whole: Device, position: int) -> Device:
    slots = whole.layout.slots
    slot = slots[position]
    profile = f"1of{len(slots)}" if len(set(slots)) == 1 else f"{slot.cores}percent"
    return replace(
        whole,
        name=f"{whole.name}-s{position}",
        kind=Kind.SLOT,
        memory_bytes=slot.memory_bytes,
        cores=slot.cores,
        attributes={
            **whole.attributes,
            **_type(Kind.SLOT),
            "parentUUID": {"string": whole.card_uuid},
            "profile": {"string": profile},
            "slot": {"int": position},
        },
    )


def _instance(whole: Device, card: Card, instance: MigInstance, inventory: Inventory, choice: Choice) -> Device:
    """A MIG instance; its name says profile and place, for its UUID changes whenever it is made anew."""
    profile = _NOT_LABEL.sub("", instance.profile.lower())
    place = f"{instance.gpu_instance}-{instance.compute_instance}"
    return replace(
        whole,
        name=f"{whole.name}-mig-{profile}-{place}",
        kind=Kind.MIG,
        grant_uuid=instance.uuid,
        memory_bytes=align(instance.memory_bytes or 0),
        physical_bytes=instance.memory_bytes or 0,
        attributes=mig_attributes(card, instance, inventory) | _mode_attributes(choice) | _type(Kind.MIG),
    )
