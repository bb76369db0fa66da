# SPDX-License-Identifier: Apache-2.0
"""How a checkpoint looks on disk: bytes in, content out, and back. Pure, no files.

    {"version": "1.0", "checksum": "sha256:<hex>", "payload": "<JSON text>"}

The checksum covers the payload text's own bytes, never a serialisation made anew, so a release that knows more
or fewer fields reads the same bytes (dra.md 4.7, REQ-5). The payload is

    {"sequence": 7, "bootID": "…", "claims": {"<claim uid>": <record>, …}}

The journal beside the file holds one such envelope a line, without line breaks inside; the payload's `claims` are then
only those that changed, null where one is gone, and its sequence is the one before plus one. Lines up to the file's own
sequence say nothing new.

Guarded invariant: nothing that another release wrote is lost by reading and writing: fields we do not know, in
envelope, payload and records, are carried along. What cannot be carried (a newer major version) is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from aliquot.api.errors import InternalError, SettingsError, foreign

MAJOR: Final = 1
MINOR: Final = 0

_OWN: Final = frozenset({"version", "checksum", "payload"})
_SEQUENCE: Final = "sequence"
_BOOT: Final = "bootID"
_CLAIMS: Final = "claims"

Raw = bytes
"""JSON text of one value, as it stands in the file."""

_loads: Final = msgspec.json.Decoder(dict[str, msgspec.Raw], strict=True).decode
_dumps: Final = msgspec.json.Encoder().encode


class DamagedCheckpointError(InternalError):
    """The bytes are no checkpoint: cut, changed, or never one."""


class NewerCheckpointError(SettingsError):
    """A newer release wrote it in a form this one cannot keep whole."""


@dataclass(frozen=True, slots=True)
class Content:
    """What a checkpoint says. `claims` maps claim UID to the JSON text of its record."""

    sequence: int = 0
    """How often the file was written; tells the newer of two."""
    boot_id: str = ""
    claims: dict[str, Raw] = field(default_factory=dict)
    other_payload: dict[str, Raw] = field(default_factory=dict)
    """Fields of the payload that a newer release added."""
    other_envelope: dict[str, Raw] = field(default_factory=dict)

    def following(self, claims: dict[str, Raw], boot_id: str) -> Content:
        """What the next write says."""
        return replace(self, sequence=self.sequence + 1, claims=claims, boot_id=boot_id)


def encode(content: Content) -> bytes:
    """The file's bytes, ending in a newline."""
    claims: dict[str, msgspec.Raw] = {uid: msgspec.Raw(raw) for uid, raw in content.claims.items()}
    return _sealed(content, claims, content.other_payload, content.other_envelope)


def encode_change(content: Content, uids: Iterable[str]) -> bytes:
    """The journal's line that leads to `content`, where only the records of `uids` (and the boot id) are new."""
    claims = {uid: msgspec.Raw(content.claims.get(uid, b"null")) for uid in uids}
    return _sealed(content, claims, {}, {})


def decode(data: bytes, *, where: str) -> Content:
    """What `data` says; `where` names the file in errors.

    Raises `NewerCheckpointError` for a newer major version (judged first, whatever else is in the file) and
    `DamagedCheckpointError` for anything else that is not a whole checkpoint.
    """
    return _opened(data, where)


def replay(content: Content, lines: bytes, *, where: str) -> tuple[Content, str]:
    """`content` with the journal's lines applied, and what is wrong with them ("": nothing; they are all there).

    Stops at the first line that is damaged; goes on over a gap, for what was said later still counts. Raises
    `NewerCheckpointError`.
    """
    reason = ""
    whole, _, cut = lines.rpartition(b"\n")
    for number, line in enumerate(whole.split(b"\n") if whole else (), 1):
        try:
            change = _opened(line, f"{where}, line {number}")
        except DamagedCheckpointError as e:
            return content, str(e)
        if change.sequence <= content.sequence:
            continue
        if change.sequence != content.sequence + 1:
            reason = reason or f"{where}: changes {content.sequence + 1} to {change.sequence - 1} are missing"
        claims = content.claims | change.claims
        content = Content(
            sequence=change.sequence,
            boot_id=change.boot_id,
            claims={uid: raw for uid, raw in claims.items() if raw != b"null"},
            other_payload=content.other_payload | change.other_payload,
            other_envelope=content.other_envelope | change.other_envelope,
        )
    return content, reason or (f"{where} ends in the middle of a line" if cut else "")


def _sealed(
    content: Content, claims: dict[str, msgspec.Raw], other_payload: dict[str, Raw], other_envelope: dict[str, Raw]
) -> bytes:
    payload = _dumps(
        {
            _SEQUENCE: content.sequence,
            _BOOT: content.boot_id,
            _CLAIMS: claims,
            **{key: msgspec.Raw(raw) for key, raw in other_payload.items()},
        }
    )
    envelope = {
        "version": f"{MAJOR}.{MINOR}",
        "checksum": _checksum(payload),
        "payload": payload.decode(),
        **{key: msgspec.Raw(raw) for key, raw in other_envelope.items()},
    }
    return _dumps(envelope) + b"\n"


def _opened(data: bytes, where: str) -> Content:
    try:
        envelope = _loads(data)
        version = msgspec.json.decode(envelope["version"], type=str)
        major = int(version.partition(".")[0])
    except (msgspec.MsgspecError, KeyError, ValueError) as e:
        raise DamagedCheckpointError(f"{where} is no checkpoint: {foreign(_why(e))}") from None
    if major > MAJOR:
        raise NewerCheckpointError(
            f"{where} has version {version}, this release reads up to {MAJOR}.x and has left it untouched; "
            "start the release that wrote it, or drain the node and move the file away"
        )
    try:
        payload = msgspec.json.decode(envelope["payload"], type=str).encode()
        checksum = msgspec.json.decode(envelope["checksum"], type=str)
        if checksum != _checksum(payload):
            raise DamagedCheckpointError(f"{where} is damaged: its checksum does not match its payload")
        fields = _loads(payload)
        sequence = msgspec.json.decode(fields.pop(_SEQUENCE), type=int)
        boot_id = msgspec.json.decode(fields.pop(_BOOT), type=str)
        claims = _loads(fields.pop(_CLAIMS))
    except (msgspec.MsgspecError, KeyError, ValueError) as e:
        raise DamagedCheckpointError(f"{where} is damaged: {foreign(_why(e))}") from None
    return Content(
        sequence=sequence,
        boot_id=boot_id,
        claims={uid: bytes(raw) for uid, raw in claims.items()},
        other_payload={key: bytes(raw) for key, raw in fields.items()},
        other_envelope={key: bytes(raw) for key, raw in envelope.items() if key not in _OWN},
    )


def unknown(raw: Any, known: Any) -> Any:
    """The part of plain JSON data `raw` that `known`, the same data read by a stricter reader, has lost.

    Objects are compared by key and lists of equal length by position; `{}` means nothing was lost.
    """
    if isinstance(raw, dict) and isinstance(known, dict):
        lost = {key: unknown(value, known[key]) if key in known else value for key, value in raw.items()}
        return {key: value for key, value in lost.items() if key not in known or value not in ({}, [])}
    if isinstance(raw, list) and isinstance(known, list) and len(raw) == len(known):
        parts = [unknown(a, b) for a, b in zip(raw, known, strict=True)]
        return parts if any(part not in ({}, []) for part in parts) else {}
    return {}


def merged(new: Any, lost: Any) -> Any:
    """`new` with the fields of `lost` (from `unknown`) that it does not have itself."""
    if isinstance(new, dict) and isinstance(lost, dict):
        joined = {key: merged(value, lost.get(key, {})) for key, value in new.items()}
        return joined | {key: value for key, value in lost.items() if key not in new}
    if isinstance(new, list) and isinstance(lost, list) and len(new) == len(lost):
        return [merged(a, b) for a, b in zip(new, lost, strict=True)]
    return new


def _checksum(payload: bytes) -> str:
    return f"sha256:{hashlib.sha256(payload).hexdigest()}"


def _why(e: Exception) -> str:
    return f"it has no field {e}" if isinstance(e, KeyError) else str(e)
