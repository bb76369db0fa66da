# SPDX-License-Identifier: Apache-2.0
"""What of the NVIDIA driver a container needs, and where the host keeps it.

`discover` looks at the host each time it is called and remembers nothing incomplete: a driver update, a module
that loads late or a MIG instance that appears are seen by the next call (cases.md B130, cdi.md 7 rows 5, 8 and 24).
Invariant: a `DriverFiles` that exists is complete, every path in it existed a moment ago. What is missing is a
`HardwareError` that names the path.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from aliquot.api.errors import HardwareError, InternalError, SettingsError
from aliquot.api.names import CONTAINER_LIBRARY
from aliquot.cdi import elf
from aliquot.cdi.host import HostTree
from aliquot.cdi.model import EMPTY_EDITS, ContainerEdits

PRELOAD_CONTENT: Final = f"{CONTAINER_LIBRARY}\n"
"""What the preload file holds, byte for byte: the path at which the library is mounted (cases.md B128)."""

LIBRARY_DIRS: Final = (
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
    "/lib64",
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/local/nvidia/lib64",
    "/usr/lib",
)
"""Where distributions, driver containers and cloud images put the driver's libraries, under the driver root."""

CONTAINER_DIRS: Final = {
    elf.X86_64: ("/usr/lib/x86_64-linux-gnu", "/usr/lib64"),
    elf.AARCH64: ("/usr/lib/aarch64-linux-gnu", "/usr/lib64"),
}
"""Directories that the loaders of Debian's and of Red Hat's kind look into by themselves, so no ldconfig, no hook
and no LD_LIBRARY_PATH is needed. An image has a loader of one kind, so each library goes to both."""

BINARY_DIRS: Final = ("/usr/bin", "/usr/sbin", "/bin", "/sbin", "/usr/local/bin", "/opt/bin", "/usr/local/nvidia/bin")
BINARIES: Final = ("nvidia-smi", "nvidia-debugdump")
"""Tools that read. Not the MPS daemon: work handed to a server of the tenant's own would run outside its share."""

NEEDED_NODES: Final = ("/dev/nvidiactl", "/dev/nvidia-uvm")
OPTIONAL_NODES: Final = ("/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
_NODE_ADVICE: Final = {
    "/dev/nvidia-uvm": "load the module with `nvidia-modprobe -u -c 0`",
    "/dev/nvidiactl": "load the driver's kernel module",
}

_VERSION: Final = r"[0-9]{3,}\.[0-9]+(?:\.[0-9]+)?"
_MODULE_VERSION: Final = re.compile(rf"Kernel Module(?: for \S+)?\s+({_VERSION})\b")
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


class HostFile(msgspec.Struct, frozen=True):
    """A file of the host and every path at which a container sees it."""

    host: str
    container: tuple[str, ...]


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

    Raises `HardwareError` naming the missing file or device node, or both versions when a driver update is only
    half done; `InternalError` when our own hook files are gone or damaged.
    """
    _check_hook(hook_library, preload_file)
    tree = HostTree(roots.host_prefix)
    for name in ("driver_root", "dev_root", "proc_root", "host_prefix"):
        value = getattr(roots, name)
        if value and not value.startswith("/"):
            raise SettingsError(f"{name} {value!r} is not an absolute path")
    root = tree.find(roots.driver_root)
    if not root or not tree.is_directory(root):
        raise HardwareError(
            f"driver root {tree.local(roots.driver_root)} is no directory; install the driver there, or name its root"
        )
    found = _find_libraries(tree, root, roots.library_dirs)
    proc = roots.proc_root or (f"{root}/proc" if tree.find("/proc/driver/nvidia", root) and root != "/" else "/proc")
    _check_module(tree, proc, found)
    nodes = _Nodes(tree, roots.dev_root or (root if tree.has("/dev/nvidiactl", root) else "/"), proc)
    return DriverFiles(
        version=found.version,
        libraries=tuple(_libraries(tree, found)),
        binaries=tuple(_binaries(tree, root)),
        common_nodes=tuple(nodes.common()),
        card_nodes={card.uuid: tuple(nodes.of(card)) for card in cards},
        hook_library=hook_library,
        preload_file=preload_file,
        run_dir=run_dir,
        extra_edits=extra_edits,
    )


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


def _check_module(tree: HostTree, proc: str, found: _Libraries) -> None:
    loaded = _MODULE_VERSION.search(tree.text(f"{proc}/driver/nvidia/version"))
    if loaded and loaded[1] != found.version:
        raise HardwareError(
            f"{found.cuda} belongs to driver {found.version}, but the loaded kernel module is {loaded[1]}; "
            "finish the driver update: reload the module or reboot the node"
        )


# --- libraries and binaries -------------------------------------------------------------------------------------


class _Libraries(msgspec.Struct, frozen=True):
    """Where the driver's libraries are: the directory of libcuda itself, and the one with the link to it."""

    directories: tuple[str, ...]
    version: str

    @property
    def cuda(self) -> str:
        return f"{self.directories[0]}/libcuda.so.{self.version}"


def _find_libraries(tree: HostTree, root: str, first: Iterable[str]) -> _Libraries:
    """The first directory that has libcuda; NVML has to be there in the same version."""
    for name in (*first, *LIBRARY_DIRS):
        directory = tree.find(name, root)
        cuda = _in_use(tree, root, directory, "libcuda") if directory else ""
        if not cuda:
            continue
        version = cuda.partition(".so.")[2]
        management = _in_use(tree, root, directory, "libnvidia-ml").partition(".so.")[2]
        if management != version:
            raise HardwareError(
                f"{directory} has libcuda of driver {version} but libnvidia-ml of {management or 'none'}; "
                "wait for the driver update to end, or install the driver again"
            )
        # Debian keeps the files in nvidia/current and only links to them in the directory that loaders look into.
        return _Libraries(tuple(dict.fromkeys((posixpath.dirname(cuda), directory))), version)
    raise HardwareError(
        f"no libcuda.so.<version> in any library directory under driver root {tree.local(root)}; "
        "install the NVIDIA driver, or name its root (and, for an unusual place, its library directory)"
    )


def _in_use(tree: HostTree, root: str, directory: str, stem: str) -> str:
    """The library that programs get, "" for none: what `<stem>.so.1` leads to, else the only version there is."""
    pattern = re.compile(rf"{stem}\.so\.({_VERSION})")
    linked = tree.find(f"{directory[len(root.rstrip('/')) :]}/{stem}.so.1", root)
    if linked and pattern.fullmatch(posixpath.basename(linked)):
        return linked
    found = sorted(entry.name for entry in tree.entries(directory) if pattern.fullmatch(entry.name))
    if len(found) > 1:
        raise HardwareError(
            f"{directory} has {' and '.join(found)}, and no link {stem}.so.1 says which one is in use; "
            "remove the old driver, or run ldconfig"
        )
    return f"{directory}/{found[0]}" if found else ""


def _libraries(tree: HostTree, found: _Libraries) -> Iterator[HostFile]:
    """Every library of this driver version, under its own name, its SONAME and the links that the host has to it.

    The SONAME is what the loader asks for, so no ldconfig is needed; a driver root without links works as well.
    """
    pattern = re.compile(rf"lib[^/]+\.so\.{re.escape(found.version)}|libnvidia-nvvm70\.so\.[0-9.]+")
    links: dict[str, set[str]] = {}
    files: dict[str, str] = {}
    for directory in found.directories:
        for entry in tree.entries(directory):
            if entry.is_symlink():
                if ".so" in entry.name and entry.name.startswith("lib"):
                    target = posixpath.basename(str(Path(entry.path).readlink()))
                    links.setdefault(target, set()).add(entry.name)
            elif pattern.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                files.setdefault(entry.name, f"{directory}/{entry.name}")
    machine = _machine(tree, found.cuda)
    for name in sorted(files):
        library = elf.read_library(tree.local(files[name]))
        if library is None or library.machine != machine:
            continue  # a 32-bit companion, or a linker script
        names = {name, *_aliases(name, links)}
        if library.soname and "/" not in library.soname:
            names.add(library.soname)
        yield HostFile(
            files[name], tuple(f"{place}/{alias}" for place in CONTAINER_DIRS[machine] for alias in sorted(names))
        )


def _aliases(name: str, links: Mapping[str, set[str]]) -> set[str]:
    """Links to `name`, links to those, and so on."""
    found: set[str] = set()
    pending = [name]
    while pending:
        for alias in links.get(pending.pop(), set()) - found:
            found.add(alias)
            pending.append(alias)
    return found


def _machine(tree: HostTree, path: str) -> int:
    library = elf.read_library(tree.local(path))
    if library is None or library.machine not in CONTAINER_DIRS:
        raise HardwareError(f"{path} is no library for x86-64 or arm64; install the driver again")
    return library.machine


def _binaries(tree: HostTree, root: str) -> Iterator[HostFile]:
    for name in BINARIES:
        for directory in BINARY_DIRS:
            host = tree.find(f"{directory}/{name}", root)
            if host and tree.is_file(host):
                yield HostFile(host, (f"/usr/bin/{name}",))
                break


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
        if card.gpu_instance is None or card.compute_instance is None:
            return
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
