# SPDX-License-Identifier: Apache-2.0
"""Gives back what dead processes hold, within a second, and keeps the hints of all grants fresh.

One thread. A round reads every usage file, then asks /proc who of the owners is alive (in that order: whoever
claims a slot in between is not asked about), settles what the dead hold, tells the living their PID on the node,
renews burst, hold and heartbeat, and compares what shares were charged with what NVML saw of them where they take
turns (`charging`). Between rounds it sleeps until a watched process dies, at most a tick.

It never believes a usage file: one that was scribbled over or cut short is reported (log, counter, callback)
once per finding, and costs the other grants nothing. It never calls an owner dead that it might merely not see
(`processes`). Guarded invariant: a round that fails half way has given back only what was certainly dead, and the
next one finds the rest: everything a round learns it can learn again from the files.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from aliquot.api.errors import foreign
from aliquot.api.grant import Grant
from aliquot.api.log import get_logger
from aliquot.node.charging import Meter, Usage
from aliquot.node.hints import Activity, Advice, advise, is_busy, is_limited
from aliquot.node.processes import Owner, Processes
from aliquot.node.region_library import OWNER_CLAIMING, UsageReading, UsageReport
from aliquot.node.regions import Regions, problem_of

_log = get_logger(__name__)

TICK_S: Final = 0.5
"""Longest time between two rounds; a death nobody could watch is found within it."""

_GAP_S: Final = 0.05
"""Shortest: a container that loses a thousand processes a second is no reason to spin."""

_BACKOFF_MOST_S: Final = 5.0
_GRANTS_EVERY: Final = 10
"""Rounds between two readings of all grant files, which another process may have changed in place."""

_COMPARE_NS: Final = 400_000_000
"""Shortest time between two questions to NVML about one card."""

_FIRST_NS: Final = 200_000_000
"""The same between the first two since shares took turns: until the second is answered, what they are charged is as
far off as their hooks' measurements."""

_NEW_NS: Final = 2_000_000_000
"""A card that was not asked about for so long is shared anew."""

_QUIET_NS: Final = 60_000_000_000
"""A region without findings for this long is well again."""

_SUSPICIOUS: Final = "says things no hook would write"
_COMPLAINTS: Final = "a hook complained about it"
_UNSEEN: Final = "owners in a PID namespace that this daemon cannot see; run it with hostPID"
_NO_GRANT: Final = "its grant file is no grant that this release reads"
_NO_HINTS: Final = "its grant file takes no hints"
_CROWDED: Final = "more slots than this release reads"


@dataclass(slots=True)
class Counters:
    """What the reaper has done since it was made; read by the exporter."""

    rounds: int = 0
    failed_rounds: int = 0
    reaped: int = 0
    """Slots given back."""
    repaired_bytes: int = 0
    """Taken off accounts that were too large."""
    regions: int = 0
    processes: int = 0
    uncertain: int = 0
    """Owners now that are neither found nor certainly dead."""
    round_seconds: float = 0.0
    """All rounds together."""
    last_round_at: float = 0.0
    """Monotonic; 0 = none yet."""
    troubles: dict[str, int] = field(default_factory=dict)
    """Findings by their word, from a fixed list."""


class _Slot(NamedTuple):
    number: int
    word: int
    owner: Owner


@dataclass(slots=True)
class _Region:
    """What is remembered of a usage file between rounds; nothing that could not be learnt anew."""

    words: list[int] = field(default_factory=list)
    slots: list[_Slot] = field(default_factory=list)
    """Who holds which slot; slots still being claimed are not in it."""
    claiming: frozenset[int] = frozenset()
    told: set[_Slot] = field(default_factory=set)
    """Slots whose owner was told its PID on the node."""
    unsettled: bool = False
    finding: str | None = None
    """Of this round's reading."""
    reported: dict[str, int] = field(default_factory=dict)
    """Findings that were reported, and when they were last seen; CLOCK_MONOTONIC."""
    last_launch_ns: int = 0
    done_ns: int = 0
    pids: frozenset[int] = frozenset()
    """On the node; empty unless every owner is known."""
    meter: Meter = field(default_factory=Meter)


class Reaper:
    """The thread. `start` once, `stop` once; `round` is one round, for tests and benches.

    `on_trouble` is called with a grant's name and a finding; `on_reaped` with a name, the number of slots given
    back and the bytes taken off its account. Both run in the thread and may raise, which is logged. `proc` is the
    node's procfs; `clock_ns` CLOCK_MONOTONIC. `utilization` tells what processes had of a card, by its UUID, and never
    raises; without it shares are charged as their hooks measure.
    """

    def __init__(
        self,
        regions: Regions,
        *,
        proc: Path = Path("/proc"),
        tick_s: float = TICK_S,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        utilization: Callable[[str], Usage | None] = lambda _uuid: None,
        on_trouble: Callable[[str, str], None] = lambda _name, _finding: None,
        on_reaped: Callable[[str, int, int], None] = lambda _name, _slots, _bytes: None,
    ) -> None:
        self.counters = Counters()
        self._regions = regions
        self._tick_s = tick_s
        self._clock_ns = clock_ns
        self._utilization = utilization
        self._compared: dict[str, int] = {}
        self._begun: set[str] = set()
        """Cards that were asked about once since shares took turns on them."""
        self._on_trouble = on_trouble
        self._on_reaped = on_reaped
        self._processes = Processes(proc)
        self._known: dict[str, _Region] = {}
        self._grants: dict[str, Grant] = {}
        self._grants_age = 0
        self._damaged: set[str] = set()
        self._reading = UsageReading()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; rounds run until `stop`."""
        self._thread = threading.Thread(target=self._run, name="reaper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End at once and wait for the round that may be running; the reaper cannot be started again."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._processes.wake()
        if self._thread is not None:
            self._thread.join()
        self._processes.close()

    def wake(self) -> None:
        """Do a round now (a grant was made or changed); from any thread."""
        self._processes.wake()

    def alive(self, now_s: float, *, within_s: float = 10.0) -> bool:
        """Whether a round was completed lately; `now_s` is monotonic."""
        return self.counters.rounds > 0 and now_s - self.counters.last_round_at <= within_s

    def round(self) -> None:
        """Look at every region once. Raises `OSError` when the run folder or /proc cannot be read at all."""
        started = time.monotonic()
        names = self._regions.names()
        for name in self._known.keys() - names:
            del self._known[name]
        self._refresh_grants(names)
        dirty = {name for name in sorted(names) if self._read(name)}
        asked = {slot.owner for region in self._known.values() for slot in region.slots}
        judged = self._processes.judge(asked)
        for name, region in self._known.items():
            dead = [slot for slot in region.slots if slot.owner in judged.dead] if judged.dead else []
            # A claim takes microseconds; one that is still going on a round later was killed in the middle.
            claiming = frozenset(word for word in region.words if word & OWNER_CLAIMING)
            stuck = claiming & region.claiming
            region.claiming = claiming
            if dead or stuck or name in dirty:
                self._settle(name, region, dead, stuck)
            if len(region.told) < len(region.slots):
                self._tell(name, region, judged.alive)
            known = [judged.alive[slot.owner] for slot in region.slots if slot.owner in judged.alive]
            region.pids = frozenset(known if len(known) == len(region.words) else ())
            if region.finding is None and any(slot.owner in judged.uncertain for slot in region.slots):
                region.finding = _UNSEEN
            if region.finding is None and name in self._damaged:
                region.finding = _NO_GRANT
        self._advise()
        for name, region in self._known.items():
            self._report(name, region)
        self.counters.regions = len(names)
        self.counters.processes = len(judged.alive)
        self.counters.uncertain = len(judged.uncertain)
        self.counters.rounds += 1
        self.counters.last_round_at = time.monotonic()
        self.counters.round_seconds += self.counters.last_round_at - started

    # ---- the thread

    def _run(self) -> None:
        failures = 0
        while not self._stop.is_set():
            try:
                self.round()
                failures = 0
            except Exception as e:
                failures += 1
                self.counters.failed_rounds += 1
                if failures == 1:
                    _log.error("reaper round failed", reason=foreign(repr(e)), exc_info=True)
            if failures:
                self._stop.wait(min(self._tick_s * 2 ** min(failures, 8), _BACKOFF_MOST_S))
            elif not self._stop.wait(_GAP_S):
                self._processes.wait((min(_FIRST_NS / 1e9, self._tick_s) if self._begun else self._tick_s) - _GAP_S)

    # ---- steps of a round

    def _refresh_grants(self, names: frozenset[str]) -> None:
        self._grants_age += 1
        if self._grants_age >= _GRANTS_EVERY:
            self._grants_age = 0
            self._grants = self._regions.grants(names)
        elif self._grants.keys() == names:
            return
        else:
            kept = {name: grant for name, grant in self._grants.items() if name in names}
            self._grants = kept | self._regions.grants(names - kept.keys())
        self._damaged = {name for name in names - self._grants.keys() if self._regions.grant_file(name).exists()}

    def _read(self, name: str) -> bool:
        """Take over what a usage file says; True when its account has been wrong for two rounds."""
        region = self._known.setdefault(name, _Region())
        region.finding = None
        reading = self._reading
        try:
            self._regions.library.usage_read(self._regions.usage_file(name), reading)
        except OSError as e:
            # Half made or half removed grants have no usage file; it is missing only where there is a grant.
            if e.errno != errno.ENOENT or name in self._grants:
                region.finding = problem_of(e)
            region.words, region.claiming, region.unsettled = [], frozenset(), False
            region.slots.clear()
            return False
        words = reading.owners()
        if words != region.words or len(region.slots) < len(words):
            _learn(region, words, reading, self._regions.usage_file(name))
        report = reading.report
        region.last_launch_ns = report.last_launch_ns
        region.done_ns = report.done_ns
        wrong = region.unsettled and bool(report.unsettled)
        region.unsettled = bool(report.unsettled)
        region.finding = _finding(report, reading)
        return wrong

    def _settle(self, name: str, region: _Region, dead: list[_Slot], stuck: frozenset[int]) -> None:
        library, path = self._regions.library, self._regions.usage_file(name)
        # Two containers whose processes have equal PIDs and began in the same clock tick have equal words. Where one
        # of them lives, the slot is named instead of the word.
        gone = {slot.number for slot in dead}
        living = {slot.word for slot in region.slots if slot.number not in gone} if dead else set()
        report = UsageReport()
        try:
            for slot in dead:
                if slot.word in living:
                    library.usage_reap(path, slot.number, slot.word)
            library.usage_settle(path, [*({slot.word for slot in dead} - living), *stuck], report)
        except OSError as e:
            region.finding = problem_of(e)
            return
        report.reaped += sum(slot.word in living for slot in dead)
        region.unsettled = bool(report.unsettled)
        if not report.reaped and not report.repaired_bytes:
            return
        self.counters.reaped += report.reaped
        self.counters.repaired_bytes += report.repaired_bytes
        _log.info("charges given back", grant=name, processes=report.reaped, bytes=report.repaired_bytes)
        self._call(self._on_reaped, name, int(report.reaped), int(report.repaired_bytes))

    def _tell(self, name: str, region: _Region, alive: dict[Owner, int]) -> None:
        path = self._regions.usage_file(name)
        for slot in region.slots:
            if slot in region.told or slot.owner not in alive:
                continue
            try:
                self._regions.library.usage_set_host_pid(path, slot.number, slot.word, alive[slot.owner])
            except OSError:
                # The slot changed hands or the file went bad; the next round sees which.
                continue
            region.told.add(slot)

    def _advise(self) -> None:
        now = self._clock_ns()
        shares = [
            Activity(
                name=name,
                card_uuid=grant.card_uuid,
                last_launch_ns=region.last_launch_ns,
                processes=len(region.words),
                core_percent=grant.core_percent,
                core_policy=grant.core_policy,
                priority=grant.priority,
            )
            for name, grant in self._grants.items()
            if (region := self._known.get(name)) is not None
        ]
        self._compare(shares, now)
        for name, advice in advise(shares, now).items():
            self._hint(name, advice, now)

    def _compare(self, shares: list[Activity], now: int) -> None:
        """Ask NVML about cards on which a share with a limit takes turns with others."""
        busy: dict[str, list[Activity]] = {}
        for share in shares:
            region = self._known[share.name]
            region.meter.read(now, region.done_ns)
            if is_busy(share, now):
                busy.setdefault(share.card_uuid, []).append(share)
            else:
                region.meter.alone()
        self._begun &= busy.keys()
        for uuid, together in busy.items():
            if len(together) == 1:
                self._begun.discard(uuid)
                self._known[together[0].name].meter.alone()
            elif any(is_limited(share) for share in together) and self._due(uuid, now):
                self._compared[uuid] = now
                usage = self._utilization(uuid)
                # The first answer tells of a time in which the work had not begun for a part that nobody knows.
                for share in together if usage and uuid not in self._begun else ():
                    self._compare_one(share.name, usage, together)

    def _due(self, uuid: str, now: int) -> bool:
        """Whether to ask about a shared card now."""
        since = now - self._compared.get(uuid, now - _NEW_NS)
        if since >= _NEW_NS:
            self._begun.add(uuid)
            return True
        if since < (_FIRST_NS if uuid in self._begun else _COMPARE_NS):
            return False
        self._begun.discard(uuid)
        return True

    def _compare_one(self, name: str, usage: Usage | None, together: list[Activity]) -> None:
        region = self._known[name]
        others = frozenset().union(*(self._known[share.name].pids for share in together if share.name != name))
        # What a process with two shares of the card had cannot be told apart.
        if usage is None or not region.pids or region.pids & others:
            region.meter.alone()
            return
        percent = sum(usage.percent.get(pid, 0.0) for pid in region.pids)
        region.meter.compare(usage.from_ns, usage.to_ns, percent)

    def _hint(self, name: str, advice: Advice, now: int) -> None:
        try:
            self._regions.library.grant_hint(
                self._regions.grant_file(name),
                burst_until_ns=advice.burst_until_ns,
                hold_until_ns=advice.hold_until_ns,
                heartbeat_ns=now,
                ratio=self._known[name].meter.ratio(),
            )
        except OSError as e:
            if e.errno != errno.ENOENT:  # removed meanwhile
                self._known[name].finding = _NO_HINTS

    # ---- reports

    def _report(self, name: str, region: _Region) -> None:
        """Tell of a finding when it is new for this region, and when none was seen for a while.

        A tenant can make findings come and go as fast as we look, so one that was seen lately is not new.
        """
        now, finding = self._clock_ns(), region.finding
        new = finding is not None and finding not in region.reported
        if finding is not None:
            region.reported[finding] = now
        elif region.reported and now - max(region.reported.values()) > _QUIET_NS:
            region.reported.clear()
            _log.info("region is well again", grant=name)
        if not new or finding is None:
            return
        self.counters.troubles[finding] = self.counters.troubles.get(finding, 0) + 1
        _log.warning("region in trouble", grant=name, finding=finding)
        self._call(self._on_trouble, name, finding)

    def _call(self, callback: Callable[..., None], *args: object) -> None:
        try:
            callback(*args)
        except Exception as e:
            _log.error("reaper callback failed", reason=foreign(repr(e)), exc_info=True)


def _learn(region: _Region, words: list[int], reading: UsageReading, path: Path) -> None:
    """Take over who holds which slot."""
    region.words = words
    region.slots.clear()
    for process in reading.processes[: reading.count]:
        if process.owner & OWNER_CLAIMING:
            continue
        owner = Owner(process.pidns, process.pid, process.start_time)
        if not process.pidns:
            owner = owner._replace(start_time=0, file=_inode(path))
        region.slots.append(_Slot(process.index, process.owner, owner))
    region.told.intersection_update(region.slots)


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def _finding(report: UsageReport, reading: UsageReading) -> str | None:
    if report.suspicious:
        return _SUSPICIOUS
    if report.complaints:
        return _COMPLAINTS
    if report.occupied > reading.count:
        return _CROWDED
    return None
