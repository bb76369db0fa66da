# SPDX-License-Identifier: Apache-2.0
"""/metrics, /healthz and /readyz over HTTP, for probes and Prometheus. Nothing here changes anything.

Never answers from memory: each request asks. Invariant: a slow or silent client costs one thread for a few seconds
and nobody else anything.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from aliquot.api.errors import SettingsError, foreign

_TEXT: Final = "text/plain; charset=utf-8"
_METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"


class StatusServer:
    """The endpoint. `alive` and `ready` return what is wrong, one sentence each; empty means well."""

    def __init__(
        self,
        address: str,
        port: int,
        *,
        metrics: Callable[[], bytes],
        alive: Callable[[], Sequence[str]],
        ready: Callable[[], Sequence[str]],
    ) -> None:
        """Binds at once. Raises `SettingsError` when address and port cannot be had."""

        class Handler(BaseHTTPRequestHandler):
            timeout = 5.0
            protocol_version = "HTTP/1.1"
            server_version = "aliquot"
            sys_version = ""

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._answer(200, metrics(), _METRICS)
                elif path in ("/healthz", "/readyz"):
                    problems = alive() if path == "/healthz" else ready()
                    body = "".join(f"{problem}\n" for problem in problems) or "ok\n"
                    self._answer(503 if problems else 200, body.encode(), _TEXT)
                else:
                    self._answer(404, b"there are /metrics, /healthz and /readyz\n", _TEXT)

            def _answer(self, status: int, body: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Probes are no news."""

        try:
            self._server = (_Server6 if ":" in address else _Server)((address, port), Handler)
        except OSError as err:
            raise SettingsError(
                f"--http-address {address} and --http-port {port} cannot be used: {foreign(err.strerror)}; choose "
                "others, or --http-port 0 for none"
            ) from err
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)

    def start(self) -> None:
        """Serve."""
        self._thread.start()

    def stop(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 16

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is no news either."""


class _Server6(_Server):
    address_family = socket.AF_INET6
