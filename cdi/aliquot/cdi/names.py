# SPDX-License-Identifier: Apache-2.0
"""The grammar of CDI names: vendors, classes, devices, qualified names, annotations and file names.

Pure text. Must never touch a file. Invariant: what `parse_qualified` accepts is what the Go library of the
runtimes accepts, not more, so a name that we return to the kubelet cannot be malformed to them; and every part
that we *make* is longer than one character, because a one-character vendor or class crashed library 1.1.0.

Sources: cdi.md 1.4 (grammar), 1.6 (file names), 1.7 (annotations).
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from aliquot.api.errors import SettingsError

ANNOTATION_PREFIX: Final = "cdi.k8s.io/"
ANNOTATION_BODY_LIMIT: Final = 63
VENDOR_LIMIT: Final = 253
CLASS_LIMIT: Final = 63
"""The two limits are in the text of the specification; the Go code has none, so only our strict level asks."""

_ASCII_ALNUM: Final = "A-Za-z0-9"
_PART: Final = re.compile(rf"[A-Za-z](?:[{_ASCII_ALNUM}_.-]*[{_ASCII_ALNUM}])?")
_DEVICE: Final = re.compile(rf"[{_ASCII_ALNUM}](?:[{_ASCII_ALNUM}_.:-]*[{_ASCII_ALNUM}])?")
_ANNOTATION_BODY: Final = re.compile(rf"[{_ASCII_ALNUM}](?:[{_ASCII_ALNUM}_.-]*[{_ASCII_ALNUM}])?")


class QualifiedName(NamedTuple):
    """`<vendor>/<class>=<device>`."""

    vendor: str
    class_: str
    device: str

    @property
    def kind(self) -> str:
        """`<vendor>/<class>`."""
        return f"{self.vendor}/{self.class_}"

    def __str__(self) -> str:
        return f"{self.vendor}/{self.class_}={self.device}"


def vendor_problem(vendor: str) -> str:
    """Why `vendor` is no vendor name; "" when it is one."""
    return _part_problem("vendor", vendor)


def class_problem(class_: str) -> str:
    """Why `class_` is no class name; "" when it is one. A dot is allowed but needs CDI 0.6.0."""
    return _part_problem("class", class_)


def device_problem(name: str) -> str:
    """Why `name` is no device name; "" when it is one. A leading digit is allowed but needs CDI 0.5.0."""
    if not name:
        return "device name is empty"
    if not _DEVICE.fullmatch(name):
        return (
            f"device name {name!r} must begin and end with a letter or digit and hold only letters, digits, "
            "'_', '.', ':' and '-' between"
        )
    return ""


def kind_problem(kind: str) -> str:
    """Why `kind` is not `<vendor>/<class>`; "" when it is."""
    vendor, slash, class_ = kind.partition("/")
    if not slash:
        return f"kind {kind!r} is not <vendor>/<class>"
    return vendor_problem(vendor) or class_problem(class_)


def parse_qualified(text: str) -> QualifiedName:
    """Split `vendor/class=device` at the first "=" and the first "/".

    Raises `SettingsError` naming the part at fault.
    """
    kind, equals, device = text.partition("=")
    vendor, slash, class_ = kind.partition("/")
    if not equals or not slash:
        raise SettingsError(f"CDI device {text!r} is not <vendor>/<class>=<device>")
    problem = vendor_problem(vendor) or class_problem(class_) or device_problem(device)
    if problem:
        raise SettingsError(f"CDI device {text!r}: {problem}")
    return QualifiedName(vendor, class_, device)


def is_qualified(text: str) -> bool:
    """Whether `parse_qualified` accepts `text`."""
    try:
        parse_qualified(text)
    except SettingsError:
        return False
    return True


def annotation_key(plugin: str, device_id: str) -> str:
    """Key under which `plugin` names the CDI devices of one container; "/" in `device_id` becomes "_".

    Raises `SettingsError` when the result is no annotation key.
    """
    if not plugin or not device_id:
        raise SettingsError("a CDI annotation key needs a plugin name and a device id, one of them is empty")
    body = f"{plugin}_{device_id.replace('/', '_')}"
    if len(body) > ANNOTATION_BODY_LIMIT:
        raise SettingsError(
            f"CDI annotation key {body!r} has {len(body)} characters, at most {ANNOTATION_BODY_LIMIT} are allowed; "
            "use a shorter plugin name or device id"
        )
    if not _ANNOTATION_BODY.fullmatch(body):
        raise SettingsError(
            f"CDI annotation key {body!r} must begin and end with a letter or digit and hold only letters, "
            "digits, '_', '.' and '-' between"
        )
    return ANNOTATION_PREFIX + body


def annotation_value(devices: tuple[str, ...] | list[str]) -> str:
    """Comma list of qualified names. Raises `SettingsError` when one of them is none."""
    for device in devices:
        parse_qualified(device)
    return ",".join(devices)


def updated_annotations(
    annotations: dict[str, str], plugin: str, device_id: str, devices: tuple[str, ...] | list[str]
) -> dict[str, str]:
    """A copy of `annotations` with one more entry.

    Raises `SettingsError` for a malformed part and for a key that is already there.
    """
    key = annotation_key(plugin, device_id)
    if key in annotations:
        raise SettingsError(f"annotation {key} is already set; give each allocation a device id of its own")
    return {**annotations, key: annotation_value(devices)}


def parse_annotations(annotations: dict[str, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Keys of ours and the devices they name, both in key order.

    Raises `SettingsError` for the first malformed name: one bad name spoils the lot, as in the runtimes.
    """
    keys = tuple(sorted(key for key in annotations if key.startswith(ANNOTATION_PREFIX)))
    devices: list[str] = []
    for key in keys:
        for device in annotations[key].split(","):
            if not is_qualified(device):
                raise SettingsError(f"annotation {key}: {device!r} is not <vendor>/<class>=<device>")
            devices.append(device)
    return keys, tuple(devices)


def spec_file_name(vendor: str, class_: str) -> str:
    """File name, without a directory, of a spec that lists everything of one kind."""
    return f"{vendor}-{class_}.json"


def transient_file_name(vendor: str, class_: str, transient_id: str) -> str:
    """File name of a spec that lives as long as one thing does (for us: a claim); "/" in the id becomes "_".

    Raises `SettingsError` for an id that cannot be part of a file name.
    """
    if not transient_id or "\0" in transient_id or len(transient_id) > 128:
        raise SettingsError(f"{transient_id!r} cannot name a CDI spec file: use 1 to 128 characters")
    return f"{vendor}-{class_}_{transient_id.replace('/', '_')}.json"


def _part_problem(what: str, part: str) -> str:
    if not part:
        return f"{what} is empty"
    if not _PART.fullmatch(part):
        return (
            f"{what} {part!r} must begin with a letter, end with a letter or digit and hold only letters, digits, "
            "'_', '.' and '-' between"
        )
    return ""
