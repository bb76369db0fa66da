# SPDX-License-Identifier: Apache-2.0
"""How well a compute limit is held: programs that want all of a card, alone on it and two containers at a time.

A row for each run: how far the share was from the limit over the whole time, how far in the worst of any seconds, and
the longest that one launch took. Beside them what the bare driver shows on the same machine: how evenly it splits a
card between two programs without a limit, and by how much a sleep is late. The two containers of a card have a real
node daemon's reaper (`node.py`); they are judged from `SETTLE_S` on, since what the node lends while nobody else wants
a card is given back within that time, and the row says how long the longest launch took before.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aliquot.api.grant import CorePolicy, Grant
from aliquot.node.regions import Regions

if TYPE_CHECKING:
    from run import Container, Machine

KINDS: Final = ("kernel", "ex", "cooperative", "multi", "graph", "thread", "streams", "sync")
LENGTHS: Final = (100, 1000, 10000)
LIMITS: Final = (10, 30, 50, 70, 90)
SPLITS: Final = ((30, 70), (20, 50), (50, 50))
GRAPH_KERNELS: Final = 10
SETTLE_S: Final = 2.5
OFF, SECOND_OFF, STALL_MS = 2.0, 5.0, 30.0
"""Budgets: points over the whole time, points in any second, ms at a limit of 50."""

ALONE_AT_ONCE: Final = 3
PAIRS_AT_ONCE: Final = 2
NODE: Final = Path(__file__).parent / "node.py"


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement: a limit alone, or two of them on one card."""

    kind: str
    length_us: int
    limits: tuple[int, ...]
    policy: CorePolicy = CorePolicy.FORCE
    lengths: tuple[int, ...] = ()
    """Where the two programs differ."""

    def label(self, place: int) -> str:
        if len(self.limits) == 1:
            return f"{self.kind}, {self.length_us} us, limit {self.limits[0]}"
        length = f"{'/'.join(map(str, self.lengths))} us" if self.lengths else f"{self.length_us} us"
        both = "+".join(map(str, self.limits))
        return f"{self.kind}, {length}, {self.limits[place]} of {both}, {self.policy.value}"

    def command(self, machine: Machine, seconds: float, place: int = 0) -> list[str]:
        length = self.lengths[place] if self.lengths else self.length_us
        own = length // GRAPH_KERNELS if self.kind == "graph" else length
        return [machine.program("share"), self.kind, str(own), str(seconds)]


@dataclass(frozen=True, slots=True)
class Row:
    """What one program of a run got; all but the stalls in points of the card."""

    run: Run
    place: int
    share: float
    off: float
    off_second: float
    stall_ms: float
    first_stall_ms: float
    late_ms: float

    @property
    def stalls(self) -> bool:
        """Whether the budget of the longest stall is about it."""
        return self.run.limits[self.place] == 50

    @property
    def misses(self) -> str:
        missed = [
            word
            for word, over in (
                ("SHARE", self.off > OFF),
                ("SECOND", self.off_second > SECOND_OFF),
                ("STALL", self.stalls and self.stall_ms > STALL_MS + self.late_ms),
            )
            if over
        ]
        return " ".join(missed)

    def line(self) -> str:
        before = f"  {self.first_stall_ms:7.2f} before" if self.first_stall_ms else ""
        return (
            f"{self.run.label(self.place):52} {self.share:7.2f} {self.off:6.2f} off {self.off_second:6.2f} in a second"
            f"  stall {self.stall_ms:7.2f} ms (late {self.late_ms:5.2f}){before}  {self.misses}"
        ).rstrip()


def plan(*, quick: bool) -> tuple[list[Run], list[Run]]:
    """The runs of one program, and those of two."""
    if quick:
        few = [Run("kernel", length, (limit,)) for length, limit in ((100, 10), (1000, 50), (10000, 90), (10000, 50))]
        pairs = [Run("kernel", length, (30, 70), CorePolicy.DEFAULT) for length in LENGTHS]
        pairs += [Run("kernel", 10000, (30, 70)), Run("kernel", 10000, (50, 50), CorePolicy.DEFAULT)]
        pairs += [Run("graph", 1000, (20, 50), CorePolicy.DEFAULT)]
        return [*few, *(Run(kind, 1000, (50,)) for kind in KINDS[1:])], pairs
    alone = [Run(kind, length, (limit,)) for limit in LIMITS for kind in KINDS for length in LENGTHS]
    policies = (CorePolicy.DEFAULT, CorePolicy.FORCE)
    pairs = [Run("kernel", length, split, policy) for policy in policies for split in SPLITS for length in LENGTHS]
    # One that waits after each launch waits for the other's turns too, and does not want all it may have.
    kinds = [kind for kind in KINDS[1:] if kind != "sync"]
    pairs += [Run(kind, length, (30, 70), CorePolicy.DEFAULT) for kind in kinds for length in (1000, 10000)]
    pairs += [Run("kernel", 0, (30, 70), CorePolicy.DEFAULT, lengths) for lengths in ((1000, 10000), (10000, 1000))]
    return alone, pairs


def oversleep_ms(seconds: float) -> float:
    """The machine's own part in a stall: by how much a sleep of 2 ms is late at worst."""
    worst, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        begin = time.monotonic()
        time.sleep(0.002)
        worst = max(worst, time.monotonic() - begin - 0.002)
    return worst * 1e3


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=300)
    if process.returncode:
        raise SystemExit(f"bench: {process.args!r} ended with {process.returncode}")
    seen: dict[str, Any] = json.loads(out)
    return seen


def rows_of(run: Run, seen: Sequence[dict[str, Any]], late: float) -> list[Row]:
    rows = []
    for place, (limit, one) in enumerate(zip(run.limits, seen, strict=True)):
        second = max(limit - one["worst"], one["best"] - limit)
        off = abs(one["share"] - limit)
        rows.append(Row(run, place, one["share"], off, second, one["stall_ms"], one["first_stall_ms"], late))
    return rows


def alone(machine: Machine, runs: Sequence[Run], seconds: float) -> list[Row]:
    """One program on a card each, all of them at a time."""
    boxes = [machine.container(machine.card(), percent=run.limits[0], policy=run.policy) for run in runs]
    started = [box.popen(run.command(machine, seconds)) for box, run in zip(boxes, runs, strict=True)]
    late = oversleep_ms(seconds * 0.9)
    return [row for run, p in zip(runs, started, strict=True) for row in rows_of(run, [finish(p)], late)]


class Card:
    """Two containers on a card, with a node daemon when they have limits."""

    def __init__(self, machine: Machine, run: Run, uuid: str, *, bare: bool) -> None:
        # What is queued when what was lent is given back still runs; a short queue keeps that out of the figures.
        config = machine.card(queue_depth=16)
        folder = machine.memory / f"node-{config.parent.name}"
        hook = machine.driver.parents[3] / "hook" / "libaliquot-region.so"
        regions = Regions(folder, hook)
        self.run = run
        self.bare = bare
        self.boxes: list[Container] = [machine.bare_container(config) for _ in run.limits]
        for number, (box, limit) in enumerate(zip(self.boxes, run.limits, strict=True)):
            name = f"g{number}"
            regions.create(
                Grant(name=name, card_uuid=uuid, memory_bytes=8 << 30, core_percent=limit, core_policy=run.policy)
            )
            for kind in ("grants", "usage"):
                (box.folder / "vgpu" / kind).mkdir(exist_ok=True)
                (box.folder / "vgpu" / kind / name).symlink_to(folder / kind / name)
        self.node = [sys.executable, str(NODE), str(folder), str(hook)]

    def programs(self, machine: Machine, seconds: float, begin_ns: int) -> list[subprocess.Popen[str]]:
        tail = [str(begin_ns), str(SETTLE_S)]
        return [
            box.popen([*self.run.command(machine, seconds, place), *tail], hooked=not self.bare)
            for place, box in enumerate(self.boxes)
        ]


def pairs(machine: Machine, runs: Sequence[Run], seconds: float, uuid: str, *, bare: bool = False) -> list[Row]:
    """Two containers on a card for each run, all cards at a time."""
    cards = [Card(machine, run, uuid, bare=bare) for run in runs]
    with ExitStack() as stack:
        for card in cards if not bare else ():
            node = stack.enter_context(card.boxes[0].popen(card.node, hooked=False))
            stack.callback(node.communicate)
            if node.stdout is None or node.stdout.readline() != "ready\n":
                raise SystemExit("bench: the node's part did not start")
        begin = time.monotonic_ns() + 500_000_000
        started = [card.programs(machine, seconds, begin) for card in cards]
        late = oversleep_ms(seconds * 0.9)
        # A pipe that nobody reads holds a program up, so all are read at a time.
        with ThreadPoolExecutor(len(cards) * 2) as pool:
            seen = [list(pool.map(finish, both)) for both in started]
    return [row for run, both in zip(runs, seen, strict=True) for row in rows_of(run, both, late)]


def worst(rows: Sequence[Row], of: Callable[[Row], float]) -> float:
    return max((of(row) for row in rows), default=0.0)


def measure(
    machine: Machine, *, uuid: str, quick: bool, part: tuple[int, int], show: Callable[[str], None]
) -> Iterator[tuple[str, str, float, float, float]]:
    """Name, unit, value, floor and budget of each figure; `show` gets the table's lines as they come."""
    seconds = 4.0 if quick else 10.0
    single, double = plan(quick=quick)
    everything = [*single, *double]
    chosen = everything[part[0] - 1 :: part[1]]
    # How evenly the driver splits a card; each part of the whole looks at another length.
    split = Run("kernel", LENGTHS[part[0] % len(LENGTHS)], (50, 50))
    bare = pairs(machine, [split], seconds, uuid, bare=True)
    for row in bare:
        show(f"bare: {row.line().removesuffix(row.misses)}".rstrip())
    for name, of_it, at_once, act in (
        ("alone", [run for run in chosen if len(run.limits) == 1], ALONE_AT_ONCE, alone),
        (
            "two containers",
            [run for run in chosen if len(run.limits) == 2],
            PAIRS_AT_ONCE,
            lambda machine, batch, seconds: pairs(machine, batch, seconds + SETTLE_S, uuid),
        ),
    ):
        rows: list[Row] = []
        for batch in _batched(of_it, at_once):
            for row in act(machine, batch, seconds):
                rows.append(row)
                show(row.line())
        if not rows:
            continue
        stalls = [row for row in rows if row.stalls]
        for title, of, budget in (
            (f"share over {seconds:.0f} s, {name}", lambda row: row.off, OFF),
            (f"share in any second, {name}", lambda row: row.off_second, SECOND_OFF),
        ):
            yield title, "points off", worst(rows, of), worst(bare, of), budget
        late = worst(stalls, lambda r: r.late_ms)
        yield (f"longest stall at 50, {name}", "ms", worst(stalls, lambda r: r.stall_ms), late, STALL_MS + late)


def _batched(runs: Sequence[Run], size: int) -> Iterator[Sequence[Run]]:
    for at in range(0, len(runs), size):
        yield runs[at : at + size]
