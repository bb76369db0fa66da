# SPDX-License-Identifier: Apache-2.0
"""What the API server answers when it does not do what we asked, one class per way out.

Pure. Every class is a `ClusterError`. Invariant: the text says what was asked ("list resourceslices.resource.k8s.io"),
what came back, and for refused rights the exact RBAC rule that is missing; of the server's own words only a capped,
printable part is repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from aliquot.api.errors import ClusterError, foreign
from aliquot.kube.paths import Target

RETRY_AFTER_LIMIT_S: Final = 300.0
"""A server that asks for more patience than this is asked again all the same."""


class ApiError(ClusterError):
    """An answer of the API server other than success, or none at all."""

    def __init__(self, text: str, *, status: int = 0, reason: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(text)
        self.status = status
        """HTTP status; 0: no answer."""
        self.reason = reason
        """The machine-readable reason of the server's `Status` object, such as `AlreadyExists`."""
        self.retry_after_s = retry_after_s
        """Seconds the server asked us to wait; 0: it did not say."""


class NotFound(ApiError):  # noqa: N818 - named as Kubernetes names them
    """404: no such object, or no such API on this server."""


class Conflict(ApiError):  # noqa: N818
    """409: the object was changed since it was read, or another field manager owns a field: read again and retry."""


class AlreadyExists(Conflict):
    """409 on create: an object of this name is there."""


class Gone(ApiError):  # noqa: N818
    """410: the resourceVersion or page is too old: list again."""


class Unauthorized(ApiError):  # noqa: N818
    """401: the server does not know who we are; the credentials are wrong or have expired."""


class Forbidden(ApiError):  # noqa: N818
    """403: known, but not allowed; the text names the missing rule."""


class Invalid(ApiError):  # noqa: N818
    """400, 405, 415, 422 and the like: the server does not accept the request; the same one again cannot help."""

    retryable = False


class TooManyRequests(ApiError):  # noqa: N818
    """429: the server is busy; wait at least `retry_after_s`."""


class ServerError(ApiError):
    """5xx, or an answer that is none of Kubernetes."""


class Unreachable(ApiError):  # noqa: N818
    """No answer: no connection, no TLS, no credentials to send, or silence."""


class _Details(msgspec.Struct, rename="camel"):
    retry_after_seconds: float = 0.0


class Status(msgspec.Struct, rename="camel"):
    """The `Status` object in which the API server explains itself; also the object of an ERROR watch event."""

    message: str = ""
    reason: str = ""
    code: int = 0
    details: _Details | None = None


_CLASSES: Final[dict[int, type[ApiError]]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    429: TooManyRequests,
}


def read_status(body: bytes | msgspec.Raw) -> Status:
    """The `Status` in a body; an empty one where there is none (a proxy's page, nothing)."""
    try:
        return msgspec.json.decode(body, type=Status)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return Status()


def api_error(http_status: int, headers: Mapping[str, str], body: bytes, about: Target) -> ApiError:
    """The error for an answer that is no success."""
    status = read_status(body)
    said = status.message or bytes(body[:1024]).decode("utf-8", "replace")
    return error_from(status, http_status, about, said=said, retry_after_s=_retry_after(headers, status))


def error_from(
    status: Status, code: int, about: Target, *, said: str | None = None, retry_after_s: float = 0.0
) -> ApiError:
    """The error for a `Status` object that came with, or instead of, HTTP status `code`."""
    kind = _class_of(code, status.reason)
    said = foreign(status.message if said is None else said)
    name = status.reason or kind.__name__
    text = f"cannot {about}: {code} {name}{f': {said}' if said else ''}"
    if kind is Forbidden:
        text = f"not allowed to {about}: {_missing_rule(about)}; the API server said: {said}"
    elif kind is Unauthorized:
        text = f"cannot {about}: the API server does not accept our credentials (401): {said}"
    return kind(text, status=code, reason=status.reason, retry_after_s=retry_after_s)


def _class_of(code: int, reason: str) -> type[ApiError]:
    if code == 409 and reason == "AlreadyExists":
        return AlreadyExists
    if code in _CLASSES:
        return _CLASSES[code]
    return Invalid if 400 <= code < 500 else ServerError


def _missing_rule(about: Target) -> str:
    if not about.resource:
        return f'our role needs nonResourceURLs ["{about.path}"], verbs ["{about.verb}"]'
    resource = f"{about.resource}/{about.subresource}" if about.subresource else about.resource
    return f'our role needs apiGroups ["{about.group}"], resources ["{resource}"], verbs ["{about.verb}"]'


def _retry_after(headers: Mapping[str, str], status: Status) -> float:
    text = headers.get("Retry-After") or ""
    seconds = float(text) if text.strip().isdecimal() else 0.0
    if status.details is not None:
        seconds = max(seconds, status.details.retry_after_seconds)
    return min(max(seconds, 0.0), RETRY_AFTER_LIMIT_S)
