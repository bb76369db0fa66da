#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`make_root.py [--config FILE] [--flavour 580] OUT`: lays out a driver root, as a driver installation would be found.

OUT gets usr/lib/<multiarch>/ (both libraries under their versioned names, with links), usr/bin/ (nvidia-smi,
nvidia-cuda-mps-control), dev/, proc/, sys/ and config.json. Run again it changes only what differs: libraries are
replaced, never written into, and config.json keeps its inode while its text stays the same.

What the cards are is asked of the library itself, so nobody but the driver reads the configuration. Device nodes
are made where mknod is allowed; where it is not, links to /dev/null stand for them (they open and count as character
devices). Needs only the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import filecmp
import json
import os
import shutil
import stat
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "gen"))
import flavours  # noqa: E402  # it lies beside this script, not in a package

MAJOR_NVIDIA, MAJOR_UVM, MAJOR_CAPS = 195, 510, 511
# As the driver numbers them: 14 GPU instances and 8 compute instances in each (ids, not how many fit).
GPU_INSTANCES, COMPUTE_INSTANCES = 15, 8
# Of nvmlGpuTopologyLevel_t: below one switch, below one host bridge.
_SAME_SWITCH, _SAME_ROOT = 10, 30


@dataclass(frozen=True)
class CardFacts:
    """What the root tells of one card."""

    minor: int
    uuid: str
    name: str
    bus_id: str  # "0000:3b:00.0", as sysfs writes it
    device_id: int
    subsystem_id: int
    vbios: str
    numa: int
    mig: bool
    place: str  # of the device it hangs on, under sys/devices: "pci0000:00" or "pci0000:00/0000:00:01.0"


def multiarch() -> str:
    """The folder name of libraries, e.g. x86_64-linux-gnu."""
    return sysconfig.get_config_var("MULTIARCH") or f"{os.uname().machine}-linux-gnu"


class _Pci(ctypes.Structure):
    _fields_ = (
        ("legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("device_id", ctypes.c_uint),
        ("subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


def _text(nvml: ctypes.CDLL, function: str, device: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(96)
    nvml[function](device, buffer, 96)
    return buffer.value.decode()


def read_cards(library: Path, config: Path) -> list[CardFacts]:
    """Asks the driver what cards `config` describes. Raises SystemExit with one sentence when it refuses the file."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "config.json"
        shutil.copyfile(config, copy)
        os.environ.update(FAKEGPU_CONFIG=str(copy), FAKEGPU_VISIBLE_DEVICES="all")
        nvml = ctypes.CDLL(str(library))
        code = nvml.nvmlInit_v2()
        if code != 0:
            raise SystemExit(f"make_root: the driver does not take {config} (NVML error {code}); its line stands above")
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        places = _Places(nvml)
        cards = [_read_card(nvml, index, places) for index in range(count.value)]
        nvml.nvmlShutdown()
        return cards


class _Places:
    """Where cards hang in the PCI tree, told by how near the driver says that they are to those seen before."""

    def __init__(self, nvml: ctypes.CDLL) -> None:
        self._nvml = nvml
        self._roots: list[tuple[ctypes.c_void_p, int, str]] = []  # one card of each root complex, its domain, its name
        self._switches: list[tuple[ctypes.c_void_p, str]] = []

    def of(self, device: ctypes.c_void_p, domain: int) -> str:
        """The device above a card, as a path under sys/devices."""
        for other, path in self._switches:
            if self._level(device, other) <= _SAME_SWITCH:
                return path
        near = (name for other, of, name in self._roots if of == domain and self._level(device, other) <= _SAME_ROOT)
        root = next(near, "")
        if not root:
            # Numbers from the end: those from the beginning are the cards' own.
            number = (0x100 - sum(one[1] == domain for one in self._roots)) % 0x100
            root = f"pci{domain:04x}:{number:02x}"
            self._roots.append((device, domain, root))
        port = len(self._switches)
        path = f"{root}/{root.removeprefix('pci')}:{port // 8 + 1:02x}.{port % 8}"
        self._switches.append((device, path))
        return path

    def _level(self, one: ctypes.c_void_p, other: ctypes.c_void_p) -> int:
        level = ctypes.c_uint()
        self._nvml.nvmlDeviceGetTopologyCommonAncestor(one, other, ctypes.byref(level))
        return level.value


def _read_card(nvml: ctypes.CDLL, index: int, places: _Places) -> CardFacts:
    device, minor, numa, mode, pending = ctypes.c_void_p(), *(ctypes.c_uint() for _ in range(4))
    pci = _Pci()
    nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
    nvml.nvmlDeviceGetMinorNumber(device, ctypes.byref(minor))
    nvml.nvmlDeviceGetPciInfo_v3(device, ctypes.byref(pci))
    has_numa = nvml.nvmlDeviceGetNumaNodeId(device, ctypes.byref(numa)) == 0
    mig = nvml.nvmlDeviceGetMigMode(device, ctypes.byref(mode), ctypes.byref(pending)) == 0
    return CardFacts(
        minor=minor.value,
        uuid=_text(nvml, "nvmlDeviceGetUUID", device),
        name=_text(nvml, "nvmlDeviceGetName", device),
        bus_id=f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0",
        device_id=pci.device_id,
        subsystem_id=pci.subsystem_id,
        vbios=_text(nvml, "nvmlDeviceGetVbiosVersion", device),
        numa=numa.value if has_numa else -1,
        mig=mig,
        place=places.of(device, pci.domain),
    )


# ---- files ------------------------------------------------------------------------------------------------


def write(path: Path, text: str) -> None:
    """Replaces a file in one step, unless it says this already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and not path.is_symlink() and path.read_text(encoding="utf-8") == text:
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def install(source: Path, target: Path) -> None:
    """Copies a library or program beside its place and moves it there: who has the old one mapped keeps it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_file() and not target.is_symlink() and filecmp.cmp(source, target, shallow=False):
        return
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(source, partial)
    partial.chmod(0o755)
    partial.replace(target)


def keep_only(folder: Path, names: set[str]) -> None:
    """Removes what lies in `folder` under other names: it tells of cards that are gone."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name in names:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def link(path: Path, target: str) -> None:
    """Makes or corrects a symbolic link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() and path.readlink() == Path(target):
        return
    if path.is_dir() and not path.is_symlink():  # a root of before, whose entry was the folder itself
        shutil.rmtree(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.symlink_to(target)
    partial.replace(path)


def libraries(built: Path, folder: Path, version: str) -> None:
    """The libraries under their names; those of another version that lay here are removed."""
    for name in ("libcuda", "libnvidia-ml"):
        install(built / f"{name}.so", folder / f"{name}.so.{version}")
        link(folder / f"{name}.so.1", f"{name}.so.{version}")
        link(folder / f"{name}.so", f"{name}.so.1")
        for other in folder.glob(f"{name}.so.*.*"):
            if other.name != f"{name}.so.{version}":
                other.unlink()


def node(path: Path, major: int, minor: int) -> bool:
    """Makes a character device; a link to /dev/null where that is not allowed. True for a real one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    wanted = os.makedev(major, minor)
    if path.exists() and not path.is_symlink():
        found = path.stat()
        if stat.S_ISCHR(found.st_mode) and found.st_rdev == wanted:
            return True
        path.unlink()
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        os.mknod(partial, stat.S_IFCHR | 0o666, wanted)
    except OSError:
        link(path, "/dev/null")
        return False
    partial.chmod(0o666)
    partial.replace(path)
    return True


def cap_minors(cards: list[CardFacts]) -> dict[str, int]:
    """The table that /proc/driver/nvidia-caps/mig-minors tells: the same numbers for every machine.

    Cards count by minor number and every one has its block, MIG or not, so that a number never moves.
    """
    minors = {"config": 1, "monitor": 2}
    number = 3
    for card in range(max((card.minor for card in cards), default=-1) + 1):
        for gi in range(GPU_INSTANCES):
            minors[f"gpu{card}/gi{gi}/access"] = number
            number += 1
            for ci in range(COMPUTE_INSTANCES):
                minors[f"gpu{card}/gi{gi}/ci{ci}/access"] = number
                number += 1
    return minors


def devices(dev: Path, cards: list[CardFacts]) -> bool:
    """All nodes of the driver; those of cards that are gone are removed."""
    real = [node(dev / f"nvidia{card.minor}", MAJOR_NVIDIA, card.minor) for card in cards]
    real += [
        node(dev / "nvidiactl", MAJOR_NVIDIA, 255),
        node(dev / "nvidia-modeset", MAJOR_NVIDIA, 254),
        node(dev / "nvidia-uvm", MAJOR_UVM, 0),
        node(dev / "nvidia-uvm-tools", MAJOR_UVM, 1),
    ]
    wanted = {f"nvidia{card.minor}" for card in cards}
    for path in dev.glob("nvidia[0-9]*"):
        if path.name not in wanted:
            path.unlink()
    mig = {f"gpu{card.minor}" for card in cards if card.mig}
    if mig:
        for name, minor in cap_minors(cards).items():
            if name.partition("/")[0] in mig | {"config", "monitor"}:
                real.append(node(dev / "nvidia-caps" / f"nvidia-cap{minor}", MAJOR_CAPS, minor))
    return all(real)


def proc(root: Path, cards: list[CardFacts], version: str) -> None:
    """/proc/driver/nvidia*, as far as tools read it."""
    write(
        root / "driver/nvidia/version",
        f"NVRM version: NVIDIA UNIX {os.uname().machine} Kernel Module  {version}  Release Build  (fakegpu)\n"
        "GCC version:  none\n",
    )
    write(
        root / "driver/nvidia/params",
        "ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 0\nDeviceFileMode: 438\n"
        "InitializeSystemMemoryAllocations: 1\nUsePageAttributeTable: 4294967295\nEnableMSI: 1\n",
    )
    for card in cards:
        write(
            root / "driver/nvidia/gpus" / card.bus_id / "information",
            f"Model: \t\t {card.name}\nIRQ:   \t\t 0\nGPU UUID: \t {card.uuid}\nVideo BIOS: \t {card.vbios}\n"
            f"Bus Type: \t PCIe\nDMA Size: \t 47 bits\nDMA Mask: \t 0x7fffffffffff\nBus Location: \t {card.bus_id}\n"
            f"Device Minor: \t {card.minor}\nGPU Firmware: \t {version}\nGPU Excluded:\t No\n",
        )
    keep_only(root / "driver/nvidia/gpus", {card.bus_id for card in cards})
    minors = cap_minors(cards)
    write(root / "driver/nvidia-caps/mig-minors", "".join(f"{name} {minor}\n" for name, minor in minors.items()))
    write(root / "driver/nvidia-caps/sys-minors", "fabric-imex-mgmt 1\n")
    mig = {f"gpu{card.minor}" for card in cards if card.mig}
    for name, minor in minors.items():
        text = f"DeviceFileMinor: {minor}\nDeviceFileMode: 256\nDeviceFileModify: 1\n"
        if mig and name in {"config", "monitor"}:
            write(root / "driver/nvidia/capabilities/mig" / name, text)
        elif name.partition("/")[0] in mig:
            write(root / "driver/nvidia/capabilities" / name.replace("/gi", "/mig/gi", 1), text)
    write(
        root / "devices",
        f"Character devices:\n{MAJOR_NVIDIA} nvidia\n{MAJOR_UVM} nvidia-uvm\n{MAJOR_CAPS} nvidia-caps\n",
    )


def sysfs(root: Path, cards: list[CardFacts]) -> None:
    """/sys/devices/pci…, with the links of /sys/bus/pci/devices into it, as far as tools read them."""
    for card in cards:
        device = root / "devices" / card.place / card.bus_id
        values = {
            "vendor": f"{card.device_id & 0xFFFF:#06x}",
            "device": f"{card.device_id >> 16:#06x}",
            "subsystem_vendor": f"{card.subsystem_id & 0xFFFF:#06x}",
            "subsystem_device": f"{card.subsystem_id >> 16:#06x}",
            "class": "0x030200",
            "numa_node": str(card.numa),
            "enable": "1",
        }
        for name, value in values.items():
            write(device / name, f"{value}\n")
        link(root / "bus/pci/devices" / card.bus_id, f"../../../devices/{card.place}/{card.bus_id}")
    keep_only(root / "bus/pci/devices", {card.bus_id for card in cards})
    above: dict[str, set[str]] = {"": set()}  # what may lie in sys/devices, in each root, in each bridge
    for card in cards:
        top, bridge = card.place.split("/")
        above[""].add(top)
        above.setdefault(top, set()).add(bridge)
        above.setdefault(card.place, set()).add(card.bus_id)
    for place, names in above.items():
        keep_only(root / "devices" / place, names)


def make_root(built: Path, flavour: flavours.Flavour, config: Path, out: Path, folder: str) -> str:
    """Lays out everything, the libraries in `folder` of it; returns a sentence for the user."""
    version = flavour.driver_version
    if flavour.full:
        with contextlib.suppress(ValueError, AttributeError):  # a wrong file is the driver's to complain of, below
            version = json.loads(config.read_text(encoding="utf-8")).get("driver_version") or version
    # The full library is asked, whatever is installed: an old one cannot tell all of it.
    cards = read_cards(built.parent / flavours.FLAVOURS[0].name / "libnvidia-ml.so", config)
    libraries(built, out / folder, version)
    for tool in ("nvidia-smi", "nvidia-cuda-mps-control"):
        install(built.parent / tool, out / "usr/bin" / tool)
    real = devices(out / "dev", cards)
    proc(out / "proc", cards, version)
    sysfs(out / "sys", cards)
    write(out / "config.json", config.read_text(encoding="utf-8"))
    nodes = "" if real else ", links to /dev/null for device nodes (mknod is not allowed here)"
    return f"fakegpu: {out}: driver {version}, {len(cards)} card{'s' * (len(cards) != 1)}{nodes}"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder of the driver root")
    parser.add_argument("--config", type=Path, default=HERE / "config/default.json", help="cards and driver (2 cards)")
    parser.add_argument("--flavour", default="580", choices=[one.name for one in flavours.FLAVOURS])
    parser.add_argument(
        "--library-folder", default=f"usr/lib/{multiarch()}", help="where libraries lie in OUT, e.g. usr/lib64"
    )
    parser.add_argument("--build", type=Path, default=HERE.parent / "build", help="where `make fakegpu` built (build)")
    options = parser.parse_args()
    flavour = next(one for one in flavours.FLAVOURS if one.name == options.flavour)
    built = options.build / "fakegpu-obj" / flavour.name
    if not (built / "libnvidia-ml.so").is_file():
        sys.stderr.write("make_root: the libraries are not built yet: run `make fakegpu`\n")
        return 1
    if not options.config.is_file():
        sys.stderr.write(f"make_root: {options.config} is not there: name a configuration with --config\n")
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / ".lock").open("w") as lock:  # two at once wait for each other
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = make_root(built.resolve(), flavour, options.config, options.out, options.library_folder.strip("/"))
        sys.stdout.write(said + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
