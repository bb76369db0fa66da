# SPDX-License-Identifier: Apache-2.0
"""What a runtime makes of CDI devices: an OCI spec and names go in, the changed OCI spec comes out.

Pure but for the look at device nodes, which the caller passes in. For tests and `explain`; no pod depends on it.
Invariant: the outcome equals that of the Go library as JSON, order of lists included, because that order decides
which of two edits wins. Rules in cdi.md 1.8, each held against the library in tests/cdi.
"""

from __future__ import annotations

import copy
import os
import posixpath
import stat
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from aliquot.api.errors import HardwareError, SettingsError
from aliquot.cdi.model import ContainerEdits, DeviceNode, Hook, IntelRdt, Mount
from aliquot.cdi.scan import Found
from aliquot.cdi.validate import net_device_problems

_TYPES: Final = {stat.S_IFCHR: "c", stat.S_IFBLK: "b", stat.S_IFIFO: "p"}


class NodeFacts(NamedTuple):
    """A device node of the host."""

    type: str
    """`b`, `c` or `p`."""
    major: int
    minor: int
    mode: int
    """Permission bits."""


def look_at_node(path: str) -> NodeFacts:
    """The node at `path`, links not followed, as runtimes do it.

    Raises `HardwareError` when there is none, or something else.
    """
    try:
        status = os.lstat(path)
    except OSError as error:
        raise HardwareError(f"device node {path}: {error.strerror}") from error
    kind = _TYPES.get(stat.S_IFMT(status.st_mode))
    if kind is None:
        raise HardwareError(f"{path} is not a device node")
    numbered = kind != "p"
    return NodeFacts(
        kind,
        os.major(status.st_rdev) if numbered else 0,
        os.minor(status.st_rdev) if numbered else 0,
        stat.S_IMODE(status.st_mode),
    )


def inject(
    oci: Mapping[str, Any],
    devices: Mapping[str, Found],
    names: Iterable[str],
    *,
    look_at: Callable[[str], NodeFacts] = look_at_node,
) -> dict[str, Any]:
    """A copy of `oci` with the edits of the devices called `names`, in that order.

    Edits of a spec itself are applied once, before those of its first device.
    Raises `SettingsError` listing every name that is not in `devices`, or for a network interface that two of them
    (or one, asked for twice) want to move; `HardwareError` for a missing node.
    """
    wanted = tuple(names)
    missing = [name for name in wanted if name not in devices]
    if missing:
        raise SettingsError(f"unresolvable CDI devices {', '.join(missing)}; look at the files in the CDI directories")
    out: dict[str, Any] = copy.deepcopy(dict(oci))
    parts: list[ContainerEdits] = []
    seen: set[object] = set()
    for name in wanted:
        found = devices[name]
        if found.path not in seen:
            seen.add(found.path)
            parts.append(found.spec.container_edits)
        parts.append(found.device.container_edits)
    _apply(out, parts, look_at)
    return out


def _apply(oci: dict[str, Any], parts: list[ContainerEdits], look_at: Callable[[str], NodeFacts]) -> None:
    env = [item for part in parts for item in part.env]
    if env:
        _set_env(_process(oci), env)
    for part in parts:
        for node in part.device_nodes:
            _add_node(oci, node, look_at)
    net_devices = tuple(device for part in parts for device in part.net_devices)
    for problem in net_device_problems(net_devices, "netDevices of all devices together"):
        raise SettingsError(str(problem))
    for device in net_devices:
        _linux(oci).setdefault("netDevices", {})[device.host_interface_name] = {"name": device.name}
    mounts = [mount for part in parts for mount in part.mounts]
    if mounts:
        _add_mounts(oci, mounts)
    for part in parts:
        for hook in part.hooks:
            oci.setdefault("hooks", {}).setdefault(hook.hook_name, []).append(_hook(hook))
    for part in parts:
        if part.intel_rdt is not None:
            _linux(oci)["intelRdt"] = _rdt(part.intel_rdt)
    for gid in (gid for part in parts for gid in part.additional_gids if gid):
        gids = _process(oci).setdefault("user", {"uid": 0, "gid": 0}).setdefault("additionalGids", [])
        if gid not in gids:
            gids.append(gid)


def _process(oci: dict[str, Any]) -> dict[str, Any]:
    process: dict[str, Any] = oci.setdefault("process", {"user": {"uid": 0, "gid": 0}, "cwd": ""})
    return process


def _linux(oci: dict[str, Any]) -> dict[str, Any]:
    linux: dict[str, Any] = oci.setdefault("linux", {})
    return linux


def _set_env(process: dict[str, Any], items: list[str]) -> None:
    """Set variables in place; one that is there more than once changes where it stands last."""
    env: list[str] = process.setdefault("env", [])
    place = {item.partition("=")[0]: index for index, item in enumerate(env)}
    for item in items:
        name = item.partition("=")[0]
        if name in place:
            env[place[name]] = item
        else:
            place[name] = len(env)
            env.append(item)


def _add_node(oci: dict[str, Any], node: DeviceNode, look_at: Callable[[str], NodeFacts]) -> None:
    type_, major, minor, mode = node.type, node.major, node.minor, node.file_mode
    host = node.host_path or node.path
    complete = bool(type_) and (major != 0 or type_ == "p")
    try:
        facts = look_at(host)
    except HardwareError:
        if not complete:
            raise
    else:
        mode = facts.mode if mode is None else mode
        if not complete:
            if type_ and type_ != facts.type:
                raise HardwareError(f"device node {node.path}: the spec says type {type_}, {host} is {facts.type}")
            type_ = facts.type
            if not major and type_ != "p":
                major, minor = facts.major, facts.minor
    device: dict[str, Any] = {"path": node.path, "type": type_, "major": major, "minor": minor}
    user = oci.get("process", {}).get("user", {})
    optional = {
        "fileMode": mode,
        "uid": node.uid if node.uid is not None else user.get("uid") or None,
        "gid": node.gid if node.gid is not None else user.get("gid") or None,
    }
    device |= {key: value for key, value in optional.items() if value is not None}
    present: list[dict[str, Any]] = _linux(oci).setdefault("devices", [])
    _drop_first(present, "path", node.path)
    present.append(device)
    if type_ in {"b", "c"}:
        rule: dict[str, Any] = {"allow": True, "type": type_, "major": major, "minor": minor}
        if node.permissions != "none":
            rule["access"] = node.permissions or "rwm"
        _linux(oci).setdefault("resources", {}).setdefault("devices", []).append(rule)


def _add_mounts(oci: dict[str, Any], mounts: list[Mount]) -> None:
    present: list[dict[str, Any]] = oci.setdefault("mounts", [])
    mapped = _has_user_namespace(oci)
    for mount in mounts:
        entry: dict[str, Any] = {"destination": mount.container_path, "source": mount.host_path}
        if mount.type:
            entry["type"] = mount.type
        options = [*mount.options, *(_idmap(mount) if mapped else ())]
        if options:
            entry["options"] = options
        _drop_first(present, "destination", mount.container_path)
        present.append(entry)
    present.sort(key=lambda entry: posixpath.normpath(entry["destination"]).count("/"))


def _has_user_namespace(oci: dict[str, Any]) -> bool:
    linux = oci.get("linux", {})
    return bool(
        linux.get("uidMappings")
        and linux.get("gidMappings")
        and any(namespace["type"] == "user" for namespace in linux.get("namespaces", []))
    )


def _idmap(mount: Mount) -> tuple[str, ...]:
    """The option that maps owners of a bind mount into the container's user namespace."""
    if "idmap" in mount.options or "ridmap" in mount.options:
        return ()
    binding = [option for option in mount.options if option in {"bind", "rbind"}]
    if binding:
        return ("ridmap",) if binding[-1] == "rbind" else ("idmap",)  # the last one counts, as for mount(8)
    return ("idmap",) if mount.type == "bind" else ()


def _drop_first(entries: list[dict[str, Any]], key: str, value: str) -> None:
    for index, entry in enumerate(entries):
        if entry.get(key) == value:
            del entries[index]
            return


def _hook(hook: Hook) -> dict[str, Any]:
    out: dict[str, Any] = {"path": hook.path}
    if hook.args:
        out["args"] = list(hook.args)
    if hook.env:
        out["env"] = list(hook.env)
    if hook.timeout is not None:
        out["timeout"] = hook.timeout
    return out


def _rdt(rdt: IntelRdt) -> dict[str, Any]:
    out = rdt.to_dict()
    if not out.get("schemata"):
        out.pop("schemata", None)
    return out
