# SPDX-License-Identifier: Apache-2.0
"""What the API server keeps of a ResourceSlice, found by asking it: dry runs whose echo is looked at.

Never stores anything and never concludes from a version: a gate can be switched either way, and a server drops the
fields of a disabled one without a word (dra.md 2.2, 7.6). Invariant: an answer that says nothing (refused, busy,
unreachable) never counts as "kept".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from aliquot.api import names
from aliquot.api.errors import ClusterError
from aliquot.api.log import get_logger
from aliquot.dra.layout import Features, Kept
from aliquot.kube import paths
from aliquot.kube.client import Kube
from aliquot.kube.errors import Forbidden, Invalid, NotFound
from aliquot.kube.objects import ServerVersion

log = get_logger(__name__)

REPEAT_S: Final = 3600.0
"""A gate can change without the version changing."""
VERSION_S: Final = 300.0
"""How often the version is looked at, which only reads."""
OLDEST: Final = "1.34"

_DRY_RUN: Final = (("dryRun", "All"),)


@dataclass(frozen=True, slots=True)
class _Question:
    """A slice with one optional field, and how to see whether it was kept."""

    field: str
    spec: Mapping[str, Any]
    kept: Callable[[Mapping[str, Any]], bool]


def _device(**more: Any) -> dict[str, Any]:
    return {"devices": [{"name": "probe", **more}]}


def _first(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    devices = spec.get("devices") or [{}]
    first: Mapping[str, Any] = devices[0]
    return first


_POLICY: Final = {"default": "1", "validRange": {"min": "1", "step": "1", "max": "4"}}
_QUESTIONS: Final = (
    _Question(
        "consumable_capacity",
        _device(allowMultipleAllocations=True, capacity={"slots": {"value": "4", "requestPolicy": _POLICY}}),
        lambda spec: bool(
            _first(spec).get("allowMultipleAllocations")
            and _first(spec).get("capacity", {}).get("slots", {}).get("requestPolicy")
        ),
    ),
    _Question(
        "taints",
        _device(taints=[{"key": f"{names.DRIVER}/probe", "value": "true", "effect": "NoSchedule"}]),
        lambda spec: bool(_first(spec).get("taints")),
    ),
    _Question(
        "counters",
        {"sharedCounters": [{"name": "probe", "counters": {"part": {"value": "1"}}}]},
        lambda spec: bool(spec.get("sharedCounters")),
    ),
)


def probe(kube: Kube, *, node_name: str) -> Features:
    """Ask for every optional field.

    Raises `ClusterError` when the server cannot be asked now, or does not serve the API at all.
    """
    version = kube.get(paths.VERSION, ServerVersion).git_version
    found = {question.field: _ask(kube, node_name, question, version) for question in _QUESTIONS}
    return Features(server_version=version, **found)


def _ask(kube: Kube, node_name: str, question: _Question, version: str) -> Kept:
    body = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"generateName": "aliquot-probe-"},
        "spec": {
            "driver": names.DRIVER,
            "nodeName": node_name,
            "pool": {"name": f"{node_name}/probe", "generation": 1, "resourceSliceCount": 1},
            **question.spec,
        },
    }
    try:
        echo = kube.create(paths.SLICES, body, query=_DRY_RUN)
    except NotFound as err:
        raise ClusterError(
            f"the API server ({version or 'unknown version'}) does not serve {paths.RESOURCE_GROUP}/v1; this driver "
            f"needs Kubernetes {OLDEST} or later"
        ) from err
    except (Invalid, Forbidden) as err:
        log.warning("optional field not found out", field=question.field, error=str(err))
        return Kept.REFUSED
    return Kept.YES if question.kept(echo.get("spec", {})) else Kept.DROPPED


class Prober:
    """Remembers the answer, and asks again when the server's version changed, or after an hour."""

    def __init__(self, kube: Kube, *, node_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.features = Features()
        self._kube = kube
        self._node_name = node_name
        self._clock = clock
        self._asked_at: float | None = None
        self._version_at = 0.0

    def due_in_s(self) -> float:
        """Seconds until there is something to ask; 0 or less: now."""
        if self._asked_at is None:
            return 0.0
        now = self._clock()
        return min(self._asked_at + REPEAT_S - now, self._version_at + VERSION_S - now)

    def refresh(self) -> bool:
        """Ask what is due; true when the answer differs from before. Raises `ClusterError`."""
        now = self._clock()
        if self._asked_at is not None and now - self._asked_at < REPEAT_S:
            version = self._kube.get(paths.VERSION, ServerVersion).git_version
            self._version_at = now
            if version == self.features.server_version:
                return False
            log.info("api server changed", before=self.features.server_version, now=version)
        found = _known_better(probe(self._kube, node_name=self._node_name), self.features)
        self._asked_at = self._version_at = now
        if found == self.features:
            return False
        log.info(
            "api server probed",
            version=found.server_version,
            consumable_capacity=found.consumable_capacity.value,
            taints=found.taints.value,
            counters=found.counters.value,
        )
        self.features = found
        return True

    def saw_dropped(self) -> None:
        """A stored slice lacked what was sent: ask anew at the next opportunity."""
        self._asked_at = None


def _known_better(new: Features, old: Features) -> Features:
    """The new answer, but what was refused this time stays as it was answered before."""
    if new.server_version != old.server_version:
        return new

    def better(now: Kept, before: Kept) -> Kept:
        return before if now is Kept.REFUSED and before in (Kept.YES, Kept.DROPPED) else now

    return Features(
        consumable_capacity=better(new.consumable_capacity, old.consumable_capacity),
        taints=better(new.taints, old.taints),
        counters=better(new.counters, old.counters),
        server_version=new.server_version,
    )
