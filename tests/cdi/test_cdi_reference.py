# SPDX-License-Identifier: Apache-2.0
"""Every row of the tables under `reference/`: our outcome is the one written there, and so is the Go library's.

The rows are our own, for the inputs and outcomes of cdi.md 5.1 and what we found beside them. A row that the
library no longer agrees with means that the runtimes changed; a row that we disagree with is our bug. Where the
library is wrong the row says so in `reference`: release 1.1.2 looks for mount types and host paths of nodes in
the last device only, so it asks for too low a version; readers of that lower version would refuse the file.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from aliquot.api.errors import AliquotError, SettingsError
from aliquot.cdi import inject, names, version
from aliquot.cdi.load import load_spec
from aliquot.cdi.model import Spec
from aliquot.cdi.scan import scan
from aliquot.cdi.validate import Level, problems

KIND = "vendor.com/device"


def table(name: str) -> Any:
    """Rows of one table under `reference/`."""
    return json.loads((Path(__file__).parent / "reference" / f"{name}.json").read_text(encoding="utf-8"))


def spec_of(row: dict[str, Any]) -> dict[str, Any]:
    """The spec that a row stands for: given whole as `spec`, or as what differs from a plain one."""
    if "spec" in row:
        return row["spec"]
    device: dict[str, Any] = {"name": row.get("device", "d")}
    if "deviceAnnotations" in row:
        device["annotations"] = row["deviceAnnotations"]
    device["containerEdits"] = row.get("edits", {})
    spec: dict[str, Any] = {"cdiVersion": row.get("version", "1.1.0"), "kind": row.get("kind", "vendor.com/device")}
    for key, field in (("annotations", "annotations"), ("specEdits", "containerEdits")):
        if key in row:
            spec[field] = row[key]
    spec["devices"] = [device]
    return spec


def rows(name: str, part: str | None = None) -> Any:
    data = table(name)
    items = data if part is None else data[part]
    assert len({row["name"] for row in items}) == len(items)
    return pytest.mark.parametrize("row", items, ids=lambda row: row["name"].replace(" ", "-"))


def accepts(function: Any, *arguments: Any) -> bool:
    try:
        function(*arguments)
    except AliquotError:
        return False
    return True


def assert_agreed(disagreements: list[str]) -> None:
    assert not disagreements, "the reference library disagrees:\n" + "\n".join(disagreements)


# --- names ------------------------------------------------------------------------------------------------------


@rows("qualified_names")
def test_qualified_name(row: dict[str, Any]) -> None:
    if row["parts"] is None:
        with pytest.raises(SettingsError):
            names.parse_qualified(row["input"])
        assert not names.is_qualified(row["input"])
    else:
        parsed = names.parse_qualified(row["input"])
        assert list(parsed) == row["parts"]
        assert str(parsed) == row["input"]


def test_qualified_names_agree_with_the_reference(reference: Any) -> None:
    items = table("qualified_names")
    answers = reference.ask({"op": "qualified", "name": row["input"]} for row in items)
    assert_agreed(
        [
            f"{row['name']}: {answer}"
            for row, answer in zip(items, answers, strict=True)
            if (None if answer["error"] else [answer["vendor"], answer["class"], answer["device"]]) != row["parts"]
        ]
    )


@rows("annotations", "keys")
def test_annotation_key(row: dict[str, Any]) -> None:
    if row["key"] is None:
        with pytest.raises(SettingsError):
            names.annotation_key(row["plugin"], row["device"])
    else:
        assert names.annotation_key(row["plugin"], row["device"]) == row["key"]


@rows("annotations", "updates")
def test_annotation_update(row: dict[str, Any]) -> None:
    before = dict(row["annotations"])
    if row["result"] is None:
        with pytest.raises(SettingsError):
            names.updated_annotations(before, row["plugin"], row["device"], row["devices"])
    else:
        assert names.updated_annotations(before, row["plugin"], row["device"], row["devices"]) == row["result"]
    assert before == row["annotations"]


@rows("annotations", "parses")
def test_annotation_parse(row: dict[str, Any]) -> None:
    if row["keys"] is None:
        with pytest.raises(SettingsError):
            names.parse_annotations(row["annotations"])
    else:
        assert names.parse_annotations(row["annotations"]) == (tuple(row["keys"]), tuple(row["devices"]))


def test_annotations_agree_with_the_reference(reference: Any) -> None:
    data = table("annotations")
    keys = reference.ask(
        {"op": "annotationKey", "plugin": row["plugin"], "deviceID": row["device"]} for row in data["keys"]
    )
    updates = reference.ask(
        {
            "op": "annotationUpdate",
            "annotations": row["annotations"],
            "plugin": row["plugin"],
            "deviceID": row["device"],
            "devices": row["devices"],
        }
        for row in data["updates"]
    )
    parses = reference.ask({"op": "annotationParse", "annotations": row["annotations"]} for row in data["parses"])
    wrong = [
        f"{row['name']}: {answer}"
        for row, answer in zip(data["keys"], keys, strict=True)
        if (None if answer["error"] else answer["key"]) != row["key"]
    ]
    wrong += [
        f"{row['name']}: {answer}"
        for row, answer in zip(data["updates"], updates, strict=True)
        if (None if answer["error"] else answer["annotations"]) != row["result"]
    ]
    wrong += [
        f"{row['name']}: {answer}"
        for row, answer in zip(data["parses"], parses, strict=True)
        if (None if answer["error"] else (sorted(answer.get("keys", [])), sorted(answer.get("devices", []))))
        != (None if row["keys"] is None else (row["keys"], sorted(row["devices"])))
    ]
    assert_agreed(wrong)


def test_file_names_agree_with_the_reference(reference: Any) -> None:
    spec = {"cdiVersion": "0.3.0", "kind": "gpu.aliquot.dev/claim", "devices": []}
    ids = ["0b1c2d3e-0000-4000-8000-00000000000a", "a/b/c", "x.y"]
    answers = reference.ask({"op": "fileName", "spec": spec, "name": name} for name in ids)
    ours = [names.transient_file_name("gpu.aliquot.dev", "claim", name) for name in ids]
    assert [f"{answer['key']}.json" for answer in answers] == ours


# --- specs ------------------------------------------------------------------------------------------------------


@rows("minimum_versions")
def test_minimum_version(row: dict[str, Any]) -> None:
    spec = Spec.from_dict(spec_of({**row, "version": "1.1.0"}))
    assert version.required(spec, cap=None) == row["version"]
    raised = version.with_lowest_version(spec, cap=None)
    assert version.version_problem(raised) == ""
    at = version.KNOWN.index(row["version"])
    if at:
        lower = Spec.from_dict({**raised.to_dict(), "cdiVersion": version.KNOWN[at - 1]})
        assert row["version"] in version.version_problem(lower)


def test_minimum_versions_agree_with_the_reference(reference: Any) -> None:
    items = table("minimum_versions")
    answers = reference.ask({"op": "minimumVersion", "spec": spec_of({**row, "version": "1.1.0"})} for row in items)
    assert_agreed(
        [
            f"{row['name']}: {answer}"
            for row, answer in zip(items, answers, strict=True)
            if answer["error"] or answer["version"] != row.get("reference", row["version"])
        ]
    )


def text_of(row: dict[str, Any]) -> str:
    return row["text"] if "text" in row else json.dumps(spec_of(row))


@rows("specs")
def test_spec(row: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text(text_of(row), encoding="utf-8")
    if row["ok"]:
        assert load_spec(path).to_dict()
    else:
        with pytest.raises(SettingsError, match=str(path)):
            load_spec(path)


def test_specs_agree_with_the_reference(reference: Any, tmp_path: Path) -> None:
    items = table("specs")
    requests = []
    for index, row in enumerate(items):
        path = tmp_path / f"{index}.json"
        path.write_text(text_of(row), encoding="utf-8")
        requests.append({"op": "file", "path": str(path)})
    wrong = []
    for row, request, answer in zip(items, requests, reference.ask(requests), strict=True):
        if (answer["error"] == "") is not row["ok"]:
            wrong.append(f"{row['name']}: {answer}")
        elif row["ok"] and answer["spec"] != go_form(load_spec(Path(request["path"])).to_dict()):
            wrong.append(f"{row['name']}: reads as {answer['spec']}")
    assert_agreed(wrong)


def go_form(spec: dict[str, Any]) -> dict[str, Any]:
    """Our JSON as Go marshals the same: it always writes the edits of the spec, and never an empty list."""
    out = {**spec, "containerEdits": spec.get("containerEdits", {})}
    for edits in [out["containerEdits"], *(device["containerEdits"] for device in out["devices"])]:
        if edits.get("intelRdt", {}).get("schemata") == []:
            del edits["intelRdt"]["schemata"]
    return out


def test_strict_refuses_what_upstream_refuses() -> None:
    for row in table("specs"):
        if row["ok"] or "text" in row:
            continue
        try:
            spec = Spec.from_dict(spec_of(row))
        except SettingsError:
            continue
        assert problems(spec, Level.UPSTREAM), row["name"]
        assert set(problems(spec, Level.UPSTREAM)) <= set(problems(spec, Level.STRICT)), row["name"]


# --- directories and injection ----------------------------------------------------------------------------------


def lay_out(row: dict[str, Any], top: Path) -> list[Path]:
    """The directories of a row; a name that ends in a slash is a folder, a text is a file as it stands."""
    made = []
    for index, files in enumerate(row["dirs"]):
        directory = top / str(index)
        made.append(directory)
        if files is None:
            continue
        directory.mkdir()
        for name, content in files.items():
            if name.endswith("/"):
                (directory / name).mkdir()
            elif isinstance(content, str):
                (directory / name).write_text(content)
            else:
                devices = [{"name": key, "containerEdits": {"env": [f"N={value}"]}} for key, value in content.items()]
                (directory / name).write_text(json.dumps({"cdiVersion": "0.3.0", "kind": KIND, "devices": devices}))
    return made


@rows("directories")
def test_directories(row: dict[str, Any], tmp_path: Path) -> None:
    directories = lay_out(row, tmp_path)
    seen = scan(directories)
    assert {name: found.device.container_edits.env for name, found in seen.devices.items()} == {
        f"{KIND}={name}": (f"N={value}",) for name, value in row["resolves"].items()
    }
    expected = {tmp_path / name for name in row["errors"]} | {directories[i] for i in row.get("missing", [])}
    assert set(seen.errors) == expected


def test_directories_agree_with_the_reference(reference: Any, tmp_path: Path) -> None:
    items = table("directories")
    requests = []
    for index, row in enumerate(items):
        top = tmp_path / str(index)
        top.mkdir()
        oci = {"process": {"cwd": "/", "user": {"uid": 0, "gid": 0}}}
        directories = [str(path) for path in lay_out(row, top)]
        requests.append({"op": "dirs", "dirs": directories})
        requests += [
            {"op": "inject", "dirs": directories, "devices": [f"{KIND}={name}"], "oci": oci} for name in row["resolves"]
        ]
    answers = iter(reference.ask(requests))
    wrong = []
    for index, row in enumerate(items):
        answer = next(answers)
        values = [next(answers)["oci"]["process"]["env"] for _ in row["resolves"]]
        errors = {str(Path(path).relative_to(tmp_path / str(index))) for path in answer.get("errors", {})}
        if (
            sorted(answer.get("devices") or []) != sorted(f"{KIND}={name}" for name in row["resolves"])
            or values != [[f"N={value}"] for value in row["resolves"].values()]
            or errors != set(row["errors"])
        ):
            wrong.append(f"{row['name']}: {answer} {values}")
    assert_agreed(wrong)


def injection_spec(row: dict[str, Any]) -> dict[str, Any]:
    devices = [{"name": name, "containerEdits": edits} for name, edits in row["devices"].items()]
    spec = {"cdiVersion": "1.1.0", "kind": KIND, "devices": devices}
    if "specEdits" in row:
        spec["containerEdits"] = row["specEdits"]
    return spec


@pytest.fixture
def usual_nodes() -> None:
    """The rows speak of /dev/null and /dev/zero as they are on every Linux."""
    for path, minor in (("/dev/null", 3), ("/dev/zero", 5)):
        status = Path(path).stat()
        if (os.major(status.st_rdev), os.minor(status.st_rdev), stat.S_IMODE(status.st_mode)) != (1, minor, 0o666):
            pytest.skip(f"{path} is not the usual one here")


@pytest.mark.usefixtures("usual_nodes")
@rows("injections")
def test_injection(row: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text(json.dumps(injection_spec(row)))
    seen = scan([tmp_path])
    assert not seen.errors
    asked = [f"{KIND}={name}" for name in row["inject"]]
    before = json.dumps(row["oci"])
    if row["result"] is None:
        with pytest.raises(AliquotError) as caught:
            inject.inject(row["oci"], seen.devices, asked)
        assert all(f"{KIND}={name}" in str(caught.value) for name in row.get("unresolved", []))
    else:
        assert {"ociVersion": "", **inject.inject(row["oci"], seen.devices, asked)} == row["result"]
    assert json.dumps(row["oci"]) == before


@pytest.mark.usefixtures("usual_nodes")
def test_injections_agree_with_the_reference(reference: Any, tmp_path: Path) -> None:
    items = table("injections")
    requests = []
    for index, row in enumerate(items):
        directory = tmp_path / str(index)
        directory.mkdir()
        (directory / "spec.json").write_text(json.dumps(injection_spec(row)))
        asked = [f"{KIND}={name}" for name in row["inject"]]
        requests.append({"op": "inject", "dirs": [str(directory)], "devices": asked, "oci": row["oci"]})
    wrong = []
    for row, answer in zip(items, reference.ask(requests), strict=True):
        result = None if answer["error"] else answer["oci"]
        unresolved = [f"{KIND}={name}" for name in row.get("unresolved", [])]
        if result != row["result"] or answer.get("unresolved", []) != unresolved:
            wrong.append(f"{row['name']}: {answer}")
    assert_agreed(wrong)
