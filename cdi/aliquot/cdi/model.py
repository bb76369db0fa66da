# SPDX-License-Identifier: Apache-2.0
"""The eight objects of a CDI spec file, as frozen values.

Pure shapes: nothing here decides whether a spec is *valid* (`validate`), which version it needs (`version`) or
where it lies (`store`). Never add a field that CDI does not have: readers refuse unknown keys, so one stray key
makes a whole file vanish. Invariant: `from_dict(x.to_dict()) == x` for every spec.

Field names and types are those of CDI 1.1.0 (cdi.md 1.3). Two of them carry a trap: `major` and `minor` cannot
tell 0 from absent, and an *empty* `IntelRdt` is not the same as none (it raises the version a spec needs).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final, Self

import msgspec

from aliquot.api.errors import SettingsError, foreign

__all__ = [
    "EMPTY_EDITS",
    "ContainerEdits",
    "Device",
    "DeviceNode",
    "Hook",
    "IntelRdt",
    "Mount",
    "NetDevice",
    "Spec",
]


class _Object(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    """What the eight have in common: frozen, keyword only, unknown keys refused, and how they become JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in a fixed order: that of the fields here. Optional fields that are empty are left out."""
        out: dict[str, Any] = {}
        for field in _fields(type(self)):
            value = getattr(self, field.name)
            if not field.required and value == field.default:
                continue
            if not field.required and isinstance(value, Mapping) and not value:
                continue
            out[field.encode_name] = _plain(value)
        return out

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """The object that `data` describes; keys with a JSON null count as absent, as every reader has it.

        Raises `SettingsError` naming the place for an unknown key, a missing key or a wrong type.
        """
        try:
            return msgspec.convert(_without_nulls(data), cls)
        except msgspec.ValidationError as error:
            raise SettingsError(f"not a CDI {cls.__name__}: {foreign(error)}") from error


@functools.cache
def _fields(kind: type[_Object]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """The fields of a class; msgspec works them out of the annotations each time, most of the cost of a file."""
    return msgspec.structs.fields(kind)


def _plain(value: Any) -> Any:
    if isinstance(value, _Object):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: value[key] for key in sorted(value)}
    return value


def _without_nulls(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_nulls(item) for item in value]
    return value


class DeviceNode(_Object, frozen=True, kw_only=True):
    """A device node inside the container; all numbers 0 or None: the runtime looks at the host's node."""

    path: str
    """Where it appears in the container."""
    host_path: str = ""
    """Where it is on the host; "" = the same as `path` (naming it needs CDI 0.5.0 even when equal)."""
    type: str = ""
    """`b`, `c`, `u` or `p`; "" = as on the host."""
    major: int = 0
    minor: int = 0
    file_mode: int | None = None
    """Mode bits as a number; there is no octal text form."""
    permissions: str = ""
    """Characters of `rwm` for the device cgroup; "" = all three."""
    uid: int | None = None
    gid: int | None = None


class Mount(_Object, frozen=True, kw_only=True):
    """A mount into the container."""

    host_path: str
    container_path: str
    options: tuple[str, ...] = ()
    type: str = ""
    """Needs CDI 0.4.0 when not empty."""


class Hook(_Object, frozen=True, kw_only=True):
    """A program the runtime starts on the host. We write none (cases.md B234), but read those of others."""

    hook_name: str
    path: str
    args: tuple[str, ...] = ()
    """`args[0]` is argv[0], not the first option."""
    env: tuple[str, ...] = ()
    timeout: int | None = None
    """Seconds."""


class NetDevice(_Object, frozen=True, kw_only=True):
    """A network interface of the host that moves into the container; needs CDI 1.1.0."""

    host_interface_name: str
    name: str


class IntelRdt(_Object, frozen=True, kw_only=True):
    """Cache and bandwidth class; needs CDI 0.7.0, its last two fields 1.1.0."""

    clos_id: str = msgspec.field(default="", name="closID")
    l3_cache_schema: str = msgspec.field(default="", name="l3CacheSchema")
    mem_bw_schema: str = msgspec.field(default="", name="memBwSchema")
    schemata: tuple[str, ...] | None = None
    """None = absent; an empty list already counts as used."""
    enable_monitoring: bool = False


class ContainerEdits(_Object, frozen=True, kw_only=True):
    """What changes in a container."""

    env: tuple[str, ...] = ()
    """`NAME=value` items."""
    device_nodes: tuple[DeviceNode, ...] = ()
    net_devices: tuple[NetDevice, ...] = ()
    hooks: tuple[Hook, ...] = ()
    mounts: tuple[Mount, ...] = ()
    intel_rdt: IntelRdt | None = None
    additional_gids: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is any edit at all: a device without one is refused by every reader (cases.md B121)."""
        return self != EMPTY_EDITS


EMPTY_EDITS: Final = ContainerEdits()


class Device(_Object, frozen=True, kw_only=True):
    """One device that a container can ask for by name."""

    name: str
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    container_edits: ContainerEdits


class Spec(_Object, frozen=True, kw_only=True):
    """One CDI spec file."""

    cdi_version: str
    kind: str
    """`<vendor>/<class>`."""
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    devices: tuple[Device, ...]
    container_edits: ContainerEdits = EMPTY_EDITS
    """Applied once per file when any of its devices is asked for."""

    def qualified_names(self) -> tuple[str, ...]:
        """`<vendor>/<class>=<device>` of each device, in order."""
        return tuple(f"{self.kind}={device.name}" for device in self.devices)
