# SPDX-License-Identifier: Apache-2.0
"""What a grant changes in a container. The only code that decides environment, mounts and device nodes.

Pure. Both doors call it. A container may hold several grants, and the runtime merges their edits by path and by
variable name, the last one winning (design.md 5). Hence the two invariants: nothing of *one* grant sits on a path
or in a variable that another grant also uses; and what they share (driver, hook, preload file) is equal for all.

No hooks, no ldconfig, nothing of the image is run or followed on the host (cases.md B234). Device access is given
by the runtime's own device list, so it survives a reload of systemd's units (B082), and without numbers, so the
runtime looks at the node that is there when the container starts. No LD_PRELOAD and no LD_LIBRARY_PATH: a user's
own would be lost, an `env -i` would lose ours.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from typing import Final, Literal, TypeVar

from aliquot.api import names
from aliquot.api.errors import HardwareError, InternalError, RequestError, SettingsError
from aliquot.api.grant import Grant
from aliquot.cdi.driver_files import DriverFiles, HostNode
from aliquot.cdi.model import ContainerEdits, Device, DeviceNode, Mount, Spec
from aliquot.cdi.version import DEFAULT_CAP, EARLIEST, with_lowest_version

Limiter = Literal["hook", "none"]
_T = TypeVar("_T")

READ_ONLY: Final = ("ro", "nosuid", "nodev", "rbind", "rprivate")
READ_DATA: Final = ("ro", "nosuid", "nodev", "noexec", "rbind", "rprivate")
READ_WRITE: Final = ("rw", "nosuid", "nodev", "noexec", "rbind", "rprivate")
NODE_ACCESS: Final = "rw"
"""Enough to use a card; making further nodes is nothing a container has to do."""


def edits_for(grant: Grant, files: DriverFiles, *, limiter: Limiter = "hook") -> ContainerEdits:
    """Everything that a container needs to use `grant`.

    `limiter="none"` leaves the hook and its preload file out; that is allowed only for a grant without any limit.
    Grant file and usage folder are mounted all the same, so that such a grant can stand beside a limited one.
    Raises `RequestError` for a limited grant with limiter "none", `HardwareError` for a card whose nodes were not
    discovered, `SettingsError` when the operator's extra edits claim a path or variable of ours.
    """
    return merge(_shared(files), _own(grant, files, limiter))


def spec_for(grants: Iterable[tuple[Grant, Limiter]], files: DriverFiles, *, cap: str = DEFAULT_CAP) -> Spec:
    """The spec of one claim: one device per grant, in order, kind `gpu.aliquot.dev/claim`, lowest version.

    What is the same for every grant is said once, at the level of the spec, and each device holds the rest; with
    one of its devices a container gets exactly `edits_for` of that grant.
    Raises what `edits_for` raises, and `InternalError` for two grants of one name or none at all.
    """
    shared = _shared(files)
    devices: dict[str, Device] = {}
    for grant, limiter in grants:
        if grant.name in devices:
            raise InternalError(f"two grants of one claim are called {grant.name}; please report this")
        own = _own(grant, files, limiter)
        merge(shared, own)  # asks whether the operator's extra edits get in the way
        devices[grant.name] = Device(name=grant.name, container_edits=own)
    if not devices:
        raise InternalError("a claim without grants has no CDI spec; please report this")
    spec = Spec(cdi_version=EARLIEST, kind=names.CDI_KIND, devices=tuple(devices.values()), container_edits=shared)
    return with_lowest_version(spec, cap=cap)


def merge(*parts: ContainerEdits) -> ContainerEdits:
    """All edits one after the other; an edit that is there already is not repeated.

    Raises `SettingsError` when two parts want different things of one path or variable, or two classes of cache.
    """
    env: dict[str, str] = {}
    paths: dict[str, DeviceNode | Mount] = {}
    for part in parts:
        for item in part.env:
            name = item.partition("=")[0]
            if env.setdefault(name, item) != item:
                raise SettingsError(f"variable {name} is given two values, {env[name]!r} and {item!r}; keep one")
        placed: tuple[DeviceNode | Mount, ...] = (*part.device_nodes, *part.mounts)
        for edit in placed:
            path = edit.path if isinstance(edit, DeviceNode) else edit.container_path
            if paths.setdefault(path, edit) != edit:
                raise SettingsError(f"container path {path} is claimed by two edits; keep one")
    rdts = list(dict.fromkeys(part.intel_rdt for part in parts if part.intel_rdt is not None))
    if len(rdts) > 1:
        raise SettingsError("two edits set intelRdt; keep one")
    return ContainerEdits(
        env=tuple(env.values()),
        device_nodes=tuple(edit for edit in paths.values() if isinstance(edit, DeviceNode)),
        net_devices=_distinct(device for part in parts for device in part.net_devices),
        hooks=_distinct(hook for part in parts for hook in part.hooks),
        mounts=tuple(edit for edit in paths.values() if isinstance(edit, Mount)),
        intel_rdt=rdts[0] if rdts else None,
        additional_gids=_distinct(gid for part in parts for gid in part.additional_gids),
    )


def _distinct(items: Iterable[_T]) -> tuple[_T, ...]:
    return tuple(dict.fromkeys(items))


def _shared(files: DriverFiles) -> ContainerEdits:
    """The driver, and what the operator adds: the same for every grant."""
    driver = ContainerEdits(
        env=(f"{names.ENV_VISIBLE_DEVICES}=void",),
        device_nodes=tuple(_node(node) for node in files.common_nodes),
        mounts=tuple(
            Mount(host_path=file.host, container_path=path, options=READ_ONLY)
            for file in (*files.libraries, *files.binaries)
            for path in file.container
        ),
    )
    for mount in files.extra_edits.mounts:
        covered = next((m for m in driver.mounts if m.container_path.startswith(f"{mount.container_path}/")), None)
        if covered is not None:
            raise SettingsError(
                f"extra edits: {mount.container_path} covers {covered.container_path}, a file of the driver, whose "
                f"mount point would then be made inside {mount.host_path} on the host; mount single files instead"
            )
    return merge(driver, files.extra_edits)


def _own(grant: Grant, files: DriverFiles, limiter: Limiter) -> ContainerEdits:
    if limiter == "none" and (grant.memory_bytes or grant.core_percent):
        raise RequestError(
            f"grant {grant.name} has a limit ({grant.memory_bytes} bytes, {grant.core_percent} %) and limiter 'none', "
            "which would not hold it; drop the limiter parameter, or ask for the whole card"
        )
    nodes = files.card_nodes.get(grant.card_uuid)
    if not nodes:
        raise HardwareError(
            f"grant {grant.name}: no device node of card {grant.card_uuid} is known; "
            "the card was not there when the driver's files were looked at"
        )
    mounts = [
        _bind(f"{files.run_dir}/grants/{grant.name}", f"{names.CONTAINER_GRANTS}/{grant.name}", READ_DATA),
        _bind(f"{files.run_dir}/usage/{grant.name}", f"{names.CONTAINER_USAGE}/{grant.name}", READ_WRITE),
    ]
    if limiter == "hook":
        mounts += [
            _bind(files.hook_library, names.CONTAINER_LIBRARY, READ_ONLY),
            _bind(files.preload_file, names.CONTAINER_PRELOAD, READ_DATA),
        ]
    return ContainerEdits(device_nodes=tuple(_node(node) for node in nodes), mounts=tuple(mounts))


def _bind(host: str, container: str, options: tuple[str, ...]) -> Mount:
    return Mount(host_path=posixpath.normpath(host), container_path=container, options=options)


def _node(node: HostNode) -> DeviceNode:
    return DeviceNode(path=node.path, host_path="" if node.host == node.path else node.host, permissions=NODE_ACCESS)
