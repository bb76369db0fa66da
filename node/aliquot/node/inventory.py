# SPDX-License-Identifier: Apache-2.0
"""What cards this node has, as NVML tells it: a frozen picture, taken once per call.

It reads and never changes a card, never decides how a card is offered (that is the door's), and never lets one
bad card hide the others: each is read in a try of its own and becomes a `Card` or a `BadCard`. What a driver or
card does not know is None, never a guess; values are as NVML gives them (names untrimmed: limits belong to who
publishes).

Guarded invariant: within one `Inventory` every UUID occurs once, and cards stand in NVML's order.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from aliquot.api.errors import AliquotError, foreign
from aliquot.node.nvml import GPU_IS_LOST, NOT_FOUND, RESET_REQUIRED, Handle, Nvml, NvmlError

_EMPTY: Final[Mapping[str, int]] = MappingProxyType({})

_ARCHITECTURES: Final = {
    2: "Kepler",
    3: "Maxwell",
    4: "Pascal",
    5: "Volta",
    6: "Turing",
    7: "Ampere",
    8: "Ada Lovelace",
    9: "Hopper",
    10: "Blackwell",
    13: "Rubin",
}
"""NVML_DEVICE_ARCH_* of nvml.h."""

_BRANDS: Final = {
    1: "Quadro",
    2: "Tesla",
    3: "NVS",
    4: "GRID",
    5: "GeForce",
    6: "Titan",
    7: "NvidiaVApps",
    8: "NvidiaVPC",
    9: "NvidiaVCS",
    10: "NvidiaVWS",
    11: "NvidiaCloudGaming",
    12: "QuadroRTX",
    13: "NvidiaRTX",
    14: "Nvidia",
    15: "GeForceRTX",
    16: "TitanRTX",
}
"""NVML_BRAND_* of nvml.h, spelt as NVIDIA's own tools label nodes."""

_CORES_PER_MULTIPROCESSOR: Final = {
    (5, 0): 128,
    (5, 2): 128,
    (5, 3): 128,
    (6, 0): 64,
    (6, 1): 128,
    (6, 2): 128,
    (7, 0): 64,
    (7, 2): 64,
    (7, 5): 64,
    (8, 0): 64,
    (8, 6): 128,
    (8, 7): 128,
    (8, 9): 128,
    (9, 0): 128,
    (10, 0): 128,
    (10, 3): 128,
    (11, 0): 128,
    (12, 0): 128,
    (12, 1): 128,
}
"""FP32 cores per multiprocessor by compute capability (CUDA programming guide, throughput table)."""

_MIG_NAME: Final = re.compile(r"MIG (\S+)")
_PCI_ROOT: Final = re.compile(r"pci[0-9a-f]{4}:[0-9a-f]{2}")
_BUS_ID: Final = re.compile(r"(?:[0-9a-f]{4})?([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])")


class MemorySource(enum.Enum):
    """Who said how much memory a card has."""

    NVML = "nvml"
    CUDA = "cuda"
    """`cuDeviceTotalMem`: cards with unified memory (GB10) report nothing to NVML (B193)."""
    CONFIGURED = "configured"
    """The operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigInstance:
    """One MIG compute instance, a device of its own to CUDA."""

    uuid: str
    """`MIG-…`."""
    parent_uuid: str
    profile: str
    """As NVML names it, e.g. `1g.10gb`; empty when the name does not tell."""
    gpu_instance: int
    compute_instance: int
    memory_bytes: int | None
    multiprocessors: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One physical GPU."""

    uuid: str
    """`GPU-…`; the one name of the card everywhere."""
    index: int
    """NVML's index: for display only, it changes with cards that come and go."""
    minor: int | None
    """Of /dev/nvidia<minor>; need not equal the index."""
    name: str
    """Product name, untrimmed."""
    serial: str | None
    bus_id: str
    """PCI address as sysfs spells it, `0000:3b:00.0`; empty when the card is on no PCI bus."""
    pci_root: str | None
    """`pci<domain>:<bus>` of the root complex the card hangs below."""
    numa_node: int | None
    memory_bytes: int | None
    """Physical memory; None when nobody knows, then only whole cards can be given out."""
    memory_source: MemorySource | None
    reserved_bytes: int | None
    """Part of the memory that the driver keeps for itself (ECC, page tables)."""
    compute_capability: tuple[int, int] | None
    architecture: str | None
    brand: str | None
    multiprocessors: int | None
    ecc: bool | None
    mig_capable: bool
    mig_enabled: bool
    mig: tuple[MigInstance, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BadCard:
    """A card that could not be read; as much of it as was learnt before it failed."""

    index: int
    uuid: str | None
    bus_id: str | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The node's cards at one moment."""

    cards: tuple[Card, ...]
    bad: tuple[BadCard, ...] = ()
    driver_version: str | None = None
    """As NVML spells it, e.g. `570.195.03`."""
    cuda_version: tuple[int, int] | None = None
    """Highest CUDA version of the driver."""
    opening: int = field(default=0, compare=False)
    """Of NVML (`Nvml.opening`): handles taken while reading belong to this one."""
    by_uuid: Mapping[str, Card] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_uuid", MappingProxyType({c.uuid: c for c in self.cards}))


def read_inventory(
    nvml: Nvml,
    *,
    sysfs: Path = Path("/sys"),
    configured_memory: Mapping[str, int] = _EMPTY,
    cuda_memory: Callable[[str], int | None] | None = None,
) -> Inventory:
    """Read all cards.

    `configured_memory` maps a UUID to bytes and is used, like `cuda_memory` (UUID to bytes or None, asked before
    the configuration), only where NVML does not know a card's size. `sysfs` is the node's /sys.

    Raises `NvmlError` only when the driver as a whole does not answer (no count of devices); a single card that
    fails is in `Inventory.bad`.
    """
    opening = nvml.opening
    count = int(nvml.call("nvmlDeviceGetCount"))
    sizes = _OtherSizes(cuda_memory, configured_memory)
    cards: dict[str, Card] = {}
    bad: list[BadCard] = []
    for index in range(count):
        known: dict[str, str] = {}
        try:
            card = _read_card(nvml, index, known, sysfs, sizes)
        except AliquotError as e:
            reason = str(e)
        except Exception as e:
            # A binding that trips over what a broken card returned is this card's failure, not the node's.
            reason = f"reading card {index} failed: {foreign(repr(e))}; look at the kernel log"
        else:
            if card.uuid not in cards:
                cards[card.uuid] = card
                continue
            reason = f"card {index} has the UUID of card {cards[card.uuid].index}, {card.uuid}; reset one of them"
        bad.append(BadCard(index=index, uuid=known.get("uuid"), bus_id=known.get("bus_id"), reason=reason))
    return Inventory(
        cards=tuple(cards.values()),
        bad=tuple(bad),
        driver_version=_text(_known(nvml, "nvmlSystemGetDriverVersion")),
        cuda_version=_cuda_version(_known(nvml, "nvmlSystemGetCudaDriverVersion_v2")),
        opening=opening,
    )


@dataclass(frozen=True, slots=True)
class _OtherSizes:
    """Where a card's memory size comes from when NVML does not know it."""

    cuda: Callable[[str], int | None] | None
    configured: Mapping[str, int]


def _read_card(nvml: Nvml, index: int, known: dict[str, str], sysfs: Path, sizes: _OtherSizes) -> Card:
    """One card; `known` is filled with what names it as soon as that is known, for the report of a failure."""
    handle = nvml.handle("nvmlDeviceGetHandleByIndex", index)
    uuid = known["uuid"] = str(nvml.call("nvmlDeviceGetUUID", handle))
    bus_id = known["bus_id"] = _bus_id(_known(nvml, "nvmlDeviceGetPciInfo", handle))
    capability = _pair(_known(nvml, "nvmlDeviceGetCudaComputeCapability", handle))
    memory, source, reserved = _memory(nvml, handle, uuid, sizes)
    mig_mode = nvml.optional("nvmlDeviceGetMigMode", handle)
    mig_enabled = mig_mode is not None and int(mig_mode[0]) == 1
    ecc = _known(nvml, "nvmlDeviceGetEccMode", handle)
    return Card(
        uuid=uuid,
        index=index,
        minor=_whole(_known(nvml, "nvmlDeviceGetMinorNumber", handle)),
        name=str(nvml.call("nvmlDeviceGetName", handle)),
        serial=_text(_known(nvml, "nvmlDeviceGetSerial", handle)),
        bus_id=bus_id,
        pci_root=_pci_root(sysfs, bus_id),
        numa_node=_numa_node(nvml, handle, sysfs, bus_id),
        memory_bytes=memory,
        memory_source=source,
        reserved_bytes=reserved,
        compute_capability=capability,
        architecture=_ARCHITECTURES.get(int(_known(nvml, "nvmlDeviceGetArchitecture", handle) or 0)),
        brand=_BRANDS.get(int(_known(nvml, "nvmlDeviceGetBrand", handle) or 0)),
        multiprocessors=_multiprocessors(_known(nvml, "nvmlDeviceGetNumGpuCores", handle), capability),
        ecc=None if ecc is None else bool(ecc[0]),
        mig_capable=mig_mode is not None,
        mig_enabled=mig_enabled,
        mig=_mig_instances(nvml, handle, uuid) if mig_enabled else (),
    )


def _known(nvml: Nvml, function: str, *args: Any) -> Any:
    """A fact that a card can do without: None when it cannot be told, unless the card itself is the reason."""
    try:
        return nvml.call(function, *args)
    except NvmlError as e:
        if e.code in (GPU_IS_LOST, RESET_REQUIRED) or e.driver_gone:
            raise
        return None


def _memory(
    nvml: Nvml, handle: Handle, uuid: str, sizes: _OtherSizes
) -> tuple[int | None, MemorySource | None, int | None]:
    """(bytes, who said so, bytes reserved by the driver)."""
    info = nvml.optional("nvmlDeviceGetMemoryInfo", handle)
    if info is not None and int(info.total) > 0:
        newer = _known(nvml, "nvmlDeviceGetMemoryInfo", handle, _MEMORY_INFO_V2)
        return int(info.total), MemorySource.NVML, None if newer is None else int(newer.reserved)
    size = sizes.cuda(uuid) if sizes.cuda is not None else None
    if size:
        return size, MemorySource.CUDA, None
    if sizes.configured.get(uuid):
        return sizes.configured[uuid], MemorySource.CONFIGURED, None
    return None, None, None


_MEMORY_INFO_V2: Final = 0x02000028
"""nvmlMemory_v2: version 2 in the top byte, size of the structure below."""


def _mig_instances(nvml: Nvml, handle: Handle, parent_uuid: str) -> tuple[MigInstance, ...]:
    instances = []
    for slot in range(int(nvml.optional("nvmlDeviceGetMaxMigDeviceCount", handle, default=0))):
        try:
            device = nvml.handle("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot)
        except NvmlError as e:
            if e.code == NOT_FOUND:  # an empty slot; later ones may be taken (cdi.md 6.3)
                continue
            raise
        name = _MIG_NAME.search(str(nvml.optional("nvmlDeviceGetName", device, default="")))
        memory = nvml.optional("nvmlDeviceGetMemoryInfo", device)
        attributes = nvml.optional("nvmlDeviceGetAttributes_v2", device)
        instances.append(
            MigInstance(
                uuid=str(nvml.call("nvmlDeviceGetUUID", device)),
                parent_uuid=parent_uuid,
                profile=name.group(1) if name else "",
                gpu_instance=int(nvml.call("nvmlDeviceGetGpuInstanceId", device)),
                compute_instance=int(nvml.call("nvmlDeviceGetComputeInstanceId", device)),
                memory_bytes=None if memory is None else int(memory.total),
                multiprocessors=None if attributes is None else int(attributes.multiprocessorCount),
            )
        )
    return tuple(instances)


def _bus_id(pci: Any) -> str:
    """NVML's `00000000:3B:00.0` as sysfs spells it; a domain beyond 16 bits keeps its eight digits."""
    if pci is None:
        return ""
    raw = pci.busId
    text = (raw.decode("ascii", "replace") if isinstance(raw, bytes) else str(raw)).lower()
    match = _BUS_ID.fullmatch(text)
    return match.group(1) if match and text.startswith("0000") else text


def _pci_root(sysfs: Path, bus_id: str) -> str | None:
    """Root complex of a PCI device: the `pci…` part of where its sysfs link leads."""
    if not bus_id:
        return None
    try:
        target = (sysfs / "bus/pci/devices" / bus_id).resolve(strict=True)
    except (OSError, RuntimeError):
        return None
    return next((part for part in target.parts if _PCI_ROOT.fullmatch(part)), None)


def _numa_node(nvml: Nvml, handle: Handle, sysfs: Path, bus_id: str) -> int | None:
    """NUMA node the card hangs on: sysfs first (what kubelet's topology manager reads), then NVML."""
    if bus_id:
        try:
            node = int((sysfs / "bus/pci/devices" / bus_id / "numa_node").read_text("ascii"))
        except (OSError, ValueError):
            node = -1
        if node >= 0:
            return node
    return _whole(_known(nvml, "nvmlDeviceGetNumaNodeId", handle))


def _multiprocessors(cores: Any, capability: tuple[int, int] | None) -> int | None:
    per = _CORES_PER_MULTIPROCESSOR.get(capability) if capability else None
    return int(cores) // per if cores and per else None


def _cuda_version(packed: Any) -> tuple[int, int] | None:
    """12080 is 12.8."""
    return None if not packed else (int(packed) // 1000, int(packed) % 1000 // 10)


def _whole(value: Any) -> int | None:
    """NVML says "not here" with all bits set as often as with an error."""
    return None if value is None or int(value) in (0xFFFFFFFF, -1) else int(value)


def _pair(value: Any) -> tuple[int, int] | None:
    return None if value is None else (int(value[0]), int(value[1]))


def _text(value: Any) -> str | None:
    text = "" if value is None else str(value).strip()
    return text or None
