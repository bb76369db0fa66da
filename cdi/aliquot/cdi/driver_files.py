# SPDX-License-Identifier: Apache-2.0
"""What of the NVIDIA driver a container needs, and where the host keeps it.

`discover` looks at the host each time it is called and remembers nothing incomplete: a driver update, a module
that loads late or a MIG instance that appears are seen by the next call (cases.md B130, cdi.md 7 rows 5, 8 and 24).
Invariant: a `DriverFiles` that exists is complete, every path in it existed a moment ago. What is missing is a
`HardwareError` that names the path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from aliquot.cdi.model import EMPTY_EDITS, ContainerEdits


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
    raise NotImplementedError
