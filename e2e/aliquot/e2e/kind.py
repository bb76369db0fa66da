# SPDX-License-Identifier: Apache-2.0
"""Provider `kind`: the same cluster in Docker containers, where there is Docker.

Never used when there is none: a docker client without a daemon counts as none. Invariant: nodes look like those of
`local` to everything above: the fake driver's root and state at the same paths, images loaded, label set.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from aliquot.api.errors import ClusterError, SettingsError, foreign
from aliquot.e2e.api import Api, Object, eventually
from aliquot.e2e.cluster import Cluster
from aliquot.e2e.images.recipes import Image
from aliquot.e2e.install import FAKE_DRIVER_ROOT, FAKE_STATE
from aliquot.e2e.toolchain import DEFAULT_MINOR, kubernetes, locate

_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, kw_only=True)
class KindOptions:
    """How a kind cluster is to be made. `node_folders` maps each worker to its folder with `driver/` and `state/`."""

    minor: str = DEFAULT_MINOR
    node_folders: Mapping[str, Path]
    feature_gates: Mapping[str, bool] = field(default_factory=dict)
    name: str = "aliquot"

    @property
    def image(self) -> str:
        """The node image of kind's own release; not every patch has one, so it can be overridden by kind's flag."""
        return f"kindest/node:{kubernetes(self.minor).version}"


def config(options: KindOptions) -> Object:
    """Kind's configuration file, as an object: one control plane, one worker per folder."""
    workers = [
        {
            "role": "worker",
            "labels": {"aliquot.dev/gpu": "true"},
            "extraMounts": [
                {"hostPath": str(folder / "driver"), "containerPath": FAKE_DRIVER_ROOT},
                {"hostPath": str(folder / "state"), "containerPath": FAKE_STATE},
            ],
        }
        for folder in options.node_folders.values()
    ]
    result: Object = {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "name": options.name,
        "nodes": [{"role": "control-plane"}, *workers],
    }
    if options.feature_gates:
        result["featureGates"] = dict(options.feature_gates)
    return result


def why_not() -> str:
    """Why kind cannot be used here, or nothing."""
    docker = shutil.which("docker")
    if docker is None:
        return "kind needs Docker, and there is no docker command"
    answer = subprocess.run([docker, "version", "--format", "{{.Server.Version}}"], capture_output=True, timeout=30)
    return "" if answer.returncode == 0 else "kind needs Docker, and no Docker daemon answers"


class KindCluster(Cluster):
    """A kind cluster. `start` returns when its workers are Ready and have the images."""

    provider = "kind"

    def __init__(self, options: KindOptions, images: Sequence[Image], directory: Path) -> None:
        """`directory` receives the configuration and the kubeconfig."""
        reason = why_not()
        if reason:
            raise SettingsError(reason)
        self.minor = options.minor
        self.options = options
        self._images = list(images)
        self._kubeconfig = directory / "kubeconfig"
        self._config = directory / "kind.json"
        self._kind = locate("kind")
        self._kubectl = locate("kubectl", options.minor)
        self._api: Api | None = None

    @property
    def api(self) -> Api:
        if self._api is None:
            self._api = Api.from_kubeconfig(self._kubeconfig)
        return self._api

    @property
    def nodes(self) -> tuple[str, ...]:
        # kind names its workers itself: NAME-worker, NAME-worker2, …
        count = len(self.options.node_folders)
        return tuple(f"{self.options.name}-worker{'' if n == 1 else n}" for n in range(1, count + 1))

    def kubectl_argv(self, arguments: Sequence[str]) -> list[str]:
        return [str(self._kubectl), f"--kubeconfig={self._kubeconfig}", *arguments]

    def start(self) -> Self:
        self._config.write_text(json.dumps(config(self.options), indent=1))
        try:
            where = ["--kubeconfig", str(self._kubeconfig)]
            self._run("create", "cluster", "--config", str(self._config), "--image", self.options.image, *where)
            for image in self._images:
                self._run("load", "image-archive", str(image.archive), "--name", self.options.name)
            eventually(self._workers_ready, 120, "the workers of the kind cluster")
        except BaseException:
            self.stop()
            raise
        return self

    def _workers_ready(self) -> bool:
        ready = set()
        for node in self.api.list("v1", "Node"):
            conditions = node["status"].get("conditions", [])
            if any(c["type"] == "Ready" and c["status"] == "True" for c in conditions):
                ready.add(node["metadata"]["name"])
        return ready >= set(self.nodes)

    def stop(self) -> None:
        if self._api is not None:
            self._api.close()
            self._api = None
        self._run("delete", "cluster", "--name", self.options.name)

    def _run(self, *arguments: str) -> None:
        done = subprocess.run([self._kind, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S)
        if done.returncode != 0:
            raise ClusterError(f"kind {arguments[0]} {arguments[1]} failed: {foreign(done.stderr)}")
