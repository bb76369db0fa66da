# SPDX-License-Identifier: Apache-2.0
"""A small client for the API server, for tests and the demo: plain dictionaries in and out.

Deliberately not `aliquot.kube`: what checks our code must not be our code. Never retries by itself and hides no
status. Invariant: the object a call returns is what the server stored, read back from its answer.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import socket
import ssl
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import yaml

from aliquot.api.errors import ClusterError, SettingsError, foreign
from aliquot.e2e.place import Here, Place

Object = dict[str, Any]

_CLUSTER_SCOPED: Final = {
    "Namespace",
    "Node",
    "ClusterRole",
    "ClusterRoleBinding",
    "DeviceClass",
    "ResourceSlice",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
    "ValidatingWebhookConfiguration",
    "MutatingWebhookConfiguration",
    "PriorityClass",
    "RuntimeClass",
    "CustomResourceDefinition",
}
_IRREGULAR_PLURALS: Final = {
    "DeviceClass": "deviceclasses",
    "PriorityClass": "priorityclasses",
    "RuntimeClass": "runtimeclasses",
    "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
    "NetworkPolicy": "networkpolicies",
    "Endpoints": "endpoints",
}
RESOURCE_API: Final = "resource.k8s.io/v1"


class ApiError(ClusterError):
    """The server answered with a status that is not a success; `status` has the code, `reason` the word."""

    def __init__(self, status: int, reason: str, message: str, headers: Mapping[str, str]) -> None:
        super().__init__(f"the API server answered {status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.headers = dict(headers)


def collection_path(api_version: str, kind: str, namespace: str = "") -> str:
    """The URL path under which objects of a kind are listed and created."""
    root = f"/api/{api_version}" if "/" not in api_version else f"/apis/{api_version}"
    plural = _IRREGULAR_PLURALS.get(kind, kind.lower() + "s")
    if kind in _CLUSTER_SCOPED:
        return f"{root}/{plural}"
    return f"{root}/namespaces/{namespace or 'default'}/{plural}"


def object_path(obj: Mapping[str, Any], namespace: str = "") -> str:
    """The URL path of one object; its own namespace wins over `namespace`."""
    metadata = obj["metadata"]
    where = metadata.get("namespace") or namespace
    return f"{collection_path(obj['apiVersion'], obj['kind'], where)}/{metadata['name']}"


def load_manifests(*paths: Path) -> list[Object]:
    """Every object of YAML files, in order."""
    return [o for path in paths for o in yaml.safe_load_all(path.read_text()) if o]


class Api:
    """One identity at one API server. Usable from several threads; each has its own connection."""

    def __init__(
        self,
        server: str,
        *,
        ca_pem: bytes = b"",
        certificate_pem: bytes = b"",
        key_pem: bytes = b"",
        token: str = "",
        place: Place | None = None,
    ) -> None:
        url = urllib.parse.urlsplit(server)
        self.server = server
        self.token = token
        self._host = url.hostname or ""
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._place = place or Here()
        self._context: ssl.SSLContext | None = None
        self._local = threading.local()
        self._open: set[http.client.HTTPConnection] = set()
        if url.scheme == "https":
            self._context = ssl.create_default_context(cadata=ca_pem.decode() if ca_pem else None)
            if certificate_pem:
                with tempfile.NamedTemporaryFile(prefix="aliquot-") as pair:
                    pair.write(certificate_pem + b"\n" + key_pem)
                    pair.flush()
                    self._context.load_cert_chain(pair.name)

    @classmethod
    def from_kubeconfig(cls, path: Path, *, place: Place | None = None) -> Self:
        """The current context of a kubeconfig file, its server reached from `place`.

        Raises `SettingsError` where it needs a login program: then `kubectl proxy` and its address will do.
        """
        config = yaml.safe_load(path.read_text())
        context = _named(config, "contexts", config.get("current-context", ""), path)["context"]
        cluster = _named(config, "clusters", context["cluster"], path)["cluster"]
        user = _named(config, "users", context["user"], path)["user"]
        if "exec" in user or "auth-provider" in user:
            raise SettingsError(
                f"{path}: user {context['user']} logs in through another program, which is not supported here; "
                "run `kubectl proxy` and use a kubeconfig whose server is its http address"
            )

        def material(section: Mapping[str, str], key: str) -> bytes:
            if f"{key}-data" in section:
                return base64.b64decode(section[f"{key}-data"])
            return (path.parent / section[key]).read_bytes() if key in section else b""

        token = user.get("token", "")
        if not token and "tokenFile" in user:
            token = (path.parent / user["tokenFile"]).read_text().strip()
        return cls(
            cluster["server"],
            ca_pem=material(cluster, "certificate-authority"),
            certificate_pem=material(user, "client-certificate"),
            key_pem=material(user, "client-key"),
            token=token,
            place=place,
        )

    def request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        timeout_s: float = 30.0,
    ) -> Any:
        """One request; the decoded JSON answer, or its text where it is not JSON.

        Raises `ApiError` for any status from 400 up, `ClusterError` where no answer came.
        """
        target = path + ("?" + urllib.parse.urlencode(query) if query else "")
        headers = {"Accept": "application/json", "Content-Type": content_type}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        data = None if body is None else json.dumps(body).encode()
        try:
            status, answer, received = self._exchange(method, target, data, headers, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            self._drop()
            raise ClusterError(f"{method} {path} at {self.server}: {foreign(error)}") from error
        text = answer.decode(errors="replace")
        is_json = "json" in received.get("content-type", "")
        if status >= 400:
            parsed = json.loads(text) if is_json else {}
            raise ApiError(status, parsed.get("reason", ""), parsed.get("message", text[:500]), received)
        return json.loads(text) if is_json else text

    def _exchange(
        self, method: str, target: str, data: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> tuple[int, bytes, dict[str, str]]:
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        for attempt in (connection, None):
            fresh = attempt is None
            if attempt is None:
                attempt = self._connect(timeout_s)  # noqa: PLW2901
            if attempt.sock is not None:
                attempt.sock.settimeout(timeout_s)
            try:
                attempt.request(method, target, body=data, headers=dict(headers))
                response = attempt.getresponse()
                answer = response.read()
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError, ssl.SSLEOFError):
                # An idle kept-alive connection that the server closed meanwhile; a new one tells whether it serves.
                self._drop()
                if fresh:
                    raise
                continue
            return response.status, answer, {k.lower(): v for k, v in response.getheaders()}
        raise AssertionError("unreachable: the second attempt is always fresh")

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection
        if self._context is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        else:
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=self._context)
        raw = self._place.connect(self._host, self._port, timeout_s)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sock = raw if self._context is None else self._context.wrap_socket(raw, server_hostname=self._host)
        self._local.connection = connection
        self._open.add(connection)
        return connection

    def _drop(self) -> None:
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            self._open.discard(connection)
            with contextlib.suppress(OSError):
                connection.close()
            self._local.connection = None

    def close(self) -> None:
        """Closes the connections of all threads; none of them may be in a call."""
        while self._open:
            self._open.pop().close()
        self._local = threading.local()

    def create(self, obj: Object, namespace: str = "") -> Object:
        """POSTs the object; its own namespace wins over `namespace`."""
        where = obj["metadata"].get("namespace") or namespace
        result: Object = self.request("POST", collection_path(obj["apiVersion"], obj["kind"], where), body=obj)
        return result

    def apply(self, obj: Object, namespace: str = "", *, manager: str = "aliquot-e2e") -> Object:
        """Server-side apply, forced: creates or changes."""
        result: Object = self.request(
            "PATCH",
            object_path(obj, namespace),
            body=obj,
            query={"fieldManager": manager, "force": "true"},
            content_type="application/apply-patch+yaml",
        )
        return result

    def replace_status(self, obj: Object, namespace: str = "") -> Object:
        """PUTs the status subresource."""
        result: Object = self.request("PUT", object_path(obj, namespace) + "/status", body=obj)
        return result

    def get(self, api_version: str, kind: str, name: str, namespace: str = "") -> Object:
        result: Object = self.request("GET", f"{collection_path(api_version, kind, namespace)}/{name}")
        return result

    def find(self, api_version: str, kind: str, name: str, namespace: str = "") -> Object | None:
        """Like `get`, but None when there is no such object."""
        try:
            return self.get(api_version, kind, name, namespace)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def list(self, api_version: str, kind: str, namespace: str = "", **selectors: str) -> list[Object]:
        """All objects; `selectors` are `labelSelector=` and `fieldSelector=`. Items come without kind, as served."""
        answer = self.request("GET", collection_path(api_version, kind, namespace), query=selectors)
        items: list[Object] = answer.get("items") or []
        return items

    def delete(
        self, api_version: str, kind: str, name: str, namespace: str = "", *, grace_s: int | None = None
    ) -> None:
        """Deletes; an object that is not there is fine."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if grace_s is not None:
            body |= {"gracePeriodSeconds": grace_s}  # type: ignore[dict-item]
        try:
            self.request("DELETE", f"{collection_path(api_version, kind, namespace)}/{name}", body=body)
        except ApiError as error:
            if error.status != 404:
                raise

    def delete_all(self, api_version: str, kind: str, namespace: str = "", **selectors: str) -> None:
        """One DeleteCollection."""
        self.request("DELETE", collection_path(api_version, kind, namespace), query=selectors)


def _named(config: Mapping[str, Any], section: str, name: str, path: Path) -> Mapping[str, Any]:
    for entry in config.get(section) or []:
        if entry["name"] == name:
            found: Mapping[str, Any] = entry
            return found
    raise SettingsError(f"{path}: there is no {name!r} among its {section}")


@contextlib.contextmanager
def tolerating(*statuses: int) -> Iterator[None]:
    """Swallows `ApiError`s of these statuses."""
    try:
        yield
    except ApiError as error:
        if error.status not in statuses:
            raise


T = TypeVar("T")


def eventually(look: Callable[[], T | None], timeout_s: float, what: str, *, every_s: float = 0.05) -> T:
    """The first truthy value `look()` returns.

    Raises `ClusterError` naming `what`, and what was seen last, after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    last = "nothing yet"
    while True:
        try:
            value = look()
            if value:
                return value
            last = f"{value!r}"
        except ClusterError as error:
            last = str(error)
        if time.monotonic() > deadline:
            raise ClusterError(f"{what} did not happen within {timeout_s:g} s; last seen: {last[:600]}")
        time.sleep(every_s)
