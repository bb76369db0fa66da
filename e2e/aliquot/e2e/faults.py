# SPDX-License-Identifier: Apache-2.0
"""Scripting the fault proxy: what should go wrong, for whom, how often; and what the proxy saw.

Starts one process, never touches the API server itself. Invariant: without rules the proxy is invisible.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from aliquot.api.errors import ClusterError
from aliquot.e2e.api import Api
from aliquot.e2e.place import Here
from aliquot.e2e.process import Server, free_ports, wait_until

if TYPE_CHECKING:
    from aliquot.e2e.control_plane import ControlPlane

FOREVER = -1
PROXY_USER = "aliquot-fault-proxy"
"""Whom the API server lets speak for others (its requestheader flags)."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What happens to a request that matches; the first rule with turns left wins."""

    path: str = ""
    """Regular expression, searched in the URL path."""
    method: str = ""
    watch: bool | None = None
    """None: watches and all else; True: only watches; False: none of them."""
    times: int = FOREVER
    status: int = 0
    """Answer this instead of asking the server. With 410 and `watch=True` it comes as an ERROR event."""
    message: str = ""
    retry_after_s: int | None = None
    delay_s: float = 0.0
    cut: bool = False
    """Break the connection without an answer."""


class FaultProxy:
    """A proxy in front of one control plane. Clients use its `kubeconfig_for`, everything else stays the same."""

    def __init__(self, plane: ControlPlane, *, port: int = 6443, control_port: int = 6480) -> None:
        """The ports count in a local cluster only; on this host free ones are taken."""
        self._plane = plane
        bind = "0.0.0.0"
        if isinstance(plane.place, Here):
            bind = "127.0.0.1"
            port, control_port = free_ports(2)
        self.port = port
        self.url = f"https://127.0.0.1:{port}"
        certificate, key = plane.authority.issue_files(
            f"fault-proxy-{port}", PROXY_USER, hosts=["127.0.0.1", "localhost", *plane.service_hosts]
        )
        settings = plane.directory / f"fault-proxy-{port}.json"
        content = {
            "upstream": plane.url,
            "ca": str(plane.ca_file),
            "certificate": str(certificate),
            "key": str(key),
            "bind": bind,
            "port": port,
            "control_port": control_port,
        }
        settings.write_text(json.dumps(content))
        log = plane.directory / "log" / f"fault-proxy-{port}.log"
        argv: list[str | Path] = [sys.executable, "-m", "aliquot.e2e.fault_proxy", settings]
        self._server = Server("fault proxy", argv, log, place=plane.place)
        self._control = Api(f"http://127.0.0.1:{control_port}", place=plane.place)

    def start(self) -> Self:
        self._server.start()

        def serving() -> bool:
            try:
                self._control.request("GET", "/state", timeout_s=2.0)
            except ClusterError:
                return False
            return True

        wait_until(serving, 30.0, "the fault proxy", self._server)
        return self

    def stop(self) -> None:
        self._control.close()
        self._server.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def kubeconfig_for(self, user: str, groups: Sequence[str] = (), *, token: str = "") -> Path:
        """A kubeconfig through the proxy, for a certificate of (at most one group) or for a token."""
        name = "".join(c if c.isalnum() else "-" for c in user) + f"-proxy-{self.port}"
        return self._plane.authority.kubeconfig(name, self.url, user=user, groups=groups, token=token)

    def set(self, *rules: Rule) -> None:
        """Replaces all rules; none: everything works again."""
        self._control.request("PUT", "/rules", body=[asdict(rule) for rule in rules])

    def cut_watches(self, path: str = "") -> int:
        """Breaks the open watches whose path matches; how many there were."""
        return self._watches("cut", path)

    def silence_watches(self, path: str = "") -> int:
        """Keeps them open and says nothing in them any more; how many there were."""
        return self._watches("hush", path)

    def _watches(self, what: str, path: str) -> int:
        answer = self._control.request("POST", "/watches", body={"what": what, "path": path})
        return int(answer["watches"])

    @property
    def hits(self) -> list[int]:
        """How often each rule acted, in the order in which they were set."""
        return list(self._state()["hits"])

    @property
    def open_watches(self) -> list[str]:
        """Paths of the watches that are open now."""
        return list(self._state()["watches"])

    @property
    def requests(self) -> list[dict[str, Any]]:
        """Every request so far: `method`, `path`, `watch`, `status` (-1 cut, 0 open), `at` (monotonic seconds)."""
        return list(self._state()["requests"])

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._control.request("GET", "/state")
        return state
