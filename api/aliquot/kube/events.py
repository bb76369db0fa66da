# SPDX-License-Identifier: Apache-2.0
"""Kubernetes Events (`events.k8s.io/v1`): what we tell users about their objects, where `kubectl describe` shows it.

Never blocks and never raises: an event is put on a bounded queue and written by a thread; what the queue, the rate
limit or the API server refuses is counted and dropped, because an event is never worth a claim. Invariant: the same
thing said again about the same object is one Event with a growing count, written at most once a minute, and one
object causes at most `BURST` Events at once, one more each `REFILL_S` after that.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import functools
import threading
import time
import uuid
from collections.abc import Callable
from typing import Final, Literal

from aliquot.api.errors import AliquotError
from aliquot.api.log import get_logger
from aliquot.kube.backoff import Backoff
from aliquot.kube.client import Kube
from aliquot.kube.errors import AlreadyExists, Forbidden, Invalid, NotFound
from aliquot.kube.objects import ObjectMeta
from aliquot.kube.paths import EVENTS_API, namespaced

NOTE_LIMIT: Final = 1024
"""Bytes of text the API server accepts."""
REASON_LIMIT: Final = 128
QUEUE_LIMIT: Final = 256
BURST: Final = 25
REFILL_S: Final = 300.0
"""As client-go limits a source's events about one object."""
SERIES_S: Final = 60.0
"""Repetitions are written together, this often."""
FORGET_S: Final = 360.0
"""An event not repeated for this long begins a new series (as client-go)."""
MEMORY_LIMIT: Final = 4096
"""Series and objects remembered; the longest unused are forgotten first."""
TRIES: Final = 5

log = get_logger("events")


@dataclasses.dataclass(frozen=True)
class Reference:
    """The object an event is about."""

    api_version: str
    kind: str
    name: str
    namespace: str = ""
    uid: str = ""

    @classmethod
    def to(cls, api_version: str, kind: str, metadata: ObjectMeta) -> Reference:
        """From an object's metadata."""
        return cls(api_version, kind, metadata.name, metadata.namespace, metadata.uid)

    def as_json(self) -> dict[str, str]:
        """As `regarding` holds it."""
        fields = {
            "apiVersion": self.api_version,
            "kind": self.kind,
            "name": self.name,
            "namespace": self.namespace,
            "uid": self.uid,
        }
        return {name: value for name, value in fields.items() if value}


EventType = Literal["Normal", "Warning"]


@dataclasses.dataclass(frozen=True)
class _Said:
    """What makes two events the same."""

    regarding: Reference
    type: EventType
    reason: str
    action: str
    note: str


@dataclasses.dataclass
class _Series:
    """One Event on the server."""

    name: str
    first: dt.datetime
    count: int = 1
    """How often it was said, writes that are still owed included."""
    written: int = 0
    """The count the server knows; 0: the Event is not there (yet)."""
    written_at: float = 0.0
    said_at: float = 0.0
    last: dt.datetime | None = None


@dataclasses.dataclass
class _Bucket:
    """Events an object may still cause."""

    tokens: float
    at: float


@dataclasses.dataclass
class EventStats:
    """Counters for metrics; only ever growing."""

    said: int = 0
    written: int = 0
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    """By reason: `queue`, `rate`, `refused`, `unreachable`."""


class EventRecorder:
    """Tells users about their objects. One for a process; `start` it, `stop` it at the end."""

    def __init__(
        self,
        kube: Kube,
        *,
        component: str,
        instance: str,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC),
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex[:16],
        backoff: Backoff | None = None,
    ) -> None:
        """`component` is what we are (`gpu.aliquot.dev`), `instance` which of them (the node or pod)."""
        self.stats = EventStats()
        self._kube = kube
        self._component = component[:REASON_LIMIT]
        self._instance = instance[:REASON_LIMIT]
        self._clock = clock
        self._now = now
        self._new_id = new_id
        self._backoff = backoff if backoff is not None else Backoff()
        self._queue: collections.deque[tuple[_Said, dt.datetime]] = collections.deque()
        self._wake = threading.Condition()
        self._busy = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._series: collections.OrderedDict[_Said, _Series] = collections.OrderedDict()
        self._buckets: collections.OrderedDict[Reference, _Bucket] = collections.OrderedDict()

    # ---- for callers ----

    def normal(self, regarding: Reference, reason: str, note: str, *, action: str = "") -> None:
        """Something went as it should: `reason` is one CamelCase word for machines, `note` a sentence for people."""
        self.say("Normal", regarding, reason, note, action=action)

    def warning(self, regarding: Reference, reason: str, note: str, *, action: str = "") -> None:
        """Something the user or operator has to look at."""
        self.say("Warning", regarding, reason, note, action=action)

    def say(self, kind: EventType, regarding: Reference, reason: str, note: str, *, action: str = "") -> None:
        """Queues an event; returns at once, whatever happens. `action` is what we were doing (default: the reason)."""
        said = _Said(regarding, kind, reason[:REASON_LIMIT], (action or reason)[:REASON_LIMIT], _cut(note, NOTE_LIMIT))
        with self._wake:
            self.stats.said += 1
            if len(self._queue) >= QUEUE_LIMIT:
                self._drop("queue")
                return
            self._queue.append((said, self._now()))
            self._wake.notify_all()

    def start(self) -> None:
        """Starts the writing thread."""
        assert self._thread is None, "a recorder is started once"
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything said so far was written or dropped (counts of repetitions may still be owed)."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._queue and not self._busy, timeout_s)

    def stop(self, timeout_s: float = 2.0) -> None:
        """Gives what is queued a last chance, then ends."""
        if self._thread is not None:
            self.flush(timeout_s)
        self._stop.set()
        with self._wake:
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    # ---- the thread ----

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.step()
            except Exception:
                log.exception("event writer failed")
                self._backoff.wait(self._stop)

    def step(self) -> None:
        """Waits for one event, or until repetitions are due, and writes what there is to write."""
        with self._wake:
            self._wake.wait_for(lambda: self._queue or self._stop.is_set(), self._until_due())
            item = self._queue.popleft() if self._queue else None
            self._busy = item is not None
        try:
            if item is not None:
                self._record(*item)
            self._write_due()
        finally:
            with self._wake:
                self._busy = False
                self._wake.notify_all()

    def _record(self, said: _Said, at: dt.datetime) -> None:
        instant = self._clock()
        series = self._series.get(said)
        if series is not None and instant - series.said_at < FORGET_S:
            series.count += 1
            series.said_at, series.last = instant, at
            self._series.move_to_end(said)
            return
        if not self._take_token(said.regarding, instant):
            self._drop("rate")
            return
        series = _Series(name=_name(said.regarding.name, self._new_id()), first=at, said_at=instant)
        if self._deliver(functools.partial(self._create, said, series)) == "written":
            series.written, series.written_at = 1, self._clock()
            self._series[said] = series
            self._series.move_to_end(said)
            while len(self._series) > MEMORY_LIMIT:
                self._series.popitem(last=False)

    def _take_token(self, regarding: Reference, instant: float) -> bool:
        bucket = self._buckets.setdefault(regarding, _Bucket(BURST, instant))
        self._buckets.move_to_end(regarding)
        while len(self._buckets) > MEMORY_LIMIT:
            self._buckets.popitem(last=False)
        bucket.tokens = min(float(BURST), bucket.tokens + (instant - bucket.at) / REFILL_S)
        bucket.at = instant
        if bucket.tokens < 1:
            return False
        bucket.tokens -= 1
        return True

    def _owed(self) -> list[tuple[_Said, _Series]]:
        return [(said, series) for said, series in self._series.items() if series.count > series.written]

    def _until_due(self) -> float | None:
        """Seconds until the next repetition count is to be written; None when none is owed."""
        owed = [series.written_at + SERIES_S for _, series in self._owed()]
        return max(0.0, min(owed) - self._clock()) if owed else None

    def _write_due(self) -> None:
        for said, series in self._owed():
            if self._stop.is_set() or self._clock() < series.written_at + SERIES_S:
                continue
            count, last = series.count, series.last or series.first
            series.written_at = self._clock()
            patch = {"series": {"count": count, "lastObservedTime": _time(last)}}
            fate = self._deliver(functools.partial(self._kube.merge_patch, _path(said, series.name), patch))
            if fate == "written":
                series.written = count
            elif fate == "refused":  # expired on the server, most likely: tell it anew
                del self._series[said]
                self._record(said, last)

    def _create(self, said: _Said, series: _Series) -> None:
        self._kube.create(
            _path(said),
            {
                "apiVersion": "events.k8s.io/v1",
                "kind": "Event",
                "metadata": {"name": series.name, "namespace": _namespace(said.regarding)},
                "eventTime": _time(series.first),
                "reportingController": self._component,
                "reportingInstance": self._instance,
                "type": said.type,
                "reason": said.reason,
                "action": said.action,
                "note": said.note,
                "regarding": said.regarding.as_json(),
            },
        )

    def _deliver(self, write: Callable[[], object]) -> Literal["written", "refused", "lost"]:
        """Tries a few times; `refused` is the server's word, `lost` means that it did not answer."""
        self._backoff.reset()
        while True:
            try:
                write()
            except AlreadyExists:  # written by a try whose answer was lost
                self.stats.written += 1
                return "written"
            except (Invalid, NotFound, Forbidden) as error:  # namespace gone or going, no right, or no valid event
                self._drop("refused")
                log.warning("event refused", error=str(error))
                return "refused"
            except AliquotError as error:
                if self._backoff.failures + 1 >= TRIES:
                    self._drop("unreachable")
                    log.warning("event dropped", error=str(error))
                    return "lost"
                at_least_s = getattr(error, "retry_after_s", 0.0)
                if self._backoff.wait(self._stop, at_least_s=at_least_s):
                    self._drop("unreachable")
                    return "lost"
            else:
                self.stats.written += 1
                return "written"

    def _drop(self, why: str) -> None:
        with self._wake:  # reentrant; callers and the thread both count here
            self.stats.dropped[why] = self.stats.dropped.get(why, 0) + 1


def _namespace(regarding: Reference) -> str:
    """Events about cluster-scoped objects live in `default`; the API server insists."""
    return regarding.namespace or "default"


def _path(said: _Said, name: str | None = None) -> str:
    return namespaced(EVENTS_API, _namespace(said.regarding), "events", name)


def _name(about: str, suffix: str) -> str:
    """A name of at most 253 characters that begins like the object's."""
    return f"{about[:200].rstrip('.-') or 'event'}.{suffix}"


def _time(at: dt.datetime) -> str:
    """MicroTime: exactly six digits."""
    return at.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _cut(text: str, limit: int) -> str:
    """At most `limit` bytes of UTF-8, cut between characters."""
    encoded: bytes = text.encode("utf-8", "replace")
    if len(encoded) <= limit:
        return encoded.decode()
    return encoded[: limit - 3].decode("utf-8", "ignore") + "…"
