# SPDX-License-Identifier: Apache-2.0
"""Listens to the driver's events and asks about every card now and then; keeps `Health` and tells of its changes.

It decides nothing (`health` does), and never gives up: a failing driver is opened anew with growing pauses, a card
that cannot be watched is still asked, one card's error says nothing of the others. Guarded invariant: every change
of `health` is reported, in order, by the one thread that makes it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from aliquot.api.errors import foreign
from aliquot.api.log import get_logger
from aliquot.node.health import IGNORED_XIDS, Check, Event, Health, after_check, after_event, without
from aliquot.node.inventory import Card, Inventory
from aliquot.node.nvml import TIMEOUT, Handle, Nvml, NvmlError

_log = get_logger(__name__)

WAIT_MS: Final = 500
"""One wait for events; also how long `stop` and `Nvml.reopen` may have to wait for it."""

CHECK_S: Final = 5.0
_BACKOFF_MOST_S: Final = 30.0

_XID_CRITICAL: Final = 0x8
_FIELD_RECOVERY_ACTION: Final = 230
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION."""


class HealthWatch:
    """The thread that keeps `health`.

    `inventory` gives the latest picture of the node's cards (None: there is none yet, so nothing is watched);
    `on_change` gets every new `Health`.
    `start` once, `stop` once. `step` is one wait and one check, for tests. `reopened` is called after NVML was
    opened anew: what was read before has to be read again.
    """

    def __init__(
        self,
        nvml: Nvml,
        inventory: Callable[[], Inventory | None],
        *,
        ignored_xids: frozenset[int] = IGNORED_XIDS,
        on_change: Callable[[Health], None] = lambda _health: None,
        reopened: Callable[[], None] = lambda: None,
        check_s: float = CHECK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.health = Health()
        self.unmonitored: frozenset[str] = frozenset()
        """Cards that have no events; they are only asked."""
        self.failures = 0
        """Steps in a row that failed."""
        self._nvml = nvml
        self._inventory = inventory
        self._ignored = ignored_xids
        self._on_change = on_change
        self._reopened = reopened
        self._check_s = check_s
        self._clock = clock
        self._events: Handle | None = None
        self._registered: dict[str, Handle] = {}
        self._refused: set[str] = set()
        self._checked_at: float | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; steps run until `stop`."""
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End; returns when the wait that may be running is over, at most `WAIT_MS`."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._free_events()

    def step(self, wait_ms: int = WAIT_MS) -> None:
        """Wait for one event, then ask about the cards if it is time. Raises `NvmlError`."""
        inventory = self._inventory()
        if inventory is None:
            self._stop.wait(wait_ms / 1000)
            return
        cards = inventory.by_uuid
        self._change(without(self.health, _devices(inventory)))
        self._listen(inventory)
        if self._registered:
            self._take_event(cards, wait_ms)
        elif wait_ms:
            self._stop.wait(wait_ms / 1000)
        now = self._clock()
        if self._checked_at is None or now - self._checked_at >= self._check_s:
            self._checked_at = now
            self._refused.clear()
            self._check(inventory, reloaded=False)

    def _run(self) -> None:
        while not self._stop.is_set():
            opening = self._nvml.opening
            try:
                self.step()
                self.failures = 0
            except Exception as e:
                self.failures += 1
                if self.failures == 1:
                    _log.error("health watch failed", reason=foreign(e), exc_info=not isinstance(e, NvmlError))
                self._stop.wait(min(0.5 * 2 ** min(self.failures, 8), _BACKOFF_MOST_S))
                if not self._stop.is_set():
                    self._recover(e, opening)

    def _recover(self, error: Exception, opening: int) -> None:
        """After a failed step: ask about each card, and open NVML anew when the driver as a whole was away."""
        gone = isinstance(error, NvmlError) and error.driver_gone
        self._forget_events()
        inventory = self._inventory()
        if inventory is None:
            return
        try:
            if gone or not self._nvml.is_open:
                self._nvml.reopen(after=opening)
                self._reopened()
            self._listen(inventory)  # before the questions, so that no event falls between the two
            self._check(inventory, reloaded=gone)
        except Exception as e:
            health = self.health
            for card in inventory.cards:
                health = after_check(health, Check(card.uuid, answers=False, reason=foreign(e)), card)
            self._change(health)

    # ---- events

    def _listen(self, inventory: Inventory) -> None:
        """Have an event set of the current opening with the current cards in it."""
        wanted = {card.uuid for card in inventory.cards}
        stale = self._events is None or self._events.opening != self._nvml.opening
        if stale or not self._registered.keys() <= wanted:
            self._free_events()
            self._events = self._nvml.handle("nvmlEventSetCreate")
        for card in inventory.cards:
            if card.uuid in self._registered or card.uuid in self.unmonitored or card.uuid in self._refused:
                continue
            try:
                handle = self._nvml.handle("nvmlDeviceGetHandleByUUID", card.uuid)
                self._nvml.call("nvmlDeviceRegisterEvents", handle, _XID_CRITICAL, self._events)
            except NvmlError as e:
                if e.driver_gone:
                    raise
                # Too old for events: it is asked like every other. Ill: it is tried again with the next questions.
                if e.absent:
                    self.unmonitored |= {card.uuid}
                else:
                    self._refused.add(card.uuid)
                _log.info("card has no events", card=card.uuid, reason=str(e))
            else:
                self._registered[card.uuid] = handle

    def _take_event(self, cards: Any, wait_ms: int) -> None:
        try:
            data = self._nvml.call("nvmlEventSetWait", self._events, wait_ms)
        except NvmlError as e:
            if e.code == TIMEOUT:
                return
            raise
        if int(data.eventType) != _XID_CRITICAL:
            return
        uuid = str(self._nvml.call("nvmlDeviceGetUUID", self._nvml.wrap(data.device)))
        card: Card | None = cards.get(uuid)
        if card is None:
            _log.warning("event of a card that is not in the inventory", card=uuid, xid=int(data.eventData))
            return
        event = Event(uuid, int(data.eventData), int(data.gpuInstanceId), int(data.computeInstanceId))
        _log.warning("xid", card=uuid, xid=event.xid, ignored=event.xid in self._ignored)
        self._change(after_event(self.health, event, card, self._ignored))

    def _free_events(self) -> None:
        if self._events is not None and self._nvml.is_open and self._events.opening == self._nvml.opening:
            try:
                self._nvml.call("nvmlEventSetFree", self._events)
            except NvmlError as e:
                _log.info("event set not freed", reason=str(e))
        self._forget_events()

    def _forget_events(self) -> None:
        self._events = None
        self._registered = {}
        self._refused = set()
        self.unmonitored = frozenset()

    # ---- questions

    def _check(self, inventory: Inventory, *, reloaded: bool) -> None:
        health = self.health
        try:
            for card in inventory.cards:
                health = after_check(health, self._ask(card, reloaded), card)
        finally:
            self._change(health)

    def _ask(self, card: Card, reloaded: bool) -> Check:
        try:
            handle = self._nvml.handle("nvmlDeviceGetHandleByUUID", card.uuid)
            self._nvml.optional("nvmlDeviceGetMemoryInfo", handle)
            return Check(card.uuid, answers=True, recovery_action=self._recovery(handle), driver_reloaded=reloaded)
        except NvmlError as e:
            if e.driver_gone:
                raise
            return Check(card.uuid, answers=False, reason=str(e))

    def _recovery(self, handle: Handle) -> int | None:
        values = self._nvml.optional("nvmlDeviceGetFieldValues", handle, [_FIELD_RECOVERY_ACTION])
        if values is None or int(values[0].nvmlReturn) != 0:
            return None
        return int(values[0].value.uiVal)

    def _change(self, health: Health) -> None:
        if health == self.health:
            return
        self.health = health
        _log.warning("health changed", faults={uuid: fault.text for uuid, fault in health.faults.items()})
        self._on_change(health)


def _devices(inventory: Inventory) -> set[str]:
    """Everything a fault may be kept for. A card that went bad keeps its fault."""
    known = {card.uuid for card in inventory.cards} | {m.uuid for card in inventory.cards for m in card.mig}
    return known | {bad.uuid for bad in inventory.bad if bad.uuid}
