# SPDX-License-Identifier: Apache-2.0
"""Puts Aliquot into a cluster: the plain manifests of `deploy/`, with the cluster's own settings.

Never edits what the manifests say about rights, paths or processes; only the two config maps differ, and the fake
driver's state folder is mounted where there is one. Invariant: what runs in a story is what an operator would apply.
"""

from __future__ import annotations

import copy
import datetime as dt
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from aliquot.api import names
from aliquot.api.errors import ClusterError
from aliquot.e2e.api import RESOURCE_API, Object, eventually, load_manifests
from aliquot.e2e.cluster import Cluster
from aliquot.e2e.images.recipes import ROOT
from aliquot.e2e.process import find_processes

NAMESPACE: Final = "aliquot-system"
DRIVER: Final = "aliquot-dra-driver"
FAKE_STATE: Final = "/run/fakegpu"
"""Where the fake driver keeps its configuration and state, on nodes and in containers."""
_SELECTOR: Final = "app.kubernetes.io/component=dra-driver"
FAKE_DRIVER_ROOT: Final = "/run/nvidia/driver"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What differs from the manifests as they are."""

    node_config: Mapping[str, Any] = field(default_factory=lambda: {"defaults": {"mode": "auto"}})
    """Content of the driver's configuration file."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further variables, such as ALIQUOT_LOG_LEVEL."""
    fake: bool = True
    """The nodes have the fake driver at `FAKE_DRIVER_ROOT`, its state at `FAKE_STATE`."""
    image: str = ""
    step_killer: bool = False
    """Start the driver through `step_killer.py`, so that a story can have it killed at a step."""


def manifests(settings: Settings) -> list[Object]:
    """The objects to apply, in order."""
    objects = load_manifests(*sorted((ROOT / "deploy").glob("*.yaml")))
    return [_adapt(copy.deepcopy(obj), settings) for obj in objects]


def _adapt(obj: Object, settings: Settings) -> Object:
    name = obj["metadata"]["name"]
    if obj["kind"] == "ConfigMap" and name == DRIVER:
        obj["data"].update(settings.environment)
        if settings.fake:
            obj["data"]["DRIVER_ROOT"] = FAKE_DRIVER_ROOT
            obj["data"]["ALIQUOT_EXTRA_EDITS"] = "/etc/aliquot/extra-edits.json"
    elif obj["kind"] == "ConfigMap" and name == f"{DRIVER}-files":
        obj["data"]["config.yaml"] = yaml.safe_dump(dict(settings.node_config))
        if settings.fake:
            mount = {"hostPath": FAKE_STATE, "containerPath": FAKE_STATE, "options": ["rw", "nosuid", "nodev", "rbind"]}
            obj["data"]["extra-edits.json"] = json.dumps({"mounts": [mount]})
        if settings.step_killer:
            obj["data"]["step_killer.py"] = (Path(__file__).parent / "step_killer.py").read_text()
    elif obj["kind"] == "DaemonSet":
        spec = obj["spec"]["template"]["spec"]
        if settings.step_killer:
            spec["containers"][0]["command"] = ["python3", "/etc/aliquot/step_killer.py"]
        if settings.image:
            spec["containers"][0]["image"] = settings.image
        if settings.fake:
            spec["volumes"].append({"name": "fake", "hostPath": {"path": FAKE_STATE, "type": "Directory"}})
            spec["containers"][0]["volumeMounts"].append({"name": "fake", "mountPath": FAKE_STATE})
    return obj


def install(cluster: Cluster, settings: Settings, timeout_s: float = 90.0) -> None:
    """Applies everything and waits until each node's driver is ready and its slices are stored."""
    cluster.apply(manifests(settings))
    cluster.installed = settings
    wait_ready(cluster, timeout_s)


class Rollout:
    """A restart of the DaemonSet that goes on while the caller does something else."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._before = {p["metadata"]["uid"] for p in driver_pods(cluster)}

    def done(self) -> bool:
        """Whether every node has a new instance, ready, and no old one is left, not even on its way out."""
        found = self._cluster.api.list("v1", "Pod", NAMESPACE, labelSelector=_SELECTOR)
        if self._before & {p["metadata"]["uid"] for p in found}:
            return False
        return _all_ready(self._cluster)


def begin_restart(cluster: Cluster) -> Rollout:
    """Rolls the DaemonSet as `kubectl rollout restart` does."""
    rollout = Rollout(cluster)
    stamp = {"kubectl.kubernetes.io/restartedAt": dt.datetime.now(dt.UTC).isoformat()}
    cluster.api.request(
        "PATCH",
        f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/{DRIVER}",
        body={"spec": {"template": {"metadata": {"annotations": stamp}}}},
        content_type="application/strategic-merge-patch+json",
    )
    return rollout


def restart(cluster: Cluster, timeout_s: float = 120.0) -> None:
    """The same, and waits for it."""
    _or_logs(cluster, begin_restart(cluster).done, timeout_s, "a new driver on every node")


def wait_ready(cluster: Cluster, timeout_s: float = 90.0) -> None:
    """Until each node's driver is ready and its slices are stored.

    Raises `ClusterError` with the end of a driver's log.
    """
    _or_logs(cluster, lambda: _all_ready(cluster), timeout_s, "the driver on every node")


def _or_logs(cluster: Cluster, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Waits; where it is in vain, the error carries the end of the drivers' logs."""
    try:
        eventually(condition, timeout_s, what)
    except ClusterError as error:
        raise ClusterError(f"{error}\n{_driver_logs(cluster)}") from error


def _all_ready(cluster: Cluster) -> bool:
    pods = driver_pods(cluster)
    published = {s["spec"].get("nodeName") for s in slices(cluster)}
    return all(
        name in published and any(_ready(p) for p in pods if p["spec"].get("nodeName") == name)
        for name in cluster.nodes
    )


def driver_pods(cluster: Cluster) -> list[Object]:
    """The pods of the DaemonSet that are not on their way out."""
    found = cluster.api.list("v1", "Pod", NAMESPACE, labelSelector=_SELECTOR)
    return [p for p in found if "deletionTimestamp" not in p["metadata"]]


def driver_pod(cluster: Cluster, node: str) -> Object:
    """The driver's pod on a node."""
    return next(p for p in driver_pods(cluster) if p["spec"].get("nodeName") == node)


def driver_pid(cluster: Cluster, node: str) -> int:
    """PID of a local node's driver as this process sees it."""
    uid = driver_pod(cluster, node)["metadata"]["uid"]

    def look() -> int | None:
        found = find_processes("aliquot", {"POD_UID": uid})
        return found[0] if found else None

    return eventually(look, 30, f"the driver's process on {node}")


def slices(cluster: Cluster) -> list[Object]:
    """Our stored slices."""
    return cluster.api.list(RESOURCE_API, "ResourceSlice", fieldSelector=f"spec.driver={names.DRIVER}")


def devices(cluster: Cluster, node: str = "") -> list[Object]:
    """Every published device, of one node where it is named."""
    return [d for s in slices(cluster) if not node or s["spec"].get("nodeName") == node for d in s["spec"]["devices"]]


def _ready(pod: Object) -> bool:
    conditions: Sequence[Mapping[str, str]] = pod.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _driver_logs(cluster: Cluster) -> str:
    parts = []
    for pod in driver_pods(cluster):
        name = pod["metadata"]["name"]
        log = cluster.logs(NAMESPACE, name)
        told = [line for line in log.splitlines() if '"event":"request"' not in line]  # probes, every second
        parts.append(cluster.explain(NAMESPACE, name) + "\nits log ends:\n" + "\n".join(told[-25:]))
    return "\n".join(parts) or "there is no pod of the driver"
