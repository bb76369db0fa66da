# SPDX-License-Identifier: Apache-2.0
"""How one card is cut: the choice of its mode, and the amounts that follow from it. Pure.

Never looks at the API server or at claims itself: what the server keeps comes in as `Features`, what prepared
claims rely on comes in as the layout they were prepared under. Invariant: a card that a prepared claim holds keeps
its layout, to the byte, until the last such claim is gone (dra.md 10.5, REQ-3); and a layout that exists never
hands out more than the card has.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

import msgspec

from aliquot.api.grant import MAX_MEMORY_BYTES, MIB
from aliquot.dra.config import CardSettings, Wish
from aliquot.node.inventory import Card


class Mode(enum.Enum):
    """How a card is offered."""

    SHARED = "shared"
    """One device that many claims hold, each with an amount of its own."""
    SLOTS = "slots"
    """Fixed parts, each a device of its own that one claim holds."""
    EXCLUSIVE = "exclusive"
    """One device that one claim holds."""
    MIG = "mig"
    """The instances that somebody made on the card, each a device that one claim holds."""


class Kept(enum.Enum):
    """What the API server does with an optional field."""

    YES = "kept"
    DROPPED = "dropped"
    REFUSED = "refused"
    """It did not let us find out."""
    UNKNOWN = "unknown"
    """Not asked yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What the API server keeps of a ResourceSlice; found by probing, never guessed from a version."""

    consumable_capacity: Kept = Kept.UNKNOWN
    taints: Kept = Kept.UNKNOWN
    counters: Kept = Kept.UNKNOWN
    server_version: str = ""
    """`gitVersion` of /version."""


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """One fixed part."""

    memory_bytes: int
    cores: int


class Layout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a card is cut, in plain numbers; stored with every claim that relies on it."""

    mode: Mode
    memory_bytes: int = 0
    """What all holders together may have, a multiple of 1 MiB; 0 = unknown, so the whole card."""
    slots: tuple[Slot, ...] = ()
    max_shares: int = 0
    default_memory_bytes: int = 0
    default_cores: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A layout and why it was chosen; the reason fits into an attribute."""

    layout: Layout
    reason: str


SHARED_KEPT: Final = "API server keeps consumable capacity"
SHARED_DROPPED: Final = "API server drops consumable capacity"
SHARED_REFUSED: Final = "API server refused to be asked about shares"
CONFIGURED: Final = "configured"
CONFIGURED_BUT_DROPPED: Final = "shared was configured, but API server drops it"
MEMORY_UNKNOWN: Final = "memory of the card is unknown"
TOO_SMALL: Final = "too little memory left to cut"
MIG_ENABLED: Final = "MIG is enabled on the card"
HELD: Final = "held by claims in this form; changes when they end"


def choose_layout(card: Card, settings: CardSettings, features: Features, held: Layout | None = None) -> Choice:
    """The layout of `card`.

    `held` is what the prepared claims on the card were prepared under, None when there are none.
    """
    wanted = _wanted(card, settings, features)
    if held is not None and held != wanted.layout:
        return Choice(layout=held, reason=HELD)
    return wanted


def _wanted(card: Card, settings: CardSettings, features: Features) -> Choice:
    if card.mig_enabled:
        return Choice(layout=Layout(mode=Mode.MIG), reason=MIG_ENABLED)
    physical = card.memory_bytes or settings.memory_bytes
    whole = Layout(mode=Mode.EXCLUSIVE, memory_bytes=align(physical))
    if settings.wish is Wish.EXCLUSIVE:
        return Choice(layout=whole, reason=CONFIGURED)
    if not physical:
        return Choice(layout=whole, reason=MEMORY_UNKNOWN)
    usable = align(min(physical - settings.reserve_bytes, MAX_MEMORY_BYTES))
    if usable < 2 * MIB:  # a range policy must hold at least one step (dra.md 2.4)
        return Choice(layout=whole, reason=TOO_SMALL)
    if settings.wish is not Wish.SLOTS and features.consumable_capacity is Kept.YES:
        reason = CONFIGURED if settings.wish is Wish.SHARED else SHARED_KEPT
        return Choice(layout=_shared(usable, settings), reason=reason)
    slots = tuple(
        Slot(align(usable * part.numerator // part.denominator), 100 * part.numerator // part.denominator)
        for part in settings.slots
    )
    if any(slot.memory_bytes < MIB for slot in slots):
        return Choice(layout=whole, reason=TOO_SMALL)
    layout = Layout(mode=Mode.SLOTS, memory_bytes=usable, slots=slots)
    return Choice(layout=layout, reason=_slots_reason(settings.wish, features.consumable_capacity))


def _shared(usable: int, settings: CardSettings) -> Layout:
    default = align(min(settings.default_memory_bytes or usable, usable))
    return Layout(
        mode=Mode.SHARED,
        memory_bytes=usable,
        max_shares=settings.max_shares,
        default_memory_bytes=max(default, MIB),
        default_cores=settings.default_cores,
    )


def _slots_reason(wish: Wish, kept: Kept) -> str:
    if wish is Wish.SLOTS:
        return CONFIGURED
    if kept is Kept.DROPPED:
        return CONFIGURED_BUT_DROPPED if wish is Wish.SHARED else SHARED_DROPPED
    return SHARED_REFUSED


def align(amount: int) -> int:
    """`amount` rounded down to the step of a memory policy: a total off the step would cost us the slice."""
    return max(amount, 0) // MIB * MIB
