# SPDX-License-Identifier: Apache-2.0
"""A real Kubernetes control plane as a handful of processes: etcd, kube-apiserver and, on request, the rest.

Never a fake: what this starts is the program that clusters run (control-plane.md 1, 4). It needs no root, no
container and no network beyond loopback. Invariant: when `start` returns, the API server answers `/readyz`; after
`stop` none of the processes lives and the directory can be removed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from aliquot.api.errors import ClusterError
from aliquot.e2e.api import Api
from aliquot.e2e.faults import PROXY_USER
from aliquot.e2e.pki import Authority
from aliquot.e2e.place import Here, Place
from aliquot.e2e.process import Server, free_ports, wait_until
from aliquot.e2e.toolchain import DEFAULT_MINOR, locate

READY_TIMEOUT_S: Final = 90.0
"""Seen: 2 to 3 s on an idle machine; a busy one takes longer and is no failure of ours."""
SERVICE_CIDR: Final = "10.96.0.0/16"
SERVICE_ADDRESS: Final = "10.96.0.1"
"""Of the service `kubernetes`: the first of the range."""

DRA_SHARING_GATES: Final[Mapping[str, bool]] = {"DRAConsumableCapacity": True}
"""What 1.34 and 1.35 need for shares (dra.md 10.4); from 1.36 on it is the default."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a control plane is to be started."""

    minor: str = DEFAULT_MINOR
    feature_gates: Mapping[str, bool] = field(default_factory=dict)
    """Given to every part of the control plane (and by `local` to the kubelets)."""
    runtime_config: Mapping[str, bool] = field(default_factory=dict)
    scheduler: bool = False
    controller_manager: bool = False
    scheduler_config: Mapping[str, object] = field(default_factory=dict)
    """Merged into the KubeSchedulerConfiguration, for example `extenders`."""
    hosts: Sequence[str] = ()
    """Further names and addresses in the serving certificate."""
    server_flags: Sequence[str] = ()
    max_requests_inflight: int = 1600

    @property
    def key(self) -> str:
        """What makes two control planes interchangeable, as text."""
        return json.dumps(
            {k: v if not isinstance(v, Mapping) else dict(v) for k, v in vars(self).items()},
            sort_keys=True,
            default=list,
        )


class ControlPlane:
    """One API server with its etcd; scheduler and controller-manager beside it where `options` say so.

    On this host it takes free ports of loopback, and every process dies with the thread that called `start`; in the
    namespaces of a local cluster (`place`) it takes the well-known ports on all addresses, and dies with those.
    `directory` has to be the same path there.
    """

    def __init__(self, directory: Path, options: Options | None = None, place: Place | None = None) -> None:
        self.directory = directory
        self.options = options or Options()
        self.place = place or Here()
        directory.mkdir(parents=True, exist_ok=True)
        self._programs = {
            name: locate(name, self.options.minor)
            for name in ("etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager")
            if name in {"etcd", "kube-apiserver"} or self._wanted(name)
        }
        self.authority = Authority(directory / "pki")
        if isinstance(self.place, Here):
            self._bind = "127.0.0.1"
            etcd, peer, self.port, scheduler, controllers = free_ports(5)
        else:
            self._bind = "0.0.0.0"
            etcd, peer, self.port, scheduler, controllers = 2379, 2380, 443, 10259, 10257
        self.url = f"https://127.0.0.1:{self.port}"
        self.kubeconfig = self.authority.kubeconfig("admin", self.url, user="admin", groups=["system:masters"])
        self._sa_key = self.authority.signing_key("service-account")
        self.etcd = self._etcd(etcd, peer)
        self.server = self._api_server(etcd)
        self.scheduler = self._scheduler(scheduler) if self._wanted("kube-scheduler") else None
        self.controllers = self._controllers(controllers) if self._wanted("kube-controller-manager") else None
        self._clients: dict[Path, Api] = {}

    def _wanted(self, name: str) -> bool:
        return self.options.scheduler if name == "kube-scheduler" else self.options.controller_manager

    @property
    def api(self) -> Api:
        """The administrator's client."""
        return self.client(self.kubeconfig)

    def client(self, kubeconfig: Path) -> Api:
        """A client with the identity of a kubeconfig file of this control plane; closed by `stop`."""
        if kubeconfig not in self._clients:
            self._clients[kubeconfig] = Api.from_kubeconfig(kubeconfig, place=self.place)
        return self._clients[kubeconfig]

    @property
    def service_hosts(self) -> tuple[str, ...]:
        """What pods call the API server."""
        return "kubernetes.default.svc", SERVICE_ADDRESS

    @property
    def ca_file(self) -> Path:
        return self.authority.file

    @property
    def servers(self) -> list[Server]:
        """Every process, in the order in which they start."""
        return [s for s in (self.etcd, self.server, self.scheduler, self.controllers) if s is not None]

    def kubeconfig_for(self, user: str, groups: Sequence[str] = ()) -> Path:
        """A kubeconfig for another identity; `system:authenticated` is added by the server."""
        name = "".join(c if c.isalnum() else "-" for c in user)
        return self.authority.kubeconfig(name, self.url, user=user, groups=groups)

    def kubeconfig_with_token(self, name: str, token: str) -> Path:
        """A kubeconfig for a service account's token."""
        return self.authority.kubeconfig(name, self.url, token=token)

    def service_account_token(
        self, name: str, namespace: str, *, pod: Mapping[str, str] | None = None, seconds: int = 3600
    ) -> str:
        """A token of an existing service account, bound to `pod` (its `name` and `uid`) where one is given."""
        spec: dict[str, object] = {"expirationSeconds": seconds}
        if pod is not None:
            spec["boundObjectRef"] = {"apiVersion": "v1", "kind": "Pod", "name": pod["name"], "uid": pod["uid"]}
        answer = self.api.request(
            "POST",
            f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token",
            body={"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec},
        )
        return str(answer["status"]["token"])

    def start(self) -> Self:
        """Starts everything and waits until the API server is ready."""
        try:
            self.etcd.start()
            self.server.start()
            self.wait_ready()
            for part in (self.scheduler, self.controllers):
                if part is not None:
                    part.start()
        except BaseException:
            self.stop()
            raise
        return self

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Waits until `/readyz` says ok, for example after `server` was restarted."""
        anonymous = Api(self.url, ca_pem=self.authority.pem, place=self.place)

        def ready() -> bool:
            try:
                return bool(anonymous.request("GET", "/readyz", timeout_s=2.0) == "ok")
            except ClusterError:
                return False

        try:
            wait_until(ready, timeout_s, f"an answer of kube-apiserver {self.options.minor}", self.etcd, self.server)
        finally:
            anonymous.close()

    def stop(self) -> None:
        """Kills everything; on SIGTERM the API server would linger up to a minute."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        for server in reversed(self.servers):
            server.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _gates(self) -> list[str]:
        gates = self.options.feature_gates
        text = ",".join(f"{name}={str(on).lower()}" for name, on in sorted(gates.items()))
        return [f"--feature-gates={text}"] if text else []

    def _log(self, name: str) -> Path:
        return self.directory / "log" / f"{name}.log"

    def _etcd(self, client: int, peer: int) -> Server:
        peer_url = f"http://127.0.0.1:{peer}"
        argv: list[str | Path] = [
            self._programs["etcd"],
            "--name=default",
            f"--data-dir={self.directory / 'etcd'}",
            "--unsafe-no-fsync",  # the state is thrown away, and this halves the time to start
            f"--listen-client-urls=http://127.0.0.1:{client}",
            f"--advertise-client-urls=http://127.0.0.1:{client}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster=default={peer_url}",
            "--log-level=warn",
        ]
        return Server("etcd", argv, self._log("etcd"), place=self.place)

    def _api_server(self, etcd: int) -> Server:
        issue = self.authority.issue_files
        hosts = ["127.0.0.1", "localhost", *self.service_hosts, *self.options.hosts]
        certificate, key = issue("apiserver", "kube-apiserver", hosts=hosts)
        to_kubelet, to_kubelet_key = issue("apiserver-kubelet-client", "kube-apiserver", ["system:masters"])
        argv: list[str | Path] = [
            self._programs["kube-apiserver"],
            f"--etcd-servers=http://127.0.0.1:{etcd}",
            f"--secure-port={self.port}",
            f"--bind-address={self._bind}",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",  # else a loopback address is refused
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
            f"--client-ca-file={self.authority.file}",
            f"--kubelet-certificate-authority={self.authority.file}",
            f"--kubelet-client-certificate={to_kubelet}",
            f"--kubelet-client-key={to_kubelet_key}",
            "--kubelet-preferred-address-types=Hostname",
            # The fault proxy tells on whose behalf it asks.
            f"--requestheader-client-ca-file={self.authority.file}",
            f"--requestheader-allowed-names={PROXY_USER}",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--service-account-key-file={self._sa_key}",
            f"--service-account-signing-key-file={self._sa_key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            f"--max-requests-inflight={self.options.max_requests_inflight}",
            f"--max-mutating-requests-inflight={self.options.max_requests_inflight // 2}",
            *self._gates(),
        ]
        if not self.options.controller_manager:
            # Nobody makes the default service accounts that this admission plugin waits for.
            argv.append("--disable-admission-plugins=ServiceAccount")
        if self.options.runtime_config:
            served = ",".join(f"{k}={str(v).lower()}" for k, v in sorted(self.options.runtime_config.items()))
            argv.append(f"--runtime-config={served}")
        argv.extend(self.options.server_flags)
        return Server("kube-apiserver", argv, self._log("kube-apiserver"), place=self.place)

    def _scheduler(self, port: int) -> Server:
        kubeconfig = self.authority.kubeconfig("scheduler", self.url, user="system:kube-scheduler")
        config = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": {"leaderElect": False},
            "clientConnection": {"kubeconfig": str(kubeconfig), "qps": 500, "burst": 1000},
            **self.options.scheduler_config,
        }
        path = self.directory / "scheduler.json"
        path.write_text(json.dumps(config, indent=1))
        argv: list[str | Path] = [
            self._programs["kube-scheduler"],
            f"--config={path}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            f"--cert-dir={self.directory / 'scheduler-cert'}",
            *self._gates(),
        ]
        return Server("kube-scheduler", argv, self._log("kube-scheduler"), place=self.place)

    def _controllers(self, port: int) -> Server:
        kubeconfig = self.authority.kubeconfig("controller-manager", self.url, user="system:kube-controller-manager")
        argv: list[str | Path] = [
            self._programs["kube-controller-manager"],
            f"--kubeconfig={kubeconfig}",
            "--leader-elect=false",
            "--controllers=*,-nodeipam",
            "--use-service-account-credentials",
            f"--service-account-private-key-file={self._sa_key}",
            f"--root-ca-file={self.authority.file}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            f"--cert-dir={self.directory / 'controller-manager-cert'}",
            *self._gates(),
        ]
        return Server("kube-controller-manager", argv, self._log("kube-controller-manager"), place=self.place)
