# SPDX-License-Identifier: Apache-2.0
"""Looking at a driver installation: what is found, under which names, and what is said when something is missing."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from aliquot.api.errors import HardwareError, InternalError, SettingsError
from aliquot.api.grant import Grant
from aliquot.cdi import codec, elf, libraries
from aliquot.cdi.driver_files import CardAddress, HostNode, Roots, discover
from aliquot.cdi.edits import spec_for
from aliquot.cdi.host import HostTree
from aliquot.cdi.validate import problems

GA = "GPU-aaaaaaaa-0000-4000-8000-00000000000a"
GB = "GPU-bbbbbbbb-0000-4000-8000-00000000000b"
FIRST = CardAddress(uuid=GA, minor=0)
SECOND = CardAddress(uuid=GB, minor=1)


def mounts(files: Any) -> dict[str, str]:
    return {path: file.host for file in (*files.libraries, *files.binaries) for path in file.container}


def test_every_library_of_the_version_appears_under_all_its_names_in_both_directories(driver: Any) -> None:
    folder = str(driver.root / "usr/lib/x86_64-linux-gnu")
    found = mounts(driver.discover(FIRST))
    for place in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64"):
        for name in ("libcuda.so.1", "libcuda.so", "libcuda.so.550.163.01"):
            assert found.pop(f"{place}/{name}") == f"{folder}/libcuda.so.550.163.01"
        for name in ("libnvidia-ml.so.1", "libnvidia-ml.so.550.163.01"):
            assert found.pop(f"{place}/{name}") == f"{folder}/libnvidia-ml.so.550.163.01"
        for name in ("libnvidia-nvvm.so.4", "libnvidia-nvvm.so.550.163.01"):
            assert found.pop(f"{place}/{name}") == f"{folder}/libnvidia-nvvm.so.550.163.01"
        assert found.pop(f"{place}/libnvidia-glcore.so.550.163.01") == f"{folder}/libnvidia-glcore.so.550.163.01"
        for name in ("libnvidia-ptxjitcompiler.so.1", "libnvidia-ptxjitcompiler.so.550.163.01"):
            assert f"{place}/{name}" in found
            del found[f"{place}/{name}"]
    assert found == {"/usr/bin/nvidia-smi": str(driver.root / "usr/bin/nvidia-smi")}


def test_sonames_are_enough_where_the_links_are_missing(driver: Any, tmp_path: Path) -> None:
    other = type(driver)(tmp_path / "two" / "root")
    other.install("580.95.05", links=False)
    assert "/usr/lib64/libcuda.so.1" in mounts(other.discover(FIRST))


def test_files_that_are_no_libraries_of_the_driver_stay_outside(driver: Any, make_library: Any) -> None:
    folder = driver.root / "usr/lib/x86_64-linux-gnu"
    (folder / "libnvidia-old.so.535.1.1").write_bytes(make_library("libnvidia-old.so.1"))
    (folder / "libnvidia-arm.so.550.163.01").write_bytes(make_library("libnvidia-arm.so.1", machine=183))
    (folder / "libnvidia-text.so.550.163.01").write_text("GROUP ( libc.so.6 )")
    (folder / "libnvidia-evil.so.550.163.01").write_bytes(make_library("../../etc/passwd"))
    (folder / "libc.so.6").write_bytes(make_library("libc.so.6"))
    found = mounts(driver.discover(FIRST))
    assert not [path for path in found if any(word in path for word in ("old", "arm", "text", "passwd", "libc.so"))]
    assert "/usr/lib64/libnvidia-evil.so.550.163.01" in found


def test_debian_keeps_the_files_elsewhere_and_links_to_them(driver: Any, tmp_path: Path) -> None:
    tree = type(driver)(tmp_path / "debian" / "root")
    current = tree.install("550.163.01", "usr/lib/x86_64-linux-gnu/nvidia/current")
    alternatives = tree.root / "etc/alternatives"
    alternatives.mkdir(parents=True)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (alternatives / f"nvidia--{name}").symlink_to(f"/usr/lib/x86_64-linux-gnu/nvidia/current/{name}")
        (tree.root / "usr/lib/x86_64-linux-gnu" / name).symlink_to(f"/etc/alternatives/nvidia--{name}")
    found = mounts(tree.discover(FIRST))
    assert found["/usr/lib/x86_64-linux-gnu/libcuda.so.1"] == str(current / "libcuda.so.550.163.01")
    assert "/usr/lib/x86_64-linux-gnu/libnvidia-nvvm.so.4" in found


def test_absolute_links_inside_a_driver_root_mean_that_root(driver: Any) -> None:
    moved = driver.root / "opt/nvidia"
    (driver.root / "opt").mkdir()
    (driver.root / "usr/lib/x86_64-linux-gnu").rename(moved)
    (driver.root / "usr/lib/x86_64-linux-gnu").symlink_to("/opt/nvidia")
    assert mounts(driver.discover(FIRST))["/usr/lib64/libcuda.so.1"] == str(moved / "libcuda.so.550.163.01")


def test_a_driver_root_that_is_itself_a_link_is_followed_on_the_host(driver: Any, tmp_path: Path) -> None:
    link = tmp_path / "run-nvidia-driver"
    link.symlink_to(driver.root)
    files = driver.discover(FIRST, driver_root=str(link))
    assert mounts(files)["/usr/bin/nvidia-smi"] == str(driver.root / "usr/bin/nvidia-smi")


@pytest.mark.skipif(os.geteuid() != 0, reason="making device nodes needs root")
def test_seen_through_a_prefix_everything_is_still_named_as_on_the_host(driver: Any, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    os.mknod(tmp_path / "dev/null", 0o20666, os.makedev(1, 3))  # where the links of the tree lead on this "host"
    files = driver.discover(FIRST, driver_root="/driver-root", host_prefix=str(tmp_path))
    assert files.card_nodes[GA] == (HostNode("/dev/null", "/dev/nvidia0"),)
    assert mounts(files)["/usr/bin/nvidia-smi"] == "/driver-root/usr/bin/nvidia-smi"
    assert mounts(files)["/usr/lib64/libcuda.so.1"].startswith("/driver-root/usr/lib/x86_64-linux-gnu/")


@pytest.mark.parametrize("root", ["relative/root", "./x"])
def test_a_relative_driver_root_is_refused(driver: Any, root: str) -> None:
    with pytest.raises(SettingsError, match=root):
        driver.discover(FIRST, driver_root=root)


def test_a_driver_root_that_is_not_there_is_named(driver: Any) -> None:
    with pytest.raises(HardwareError, match="/nowhere/at/all"):
        driver.discover(FIRST, driver_root="/nowhere/at/all")


def test_a_root_without_a_driver_says_so(driver: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(HardwareError, match="no libcuda"):
        driver.discover(FIRST, driver_root=str(tmp_path / "empty"))


def test_b130_a_new_driver_is_seen_by_the_next_call(driver: Any) -> None:
    before = driver.discover(FIRST)
    folder = driver.root / "usr/lib/x86_64-linux-gnu"
    for path in folder.glob("*.550.163.01"):
        path.unlink()
    driver.install("580.2")
    after = driver.discover(FIRST)
    assert (before.version, after.version) == ("550.163.01", "580.2")
    assert not [host for host in mounts(after).values() if "550" in host]
    assert mounts(after)["/usr/lib64/libcuda.so.1"] == str(folder / "libcuda.so.580.2")


def test_b130_with_both_versions_on_disk_the_link_decides(driver: Any) -> None:
    driver.install("580.2")
    files = driver.discover(FIRST)
    assert files.version == "580.2"
    assert not [path for path in mounts(files) if "550" in path]


def test_b130_half_an_update_is_an_error_that_names_both_versions(driver: Any) -> None:
    folder = driver.install("580.2")
    (folder / "libnvidia-ml.so.1").unlink()
    (folder / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.550.163.01")
    with pytest.raises(HardwareError, match=r"580\.2.*550\.163\.01"):
        driver.discover(FIRST)


def test_b130_what_is_remembered_of_a_settled_directory_ends_with_any_change(driver: Any, make_library: Any) -> None:
    tree = HostTree()
    folder = driver.root / "usr/lib/x86_64-linux-gnu"
    found = libraries.find_installation(tree, str(driver.root))

    def look(offset_s: float) -> list[str]:
        return [
            Path(file.host).name for file in libraries.find_libraries(tree, found, now=lambda: time.time() + offset_s)
        ]

    libraries._libraries.cache_clear()
    before = look(60)
    assert look(60) == before
    assert libraries._libraries.cache_info().hits == 1
    (folder / "libnvidia-new.so.550.163.01").write_bytes(make_library("libnvidia-new.so.1"))
    assert look(60) == sorted([*before, "libnvidia-new.so.550.163.01"])
    (folder / "libnvidia-nvvm.so.550.163.01").unlink()
    assert "libnvidia-nvvm.so.550.163.01" not in look(60)
    size = libraries._libraries.cache_info().currsize
    look(0)
    assert libraries._libraries.cache_info().currsize == size, "a directory that just changed is not remembered"


def test_two_versions_and_no_link_is_an_error(driver: Any) -> None:
    folder = driver.install("580.2", links=False)
    (folder / "libcuda.so.1").unlink()
    (folder / "libcuda.so").unlink()
    with pytest.raises(HardwareError, match="which one is in use"):
        driver.discover(FIRST)


def test_libraries_that_do_not_fit_the_kernel_module_are_an_error(driver: Any) -> None:
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (root@host)\nGCC version:\n"
    table = driver.root / "proc/driver/nvidia/version"
    table.write_text(text.format("550.163.01"))
    assert driver.discover(FIRST).version == "550.163.01"
    table.write_text(text.format("535.1.2"))
    with pytest.raises(HardwareError, match=r"550\.163\.01.*535\.1\.2.*reboot"):
        driver.discover(FIRST)


# --- device nodes -----------------------------------------------------------------------------------------------


def test_only_the_nodes_of_the_cards_asked_for(driver: Any) -> None:
    files = driver.discover(SECOND)
    assert [node.path for node in files.common_nodes] == ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]
    assert {uuid: [node.path for node in nodes] for uuid, nodes in files.card_nodes.items()} == {GB: ["/dev/nvidia1"]}


def test_a_node_that_is_a_link_is_followed_because_runtimes_do_not(driver: Any) -> None:
    assert driver.discover(FIRST).card_nodes[GA] == (HostNode("/dev/null", "/dev/nvidia0"),)


@pytest.mark.skipif(os.geteuid() != 0, reason="making device nodes needs root")
def test_a_node_under_the_driver_root_is_named_there(driver: Any) -> None:
    path = driver.root / "dev/nvidia0"
    path.unlink()
    os.mknod(path, 0o20666, os.makedev(1, 3))
    assert driver.discover(FIRST).card_nodes[GA] == (HostNode(str(path), "/dev/nvidia0"),)


@pytest.mark.parametrize("name", ["nvidiactl", "nvidia-uvm", "nvidia0"])
def test_req6_a_missing_node_is_named_and_seen_when_it_appears(driver: Any, name: str) -> None:
    path = driver.root / "dev" / name
    path.unlink()
    if name == "nvidiactl":
        (driver.root / "dev/nvidiactl").touch()
        with pytest.raises(HardwareError, match=rf"{path} is not a device node"):
            driver.discover(FIRST)
        path.unlink()
    with pytest.raises(HardwareError, match=rf"/dev/{name} does not exist"):
        driver.discover(FIRST, dev_root=str(driver.root))
    driver.node(name)
    assert driver.discover(FIRST).card_nodes


def test_a_card_whose_node_is_missing_does_not_harm_another(driver: Any) -> None:
    (driver.root / "dev/nvidia0").unlink()
    assert driver.discover(SECOND).card_nodes[GB]
    with pytest.raises(HardwareError, match=rf"nvidia0 does not exist.*{GA}"):
        driver.discover(SECOND, FIRST)


def test_a_tree_that_cannot_be_walked_is_an_error_that_names_the_place(driver: Any) -> None:
    folder = driver.root / "usr/lib/x86_64-linux-gnu"
    (folder / "libcuda.so.1").unlink()
    (folder / "libcuda.so.1").symlink_to("libcuda.so.1")
    with pytest.raises(HardwareError, match=r"libcuda\.so\.1 .*symbolic links"):
        driver.discover(FIRST)


def mig_tree(driver: Any) -> CardAddress:
    table = driver.root / "proc/driver/nvidia-caps/mig-minors"
    table.parent.mkdir(parents=True)
    table.write_text("config 1\nmonitor 2\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\ngpu1/gi1/access 147\n")
    driver.node("nvidia-caps/nvidia-cap12")
    driver.node("nvidia-caps/nvidia-cap13")
    return CardAddress(uuid="MIG-1", minor=0, gpu_instance=1, compute_instance=0)


def test_a_mig_instance_gets_its_card_and_both_capabilities(driver: Any) -> None:
    card = mig_tree(driver)
    assert [node.path for node in driver.discover(card).card_nodes["MIG-1"]] == [
        "/dev/nvidia0",
        "/dev/nvidia-caps/nvidia-cap12",
        "/dev/nvidia-caps/nvidia-cap13",
    ]


def test_a_mig_instance_that_is_only_half_named_is_our_own_mistake(driver: Any) -> None:
    mig_tree(driver)
    for half in ({"gpu_instance": 1}, {"compute_instance": 0}):
        with pytest.raises(InternalError, match="both are needed"):
            driver.discover(CardAddress(uuid="MIG-1", minor=0, **half))


def test_a_mig_instance_without_a_capability_is_refused_not_given_half(driver: Any) -> None:
    card = mig_tree(driver)
    (driver.root / "dev/nvidia-caps/nvidia-cap13").unlink()
    with pytest.raises(HardwareError, match="nvidia-cap13"):
        driver.discover(card)
    (driver.root / "proc/driver/nvidia-caps/mig-minors").write_text("gpu0/gi1/access 12\n")
    with pytest.raises(HardwareError, match="gpu0/gi1/ci0/access"):
        driver.discover(card)


# --- our own files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", ["", "/usr/local/vgpu/libvgpu.so", "/elsewhere/libvgpu.so\n", "#\n/usr/local/vgpu/libvgpu.so\n"]
)
def test_b128_a_preload_file_that_names_anything_else_stops_the_claim(driver: Any, content: str) -> None:
    (driver.hook / "ld.so.preload").write_text(content)
    with pytest.raises(InternalError, match=r"ld\.so\.preload"):
        driver.discover(FIRST)


def test_b128_a_hook_library_that_is_gone_or_empty_stops_the_claim(driver: Any) -> None:
    (driver.hook / "libvgpu.so").write_bytes(b"")
    with pytest.raises(InternalError, match=r"libvgpu\.so must not be empty"):
        driver.discover(FIRST)
    (driver.hook / "libvgpu.so").unlink()
    with pytest.raises(InternalError, match=r"libvgpu\.so: No such file"):
        driver.discover(FIRST)


# --- ELF and links ----------------------------------------------------------------------------------------------


def test_sonames_are_those_that_the_linker_wrote(tmp_path: Path) -> None:
    source = tmp_path / "x.c"
    source.write_text("int x;\n")
    for name in ("libx.so.7", ""):
        flags = [f"-Wl,-soname,{name}"] if name else []
        try:
            subprocess.run(["gcc", "-shared", "-fPIC", *flags, "-o", tmp_path / "x.so", source], check=True)
        except FileNotFoundError:
            pytest.skip("there is no C compiler")
        found = elf.read_library(tmp_path / "x.so")
        assert found is not None
        assert found.soname == name
        assert found.machine == {"x86_64": elf.X86_64, "aarch64": elf.AARCH64}[os.uname().machine]
        (tmp_path / "x.so").unlink()


def test_a_damaged_library_is_none_and_nothing_worse(tmp_path: Path, make_library: Any) -> None:
    whole = make_library("libx.so.1")
    path = tmp_path / "x.so"
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        elf._read.cache_clear()
        found = elf.read_library(path)
        assert found is None or found.soname in "libx.so.1"
    for index in range(16, len(whole)):
        damaged = bytearray(whole)
        damaged[index] ^= 0xFF
        path.write_bytes(damaged)
        elf._read.cache_clear()
        elf.read_library(path)


def test_a_changed_library_is_read_again(tmp_path: Path, make_library: Any) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(make_library("liba.so.1"))
    assert elf.read_library(path).soname == "liba.so.1"
    path.write_bytes(make_library("libbb.so.22"))
    assert elf.read_library(path).soname == "libbb.so.22"


def test_links_never_leave_their_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (root / "a/f").write_text("inside")
    (root / "up").symlink_to("../../../../a/f")
    (root / "abs").symlink_to("/a/f")
    (root / "chain").symlink_to("abs")
    (root / "dirlink").symlink_to("/a")
    (root / "loop").symlink_to("loop")
    tree = HostTree()
    for name in ("up", "abs", "chain", "dirlink/f", "a/../a/./f", "/../a/f"):
        assert tree.resolve(name, str(root)) == str(root / "a/f")
    assert tree.find("missing", str(root)) == ""
    assert tree.find("a/f/x", str(root)) == ""
    with pytest.raises(OSError, match="symbolic links"):
        tree.resolve("loop", str(root))
    assert tree.resolve("/", "/") == "/"


def test_the_fake_driver_is_a_driver_to_us_and_to_the_reference(
    fake_driver_root: Path, driver: Any, reference: Any, tmp_path: Path
) -> None:
    files = discover(
        Roots(driver_root=str(fake_driver_root)),
        [FIRST, SECOND],
        hook_library=str(driver.hook / "libvgpu.so"),
        preload_file=str(driver.hook / "ld.so.preload"),
        run_dir="/run/aliquot",
    )
    folder = f"{fake_driver_root}/usr/lib/x86_64-linux-gnu"
    assert mounts(files)["/usr/lib64/libcuda.so.1"] == f"{folder}/libcuda.so.{files.version}"
    assert mounts(files)["/usr/bin/nvidia-smi"] == f"{fake_driver_root}/usr/bin/nvidia-smi"
    grants = [Grant(name=f"c-x-{card.minor}", card_uuid=card.uuid, memory_bytes=1 << 30) for card in (FIRST, SECOND)]
    spec = spec_for([(grant, "hook") for grant in grants], files)
    assert not problems(spec)
    (tmp_path / "spec.json").write_bytes(codec.encode(spec))
    answer = reference.ask(
        [{"op": "inject", "dirs": [str(tmp_path)], "devices": list(spec.qualified_names()), "oci": {}}]
    )[0]
    assert answer["error"] == ""
    nodes = {node["path"]: (node["major"], node["minor"]) for node in answer["oci"]["linux"]["devices"]}
    assert {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia1"} <= set(nodes)
