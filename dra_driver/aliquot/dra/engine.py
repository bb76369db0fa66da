# SPDX-License-Identifier: Apache-2.0
"""NodePrepareResources and NodeUnprepareResources for one claim: the order of steps, and nothing else.

Prepare: fetch the claim (nothing held meanwhile, the host looked at beside it) → its turn → plan, together with the
reservation in the checkpoint, the one short moment in which claims wait for each other → `started` durable (the spec
drafted beside it) → make → `completed` durable → answer.
Unprepare undoes in the opposite order and asks nobody. Both are continued or undone by the next call, wherever a kill
cut them. Invariants: nothing is made before the checkpoint says so, and nothing is forgotten before it is unmade;
what is answered is what the checkpoint says; a card is planned by one call at a time, across instances too.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from aliquot.api.errors import AliquotError, ClusterError
from aliquot.api.log import get_logger
from aliquot.cdi.store import StagedSpec
from aliquot.dra.devices import Offer
from aliquot.dra.effects import Effects, HostLook, Steps
from aliquot.dra.prepare import Action, Book, ClaimRef, HeldError, Plan, plan_prepare
from aliquot.dra.records import ClaimRecord, Held, State, cards_in
from aliquot.dra.turns import Gate, Turn, Turns
from aliquot.kube import paths
from aliquot.kube.backoff import Backoff
from aliquot.kube.client import Kube
from aliquot.kube.errors import NotFound, ServerError, TooManyRequests, Unreachable
from aliquot.kube.objects import ResourceClaim
from aliquot.node.checkpoint import Checkpoint, Ticket

log = get_logger(__name__)

FETCH_S: Final = 20.0
"""Longest time that one call goes on asking an API server in trouble; kubelet comes back anyway."""
WAIT_S: Final = 40.0
"""Longest time that a call waits for an earlier one, where kubelet set no limit itself (it sets 45 s)."""
_SIDE_BY_SIDE: Final = 4
"""Prepares worked on at a time: enough to share writes to the disk and to wait for the API server together."""
_PATIENCE_S: Final = 0.25
_ROUNDS: Final = 5
"""How often a claim that keeps being undone while it is fetched is fetched again."""

PREPARE_STEPS: Final = ("fetch", "plan", "write started", "make", "write completed", "answer")
UNPREPARE_STEPS: Final = ("unmake", "forget", "forgotten")


class Caller(Protocol):
    """Whoever waits for the answer."""

    def remaining_s(self) -> float:
        """Seconds until they stop waiting."""

    def waits(self) -> bool:
        """Whether they still do."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """One device in the answer to kubelet."""

    request: str
    """Main request name."""
    pool: str
    device: str
    cdi_device: str
    """Name within our CDI kind."""
    share_id: str


Observe = Callable[[str, float], None]


class Engine:
    """The two calls. `offered` gives the node's devices as they are now, `released` is told when cards got free."""

    def __init__(
        self,
        *,
        kube: Kube,
        checkpoint: Checkpoint[ClaimRecord],
        effects: Effects,
        offered: Callable[[], Offer],
        pool: str,
        boot_id: str,
        stop: threading.Event,
        reconsider: Callable[[str], bool] = lambda _uid: False,
        released: Callable[[], None] = lambda: None,
        observe: Observe = lambda _part, _seconds: None,
        steps: Steps = lambda _step: None,
    ) -> None:
        """`reconsider` is asked to give up a claim that stands in the way, if it is dead; true when it did.

        `observe` gets the seconds spent on each part of a Prepare: `get`, `wait`, `plan`, `disk`.
        """
        self.checkpoint = checkpoint
        self.effects = effects
        self.turns = Turns()
        self.reconsider = reconsider
        self._kube = kube
        self._offered = offered
        self._pool = pool
        self._boot_id = boot_id
        self._stop = stop
        self._released = released
        self._observe = observe
        self._steps = steps
        self._planning = threading.Lock()
        self._gate = Gate(_SIDE_BY_SIDE, _PATIENCE_S)
        # A draft waits for its own look only, which was submitted before it: so the pool cannot come to a standstill.
        self._beside = ThreadPoolExecutor(_SIDE_BY_SIDE, thread_name_prefix="beside")

    # ---- the two calls

    def prepare(self, ref: ClaimRef, caller: Caller) -> tuple[Prepared, ...]:
        """Prepare a claim and say what its containers are to be given, in allocation order.

        Raises an `AliquotError` whose text is for the pod's event.
        """
        took: dict[str, float] = {}
        with contextlib.ExitStack() as inside:
            turn = inside.enter_context(self.turns.enter(ref.uid))
            with self._timed("wait", took):
                inside.enter_context(self._gate.enter())
            for _ in range(_ROUNDS):
                undone = turn.undone
                # The host is looked at while the API server thinks; that makes nothing.
                seen = self._beside.submit(self.effects.look)
                with self._timed("get", took):
                    claim = self._fetch(ref, caller)
                with self._in_turn(turn, ref.uid, caller, took):
                    if turn.undone != undone:
                        continue  # what was fetched may be older than the undoing
                    record = self._prepare(ref, claim, caller, took, seen)
                self._steps("answer")
                return tuple(_prepared(held) for held in record.results)
        raise ClusterError(f"{ref} was unprepared again and again while it was being prepared; kubelet retries")

    def unprepare(self, uid: str, *, timeout_s: float = WAIT_S) -> None:
        """Undo a claim; succeeds for one that was never seen. Asks neither API server nor driver.

        Raises an `AliquotError` when the disk refuses, or an earlier call does not end.
        """
        with self.turns.enter(uid) as turn, turn.hold(uid, timeout_s):
            self.undo(uid, turn)

    def undo(self, uid: str, turn: Turn) -> None:
        """Undo a claim whose turn the caller holds."""
        with self.checkpoint.session():
            self._steps("unmake")
            self.effects.unmake(uid)
            self._steps("forget")
            self.checkpoint.delete(uid)
            self._steps("forgotten")
        turn.undone += 1
        self._released()

    # ---- Prepare, step by step

    def _fetch(self, ref: ClaimRef, caller: Caller) -> ResourceClaim:
        """The claim as the API server has it now; asked again while the server is in trouble and time is left."""
        self._steps("fetch")
        started = time.monotonic()
        backoff = Backoff(0.1, 2.0)
        while True:
            left = min(caller.remaining_s() - 1.0, FETCH_S - (time.monotonic() - started))
            try:
                return self.claim(ref, timeout_s=max(left, 1.0))
            except (Unreachable, ServerError, TooManyRequests) as err:
                pause = max(backoff.next_s(), err.retry_after_s)
                if pause >= left or not caller.waits() or self._stop.wait(pause):
                    raise

    def claim(self, ref: ClaimRef, *, timeout_s: float = 10.0) -> ResourceClaim:
        """The claim of that name, whatever its UID. Raises `ClusterError`."""
        try:
            return self._kube.get(
                paths.claim(ref.namespace, ref.name), ResourceClaim, timeout=(min(timeout_s, 2.0), timeout_s)
            )
        except NotFound as err:
            raise ClaimGoneError(f"{ref} does not exist (any more); the pod that wanted it has to be deleted") from err

    @contextlib.contextmanager
    def _in_turn(self, turn: Turn, uid: str, caller: Caller, took: dict[str, float]) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            with self._timed("wait", took):
                held.enter_context(turn.hold(uid, min(caller.remaining_s(), WAIT_S)))
                held.enter_context(self.checkpoint.session())
            yield

    @contextlib.contextmanager
    def _timed(self, part: str, took: dict[str, float]) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - started
            took[part] = took.get(part, 0.0) + seconds
            self._observe(part, seconds)

    def _prepare(
        self, ref: ClaimRef, claim: ResourceClaim, caller: Caller, took: dict[str, float], seen: Future[HostLook]
    ) -> ClaimRecord:
        """With the claim's turn held: plan, make, remember."""
        if not caller.waits():
            raise ClusterError(f"{ref}: kubelet stopped waiting before anything was made; it retries")
        self._steps("plan")
        with self._timed("plan", took):
            plan, reservation = self._plan(ref, claim)
        record = plan.record
        if not record.results:
            return record
        with self._timed("disk", took):
            completed = self._carry_out(ref.uid, plan, reservation, seen)
        log.info(
            "claim prepared",
            claim_uid=ref.uid,
            claim=f"{ref.namespace}/{ref.name}",
            action=plan.action.value,
            devices=[held.asked.device for held in record.results],
            milliseconds={part: round(seconds * 1000, 2) for part, seconds in took.items()},
        )
        return completed

    def _carry_out(self, uid: str, plan: Plan, reservation: Ticket | None, seen: Future[HostLook]) -> ClaimRecord:
        """Make what the record says, and remember that it is made."""
        record = plan.record
        with self._drafted(uid, record, reservation, seen) as draft:
            self._steps("make")
            changed = self.effects.make(uid, record, draft)
        if plan.action in (Action.REDO, Action.ADOPT):
            self.effects.drop_strays(uid, record)
        # Neither needs the other: after a loss of power a completed claim without a spec is made again.
        settled = self._beside.submit(self.effects.settle) if changed else None
        completed = msgspec.structs.replace(record, state=State.COMPLETED, boot_id=self._boot_id)
        if completed != record:
            self._steps("write completed")
            self.checkpoint.put(uid, completed)
        if settled is not None:
            settled.result()
        return completed

    @contextlib.contextmanager
    def _drafted(
        self, uid: str, record: ClaimRecord, reservation: Ticket | None, seen: Future[HostLook]
    ) -> Iterator[Callable[[], StagedSpec] | None]:
        """The reservation durable, and meanwhile the spec being drafted: that takes longer, and no runtime sees it."""
        if reservation is None:
            yield None
            return
        drafting = self._beside.submit(lambda: self.effects.draft(uid, record, seen.result()))
        try:
            self._steps("write started")
            reservation.wait()
            yield drafting.result
        finally:
            drafting.add_done_callback(_discard)

    def _plan(self, ref: ClaimRef, claim: ResourceClaim) -> tuple[Plan, Ticket | None]:
        """Plan and reserve; where a dead claim stands in the way it is given up first, once."""
        try:
            return self._plan_once(ref, claim)
        except HeldError as err:
            freed = [uid for uid in err.holders if self.reconsider(uid)]
            if not freed:
                raise
        return self._plan_once(ref, claim)

    def _plan_once(self, ref: ClaimRef, claim: ResourceClaim) -> tuple[Plan, Ticket | None]:
        offered = self._offered()
        with self._planning:
            plan = plan_prepare(ref, claim, self.book(), offered, pool=self._pool, boot_id=self._boot_id)
            if plan.action is Action.REPEAT or not plan.record.results:
                return plan, None
            # Staged, every later plan sees it; made durable outside of this lock, together with others.
            return plan, self.checkpoint.stage(ref.uid, plan.record)

    def book(self) -> Book:
        """Who holds what, reservations of calls under way included."""
        return Book(
            records=self.checkpoint.records(),
            unreadable={uid: cards_in(damaged.raw) for uid, damaged in self.checkpoint.damaged().items()},
        )


class ClaimGoneError(ClusterError):
    """There is no claim of that name."""


def _discard(drafting: Future[StagedSpec]) -> None:
    """Leave nothing of a draft that was not put in place."""
    if not drafting.cancelled() and drafting.exception() is None:
        drafting.result().discard()


def _prepared(held: Held) -> Prepared:
    return Prepared(
        request=held.asked.main_request,
        pool=held.asked.pool,
        device=held.asked.device,
        cdi_device=held.grant.name,
        share_id=held.asked.share_id,
    )


def text_for_event(err: BaseException) -> str:
    """What kubelet is told: ours as it stands, anything else as a bug, without its innards."""
    if isinstance(err, AliquotError):
        return str(err)
    return (
        f"internal error of the driver ({type(err).__name__}); see its log on this node and report it; kubelet retries"
    )
