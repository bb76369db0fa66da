# SPDX-License-Identifier: Apache-2.0
"""A second description of the shape of a spec, as a JSON schema of our own, and that model and schema agree.

What a schema cannot say (versions against content, names there twice) is not asked of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import referencing
import referencing.jsonschema

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def schema() -> Any:
    resources = [
        (name, referencing.Resource(json.loads((HERE / "schema" / name).read_text()), referencing.jsonschema.DRAFT7))
        for name in ("spec.json", "parts.json")
    ]
    for _, resource in resources:
        jsonschema.Draft7Validator.check_schema(resource.contents)
    registry = referencing.Registry().with_resources(resources)
    return jsonschema.Draft7Validator({"$ref": "spec.json"}, registry=registry)


BEYOND_A_SCHEMA = (
    "version",
    "device twice",
    " at 0.",
    " at 1.",
    "host name twice",
    "name twice",
    "rdt at",
    "there twice",
)


def rows() -> list[dict[str, Any]]:
    return json.loads((HERE / "reference" / "specs.json").read_text(encoding="utf-8"))


def spec_of(row: dict[str, Any]) -> Any:
    if "spec" in row:
        return row["spec"]
    device = {"name": row.get("device", "d"), "containerEdits": row.get("edits", {})}
    spec: dict[str, Any] = {"cdiVersion": row.get("version", "1.1.0"), "kind": row.get("kind", "vendor.com/device")}
    spec |= {"annotations": row["annotations"]} if "annotations" in row else {}
    return {**spec, "devices": [device], **({"containerEdits": row["specEdits"]} if "specEdits" in row else {})}


def without_nulls_and_empty(value: Any) -> Any:
    """As the model writes it: a null is absent, an empty list of edits is none."""
    if isinstance(value, dict):
        kept = {key: without_nulls_and_empty(item) for key, item in value.items() if item is not None}
        return {key: item for key, item in kept.items() if item != [] or key in {"devices", "schemata"}}
    return [without_nulls_and_empty(item) for item in value] if isinstance(value, list) else value


def test_schema_and_rows_agree(schema: Any) -> None:
    """Every row that a schema can judge; those it cannot are named above, so a new row cannot slip by."""
    wrong = []
    for row in rows():
        if "text" in row or (not row["ok"] and any(words in row["name"] for words in BEYOND_A_SCHEMA)):
            continue
        if schema.is_valid(without_nulls_and_empty(spec_of(row))) is not row["ok"]:
            wrong.append(row["name"])
    assert wrong == []


def test_the_schema_takes_a_whole_spec_and_nothing_else(schema: Any) -> None:
    assert not schema.is_valid({})
    assert not schema.is_valid([])
    assert not schema.is_valid({"cdiVersion": "", "kind": "", "devices": [], "containerEdits": {}})
