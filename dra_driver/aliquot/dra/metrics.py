# SPDX-License-Identifier: Apache-2.0
"""The driver's figures for Prometheus. One registry for one driver, handed in and never the global one.

Never measures by itself: whoever does something says so. Invariant: every series with labels from a fixed list
exists from the start with 0, so that an alert on its increase sees the first one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from aliquot.dra.layout import Mode

METHODS: Final = ("prepare", "unprepare")
RESULTS: Final = ("ok", "request", "cluster", "hardware", "conflict", "settings", "internal", "bug")
PARTS: Final = ("get", "wait", "plan", "disk")
LOOPS: Final = ("cards", "publish", "reconcile", "sockets")
_SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 45.0)


class Metrics:
    """All of them; thread-safe."""

    def __init__(self, *, version: str) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._info = Gauge("aliquot_dra_build_info", "Version of the driver.", ["version"], registry=registry)
        self._info.labels(version).set(1)
        self._inflight = Gauge(
            "aliquot_dra_requests_inflight", "Calls of kubelet under way.", ["method"], registry=registry
        )
        self._requests = Histogram(
            "aliquot_dra_request_seconds",
            "Duration of kubelet's calls, each for one or more claims.",
            ["method"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._claims = Counter(
            "aliquot_dra_claims_total", "Claims worked on, by outcome.", ["method", "result"], registry=registry
        )
        self._claim_seconds = Histogram(
            "aliquot_dra_claim_seconds",
            "Duration of one claim's work.",
            ["method"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._parts = Histogram(
            "aliquot_dra_prepare_part_seconds",
            "Where the time of a Prepare goes: API server, waiting for others, planning, disk.",
            ["part"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.devices = Gauge(
            "aliquot_dra_devices", "Devices offered, by mode of their card.", ["mode"], registry=registry
        )
        self._modes = Gauge(
            "aliquot_dra_card_mode_info",
            "How each card is offered, and why.",
            ["uuid", "mode", "reason"],
            registry=registry,
        )
        self.slices = Gauge("aliquot_dra_slices", "ResourceSlices stored for this node.", registry=registry)
        self.generation = Gauge("aliquot_dra_pool_generation", "Generation of the node's pool.", registry=registry)
        self.writes = Counter(
            "aliquot_dra_slice_writes_total", "Writes of ResourceSlices.", ["verb", "result"], registry=registry
        )
        self.dropped = Counter(
            "aliquot_dra_dropped_fields_total", "Stored slices that lack a field which was sent.", registry=registry
        )
        self.errors = Counter(
            "aliquot_dra_loop_errors_total", "Rounds of background loops that failed.", ["loop"], registry=registry
        )
        self.stale = Counter(
            "aliquot_dra_stale_claims_total",
            "Claims given up because they no longer exist.",
            ["state"],
            registry=registry,
        )
        self.recoveries = Counter(
            "aliquot_dra_checkpoint_recoveries_total", "Starts with a damaged or missing checkpoint.", registry=registry
        )
        self.outdated = Gauge(
            "aliquot_dra_claims_of_other_driver",
            "Prepared claims whose containers may run on with the libraries of another GPU driver version.",
            registry=registry,
        )
        self.registered = Gauge("aliquot_dra_registered", "Whether kubelet took the registration.", registry=registry)
        self.ready = Gauge("aliquot_dra_ready", "Whether /readyz says yes.", registry=registry)
        self._zero()

    def _zero(self) -> None:
        for method in METHODS:
            self._inflight.labels(method)
            self._requests.labels(method)
            self._claim_seconds.labels(method)
            for result in RESULTS:
                self._claims.labels(method, result)
        for part in PARTS:
            self._parts.labels(part)
        for loop in LOOPS:
            self.errors.labels(loop)
        for mode in Mode:
            self.devices.labels(mode.value)
        for verb in ("create", "update", "delete"):
            for result in ("ok", "error"):
                self.writes.labels(verb, result)
        for state in ("started", "completed"):
            self.stale.labels(state)

    @contextlib.contextmanager
    def request(self, method: str) -> Iterator[None]:
        """One call of kubelet."""
        started = time.monotonic()
        self._inflight.labels(method).inc()
        try:
            yield
        finally:
            self._inflight.labels(method).dec()
            self._requests.labels(method).observe(time.monotonic() - started)

    def claim(self, method: str, reason: str, seconds: float) -> None:
        """One claim's outcome; `reason` is empty for success."""
        self._claims.labels(method, reason or "ok").inc()
        self._claim_seconds.labels(method).observe(seconds)

    def part(self, part: str, seconds: float) -> None:
        """Time spent on one part of a Prepare."""
        self._parts.labels(part).observe(seconds)

    def modes(self, modes: Mapping[str, tuple[str, str]]) -> None:
        """UUID → (mode, reason) of every card."""
        self._modes.clear()
        for uuid, (mode, reason) in modes.items():
            self._modes.labels(uuid, mode, reason).set(1)
