# SPDX-License-Identifier: Apache-2.0
"""What the node remembers of a prepared claim: everything needed to make it again without asking anybody. Pure.

Never holds anything that has to be looked up elsewhere, because what it describes must be undone when the claim is
gone and made again when a reboot wiped /run and the CDI directory. Invariant: releases read each other's records:
fields are only ever added, with a default; unknown ones are carried along by the checkpoint (cases.md B087).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import msgspec

from aliquot.api.grant import CorePolicy, Grant
from aliquot.dra.devices import Kind
from aliquot.dra.layout import Layout


class State(enum.Enum):
    """How far a claim has come."""

    STARTED = "started"
    """Something may have been made; nobody was told, so no container can use it."""
    COMPLETED = "completed"
    """Everything is made and kubelet may have been told."""


class Terms(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The claim's opaque parameters as they were agreed on (api.share.Share, but read tolerantly)."""

    hook: bool = True
    """False: nothing limits the holder, which is allowed only where there is no limit."""
    core_policy: CorePolicy = CorePolicy.DEFAULT
    priority: int = 0
    oversubscribe: bool = False
    env: dict[str, str] = {}


class Asked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One allocation result of ours, as the scheduler decided it: what a repeated Prepare is compared with."""

    request: str
    """`main` or `main/sub`."""
    pool: str
    device: str
    share_id: str = ""
    admin: bool = False
    consumed: dict[str, int] = {}
    """Capacity name → amount, in bytes, percent or slots."""
    terms: Terms = Terms()

    @property
    def main_request(self) -> str:
        """The request's name as kubelet knows it (dra.md 7.8, T5)."""
        return self.request.partition("/")[0]


class Held(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One allocation result, prepared."""

    asked: Asked
    kind: Kind
    card_uuid: str
    """The physical card."""
    grant: Grant
    """What it is in the container; its name is the CDI device's."""
    layout: Layout | None = None
    """How the card was cut when the claim was prepared; it stays so while the claim lives. None: not known."""

    @property
    def shared(self) -> bool:
        """Whether others may hold parts of the same device."""
        return self.kind is Kind.SHARED and bool(self.asked.share_id)

    @property
    def memory_bytes(self) -> int:
        """What it takes of a shared card."""
        return self.asked.consumed.get("memory", 0)

    @property
    def slots(self) -> int:
        """How many of a shared card's places it takes."""
        return self.asked.consumed.get("slots", 1)


class ClaimRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One claim."""

    state: State
    namespace: str
    """Empty where the record was put together from what lay on the node, after the checkpoint was lost."""
    name: str
    results: tuple[Held, ...] = ()
    """In allocation order, which kubelet and CUDA see."""
    boot_id: str = ""
    """Of the boot in which it was last prepared: no container of an earlier boot lives."""
    driver_version: str = ""
    """Of the GPU driver whose libraries its containers were given; empty: not known."""

    @property
    def completed(self) -> bool:
        """Whether kubelet may have been told."""
        return self.state is State.COMPLETED

    @property
    def pieced_together(self) -> bool:
        """Whether it was made from what lay on the node, so that it lacks what only the API server knows."""
        return not self.name

    def described(self, uid: str) -> str:
        """The claim as messages name it."""
        return f"claim {self.namespace}/{self.name} (UID {uid})" if self.name else f"the claim with UID {uid}"


def outdated(records: Mapping[str, ClaimRecord], *, driver_version: str | None, boot_id: str) -> dict[str, ClaimRecord]:
    """Claims whose containers may run on with the libraries of another driver version (cases.md B130)."""
    return {
        uid: record
        for uid, record in records.items()
        if record.completed
        and record.boot_id == boot_id
        and record.driver_version
        and driver_version
        and record.driver_version != driver_version
    }


def held_layouts(records: Mapping[str, ClaimRecord]) -> dict[str, Layout]:
    """Card UUID → the layout its prepared claims rely on. Admin access relies on none."""
    return {
        held.card_uuid: held.layout
        for record in records.values()
        for held in record.results
        if held.layout is not None and not held.asked.admin
    }


def cards_in(raw: bytes) -> frozenset[str]:
    """UUIDs of the cards that a record names which we cannot read otherwise; empty: not even they can be read."""
    found: set[str] = set()

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            uuid = value.get("card_uuid")
            if isinstance(uuid, str):
                found.add(uuid)
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    try:
        walk(msgspec.json.decode(raw))
    except msgspec.DecodeError:
        return frozenset()
    return frozenset(found)
