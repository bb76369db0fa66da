# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is with a claim: one call at a time for each claim UID, any number for different ones.

Never blocks one claim for another, and keeps nothing of a claim that no call is about. Invariant: whoever holds the
turn can tell whether the claim was undone since they came, so a Prepare that was slow on its way does not bring
back what an Unprepare took away meanwhile (cases.md B086, B093).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from aliquot.api.errors import ConflictError


class Gate:
    """Lets few calls work at a time, in the order they came; nobody waits for longer than their patience.

    The interpreter works on one thing at a time: forty calls that share it end together, forty in a row end one
    after the other and so after half the time on average. A call that hangs delays others by `patience_s` at most.
    """

    def __init__(self, permits: int, patience_s: float) -> None:
        self._places = threading.Semaphore(permits)
        self._patience_s = patience_s

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Come in, at the latest after the patience."""
        orderly = self._places.acquire(timeout=self._patience_s)
        try:
            yield
        finally:
            if orderly:
                self._places.release()


class Turn:
    """A call's place with one claim."""

    __slots__ = ("calls", "lock", "undone")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls = 0
        self.undone = 0
        """How often the claim was undone while calls about it were under way."""

    @contextlib.contextmanager
    def hold(self, uid: str, timeout_s: float) -> Iterator[None]:
        """Be the only one with the claim. Raises `ConflictError` when the one before takes too long."""
        if not self.lock.acquire(timeout=max(timeout_s, 0.0)):
            raise ConflictError(
                f"claim {uid}: an earlier call for it is still at work after {timeout_s:.0f} s; kubelet retries and "
                "then gets its result"
            )
        try:
            yield
        finally:
            self.lock.release()


class Turns:
    """All claims that calls are about."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: dict[str, Turn] = {}

    @contextlib.contextmanager
    def enter(self, uid: str) -> Iterator[Turn]:
        """Come with a call about a claim; the turn itself is taken with `Turn.hold`."""
        with self._lock:
            turn = self._turns.setdefault(uid, Turn())
            turn.calls += 1
        try:
            yield turn
        finally:
            with self._lock:
                turn.calls -= 1
                if not turn.calls:
                    del self._turns[uid]

    def busy(self) -> frozenset[str]:
        """Claims that calls are about now."""
        with self._lock:
            return frozenset(self._turns)
