# SPDX-License-Identifier: Apache-2.0
"""The daemon's small HTTP face: `/metrics`, `/healthz`, `/readyz`, and nothing else.

It never answers anything that changes state and never lets a slow or strange client hold the daemon: a request has
seconds, a few are served at once, others wait in the kernel's queue. Readiness is asked of callables when it is
asked of us, so it can never be stale. Guarded invariant: a check that fails to answer counts as a failed check.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from aliquot.api.errors import SettingsError, foreign
from aliquot.api.log import get_logger

_log = get_logger(__name__)

Checks = Mapping[str, Callable[[], str | None]]
"""Name of a check to what tells whether it holds: None, or one line on why not."""

_REQUEST_S: Final = 5.0
_AT_ONCE: Final = 8


class Endpoint:
    """The server. Binds when made (so a wrong address ends the daemon at once), serves from `start` to `stop`.

    `host` is a name or address (empty: all), `port` 0 takes a free one, see `port`. `/healthz` and `/readyz` answer
    200 while all their checks hold, else 503 with one line for each that does not. Raises `SettingsError`.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry, *, healthy: Checks, ready: Checks) -> None:
        handler = type(
            "Handler", (_Handler,), {"registry": registry, "checks": {"/healthz": healthy, "/readyz": ready}}
        )
        server = type("Server", (_Server,), {"address_family": socket.AF_INET6 if ":" in host else socket.AF_INET})
        try:
            self._server = server((host, port), handler)
        except (OSError, OverflowError) as e:
            raise SettingsError(
                f"cannot listen on {host or '*'}:{port} for metrics and health: {foreign(e)}; "
                "use another address or port"
            ) from e
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """The port that is bound."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Serve in a thread."""
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.5}, name="endpoint", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop listening; requests in flight end by themselves."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._slots = threading.BoundedSemaphore(_AT_ONCE)
        super().__init__(address, handler)

    def process_request(self, request: socket.socket, client_address: tuple[str, int]) -> None:  # type: ignore[override]
        # All busy for longer than a request may take means that somebody holds them; he shall not hold us.
        if not self._slots.acquire(timeout=_REQUEST_S):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started: then it releases nothing
            self._slots.release()
            raise

    def process_request_thread(self, request: socket.socket, client_address: tuple[str, int]) -> None:  # type: ignore[override]
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        _log.info("request failed", client=str(client_address), exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    registry: CollectorRegistry
    checks: Mapping[str, Checks]
    timeout = _REQUEST_S
    server_version = "aliquot"
    sys_version = ""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.rstrip("/")
        if path == "/metrics":
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._answer(HTTPStatus.OK, encode(self.registry), content_type)
        elif path in self.checks:
            failed = _failed(self.checks[path])
            status = HTTPStatus.SERVICE_UNAVAILABLE if failed else HTTPStatus.OK
            self._answer(
                status, "".join(f"{line}\n" for line in failed or ["ok"]).encode(), "text/plain; charset=utf-8"
            )
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"here are /metrics, /healthz and /readyz\n", "text/plain")

    do_HEAD = do_GET  # noqa: N815

    def _answer(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in http.server
        _log.debug("request", line=format % args)


def _failed(checks: Checks) -> list[str]:
    failed = []
    for name, check in checks.items():
        try:
            reason = check()
        except Exception as e:
            reason = f"cannot tell: {foreign(e)}"
        if reason is not None:
            failed.append(f"{name}: {reason}")
    return failed
