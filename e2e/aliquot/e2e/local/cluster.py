# SPDX-License-Identifier: Apache-2.0
"""Provider `local`: a cluster of one or more nodes on this machine, ready in seconds, gone without a trace.

Needs root, runc and the CNI plugins. Invariant: whatever ends this process, everything it started ends too and the
next start sweeps the two things that lie outside (a folder and empty cgroups).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from aliquot.api.errors import ClusterError
from aliquot.e2e.api import Api
from aliquot.e2e.cluster import Cluster
from aliquot.e2e.control_plane import ControlPlane, Options
from aliquot.e2e.faults import FaultProxy
from aliquot.e2e.images.recipes import Image
from aliquot.e2e.local.node import Node, find_runtime
from aliquot.e2e.local.run import Run, start_run
from aliquot.e2e.local.space import Space, make_space, require_root
from aliquot.e2e.process import wait_until
from aliquot.e2e.toolchain import DEFAULT_MINOR, locate

READY_TIMEOUT_S: Final = 120.0

# The Node authorizer learns of a binding a moment after kubelet does; a kubelet that is refused its claim in between
# tries again only after half a minute or more. That is Kubernetes' own matter and no story of ours, so kubelets here
# may read claims by RBAC as well. Our driver reads them with its own identity.
_CLAIM_READERS: Final = (
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "aliquot-e2e:claims-of-nodes"},
        "rules": [
            {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["get", "list", "watch"]}
        ],
    },
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "aliquot-e2e:claims-of-nodes"},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": "aliquot-e2e:claims-of-nodes",
        },
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "system:nodes"}],
    },
)


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """How a local cluster is to be made."""

    minor: str = DEFAULT_MINOR
    nodes: Sequence[str] = ("node-a",)
    feature_gates: Mapping[str, bool] = field(default_factory=dict)
    runtime_config: Mapping[str, bool] = field(default_factory=dict)
    scheduler_config: Mapping[str, object] = field(default_factory=dict)
    detached: bool = False
    """Leave it up when this process ends."""


class LocalCluster(Cluster):
    """One cluster on this machine. `start` returns when every node is Ready and has the images."""

    provider = "local"

    def __init__(
        self,
        options: LocalOptions,
        images: Sequence[Image],
        *,
        prepare_node: Callable[[Node], None] = lambda _: None,
        keep_logs: Path | None = None,
    ) -> None:
        """`prepare_node` furnishes a node before its kubelet starts, for example with cards."""
        require_root()
        self.minor = options.minor
        self.options = options
        self._images = list(images)
        self._prepare = prepare_node
        self._keep_logs = keep_logs
        self._kubectl = locate("kubectl", options.minor)
        self._runtime = find_runtime()
        self.run: Run | None = None
        self.space: Space | None = None
        self.plane: ControlPlane | None = None
        self._nodes: dict[str, Node] = {}
        self.fault_proxy: FaultProxy | None = None
        """Ends with the cluster, where one was put in."""

    @property
    def api(self) -> Api:
        return self._running().api

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self.options.nodes)

    def node(self, name: str) -> Node:
        """The inside of one node."""
        return self._nodes[name]

    @property
    def kubeconfig(self) -> Path:
        return self._running().kubeconfig

    def kubectl_argv(self, arguments: Sequence[str]) -> list[str]:
        plane = self._running()
        # kubectl caches discovery under HOME; the cluster's folder goes away with the cluster.
        home = f"HOME={plane.directory}"
        return plane.place.argv(["env", home, self._kubectl, f"--kubeconfig={plane.kubeconfig}", *arguments])

    def start(self) -> Self:
        """Brings everything up. Raises `ClusterError`, and leaves nothing, when a part does not come."""
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def _start(self) -> None:
        options = self.options
        self.run = start_run()
        self.space = make_space(self.run, options.nodes, detached=options.detached)
        self.plane = ControlPlane(
            self.run.directory / "control-plane",
            Options(
                minor=options.minor,
                feature_gates=options.feature_gates,
                runtime_config=options.runtime_config,
                scheduler_config=options.scheduler_config,
                scheduler=True,
                controller_manager=True,
                hosts=tuple(options.nodes),
            ),
            self.space.inside,
        )
        for index, name in enumerate(options.nodes):
            self._nodes[name] = Node(name, index, self.space, self.plane, self._runtime)
        # Everything that does not wait for something else starts at once.
        self.plane.etcd.start()
        self.plane.server.start()
        for node in self._nodes.values():
            node.start_containerd()
        for node in self._nodes.values():
            self._prepare(node)
        imports = []
        for node in self._nodes.values():
            node.wait_containerd()
            imports.append(node.begin_import(self._images))
        self.plane.wait_ready()
        for obj in _CLAIM_READERS:
            self.api.apply(obj)
        for part in (self.plane.scheduler, self.plane.controllers):
            assert part is not None
            part.start()
        for node in self._nodes.values():
            node.start_kubelet()
        for node, process in zip(self._nodes.values(), imports, strict=True):
            if process.wait(READY_TIMEOUT_S) != 0:
                raise ClusterError(f"the images could not be loaded on {node.name}; see {self.run.directory}/log")
        self.wait_nodes_ready()
        wait_until(
            lambda: self.api.find("v1", "ServiceAccount", "default", "default") is not None,
            READY_TIMEOUT_S,
            "the default service account",
            *self.plane.servers,
        )

    def wait_nodes_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Until every node says Ready."""

        def ready() -> bool:
            states = {n["metadata"]["name"]: _is_ready(n) for n in self.api.list("v1", "Node")}
            return all(states.get(name) for name in self.options.nodes)

        kubelets = [node.kubelet for node in self._nodes.values()]
        try:
            wait_until(ready, timeout_s, f"nodes {', '.join(self.options.nodes)} Ready", *kubelets)
        except ClusterError as error:
            if "inotify" in str(error) or "too many open files" in str(error):
                error.add_note(
                    "The kernel's limit of inotify instances is reached (about 25 for each cluster of two nodes): run "
                    "fewer clusters at once, or raise it with `sysctl fs.inotify.max_user_instances=1024`."
                )
            raise

    def stop(self) -> None:
        if self.fault_proxy is not None:
            self.fault_proxy.stop()
            self.fault_proxy = None
        for node in self._nodes.values():
            node.stop()
        self._nodes.clear()
        if self.plane is not None:
            self.plane.stop()
            self.plane = None
        if self.space is not None:
            self.space.close()
            self.space = None
        if self.run is not None:
            if self._keep_logs is not None:
                shutil.copytree(self.run.directory / "log", self._keep_logs, dirs_exist_ok=True)
                shutil.copytree(self.run.directory / "control-plane" / "log", self._keep_logs, dirs_exist_ok=True)
            os.close(self.run.lock)
            self.run.remove()
            self.run = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _running(self) -> ControlPlane:
        if self.plane is None:
            raise ClusterError("the local cluster is not running")
        return self.plane


def _is_ready(node: Mapping[str, object]) -> bool:
    status = node.get("status")
    conditions = status.get("conditions", []) if isinstance(status, Mapping) else []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
