# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a spec, at two levels.

* `UPSTREAM`: what the Go library inside the runtimes refuses. A spec without problems here loads.
* `STRICT`: ours, asked before each write. On top of upstream it refuses what loads but does not do what was
  meant, differs between runtimes, or breaks when a container holds several devices.

Pure; never changes a spec and never stops at the first problem. Invariant: what upstream refuses strict refuses
too. `reference` rows in tests/cdi hold the upstream level against the library itself.

Sources: cdi.md 1.4 (upstream), 8.1 (strict), 1.8 and design.md 5 (why two devices must not disagree on a path).
"""

from __future__ import annotations

import enum
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from aliquot.api.errors import SettingsError
from aliquot.cdi import names, version
from aliquot.cdi.model import ContainerEdits, DeviceNode, Hook, IntelRdt, Mount, NetDevice, Spec

HOOK_NAMES: Final = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
DEVICE_TYPES: Final = ("", "b", "c", "u", "p")
NO_ACCESS: Final = "none"
"""A permission that newer libraries know; older ones refuse the file for it."""
CLOS_ID_LIMIT: Final = 4096
ANNOTATIONS_LIMIT: Final = 256 << 10
FILE_LIMIT: Final = 1 << 20
"""Bytes of a spec file that we are willing to write."""

_UINT32: Final = 1 << 32
_INT64: Final = 1 << 63
_CONTROL: Final = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ANNOTATION_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_DNS_SUBDOMAIN: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*")


class Level(enum.Enum):
    """How much is asked of a spec."""

    UPSTREAM = "upstream"
    STRICT = "strict"


class Problem(NamedTuple):
    """One thing that is wrong."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def problems(
    spec: Spec,
    level: Level = Level.STRICT,
    *,
    cap: str = version.DEFAULT_CAP,
    host_path_exists: Callable[[str], bool] | None = None,
) -> tuple[Problem, ...]:
    """Everything that `level` finds wrong, in the order of the file.

    `cap` and `host_path_exists` (asked for each host path) matter to the strict level only.
    """
    found = list(_upstream(spec))
    if level is Level.STRICT:
        found += _strict(spec, cap)
        if host_path_exists is not None:
            found += [
                Problem(where, f"{path} does not exist on the host")
                for where, path in host_paths(spec)
                if not host_path_exists(path)
            ]
    return tuple(found)


def validate(
    spec: Spec,
    level: Level = Level.STRICT,
    *,
    cap: str = version.DEFAULT_CAP,
    host_path_exists: Callable[[str], bool] | None = None,
) -> None:
    """Raise `SettingsError` with every problem that `problems` finds."""
    found = problems(spec, level, cap=cap, host_path_exists=host_path_exists)
    if found:
        raise SettingsError(
            f"CDI spec of kind {spec.kind!r} is not valid: " + "; ".join(str(problem) for problem in found)
        )


def edits_problems(edits: ContainerEdits, where: str) -> tuple[Problem, ...]:
    """What is wrong, at the strict level, with edits that are not part of a spec yet (an operator's file)."""
    return (*_upstream_edits(edits, where), *_strict_edits(edits, where))


def host_paths(spec: Spec) -> Iterator[tuple[str, str]]:
    """(place in the spec, host path) of every file or node of the host that `spec` relies on."""
    for where, edits in _all_edits(spec):
        for index, node in enumerate(edits.device_nodes):
            yield f"{where}.deviceNodes[{index}]", node.host_path or node.path
        for index, mount in enumerate(edits.mounts):
            yield f"{where}.mounts[{index}]", mount.host_path
        for index, hook in enumerate(edits.hooks):
            yield f"{where}.hooks[{index}]", hook.path


def env_problem(item: str) -> str:
    """Why upstream refuses an item of `env`; "" when it does not: it needs a "=" after a non-empty name."""
    return "" if item.find("=") > 0 else f"{item!r} is not NAME=value"


def net_device_problems(devices: tuple[NetDevice, ...], at: str) -> Iterator[Problem]:
    """What upstream refuses in `netDevices`, of one file or merged for one container: an empty or a repeated name."""
    hosts: set[str] = set()
    inside: set[str] = set()
    for index, device in enumerate(devices):
        for field, name, seen in (
            ("hostInterfaceName", device.host_interface_name, hosts),
            ("name", device.name, inside),
        ):
            if not name:
                yield Problem(f"{at}[{index}].{field}", "is empty")
            elif name in seen:
                yield Problem(f"{at}[{index}].{field}", f"{name!r} is there twice")
            seen.add(name)


# --- upstream ---------------------------------------------------------------------------------------------------


def _upstream(spec: Spec) -> Iterator[Problem]:
    if problem := version.version_problem(spec):
        yield Problem("cdiVersion", problem)
    if problem := names.kind_problem(spec.kind):
        yield Problem("kind", problem)
    if not spec.devices:
        yield Problem("devices", "there is none, a spec needs at least one")
    seen: set[str] = set()
    for index, device in enumerate(spec.devices):
        at = f"devices[{index}]"
        if problem := names.device_problem(device.name):
            yield Problem(f"{at}.name", problem)
        if device.name in seen:
            yield Problem(f"{at}.name", f"{device.name!r} is there twice")
        seen.add(device.name)
        if not device.container_edits:
            yield Problem(f"{at}.containerEdits", f"device {device.name!r} changes nothing, it needs at least one edit")
    for where, edits in _all_edits(spec):
        yield from _upstream_edits(edits, where)


def _all_edits(spec: Spec) -> Iterator[tuple[str, ContainerEdits]]:
    yield "containerEdits", spec.container_edits
    for index, device in enumerate(spec.devices):
        yield f"devices[{index}].containerEdits", device.container_edits


def _upstream_edits(edits: ContainerEdits, at: str) -> Iterator[Problem]:
    for index, item in enumerate(edits.env):
        if problem := env_problem(item):
            yield Problem(f"{at}.env[{index}]", problem)
    for index, node in enumerate(edits.device_nodes):
        yield from _upstream_node(node, f"{at}.deviceNodes[{index}]")
    yield from net_device_problems(edits.net_devices, f"{at}.netDevices")
    for index, hook in enumerate(edits.hooks):
        yield from _upstream_hook(hook, f"{at}.hooks[{index}]")
    for index, mount in enumerate(edits.mounts):
        if not mount.host_path:
            yield Problem(f"{at}.mounts[{index}].hostPath", "is empty")
        if not mount.container_path:
            yield Problem(f"{at}.mounts[{index}].containerPath", "is empty")
    if edits.intel_rdt is not None:
        yield from _upstream_rdt(edits.intel_rdt, f"{at}.intelRdt")
    for index, gid in enumerate(edits.additional_gids):
        yield from _in_range(gid, _UINT32, f"{at}.additionalGids[{index}]")


def _upstream_node(node: DeviceNode, at: str) -> Iterator[Problem]:
    if not node.path:
        yield Problem(f"{at}.path", "is empty")
    if node.type not in DEVICE_TYPES:
        yield Problem(f"{at}.type", f"{node.type!r} is none of b, c, u, p")
    if node.permissions != NO_ACCESS and set(node.permissions) - set("rwm"):
        yield Problem(f"{at}.permissions", f"{node.permissions!r} holds more than r, w and m")
    yield from _in_range(node.major, _INT64, f"{at}.major")
    yield from _in_range(node.minor, _INT64, f"{at}.minor")
    for field, value in (("fileMode", node.file_mode), ("uid", node.uid), ("gid", node.gid)):
        if value is not None:
            yield from _in_range(value, _UINT32, f"{at}.{field}")


def _upstream_hook(hook: Hook, at: str) -> Iterator[Problem]:
    if hook.hook_name not in HOOK_NAMES:
        yield Problem(f"{at}.hookName", f"{hook.hook_name!r} is none of {', '.join(HOOK_NAMES)}")
    if not hook.path:
        yield Problem(f"{at}.path", "is empty")
    for index, item in enumerate(hook.env):
        if problem := env_problem(item):
            yield Problem(f"{at}.env[{index}]", problem)
    if hook.timeout is not None and not -_INT64 <= hook.timeout < _INT64:
        yield Problem(f"{at}.timeout", f"{hook.timeout} does not fit into 64 bits")


def _upstream_rdt(rdt: IntelRdt, at: str) -> Iterator[Problem]:
    # "/" alone names the root class, so it is the one place where a slash may stand.
    name = rdt.clos_id
    if len(name.encode(errors="surrogatepass")) >= CLOS_ID_LIMIT:
        yield Problem(f"{at}.closID", f"has {CLOS_ID_LIMIT} bytes or more")
    elif name != "/" and (name in {".", ".."} or "/" in name or "\n" in name):
        yield Problem(f"{at}.closID", f"{name!r} is no name of a folder")


def _in_range(value: int, limit: int, at: str) -> Iterator[Problem]:
    if not 0 <= value < limit:
        yield Problem(at, f"{value} is outside 0..{limit - 1}")


# --- strict -----------------------------------------------------------------------------------------------------


def _strict(spec: Spec, cap: str) -> Iterator[Problem]:
    vendor, _, class_ = spec.kind.partition("/")
    for what, part, limit in (("vendor", vendor, names.VENDOR_LIMIT), ("class", class_, names.CLASS_LIMIT)):
        if not 2 <= len(part) <= limit:
            yield Problem("kind", f"{what} {part!r} has {len(part)} characters, 2 to {limit} are safe everywhere")
        if part != part.lower():
            yield Problem("kind", f"{what} {part!r} has upper case letters")
    yield from _strict_version(spec, cap)
    yield from _strict_annotations(spec.annotations, "annotations")
    for index, device in enumerate(spec.devices):
        at = f"devices[{index}]"
        if not device.name[:1].isalpha():
            yield Problem(f"{at}.name", f"{device.name!r} does not begin with a letter, which older runtimes ask for")
        if device.name == "all":
            yield Problem(f"{at}.name", "'all' would give every card to whoever asks for it")
        yield from _strict_annotations(device.annotations, f"{at}.annotations")
    for where, edits in _all_edits(spec):
        yield from _strict_edits(edits, where)
    yield from _disagreements(_all_edits(spec))


def _strict_version(spec: Spec, cap: str) -> Iterator[Problem]:
    try:
        needed = version.required(spec, cap=cap)
    except SettingsError as error:
        yield Problem("cdiVersion", str(error))
        return
    if spec.cdi_version != needed:
        yield Problem("cdiVersion", f"is {spec.cdi_version!r}, the content needs exactly {needed!r}")


def _strict_annotations(annotations: Mapping[str, str], at: str) -> Iterator[Problem]:
    for key in annotations:
        prefix, slash, name = key.rpartition("/")
        if (slash and not (len(prefix) <= 253 and _DNS_SUBDOMAIN.fullmatch(prefix))) or not (
            _ANNOTATION_NAME.fullmatch(name)
        ):
            yield Problem(at, f"{key!r} is no annotation key")
    size = sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items())
    if size > ANNOTATIONS_LIMIT:
        yield Problem(at, f"{size} bytes of annotations are more than {ANNOTATIONS_LIMIT}")


def _strict_edits(edits: ContainerEdits, at: str) -> Iterator[Problem]:
    env_names: set[str] = set()
    for index, item in enumerate(edits.env):
        name = item.partition("=")[0]
        if not _ENV_NAME.fullmatch(name):
            yield Problem(f"{at}.env[{index}]", f"{name!r} is no variable name that every shell knows")
        if name in env_names:
            yield Problem(f"{at}.env[{index}]", f"{name} is set twice")
        env_names.add(name)
        yield from _strict_text(item, f"{at}.env[{index}]")
    taken: set[str] = set()
    for index, node in enumerate(edits.device_nodes):
        yield from _strict_node(node, f"{at}.deviceNodes[{index}]")
        yield from _once(node.path, taken, f"{at}.deviceNodes[{index}].path")
    for index, mount in enumerate(edits.mounts):
        yield from _strict_mount(mount, f"{at}.mounts[{index}]")
        yield from _once(mount.container_path, taken, f"{at}.mounts[{index}].containerPath")
    for index, hook in enumerate(edits.hooks):
        yield from _strict_hook(hook, f"{at}.hooks[{index}]")
    gids: set[int] = {0}
    for index, gid in enumerate(edits.additional_gids):
        if gid in gids:
            yield Problem(f"{at}.additionalGids[{index}]", f"{gid} has no effect: it is 0 or there twice")
        gids.add(gid)


def _once(path: str, taken: set[str], at: str) -> Iterator[Problem]:
    if path in taken:
        yield Problem(at, f"{path} is used twice, the last use would win")
    taken.add(path)


def _strict_node(node: DeviceNode, at: str) -> Iterator[Problem]:
    yield from _strict_path(node.path, f"{at}.path")
    if node.host_path:
        yield from _strict_path(node.host_path, f"{at}.hostPath")
        if node.host_path == node.path:
            yield Problem(f"{at}.hostPath", "is the same as path; leave it out, it raises the version for nothing")
    if node.permissions == NO_ACCESS:
        yield Problem(f"{at}.permissions", "'none' is known to new runtimes only")
    elif len(set(node.permissions)) != len(node.permissions):
        yield Problem(f"{at}.permissions", f"{node.permissions!r} repeats a character")
    if (node.major or node.minor) and not (node.type in {"b", "c", "u"} and node.major):
        # Half of the numbers is worse than none: the rest comes from the host, and after a driver reload the
        # two no longer belong together (NemoClaw#4733).
        yield Problem(f"{at}.major", "numbers need type and major as well; or leave all out, the runtime looks them up")


def _strict_mount(mount: Mount, at: str) -> Iterator[Problem]:
    yield from _strict_path(mount.host_path, f"{at}.hostPath")
    yield from _strict_path(mount.container_path, f"{at}.containerPath")
    if mount.container_path == "/":
        yield Problem(f"{at}.containerPath", "is the container's root")
    for index, option in enumerate(mount.options):
        if not option or "," in option:
            yield Problem(f"{at}.options[{index}]", f"{option!r} is not one option")
        yield from _strict_text(option, f"{at}.options[{index}]")
    if len(set(mount.options)) != len(mount.options):
        yield Problem(f"{at}.options", "an option is there twice")


def _strict_hook(hook: Hook, at: str) -> Iterator[Problem]:
    yield from _strict_path(hook.path, f"{at}.path")
    if not hook.env:
        # runc gives a hook without environment the container's, LD_PRELOAD included (CVE-2025-23266).
        yield Problem(f"{at}.env", "is empty, so the program would inherit the container's environment")
    if not hook.args or hook.args[0] != posixpath.basename(hook.path):
        yield Problem(f"{at}.args", f"args[0] is argv[0] and must be {posixpath.basename(hook.path)!r}")
    if hook.timeout is not None and hook.timeout <= 0:
        yield Problem(f"{at}.timeout", f"{hook.timeout} s is no time")
    for index, item in enumerate((*hook.args, *hook.env)):
        yield from _strict_text(item, f"{at} (text {index})")


def _strict_path(path: str, at: str) -> Iterator[Problem]:
    if not path.startswith("/") or path.startswith("//") or posixpath.normpath(path) != path:
        yield Problem(at, f"{path!r} is not an absolute path in its shortest form")
    yield from _strict_text(path, at)


def _strict_text(text: str, at: str) -> Iterator[Problem]:
    if _CONTROL.search(text):
        yield Problem(at, f"{text!r} holds a control character")


def _disagreements(parts: Iterable[tuple[str, ContainerEdits]]) -> Iterator[Problem]:
    """Two devices may meet in one container; there the last one wins, so what they share has to be equal.

    A device always meets the edits of its own spec; repeating one of them is pointless, so it is refused too.
    """
    first: dict[tuple[str, str], tuple[str, object]] = {}
    for where, edits in parts:
        for key, value in _claims(edits):
            if key not in first:
                first[key] = (where, value)
                continue
            holder, other = first[key]
            if holder == where:
                continue  # said already by _strict_edits
            if holder == "containerEdits":
                yield Problem(where, f"{key[0]} {key[1]} is already in the spec's own edits")
            elif value != other:
                yield Problem(where, f"{key[0]} {key[1]} differs from that of {holder}; in one container the last wins")


def _claims(edits: ContainerEdits) -> Iterator[tuple[tuple[str, str], object]]:
    for item in edits.env:
        yield ("variable", item.partition("=")[0]), item
    for node in edits.device_nodes:
        yield ("path", node.path), node
    for mount in edits.mounts:
        yield ("path", mount.container_path), mount
