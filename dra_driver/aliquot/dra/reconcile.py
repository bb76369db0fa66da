# SPDX-License-Identifier: Apache-2.0
"""Gives up claims that nobody will ever unprepare: deleted behind kubelet's back, or lost in a restart.

Never gives up what a container may still use: a force-deleted pod's container runs on after its claim is gone, and
its card must not go to somebody else meanwhile (dra.md 9, rows 3 and 6). Never lists claims: each is asked for by
name (dra.md 7.8, T29). Invariant: a claim is given up only when the API server answered that it is gone, or is
another one, or no longer has what we hold for it; silence and errors keep everything.
"""

from __future__ import annotations

import enum
import random
import threading
import time
from collections.abc import Callable
from typing import Final

from aliquot.api.errors import AliquotError, ConflictError
from aliquot.api.log import get_logger
from aliquot.dra.engine import ClaimGoneError, Engine
from aliquot.dra.metrics import Metrics
from aliquot.dra.prepare import ClaimRef
from aliquot.dra.records import ClaimRecord
from aliquot.kube.objects import ResourceClaim

log = get_logger(__name__)

PERIOD_S: Final = 300.0
"""Between two rounds, plus or minus a tenth."""
GRACE_S: Final = 60.0
"""How long a claim must be seen gone before a prepared one is given up: kubelet normally unprepares within that."""
RECHECK_S: Final = 30.0
"""Between two rounds while a claim that is gone waits for its grace."""
_ASK_S: Final = 5.0


class Verdict(enum.Enum):
    """What is to become of a record."""

    KEEP = "keep"
    WAIT = "wait"
    """It is gone, but a container may still run."""
    GIVE_UP = "give up"


def judge(
    record: ClaimRecord,
    uid: str,
    claim: ResourceClaim | None,
    *,
    gone_for_s: float,
    in_use: bool,
    boot_id: str,
    grace_s: float = GRACE_S,
) -> Verdict:
    """What is to become of a record; pure.

    `claim` is the API server's answer, None for "there is none"; `gone_for_s` how long that has been the answer;
    `in_use` whether a process is known to use the share.
    """
    if claim is not None and claim.metadata.uid == uid and claim.allocation is not None:
        allocated = {(r.pool, r.device, r.share_id or "") for r in claim.allocation.results}
        if all((h.asked.pool, h.asked.device, h.asked.share_id) in allocated for h in record.results):
            return Verdict.KEEP
    if not record.completed:
        return Verdict.GIVE_UP  # nobody was told, so no container has it
    if record.boot_id and boot_id and record.boot_id != boot_id:
        return Verdict.GIVE_UP  # whatever ran, ran before the reboot
    if in_use or gone_for_s < grace_s:
        return Verdict.WAIT
    return Verdict.GIVE_UP


class Reconciler:
    """The loop over all records; `reconsider` is one of them, for a Prepare that it stands in the way of."""

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        *,
        boot_id: str,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        grace_s: float = GRACE_S,
        period_s: float = PERIOD_S,
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._boot_id = boot_id
        self._clock = clock
        self._rng = rng if rng is not None else random.Random()  # noqa: S311 - jitter, not a secret
        self._grace_s = grace_s
        self._period_s = period_s
        self._lock = threading.Lock()
        self._gone_since: dict[str, float] = {}

    def run(self, stop: threading.Event) -> None:
        """Rounds until `stop`; the first at once."""
        while True:
            pause = self._period_s * self._rng.uniform(0.9, 1.1)
            try:
                if self.round(stop):
                    pause = min(pause, RECHECK_S)
            except Exception:
                self._metrics.errors.labels("reconcile").inc()
                log.exception("reconcile round failed")
            if stop.wait(pause):
                return

    def round(self, stop: threading.Event | None = None) -> bool:
        """Judge every record once; true when one of them waits for its grace."""
        records = self._engine.checkpoint.records()
        with self._lock:
            self._gone_since = {uid: since for uid, since in self._gone_since.items() if uid in records}
        waiting = False
        for uid in records:
            if stop is not None and stop.is_set():
                return False
            if uid not in self._engine.turns.busy():
                waiting |= self._judge(uid) is Verdict.WAIT
        return waiting

    def reconsider(self, uid: str) -> bool:
        """Give up the claim if it is dead; true when it was given up. Never waits for another call about it."""
        return self._judge(uid) is Verdict.GIVE_UP

    def _judge(self, uid: str) -> Verdict:
        record = self._engine.checkpoint.get(uid)
        if record is None or record.pieced_together:
            return Verdict.KEEP  # without a name there is nothing to ask for; kubelet knows it and unprepares it
        ref = ClaimRef(uid=uid, namespace=record.namespace, name=record.name)
        claim: ResourceClaim | None = None
        try:
            claim = self._engine.claim(ref, timeout_s=_ASK_S)
        except ClaimGoneError:
            pass
        except AliquotError as err:
            log.debug("claim not reconciled", claim_uid=uid, error=str(err))
            return Verdict.KEEP
        now = self._clock()
        with self._lock:
            since = self._gone_since.get(uid, now)
        verdict = judge(
            record,
            uid,
            claim,
            gone_for_s=now - since,
            in_use=self._in_use(record),
            boot_id=self._boot_id,
            grace_s=self._grace_s,
        )
        with self._lock:
            if verdict is Verdict.WAIT:
                self._gone_since.setdefault(uid, now)
            else:
                self._gone_since.pop(uid, None)
        if verdict is Verdict.GIVE_UP and not self._give_up(uid, record):
            return Verdict.KEEP
        return verdict

    def _in_use(self, record: ClaimRecord) -> bool:
        """Whether a living process holds something of it, as far as the usage files tell."""
        return any(self._engine.effects.regions.usage(held.grant.name).processes for held in record.results)

    def _give_up(self, uid: str, judged: ClaimRecord) -> bool:
        """Undo the claim, unless a call came between."""
        try:
            with self._engine.turns.enter(uid) as turn, turn.hold(uid, 0.0):
                if self._engine.checkpoint.get(uid) != judged:
                    return False
                self._engine.undo(uid, turn)
        except ConflictError:
            return False
        except AliquotError as err:
            self._metrics.errors.labels("reconcile").inc()
            log.warning("dead claim not given up", claim_uid=uid, error=str(err))
            return False
        self._metrics.stale.labels(judged.state.value).inc()
        log.info(
            "dead claim given up", claim_uid=uid, claim=f"{judged.namespace}/{judged.name}", state=judged.state.value
        )
        return True
