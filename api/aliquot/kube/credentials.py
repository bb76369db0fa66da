# SPDX-License-Identifier: Apache-2.0
"""Where the API server is and who we are: in-cluster token, or kubeconfig.

The only module that imports the official `kubernetes` package, and it does so late, because that import is most of a
daemon's start. Taken from it: kubeconfig (merging, exec plugins, tokens, certificates), in-cluster token refresh,
proxies, TLS, the connection pool. Nothing else: its models drop fields they do not know and its watch never backs off.
Works on 36.0.3 and 37; differences between them end here. Invariant: no credential is ever logged or put in an error.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import urllib3
from urllib3.connection import HTTPConnection

from aliquot.api.errors import SettingsError, foreign
from aliquot.kube.errors import Unreachable

TOKEN_PATH: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
CA_PATH: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/ca.crt")

POOL_SIZE: Final = 16
"""Connections kept open; more may be in use at once."""

# A peer that vanished without a word is noticed after 30 + 9 · 15 s even where nobody reads (as client-go does).
_KEEPALIVE: Final = [
    *HTTPConnection.default_socket_options,
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 9),
]


@dataclasses.dataclass(frozen=True)
class Source:
    """A way to credentials that can be read again when they have expired."""

    described: str
    """For messages: `in-cluster service account`, `kubeconfig /path`."""
    configure: Callable[[], Any]
    """Makes a fresh `kubernetes.client.Configuration`."""


class Session:
    """One reading of a `Source`: server, connection pool, and the header that says who we are."""

    def __init__(self, source: Source) -> None:
        """Raises `SettingsError` when the credentials cannot be read as they are."""
        from kubernetes.client.rest import RESTClientObject  # noqa: PLC0415 - see the module's text

        self.source = source
        try:
            configuration = source.configure()
            configuration.socket_options = _KEEPALIVE
            configuration.connection_pool_maxsize = POOL_SIZE
            pool = RESTClientObject(configuration).pool_manager
        except Exception as error:  # YAML, base64, TLS and the package's own checks fail each in their own way
            # A text where a mapping belongs trips the package itself.
            why = "it is no kubeconfig" if isinstance(error, TypeError | AttributeError) else foreign(error)
            raise SettingsError(
                f"cannot use {source.described}: {why}; check that it is readable and names a cluster"
            ) from error
        self.host: str = configuration.host.rstrip("/")
        self.pool: urllib3.PoolManager = pool
        self._configuration = configuration
        self._lock = threading.Lock()

    def headers(self) -> dict[str, str]:
        """Authorization, refreshed by the official package when it is due.

        Raises `Unreachable` when the token cannot be read at the moment.
        """
        try:
            with self._lock:  # its refresh hooks are not made for several threads
                settings = self._configuration.auth_settings()
        except Exception as error:  # exec plugins and token files fail in any way they like
            raise Unreachable(
                f"cannot refresh credentials from {self.source.described}: {foreign(error)}", reason="Credentials"
            ) from error
        token = settings.get("BearerToken", {}).get("value")
        return {"Authorization": token.strip()} if token else {}

    def close(self) -> None:
        """Closes idle connections; those in use end with their request."""
        self.pool.clear()


def find(kubeconfig: Path | None, environ: Mapping[str, str] = os.environ) -> Source:
    """Which credentials to use: the given file, else the pod's service account, else `KUBECONFIG` or ~/.kube/config.

    Raises `SettingsError` when there are none.
    """
    if kubeconfig is not None:
        if not kubeconfig.is_file():
            raise SettingsError(f"kubeconfig {kubeconfig} is not a file: give the path of a readable kubeconfig")
        return from_kubeconfig(str(kubeconfig))
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return in_cluster(environ=environ)
    paths = environ.get("KUBECONFIG") or str(Path(environ.get("HOME", "/")) / ".kube" / "config")
    if any(Path(path).expanduser().is_file() for path in paths.split(os.pathsep) if path):
        return from_kubeconfig(paths)
    raise SettingsError(
        f"no Kubernetes credentials: not running in a pod, and there is no kubeconfig at {paths}; "
        "give --kubeconfig or set KUBECONFIG"
    )


def in_cluster(
    *, environ: Mapping[str, str] = os.environ, token_path: Path = TOKEN_PATH, ca_path: Path = CA_PATH
) -> Source:
    """The pod's service account; the token is read again each minute, the CA with every new connection."""

    def configure() -> Any:
        from kubernetes.client import Configuration  # noqa: PLC0415
        from kubernetes.config.incluster_config import InClusterConfigLoader  # noqa: PLC0415

        configuration = Configuration()
        loader = InClusterConfigLoader(str(token_path), str(ca_path), environ=dict(environ))
        loader.load_and_set(configuration)
        return configuration

    return Source("in-cluster service account", configure)


def from_kubeconfig(paths: str) -> Source:
    """A kubeconfig, or several separated as in `KUBECONFIG`; its current context."""

    def configure() -> Any:
        from kubernetes.client import Configuration  # noqa: PLC0415
        from kubernetes.config import ConfigException  # noqa: PLC0415
        from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger  # noqa: PLC0415

        config = KubeConfigMerger(paths).config
        if config is None:
            raise ConfigException("it is empty")
        configuration = Configuration()
        KubeConfigLoader(config_dict=config, config_base_path=None).load_and_set(configuration)
        context = config["contexts"].get_with_name(config["current-context"])["context"]
        user = config["users"].get_with_name(context.safe_get("user"), safe=True)
        named = user.value.get("user") or {} if user is not None else {}
        if "exec" in named and not configuration.api_key and not configuration.cert_file:
            raise ConfigException(f"its exec plugin {named['exec'].get('command')} gave no credentials")
        # 36 does not read proxy-url and would connect past the proxy without a word.
        proxy = config["clusters"].get_with_name(context["cluster"])["cluster"].safe_get("proxy-url")
        if proxy:
            configuration.proxy = proxy
        return configuration

    return Source(f"kubeconfig {paths}", configure)
