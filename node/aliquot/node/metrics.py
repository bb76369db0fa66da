# SPDX-License-Identifier: Apache-2.0
"""What a node daemon tells Prometheus: cards, grants, the reaper, the checkpoint.

It never keeps a figure of its own: families are built from what is there when a scrape asks, so a grant that is gone
has no series, and a card or region that cannot be read costs its own series, nobody else's. Labels come from a fixed
list and their values from our own names, never from a tenant. Guarded invariant: one scrape never fails as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from aliquot.api.errors import foreign
from aliquot.api.grant import Grant
from aliquot.api.log import get_logger
from aliquot.node.health import Health
from aliquot.node.inventory import Inventory
from aliquot.node.reaper import Reaper
from aliquot.node.regions import Regions, Usage

_log = get_logger(__name__)

LABEL_CARD: Final = "uuid"
LABEL_GRANT: Final = "grant"

_CARD_LABELS: Final = (LABEL_CARD, "index", "name", "bus_id", "architecture", "driver", "cuda")
_GRANT: Final = (LABEL_GRANT, LABEL_CARD)


def checkpoint_histogram(registry: CollectorRegistry) -> Histogram:
    """Seconds of durable writes; its `observe` is what `Checkpoint` takes."""
    return Histogram(
        "aliquot_checkpoint_write_seconds",
        "Durable writes of the checkpoint, folder fsync included.",
        registry=registry,
        buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0),
    )


class NodeCollector(Collector):
    """Families of one node, built at each scrape from what is passed in. Register it in the daemon's registry.

    `inventory` and `health` give the latest picture (None: not read yet); `claims` how many claims are remembered.
    """

    def __init__(
        self,
        *,
        inventory: Callable[[], Inventory | None],
        health: Callable[[], Health],
        regions: Regions | None = None,
        reaper: Reaper | None = None,
        claims: Callable[[], int] | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._inventory = inventory
        self._health = health
        self._regions = regions
        self._reaper = reaper
        self._claims = claims
        self._clock_ns = clock_ns

    def describe(self) -> Iterable[Metric]:
        """Nothing: reading cards and files only to learn the names would make registering a scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """One scrape."""
        for part in (self._cards, self._grants, self._reaping, self._remembered):
            try:
                yield from part()
            except Exception as e:
                _log.error("metrics part failed", part=part.__name__, reason=foreign(repr(e)), exc_info=True)

    def _cards(self) -> Iterator[Metric]:
        inventory = self._inventory()
        if inventory is None:
            return
        health = self._health()
        info = GaugeMetricFamily("aliquot_card_info", "A card of this node; always 1.", labels=_CARD_LABELS)
        memory = GaugeMetricFamily("aliquot_card_memory_bytes", "Physical memory of the card.", labels=(LABEL_CARD,))
        fit = GaugeMetricFamily("aliquot_card_healthy", "1 while the card has no fault.", labels=(LABEL_CARD,))
        bad = GaugeMetricFamily("aliquot_cards_unreadable", "Cards the driver counts but that cannot be read.")
        cuda = ".".join(str(n) for n in inventory.cuda_version or ())
        for card in inventory.cards:
            values = (card.uuid, str(card.index), card.name, card.bus_id, card.architecture or "")
            info.add_metric((*values, inventory.driver_version or "", cuda), 1)
            if card.memory_bytes is not None:
                memory.add_metric((card.uuid,), card.memory_bytes)
            fit.add_metric((card.uuid,), 0 if health.of(card) else 1)
            for instance in card.mig:
                fit.add_metric((instance.uuid,), 0 if health.of(card, instance.uuid) else 1)
        bad.add_metric((), len(inventory.bad))
        yield from (info, memory, fit, bad)

    def _grants(self) -> Iterator[Metric]:
        if self._regions is None:
            return
        families = {
            name: kind(f"aliquot_grant_{name}", text, labels=_GRANT) for name, (kind, text) in _GRANT_FAMILIES.items()
        }
        for name, grant in self._regions.grants().items():
            for family, value in self._grant_figures(grant, self._regions.usage(name)):
                families[family].add_metric((name, grant.card_uuid), value)
        yield from families.values()

    def _grant_figures(self, grant: Grant, usage: Usage) -> Iterator[tuple[str, float]]:
        yield "memory_limit_bytes", grant.memory_bytes or grant.physical_bytes
        yield "core_limit_ratio", (grant.core_percent or 100) / 100
        yield "region_readable", 0 if usage.problem or usage.suspicious else 1
        if usage.problem:
            return
        yield "memory_used_bytes", usage.used_bytes
        yield "memory_spilled_bytes", sum(p.spilled_bytes for p in usage.processes)
        yield "device_seconds", usage.busy_ns / 1e9
        yield "launches", sum(p.launches for p in usage.processes)
        yield "processes", len(usage.processes)
        if usage.last_launch_ns:
            yield "last_launch_age_seconds", max(0.0, (self._clock_ns() - usage.last_launch_ns) / 1e9)

    def _reaping(self) -> Iterator[Metric]:
        if self._reaper is None:
            return
        counters = self._reaper.counters
        for name, text, value in (
            ("rounds", "Rounds of the reaper.", counters.rounds),
            ("failed_rounds", "Rounds that failed as a whole.", counters.failed_rounds),
            ("round_seconds", "Time spent in rounds.", counters.round_seconds),
            ("reaped", "Slots of dead processes given back.", counters.reaped),
            ("repaired_bytes", "Bytes taken off accounts that were too large.", counters.repaired_bytes),
        ):
            yield CounterMetricFamily(f"aliquot_reaper_{name}", text, value=value)
        yield GaugeMetricFamily("aliquot_reaper_processes", "Processes that hold a share now.", counters.processes)
        yield GaugeMetricFamily(
            "aliquot_reaper_unseen", "Owners of shares in PID namespaces that cannot be seen.", counters.uncertain
        )
        troubles = CounterMetricFamily(
            "aliquot_region_troubles", "What was found wrong with regions.", labels=("finding",)
        )
        for finding, count in list(counters.troubles.items()):
            troubles.add_metric((finding,), count)
        yield troubles

    def _remembered(self) -> Iterator[Metric]:
        if self._claims is not None:
            yield GaugeMetricFamily("aliquot_checkpoint_claims", "Claims in the checkpoint.", self._claims())


_GRANT_FAMILIES: Final = {
    "memory_limit_bytes": (GaugeMetricFamily, "Memory the grant allows."),
    "memory_used_bytes": (GaugeMetricFamily, "Memory charged to the grant."),
    "memory_spilled_bytes": (GaugeMetricFamily, "Memory beyond the card's, held in managed memory."),
    "core_limit_ratio": (GaugeMetricFamily, "Compute the grant allows, of the card."),
    "device_seconds": (CounterMetricFamily, "Device time charged to the grant."),
    "launches": (GaugeMetricFamily, "Launches of the processes that are alive."),
    "processes": (GaugeMetricFamily, "Processes that hold the grant."),
    "last_launch_age_seconds": (GaugeMetricFamily, "Time since the latest launch."),
    "region_readable": (GaugeMetricFamily, "0 while the usage file is damaged or says impossible things."),
}
