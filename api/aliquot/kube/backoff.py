# SPDX-License-Identifier: Apache-2.0
"""Waiting between tries: exponential, fully jittered, interruptible.

Never sleeps: it waits on the caller's stop event, so that stopping is instant. Invariant: however long the failure
lasts, tries grow no denser than one per `cap_s` on average of half of it, and thousands of nodes that failed at the
same moment do not come back at the same moment.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Final

FLOOR_S: Final = 0.02
"""Shortest wait; full jitter may draw 0, and a loop must never be hot."""


class Backoff:
    """Delays drawn uniformly below a bound that doubles from `base_s` to `cap_s`. For one thread at a time."""

    def __init__(
        self,
        base_s: float = 0.5,
        cap_s: float = 30.0,
        *,
        rng: random.Random | None = None,
        sleep: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        """`rng` and `sleep` (waits on the event for seconds, true if it was set) are for tests."""
        self._base_s = base_s
        self._cap_s = cap_s
        self._rng = rng if rng is not None else random.Random()  # noqa: S311 - jitter, not a secret
        self._sleep = sleep
        self.failures = 0
        """Waits since the last reset."""

    def next_s(self) -> float:
        """The next delay in seconds; counts one failure."""
        # The exponent is capped too, so that a week of failures does not overflow a float.
        bound = min(self._cap_s, self._base_s * 2.0 ** min(self.failures, 63))
        self.failures += 1
        return max(FLOOR_S, self._rng.uniform(0.0, bound))

    def wait(self, stop: threading.Event, *, at_least_s: float = 0.0) -> bool:
        """Waits the next delay on top of `at_least_s`; True as soon as `stop` is set, then the caller has to end."""
        return self._sleep(stop, at_least_s + self.next_s())

    def reset(self) -> None:
        """Begins again at `base_s`: what failed works again."""
        self.failures = 0
