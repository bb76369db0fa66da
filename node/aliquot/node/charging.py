# SPDX-License-Identifier: Apache-2.0
"""How what a share was charged for device time compares with what its card did for it. Pure.

The hook charges what it measures between two events. While processes take turns on a card, the turns of the others
stand in that measurement, and nothing inside the container can tell them apart: a kernel longer than a turn looks up
to n times as long beside n - 1 others. NVML on the node knows what every process really had. The ratio of the two,
over the latest second, goes back to the hook as a hint, which pays by it. Only charges for work that is done count:
with what is still queued among them, a queue that grows would make launches cheaper, and grow for it.

Guarded invariant: nothing in a usage file can raise what another share gets: a ratio concerns the share that wrote it,
is bounded, and is 0 (charge as measured) wherever either side says something that cannot be.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from aliquot.api.region_layout import RATIO_ONE

WINDOWS: Final = 2
"""How many readings of NVML a ratio is made of: about a second."""

_HISTORY: Final = 32
_WORD: Final = 1 << 64
_LEAST: Final = 0.02
"""Of a window: a share that was charged less is too idle for whole percents to tell anything."""

_MOST: Final = 64
"""Times a window: nobody charges more than its queue holds."""

_LOW: Final = RATIO_ONE // 8
_HIGH: Final = RATIO_ONE * 4


@dataclass(frozen=True, slots=True)
class Usage:
    """What processes had of one card between two moments of CLOCK_MONOTONIC."""

    from_ns: int
    to_ns: int
    percent: dict[int, float]
    """By PID on the node; who is not in it had nothing."""


@dataclass(slots=True)
class Meter:
    """One share: the charges that were read, and the latest comparisons."""

    charged: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    """CLOCK_MONOTONIC, and the device time ever charged for work that was done by then."""
    windows: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOWS))
    """Device time had and charged, ns."""

    def read(self, now_ns: int, done_ns: int) -> None:
        """The share had been charged `done_ns` in all for what was done by `now_ns`; a jump begins anew."""
        if self.charged:
            before_ns, before = self.charged[-1]
            if now_ns <= before_ns:
                return
            if (done_ns - before) % _WORD > _MOST * (now_ns - before_ns):
                self.charged.clear()
                self.windows.clear()
        self.charged.append((now_ns, done_ns))

    def compare(self, from_ns: int, to_ns: int, percent: float) -> None:
        """NVML saw the share have `percent` of its card in that time."""
        first, last = self._at(from_ns), self._at(to_ns)
        if first is None or last is None or to_ns <= from_ns:
            return
        window = to_ns - from_ns
        charged = last - first
        if charged < _LEAST * window or percent <= 0:
            self.windows.clear()
            return
        self.windows.append((window * min(percent, 100.0) / 100, charged))

    def alone(self) -> None:
        """Nobody takes turns with the share: what it measures is the truth."""
        self.windows.clear()

    def ratio(self) -> int:
        """Times `RATIO_ONE`; 0 = not known."""
        if not self.windows:
            return 0
        had = sum(window[0] for window in self.windows)
        charged = sum(window[1] for window in self.windows)
        return max(_LOW, min(_HIGH, int(RATIO_ONE * had / charged)))

    def _at(self, ns: int) -> float | None:
        """What had been charged by then, between two readings in proportion; None outside of them."""
        later = None
        for at_ns, busy in reversed(self.charged):
            if at_ns <= ns:
                if at_ns == ns or later is None:
                    return float(busy) if at_ns == ns else None
                part = (ns - at_ns) / (later[0] - at_ns)
                return busy + (later[1] - busy) % _WORD * part
            later = (at_ns, busy)
        return None
