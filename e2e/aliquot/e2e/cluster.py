# SPDX-License-Identifier: Apache-2.0
"""What a story needs of a cluster, whoever provides it.

Never says how a cluster comes to be. Invariant: a story written against this runs on every provider, or is skipped
with the provider's reason where it touches the inside of nodes.
"""

from __future__ import annotations

import abc
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aliquot.api.errors import ClusterError
from aliquot.e2e.api import Api, Object, eventually


@dataclass(frozen=True)
class Output:
    """What a command in a container left."""

    status: int
    stdout: str
    stderr: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Those lines of its output that are JSON objects, as the workload program prints them."""
        return [json.loads(line) for line in self.stdout.splitlines() if line.startswith("{")]


class Cluster(abc.ABC):
    """A running cluster whose nodes have GPUs, real or fake."""

    provider: str
    minor: str
    installed: Any = None
    """The `install.Settings` that Aliquot was put in with."""

    @property
    @abc.abstractmethod
    def api(self) -> Api:
        """The administrator's client."""

    @property
    @abc.abstractmethod
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes that have cards."""

    @abc.abstractmethod
    def kubectl_argv(self, arguments: Sequence[str]) -> list[str]:
        """The command line of kubectl for this cluster."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Ends what this provider started; nothing for a cluster that was there before."""

    def kubectl(self, *arguments: str, stdin: str = "", timeout_s: float = 60.0) -> Output:
        """Runs kubectl. Raises `ClusterError` when it does not end in time."""
        try:
            done = subprocess.run(
                self.kubectl_argv(arguments), input=stdin, capture_output=True, text=True, timeout=timeout_s
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"kubectl {' '.join(arguments)} did not end within {timeout_s:g} s") from error
        return Output(done.returncode, done.stdout, done.stderr)

    def exec(
        self, namespace: str, pod: str, argv: Sequence[str], *, container: str = "", timeout_s: float = 60.0
    ) -> Output:
        """Runs a command in a container and returns what it said and how it ended."""
        where = ["--container", container] if container else []
        return self.kubectl("exec", "--namespace", namespace, pod, *where, "--", *argv, timeout_s=timeout_s)

    def logs(self, namespace: str, pod: str, *, container: str = "") -> str:
        where = ["--container", container] if container else []
        return self.kubectl("logs", "--namespace", namespace, pod, *where).stdout

    def apply(self, objects: Sequence[Object], namespace: str = "") -> None:
        """Server-side apply of every object, in order."""
        for obj in objects:
            self.api.apply(obj, namespace)

    def wait_pod(self, namespace: str, name: str, phase: str = "Running", timeout_s: float = 60.0) -> Object:
        """The pod once it is in that phase and, when Running, ready.

        Raises `ClusterError` with the pod's conditions and latest events after `timeout_s`, or once it has ended in
        another phase.
        """
        try:
            found = eventually(lambda: self._pod_in(namespace, name, phase), timeout_s, f"pod {name} {phase}")
        except ClusterError as error:
            raise ClusterError(f"{error}\n{self.explain(namespace, name)}") from error
        if found["status"]["phase"] != phase:
            raise ClusterError(f"pod {name} ended before it was {phase}\n{self.explain(namespace, name)}")
        return found

    def _pod_in(self, namespace: str, name: str, phase: str) -> Object | None:
        """The pod once it is in that phase, or can never be."""
        pod = self.api.get("v1", "Pod", name, namespace)
        status = pod.get("status", {})
        if status.get("phase") in {"Succeeded", "Failed"}:
            return pod
        if status.get("phase") != phase:
            return None
        if phase == "Running" and not all(c.get("ready") for c in status.get("containerStatuses", [])):
            return None
        return pod

    def wait_gone(self, namespace: str, name: str, timeout_s: float = 60.0) -> None:
        """Until there is no such pod."""
        eventually(lambda: self.api.find("v1", "Pod", name, namespace) is None, timeout_s, f"end of pod {name}")

    def events(self, namespace: str, name: str) -> list[Object]:
        """Events about an object of that name, oldest first."""
        found = self.api.list("v1", "Event", namespace, fieldSelector=f"involvedObject.name={name}")
        return sorted(found, key=lambda e: str(e.get("lastTimestamp") or e.get("eventTime") or ""))

    def explain(self, namespace: str, name: str) -> str:
        """Conditions and events of a pod as text, for an error message."""
        pod = self.api.find("v1", "Pod", name, namespace)
        if pod is None:
            return f"there is no pod {namespace}/{name}"
        status = pod.get("status", {})
        lines = [f"pod {name}: {status.get('phase')} on {pod['spec'].get('nodeName', 'no node')}"]
        lines += [f"  {c['type']}={c['status']} {c.get('message', '')}" for c in status.get("conditions", [])]
        lines += [f"  {json.dumps(c.get('state'))}" for c in status.get("containerStatuses", [])]
        lines += [f"  event {e.get('reason')}: {e.get('message')}" for e in self.events(namespace, name)[-6:]]
        return "\n".join(lines)


def namespace_object(name: str, labels: Mapping[str, str] | None = None) -> Object:
    """A namespace to create."""
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": dict(labels or {})}}
