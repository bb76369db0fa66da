# SPDX-License-Identifier: Apache-2.0
"""The opaque parameters of a claim or DeviceClass: *how* a share is held to its size, never how large it is.

Pure. Amounts never stand here, because neither scheduler nor quota looks into opaque parameters (dra.md 10.7).
Two readers with opposite duties: `decode_share` is for what a user wrote just now and refuses everything it does not
know, so that a misspelt field never silently means the default; `decode_stored_share` is for what we wrote ourselves
some versions ago and refuses nothing, so that a claim can always be given back. Invariant: parameters of another
driver are never looked into.
"""

from __future__ import annotations

import difflib
import enum
import re
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from aliquot.api.errors import RequestError, foreign
from aliquot.api.grant import CorePolicy
from aliquot.api.names import DRIVER, PARAMETERS_API_VERSION, PARAMETERS_KIND

ALLOWED_ENV: Final = frozenset({"CUDA_CACHE_DISABLE", "CUDA_MODULE_LOADING", "LIBCUDA_LOG_LEVEL"})
"""Variables that `env` may set: none of them loosens a limit or chooses which libraries are loaded."""

_ENV_VALUE_LIMIT: Final = 256


class Limiter(enum.Enum):
    """What holds a container to its share."""

    HOOK = "hook"
    """`libvgpu.so` between the program and the driver."""
    NONE = "none"
    """Nothing: the sizes are what the scheduler counts with, the program keeps to them by itself."""


class Share(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """`kind: Share` of `gpu.aliquot.dev/v1`. The defaults are what a claim without parameters gets."""

    limiter: Limiter = Limiter.HOOK
    core_policy: CorePolicy = CorePolicy.DEFAULT
    """When the compute limit binds."""
    priority: Annotated[int, msgspec.Meta(ge=0, le=1)] = 0
    """0 high, 1 low: who waits when two shares of a card want it at once."""
    memory_oversubscribe: bool = False
    """Beyond the card's memory, allocations move to host memory instead of failing."""
    env: dict[str, str] = msgspec.field(default_factory=dict)
    """Variables of `ALLOWED_ENV` for the container."""


FIELDS: Final = tuple(field.encode_name for field in msgspec.structs.fields(Share))
"""Names as a user writes them."""

_AMOUNTS: Final = ("memory", "memoryLimit", "cores", "coreLimit", "corePercent", "slots", "gpumem", "gpucores")
"""What people write here although it belongs into `capacity.requests`; recognised to say so."""


class OpaqueConfig(msgspec.Struct, frozen=True, gc=False):
    """Parameters for one driver, unparsed."""

    driver: str = ""
    parameters: msgspec.Raw = msgspec.Raw(b"{}")


class ConfigEntry(msgspec.Struct, frozen=True, gc=False):
    """One entry of a claim's `status.allocation.devices.config`."""

    source: str = ""
    """`FromClass` or `FromClaim`."""
    requests: tuple[str, ...] = ()
    """Requests it is for, each `main` or `main/sub`; empty: all."""
    opaque: OpaqueConfig | None = None
    """None: a kind of configuration that this version of ours does not know."""


def share_for(entries: Sequence[ConfigEntry], request: str, *, where: str) -> Share:
    """The parameters that hold for one allocation result: class entries first, then the claim's, later fields win.

    Within each of the two, an entry that names the request more closely counts as later (cases.md B102). `request`
    is the result's request name, `main` or `main/sub`; an entry for `main` covers all its subrequests.
    Entries are merged field by field, so a class can set `corePolicy` and a claim `priority`. Entries for other
    drivers are skipped unread. `where` names the claim in messages.

    Raises `RequestError` when an entry of ours does not decode, or an entry is not opaque at all.
    """
    merged: dict[str, Any] = {}
    ordered = sorted(
        enumerate(entries),
        key=lambda pair: (pair[1].source != "FromClass", _closeness(pair[1].requests, request), pair[0]),
    )
    for index, entry in ordered:
        if not _covers(entry.requests, request):
            continue
        place = f"{where}: config[{index}]{f' ({entry.source})' if entry.source else ''}"
        if entry.opaque is None:
            raise RequestError(f"{place} is not opaque configuration, which is all {DRIVER} understands: remove it")
        if entry.opaque.driver == DRIVER:
            fields = _checked_fields(entry.opaque.parameters, where=place)
            _convert(fields, where=place)
            merged |= fields
    return _convert(merged, where=where)


def _closeness(names: Sequence[str], request: str) -> int:
    """0: for all requests; 1: for the main request; 2: for this very alternative of it."""
    return 0 if not names else 2 if "/" in request and request in names else 1


def _covers(names: Sequence[str], request: str) -> bool:
    return not names or request in names or request.partition("/")[0] in names


def decode_share(raw: msgspec.Raw | bytes | dict[str, Any], *, where: str) -> Share:
    """Parameters a user wrote, as JSON or already decoded; `where` names the object they stand in.

    Raises `RequestError` that names the field, for anything unknown, misspelt, mistyped or out of range.
    """
    return _convert(_checked_fields(raw, where=where), where=where)


def decode_stored_share(raw: msgspec.Raw | bytes | dict[str, Any]) -> Share:
    """Parameters we stored earlier, perhaps in another version: unknown fields are skipped, unreadable ones default.

    Raises nothing: what is stored must never be the reason why a claim cannot be given back.
    """
    try:
        fields = _fields(raw)
    except (ValueError, TypeError):  # msgspec's errors and undecodable text are ValueErrors
        return Share()
    kept = {}
    for name in FIELDS:
        if name in fields:
            try:
                _convert({name: fields[name]}, where="")
            except RequestError:
                continue
            kept[name] = fields[name]
    return _convert(kept, where="")


def encode_share(share: Share) -> dict[str, Any]:
    """The parameters as a user would write them, `apiVersion` and `kind` first."""
    written: dict[str, Any] = msgspec.to_builtins(share)
    return {"apiVersion": PARAMETERS_API_VERSION, "kind": PARAMETERS_KIND, **written}


def _fields(raw: msgspec.Raw | bytes | dict[str, Any]) -> dict[str, Any]:
    decoded = raw if isinstance(raw, dict) else msgspec.json.decode(raw)
    if not isinstance(decoded, dict):
        raise TypeError(f"expected an object, found {type(decoded).__name__}")
    return decoded


def _checked_fields(raw: msgspec.Raw | bytes | dict[str, Any], *, where: str) -> dict[str, Any]:
    """The fields without `apiVersion` and `kind`, both of which must be ours."""
    try:
        fields = dict(_fields(raw))
    except (ValueError, TypeError) as error:
        raise RequestError(f"{where}: parameters are not a JSON object: {foreign(error)}") from error
    version, kind = fields.pop("apiVersion", None), fields.pop("kind", None)
    if (version, kind) != (PARAMETERS_API_VERSION, PARAMETERS_KIND):
        raise RequestError(
            f"{where}: parameters are {foreign(kind)} of {foreign(version)}; {DRIVER} reads "
            f'"kind: {PARAMETERS_KIND}" of "apiVersion: {PARAMETERS_API_VERSION}"'
        )
    unknown = sorted(str(name) for name in fields.keys() - set(FIELDS))
    if unknown:
        raise RequestError(f"{where}: {_about_unknown(unknown)}")
    return fields


def _about_unknown(names: list[str]) -> str:
    shown = ", ".join(f'"{foreign(name)}"' for name in names)
    text = f"unknown field{'s' if len(names) > 1 else ''} {shown}"
    if any(difflib.get_close_matches(name, _AMOUNTS, 1, 0.8) for name in names):
        return f"{text}: amounts belong in capacity.requests of the claim's request; known here: {', '.join(FIELDS)}"
    guess = difflib.get_close_matches(names[0], FIELDS, 1)
    hint = f'did you mean "{guess[0]}"? ' if guess else ""
    return f"{text}: {hint}known: {', '.join(FIELDS)}"


_ENV_VALUE: Final = re.compile(r"[ -~]*")


def _convert(fields: dict[str, Any], *, where: str) -> Share:
    try:
        share = msgspec.convert(fields, Share)
    except msgspec.ValidationError as error:
        raise RequestError(f"{where}: {foreign(error)}") from error
    for name, value in share.env.items():
        if name not in ALLOWED_ENV:
            raise RequestError(
                f'{where}: env may not set "{foreign(name)}"; allowed: {", ".join(sorted(ALLOWED_ENV))}; set others '
                "in the container's own env"
            )
        if len(value) > _ENV_VALUE_LIMIT or not _ENV_VALUE.fullmatch(value):
            raise RequestError(
                f"{where}: env {name} is longer than {_ENV_VALUE_LIMIT} characters or not printable ASCII"
            )
    return share
