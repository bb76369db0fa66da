# SPDX-License-Identifier: Apache-2.0
"""What the node offers now: joins the cards' view, the server's features, the configuration and the claims held.

Never talks to anybody. Invariant: the offer is replaced in one assignment and is one consistent answer, so Prepare,
the published pool and the health stream never mix two moments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from aliquot.api.errors import HardwareError
from aliquot.api.log import get_logger
from aliquot.dra.cards import View
from aliquot.dra.config import NodeConfig
from aliquot.dra.defects import defects_of
from aliquot.dra.devices import EMPTY_OFFER, Offer, offer
from aliquot.dra.layout import HELD, Choice, Features, Kept, Mode, choose_layout
from aliquot.dra.metrics import Metrics
from aliquot.dra.records import ClaimRecord, held_layouts
from aliquot.dra.slices import DesiredPool, pool_for
from aliquot.node.inventory import Card

log = get_logger(__name__)

KNOWN_S: Final = 5.0
"""How long a Prepare waits, just after a start, for cards and features to be known."""


class Offering:
    """The node's offer. `records` are the claims prepared, `changed` is told when the offer is different."""

    def __init__(
        self,
        *,
        config: NodeConfig,
        node_name: str,
        pool: str,
        records: Callable[[], Mapping[str, ClaimRecord]],
        metrics: Metrics,
        changed: Callable[[], None],
        announce: Callable[[str, str], None] = lambda _reason, _note: None,
    ) -> None:
        """`announce` gets a reason word and a sentence for an event, when cards are offered in a new way."""
        self.view = View()
        self.features = Features()
        self.faults: Mapping[str, str] = {}
        """UUID of card or MIG instance → why it is not fit for use."""
        self._offer = EMPTY_OFFER
        self._config = config
        self._node_name = node_name
        self._pool = pool
        self._records = records
        self._metrics = metrics
        self._changed = changed
        self._announce = announce
        self._lock = threading.Lock()
        self._known = threading.Event()
        self._warned: set[str] = set()

    def set_view(self, view: View) -> None:
        """The cards are different."""
        self.view = view
        for selector in self._config.unmatched(
            [(card.uuid, card.name) for card in view.inventory.cards] if view.inventory else []
        ):
            if view.inventory and view.inventory.cards and selector not in self._warned:
                self._warned.add(selector)
                log.warning("configuration names a card that is not here", card=selector)
        self.refresh()

    def set_faults(self, faults: Mapping[str, str]) -> None:
        """Other cards than before are not fit for use."""
        self.faults = faults
        self.refresh()

    def sick(self) -> dict[str, str]:
        """UUID → why, of every card or instance that is not fit for use or cannot be read any more."""
        return {**self.faults, **self.view.sick}

    def set_features(self, features: Features) -> None:
        """The API server keeps other fields than before."""
        self.features = features
        self.refresh()

    def released(self) -> None:
        """A claim let go of its cards: those that had to stay as they were for it need not any more."""
        if self.sick() or any(choice.reason == HELD for choice in self._offer.choices.values()):
            self.refresh()

    def current(self) -> Offer:
        """The offer for a Prepare; waits a little where nothing is known yet."""
        self._known.wait(KNOWN_S)
        return self._offer

    @property
    def offer(self) -> Offer:
        """The offer as it is."""
        return self._offer

    def desired(self) -> DesiredPool | None:
        """The pool to be stored; None while it is not known, or must be left as it is for the claims that hold it."""
        offered = self._offer
        if not self._known.is_set():
            return None
        if not offered.devices and any(record.results for record in self._records().values()):
            return None
        return pool_for(
            offered, node_name=self._node_name, pool=self._pool, taints_kept=self.features.taints is Kept.YES
        )

    def card(self, uuid: str) -> Card:
        """The card of that UUID as it is now. Raises `HardwareError` when it is not there, or nothing is known."""
        found = self.view.inventory.by_uuid.get(uuid) if self.view.inventory is not None else None
        if found is None:
            why = self.view.problem or "the driver does not list it; see `nvidia-smi -L` on the node"
            raise HardwareError(f"card {uuid} is not there: {why}")
        return found

    def held_cards(self) -> frozenset[str]:
        """Cards that prepared claims hold."""
        return frozenset(held.card_uuid for record in self._records().values() for held in record.results)

    def problem(self) -> str:
        """Why the offer is not what it should be; empty when it is."""
        if self.view.problem:
            return self.view.problem
        desired = self.desired()
        if desired is None:
            return "what the API server keeps is not known yet"
        if desired.left_out:
            return f"not everything can be published: {'; '.join(desired.left_out)}"
        if not self._offer.devices:
            return (
                "cards were found but there is no device to publish: MIG is enabled and no instance was made; make "
                "some with `nvidia-smi mig -cgi`, or disable MIG"
            )
        return ""

    def refresh(self) -> None:
        """Compute the offer anew."""
        with self._lock:
            before = self._offer
            if self.view.inventory is None or self.features.consumable_capacity is Kept.UNKNOWN:
                self._offer = Offer(devices=(), choices={}, problem=self.view.problem or "the driver is just starting")
                return
            layouts = held_layouts(self._records())
            features = self.features
            new = offer(
                self.view.inventory,
                lambda card: self._config.card(card.uuid, card.name),
                lambda card, settings: choose_layout(card, settings, features, layouts.get(card.uuid)),
                sick=self.sick(),
            )
            devices = new.devices
            if features.taints is not Kept.YES:
                # Without taints only absence keeps new claims off, which a device that is held cannot bear.
                held = self.held_cards()
                devices = tuple(device for device in devices if not device.taints or device.card_uuid in held)
            self._offer = replace(new, devices=devices, problem=self.view.problem)
            known_before = self._known.is_set()
            self._known.set()
            if known_before and self._offer == before:
                return
        self._tell(before.choices, new.choices)
        self._changed()

    def _tell(self, before: Mapping[str, Choice], now: Mapping[str, Choice]) -> None:
        groups: dict[tuple[Mode, str], list[str]] = {}
        for uuid, choice in now.items():
            if uuid not in before or before[uuid] != choice:
                groups.setdefault((choice.layout.mode, choice.reason), []).append(uuid)
        for (mode, reason), uuids in groups.items():
            log.info("cards offered", mode=mode.value, reason=reason, cards=uuids)
            self._announce(
                "CardMode", f"{len(uuids)} card(s) offered as {mode.value} ({reason}): {', '.join(sorted(uuids))}"
            )
        for mode in Mode:
            count = sum(1 for device in self._offer.devices if device.layout.mode is mode)
            self._metrics.devices.labels(mode.value).set(count)
        self._metrics.modes({uuid: (choice.layout.mode.value, choice.reason) for uuid, choice in now.items()})
        if any(choice.layout.mode is Mode.SHARED for choice in now.values()):
            for defect in defects_of(self.features.server_version, frozenset({"shares"})):
                if defect.issue not in self._warned:
                    self._warned.add(defect.issue)
                    log.warning(
                        "control plane has a known defect",
                        issue=defect.issue,
                        effect=defect.effect,
                        version=self.features.server_version,
                    )
