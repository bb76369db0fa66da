# SPDX-License-Identifier: Apache-2.0
"""Keeps looking at the node's cards: waits for a driver that is not there yet, sees cards come, fail and come back.

Never ends because of the driver, and never forgets a card that a claim holds: it stays on offer as unhealthy, for a
device that vanishes from its slice while it is allocated confuses the scheduler (dra.md 3.5, REQ-3). Invariant: what
`view` says is one moment's truth, whole, and why there is nothing is said in one sentence with the next step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from aliquot.api.errors import AliquotError
from aliquot.api.log import get_logger
from aliquot.cdi.driver_files import LIBRARY_DIRS
from aliquot.dra.metrics import Metrics
from aliquot.kube.backoff import Backoff
from aliquot.node.inventory import BadCard, Card, Inventory, read_inventory
from aliquot.node.nvml import SONAME, VERSION_MISMATCH, Nvml, NvmlError

log = get_logger(__name__)

STEADY_S: Final = 30.0
"""Between two looks while all is well."""
SEARCH_S: Final = 10.0
"""Longest between two looks while there is no driver or no card (cases.md B109 allows 30)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The cards of one moment."""

    inventory: Inventory | None = None
    """None: the driver does not answer, so nothing is known."""
    sick: Mapping[str, str] = field(default_factory=dict, hash=False)
    """UUID → reason, of cards in `inventory` as they last were, which cannot be read now."""
    problem: str = "the GPU driver has not been asked yet"
    """Why there is no card to offer; empty when there is one."""


def find_library(configured: str, driver_root: Path, host_prefix: str) -> Path | None:
    """The NVML library to load; None leaves the search to the loader."""
    if configured:
        return Path(configured)
    root = Path(f"{host_prefix}{driver_root}")
    if root == Path("/"):
        return None
    return next((path for d in LIBRARY_DIRS if (path := root / d.lstrip("/") / SONAME).exists()), None)


class CardWatch:
    """The loop. `held` names the cards that prepared claims hold; `changed` is told of every different view."""

    def __init__(
        self,
        *,
        library: Callable[[], Path | None],
        held: Callable[[], frozenset[str]],
        changed: Callable[[View], None],
        metrics: Metrics,
        opened: Callable[[Nvml], None] = lambda _nvml: None,
        own: Callable[[str], None] = lambda _uuid: None,
        sysfs: Path = Path("/sys"),
        backoff: Backoff | None = None,
    ) -> None:
        """`opened` is called once, when the driver answers for the first time.

        `own` makes a card ours on this node, or raises why it cannot be; it is asked at every look.
        """
        self.view = View()
        self._library = library
        self._held = held
        self._changed = changed
        self._metrics = metrics
        self._opened = opened
        self._own = own
        self._sysfs = sysfs
        self._backoff = backoff if backoff is not None else Backoff(1.0, SEARCH_S)
        self.outdated = ""
        """Why this process can never use the driver again, though another can: it was replaced under us."""
        self._nvml: Nvml | None = None
        self._wake = threading.Event()

    def wake(self) -> None:
        """Look now: somebody saw the driver come back."""
        self._wake.set()

    def run(self, stop: threading.Event) -> None:
        """Looks until `stop`; the first at once."""
        while True:
            try:
                self.look()
            except Exception:
                self._metrics.errors.labels("cards").inc()
                log.exception("looking at the cards failed")
            if self.view.problem:
                if self._backoff.wait(stop):
                    break
            else:
                self._backoff.reset()
                self._rest(stop)
                if stop.is_set():
                    break
        if self._nvml is not None:
            self._nvml.close()

    def _rest(self, stop: threading.Event) -> None:
        """Until it is time to look again, or `wake`, or `stop` at the latest a second after."""
        for _ in range(int(STEADY_S)):
            if stop.is_set() or self._wake.wait(1.0):
                break
        self._wake.clear()

    def look(self) -> None:
        """One look; tells `changed` when something is different."""
        try:
            found: Inventory | None = self._owned(self._read())
            problem = ""
            self.outdated = ""
        except AliquotError as err:
            found, problem = None, str(err)
            # Before the driver was ever open another process would fare no better.
            mismatch = isinstance(err, NvmlError) and err.code == VERSION_MISMATCH and self._nvml is not None
            self.outdated = problem if mismatch else ""
            self._metrics.errors.labels("cards").inc()
        view = self._judged(found, problem)
        if view == self.view:
            return
        if view.problem and view.problem != self.view.problem:
            log.warning("no card to offer", reason=view.problem)
        known_bad = self.view.inventory.bad if self.view.inventory else ()
        for bad in view.inventory.bad if view.inventory else ():
            if bad not in known_bad:
                log.warning("card left out", index=bad.index, uuid=bad.uuid, reason=bad.reason)
        self.view = view
        self._changed(view)

    def _read(self) -> Inventory:
        """Raises `HardwareError` when the driver as a whole does not answer."""
        if self._nvml is None:
            # A driver that is installed later may lie elsewhere, so the library is looked for each time.
            nvml = Nvml(self._library())
            nvml.open()
            self._nvml = nvml
            self._opened(nvml)
        elif self.view.problem or not self._nvml.is_open:
            # Cards that are bound after NVML was opened are not seen by an open NVML.
            self._nvml.reopen()
        try:
            return read_inventory(self._nvml, sysfs=self._sysfs)
        except NvmlError as err:
            if err.driver_gone:
                self._nvml.close()
            raise

    def _owned(self, found: Inventory) -> Inventory:
        """What was found, less the cards that another door of this node offers (cases.md B118)."""
        ours: list[Card] = []
        others: list[BadCard] = []
        for card in found.cards:
            try:
                self._own(card.uuid)
            except AliquotError as err:
                others.append(BadCard(index=card.index, uuid=card.uuid, bus_id=card.bus_id, reason=str(err)))
            else:
                ours.append(card)
        return replace(found, cards=tuple(ours), bad=(*found.bad, *others)) if others else found

    def _judged(self, found: Inventory | None, problem: str) -> View:
        """The view after a look, with the cards that cannot be read any more but are held."""
        before = self.view.inventory
        if found is None:
            if before is None or not before.cards:
                return View(problem=problem)
            found = replace(before, cards=(), bad=())
        held = self._held()
        reasons = {bad.uuid: bad.reason for bad in found.bad if bad.uuid}
        missing: list[Card] = [
            card for card in (before.cards if before else ()) if card.uuid not in found.by_uuid and card.uuid in held
        ]
        sick = {
            card.uuid: reasons.get(card.uuid) or problem or "the driver does not list it any more" for card in missing
        }
        cards = tuple(sorted((*found.cards, *missing), key=lambda card: (card.index, card.uuid)))
        if not problem and not found.cards:
            problem = _nothing(found)
        # What is bad is told by its own word; handles and openings differ from look to look and mean nothing here.
        return View(inventory=replace(found, cards=cards, opening=0), sick=sick, problem=problem)


def _nothing(found: Inventory) -> str:
    if found.bad:
        first = found.bad[0]
        return f"none of {len(found.bad)} cards can be used; card {first.uuid or first.index}: {first.reason}"
    return (
        "the driver knows no card; see `nvidia-smi -L` on the node and whether another driver (vfio) has bound them; "
        "cards that appear are taken without a restart"
    )
