# SPDX-License-Identifier: Apache-2.0
"""One node: containerd and kubelet in a mount namespace where every standard path is the node's own.

Knows nothing of GPUs. Invariant: what runs here finds a Kubernetes node as any other, default paths and sockets, so
manifests written for real clusters serve unchanged.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aliquot.api.errors import ClusterError, foreign
from aliquot.e2e.control_plane import ControlPlane
from aliquot.e2e.images.archive import reference
from aliquot.e2e.images.recipes import PAUSE, Image
from aliquot.e2e.local.space import Space
from aliquot.e2e.place import Inside
from aliquot.e2e.process import Server, wait_until
from aliquot.e2e.toolchain import MissingPartError, locate

_SOCKET: Final = "/run/containerd/containerd.sock"
_CNI_BINARIES: Final = ("/usr/lib/cni", "/opt/cni/bin")
_SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_KUBELET_PORT: Final = 10250

_CONTAINERD_CONFIG: Final = """\
version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
oom_score = 0
disabled_plugins = [
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.erofs", "io.containerd.snapshotter.v1.blockfile", "io.containerd.nri.v1.nri",
]
[grpc]
  address = "{socket}"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{pause}"
[plugins."io.containerd.cri.v1.runtime"]
  enable_cdi = true
  cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["{cni}"]
    conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      BinaryName = "{runc}"
      SystemdCgroup = false
"""


@dataclass(frozen=True)
class Runtime:
    """Programs of the distribution that every node uses."""

    runc: Path
    cni: Path


def find_runtime() -> Runtime:
    """Raises `MissingPartError` naming the Debian package that is missing."""
    runc = shutil.which("runc", path=_SYSTEM_PATH)
    if runc is None:
        raise MissingPartError("runc is missing: run `make apt`, or install the package runc")
    for folder in map(Path, _CNI_BINARIES):
        if all((folder / name).is_file() for name in ("ptp", "host-local")):
            return Runtime(Path(runc), folder)
    raise MissingPartError(
        f"the CNI plugins ptp and host-local are in none of {', '.join(_CNI_BINARIES)}: run `make apt`, "
        "or install the package containernetworking-plugins"
    )


class Node:
    """Node number `index` of a cluster: its namespace, containerd and kubelet."""

    def __init__(self, name: str, index: int, space: Space, plane: ControlPlane, runtime: Runtime) -> None:
        self.name = name
        self.index = index
        self.inside: Inside = space.node(name)
        self._plane = plane
        self._runtime = runtime
        self._run = space.run
        minor = plane.options.minor
        self._kubelet_program = locate("kubelet", minor)
        self._containerd_program = locate("containerd")
        self._ctr = locate("ctr")
        self.directory = space.run.directory / name
        self.directory.mkdir()
        self.containerd = self._make_containerd()
        self.kubelet = self._make_kubelet()

    @property
    def port(self) -> int:
        """Where this node's kubelet serves; all nodes share the cluster's network namespace."""
        return _KUBELET_PORT + self.index

    def path(self, path: Path | str) -> Path:
        """How this process reaches an absolute path of the node."""
        return self.inside.path(path)

    def run(self, *argv: str | Path, timeout_s: float = 60.0) -> str:
        """Runs a program in the node's namespaces; its output. Raises `ClusterError` when it fails."""
        done = subprocess.run(
            self.inside.argv(argv), capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
        )
        if done.returncode != 0:
            raise ClusterError(
                f"{self.name}: {Path(argv[0]).name} ended with {done.returncode}: {foreign(done.stderr)}"
            )
        return done.stdout

    def start_containerd(self) -> None:
        """Starts containerd; `wait_containerd` tells when it serves."""
        self.containerd.start()

    def wait_containerd(self, timeout_s: float = 60.0) -> None:
        socket = self.path(_SOCKET)
        wait_until(socket.exists, timeout_s, f"containerd on {self.name}", self.containerd)

    def start_kubelet(self) -> None:
        self.kubelet.start()

    def begin_import(self, images: Sequence[Image]) -> subprocess.Popen[bytes]:
        """Begins to load image archives into this node's containerd; the caller waits for the process."""
        script = 'ctr=$1; shift; for a in "$@"; do "$ctr" -a /run/containerd/containerd.sock -n k8s.io images import '
        script += '--local --discard-unpacked-layers "$a" >/dev/null || exit 1; done'
        argv: list[str | Path] = ["sh", "-c", script, "import", self._ctr, *(i.archive for i in images)]
        with (self._run.directory / "log" / f"{self.name}-images.log").open("ab") as log:
            return subprocess.Popen(
                self.inside.argv(argv), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def stop(self) -> None:
        """Ends both daemons; what runs in containers goes with the cluster's namespaces."""
        self.kubelet.stop()
        self.containerd.stop()
        self.inside.close()

    def _log(self, part: str) -> Path:
        return self._run.directory / "log" / f"{self.name}-{part}.log"

    def _make_containerd(self) -> Server:
        config = self.directory / "containerd.toml"
        config.write_text(
            _CONTAINERD_CONFIG.format(
                socket=_SOCKET, pause=reference(PAUSE), cni=self._runtime.cni, runc=self._runtime.runc
            )
        )
        network = {
            "cniVersion": "1.0.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "ptp",
                    "ipMasq": False,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": "/var/lib/cni",
                        "ranges": [[{"subnet": f"10.88.{self.index}.0/24"}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                }
            ],
        }
        self.path("/etc/cni/net.d/10-pods.conflist").write_text(json.dumps(network))
        # containerd finds its shim on PATH, beside itself.
        environment = {"PATH": f"{self._containerd_program.parent}:{self._runtime.runc.parent}:{_SYSTEM_PATH}"}
        argv: list[str | Path] = [self._containerd_program, "--config", config, "--log-level", "warn"]
        return Server(f"containerd of {self.name}", argv, self._log("containerd"), place=self.inside, env=environment)

    def _make_kubelet(self) -> Server:
        authority = self._plane.authority
        kubeconfig = authority.kubeconfig(
            f"kubelet-{self.name}", self._plane.url, user=f"system:node:{self.name}", groups=["system:nodes"]
        )
        certificate, key = authority.issue_files(
            f"kubelet-{self.name}", f"system:node:{self.name}", ["system:nodes"], [self.name, "127.0.0.1"]
        )
        config = self.directory / "kubelet.json"
        config.write_text(json.dumps(self._kubelet_config(certificate, key), indent=1))
        argv: list[str | Path] = [
            self._kubelet_program,
            f"--config={config}",
            f"--kubeconfig={kubeconfig}",
            f"--hostname-override={self.name}",
            "--node-labels=aliquot.dev/gpu=true",
        ]
        environment = {"PATH": _SYSTEM_PATH}
        return Server(f"kubelet of {self.name}", argv, self._log("kubelet"), place=self.inside, env=environment)

    def _kubelet_config(self, certificate: Path, key: Path) -> Mapping[str, object]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "port": self.port,
            "healthzPort": 0,
            "readOnlyPort": 0,
            "tlsCertFile": str(certificate),
            "tlsPrivateKeyFile": str(key),
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(self._plane.ca_file)},
            },
            "authorization": {"mode": "Webhook"},
            "containerRuntimeEndpoint": f"unix://{_SOCKET}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": self._run.cgroup,
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "failSwapOn": False,
            "maxOpenFiles": 20000,
            "localStorageCapacityIsolation": False,
            "resolvConf": "",
            "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "registerNode": True,
            "syncFrequency": "5s",  # how soon a pod whose claim could not be prepared is tried again; default 1 min
            "maxPods": 200,
            "kubeAPIQPS": 200,
            "kubeAPIBurst": 400,
            "serializeImagePulls": False,
            "featureGates": dict(self._plane.options.feature_gates),
        }
