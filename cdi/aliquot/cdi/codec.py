# SPDX-License-Identifier: Apache-2.0
r"""Bytes of a spec file, both directions.

Pure. What we write is JSON that a YAML 1.2 parser reads the same way, because that is what reads it: the Go
library feeds `.json` files to its YAML decoder too. That one refuses `\/`, surrogate pairs and raw control
characters, and folds raw U+2028 like a line break; so `encode` writes characters outside the first plane raw and
everything delicate as `\uXXXX`. Invariant: decode(encode(spec)) == spec, in Python and in Go.

Reading is strict: a key that is there twice, an unknown key, a number where text belongs or anything after the
first document is refused. Upstream lets the last three pass in places, but a file with one of them is a mistake.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import msgspec

from aliquot.api.errors import SettingsError, foreign
from aliquot.cdi.model import EMPTY_EDITS, Spec

_ENCODER: Final = msgspec.json.Encoder(order="deterministic")
_DELICATE: Final = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
_YAML_OCTAL: Final = re.compile(r"0[0-7]+")
_YAML_SCALARS: Final = (
    ("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), list("tTfF")),
    (
        "tag:yaml.org,2002:int",
        re.compile(r"[-+]?(?:0|[1-9][0-9]*|0[0-7]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"),
        list("-+0123456789"),
    ),
    (
        "tag:yaml.org,2002:float",
        re.compile(r"(?:[-+]?(?:[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.inf)|\.nan)\Z"),
        list("-+.0123456789"),
    ),
)


def encode(spec: Spec) -> bytes:
    """The file of `spec`: UTF-8 JSON, two spaces of indentation, one newline at the end."""
    if spec.container_edits == EMPTY_EDITS:  # left out only when it is the default itself
        spec = msgspec.structs.replace(spec, container_edits=EMPTY_EDITS)
    # All of it in C: the same keys in the same order as `to_dict` gives, which took most of a file's time.
    text = msgspec.json.format(_ENCODER.encode(spec), indent=2).decode()
    return (_DELICATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n").encode()


def decode_json(data: bytes, where: str) -> Any:
    """The value that `data` holds; `where` names the source in errors.

    Raises `SettingsError` for text that is no JSON, a key that is there twice, or NaN and its kin.
    """
    try:
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=_once, parse_constant=_refuse_constant)
    except (UnicodeDecodeError, json.JSONDecodeError, _StrictnessError, RecursionError) as error:
        raise SettingsError(f"{where} is not valid JSON: {foreign(error)}") from error


def decode_yaml(data: bytes, where: str) -> Any:
    """The same for YAML, read as YAML 1.2 (so `0:1`, `on` and `no` are text) with octal numbers as Go has them.

    Raises `SettingsError` for text that is no YAML, a key that is there twice, several documents, or where the
    YAML library is not installed.
    """
    try:
        import yaml  # noqa: PLC0415 - optional: daemons read and write JSON only
    except ImportError as error:
        raise SettingsError(f"{where} is YAML, and PyYAML is not installed: convert the file to JSON") from error
    try:
        return yaml.load(data.decode("utf-8-sig"), Loader=_yaml_loader(yaml))  # noqa: S506 - a SafeLoader
    except (UnicodeDecodeError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise SettingsError(f"{where} is not valid YAML: {foreign(error)}") from error


def _yaml_loader(yaml: Any) -> Any:
    """A SafeLoader with the scalars of YAML 1.2 and without its habit of keeping the last of two equal keys."""

    def mapping(loader: Any, node: Any) -> dict[str, Any]:
        loader.flatten_mapping(node)
        pairs = [(loader.construct_object(key, True), loader.construct_object(item, True)) for key, item in node.value]
        return _once(pairs)

    def integer(loader: Any, node: Any) -> int:
        text = loader.construct_scalar(node).lstrip("+")
        sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
        return sign * (int(digits, 8) if _YAML_OCTAL.fullmatch(digits) else int(digits, 0))

    loader = type("StrictLoader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": {}})
    for tag, pattern, first in _YAML_SCALARS:
        yaml.add_implicit_resolver(tag, pattern, first, Loader=loader)
    yaml.add_constructor("tag:yaml.org,2002:map", mapping, Loader=loader)
    yaml.add_constructor("tag:yaml.org,2002:int", integer, Loader=loader)
    return loader


class _StrictnessError(ValueError):
    """What the parsers would let pass."""


def _once(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if not isinstance(key, str):
            raise _StrictnessError(f"key {key!r} is not text")
        if key in out:
            raise _StrictnessError(f"key {key!r} is there twice")
        out[key] = value
    return out


def _refuse_constant(text: str) -> Any:
    raise _StrictnessError(f"{text} is not a number in JSON")
