# SPDX-License-Identifier: Apache-2.0
"""What each process had of a card since the last question, as NVML tells it. A thin rim.

It never raises: a driver that is away, too old, or a MIG device (NVML tells nothing of processes there) is no answer,
and whoever asked does without. Nor does it keep anybody waiting: a driver that hangs (after an Xid they do) hangs in
a thread of its own. Guarded invariant: the windows of one card follow each other without a gap or overlap.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from aliquot.node.charging import Usage
from aliquot.node.nvml import NOT_FOUND, Handle, Nvml, NvmlError

_FIRST_US: Final = 1_000_000
"""How far back the first question about a card goes."""


_PATIENCE_S: Final = 0.2
"""Longest time that a driver is waited for, once: while it has not answered nobody waits again."""


class BoundedUtilization:
    """Asks in a thread that may hang, and waits for an answer `patience_s` at most; what comes later is dropped."""

    def __init__(self, ask: Callable[[str], Usage | None], *, patience_s: float = _PATIENCE_S) -> None:
        self._ask = ask
        self._patience_s = patience_s
        self._asking = threading.Lock()

    def __call__(self, card_uuid: str) -> Usage | None:
        """What `ask` says of the card; None as well when it does not say so in time, or still owes an answer."""
        if not self._asking.acquire(blocking=False):
            return None
        answers: list[Usage | None] = []
        answered = threading.Event()

        def work() -> None:
            try:
                answers.append(self._ask(card_uuid))
            finally:
                self._asking.release()
                answered.set()

        threading.Thread(target=work, name="utilization", daemon=True).start()
        return answers[0] if answered.wait(self._patience_s) and answers else None


class ProcessUtilization:
    """Callable with a card's UUID; for one thread. `clock_ns` is CLOCK_MONOTONIC, `wall_ns` what NVML stamps with."""

    def __init__(
        self,
        nvml: Nvml,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._nvml = nvml
        self._clock_ns = clock_ns
        self._wall_ns = wall_ns
        self._handles: dict[str, Handle] = {}
        self._seen_us: dict[str, int] = {}
        self._silent: dict[str, int] = {}
        """Cards without an answer, and in which opening of NVML."""

    def __call__(self, card_uuid: str) -> Usage | None:
        """What processes had since the last call; None when NVML has nothing new or nothing at all to tell."""
        opening = self._nvml.opening
        if self._silent.get(card_uuid) == opening:
            return None
        offset_ns = self._wall_ns() - self._clock_ns()
        since_us = self._seen_us.get(card_uuid, self._wall_ns() // 1000 - _FIRST_US)
        try:
            handle = self._handles.get(card_uuid)
            if handle is None or handle.opening != opening:
                handle = self._nvml.handle("nvmlDeviceGetHandleByUUID", card_uuid)
                self._handles[card_uuid] = handle
            samples = self._nvml.call("nvmlDeviceGetProcessUtilization", handle, since_us)
        except NvmlError as e:
            if e.absent:
                self._silent[card_uuid] = opening
            elif e.code != NOT_FOUND:
                self._handles.pop(card_uuid, None)
            return None
        fresh = [sample for sample in samples if int(sample.timeStamp) > since_us]
        if not fresh:
            return None
        until_us = max(int(sample.timeStamp) for sample in fresh)
        self._seen_us[card_uuid] = until_us
        return Usage(since_us * 1000 - offset_ns, until_us * 1000 - offset_ns, _means(fresh))


def _means(samples: list[Any]) -> dict[int, float]:
    """Per process, over all moments that were sampled: who is not in one of them had nothing then."""
    moments = len({int(sample.timeStamp) for sample in samples})
    sums: dict[int, int] = {}
    for sample in samples:
        sums[int(sample.pid)] = sums.get(int(sample.pid), 0) + int(sample.smUtil)
    return {pid: total / moments for pid, total in sums.items()}
