# SPDX-License-Identifier: Apache-2.0
"""The namespaces that contain a whole cluster: network, mounts and processes, and one mount namespace per node in it.

Nothing that happens inside is visible outside: system folders are overlays over memory, state lies in memory. Needs
root. Invariant: when the first process dies, however that comes, every process, mount and interface inside is gone.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from aliquot.api.errors import ClusterError, SettingsError
from aliquot.e2e.control_plane import SERVICE_ADDRESS
from aliquot.e2e.local.run import Run
from aliquot.e2e.place import Inside, children

HOST_ADDRESS: Final = "10.87.0.1"
"""What kubelet takes for the machine's address; loopback will not do."""

NODE_PATHS: Final = (
    "/var/lib/kubelet",
    "/var/lib/containerd",
    "/var/lib/cni",
    "/var/lib/aliquot",
    "/var/log/pods",
    "/var/log/containers",
    "/run/containerd",
    "/run/aliquot",
    "/run/cdi",
    "/run/fakegpu",
    "/run/nvidia/driver",
    "/run/netns",
    "/etc/cdi",
    "/etc/cni/net.d",
)
"""The standard paths, of which each node has its own."""

# Overlays, so that a missing mount point can be made without leaving it on the host. /run is new altogether.
_OVERLAID: Final = ("/etc", "/opt", "/var/lib", "/var/log")

_SPACE_SCRIPT: Final = """\
set -eu
trap '' CHLD  # ignored across exec: the kernel reaps whatever is left to this first process
mount -t tmpfs -o mode=0755,size=75% aliquot "$STATE"
for folder in $OVERLAID; do
    [ -d "$folder" ] || continue
    mkdir -p "$STATE/upper$folder" "$STATE/work$folder"
    mount -t overlay -o "lowerdir=$folder,upperdir=$STATE/upper$folder,workdir=$STATE/work$folder" aliquot "$folder"
done
mount -t tmpfs -o mode=0755 aliquot /run
mkdir -p $NODE_PATHS
if [ -L /var/run ]; then :; else mkdir -p /var/run; mount --bind /run /var/run; fi
printf '127.0.0.1 localhost %s\\n' "$NODES" >/etc/hosts
: >/etc/resolv.conf
hostname aliquot 2>/dev/null || true
ip link set lo up
ip address add "$SERVICE_ADDRESS/32" dev lo
ip link add uplink0 type veth peer name uplink1
ip address add "$HOST_ADDRESS/24" dev uplink0
ip link set uplink0 up
ip link set uplink1 up
ip route add default via "${HOST_ADDRESS%.*}.254" dev uplink0
sysctl -q -w net.ipv4.ip_forward=1 2>/dev/null || echo 1 >/proc/sys/net/ipv4/ip_forward
echo ready
exec sleep infinity >/dev/null 2>&1
"""

_NODE_SCRIPT: Final = """\
set -eu
trap '' CHLD
for path in $NODE_PATHS; do
    mkdir -p "$STATE/$NODE$path"
    mount --bind "$STATE/$NODE$path" "$path"
done
mount --make-rshared /  # as systemd leaves it; kubelet and HostToContainer mounts rely on it
echo ready
exec sleep infinity >/dev/null 2>&1
"""


@dataclass(frozen=True)
class Space:
    """The namespaces of one cluster. `state` is memory that only exists inside."""

    run: Run
    inside: Inside
    state: Path
    keeper: subprocess.Popen[str]
    _holders: list[subprocess.Popen[str]] = field(default_factory=list)

    def node(self, name: str) -> Inside:
        """Makes the mount namespace of one node and binds its own folders over the standard paths."""
        environment = {"STATE": str(self.state), "NODE": name, "NODE_PATHS": " ".join(NODE_PATHS)}
        argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _NODE_SCRIPT]
        started = _start(self.inside.argv(argv), environment, self.run.directory / "log" / f"{name}-namespace.log")
        self._holders.append(started)
        holder = children(started.pid)
        if len(holder) != 1:
            raise ClusterError(f"the namespace of {name} ended as soon as it was made; see {self.run.directory}/log")
        return Inside(holder[0])

    def close(self) -> None:
        """Ends everything inside."""
        self.inside.close()
        self.keeper.kill()
        for process in (self.keeper, *self._holders):
            process.wait()


def require_root() -> None:
    """Raises `SettingsError` where this process may not make namespaces."""
    if os.geteuid() != 0:
        raise SettingsError(
            "a local cluster needs root, because it makes network and mount namespaces and starts containers; "
            "run it with sudo, or point the stories at a cluster of yours (provider `existing`)"
        )


def make_space(run: Run, nodes: Sequence[str], *, detached: bool = False) -> Space:
    """Makes the namespaces of a cluster with nodes of these names.

    They end with the calling thread unless `detached`. Raises `ClusterError` with what the system said.
    """
    require_root()
    state = run.directory / "state"
    state.mkdir()
    environment = {
        "STATE": str(state),
        "OVERLAID": " ".join(_OVERLAID),
        "NODE_PATHS": " ".join(NODE_PATHS),
        "NODES": " ".join(nodes),
        "SERVICE_ADDRESS": SERVICE_ADDRESS,
        "HOST_ADDRESS": HOST_ADDRESS,
    }
    death = [] if detached else ["setpriv", "--pdeathsig", "KILL", "--"]
    kinds = ["--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    argv = [*death, "unshare", *kinds, "--propagation", "private", "sh", "-c", _SPACE_SCRIPT]
    keeper = _start(argv, environment, run.directory / "log" / "namespace.log", keep_open=run.lock)
    first = children(keeper.pid)
    if len(first) != 1:
        keeper.kill()
        raise ClusterError(f"the first process of the cluster ended at once; see {run.directory}/log")
    return Space(run, Inside(first[0]), state, keeper)


def _start(
    argv: Sequence[str], environment: Mapping[str, str], log: Path, *, keep_open: int | None = None
) -> subprocess.Popen[str]:
    """Starts a script that says `ready` when it is; it goes on running."""
    log.parent.mkdir(parents=True, exist_ok=True)
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    with log.open("ab") as errors:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={"PATH": path, **environment},
            pass_fds=[] if keep_open is None else [keep_open],
            text=True,
            start_new_session=True,
        )
    assert process.stdout is not None
    with process.stdout as output:
        answer = output.readline()
    if answer != "ready\n":
        process.kill()
        process.wait()
        raise ClusterError(f"the namespaces of the cluster could not be made: {log.read_text().strip()[-600:]}")
    return process
