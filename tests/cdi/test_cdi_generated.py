# SPDX-License-Identifier: Apache-2.0
"""Specs that nobody thought of: what we write reads back equal, here and in Go, at the lowest version there is."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from aliquot.api.errors import AliquotError
from aliquot.api.grant import Grant
from aliquot.cdi import codec, version
from aliquot.cdi.driver_files import DriverFiles, HostFile, HostNode
from aliquot.cdi.edits import spec_for
from aliquot.cdi.inject import inject
from aliquot.cdi.model import (
    ContainerEdits,
    Device,
    DeviceNode,
    Hook,
    IntelRdt,
    Mount,
    NetDevice,
    Spec,
)
from aliquot.cdi.scan import scan
from aliquot.cdi.validate import DEVICE_TYPES, HOOK_NAMES, Level, problems

FEW = settings(
    max_examples=60,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
MANY = settings(max_examples=50, deadline=None)

WILD = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
TAME = st.sampled_from(["", "x", "y z", "é"])
device_names = st.from_regex(r"\A[A-Za-z0-9]([A-Za-z0-9_.:-]{0,20}[A-Za-z0-9])?\Z")
parts = st.from_regex(r"\A[A-Za-z][A-Za-z0-9_.-]{0,20}[A-Za-z0-9]\Z")
uint32 = st.integers(0, (1 << 32) - 1)
int64 = st.integers(0, (1 << 63) - 1)
# Few places, so that edits meet.
places = st.sampled_from(["/a", "/a/b", "/a/b/c", "/z", "relative", "/etc/ld.so.preload"])
nodes = st.builds(
    DeviceNode,
    path=places | WILD.filter(bool),
    host_path=st.just("") | places,
    type=st.sampled_from(DEVICE_TYPES),
    major=st.just(0) | int64,
    minor=st.just(0) | int64,
    file_mode=st.none() | uint32,
    permissions=st.sampled_from(["", "r", "rw", "rwm", "mm", "none"]),
    uid=st.none() | uint32,
    gid=st.none() | uint32,
)


def edits_of(node: st.SearchStrategy[DeviceNode], text: st.SearchStrategy[str]) -> st.SearchStrategy[ContainerEdits]:
    some = text.filter(bool)
    env = st.builds("{}={}".format, some.filter(lambda name: "=" not in name), text)
    mounts = st.builds(
        Mount,
        host_path=places | some,
        container_path=places | some,
        options=st.lists(st.sampled_from(["ro", "bind", "rbind", "idmap"]) | text, max_size=3).map(tuple),
        type=st.sampled_from(["", "bind", "tmpfs"]),
    )
    hooks = st.builds(
        Hook,
        hook_name=st.sampled_from(HOOK_NAMES),
        path=places | some,
        args=st.lists(text, max_size=2).map(tuple),
        env=st.lists(env, max_size=2).map(tuple),
        timeout=st.none() | st.integers(-5, 99),
    )
    rdts = st.builds(
        IntelRdt,
        clos_id=st.sampled_from(["", "/", "x.y", "name"]),
        l3_cache_schema=text,
        mem_bw_schema=text,
        schemata=st.none() | st.lists(text, max_size=2).map(tuple),
        enable_monitoring=st.booleans(),
    )
    net_devices = st.lists(
        st.builds(NetDevice, host_interface_name=some, name=some),
        max_size=2,
        unique_by=(lambda item: item.host_interface_name, lambda item: item.name),
    )
    return st.builds(
        ContainerEdits,
        env=st.lists(st.sampled_from(["A=1", "A=2", "B="]) | env, max_size=3).map(tuple),
        device_nodes=st.lists(node, max_size=2).map(tuple),
        net_devices=net_devices.map(tuple),
        hooks=st.lists(hooks, max_size=2).map(tuple),
        mounts=st.lists(mounts, max_size=3).map(tuple),
        intel_rdt=st.none() | rdts,
        additional_gids=st.lists(st.sampled_from([0, 5]) | uint32, max_size=3).map(tuple),
    )


annotations = st.dictionaries(st.sampled_from(["a", "b.c/d", "x-y"]), WILD, max_size=2)


def specs_of(edits: st.SearchStrategy[ContainerEdits]) -> st.SearchStrategy[Spec]:
    devices = st.lists(
        st.builds(Device, name=device_names, annotations=annotations, container_edits=edits.filter(bool)),
        min_size=1,
        max_size=3,
        unique_by=lambda device: device.name,
    )
    return st.builds(
        lambda **fields: version.with_lowest_version(Spec(cdi_version="0.3.0", **fields), cap=None),
        kind=st.builds("{}/{}".format, parts, parts),
        annotations=annotations,
        devices=devices.map(tuple),
        container_edits=edits,
    )


specs = specs_of(edits_of(nodes, WILD))
AWKWARD = '\x00\x1b\x7f\x85\u00a0\u2028\u2029\ufeff\ufffd\U0001f600"\\/'
awkward = Spec(
    cdi_version="0.6.0",
    kind="vendor.com/device",
    annotations={"a": AWKWARD},
    devices=(
        Device(
            name="d",
            container_edits=ContainerEdits(
                env=(f"A={AWKWARD}",),
                mounts=(Mount(host_path=AWKWARD, container_path="\n: - # |", options=("0:1", "on")),),
            ),
        ),
    ),
)


@MANY
@given(specs)
@example(awkward)
def test_a_spec_survives_the_way_to_disk_and_back(spec: Spec) -> None:
    assert Spec.from_dict(spec.to_dict()) == spec
    data = codec.encode(spec)
    # Two ways to JSON, one order of keys.
    assert json.dumps(codec.decode_json(data, "spec")) == json.dumps(spec.to_dict())
    assert Spec.from_dict(codec.decode_json(data, "spec")) == spec
    assert list(spec.to_dict()) == [
        key for key in ("cdiVersion", "kind", "annotations", "devices", "containerEdits") if key in spec.to_dict()
    ]
    assert codec.encode(Spec.from_dict(codec.decode_json(data, "spec"))) == data


@FEW
@given(specs)
@example(awkward)
def test_our_json_is_yaml_of_the_same_meaning(spec: Spec) -> None:
    assert codec.decode_yaml(codec.encode(spec), "spec") == codec.decode_json(codec.encode(spec), "spec")


@MANY
@given(specs)
def test_the_version_is_high_enough_and_none_below_is(spec: Spec) -> None:
    assert not problems(spec, Level.UPSTREAM)
    for other in version.KNOWN:
        tried = Spec.from_dict({**spec.to_dict(), "cdiVersion": other})
        enough = version.order(other) >= version.order(spec.cdi_version)
        assert (version.version_problem(tried) == "") is enough


@MANY
@given(specs)
def test_strict_refuses_all_that_upstream_refuses(spec: Spec) -> None:
    broken = Spec.from_dict({**spec.to_dict(), "cdiVersion": "0.2.0", "kind": "x"})
    assert set(problems(broken, Level.UPSTREAM)) <= set(problems(broken, Level.STRICT))


@FEW
@given(st.lists(specs, min_size=1, max_size=8))
@example([awkward])
def test_the_reference_reads_what_we_wrote_and_asks_for_the_same_version(reference: Any, batch: list[Spec]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        requests: list[dict[str, Any]] = []
        for index, spec in enumerate(batch):
            path = Path(folder) / f"{index}.json"
            path.write_bytes(codec.encode(spec))
            requests += [
                {"op": "file", "path": str(path)},
                {"op": "minimumVersion", "spec": spec.to_dict()},
            ]
        answers = iter(reference.ask(requests))
        for spec in batch:
            read, minimum = next(answers), next(answers)
            assert read["error"] == minimum["error"] == ""
            assert minimum["version"] == as_the_reference_counts(spec)
            again = {key: value for key, value in read["spec"].items() if value or key != "containerEdits"}
            assert without_empty_schemata(Spec.from_dict(again)) == without_empty_schemata(spec)


def as_the_reference_counts(spec: Spec) -> str:
    """Release 1.1.2 looks for mount types and host paths in the last device only (see test_cdi_reference)."""
    last = f"devices[{len(spec.devices) - 1}]"
    counted = [
        reason.version
        for reason in version.reasons(spec)
        if not (reason.where.endswith((".hostPath", ".type")) and reason.where.startswith("devices["))
        or reason.where.startswith(last)
    ]
    return max([version.EARLIEST, *counted], key=version.order)


def without_empty_schemata(spec: Spec) -> dict[str, Any]:
    """Go does not write an empty list, so what it printed has lost it; that it read it shows in the version."""
    data = spec.to_dict()
    for edits in (data.get("containerEdits", {}), *(device["containerEdits"] for device in data["devices"])):
        if edits.get("intelRdt", {}).get("schemata") == []:
            del edits["intelRdt"]["schemata"]
    return data


# --- injection ----------------------------------------------------------------------------------------------------

real_nodes = st.builds(
    DeviceNode,
    path=st.sampled_from(["/dev/null", "/dev/zero", "/dev/tty"]),
    permissions=st.sampled_from(["", "rw", "none"]),
    file_mode=st.none() | uint32,
    uid=st.none() | uint32,
) | st.builds(
    DeviceNode,
    path=st.sampled_from(["/dev/nvidia0", "/dev/null"]),
    host_path=st.sampled_from(["/dev/null", "/dev/zero", "/nowhere"]),
    type=st.sampled_from(["", "c", "b", "p"]),
    major=st.sampled_from([0, 195]),
    minor=st.sampled_from([0, 7]),
    gid=st.none() | uint32,
)
oci_mounts = st.fixed_dictionaries(
    {"destination": st.sampled_from(["/a", "/a/", "/a/b", "/proc", "/z", "/"]), "source": st.sampled_from(["s", "t"])}
)
mapping = [{"containerID": 0, "hostID": 1000, "size": 10}]
ocis = st.fixed_dictionaries(
    {"ociVersion": st.just("1.0.2")},
    optional={
        "process": st.fixed_dictionaries(
            {
                "user": st.fixed_dictionaries(
                    {"uid": st.sampled_from([0, 5]), "gid": st.sampled_from([0, 6])},
                    optional={"additionalGids": st.just([5, 7])},
                ),
                "cwd": st.just("/"),
            },
            optional={"env": st.lists(st.sampled_from(["A=0", "A", "B=1", "C=2", "=x"]), min_size=1, max_size=5)},
        ),
        "mounts": st.lists(oci_mounts, min_size=1, max_size=4),
        "hooks": st.just({"prestart": [{"path": "/old"}]}),
        "linux": st.fixed_dictionaries(
            {},
            optional={
                "namespaces": st.sampled_from(
                    [[{"type": "user"}], [{"type": "user", "path": "/n"}], [{"type": "pid"}]]
                ),
                "uidMappings": st.just(mapping),
                "gidMappings": st.just(mapping),
                "devices": st.just([{"path": "/dev/null", "type": "c", "major": 9, "minor": 9}]),
                "resources": st.just({"devices": [{"allow": False, "access": "rwm"}]}),
                "intelRdt": st.just({"closID": "old"}),
            },
        ),
    },
)


def injected(oci: Any, directory: Path, names: list[str]) -> Any:
    try:
        return inject(oci, scan([directory]).devices, names)
    except AliquotError:
        return None


@FEW
@given(st.data())
def test_injection_equals_that_of_the_reference_order_included(reference: Any, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        requests = []
        ours = []
        for index in range(2):
            spec = data.draw(specs_of(edits_of(real_nodes, TAME)))
            oci = data.draw(ocis)
            chosen = data.draw(st.lists(st.sampled_from(spec.qualified_names()), min_size=1, max_size=4))
            directory = Path(folder) / str(index)
            directory.mkdir()
            (directory / "spec.json").write_bytes(codec.encode(spec))
            requests.append({"op": "inject", "dirs": [str(directory)], "devices": chosen, "oci": oci})
            ours.append(injected(oci, directory, chosen))
        for request, answer, mine in zip(requests, reference.ask(requests), ours, strict=True):
            if mine is None:
                assert answer["error"], request  # one interface for two devices, a missing node
            else:
                assert answer["error"] == "", request
                assert mine == {key: value for key, value in answer["oci"].items() if value or key in request["oci"]}


def test_owners_are_mapped_as_the_last_of_bind_and_rbind_says(reference: Any, tmp_path: Path) -> None:
    """Every order of the options that count, with both types: found by the search above, once in some hundred runs."""
    words = ("bind", "rbind", "idmap", "ro")
    orders = [order for length in range(4) for order in itertools.permutations(words, length)]
    mounts = [(order, type_) for order in orders for type_ in ("", "bind")]
    devices = tuple(
        Device(
            name=f"d{index}",
            container_edits=ContainerEdits(
                mounts=(Mount(host_path="/x", container_path="/y", options=order, type=type_),)
            ),
        )
        for index, (order, type_) in enumerate(mounts)
    )
    spec = Spec(cdi_version="1.1.0", kind="a.b/c", devices=devices)
    (tmp_path / "spec.json").write_bytes(codec.encode(spec))
    mapping = [{"containerID": 0, "hostID": 1000, "size": 10}]
    linux = {"namespaces": [{"type": "user"}], "uidMappings": mapping, "gidMappings": mapping}
    oci = {"ociVersion": "1.0.2", "linux": linux}
    names = spec.qualified_names()
    answers = reference.ask([{"op": "inject", "dirs": [str(tmp_path)], "devices": [n], "oci": oci} for n in names])
    for name, mount, answer in zip(names, mounts, answers, strict=True):
        mine = injected(oci, tmp_path, [name])
        assert mine["mounts"] == answer["oci"]["mounts"], mount


# --- our own specs ------------------------------------------------------------------------------------------------

grants = st.lists(
    st.tuples(
        st.from_regex(r"\Ac-[a-z0-9]{4}(-[a-z0-9]{1,5}){1,3}\Z"),
        st.sampled_from(["GPU-a", "GPU-b"]),
        st.integers(0, 1 << 40),
        st.integers(0, 100),
        st.booleans(),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda item: item[0],
)
FILES = DriverFiles(
    version="580.95.05",
    libraries=(HostFile("/usr/lib64/libcuda.so.580.95.05", ("/usr/lib64/libcuda.so.1", "/usr/lib64/libcuda.so")),),
    binaries=(),
    common_nodes=(HostNode("/dev/null", "/dev/nvidiactl"),),
    card_nodes={"GPU-a": (HostNode("/dev/zero", "/dev/nvidia0"),), "GPU-b": (HostNode("/dev/null", "/dev/nvidia1"),)},
    hook_library="/var/lib/aliquot/hook/1/libvgpu.so",
    preload_file="/var/lib/aliquot/hook/1/ld.so.preload",
    run_dir="/run/aliquot",
)


@FEW
@given(grants)
def test_whatever_the_grants_the_spec_is_strict_and_every_grant_keeps_its_own_in_go(
    reference: Any, wanted: list[Any]
) -> None:
    chosen = [
        (
            Grant(name=name, card_uuid=card, memory_bytes=memory, core_percent=cores),
            "none" if free and not memory and not cores else "hook",
        )
        for name, card, memory, cores, free in wanted
    ]
    spec = spec_for(chosen, FILES)
    assert not problems(spec)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "spec.json").write_bytes(codec.encode(spec))
        names = list(spec.qualified_names())
        answer = reference.ask([{"op": "inject", "dirs": [folder], "devices": names, "oci": {}}])[0]
    assert answer["error"] == ""
    mounted = {mount["destination"]: mount["source"] for mount in answer["oci"]["mounts"]}
    for grant, _ in chosen:
        assert mounted[f"/usr/local/vgpu/grants/{grant.name}"] == f"/run/aliquot/grants/{grant.name}"
        assert mounted[f"/usr/local/vgpu/usage/{grant.name}"] == f"/run/aliquot/usage/{grant.name}"
    assert ("/etc/ld.so.preload" in mounted) is any(limiter == "hook" for _, limiter in chosen)
    assert answer["oci"]["process"]["env"] == ["NVIDIA_VISIBLE_DEVICES=void"]
    paths_inside = [node["path"] for node in answer["oci"]["linux"]["devices"]]
    assert len(paths_inside) == len(set(paths_inside))
