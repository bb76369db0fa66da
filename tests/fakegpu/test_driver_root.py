# SPDX-License-Identifier: Apache-2.0
"""The driver root: what lies where, and that making it again changes nothing that is in use."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from aliquot.cdi.driver_files import CardAddress, Roots, discover
from aliquot.cdi.host import HostTree
from aliquot.cdi.libraries import find_installation

SCRIPT = Path(__file__).parents[2] / "fakegpu/make_root.py"


def make(out: Path, config: dict, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    path = out.with_suffix(".json")
    path.write_text(json.dumps({"version": 1, **config}))
    command = [sys.executable, str(SCRIPT), "--config", str(path), *arguments, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.fixture
def out(build_dir, tmp_path):
    return tmp_path / "root"


def test_libraries_have_the_names_of_a_driver(out):
    make(out, {"cards": [{}], "driver_version": "590.44.01"})
    folder = next((out / "usr/lib").iterdir())
    assert sorted(path.name for path in folder.iterdir()) == [
        "libcuda.so",
        "libcuda.so.1",
        "libcuda.so.590.44.01",
        "libnvidia-ml.so",
        "libnvidia-ml.so.1",
        "libnvidia-ml.so.590.44.01",
    ]
    make(out, {"cards": [{}]})
    assert [path.name for path in folder.glob("libcuda.so.*.*")] == ["libcuda.so.580.65.06"]


def test_libraries_may_lie_where_red_hat_has_them(out):
    """As /usr/lib64: found there by our own search, and by the library that looks for its configuration."""
    make(out, {"cards": [{"count": 3}]}, "--library-folder", "usr/lib64")
    assert not (out / "usr/lib").exists()
    found = find_installation(HostTree(), str(out))
    assert found.cuda == f"{out}/usr/lib64/libcuda.so.580.65.06"
    code = "import ctypes, sys; lib = ctypes.CDLL(sys.argv[1]); n = ctypes.c_uint(); lib.nvmlInit_v2()"
    code += "; lib.nvmlDeviceGetCount_v2(ctypes.byref(n)); print(n.value)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(out / "usr/lib64/libnvidia-ml.so.1")],
        env={"FAKEGPU_CONFIG": str(out / "config.json"), "FAKEGPU_VISIBLE_DEVICES": "all"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "3\n"


def test_nodes_of_cards_and_driver(out):
    make(out, {"cards": [{"minor": 3, "count": 2}]})
    names = {path.name for path in (out / "dev").iterdir()}
    assert names == {"nvidia3", "nvidia4", "nvidiactl", "nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools"}
    for path in (out / "dev").iterdir():
        assert stat.S_ISCHR(path.stat().st_mode)
        if not path.is_symlink():
            assert path.stat().st_mode & 0o777 == 0o666
    if not (out / "dev/nvidia3").is_symlink():
        device = (out / "dev/nvidia3").stat().st_rdev
        assert (os.major(device), os.minor(device)) == (195, 3)
    make(out, {"cards": [{}]})
    assert {path.name for path in (out / "dev").glob("nvidia[0-9]*")} == {"nvidia0"}


def test_where_mknod_is_not_allowed_dev_null_stands_in(out):
    code = """
import errno, os, runpy, sys
def refuse(*arguments, **named):
    raise PermissionError(errno.EPERM, "Operation not permitted")
os.mknod = refuse
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    config = out.with_suffix(".json")
    config.write_text('{"version": 1, "cards": [{}]}')
    command = [sys.executable, "-c", code, str(SCRIPT), "--config", str(config), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "/dev/null" in done.stdout
    assert (out / "dev/nvidia0").readlink() == Path("/dev/null")
    assert (out / "dev/nvidia0").is_char_device()


def test_mig_capable_cards_have_caps(out):
    make(out, {"cards": [{"profile": "A100-40"}, {}]})
    lines = (out / "proc/driver/nvidia-caps/mig-minors").read_text().splitlines()
    minors = dict(line.rsplit(" ", 1) for line in lines)
    assert minors["config"] == "1"
    assert minors["monitor"] == "2"
    assert len(set(minors.values())) == len(minors)
    for name in ("gpu0/gi1/access", "gpu0/gi14/ci0/access"):
        assert (out / f"dev/nvidia-caps/nvidia-cap{minors[name]}").is_char_device()
    assert not (out / f"dev/nvidia-caps/nvidia-cap{minors['gpu1/gi1/access']}").exists()
    access = out / "proc/driver/nvidia/capabilities/gpu0/mig/gi1/access"
    assert access.read_text().startswith(f"DeviceFileMinor: {minors['gpu0/gi1/access']}\n")


CUT = """
import json, pynvml as n
n.nvmlInit()
cards = [n.nvmlDeviceGetHandleByIndex(index) for index in (0, 1)]
for card, profile, kind in ((cards[0], 0, 0), (cards[1], 4, 0)):  # seven 1g of one part; one 7g of seven parts
    for _ in range(7 if profile == 0 else 1):
        gi = n.nvmlDeviceCreateGpuInstance(card, n.nvmlDeviceGetGpuInstanceProfileInfo(card, profile).id)
        for _ in range(1 if profile == 0 else 7):
            n.nvmlGpuInstanceCreateComputeInstance(gi, kind)
made = []
for card in cards:
    for index in range(7):
        one = n.nvmlDeviceGetMigDeviceHandleByIndex(card, index)
        ids = n.nvmlDeviceGetGpuInstanceId(one), n.nvmlDeviceGetComputeInstanceId(one)
        made.append([n.nvmlDeviceGetUUID(one), n.nvmlDeviceGetMinorNumber(card), *ids])
print(json.dumps(made))
"""


@pytest.mark.usefixtures("as_root")
def test_our_search_finds_the_capabilities_of_every_instance_that_can_be_made(out, tmp_path):
    make(out, {"cards": [{"profile": "A100-40", "mig_enabled": True, "count": 2, "minor": 5}]})
    library = next((out / "usr/lib").iterdir())
    environment = {"FAKEGPU_CONFIG": str(out / "config.json"), "FAKEGPU_VISIBLE_DEVICES": "all"}
    done = subprocess.run(
        [sys.executable, "-c", CUT],
        env=os.environ | environment | {"LD_LIBRARY_PATH": str(library)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    made = [CardAddress(uuid=u, minor=m, gpu_instance=g, compute_instance=c) for u, m, g, c in json.loads(done.stdout)]
    assert len({(one.minor, one.gpu_instance, one.compute_instance) for one in made}) == 14
    (tmp_path / "libvgpu.so").write_bytes(b"hook")
    (tmp_path / "ld.so.preload").write_text("/usr/local/vgpu/libvgpu.so\n")
    files = discover(
        Roots(driver_root=str(out)),
        made,
        hook_library=str(tmp_path / "libvgpu.so"),
        preload_file=str(tmp_path / "ld.so.preload"),
        run_dir="/run/aliquot",
    )
    nodes = {one.uuid: [node.path for node in files.card_nodes[one.uuid]] for one in made}
    assert all(nodes[one.uuid][0] == f"/dev/nvidia{one.minor}" for one in made)
    caps = [tuple(paths[1:]) for paths in nodes.values()]
    assert {len(pair) for pair in caps} == {2}
    assert len(set(caps)) == 14  # no two instances share both
    assert len({gi for gi, _ in caps}) == 8


def test_proc_and_sys_tell_of_the_cards(out):
    uuid = "GPU-00000000-0000-0000-0000-00000000000a"
    make(out, {"cards": [{"profile": "T4", "pci": "00000000:3b:00.0", "uuid": uuid, "numa": 1, "minor": 7}]})
    text = (out / "proc/driver/nvidia/gpus/0000:3b:00.0/information").read_text()
    assert f"GPU UUID: \t {uuid}" in text
    assert "Device Minor: \t 7" in text
    assert "580.65.06" in (out / "proc/driver/nvidia/version").read_text()
    device = out / "sys/bus/pci/devices/0000:3b:00.0"
    told = {name: (device / name).read_text().strip() for name in ("vendor", "device", "numa_node", "class")}
    assert told == {"vendor": "0x10de", "device": "0x1eb8", "numa_node": "1", "class": "0x030200"}


TREE = [
    {"numa": 0, "root_complex": 0, "pcie_switch": 1, "count": 2},
    {"numa": 0, "root_complex": 0},
    {"numa": 1, "root_complex": 1},
]
LOOK = """
import json, sys
from pathlib import Path
from aliquot.node.inventory import read_inventory
from aliquot.node.nvml import Nvml
with Nvml(Path(sys.argv[1])) as nvml:
    cards = read_inventory(nvml, sysfs=Path(sys.argv[2])).cards
print(json.dumps([[card.pci_root, card.numa_node] for card in cards]))
"""


def test_the_pci_tree_has_the_topology_of_the_configuration(out):
    """Cards of one switch below one bridge, of one complex below one root; our inventory finds both in it."""
    make(out, {"cards": TREE})
    links = sorted((out / "sys/bus/pci/devices").iterdir())
    places = [path.resolve(strict=True) for path in links]
    assert [place.name for place in places] == [path.name for path in links]
    assert all(place.is_relative_to((out / "sys/devices").resolve()) for place in places)
    assert places[0].parent == places[1].parent != places[2].parent
    roots = [place.parents[1].name for place in places]
    assert roots == ["pci0000:00", "pci0000:00", "pci0000:00", "pci0000:ff"]
    library = next((out / "usr/lib").glob("*/libnvidia-ml.so.1"))
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(library), str(out / "sys")],
        env=os.environ | {"FAKEGPU_CONFIG": str(out / "config.json"), "FAKEGPU_VISIBLE_DEVICES": "all"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert json.loads(done.stdout) == [[root, node] for root, node in zip(roots, (0, 0, 0, 1), strict=True)]


def test_cards_that_are_gone_leave_nothing_in_proc_and_sys(out):
    make(out, {"cards": TREE})
    make(out, {"cards": [{"pci": "00000000:3b:00.0", "root_complex": 5}]})
    assert [path.name for path in (out / "proc/driver/nvidia/gpus").iterdir()] == ["0000:3b:00.0"]
    assert [path.name for path in (out / "sys/bus/pci/devices").iterdir()] == ["0000:3b:00.0"]
    folders = {path.name for path in (out / "sys/devices").rglob("*") if path.is_dir()}
    assert folders == {"pci0000:00", "0000:00:01.0", "0000:3b:00.0"}


def test_making_it_again_changes_nothing(out):
    make(out, {"cards": [{"profile": "A100-40"}]})

    def picture() -> dict[str, tuple[int, int]]:
        paths = [path for path in out.rglob("*") if path.name != ".lock"]
        return {str(path): (path.lstat().st_ino, path.lstat().st_mtime_ns) for path in paths if not path.is_dir()}

    before = picture()
    make(out, {"cards": [{"profile": "A100-40"}]})
    assert picture() == before


def test_a_configuration_that_is_not_understood(out):
    done = make(out, {"cards": [{"profile": "nonsense"}]}, status=1)
    assert "nonsense" in done.stderr
    assert "does not take" in done.stderr


@pytest.mark.parametrize("flavour", ["550", "525", "470"])
def test_old_flavours(out, flavour):
    make(out, {"cards": [{}], "driver_version": "999.1"}, "--flavour", flavour)
    folder = next((out / "usr/lib").iterdir())
    assert any(path.name.startswith(f"libcuda.so.{flavour}.") for path in folder.iterdir())
