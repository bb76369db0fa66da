# SPDX-License-Identifier: Apache-2.0
"""Function declarations and PFN_ typedefs out of one header, as one build configuration sees them.

Never opens a file. Invariant: a declaration that stands in the header either comes out or raises HeaderError;
none is dropped in silence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import preprocess
from preprocess import HeaderError

_FUNCTION = re.compile(r"\b((?:cu[A-Z]|nvml[A-Z])\w*)\s*\(")
_API_NAME = re.compile(r"(?:cu[A-Z]|nvml[A-Z])\w*|__CUDA_API_PT[DS]\w*")
_PFN_NAME = re.compile(r"PFN_cu\w+")
_PFN = re.compile(
    r"typedef\s+(.+?)\(\s*CUDAAPI\s*\*\s*PFN_(cu\w+?)_v(\d+)((?:_pt[ds][sz])?)\s*\)\s*\((.*)\)\s*$", re.DOTALL
)


@dataclass(frozen=True)
class Parameter:
    """`text` is the whole declarator as C writes it; `type` and `name` are its parts where it is a plain one."""

    text: str
    type: str
    name: str


@dataclass(frozen=True)
class Function:
    """One exported function. `written` is the name in the source text, before the header's own #define."""

    symbol: str
    written: str
    returns: str
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class EntryPoint:
    """One PFN_ typedef: what cuGetProcAddress(base, version, flavour) hands out, with its signature."""

    base: str
    version: int
    flavour: str
    parameters: tuple[Parameter, ...]


def split_parameters(text: str) -> tuple[Parameter, ...]:
    """Splits a parameter list at its top-level commas; `void` and nothing give ()."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        if char in "([":
            depth += 1
        elif char in ")]":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    parts.append(text[start:])
    parameters = []
    for part in parts:
        flat = " ".join(part.split())
        if flat in ("", "void"):
            continue
        parameters.append(_parameter(flat))
    return tuple(parameters)


def _parameter(flat: str) -> Parameter:
    pointer = re.fullmatch(r"(.*?)\(\s*(?:\w+\s+)?\*\s*(\w+)\s*\)\s*(\(.*\))", flat)
    if pointer is not None:
        return Parameter(flat, f"{pointer[1].strip()} (*){pointer[3]}", pointer[2])
    array = re.fullmatch(r"(.*?\W)(\w+)\s*\[\s*\w*\s*\]", flat)
    if array is not None:
        return Parameter(flat, f"{array[1].strip()} *", array[2])
    plain = re.fullmatch(r"(.*[\s*])(\w+)", flat)
    if (
        plain is not None
        and plain[2] not in ("int", "char", "long", "unsigned")
        and plain[1].strip() not in ("const", "struct")
    ):
        return Parameter(flat, plain[1].strip(), plain[2])
    if re.fullmatch(r"[\w\s*]+", flat):
        return Parameter(flat, flat, "")
    raise HeaderError(f"cannot read the parameter {flat!r}")


def _statements(text: str, defined: Mapping[str, str]) -> Iterator[tuple[str, Mapping[str, preprocess.Macro]]]:
    """Yields every top-level statement with the macros in force at its end; what stands in braces is left out."""
    current: list[str] = []
    depth = 0
    for line, live in preprocess.lines(text, defined):
        for char in line + "\n":
            if char == "{":
                # `extern "C" {` opens no body.
                if "".join(current).strip() == 'extern "C"':
                    current.clear()
                    continue
                depth += 1
            elif char == "}":
                depth = max(depth - 1, 0)
                if depth == 0 and "".join(current).lstrip().startswith("static"):
                    current.clear()
            elif depth == 0 and char == ";":
                yield "".join(current).strip(), live
                current.clear()
            elif depth == 0:
                current.append(char)


def functions(text: str, defined: Mapping[str, str], *, mark: str) -> tuple[Function, ...]:
    """All functions that carry `mark` (CUDAAPI or DECLDIR) in the header `text` under the macros `defined`."""
    found = []
    for statement, macros in _statements(text, defined):
        if not re.search(rf"\b{mark}\b", statement) or statement.startswith(("typedef", "static", "extern")):
            continue
        match = _FUNCTION.search(statement)
        if match is None or not statement.endswith(")"):
            raise HeaderError(f"cannot read the declaration {' '.join(statement.split())[:200]!r}")
        symbol = preprocess.expand(match[1], macros, only=_API_NAME)
        head = re.sub(rf"\b(?:{mark}|__CUDA_DEPRECATED|DEPRECATED\([^)]*\))\s*", "", statement[: match.start()])
        returns = " ".join(head.split())
        found.append(Function(symbol, match[1], returns, split_parameters(statement[match.end() : -1])))
    return tuple(found)


def name_map(text: str, defined: Mapping[str, str]) -> dict[str, str]:
    """What a program that writes `cuFoo` really links to under `defined`: the header's #define table, resolved."""
    macros: dict[str, preprocess.Macro] = {}
    for _, live in preprocess.lines(text, defined):
        macros = live
    result = {}
    for name, macro in macros.items():
        if macro.parameters is None and re.fullmatch(r"(?:cu|nvml)[A-Z]\w*", name) and not name.endswith("_t"):
            target = preprocess.expand(name, macros, only=_API_NAME)
            if re.fullmatch(r"(?:cu|nvml)[A-Z]\w*", target) and target != name and not target.endswith("_t"):
                result[name] = target
    return result


def entry_points(text: str) -> tuple[EntryPoint, ...]:
    """All PFN_ typedefs of a *Typedefs.h, the superseded ones included."""
    found = []
    for statement, macros in _statements(text, {"__CUDA_API_VERSION_INTERNAL": ""}):
        if "PFN_" not in statement:
            continue
        # One typedef of 12.9 leaves its version to the #define of the unversioned name.
        match = _PFN.match(" ".join(preprocess.expand(statement, macros, only=_PFN_NAME).split()))
        if match is None:
            raise HeaderError(f"cannot read the typedef {' '.join(statement.split())[:200]!r}")
        found.append(EntryPoint(match[2], int(match[3]), match[4].lstrip("_") or "legacy", split_parameters(match[5])))
    return tuple(found)
