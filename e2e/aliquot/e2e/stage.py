# SPDX-License-Identifier: Apache-2.0
"""One story's place in a cluster: a namespace, the pods and claims in it, and what they see.

Acts as a user would (objects through the API server, commands in containers) and never looks into nodes. Invariant:
after `close` no pod and no claim of the story exists, so shares that are still held afterwards are a defect.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from aliquot.api import names
from aliquot.api.errors import ClusterError
from aliquot.api.quantity import parse
from aliquot.e2e.api import RESOURCE_API, Object, eventually, tolerating
from aliquot.e2e.cluster import Cluster, Output, namespace_object

GIB: Final = 1 << 30
MIB: Final = 1 << 20
_OWNED: Final = ("Pod", "ResourceClaim", "ResourceClaimTemplate")


@dataclass(frozen=True)
class Allocated:
    """One result of a claim's allocation, with the memory that it stands for."""

    claim: str
    claim_uid: str
    request: str
    pool: str
    device: str
    share_id: str
    memory_bytes: int

    @property
    def grant(self) -> str:
        """Name of the grant and of the CDI device (design.md 5)."""
        name = f"c-{self.claim_uid}-{self.device}"
        return f"{name}-{self.share_id}" if self.share_id else name


class Stage:
    """A namespace of one story. Use as a context manager."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.namespace = name

    def open(self) -> Self:
        with tolerating(409):
            self.cluster.api.create(namespace_object(self.namespace))
        api = self.cluster.api
        eventually(
            lambda: api.find("v1", "ServiceAccount", "default", self.namespace), 30, "the default service account"
        )
        return self

    def close(self) -> None:
        """Deletes pods, claims and templates, and waits until they are gone."""
        api = self.cluster.api
        for version, kind in (("v1", "Pod"), (RESOURCE_API, "ResourceClaimTemplate"), (RESOURCE_API, "ResourceClaim")):
            for obj in api.list(version, kind, self.namespace):
                api.delete(version, kind, obj["metadata"]["name"], self.namespace, grace_s=1 if kind == "Pod" else None)
            eventually(lambda v=version, k=kind: not api.list(v, k, self.namespace), 90, f"end of every {kind}")  # type: ignore[misc]
        api.delete("v1", "Namespace", self.namespace)

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def create(self, *objects: Object) -> None:
        """Creates objects in this namespace."""
        for obj in objects:
            self.cluster.api.create(obj, self.namespace)

    def delete_pod(self, name: str, *, wait: bool = True) -> None:
        self.cluster.api.delete("v1", "Pod", name, self.namespace)
        if wait:
            self.cluster.wait_gone(self.namespace, name)

    def running(self, *pods: str, timeout_s: float = 120.0) -> None:
        """Waits until these pods run."""
        for pod in pods:
            self.cluster.wait_pod(self.namespace, pod, "Running", timeout_s)

    def refusal(self, pod: str, timeout_s: float = 30.0) -> str:
        """What the scheduler says about a pod that it cannot place."""

        def look() -> str | None:
            status = self.cluster.api.get("v1", "Pod", pod, self.namespace).get("status", {})
            for condition in status.get("conditions", []):
                if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable":
                    return str(condition.get("message", ""))
            return None

        return eventually(look, timeout_s, f"a refusal of pod {pod}")

    def event(self, pod: str, reason: str, timeout_s: float = 60.0) -> str:
        """The text of the pod's latest event with that reason."""

        def look() -> str | None:
            found = [e for e in self.cluster.events(self.namespace, pod) if e.get("reason") == reason]
            return str(found[-1].get("message", "")) if found else None

        return eventually(look, timeout_s, f"event {reason} of pod {pod}")

    def node_of(self, pod: str) -> str:
        return str(self.cluster.api.get("v1", "Pod", pod, self.namespace)["spec"]["nodeName"])

    def allocations(self, pod: str) -> list[Allocated]:
        """What the scheduler gave to the claims of a pod, in order, with the memory each result stands for."""
        status = self.cluster.api.get("v1", "Pod", pod, self.namespace)["status"]
        spec = self.cluster.api.get("v1", "Pod", pod, self.namespace)["spec"]
        generated = {s["name"]: s.get("resourceClaimName", "") for s in status.get("resourceClaimStatuses", [])}
        found = []
        for entry in spec.get("resourceClaims", []):
            name = entry.get("resourceClaimName") or generated.get(entry["name"], "")
            if name:
                found += self.claim_allocations(name)
        return found

    def claim_allocations(self, name: str) -> list[Allocated]:
        """What the scheduler gave to one claim."""
        claim = self.cluster.api.get(RESOURCE_API, "ResourceClaim", name, self.namespace)
        results = claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", [])
        return [
            Allocated(
                claim=name,
                claim_uid=claim["metadata"]["uid"],
                request=r["request"],
                pool=r["pool"],
                device=r["device"],
                share_id=r.get("shareID", ""),
                memory_bytes=self._memory(r),
            )
            for r in results
        ]

    def _memory(self, result: Any) -> int:
        consumed = result.get("consumedCapacity", {}).get(names.CAPACITY_MEMORY)
        if consumed is not None:
            return parse(consumed)
        api = self.cluster.api
        for piece in api.list(RESOURCE_API, "ResourceSlice", fieldSelector=f"spec.driver={names.DRIVER}"):
            for device in piece["spec"].get("devices", []):
                if device["name"] == result["device"] and piece["spec"]["pool"]["name"] == result["pool"]:
                    return parse(device["capacity"][names.CAPACITY_MEMORY]["value"])
        raise ClusterError(f"no slice has the allocated device {result['pool']}/{result['device']}")

    def exec(self, pod: str, *argv: str, container: str = "", timeout_s: float = 60.0) -> Output:
        """Runs a command in a pod's container."""
        return self.cluster.exec(self.namespace, pod, argv, container=container, timeout_s=timeout_s)

    def show(self, pod: str, *, container: str = "") -> list[dict[str, Any]]:
        """The cards that a CUDA program in the pod sees: name, uuid, total, free."""
        output = self.exec(pod, "workload", "show", container=container)
        lines = output.lines
        if output.status != 0 or not lines:
            raise ClusterError(f"workload show in {pod} ended with {output.status}: {output.stdout}{output.stderr}")
        devices: list[dict[str, Any]] = lines[-1]["devices"]
        return devices

    def allocate(self, pod: str, *sizes: str, container: str = "") -> list[dict[str, Any]]:
        """Takes memory in a fresh process that then ends; one answer per size: asked, code, result, free, total."""
        output = self.exec(pod, "workload", "alloc", *sizes, container=container)
        answers = [line for line in output.lines if line["event"] == "alloc"]
        if not answers:
            raise ClusterError(f"workload alloc in {pod} ended with {output.status}: {output.stdout}{output.stderr}")
        return answers

    def hold(self, pod: str, *sizes: str, container: str = "") -> int:
        """Takes memory in a background process of the container that keeps it; its PID in there.

        Raises `ClusterError` when it was refused.
        """
        script = (
            'f=/tmp/hold.$$; workload alloc --hold "$@" >$f 2>&1 & p=$!; '
            "while kill -0 $p 2>/dev/null && ! grep -q holding $f; do usleep 5000; done; cat $f; echo pid $p"
        )
        output = self.exec(pod, "sh", "-c", script, "hold", *sizes, container=container)
        found = re.search(r"^pid (\d+)$", output.stdout, re.MULTILINE)
        if found is None or any(line.get("code") for line in output.lines):
            raise ClusterError(f"holding {' '.join(sizes)} in {pod} failed: {output.stdout}{output.stderr}")
        return int(found.group(1))

    def smi(self, pod: str, *arguments: str, container: str = "") -> str:
        """The output of nvidia-smi in a pod."""
        return self.exec(pod, "nvidia-smi", *arguments, container=container).stdout

    def wait_pods(self, pods: Sequence[str], timeout_s: float = 120.0) -> None:
        """Until all of many pods run, with one list per look."""

        def look() -> bool:
            phases = {
                p["metadata"]["name"]: p.get("status", {}).get("phase")
                for p in self.cluster.api.list("v1", "Pod", self.namespace)
            }
            return all(phases.get(name) == "Running" for name in pods)

        try:
            eventually(look, timeout_s, f"{len(pods)} pods running", every_s=0.1)
        except ClusterError as error:
            late = next(
                p["metadata"]["name"]
                for p in self.cluster.api.list("v1", "Pod", self.namespace)
                if p.get("status", {}).get("phase") != "Running"
            )
            raise ClusterError(f"{error}\n{self.cluster.explain(self.namespace, late)}") from error
