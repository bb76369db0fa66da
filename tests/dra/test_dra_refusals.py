# SPDX-License-Identifier: Apache-2.0
"""Whatever the driver can say to a user is explained in docs/refusals.md: read from the sources, so none is missed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEAKS = ("dra_driver/aliquot", "api/aliquot", "cdi/aliquot", "node/aliquot")
SILENT = {
    "cdi/aliquot/cdi/codec.py": "its words follow the name of a file that somebody wrote by hand",
    "cdi/aliquot/cdi/inject.py": "applies specs in tests",
    "cdi/aliquot/cdi/load.py": "reads --extra-edits; the file is named",
    "cdi/aliquot/cdi/model.py": "reads spec files of others",
    "cdi/aliquot/cdi/names.py": "names that we make ourselves",
    "cdi/aliquot/cdi/validate.py": "a spec of ours is checked before it is written: report this",
    "cdi/aliquot/cdi/version.py": "reads spec files of others",
    "api/aliquot/api/quantity.py": "stands behind the name of the field",
    "api/aliquot/kube/client.py": "begins with what could not be done",
    "dra_driver/aliquot/dra/check.py": "each line of the report has its next step beside it",
    "api/aliquot/kube/reflector.py": "only in the log",
    "node/aliquot/node/cuda_probe.py": "the probe's answer is none",
}
KINDS = {
    "AliquotError", "ClaimGoneError", "ClusterError", "ConflictError", "FileSettingsError", "HardwareError",
    "HeldError", "NewerCheckpointError", "RequestError", "SettingsError", "_UsageError", "_conflict",
}  # fmt: skip
"""InternalError and the damage of a checkpoint, which is recovered from, have one entry of their own."""


def template(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
    if isinstance(node, ast.BinOp):
        return template(node.left) + template(node.right)
    return ""


def messages():
    for source in SPEAKS:
        for path in sorted((ROOT / source).rglob("*.py")):
            where = str(path.relative_to(ROOT))
            if where in SILENT or "/grpc/" in where:
                continue
            for call in ast.walk(ast.parse(path.read_text())):
                if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in KINDS:
                    continue
                texts = [text for text in map(template, call.args) if re.search(r"[a-z]{3}", text)]
                if texts:
                    yield pytest.param(texts[0], id=f"{path.stem}:{call.lineno}")


ENTRIES = [
    [piece.strip() for piece in entry.split("…") if piece.strip()]
    for line in (ROOT / "docs/refusals.md").read_text().splitlines()
    if line.startswith("|")
    for entry in re.findall(r"`([^`]+)`", line)
]


def explained(message: str) -> bool:
    def fits(pieces: list[str]) -> bool:
        at = 0
        for piece in pieces:
            at = message.find(piece, at)
            if at < 0:
                return False
            at += len(piece)
        return sum(map(len, pieces)) >= 10

    return any(fits(pieces) for pieces in ENTRIES)


@pytest.mark.parametrize("message", list(messages()))
def test_every_refusal_is_explained(message):
    assert explained(message), f"docs/refusals.md has no entry for: {message}"


def test_the_search_can_fail():
    assert len(list(messages())) > 60
    assert len(list(hook_messages())) >= 6
    assert not explained("a message that nobody has written yet …; try again")


def hook_messages():
    """What the library says on standard error: the literals of each call, with what is filled in between."""
    for path in sorted((ROOT / "hook/src").glob("*.c")):
        calls = re.findall(r"\b(AQ_SAY|AQ_REFUSE_BECAUSE)\((.*?)\)\s*;", path.read_text(), re.DOTALL)
        for kind, arguments in calls:
            pieces = re.findall(r'"([^"]*)"', re.sub(r'"\s+"', "", arguments))
            if pieces and "aq_refusal" not in arguments:
                begin = "CUDA is refused: " if kind == "AQ_REFUSE_BECAUSE" else ""
                yield pytest.param(f"aliquot: {begin}{'… '.join(pieces)}", id=f"{path.stem}: {pieces[0][:24].strip()}")


@pytest.mark.parametrize("message", list(hook_messages()))
def test_what_the_hook_says_is_explained(message):
    assert explained(message), f"docs/refusals.md has no entry for: {message}"


def test_every_event_and_exit_status_is_explained():
    text = (ROOT / "docs/refusals.md").read_text()
    source = (ROOT / "dra_driver/aliquot/dra/driver.py").read_text()
    reasons = set(re.findall(r'_announce\(\s*"(\w+)"', source)) | {"CardMode"}
    assert len(reasons) >= 5
    for reason in reasons:
        assert f"`{reason}`" in text
