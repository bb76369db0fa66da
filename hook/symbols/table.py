# SPDX-License-Identifier: Apache-2.0
"""The table of every function that the driver's headers of three CUDA majors know: `build/symbols.json`.

Pure: texts of headers in, one JSON-able dictionary out (schema in README.md). Never decides what a function
means; that is the business of who reads the table. Invariant: every declaration of every header is in the
table, every PFN_ typedef belongs to exactly one exported symbol, and a header that breaks this raises.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from declarations import EntryPoint, Function, Parameter, entry_points, functions, name_map
from preprocess import HeaderError

FORMAT = 1

# Build configurations in which a header shows other names.
ALL_SYMBOLS = {"cuda": {"__CUDA_API_VERSION_INTERNAL": ""}, "nvml": {"NVML_NO_UNVERSIONED_FUNC_DEFS": ""}}
PER_THREAD = {"CUDA_API_PER_THREAD_DEFAULT_STREAM": ""}
MARK = {"cuda": "CUDAAPI", "nvml": "DECLDIR"}

# Header, the header with its PFN_ typedefs, the API both belong to.
HEADERS: tuple[tuple[str, str | None, str], ...] = (
    ("cuda.h", "cudaTypedefs.h", "cuda"),
    ("cudaEGL.h", "cudaEGLTypedefs.h", "cuda"),
    ("cudaGL.h", "cudaGLTypedefs.h", "cuda"),
    ("cudaVDPAU.h", "cudaVDPAUTypedefs.h", "cuda"),
    ("cudaProfiler.h", "cudaProfilerTypedefs.h", "cuda"),
    ("nvml.h", None, "nvml"),
)


@dataclass
class Row:
    """What is known of one exported symbol; `signatures` by major, the newest is the one that counts."""

    api: str
    header: str
    signatures: dict[int, tuple[str, tuple[Parameter, ...]]] = field(default_factory=dict)
    base: str = ""
    flavour: str = ""
    since: int = 0


@dataclass
class Table:
    """The table while it grows, one header after the other."""

    rows: dict[str, Row] = field(default_factory=dict)
    names: dict[str, dict[int, dict[str, dict[str, str]]]] = field(default_factory=lambda: {"cuda": {}, "nvml": {}})
    entry_points: dict[tuple[str, int, str], tuple[str, list[int]]] = field(default_factory=dict)
    counts: dict[int, dict[str, dict[str, int]]] = field(default_factory=dict)


def build(texts: Mapping[int, Mapping[str, str]]) -> Table:
    """Reads the headers: `texts[major][file name]`. Raises HeaderError where one contradicts itself."""
    table = Table()
    for major in sorted(texts):
        for kind in HEADERS:
            _read(table, major, texts[major], kind)
    return table


def _read(table: Table, major: int, files: Mapping[str, str], kind: tuple[str, str | None, str]) -> None:
    """Adds one header of one major; `kind` is a row of HEADERS."""
    header, typedefs, api = kind
    points = entry_points(files[typedefs]) if typedefs is not None and typedefs in files else ()
    if header in files:
        declared = functions(files[header], ALL_SYMBOLS[api], mark=MARK[api])
    else:  # cudaProfiler.h comes in another wheel; its typedefs tell the same, for none of its names has versions
        declared = tuple(Function(point.base, point.base, "CUresult", point.parameters) for point in points)
    symbols = {function.symbol: function for function in declared}
    if len(symbols) != len(declared):
        twice = sorted({one.symbol for one in declared if sum(one.symbol == two.symbol for two in declared) > 1})
        raise HeaderError(f"{header} of CUDA {major} declares {', '.join(twice)} twice")
    for symbol, function in symbols.items():
        row = table.rows.setdefault(symbol, Row(api, header))
        row.signatures[major] = (function.returns, function.parameters)
    maps = table.names[api].setdefault(major, {"legacy": {}, "per_thread": {}} if api == "cuda" else {"legacy": {}})
    if header in files:
        maps["legacy"].update(name_map(files[header], {}))
        if api == "cuda":
            maps["per_thread"].update(name_map(files[header], PER_THREAD))
        if api == "nvml":
            _renamed(table, major, maps["legacy"], symbols, header)
    for point, symbol in match_entry_points(points, symbols, where=f"{header} of CUDA {major}"):
        row = table.rows[symbol]
        row.base, row.flavour = point.base, point.flavour
        row.since = min(point.version, row.since or point.version)
        known, majors = table.entry_points.setdefault((point.base, point.version, point.flavour), (symbol, []))
        if known != symbol:
            raise HeaderError(f"{point.base} of CUDA {point.version} is {known} in one header and {symbol} in another")
        majors.append(major)
    if declared:
        table.counts.setdefault(major, {})[header] = {"functions": len(symbols), "typedefs": len(points)}


def _renamed(table: Table, major: int, names: Mapping[str, str], symbols: Mapping[str, Function], header: str) -> None:
    """Adds functions that the header only knows as #define of a new name: old programs still link to the old one."""
    for old, new in names.items():
        if old not in symbols:
            row = table.rows.setdefault(old, Row("nvml", header))
            row.signatures[major] = (symbols[new].returns, symbols[new].parameters)


def match_entry_points(
    points: Iterable[EntryPoint], symbols: Mapping[str, Function], *, where: str
) -> tuple[tuple[EntryPoint, str], ...]:
    """Finds the exported symbol of every PFN_ typedef.

    Both sides are ordered the same way within a base name and stream flavour: by version on one side, by the
    `_vN` suffix on the other. A count that differs raises HeaderError.
    """
    wanted: dict[tuple[str, str], list[EntryPoint]] = {}
    for point in points:
        wanted.setdefault((point.base, point.flavour), []).append(point)
    offered: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for symbol in symbols:
        base, number, flavour = split_symbol(symbol)
        offered.setdefault((base, flavour), []).append((number, symbol))
    pairs = []
    for key, group in wanted.items():
        candidates = sorted(offered.pop(key, []))
        if len(candidates) != len(group):
            raise HeaderError(
                f"{where}: {key[0]} ({key[1]}) has {len(group)} typedefs and {len(candidates)} exported symbols"
            )
        pairs += [
            (point, symbol)
            for point, (_, symbol) in zip(sorted(group, key=lambda one: one.version), candidates, strict=True)
        ]
    if wanted and offered:
        raise HeaderError(f"{where}: no typedef for {', '.join(sorted(name for name, _ in offered))}")
    return tuple(pairs)


def split_symbol(symbol: str) -> tuple[str, int, str]:
    """`cuMemcpyHtoD_v2_ptds` → ("cuMemcpyHtoD", 2, "ptds"); without a suffix the number is 1, the flavour "legacy"."""
    match = re.fullmatch(r"(\w+?)(?:_v(\d+))?(?:_(ptds|ptsz))?", symbol)
    if match is None:
        raise HeaderError(f"{symbol} is no C name")
    return match[1], int(match[2] or 1), match[3] or "legacy"


def to_json(table: Table, wheels: Mapping[int, Mapping[str, str]]) -> dict[str, object]:
    """The table in the schema of README.md. `wheels[major][project] = version` is only told, not used."""
    return {
        "format": FORMAT,
        "wheels": {str(major): dict(projects) for major, projects in sorted(wheels.items())},
        "counts": {str(major): counts for major, counts in sorted(table.counts.items())},
        "functions": {symbol: _row_json(symbol, row, table) for symbol, row in sorted(table.rows.items())},
        "names": {
            api: {str(major): maps for major, maps in sorted(majors.items())} for api, majors in table.names.items()
        },
        "entry_points": [
            {"name": name, "version": version, "flavour": flavour, "symbol": symbol, "majors": majors}
            for (name, version, flavour), (symbol, majors) in sorted(table.entry_points.items())
        ],
    }


def _row_json(symbol: str, row: Row, table: Table) -> dict[str, object]:
    base, number, flavour = split_symbol(symbol)
    newest = max(row.signatures)
    returns, parameters = row.signatures[newest]
    twins = [f"{symbol}_{kind}" for kind in ("ptds", "ptsz") if f"{symbol}_{kind}" in table.rows]
    result: dict[str, object] = {
        "api": row.api,
        "header": row.header,
        "majors": sorted(row.signatures),
        "returns": returns,
        "parameters": [{"text": one.text, "type": one.type, "name": one.name} for one in parameters],
        "base": row.base or base,
        "number": number,
        "flavour": row.flavour or flavour,
        "since": row.since,
    }
    if twins:
        result["twin"] = twins[0]
    if flavour != "legacy":
        result["twin_of"] = re.sub(r"_pt[ds][sz]$", "", symbol)
    types = [one.type for one in parameters]
    other = {
        str(major): [one.text for one in parts]
        for major, (_, parts) in sorted(row.signatures.items())
        if [one.type for one in parts] != types
    }
    if other:
        result["differs"] = other
    return result
