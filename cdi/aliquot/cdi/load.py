# SPDX-License-Identifier: Apache-2.0
"""Files that others wrote: spec files of any vendor, and the operator's `--extra-edits` file.

Thin: reads a file and hands it to `codec`, `model` and `validate`. Never writes. Invariant: what is returned has
passed the level of validation that the function names; what has not is a `SettingsError` that names the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from aliquot.api import names
from aliquot.api.errors import SettingsError
from aliquot.cdi import codec, version
from aliquot.cdi.model import ContainerEdits, Device, Spec
from aliquot.cdi.validate import Level, edits_problems, validate

SPEC_SUFFIXES: Final = (".json", ".yaml")
"""What a runtime looks at in its directories; `.yml` is not among them."""


def load_spec(path: Path, level: Level = Level.UPSTREAM) -> Spec:
    """The spec in `path`, valid at `level`; `.yaml` is read as YAML, everything else as JSON.

    Raises `SettingsError` naming the file and every problem.
    """
    content = _content(path, "a CDI spec")
    try:
        spec = Spec.from_dict(content)
        validate(spec, level)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from error
    return spec


def load_extra_edits(path: Path, *, cap: str = version.DEFAULT_CAP) -> ContainerEdits:
    """The operator's `--extra-edits`: a CDI `containerEdits` object that is added to what every grant changes.

    Raises `SettingsError` naming the file and every problem: strict rules hold, and nothing in it may need a CDI
    version above `cap`.
    """
    data = _content(path, "an object with CDI containerEdits")
    if set(data) == {"containerEdits"}:
        raise SettingsError(f"{path}: give the content of containerEdits itself, without the key around it")
    try:
        edits = ContainerEdits.from_dict(data)
        # The version table is about whole specs, so the edits are looked at as those of one device.
        probe = Spec(
            cdi_version=version.EARLIEST, kind="extra/edits", devices=(Device(name="x", container_edits=edits),)
        )
        version.required(probe, cap=cap)
    except SettingsError as error:
        raise SettingsError(f"{path}: {str(error).replace('devices[0].containerEdits.', '')}") from error
    found = [*map(str, edits_problems(edits, "extra edits")), *_claims_of_ours(edits)]
    if found:
        raise SettingsError(f"{path}: " + "; ".join(found))
    return edits


def _claims_of_ours(edits: ContainerEdits) -> Iterator[str]:
    """Places that every grant needs for itself; an edit on one of them, or on a folder above, would undo a limit."""
    for item in edits.env:
        if item.partition("=")[0] == names.ENV_VISIBLE_DEVICES:
            yield f"variable {names.ENV_VISIBLE_DEVICES} is set by every grant"
    paths = (*(node.path for node in edits.device_nodes), *(mount.container_path for mount in edits.mounts))
    for path in paths:
        for ours in (names.CONTAINER_ROOT, names.CONTAINER_PRELOAD):
            if path == ours or path.startswith(f"{ours}/") or ours.startswith(f"{path.rstrip('/')}/"):
                yield f"container path {path} is in the way of {ours}, which every grant needs"


def _content(path: Path, what: str) -> dict[str, object]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error
    if not data.strip():
        raise SettingsError(f"{path} is empty, expected {what}")
    decode = codec.decode_yaml if path.suffix == ".yaml" else codec.decode_json
    content = decode(data, str(path))
    if not isinstance(content, dict):
        raise SettingsError(f"{path} holds a {type(content).__name__}, expected {what}")
    return content
