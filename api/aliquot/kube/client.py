# SPDX-License-Identifier: Apache-2.0
"""The API server as we talk to it: requests in, bytes and small structs out.

Never hides an answer: every status other than success becomes an error of `aliquot.kube.errors`, and nothing is
retried here but what cannot have had an effect (an idle connection that the server had closed, credentials that had
expired). Never blocks for ever: each request has a connect and a read timeout. Safe for use from several threads.
Invariant: writes send the JSON they were given; no model stands between, so no field is lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Generic, Self, TypeVar
from urllib.parse import urlencode

import msgspec
import urllib3
from urllib3.exceptions import HTTPError, ProtocolError

from aliquot.api.errors import foreign
from aliquot.kube import credentials
from aliquot.kube.errors import ApiError, Gone, NotFound, ServerError, Unreachable, api_error
from aliquot.kube.objects import Decoder, Object
from aliquot.kube.paths import Query, Target, target

JSON: Final = "application/json"
MERGE_PATCH: Final = "application/merge-patch+json"
JSON_PATCH: Final = "application/json-patch+json"
APPLY_PATCH: Final = "application/apply-patch+yaml"  # JSON is YAML

Timeout = tuple[float, float]
"""Seconds to connect, and seconds the server may stay silent."""
DEFAULT_TIMEOUT: Final[Timeout] = (5.0, 30.0)
PAGE_LIMIT: Final = 500
"""Items of a page: about 5 ms of decoding, so that a list never stalls another thread for long."""
LINE_LIMIT: Final = 16 << 20
"""Bytes; an object is at most 3 MiB, so a longer line is no watch event."""
RELOAD_INTERVAL_S: Final = 10.0
"""Credentials that are refused are read afresh, but no more often than this."""

T = TypeVar("T")
O = TypeVar("O", bound=Object)  # noqa: E741


@dataclasses.dataclass(frozen=True)
class Response:
    """A successful answer, read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        """The body as JSON decodes it. Raises `ServerError` when it is no JSON object."""
        return self.decode(dict)

    def decode(self, kind: type[T]) -> T:
        """The body as a struct. Raises `ServerError` when it is none."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ServerError(f"the API server's answer is not the JSON expected: {foreign(error)}") from error


@dataclasses.dataclass(frozen=True)
class Listing(Generic[O]):
    """A whole list, all pages of one resourceVersion."""

    items: list[O]
    resource_version: str
    problems: list[str]
    """Items that could not be read and are left out, by name."""


class Kube:
    """One API server, one identity."""

    def __init__(
        self,
        source: credentials.Source,
        *,
        user_agent: str = "aliquot",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads the credentials; connects with the first request. Raises `SettingsError` when they are no use."""
        self._user_agent = user_agent
        self._clock = clock
        self._lock = threading.Lock()
        self._session = credentials.Session(source)
        self._loaded_at = clock()

    @classmethod
    def load(cls, kubeconfig: Path | None = None, *, user_agent: str = "aliquot") -> Self:
        """From the given kubeconfig, else the pod's service account, else `KUBECONFIG` or ~/.kube/config."""
        return cls(credentials.find(kubeconfig), user_agent=user_agent)

    @property
    def host(self) -> str:
        """The server's URL, for messages."""
        return self._session.host

    def close(self) -> None:
        """Closes idle connections. The object can be used again afterwards."""
        self._session.close()

    # ---- requests ----

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Query = (),
        body: Any = None,
        content_type: str = JSON,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Response:
        """One request; `body` is anything JSON can say, or bytes as they are.

        Raises an `ApiError` for everything but a 2xx answer.
        """
        answer, about = self._send(
            method, path, query, body=body, content_type=content_type, timeout=timeout, stream=False
        )
        response = Response(answer.status, answer.headers, answer.data)
        if not 200 <= response.status < 300:
            raise api_error(response.status, response.headers, response.body, about)
        return response

    def stream(self, path: str, *, query: Query = (), timeout: Timeout = DEFAULT_TIMEOUT) -> Stream:
        """A GET whose answer is read as it comes: a watch. Raises as `request` does."""
        answer, about = self._send("GET", path, query, timeout=timeout, stream=True)
        stream = Stream(answer, about)
        if answer.status != 200:
            with stream:
                raise api_error(answer.status, answer.headers, b"\n".join(stream.lines()), about)
        return stream

    def _send(
        self,
        method: str,
        path: str,
        query: Query,
        *,
        timeout: Timeout,
        stream: bool,
        body: Any = None,
        content_type: str = JSON,
    ) -> tuple[urllib3.BaseHTTPResponse, Target]:
        query = list(query)
        about = target(method, path, query)
        url = f"{path}?{urlencode(query)}" if query else path
        data = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        headers = {"Accept": JSON, "User-Agent": self._user_agent}
        if data is not None:
            headers["Content-Type"] = content_type

        def call(session: credentials.Session) -> urllib3.BaseHTTPResponse:
            return session.pool.request(
                method,
                session.host + url,
                body=data,
                headers=headers | session.headers(),
                timeout=urllib3.Timeout(connect=timeout[0], read=timeout[1]),
                preload_content=not stream,
                retries=False,
                redirect=False,
            )

        session = self._session
        try:
            answer = _once_more_if_idle_connection_was_closed(method, lambda: call(session))
            if answer.status == 401 and self._reload(session):
                answer.close()
                answer = call(self._session)
        except (HTTPError, http.client.HTTPException, OSError) as error:
            raise Unreachable(
                f"cannot {about}: no answer from {session.host}: {_plain(error)}; see that the API server is up and "
                "that this node reaches it there",
                reason=type(error).__name__,
            ) from error
        return answer, about

    def _reload(self, refused: credentials.Session) -> bool:
        """Reads the credentials afresh after the server refused them; False when there is nothing newer to try."""
        with self._lock:
            if self._session is not refused:
                return True  # another thread just did
            if self._clock() - self._loaded_at < RELOAD_INTERVAL_S:
                return False
            self._loaded_at = self._clock()
            try:
                fresh = credentials.Session(refused.source)
            except Exception:  # the 401 that brought us here says enough
                return False
            self._session = fresh
        refused.close()
        return True

    # ---- reading ----

    def get(self, path: str, kind: type[T], *, query: Query = (), timeout: Timeout = DEFAULT_TIMEOUT) -> T:
        """One object as a struct."""
        return self.request("GET", path, query=query, timeout=timeout).decode(kind)

    def get_json(self, path: str, *, query: Query = (), timeout: Timeout = DEFAULT_TIMEOUT) -> dict[str, Any]:
        """One object whole, to be changed and written back."""
        return self.request("GET", path, query=query, timeout=timeout).json()

    def list_all(
        self,
        path: str,
        item: type[O] | Decoder[O],
        *,
        query: Query = (),
        limit: int = PAGE_LIMIT,
        timeout: Timeout = DEFAULT_TIMEOUT,
        keep_on: Callable[[], bool] = lambda: True,
    ) -> Listing[O]:
        """Every object of a collection, fetched by the page; between pages `keep_on` is asked whether to go on.

        When the server forgets our place (410 between pages) it is asked once more for everything at once, as
        client-go does. Items that cannot be read are left out and named in `problems`.
        """
        decoder = item if isinstance(item, Decoder) else Decoder(item)
        try:
            return self._list(path, decoder, list(query), limit=limit, timeout=timeout, keep_on=keep_on)
        except Gone:
            if not limit:
                raise
            return self._list(path, decoder, list(query), limit=0, timeout=timeout, keep_on=keep_on)

    def _list(
        self,
        path: str,
        decoder: Decoder[O],
        query: list[tuple[str, str]],
        *,
        limit: int,
        timeout: Timeout,
        keep_on: Callable[[], bool],
    ) -> Listing[O]:
        items: list[O] = []
        problems: list[str] = []
        place: list[tuple[str, str]] = []
        while True:
            pages = [("limit", str(limit)), *place] if limit else []
            response = self.request("GET", path, query=[*query, *pages], timeout=timeout)
            try:
                page, metadata, bad = decoder.page(response.body)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise ServerError(f"cannot {target('GET', path)}: the answer is no list: {foreign(error)}") from error
            if not metadata.resource_version:
                raise ServerError(f"cannot {target('GET', path)}: the answer is no list: it has no resourceVersion")
            items += page
            problems += bad
            if not metadata.continue_ or not keep_on():
                return Listing(items, metadata.resource_version, problems)
            place = [("continue", metadata.continue_)]

    # ---- writing ----

    def create(self, path: str, body: Mapping[str, Any], *, query: Query = ()) -> dict[str, Any]:
        """Creates an object in a collection; returns what the server stored. `AlreadyExists` when it is there."""
        return self.request("POST", path, query=query, body=body).json()

    def replace(self, path: str, body: Mapping[str, Any], *, query: Query = ()) -> dict[str, Any]:
        """Replaces a whole object; with `metadata.resourceVersion` in it only if that is still the current one."""
        return self.request("PUT", path, query=query, body=body).json()

    def apply(
        self, path: str, body: Mapping[str, Any], *, manager: str, force: bool = True, query: Query = ()
    ) -> dict[str, Any]:
        """Server-side apply: these fields are ours (`manager`), the others stay as they are. Creates if need be."""
        fields = [("fieldManager", manager), ("force", "true" if force else "false"), *query]
        return self.request("PATCH", path, query=fields, body=body, content_type=APPLY_PATCH).json()

    def merge_patch(self, path: str, patch: Mapping[str, Any], *, query: Query = ()) -> dict[str, Any]:
        """JSON merge patch: keys given are set, keys given as None removed, lists replaced."""
        return self.request("PATCH", path, query=query, body=patch, content_type=MERGE_PATCH).json()

    def json_patch(self, path: str, operations: list[dict[str, Any]], *, query: Query = ()) -> dict[str, Any]:
        """JSON patch; a failed `test` operation is `Invalid`."""
        return self.request("PATCH", path, query=query, body=operations, content_type=JSON_PATCH).json()

    def delete(self, path: str, *, uid: str = "", resource_version: str = "") -> bool:
        """Deletes an object, only if it still is the one meant; False when it was gone. `Conflict` when it is not."""
        conditions = {key: value for key, value in (("uid", uid), ("resourceVersion", resource_version)) if value}
        body: dict[str, Any] = {"kind": "DeleteOptions", "apiVersion": "v1"}
        if conditions:
            body["preconditions"] = conditions
        try:
            self.request("DELETE", path, body=body)
        except NotFound:
            return False
        return True


def _plain(error: Exception) -> str:
    """What went wrong, without the object of urllib3's that it begins with; the host is named already."""
    return _OBJECT.sub("", foreign(error))


_OBJECT: Final = re.compile(r"^\w+\(host=.*?\): ")


def _once_more_if_idle_connection_was_closed(method: str, call: Callable[[], T]) -> T:
    """The server may close an idle connection just as we use it; to ask again is safe where asking has no effect."""
    try:
        return call()
    except ProtocolError:
        if method != "GET":
            raise
        return call()


class Stream:
    """An answer that is being read. Used by one thread; `abort` may come from any other."""

    def __init__(self, response: urllib3.BaseHTTPResponse, about: Target) -> None:
        self._response = response
        self._about = about
        self._aborted = False
        # A second descriptor of the same connection: it can be shut down while the first is being read, and its
        # number is ours until we close it.
        self._tap: socket.socket | None = None
        try:
            self._tap = socket.socket(fileno=os.dup(response.fileno()))
        except (OSError, ValueError, AttributeError):
            return  # an answer without a body: read already

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends it, for the thread that reads. The connection is dropped, not reused: more may be under way on it."""
        self._response.close()
        if self._tap is not None:
            self._tap.close()

    def abort(self) -> None:
        """Ends it from another thread: a `lines` that waits returns at once. Harmless when it is over."""
        self._aborted = True
        if self._tap is not None:
            with contextlib.suppress(OSError):
                self._tap.shutdown(socket.SHUT_RDWR)

    def lines(self) -> Iterator[bytes]:
        """Lines without their end, empty ones left out, until the server ends the answer or `abort` is called.

        Raises `Unreachable` when the connection breaks or stays silent, `ServerError` for a line without end.
        """
        pending: list[bytes] = []
        size = 0
        try:
            for chunk in self._chunks():
                first, *rest = chunk.split(b"\n")
                pending.append(first)
                size += len(first)
                if size > LINE_LIMIT:
                    raise ServerError(f"cannot {self._about}: a line of more than {LINE_LIMIT} bytes is no event")
                if rest:
                    complete = [b"".join(pending), *rest[:-1]]
                    pending, size = [rest[-1]], len(rest[-1])
                    for line in complete:
                        if line and not self._aborted:
                            yield line
        except ApiError:
            raise
        except (HTTPError, http.client.HTTPException, OSError, ValueError, AttributeError) as error:
            # ValueError and AttributeError: what urllib3 and ssl make of a socket that was closed meanwhile.
            if self._aborted:
                return
            raise Unreachable(
                f"cannot {self._about}: the connection broke: {foreign(error)}", reason=type(error).__name__
            ) from error
        last = b"".join(pending)
        if last and not self._aborted:
            yield last

    def _chunks(self) -> Iterator[bytes]:
        response = self._response
        if getattr(response, "chunked", False):
            yield from response.stream(1 << 16, decode_content=True)
            return
        while data := response.read1(1 << 16, decode_content=True):
            yield data
