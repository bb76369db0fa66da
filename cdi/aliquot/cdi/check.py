# SPDX-License-Identifier: Apache-2.0
"""Whether a container runtime will find what we write: the CDI part of `aliquot-dra-driver --check`.

Says which directories the runtimes on this node read, and proves that a device written to ours resolves there: a
probe is written as every claim's file is, looked up afresh in the runtime's directories, and removed. Never
leaves the probe behind (what a killed check leaves, the next one takes away) and never touches another file.
Invariant: no finding is "ok" for something that was not tried.

A runtime cannot be asked; its configuration can be read. What a node's configuration does not say is taken from
the defaults of cdi.md 1.9 and called a default in the text.
"""

from __future__ import annotations

import enum
import secrets
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from aliquot.api.errors import AliquotError, foreign
from aliquot.api.names import CDI_VENDOR
from aliquot.cdi.host import HostTree
from aliquot.cdi.model import ContainerEdits, Device, Spec
from aliquot.cdi.scan import scan
from aliquot.cdi.store import SpecStore
from aliquot.cdi.version import EARLIEST

DEFAULT_DIRECTORIES: Final = ("/etc/cdi", "/var/run/cdi")
CONTAINERD_FILES: Final = (
    "/etc/containerd/config.toml",
    "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
    "/var/snap/microk8s/current/args/containerd.toml",
)
CRIO_FILE: Final = "/etc/crio/crio.conf"
CRIO_DROP_INS: Final = "/etc/crio/crio.conf.d"
PROBE_CLASS: Final = "probe"


class State(enum.Enum):
    """How a finding is meant."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


class Finding(NamedTuple):
    """One line of a check."""

    state: State
    subject: str
    text: str


class Runtime(NamedTuple):
    """What a runtime's configuration says about CDI."""

    name: str
    source: str
    """The file it is from, or "defaults"."""
    directories: tuple[str, ...]
    enabled: bool | None
    """None: the file does not say, and releases of that runtime differ in their default."""


def check(directory: Path, *, runtime_directories: Sequence[str] = (), host_prefix: str = "") -> tuple[Finding, ...]:
    """Everything that can be said about CDI on this node without starting a container.

    `directory` is ours, as this process sees it; `runtime_directories` overrides what the configuration of the
    runtimes says; `host_prefix` is where this process sees the host's `/`, "" for its own.
    """
    findings: list[Finding] = []
    store = SpecStore(directory, class_=PROBE_CLASS)
    try:
        store.prepare()
        store.sweep(())
    except AliquotError as error:
        return (Finding(State.FAILED, "CDI directory", str(error)),)
    findings.append(Finding(State.OK, "CDI directory", f"{directory} exists and can be written"))
    if runtime_directories:
        runtimes: tuple[Runtime, ...] = (
            Runtime("container runtime", "the command line", tuple(runtime_directories), True),
        )
    else:
        runtimes = read_runtimes(host_prefix)
    for runtime in runtimes:
        findings += _check_runtime(store, runtime, HostTree(host_prefix))
    return tuple(findings)


def read_runtimes(host_prefix: str = "") -> tuple[Runtime, ...]:
    """The container runtimes whose configuration is on this node; one with the defaults when there is none."""
    tree = HostTree(host_prefix)
    found = [runtime for path in CONTAINERD_FILES if (runtime := _containerd(tree, path))]
    crio = _crio(tree)
    if crio is not None:
        found.append(crio)
    return tuple(found) or (Runtime("container runtime", "defaults", DEFAULT_DIRECTORIES, None),)


def _containerd(tree: HostTree, path: str) -> Runtime | None:
    """What the file says, with what it imports laid over it as containerd does; None when there is no file."""
    config = _toml(tree, path)
    if config is None:
        return None
    imports = config.get("imports", [])
    for pattern in imports if isinstance(imports, list) else []:
        folder, _, name = str(pattern).rpartition("/")
        for match in _names(tree, folder or "/"):
            if Path(match).match(name):
                _merge(config, _toml(tree, f"{folder}/{match}") or {})
    new = _table(config, "plugins", "io.containerd.cri.v1.runtime")
    old = _table(config, "plugins", "io.containerd.grpc.v1.cri")
    enabled = new.get("enable_cdi", old.get("enable_cdi"))
    version = config.get("version", 1)
    if enabled is None and isinstance(version, int) and version >= 3:
        enabled = True  # only containerd 2 has this format, and there CDI is on unless switched off
    return Runtime("containerd", path, _directories(new) or _directories(old) or DEFAULT_DIRECTORIES, enabled)


def _crio(tree: HostTree) -> Runtime | None:
    config: dict[str, Any] = {}
    read: list[str] = []
    for path in (CRIO_FILE, *(f"{CRIO_DROP_INS}/{name}" for name in _names(tree, CRIO_DROP_INS))):
        content = _toml(tree, path)
        if content is not None:
            _merge(config, content)
            read.append(path)
    if not read:
        return None
    return Runtime("CRI-O", read[0], _directories(_table(config, "crio", "runtime")) or DEFAULT_DIRECTORIES, True)


def _directories(table: Mapping[str, Any]) -> tuple[str, ...]:
    dirs = table.get("cdi_spec_dirs")
    return tuple(str(name) for name in dirs) if isinstance(dirs, list) else ()


def _table(config: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """A table deep inside; an empty one when anything on the way is missing or no table."""
    for key in keys:
        config = config.get(key, {})
        if not isinstance(config, Mapping):
            return {}
    return config


def _names(tree: HostTree, folder: str) -> list[str]:
    try:
        place = tree.find(folder)
        return sorted(entry.name for entry in tree.entries(place)) if place else []
    except OSError:
        return []


def _toml(tree: HostTree, path: str) -> dict[str, Any] | None:
    """None when there is no such file; empty when it cannot be read, so that nothing is taken as said."""
    try:
        place = tree.find(path)
        return tomllib.loads(tree.text(place)) if place else None
    except (tomllib.TOMLDecodeError, OSError):
        return {}


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _check_runtime(store: SpecStore, runtime: Runtime, tree: HostTree) -> Iterable[Finding]:
    subject = f"{runtime.name} ({runtime.source})"
    reads = " and ".join(runtime.directories)
    if runtime.enabled is False:
        yield Finding(State.FAILED, subject, "CDI is switched off: set enable_cdi = true and restart the runtime")
        return
    if runtime.enabled is None:
        text = f"reads {reads} if CDI is on: it is in CRI-O and containerd 2, in containerd 1.7 set enable_cdi = true"
        yield Finding(State.WARNING, subject, text)
    else:
        yield Finding(State.OK, subject, f"reads {reads}")
    seen: list[Path] = []
    for name in runtime.directories:
        try:
            place = tree.find(name)
            if place and tree.is_directory(place):
                seen.append(tree.local(place))
            else:
                yield Finding(State.WARNING, subject, f"{name} does not exist, which some runtimes log as an error")
        except OSError as error:
            yield Finding(State.WARNING, subject, f"cannot look at {name}: {error.strerror}")
    yield _probe(store, seen, subject, reads)
    for path, texts in scan(seen).errors.items():
        for text in texts:
            yield Finding(State.WARNING, subject, foreign(f"{path} is not read: {text}"))


def _probe(store: SpecStore, directories: Sequence[Path], subject: str, reads: str) -> Finding:
    token = secrets.token_hex(8)
    device = Device(name=f"c-{token}-probe", container_edits=ContainerEdits(env=(f"ALIQUOT_PROBE={token}",)))
    spec = Spec(cdi_version=EARLIEST, kind=f"{CDI_VENDOR}/{PROBE_CLASS}", devices=(device,))
    try:
        try:
            path = store.write(spec, token)
            found = scan(directories).devices.get(f"{spec.kind}={device.name}")
        finally:
            store.remove(token)
    except AliquotError as error:
        return Finding(State.FAILED, subject, str(error))
    if found is None or found.device != device:
        return Finding(
            State.FAILED,
            subject,
            f"a device written to {path.parent} does not resolve, because the runtime reads {reads}: "
            "give one of these as CDI directory, or add ours to the runtime's cdi_spec_dirs",
        )
    return Finding(State.OK, subject, f"a device written to {path.parent} resolves")
