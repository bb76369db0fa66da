# SPDX-License-Identifier: Apache-2.0
"""Keeps the stored ResourceSlices of this node as they should be: one loop, woken by changes, silent at rest.

Never deletes the slices when it ends (kubelet does, when no instance is left), and never spins on a server that keeps
something else than it was sent. Invariant: writes are made from a list that was just read, each with the
resourceVersion it was read with, so two instances or a hand with kubectl cannot lose each other's work.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from aliquot.api import names
from aliquot.api.errors import AliquotError, ClusterError
from aliquot.api.log import get_logger
from aliquot.dra.metrics import Metrics
from aliquot.dra.probe import Prober
from aliquot.dra.slices import DesiredPool
from aliquot.dra.sync import Author, SyncPlan, fingerprint, plan_sync
from aliquot.kube import paths
from aliquot.kube.backoff import Backoff
from aliquot.kube.client import Kube
from aliquot.kube.errors import AlreadyExists, ApiError, Conflict, Forbidden, NotFound
from aliquot.kube.objects import Document, Node, ResourceSlice
from aliquot.kube.reflector import Change, Reflector

log = get_logger(__name__)

SETTLE_S: Final = 1.0
"""Between somebody else's change and our look: kubelet deletes slices one after the other when it starts."""
YIELD_S: Final = 60.0
"""How long the older instance leaves alone what a newer one wrote; an update is over by then."""
_RETRY_S: Final = (0.2, 8.0)
"""Between tries: short enough for slices to be back within 10 s of a server that is (cases.md B110)."""
_REMEMBERED: Final = 64
"""Answers of the server remembered as good enough."""


class Publisher:
    """The loop. `desired` gives the pool as it should be, None while that is not known."""

    def __init__(
        self,
        *,
        kube: Kube,
        node_name: str,
        author: Author,
        prober: Prober,
        desired: Callable[[], DesiredPool | None],
        metrics: Metrics,
        probed: Callable[[], None] = lambda: None,
        dropped: Callable[[str], None] = lambda _text: None,
        clock: Callable[[], float] = time.monotonic,
        backoff: Backoff | None = None,
    ) -> None:
        """`probed` is told when the server's features turn out different, `dropped` what it did not keep."""
        self.stored = threading.Event()
        """Set once the pool is stored as desired for the first time."""
        self.problem = "slices have not been published yet"
        """Why the pool is not as desired; empty when it is."""
        self._kube = kube
        self._node_name = node_name
        self._author = author
        self._prober = prober
        self._desired = desired
        self._metrics = metrics
        self._probed = probed
        self._dropped = dropped
        self._clock = clock
        self._backoff = backoff if backoff is not None else Backoff(*_RETRY_S)
        self._query = [("fieldSelector", f"spec.driver={names.DRIVER},spec.nodeName={node_name}")]
        self._wake = threading.Condition()
        self._due_at: float | None = 0.0
        """When to look at the stored slices next; None: not before something changes."""
        self._own: set[str] = set()
        """resourceVersions that we wrote: their events are no news."""
        self._accepted: dict[str, str] = {}
        self._generation = 0
        self._yielding_since: float | None = None
        self._left_out: tuple[str, ...] = ()
        self._reflector = Reflector(
            kube, paths.SLICES, ResourceSlice, query=self._query, name="resourceslices", backoff=Backoff(*_RETRY_S)
        )
        self._reflector.subscribe(self._on_change)

    # ---- what wakes it

    def changed(self) -> None:
        """Something that the desired pool depends on is different."""
        self._look_in(0.0)

    def _on_change(self, change: Change[ResourceSlice]) -> None:
        if change.new is not None and change.new.metadata.resource_version in self._own:
            return
        self._look_in(SETTLE_S)

    def _look_in(self, seconds: float) -> None:
        with self._wake:
            at = self._clock() + seconds
            self._due_at = at if self._due_at is None else min(self._due_at, at)
            self._wake.notify_all()

    # ---- the loop

    def run(self, stop: threading.Event) -> None:
        """Until `stop` (and `wake` after it)."""
        self._reflector.start()
        try:
            while not stop.is_set():
                self._wait(stop)
                if stop.is_set():
                    return
                self._round(stop)
        finally:
            self._reflector.stop()

    def wake(self) -> None:
        """Make the loop look at `stop`."""
        with self._wake:
            self._wake.notify_all()

    def _wait(self, stop: threading.Event) -> None:
        with self._wake:
            while not stop.is_set():
                due = self._prober.due_in_s()
                if self._due_at is not None:
                    due = min(due, self._due_at - self._clock())
                if due <= 0:
                    return
                self._wake.wait(due)

    def _round(self, stop: threading.Event) -> None:
        try:
            if self._prober.due_in_s() <= 0 and self._prober.refresh():
                self._accepted.clear()  # what was dropped then may be kept now
                self._probed()
            self._sync_if_due()
        except ApiError as err:
            self._failed(str(err), stop, err.retry_after_s)
        except AliquotError as err:
            self._failed(str(err), stop)
        except Exception as err:
            log.exception("publishing failed")
            self._failed(f"internal error ({type(err).__name__}), see the log", stop)
        else:
            self._backoff.reset()

    def _failed(self, problem: str, stop: threading.Event, at_least_s: float = 0.0) -> None:
        self._metrics.errors.labels("publish").inc()
        if problem != self.problem:
            log.warning("slices not published", error=problem)
        self.problem = problem
        self._backoff.wait(stop, at_least_s=at_least_s)
        self._look_in(0.0)

    # ---- one look

    def _sync_if_due(self) -> None:
        with self._wake:
            if self._due_at is None or self._due_at > self._clock():
                return
            self._due_at = None
        desired = self._desired()
        if desired is None:
            self.problem = "the node's cards are not known yet"
            return
        if desired.left_out != self._left_out:
            self._left_out = desired.left_out
            if desired.left_out:
                log.error("devices left out of the slices", problems=list(desired.left_out))
        for _ in range(3):
            if self._sync(desired):
                return
        raise ClusterError("slices of this node are changed by somebody else as fast as we write them; we try again")

    def _sync(self, desired: DesiredPool) -> bool:
        """List, compare, write; false when the list was out of date and has to be made again."""
        listing = self._kube.list_all(paths.SLICES, Document, query=self._query)
        stored = [item.body for item in listing.items]
        yield_to_newer = self._yielding_since is None or self._clock() - self._yielding_since < YIELD_S
        plan = plan_sync(
            stored,
            desired,
            author=self._author,
            owner=self._owner(),
            last_generation=self._generation,
            accepted=self._accepted,
            yield_to_newer=yield_to_newer,
        )
        self._generation = max(self._generation, plan.generation)
        if plan.yields_to_newer:
            if self._yielding_since is None:
                self._yielding_since = self._clock()
                log.info("slices are kept by a newer instance", looks_again_after_s=YIELD_S)
            self._look_in(YIELD_S)
        else:
            if not plan.empty and not self._write(plan):
                return False
            self._yielding_since = None  # after a write too: should the newer one differ again, it is left alone again
        self._metrics.slices.set(len(desired.devices))
        self._metrics.generation.set(self._generation)
        self.problem = ""
        self.stored.set()
        return True

    def _write(self, plan: SyncPlan) -> bool:
        """Make the writes in their order; false when somebody was faster."""
        try:
            for item in plan.deletes:
                meta = item["metadata"]
                with self._counted("delete"):
                    self._kube.delete(
                        paths.slice_(meta["name"]), uid=meta["uid"], resource_version=meta["resourceVersion"]
                    )
            for item in plan.updates:
                with self._counted("update"):
                    got = self._kube.replace(paths.slice_(item["metadata"]["name"]), item)
                self._check(item, got)
            for item in plan.creates:
                with self._counted("create"):
                    got = self._kube.create(paths.SLICES, item)
                self._check(item, got)
        except AlreadyExists as err:
            if not self._ours(plan):
                raise ClusterError(
                    f"a ResourceSlice named as ours is there but belongs to another driver or node: {err}; remove it"
                ) from err
            return False
        except (Conflict, NotFound):
            return False
        log.info(
            "slices published",
            generation=plan.generation,
            created=len(plan.creates),
            updated=len(plan.updates),
            deleted=len(plan.deletes),
        )
        return True

    @contextlib.contextmanager
    def _counted(self, verb: str) -> Iterator[None]:
        try:
            yield
        except ApiError:
            self._metrics.writes.labels(verb, "error").inc()
            raise
        self._metrics.writes.labels(verb, "ok").inc()

    def _ours(self, plan: SyncPlan) -> bool:
        """Whether what is in the way of a create is a slice of ours that the list did not have yet."""
        for item in plan.creates:
            try:
                there = self._kube.get_json(paths.slice_(item["metadata"]["name"]))
            except NotFound:
                continue
            if there["spec"].get("driver") != names.DRIVER or there["spec"].get("nodeName") != self._node_name:
                return False
        return True

    def _check(self, sent: dict[str, Any], got: dict[str, Any]) -> None:
        """Remember what the server made of it, and say so when that is something else."""
        if len(self._own) > _REMEMBERED:
            self._own.clear()
        self._own.add(got["metadata"]["resourceVersion"])
        wanted, kept = fingerprint(sent["spec"]), fingerprint(got["spec"])
        if wanted == kept:
            return
        if len(self._accepted) > _REMEMBERED:
            self._accepted.clear()
        self._accepted[wanted] = kept
        text = (
            f"the API server did not keep all of slice {got['metadata']['name']}: {_gates(sent['spec'], got['spec'])}"
        )
        log.warning("fields dropped", slice=got["metadata"]["name"], gates=_gates(sent["spec"], got["spec"]))
        self._metrics.dropped.inc()
        self._dropped(text)
        self._prober.saw_dropped()

    def _owner(self) -> dict[str, Any] | None:
        """Reference to the Node, so that slices go with it; None where we may not read it.

        Asked for at every look, for a Node that was deleted and made anew has another UID, and the old reference
        would have the slices collected again and again. Looks are rare.
        """
        try:
            node = self._kube.get(paths.node(self._node_name), Node)
        except Forbidden as err:
            log.warning("slices have no owner and stay when the node goes", error=str(err))
            return None
        except NotFound as err:
            raise ClusterError(
                f"there is no Node {self._node_name}; check --node-name (spec.nodeName of the pod), or wait for "
                "kubelet to register the node"
            ) from err
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "name": self._node_name,
            "uid": node.metadata.uid,
            "controller": True,
        }


def _gates(sent: dict[str, Any], got: dict[str, Any]) -> str:
    """The feature gates that are probably off, by what is missing."""
    pairs = list(zip(sent["devices"], got.get("devices") or [], strict=False))
    missing = []
    if any(a.get("allowMultipleAllocations") and not b.get("allowMultipleAllocations") for a, b in pairs):
        missing.append("DRAConsumableCapacity")
    if any(a.get("taints") and not b.get("taints") for a, b in pairs):
        missing.append("DRADeviceTaints")
    return f"feature gate {', '.join(missing)} is probably off" if missing else "other fields differ from what was sent"
