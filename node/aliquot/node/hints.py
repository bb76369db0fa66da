# SPDX-License-Identifier: Apache-2.0
"""What the node advises the shares of its cards: who may burst, who gives way. Pure.

A share with a `default` compute limit may use more than it (`burst`) while nobody else wants its card, and low
priority work waits (`hold`) while high priority work of the same card is busy. Advice is a point in time until
which it holds; the hook needs nobody to take it back, so a node daemon that dies leaves every share at its limit.

Guarded invariant: nothing a tenant writes gives its own share more than an idle card: a share is judged by the
activity of the others, and saying nothing about oneself only lets the others burst.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from aliquot.api.grant import CorePolicy

BUSY_NS: Final = 1_000_000_000
"""A share counts as busy for this long after its latest launch."""

VALID_NS: Final = 1_000_000_000
"""How long advice holds. Renewed twice a second; together with the renewal a burst ends within 2 s (issue: hook)."""

_WHOLE: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """One share at one moment."""

    name: str
    card_uuid: str
    last_launch_ns: int
    """CLOCK_MONOTONIC; 0 = none known."""
    processes: int
    core_percent: int
    core_policy: CorePolicy
    priority: int
    """0 high, 1 low."""


@dataclass(frozen=True, slots=True)
class Advice:
    """CLOCK_MONOTONIC; 0 = not now."""

    burst_until_ns: int
    hold_until_ns: int


def advise(shares: Iterable[Activity], now_ns: int) -> dict[str, Advice]:
    """Advice for every share, by name."""
    everyone = list(shares)
    busy = [share for share in everyone if is_busy(share, now_ns)]
    until = now_ns + VALID_NS
    advice = {}
    for share in everyone:
        others = [other for other in busy if other.card_uuid == share.card_uuid and other.name != share.name]
        burst = is_limited(share) and share.core_policy is CorePolicy.DEFAULT and not others
        hold = share.priority > 0 and any(other.priority == 0 for other in others)
        advice[share.name] = Advice(until if burst else 0, until if hold else 0)
    return advice


def is_limited(share: Activity) -> bool:
    """Whether the share has a compute limit at all."""
    return 0 < share.core_percent < _WHOLE and share.core_policy is not CorePolicy.DISABLE


def is_busy(share: Activity, now_ns: int) -> bool:
    """Whether the share wants its card now.

    The hook does not note launches of a share without a compute limit (that would cost it a clock reading each),
    so such a share counts as busy while it has processes: a neighbour that bursts by mistake would take from it,
    one that does not burst only waits.
    """
    if share.processes == 0:
        return False
    if share.last_launch_ns == 0:
        return not is_limited(share)
    # Later than now is a scribble (the clock is the node's own), and no sign of work.
    return 0 <= now_ns - share.last_launch_ns <= BUSY_NS or now_ns < share.last_launch_ns <= now_ns + BUSY_NS
