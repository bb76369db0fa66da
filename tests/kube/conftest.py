# SPDX-License-Identifier: Apache-2.0
"""A scripted HTTP server for the faults that a real API server does not produce on demand.

It knows nothing of Kubernetes: each test says what the next answers are, byte by byte if need be. What the real
server does is tested against the real one (marker `cluster`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import queue
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from urllib.parse import parse_qsl, urlsplit

import pytest

from aliquot.kube import credentials
from aliquot.kube.client import Kube

PATIENCE_S = 20.0
"""How long a test waits for something that should happen at once."""


@dataclasses.dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    def json(self):
        return json.loads(self.body)

    @property
    def is_watch(self) -> bool:
        return self.query.get("watch") == "1"


@dataclasses.dataclass
class Reply:
    """A whole answer. `body` is JSON unless it is bytes."""

    body: object = b""
    status: int = 200
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    drop: bool = False
    """Cut the connection instead of answering."""
    hold: threading.Event | None = None
    """Answer only once this is set."""

    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


class Stream:
    """A chunked answer that the test goes on writing."""

    CLOSE, DROP = object(), object()

    def __init__(self, *lines: object, headers: dict[str, str] | None = None) -> None:
        self.headers = headers or {}
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self.opened = threading.Event()
        self.send(*lines)

    def send(self, *lines: object) -> Stream:
        for line in lines:
            self._queue.put(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n")
        return self

    def close(self) -> Stream:
        """The server ends the answer in order."""
        self._queue.put(self.CLOSE)
        return self

    def drop(self) -> Stream:
        """The connection breaks."""
        self._queue.put(self.DROP)
        return self

    def next(self) -> object:
        return self._queue.get()


def status_body(code: int, reason: str = "", message: str = "", **details: object) -> dict:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
        "details": details,
    }


class ScriptedServer:
    """`answer` decides what each request gets; requests are kept in `requests`."""

    Reply, Stream, Request = Reply, Stream, Request
    status_body = staticmethod(status_body)

    def __init__(self, context: ssl.SSLContext | None = None, port: int = 0) -> None:
        self.requests: list[Request] = []
        self.answer: Callable[[Request], Reply | Stream] = lambda _: Reply(status_body(404, "NotFound"), 404)
        self._changed = threading.Condition()
        self._streams: list[Stream] = []
        self._connections: list[socket.socket] = []
        self._closing = threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 60

            def log_message(self, *_):
                pass

            def setup(self):
                super().setup()
                outer._connections.append(self.connection)

            def handle(self):
                try:
                    super().handle()
                except (OSError, ValueError):
                    self.close_connection = True

            def _serve(self):
                url = urlsplit(self.path)
                length = int(self.headers.get("Content-Length") or 0)
                request = Request(
                    self.command, url.path, dict(parse_qsl(url.query)), dict(self.headers), self.rfile.read(length)
                )
                reply = outer._take(request)
                if isinstance(reply, Stream):
                    self._stream(reply)
                    return
                if reply.hold is not None:
                    reply.hold.wait(PATIENCE_S)
                if reply.drop:
                    self._cut()
                    return
                content = reply.content()
                self.send_response(reply.status)
                for name, value in ({"Content-Type": "application/json"} | reply.headers).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815 - the base class's names

            def _stream(self, stream):
                self.send_response(200)
                for name, value in ({"Transfer-Encoding": "chunked"} | stream.headers).items():
                    self.send_header(name, value)
                self.end_headers()
                stream.opened.set()
                while (item := stream.next()) not in (Stream.CLOSE, Stream.DROP):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(item), item))
                    self.wfile.flush()
                if item is Stream.CLOSE:
                    self.wfile.write(b"0\r\n\r\n")
                else:
                    # No reset: that would also throw away what the client has not read yet.
                    self.close_connection = True

            def _cut(self):
                self.close_connection = True
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_):
                pass  # clients that go away are part of the script

        self._server = Server(("127.0.0.1", port), Handler)
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self.url = f"{'https' if context else 'http'}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def _take(self, request: Request) -> Reply | Stream:
        with self._changed:
            self.requests.append(request)
            reply = self.answer(request)
            if isinstance(reply, Stream):
                self._streams.append(reply)
            self._changed.notify_all()
        return reply

    def script(self, *replies: Reply | Stream) -> None:
        """These answers, one after the other, and the last of them for ever (a stream only once)."""
        left = list(replies)

        def answer(_: Request) -> Reply | Stream:
            return left.pop(0) if len(left) > 1 or isinstance(left[0], Stream) else left[0]

        self.answer = answer

    def wait_for(self, met: Callable[[list[Request]], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: met(self.requests), PATIENCE_S), self.requests

    def watches(self) -> list[Request]:
        return [request for request in self.requests if request.is_watch]

    def lists(self) -> list[Request]:
        return [request for request in self.requests if not request.is_watch]

    def close(self) -> None:
        for stream in self._streams:
            stream.drop()
        self._server.shutdown()
        self._server.server_close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._thread.join(PATIENCE_S)


@pytest.fixture
def server():
    scripted = ScriptedServer()
    yield scripted
    scripted.close()


@pytest.fixture
def make_server():
    made: list[ScriptedServer] = []

    def make(context: ssl.SSLContext | None = None, port: int = 0) -> ScriptedServer:
        made.append(ScriptedServer(context, port))
        return made[-1]

    yield make
    for scripted in made:
        scripted.close()


def kubeconfig(server: str, user: dict | None = None, cluster: dict | None = None) -> dict:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": server} | (cluster or {})}],
        "users": [{"name": "u", "user": user or {}}],
    }


@pytest.fixture
def write_kubeconfig(tmp_path):
    """Writes a kubeconfig for a server and returns its path; JSON is YAML."""

    def write(server: str, user: dict | None = None, cluster: dict | None = None):
        path = tmp_path / "kubeconfig"
        path.write_text(json.dumps(kubeconfig(server, user, cluster)))
        return path

    return write


@pytest.fixture
def kube(server, write_kubeconfig):
    client = Kube(credentials.find(write_kubeconfig(server.url)))
    yield client
    client.close()
