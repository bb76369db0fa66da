# SPDX-License-Identifier: Apache-2.0
"""What of the NVIDIA driver a container needs, and where the host keeps it.

`discover` looks at the host each time it is called and remembers nothing incomplete: a driver update, a module
that loads late or a MIG instance that appears are seen by the next call (cases.md B130, cdi.md 7 rows 5, 8 and 24).
Invariant: a `DriverFiles` that exists is complete, every path in it existed a moment ago. What is missing is a
`HardwareError` that names the path.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from aliquot.api.errors import HardwareError, InternalError, SettingsError
from aliquot.api.names import CONTAINER_LIBRARY
from aliquot.cdi.host import HostTree
from aliquot.cdi.libraries import (
    LIBRARY_DIRS,
    VERSION,
    HostFile,
    Installation,
    find_binaries,
    find_installation,
    find_libraries,
)
from aliquot.cdi.model import EMPTY_EDITS, ContainerEdits

__all__ = [
    "LIBRARY_DIRS",
    "PRELOAD_CONTENT",
    "CardAddress",
    "DriverFiles",
    "Host",
    "HostFile",
    "HostNode",
    "Roots",
    "discover",
    "look",
]

PRELOAD_CONTENT: Final = f"{CONTAINER_LIBRARY}\n"
"""What the preload file holds, byte for byte: the path at which the library is mounted (cases.md B128)."""

NEEDED_NODES: Final = ("/dev/nvidiactl", "/dev/nvidia-uvm")
OPTIONAL_NODES: Final = ("/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
_NODE_ADVICE: Final = {
    "/dev/nvidia-uvm": "load the module with `nvidia-modprobe -u -c 0`",
    "/dev/nvidiactl": "load the driver's kernel module",
}

_MODULE_VERSION: Final = re.compile(rf"Kernel Module(?: for \S+)?\s+({VERSION})\b")
_MIG_MINOR: Final = re.compile(r"(gpu[0-9]+/gi[0-9]+(?:/ci[0-9]+)?/access)\s+([0-9]+)")


class Roots(msgspec.Struct, frozen=True, kw_only=True):
    """Where the host keeps things. All paths are absolute host paths, `host_prefix` excepted."""

    driver_root: str = "/"
    """Root of the driver installation: `/`, or that of a driver container such as `/run/nvidia/driver`."""
    dev_root: str = ""
    """Directory that holds `dev/`; "" = `driver_root`, when it has `dev/nvidiactl`, else `/`."""
    proc_root: str = ""
    """The host's /proc; "" = `<driver_root>/proc`, when it has `driver/nvidia`, else `/proc`."""
    host_prefix: str = ""
    """Where this process sees the host's `/`; "" when it sees the host's paths as they are."""
    library_dirs: tuple[str, ...] = ()
    """Further library directories under `driver_root`, looked into first."""


class CardAddress(msgspec.Struct, frozen=True, kw_only=True):
    """How a card (or MIG instance) is found in /dev."""

    uuid: str
    """`GPU-…` or `MIG-…`, as in `Grant.card_uuid`."""
    minor: int
    """Minor number of the (parent) card: /dev/nvidia<minor>."""
    gpu_instance: int | None = None
    """MIG only: id of the GPU instance."""
    compute_instance: int | None = None
    """MIG only: id of the compute instance."""


class HostNode(msgspec.Struct, frozen=True):
    """A device node: `host` is where it really is, `path` where the container sees it."""

    host: str
    path: str


class DriverFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that edits are made of, apart from the grant itself."""

    version: str
    """Version of the driver's libraries, for instance `580.95.05`."""
    libraries: tuple[HostFile, ...]
    binaries: tuple[HostFile, ...]
    common_nodes: tuple[HostNode, ...]
    card_nodes: Mapping[str, tuple[HostNode, ...]]
    """Device nodes of each card asked for, by UUID."""
    hook_library: str
    """Host path of the strict build of libvgpu.so."""
    preload_file: str
    """Host path of the file that becomes /etc/ld.so.preload."""
    run_dir: str
    """Host path that holds `grants/<name>` and `usage/<name>/`."""
    extra_edits: ContainerEdits = EMPTY_EDITS
    """The operator's `--extra-edits`, merged into every grant's."""


class Host:
    """One look at the host's driver, from which any number of cards is answered. Made by `look`."""

    def __init__(
        self, version: str, libraries: tuple[HostFile, ...], binaries: tuple[HostFile, ...], nodes: _Nodes
    ) -> None:
        self.version = version
        self._libraries = libraries
        self._binaries = binaries
        self._nodes = nodes

    def files(
        self,
        cards: Iterable[CardAddress],
        *,
        hook_library: str,
        preload_file: str,
        run_dir: str,
        extra_edits: ContainerEdits = EMPTY_EDITS,
    ) -> DriverFiles:
        """What containers with `cards` need; the device nodes are looked at now. Raises as `discover` does."""
        _check_hook(hook_library, preload_file)
        with _reporting():
            return DriverFiles(
                version=self.version,
                libraries=self._libraries,
                binaries=self._binaries,
                common_nodes=tuple(self._nodes.common()),
                card_nodes={card.uuid: tuple(self._nodes.of(card)) for card in cards},
                hook_library=hook_library,
                preload_file=preload_file,
                run_dir=run_dir,
                extra_edits=extra_edits,
            )


def look(roots: Roots) -> Host:
    """Look at the host's driver now: libraries, tools, the loaded kernel module. Raises as `discover` does."""
    for name in ("driver_root", "dev_root", "proc_root", "host_prefix"):
        value = getattr(roots, name)
        if value and not value.startswith("/"):
            raise SettingsError(f"{name} {value!r} is not an absolute path")
    with _reporting():
        return _look(roots)


def discover(
    roots: Roots,
    cards: Iterable[CardAddress],
    *,
    hook_library: str,
    preload_file: str,
    run_dir: str,
    extra_edits: ContainerEdits = EMPTY_EDITS,
) -> DriverFiles:
    """Look at the host now and return what containers with `cards` need. Ask per claim, for its cards only.

    Raises `HardwareError` naming the file or device node that is missing or cannot be looked at, or both versions
    when a driver update is only half done; `SettingsError` for a root that is no absolute path; `InternalError` when
    our own hook files are gone or damaged.
    """
    _check_hook(hook_library, preload_file)
    return look(roots).files(
        cards, hook_library=hook_library, preload_file=preload_file, run_dir=run_dir, extra_edits=extra_edits
    )


@contextlib.contextmanager
def _reporting() -> Iterator[None]:
    """Turn what the file system says into our errors."""
    try:
        yield
    except OSError as error:
        raise HardwareError(
            f"cannot look at {error.filename} for the driver's files: {error.strerror}; "
            "this process needs to read the driver root and the host's /dev"
        ) from error


def _look(roots: Roots) -> Host:
    tree = HostTree(roots.host_prefix)
    root = tree.find(roots.driver_root)
    if not root or not tree.is_directory(root):
        raise HardwareError(
            f"driver root {tree.local(roots.driver_root)} is no directory; install the driver there, or name its root"
        )
    found = find_installation(tree, root, roots.library_dirs)
    proc = roots.proc_root or (f"{root}/proc" if tree.find("/proc/driver/nvidia", root) and root != "/" else "/proc")
    _check_module(tree, proc, found)
    nodes = _Nodes(tree, roots.dev_root or (root if tree.has("/dev/nvidiactl", root) else "/"), proc)
    return Host(found.version, find_libraries(tree, found), tuple(find_binaries(tree, root)), nodes)


def _check_hook(library: str, preload: str) -> None:
    advice = "restart the driver, which installs both again"
    try:
        content = Path(preload).read_bytes()
        found = Path(library).stat().st_size
    except OSError as error:
        raise InternalError(f"hook file {error.filename}: {error.strerror}; {advice}") from error
    if content != PRELOAD_CONTENT.encode() or not found:
        raise InternalError(
            f"{preload} has to hold exactly {PRELOAD_CONTENT!r} and {library} must not be empty, or containers would "
            f"run without a limit; {advice}"
        )


def _check_module(tree: HostTree, proc: str, found: Installation) -> None:
    loaded = _MODULE_VERSION.search(tree.text(f"{proc}/driver/nvidia/version"))
    if loaded and loaded[1] != found.version:
        raise HardwareError(
            f"{found.cuda} belongs to driver {found.version}, but the loaded kernel module is {loaded[1]}; "
            "finish the driver update: reload the module or reboot the node"
        )


# --- device nodes -----------------------------------------------------------------------------------------------


class _Nodes:
    """Device nodes, each checked to be one at this moment: a spec with a missing node breaks a pod much later."""

    def __init__(self, tree: HostTree, dev_root: str, proc: str) -> None:
        self._tree = tree
        self._root = tree.find(dev_root) or dev_root
        self._proc = proc

    def common(self) -> Iterator[HostNode]:
        for path in NEEDED_NODES:
            yield self._node(path, _NODE_ADVICE[path])
        for path in OPTIONAL_NODES:
            if self._find(path):
                yield self._node(path, "")

    def of(self, card: CardAddress) -> Iterator[HostNode]:
        yield self._node(f"/dev/nvidia{card.minor}", f"check card {card.uuid} with nvidia-smi")
        if card.gpu_instance is None and card.compute_instance is None:
            return
        if card.gpu_instance is None or card.compute_instance is None:
            raise InternalError(
                f"MIG instance {card.uuid} has GPU instance {card.gpu_instance} and compute instance "
                f"{card.compute_instance}, both are needed; please report this"
            )
        table = f"{self._proc}/driver/nvidia-caps/mig-minors"
        minors = dict(_MIG_MINOR.findall(self._tree.text(table)))
        instance = f"gpu{card.minor}/gi{card.gpu_instance}"
        for name in (f"{instance}/access", f"{instance}/ci{card.compute_instance}/access"):
            if name not in minors:
                raise HardwareError(
                    f"{table} has no line {name}, so MIG instance {card.uuid} cannot be opened in a container; "
                    "load the nvidia module with MIG capabilities, then try again"
                )
            yield self._node(
                f"/dev/nvidia-caps/nvidia-cap{minors[name]}",
                f"make it with `nvidia-modprobe -f /proc/driver/nvidia/capabilities/{name}`",
            )

    def _find(self, path: str) -> str:
        """The real node: links are followed inside the root, and where that leads nowhere, on the host."""
        return self._tree.find(path, self._root) or self._tree.find(f"{self._root.rstrip('/')}{path}")

    def _node(self, path: str, advice: str) -> HostNode:
        host = self._find(path)
        shown = f"{self._root.rstrip('/')}{path}"
        if not host:
            raise HardwareError(f"device node {shown} does not exist; {advice}")
        if not self._tree.is_character_device(host):
            raise HardwareError(f"{shown} is not a device node; remove it, then {advice or 'let the driver make it'}")
        return HostNode(host, path)
