# SPDX-License-Identifier: Apache-2.0
"""The strict level: one change at a time to a spec that is fine, and what strict says, beside what Go says.

`go` is what the reference library does with the mutated file. What it refuses we refuse; the rest are rules of
our own, each for something that loads and then goes wrong (cdi.md 8.1).
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from aliquot.api.errors import SettingsError
from aliquot.cdi.model import Spec
from aliquot.cdi.validate import Level, host_paths, problems, validate

READ_ONLY = ["ro", "nosuid", "nodev", "rbind", "rprivate"]
GOOD: dict[str, Any] = {
    "cdiVersion": "0.5.0",
    "kind": "gpu.aliquot.dev/claim",
    "devices": [
        {
            "name": "c-x-gpu-a",
            "containerEdits": {
                "deviceNodes": [{"path": "/dev/nvidia0", "hostPath": "/drv/dev/nvidia0", "permissions": "rw"}],
                "mounts": [
                    {"hostPath": "/run/a", "containerPath": "/usr/local/vgpu/grants/a", "options": READ_ONLY},
                    {"hostPath": "/lib.so", "containerPath": "/usr/local/vgpu/libvgpu.so", "options": READ_ONLY},
                ],
                "hooks": [
                    {
                        "hookName": "createContainer",
                        "path": "/usr/bin/hook",
                        "args": ["hook", "run"],
                        "env": ["A=b"],
                        "timeout": 5,
                    }
                ],
            },
        },
        {
            "name": "c-x-gpu-b",
            "containerEdits": {
                "mounts": [
                    {"hostPath": "/run/b", "containerPath": "/usr/local/vgpu/grants/b", "options": READ_ONLY},
                    {"hostPath": "/lib.so", "containerPath": "/usr/local/vgpu/libvgpu.so", "options": READ_ONLY},
                ]
            },
        },
    ],
    "containerEdits": {
        "env": ["NVIDIA_VISIBLE_DEVICES=void"],
        "deviceNodes": [{"path": "/dev/nvidiactl", "hostPath": "/drv/dev/nvidiactl", "permissions": "rw"}],
        "mounts": [{"hostPath": "/lib64/libcuda.so.1", "containerPath": "/usr/lib64/libcuda.so.1", "options": ["ro"]}],
    },
}

DELETE = object()
# (path into GOOD, new value or DELETE, whether Go refuses it)
MUTATIONS: list[tuple[str, Any, bool]] = [
    ("cdiVersion", "0.4.0", True),
    ("cdiVersion", "0.5.1", True),
    ("cdiVersion", "", True),
    ("cdiVersion", "0.6.0", False),
    ("cdiVersion", DELETE, True),
    ("kind", "gpu.aliquot.dev", True),
    ("kind", "gpu.aliquot.dev/claim/x", True),
    ("kind", "gpu.aliquot.dev-/claim", True),
    ("kind", "1gpu/claim", True),
    ("kind", "g/claim", False),
    ("kind", "gpu.aliquot.dev/c", False),
    ("kind", "GPU.aliquot.dev/claim", False),
    ("kind", "gpu.aliquot.dev/" + "c" * 64, False),
    ("kind", "gpu.aliquot.dev/claim.x", True),
    ("kind", DELETE, True),
    ("unknown", 1, True),
    ("annotations", {"a": "b"}, True),
    ("devices", [], True),
    ("devices", DELETE, True),
    ("devices.0.name", "", True),
    ("devices.0.name", "c x", True),
    ("devices.0.name", "-c", True),
    ("devices.0.name", "c=d", True),
    ("devices.0.name", "c-x-gpu-b", True),
    ("devices.0.name", "0", False),
    ("devices.0.name", "all", False),
    ("devices.0.name", DELETE, True),
    ("devices.0.unknown", 1, True),
    ("devices.1.containerEdits", {}, True),
    ("devices.1.containerEdits", {"mounts": []}, True),
    ("devices.1.containerEdits", DELETE, True),
    ("devices.0.containerEdits.unknown", 1, True),
    ("devices.0.containerEdits.intelRdt", {}, True),
    ("devices.0.containerEdits.additionalGids", [5], True),
    ("devices.0.containerEdits.netDevices", [{"hostInterfaceName": "a", "name": "b"}], True),
    ("devices.0.containerEdits.env", ["A"], True),
    ("devices.0.containerEdits.env", ["=A"], True),
    ("devices.0.containerEdits.env", [""], True),
    ("devices.0.containerEdits.env", "A=b", True),
    ("devices.0.containerEdits.env", ["A B=c"], False),
    ("devices.0.containerEdits.env", ["A=1", "A=2"], False),
    ("devices.0.containerEdits.env", ["A=\n"], False),
    ("devices.0.containerEdits.env", ["NVIDIA_VISIBLE_DEVICES=all"], False),
    ("devices.0.containerEdits.deviceNodes.0.path", "", True),
    ("devices.0.containerEdits.deviceNodes.0.path", DELETE, True),
    ("devices.0.containerEdits.deviceNodes.0.path", "dev/nvidia0", False),
    ("devices.0.containerEdits.deviceNodes.0.path", "/dev/../nvidia0", False),
    ("devices.0.containerEdits.deviceNodes.0.path", "/dev/nvidiactl", False),
    ("devices.0.containerEdits.deviceNodes.0.path", "/drv/dev/nvidia0", False),
    ("devices.0.containerEdits.deviceNodes.0.type", "f", True),
    ("devices.0.containerEdits.deviceNodes.0.permissions", "rwx", True),
    ("devices.0.containerEdits.deviceNodes.0.permissions", "rr", False),
    ("devices.0.containerEdits.deviceNodes.0.permissions", "none", False),
    ("devices.0.containerEdits.deviceNodes.0.major", -1, True),
    ("devices.0.containerEdits.deviceNodes.0.major", 195, False),
    ("devices.0.containerEdits.deviceNodes.0.minor", 1, False),
    ("devices.0.containerEdits.deviceNodes.0.fileMode", "0666", True),
    ("devices.0.containerEdits.deviceNodes.0.uid", -1, True),
    ("devices.0.containerEdits.mounts.0.hostPath", "", True),
    ("devices.0.containerEdits.mounts.0.hostPath", DELETE, True),
    ("devices.0.containerEdits.mounts.0.hostPath", "run/a", False),
    ("devices.0.containerEdits.mounts.0.hostPath", "/run//a", False),
    ("devices.0.containerEdits.mounts.0.containerPath", "", True),
    ("devices.0.containerEdits.mounts.0.containerPath", "a", False),
    ("devices.0.containerEdits.mounts.0.containerPath", "/", False),
    ("devices.0.containerEdits.mounts.0.containerPath", "/a/", False),
    ("devices.0.containerEdits.mounts.0.containerPath", "/usr/local/vgpu/libvgpu.so", False),
    ("devices.0.containerEdits.mounts.0.containerPath", "/usr/local/vgpu/grants/b", False),
    ("devices.0.containerEdits.mounts.0.containerPath", "/usr/lib64/libcuda.so.1", False),
    ("devices.0.containerEdits.mounts.0.options", ["ro", "ro"], False),
    ("devices.0.containerEdits.mounts.0.options", ["ro,rbind"], False),
    ("devices.0.containerEdits.mounts.0.options", [""], False),
    ("devices.0.containerEdits.mounts.0.options", "ro", True),
    ("devices.1.containerEdits.mounts.1.hostPath", "/other.so", False),
    ("devices.0.containerEdits.hooks.0.hookName", "whenever", True),
    ("devices.0.containerEdits.hooks.0.path", "", True),
    ("devices.0.containerEdits.hooks.0.path", "hook", False),
    ("devices.0.containerEdits.hooks.0.env", ["A"], True),
    ("devices.0.containerEdits.hooks.0.env", DELETE, False),
    ("devices.0.containerEdits.hooks.0.args", ["--first-option"], False),
    ("devices.0.containerEdits.hooks.0.args", DELETE, False),
    ("devices.0.containerEdits.hooks.0.timeout", 0, False),
    ("devices.0.containerEdits.hooks.0.timeout", -1, False),
    ("devices.0.containerEdits.hooks.0.timeout", "5", True),
    ("containerEdits.env", ["A"], True),
    ("containerEdits.deviceNodes.0.path", "", True),
    ("containerEdits.mounts.0.containerPath", "", True),
]


def mutated(path: str, value: Any) -> dict[str, Any]:
    data: Any = copy.deepcopy(GOOD)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = data
    for part in parents:
        place = place[part]
    if value is DELETE:
        del place[last]
    else:
        place[last] = value
    return data


def test_the_spec_they_start_from_is_fine_at_both_levels() -> None:
    spec = Spec.from_dict(GOOD)
    for level in Level:
        assert problems(spec, level) == ()
        validate(spec, level)


@pytest.mark.parametrize(("path", "value", "go"), MUTATIONS, ids=lambda item: "" if item is DELETE else str(item)[:60])
def test_every_mutation_is_refused_by_strict(path: str, value: Any, go: bool) -> None:
    data = mutated(path, value)
    try:
        spec = Spec.from_dict(data)
    except SettingsError:
        assert go, "our reader refuses what Go reads"
        return
    assert problems(spec, Level.STRICT)
    assert bool(problems(spec, Level.UPSTREAM)) is go
    with pytest.raises(SettingsError, match="CDI spec of kind"):
        validate(spec)


def test_the_mutations_agree_with_the_reference(reference: Any, tmp_path: Path) -> None:
    requests = []
    for index, (path, value, _) in enumerate([("kind", GOOD["kind"], False), *MUTATIONS]):
        file = tmp_path / f"{index}.json"
        file.write_text(json.dumps(mutated(path, value)))
        requests.append({"op": "file", "path": str(file)})
    unchanged, *answers = reference.ask(requests)
    assert unchanged["error"] == ""
    wrong = [
        f"{path} = {value!r}: {answer['error'] or 'accepted'}"
        for (path, value, go), answer in zip(MUTATIONS, answers, strict=True)
        if bool(answer["error"]) is not go
    ]
    assert wrong == []


def test_every_problem_is_told_not_only_the_first() -> None:
    data = mutated("kind", "G/claim")
    data["devices"][0]["containerEdits"]["env"] = ["A", "B"]
    with pytest.raises(SettingsError) as caught:
        validate(Spec.from_dict(data))
    text = str(caught.value)
    for words in ("kind: ", "devices[0].containerEdits.env[0]: 'A'", "devices[0].containerEdits.env[1]: 'B'"):
        assert words in text


def test_annotations_are_held_to_kubernetes_rules_which_upstream_never_asks() -> None:
    for key, fine in {
        "a": True,
        "example.com/a.b_c-d": True,
        "a" * 63: True,
        "a" * 64: False,
        "": False,
        "/a": False,
        "Upper.com/a": False,
        "a/b/c": False,
        "-a": False,
        "a b": False,
        "d" * 254 + "/a": False,
    }.items():
        data = {**GOOD, "cdiVersion": "0.6.0", "annotations": {key: "x"}}
        found = problems(Spec.from_dict(data), cap="0.6.0")
        assert (not found) is fine, key
        assert not problems(Spec.from_dict(data), Level.UPSTREAM)
    large = {**GOOD, "cdiVersion": "0.6.0", "annotations": {"a": "x" * (256 << 10)}}
    assert "262145 bytes" in str(problems(Spec.from_dict(large), cap="0.6.0"))


def test_the_cap_names_the_field_that_breaks_it() -> None:
    data = mutated("devices.0.containerEdits.additionalGids", [5]) | {"cdiVersion": "0.7.0"}
    found = problems(Spec.from_dict(data))
    assert [problem.where for problem in found] == ["cdiVersion"]
    assert "devices[0].containerEdits.additionalGids needs CDI 0.7.0" in found[0].what
    assert problems(Spec.from_dict(data), cap="1.1.0") == ()


def test_host_paths_can_be_asked_for() -> None:
    spec = Spec.from_dict(GOOD)
    assert [path for _, path in host_paths(spec)] == [
        "/drv/dev/nvidiactl",
        "/lib64/libcuda.so.1",
        "/drv/dev/nvidia0",
        "/run/a",
        "/lib.so",
        "/usr/bin/hook",
        "/run/b",
        "/lib.so",
    ]
    found = problems(spec, host_path_exists=lambda path: path != "/run/b")
    assert [str(problem) for problem in found] == [
        "devices[1].containerEdits.mounts[0]: /run/b does not exist on the host"
    ]
