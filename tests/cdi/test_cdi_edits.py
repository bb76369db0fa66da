# SPDX-License-Identifier: Apache-2.0
"""What a grant changes in a container, and that several grants can meet in one container."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aliquot.api.errors import HardwareError, InternalError, RequestError, SettingsError
from aliquot.api.grant import CorePolicy, Grant
from aliquot.cdi import names, version
from aliquot.cdi.driver_files import CardAddress, DriverFiles, HostFile, HostNode
from aliquot.cdi.edits import edits_for, merge, spec_for
from aliquot.cdi.load import load_extra_edits
from aliquot.cdi.model import EMPTY_EDITS, ContainerEdits, DeviceNode, IntelRdt, Mount
from aliquot.cdi.validate import Level, host_paths, problems

UID = "0b1c2d3e-0000-4000-8000-00000000000a"
GA = "GPU-aaaaaaaa-0000-4000-8000-00000000000a"
GB = "GPU-bbbbbbbb-0000-4000-8000-00000000000b"

FILES = DriverFiles(
    version="550.163.01",
    libraries=(
        HostFile(
            "/usr/lib64/libcuda.so.550.163.01",
            ("/usr/lib/x86_64-linux-gnu/libcuda.so.1", "/usr/lib64/libcuda.so.1"),
        ),
    ),
    binaries=(HostFile("/usr/bin/nvidia-smi", ("/usr/bin/nvidia-smi",)),),
    common_nodes=(HostNode("/dev/nvidiactl", "/dev/nvidiactl"), HostNode("/dev/nvidia-uvm", "/dev/nvidia-uvm")),
    card_nodes={
        GA: (HostNode("/dev/nvidia0", "/dev/nvidia0"),),
        GB: (HostNode("/drv/dev/nvidia1", "/dev/nvidia1"),),
    },
    hook_library="/var/lib/aliquot/hook/1/libvgpu.so",
    preload_file="/var/lib/aliquot/hook/1/ld.so.preload",
    run_dir="/run/aliquot",
)


def grant(name: str = f"c-{UID}-gpu-aaaaaaaa-shared", card: str = GA, **fields: Any) -> Grant:
    return Grant(name=name, card_uuid=card, **{"memory_bytes": 4 << 30, **fields})


def mounts(edits: ContainerEdits) -> dict[str, Mount]:
    out = {mount.container_path: mount for mount in edits.mounts}
    assert len(out) == len(edits.mounts)
    return out


def test_the_edits_of_a_grant_are_these_and_no_others() -> None:
    name = f"c-{UID}-gpu-aaaaaaaa-shared"
    read_only = ["ro", "nosuid", "nodev", "rbind", "rprivate"]
    data = ["ro", "nosuid", "nodev", "noexec", "rbind", "rprivate"]
    writable = ["rw", "nosuid", "nodev", "noexec", "rbind", "rprivate"]
    library = "/usr/lib64/libcuda.so.550.163.01"
    assert edits_for(grant(), FILES).to_dict() == {
        "env": ["NVIDIA_VISIBLE_DEVICES=void"],
        "deviceNodes": [
            {"path": path, "permissions": "rw"} for path in ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0")
        ],
        "mounts": [
            {"hostPath": host, "containerPath": path, "options": options}
            for host, path, options in (
                (library, "/usr/lib/x86_64-linux-gnu/libcuda.so.1", read_only),
                (library, "/usr/lib64/libcuda.so.1", read_only),
                ("/usr/bin/nvidia-smi", "/usr/bin/nvidia-smi", read_only),
                (f"/run/aliquot/grants/{name}", f"/usr/local/vgpu/grants/{name}", data),
                (f"/run/aliquot/usage/{name}", f"/usr/local/vgpu/usage/{name}", writable),
                ("/var/lib/aliquot/hook/1/libvgpu.so", "/usr/local/vgpu/libvgpu.so", read_only),
                ("/var/lib/aliquot/hook/1/ld.so.preload", "/etc/ld.so.preload", data),
            )
        ],
    }


def test_a_node_elsewhere_on_the_host_says_where() -> None:
    nodes = edits_for(grant(card=GB), FILES).device_nodes
    assert nodes[-1] == DeviceNode(path="/dev/nvidia1", host_path="/drv/dev/nvidia1", permissions="rw")


def test_a_node_has_no_numbers_so_a_reloaded_driver_is_looked_up_again() -> None:
    for node in edits_for(grant(), FILES).device_nodes:
        assert (node.type, node.major, node.minor, node.file_mode, node.uid, node.gid) == ("", 0, 0, None, None, None)


def test_b082_device_access_is_given_by_the_runtimes_device_list() -> None:
    edits = edits_for(grant(), FILES)
    assert {node.path for node in edits.device_nodes} >= {"/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"}
    assert not edits.hooks
    assert not [mount for mount in edits.mounts if mount.container_path.startswith("/dev")]


def test_b104_a_part_of_a_card_is_held_by_the_hook_and_its_grant_file() -> None:
    found = mounts(edits_for(grant(memory_bytes=4 << 30, core_percent=30), FILES))
    assert {"/usr/local/vgpu/libvgpu.so", "/etc/ld.so.preload"} <= set(found)
    assert f"/usr/local/vgpu/grants/c-{UID}-gpu-aaaaaaaa-shared" in found


def test_b106_two_shares_of_one_card_have_names_and_paths_of_their_own() -> None:
    one, two = (grant(f"c-{UID}-gpu-aaaaaaaa-shared-{share}") for share in ("s1", "s2"))
    own_one, own_two = (set(mounts(edits_for(item, FILES))) for item in (one, two))
    assert {path for path in own_one - own_two if "s1" in path} == own_one - own_two
    assert len(own_one - own_two) == len(own_two - own_one) == 2
    spec = spec_for([(one, "hook"), (two, "hook")], FILES)
    assert spec.qualified_names() == (f"gpu.aliquot.dev/claim={one.name}", f"gpu.aliquot.dev/claim={two.name}")


@pytest.mark.parametrize("limits", [{"memory_bytes": 1 << 30}, {"memory_bytes": 0, "core_percent": 50}])
def test_b149_a_limit_is_never_given_without_the_hook(limits: dict[str, int]) -> None:
    with pytest.raises(RequestError, match="limiter 'none'"):
        edits_for(grant(**limits), FILES, limiter="none")
    with pytest.raises(RequestError, match="limiter 'none'"):
        spec_for([(grant(**limits), "none")], FILES)


def test_b149_all_of_the_compute_keeps_the_memory_limit() -> None:
    edits = edits_for(grant(memory_bytes=1 << 30, core_percent=100, core_policy=CorePolicy.DISABLE), FILES)
    assert "/etc/ld.so.preload" in mounts(edits)


def test_b149_only_an_explicit_wish_leaves_the_hook_out() -> None:
    whole = grant(memory_bytes=0)
    assert "/etc/ld.so.preload" in mounts(edits_for(whole, FILES))
    free = mounts(edits_for(whole, FILES, limiter="none"))
    assert "/etc/ld.so.preload" not in free
    assert "/usr/local/vgpu/libvgpu.so" not in free
    assert f"/usr/local/vgpu/grants/{whole.name}" in free, "or it would be unknown to the hook of a limited neighbour"


def test_b234_no_program_runs_on_the_host_and_nothing_of_the_image_is_named() -> None:
    spec = spec_for([(grant(), "hook"), (grant("c-x-b", GB), "hook")], FILES)
    assert "hooks" not in json.dumps(spec.to_dict())
    allowed = ("/usr/lib64/", "/usr/bin/", "/dev/", "/drv/dev/", "/run/aliquot/", "/var/lib/aliquot/")
    assert all(path.startswith(allowed) for _, path in host_paths(spec))
    for mount in mounts(edits_for(grant(), FILES)).values():
        assert {"nosuid", "nodev", "rprivate"} <= set(mount.options)
        assert ("rw" in mount.options) == mount.container_path.startswith("/usr/local/vgpu/usage/")


def test_b083_no_limit_is_in_a_variable_that_a_second_grant_or_a_user_could_replace() -> None:
    for item in (grant(), grant(memory_bytes=0, core_percent=10), grant(card=GB)):
        assert edits_for(item, FILES).env == ("NVIDIA_VISIBLE_DEVICES=void",)


def test_b121_no_device_without_edits_of_its_own() -> None:
    spec = spec_for([(grant(memory_bytes=0), "none")], FILES)
    assert all(device.container_edits for device in spec.devices)
    empty = msgspec.structs.replace(spec.devices[0], container_edits=EMPTY_EDITS)
    found = problems(msgspec.structs.replace(spec, devices=(empty,)), Level.UPSTREAM)
    assert [problem.where for problem in found] == ["devices[0].containerEdits"]


def test_b120_the_version_is_the_lowest_and_names_begin_with_a_letter() -> None:
    on_the_host = spec_for([(grant(), "hook")], FILES)
    elsewhere = spec_for([(grant(card=GB), "hook")], FILES)
    assert (on_the_host.cdi_version, elsewhere.cdi_version) == ("0.3.0", "0.5.0")
    for spec in (on_the_host, elsewhere):
        assert not problems(spec)
        assert all(device.name[0].isalpha() for device in spec.devices)
        assert all(names.is_qualified(name) for name in spec.qualified_names())


def test_b120_edits_beyond_the_cap_are_refused_and_the_field_is_named() -> None:
    extra = msgspec.structs.replace(FILES, extra_edits=ContainerEdits(additional_gids=(44,)))
    with pytest.raises(SettingsError, match=r"containerEdits\.additionalGids needs CDI 0\.7\.0, but .* 0\.5\.0"):
        spec_for([(grant(), "hook")], extra)
    assert spec_for([(grant(), "hook")], extra, cap="0.7.0").cdi_version == "0.7.0"


def test_a_spec_gives_each_device_exactly_the_edits_of_its_grant() -> None:
    grants = [grant(), grant("c-x-b", GB), grant("c-x-c", memory_bytes=0)]
    spec = spec_for([(item, "hook") for item in grants], FILES)
    for item, device in zip(grants, spec.devices, strict=True):
        assert merge(spec.container_edits, device.container_edits) == edits_for(item, FILES)
    assert not problems(spec)


def test_any_grants_can_meet_in_one_container() -> None:
    """Merged in any order, no path or variable of one grant is lost to another (the last one would win)."""
    grants = [
        grant("c-x-a", GA),
        grant("c-x-a2", GA, memory_bytes=6 << 30),
        grant("c-y-b", GB, memory_bytes=0, core_percent=5),
    ]
    extra = msgspec.structs.replace(FILES, extra_edits=ContainerEdits(env=("FAKEGPU_CONFIG=/x",)))
    alone = {item.name: edits_for(item, extra) for item in grants}
    for order in itertools.permutations(grants):
        wins: dict[str, object] = {}
        for item in order:
            edits = alone[item.name]
            wins |= {node.path: node for node in edits.device_nodes}
            wins |= {mount.container_path: mount for mount in edits.mounts}
            wins |= {f"${entry.partition('=')[0]}": entry for entry in edits.env}
        for edits in alone.values():
            assert all(wins[node.path] == node for node in edits.device_nodes)
            assert all(wins[mount.container_path] == mount for mount in edits.mounts)
            assert all(wins[f"${entry.partition('=')[0]}"] == entry for entry in edits.env)


def test_a_card_that_was_not_looked_at_is_an_error() -> None:
    with pytest.raises(HardwareError, match="GPU-cccc"):
        edits_for(grant(card="GPU-cccc"), FILES)


def test_two_grants_of_one_name_or_none_are_our_own_mistake() -> None:
    with pytest.raises(InternalError, match="two grants"):
        spec_for([(grant(), "hook"), (grant(), "hook")], FILES)
    with pytest.raises(InternalError, match="without grants"):
        spec_for([], FILES)


# --- merging ----------------------------------------------------------------------------------------------------


def test_merging_keeps_order_and_does_not_repeat() -> None:
    node = DeviceNode(path="/dev/a")
    one = ContainerEdits(env=("A=1",), device_nodes=(node,), additional_gids=(5,), intel_rdt=IntelRdt(clos_id="x"))
    two = ContainerEdits(env=("B=2", "A=1"), device_nodes=(node,), additional_gids=(6, 5))
    merged = merge(one, two, EMPTY_EDITS)
    assert merged.env == ("A=1", "B=2")
    assert merged.device_nodes == (node,)
    assert merged.additional_gids == (5, 6)
    assert merged.intel_rdt == IntelRdt(clos_id="x")
    assert merge() == EMPTY_EDITS


@pytest.mark.parametrize(
    ("one", "two", "word"),
    [
        (ContainerEdits(env=("A=1",)), ContainerEdits(env=("A=2",)), "variable A"),
        (
            ContainerEdits(mounts=(Mount(host_path="/a", container_path="/x"),)),
            ContainerEdits(mounts=(Mount(host_path="/b", container_path="/x"),)),
            "/x",
        ),
        (
            ContainerEdits(mounts=(Mount(host_path="/a", container_path="/dev/x"),)),
            ContainerEdits(device_nodes=(DeviceNode(path="/dev/x"),)),
            "/dev/x",
        ),
        (ContainerEdits(intel_rdt=IntelRdt()), ContainerEdits(intel_rdt=IntelRdt(clos_id="x")), "intelRdt"),
    ],
)
def test_merging_refuses_two_meanings_of_one_place(one: ContainerEdits, two: ContainerEdits, word: str) -> None:
    with pytest.raises(SettingsError, match=word):
        merge(one, two)


# --- the operator's extra edits -----------------------------------------------------------------------------------


def extra(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "extra.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_extra_edits_reach_every_grant(tmp_path: Path) -> None:
    path = extra(
        tmp_path,
        {
            "env": ["FAKEGPU_CONFIG=/run/fakegpu/config.json"],
            "mounts": [{"hostPath": "/run/fakegpu", "containerPath": "/run/fakegpu", "options": ["rw", "rbind"]}],
        },
    )
    files = msgspec.structs.replace(FILES, extra_edits=load_extra_edits(path))
    for item in (grant(), grant("c-x-b", GB)):
        edits = edits_for(item, files)
        assert "FAKEGPU_CONFIG=/run/fakegpu/config.json" in edits.env
        assert "/run/fakegpu" in mounts(edits)
    assert not problems(spec_for([(grant(), "hook"), (grant("c-x-b", GB), "hook")], files))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "empty"),
        ("{", "not valid JSON"),
        ("[]", "list"),
        ('{"env": ["A=1"], "env": ["A=2"]}', "'env' is there twice"),
        ({"containerEdits": {"env": ["A=1"]}}, "without the key around it"),
        ({"enviroment": ["A=1"]}, "enviroment"),
        ({"env": ["A"]}, "NAME=value"),
        ({"env": ["A=1", "A=2"]}, "A is set twice"),
        ({"mounts": [{"hostPath": "relative", "containerPath": "/x"}]}, "absolute path"),
        ({"mounts": [{"hostPath": "/x", "containerPath": "/x/../y"}]}, "absolute path"),
        ({"additionalGids": [5]}, "additionalGids needs CDI 0.7.0"),
        ({"hooks": [{"hookName": "createContainer", "path": "/bin/h", "args": ["h"]}]}, "container's environment"),
        ({"deviceNodes": [{"path": "/dev/x", "major": 1, "minor": 2}]}, "numbers"),
        ({"env": ["NVIDIA_VISIBLE_DEVICES=all"]}, "NVIDIA_VISIBLE_DEVICES"),
        ({"mounts": [{"hostPath": "/x", "containerPath": "/etc/ld.so.preload"}]}, "/etc/ld.so.preload"),
        ({"mounts": [{"hostPath": "/x", "containerPath": "/usr/local/vgpu/grants"}]}, "/usr/local/vgpu"),
        ({"mounts": [{"hostPath": "/x", "containerPath": "/usr/local"}]}, "/usr/local"),
        ({"deviceNodes": [{"path": "/usr/local/vgpu/x"}]}, "/usr/local/vgpu"),
    ],
)
def test_extra_edits_that_cannot_work_are_refused_at_start(tmp_path: Path, content: object, words: str) -> None:
    path = extra(tmp_path, content)
    with pytest.raises(SettingsError) as caught:
        load_extra_edits(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_an_extra_edits_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"extra\.json: No such file"):
        load_extra_edits(tmp_path / "extra.json")


def test_extra_edits_on_a_path_of_the_driver_are_refused(driver: Any) -> None:
    clash = ContainerEdits(mounts=(Mount(host_path="/x", container_path="/usr/lib64/libcuda.so.1"),))
    files = driver.discover(CardAddress(uuid=GA, minor=0), extra_edits=clash)
    with pytest.raises(SettingsError, match=r"/usr/lib64/libcuda\.so\.1"):
        spec_for([(grant(), "hook")], files)


def test_extra_edits_that_cover_a_folder_of_the_driver_are_refused() -> None:
    """The runtime would make mount points for the driver's files inside the operator's folder, on the host."""
    cover = ContainerEdits(mounts=(Mount(host_path="/x", container_path="/usr/lib64"),))
    with pytest.raises(SettingsError, match=r"/usr/lib64 .*covers"):
        edits_for(grant(), msgspec.structs.replace(FILES, extra_edits=cover))


def test_the_default_cap_is_what_every_supported_runtime_reads() -> None:
    assert version.DEFAULT_CAP == "0.5.0"
