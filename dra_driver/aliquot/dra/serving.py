# SPDX-License-Identifier: Apache-2.0
"""gRPC servers on UNIX sockets that heal: started, watched, made again when their file vanished, ended in order.

Never serves on TCP. Invariant: as long as the server runs, the socket at its path is its own; and at the end a socket
that somebody else put there meanwhile is left alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import grpc

from aliquot.api.errors import ClusterError, foreign
from aliquot.dra.sockets import inode, sparing

_OPTIONS: Final = (
    # Kubelet may be silent for days on one connection and then expects it to work (cases.md B097).
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)


class SocketServer:
    """One gRPC server at one path. `add` puts the services on it."""

    def __init__(self, path: Path, add: Callable[[grpc.Server], None], *, workers: int, name: str) -> None:
        self.path = path
        self._add = add
        self._workers = workers
        self._name = name
        self._lock = threading.Lock()
        self._server: grpc.Server | None = None
        self._inode: tuple[int, int] | None = None

    def start(self) -> None:
        """Serve. Raises `ClusterError` when the path cannot be bound."""
        with self._lock:
            self._start()

    def intact(self) -> bool:
        """Whether kubelet would reach us."""
        return self._server is not None and self._inode is not None and inode(self.path) == self._inode

    def heal(self) -> bool:
        """Serve again where the file vanished or was replaced; true when that was needed."""
        with self._lock:
            if self.intact():
                return False
            self._stop(0.0)
            self._start()
            return True

    def stop(self, grace_s: float) -> None:
        """End: new calls are refused at once, running ones get `grace_s` to finish; the socket goes."""
        with self._lock:
            self._stop(grace_s)

    def _start(self) -> None:
        server = grpc.server(
            ThreadPoolExecutor(max_workers=self._workers, thread_name_prefix=self._name), options=_OPTIONS
        )
        self._add(server)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
            if server.add_insecure_port(f"unix:{self.path}") != 1:
                raise RuntimeError("not bound")  # noqa: TRY301 - as gRPC says it in other versions
            self.path.chmod(0o600)
        except (RuntimeError, OSError) as err:
            server.stop(None)
            raise ClusterError(
                f"socket {self.path} cannot be served: {foreign(err)}; see that this directory of kubelet's exists "
                "and is writable"
            ) from err
        server.start()
        self._server, self._inode = server, inode(self.path)

    def _stop(self, grace_s: float) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        with sparing(self.path, self._inode):
            server.stop(grace_s).wait(grace_s + 5.0)
        self._inode = None
