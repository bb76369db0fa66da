# SPDX-License-Identifier: Apache-2.0
"""`python hook/symbols [--build DIR]`: writes DIR/headers/<major>/*.h and DIR/symbols.json, once.

Does nothing when both are newer than their sources; two runs at once wait for each other. Prints the counts of
what it read, or one sentence of what is missing and exits 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path

import fetch
import table
from preprocess import HeaderError

HERE = Path(__file__).parent
SOURCES = ("fetch.py", "preprocess.py", "declarations.py", "table.py", "__main__.py", fetch.REQUIREMENTS.name)


def stamp() -> str:
    """Changes when anything that shapes the output changes."""
    whole = hashlib.sha256()
    for name in SOURCES:
        whole.update((HERE / name).read_bytes())
    return whole.hexdigest()


def is_done(build: Path, wanted: str) -> bool:
    """True when `build` holds the outputs of exactly these sources."""
    try:
        return (build / "headers" / "stamp").read_text(encoding="ascii") == wanted and (
            build / "symbols.json"
        ).is_file()
    except FileNotFoundError:
        return False


def write(path: Path, text: str) -> None:
    """Replaces a file in one step."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def make(build: Path) -> dict[str, object]:
    """Downloads, unpacks, parses and writes; returns the table."""
    pins = fetch.read_pins()
    cache = fetch.cache_dir()
    with fetch.locked(cache / "lock"):
        fetch.unpack(fetch.download(pins, cache), build / "headers")
    texts = {
        major: {path.name: path.read_text(encoding="utf-8") for path in (build / "headers" / str(major)).glob("*.h")}
        for major in sorted({pin.major for pin in pins})
    }
    wheels: dict[int, dict[str, str]] = {}
    for pin in pins:
        wheels.setdefault(pin.major, {})[pin.project] = pin.version
    result = table.to_json(table.build(texts), wheels)
    write(build / "symbols.json", json.dumps(result, indent=1) + "\n")
    return result


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="symbols", description=__doc__)
    parser.add_argument("--build", type=Path, default=HERE.parent.parent / "build", help="output folder (build)")
    parser.add_argument("--force", action="store_true", help="read the headers again even when nothing changed")
    options = parser.parse_args()
    build: Path = options.build.resolve()
    build.mkdir(parents=True, exist_ok=True)
    wanted = stamp()
    with fetch.locked(build / ".symbols.lock"):
        if is_done(build, wanted) and not options.force:
            return 0
        try:
            result = make(build)
        except (fetch.MissingError, HeaderError) as error:
            print(f"symbols: {error}", file=sys.stderr)
            return 1
        write(build / "headers" / "stamp", wanted)
    for major, counts in result["counts"].items():  # type: ignore[attr-defined]
        told = ", ".join(f"{header} {count['functions']}" for header, count in counts.items())
        print(f"symbols: CUDA {major}: {told}")
    functions: dict[str, object] = result["functions"]  # type: ignore[assignment]
    points: list[object] = result["entry_points"]  # type: ignore[assignment]
    print(f"symbols: {len(functions)} exported names, {len(points)} entry points of cuGetProcAddress in symbols.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
