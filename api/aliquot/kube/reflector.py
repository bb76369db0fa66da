# SPDX-License-Identifier: Apache-2.0
"""A local copy of one collection of the API server, kept up to date by list and watch.

Never trusts silence, never hurries a server in trouble: every end of a stream other than a long-lived one is followed
by a growing, jittered wait, 410 included. Never lets a handler or one unreadable object stop the rest. Invariant: the
copy is always a state the server had, or is on its way from one such state to the next event by event; it is replaced
in one assignment and readers never lock. Handlers hear of every difference after the copy has it, on the one thread
of the reflector, in order.

One thread for each reflector. A watch on a quiet collection still brings a bookmark each minute, so `silence_s` of
nothing at all means a dead connection, much sooner than the server's own time limit would show.
"""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, Generic, Literal, TypeVar

import msgspec

from aliquot.api.errors import foreign
from aliquot.api.log import get_logger
from aliquot.kube.backoff import Backoff
from aliquot.kube.client import PAGE_LIMIT, Kube, Stream
from aliquot.kube.errors import (
    ApiError,
    Gone,
    Invalid,
    NotFound,
    ServerError,
    Status,
    Unreachable,
    error_from,
    read_status,
)
from aliquot.kube.objects import Decoder, Object, WatchEvent
from aliquot.kube.paths import Query, target

LIVED_S: Final = 30.0
"""A stream that lived this long shows that the server works: the back-off begins anew."""
SILENCE_S: Final = 150.0
"""Two and a half of the server's bookmark intervals."""
WATCH_LIMIT_S: Final = (240.0, 360.0)
"""The server ends each watch after a random time in this range, so that a fleet's watches do not renew in step."""

_SILENCE: Final = "ReadTimeoutError"
"""Reason of `Unreachable` when a connection stands and nothing comes."""
_TIMEOUT: Final = 504
"""What a server says to a version it has not reached: its store was restored from an older state."""

T = TypeVar("T", bound=Object)
log = get_logger("reflector")


@dataclasses.dataclass(frozen=True)
class Change(Generic[T]):
    """One difference, as handlers get it."""

    kind: Literal["added", "modified", "deleted"]
    key: str
    """`namespace/name` or `name`."""
    old: T | None
    """None when added."""
    new: T | None
    """None when deleted."""


@dataclasses.dataclass
class Stats:
    """Counters for metrics, each only ever growing; written by the reflector's thread, read by anyone."""

    lists: int = 0
    watches: int = 0
    events: int = 0
    bookmarks: int = 0
    unreadable: int = 0
    """Objects or events left out because they could not be read."""
    handler_errors: int = 0
    failures: dict[str, int] = dataclasses.field(default_factory=dict)
    """Ends of a list or watch that were followed by a wait, by reason."""


class Reflector(Generic[T]):
    """Keeps `items` equal to a collection. `start`, then wait for `synced`; `stop` returns at once."""

    def __init__(
        self,
        kube: Kube,
        path: str,
        item: type[T],
        *,
        query: Query = (),
        name: str = "",
        backoff: Backoff | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        silence_s: float = SILENCE_S,
        limit: int = PAGE_LIMIT,
    ) -> None:
        """`query` holds selectors, such as `("fieldSelector", "spec.nodeName=n1")`; `name` is for logs and metrics."""
        self.name = name or target("GET", path).qualified
        self.stats = Stats()
        self.synced = threading.Event()
        """Set once the first complete list is in the copy."""
        self._kube = kube
        self._path = path
        self._query = list(query)
        self._decoder = Decoder(item)
        self._backoff = backoff if backoff is not None else Backoff()
        self._clock = clock
        self._rng = rng if rng is not None else random.Random()  # noqa: S311 - jitter, not a secret
        self._silence_s = silence_s
        self._limit = limit
        self._items: dict[str, T] = {}
        self._handlers: list[Callable[[Change[T]], None]] = []
        self._stop = threading.Event()
        self._stream: Stream | None = None
        self._thread: threading.Thread | None = None
        self._version = ""
        """resourceVersion to watch from; empty: list first."""
        self._opened_at: float | None = None
        self._mute = False
        """The present stream is open, and nothing was heard in it yet."""
        self._heard_at = clock()

    # ---- for readers ----

    def get(self, key: str) -> T | None:
        """One object by `namespace/name` or `name`."""
        return self._items.get(key)

    def items(self) -> list[T]:
        """All objects, of this instant."""
        return list(self._items.values())

    def last_event_age_s(self) -> float:
        """Seconds since the server was last heard of: a list, an event or a bookmark."""
        return self._clock() - self._heard_at

    def subscribe(self, handler: Callable[[Change[T]], None]) -> None:
        """Calls `handler` for every change from now on; before `start` that includes the first list.

        It runs on the reflector's thread and has to be quick; what it raises is logged and counted.
        """
        self._handlers.append(handler)

    # ---- life ----

    def start(self) -> None:
        """Starts the thread."""
        assert self._thread is None, "a reflector is started once"
        self._thread = threading.Thread(target=self.run, name=f"reflector-{self.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends it from any thread, at once: a watch that waits is cut; no handler is called for what comes later."""
        self._stop.set()
        stream = self._stream
        if stream is not None:
            stream.abort()

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread to end; False when a list without answer still holds it up."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def run(self) -> None:
        """The loop, until `stop`. `start` runs it on a thread of its own."""
        while not self._stop.is_set():
            failure: Exception | None = None
            self._opened_at, self._mute = None, False
            try:
                if not self._version:
                    self._list()
                self._watch()
            except Exception as error:  # whatever it was, the copy has to go on being kept
                failure = error
            if self._stop.is_set():
                return
            self._after(failure)

    def _after(self, failure: Exception | None) -> None:
        """What the end of a stream means for the next one, and how long to wait before it."""
        if isinstance(failure, Gone | NotFound | Invalid) or getattr(failure, "status", 0) == _TIMEOUT:
            self._version = ""  # the server answers, but not for this version: it is too old, or of another life
        if self._mute and isinstance(failure, Unreachable) and failure.reason == _SILENCE:
            # To a version from the future (its store was restored from a backup) a server opens the watch and then
            # says nothing, not even bookmarks; measured on 1.36.
            self._version = ""
        # Only a stream that was open counts: a list that hung for half a minute shows nothing good.
        if self._opened_at is not None and self._clock() - self._opened_at >= LIVED_S:
            self._backoff.reset()
            if failure is None:
                return  # the server's time limit; the only end that is no failure
        reason = type(failure).__name__ if failure is not None else "Closed"
        self.stats.failures[reason] = self.stats.failures.get(reason, 0) + 1
        at_least_s = failure.retry_after_s if isinstance(failure, ApiError) else 0.0
        if isinstance(failure, ApiError | None):
            log.warning(
                "watch interrupted",
                reflector=self.name,
                reason=reason,
                error=str(failure) if failure is not None else "the server closed the stream early",
                failures=self._backoff.failures + 1,
            )
        else:
            log.error("reflector failed", reflector=self.name, exc_info=failure)
        self._backoff.wait(self._stop, at_least_s=at_least_s)

    # ---- list ----

    def _list(self) -> None:
        self.stats.lists += 1
        listing = self._kube.list_all(
            self._path,
            self._decoder,
            query=self._query,
            limit=self._limit,
            keep_on=lambda: not self._stop.is_set(),
        )
        if self._stop.is_set():
            return  # perhaps not all pages
        for problem in listing.problems:
            self._unreadable(problem)
        self._heard_at = self._clock()
        old, new = self._items, {item.metadata.key: item for item in listing.items}
        self._items = new
        self._version = listing.resource_version
        for change in differences(old, new):
            self._emit(change)
        self.synced.set()

    # ---- watch ----

    def _watch(self) -> None:
        if self._stop.is_set():
            return
        self.stats.watches += 1
        query = [
            *self._query,
            ("watch", "1"),
            ("resourceVersion", self._version),
            ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", str(round(self._rng.uniform(*WATCH_LIMIT_S)))),
        ]
        with self._kube.stream(self._path, query=query, timeout=(5.0, self._silence_s)) as stream:
            self._stream = stream
            try:
                # `stop` sets the event first and looks for a stream then, so one of the two sees the other.
                if self._stop.is_set():
                    return
                self._opened_at, self._mute = self._clock(), True
                for line in stream.lines():
                    self._mute = False
                    self._event(line)
                    if self._stop.is_set():
                        return
            finally:
                self._stream = None

    def _event(self, line: bytes) -> None:
        self._heard_at = self._clock()
        try:
            event = _EVENT.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._version = ""  # something between us and the server garbles; what was in that line is not known
            raise ServerError(f"watch of {self.name}: a line is no event: {foreign(error)}") from error
        if event.type == "ERROR":
            status: Status = read_status(event.object)
            raise error_from(status, status.code or 500, target("GET", self._path, [("watch", "1")]))
        try:
            if event.type == "BOOKMARK":
                self.stats.bookmarks += 1
                self._version = _OBJECT.decode(event.object).metadata.resource_version or self._version
                return
            item = self._decoder.one(event.object)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._unreadable(str(error))
            return
        self.stats.events += 1
        # Before the handlers: should one of them end the process, nothing is lost, everything is listed anew.
        self._version = item.metadata.resource_version or self._version
        key = item.metadata.key
        old = self._items.get(key)
        if event.type == "DELETED":
            if old is not None:
                del self._items[key]
                self._emit(Change("deleted", key, old, None))
        elif event.type in {"ADDED", "MODIFIED"}:
            self._items[key] = item
            self._emit(Change("added" if old is None else "modified", key, old, item))

    def _emit(self, change: Change[T]) -> None:
        for handler in self._handlers:
            if self._stop.is_set():
                return
            try:
                handler(change)
            except Exception:
                self.stats.handler_errors += 1
                log.exception("handler failed", reflector=self.name, key=change.key, change=change.kind)

    def _unreadable(self, problem: str) -> None:
        self.stats.unreadable += 1
        log.warning("object unreadable", reflector=self.name, error=foreign(problem))


_EVENT: Final = msgspec.json.Decoder(WatchEvent)
_OBJECT: Final = msgspec.json.Decoder(Object)


def differences(old: dict[str, T], new: dict[str, T]) -> Iterable[Change[T]]:
    """What has to be told to whoever knew `old`: deletions first, then additions and modifications in list order.

    An object deleted and made again under its name is one deletion and one addition, since its UID differs.
    """
    for key, item in old.items():
        if key not in new or new[key].metadata.uid != item.metadata.uid:
            yield Change("deleted", key, item, None)
    for key, item in new.items():
        before = old.get(key)
        if before is None or before.metadata.uid != item.metadata.uid:
            yield Change("added", key, None, item)
        elif before.metadata.resource_version != item.metadata.resource_version:
            yield Change("modified", key, before, item)
