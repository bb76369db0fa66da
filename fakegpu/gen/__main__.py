# SPDX-License-Identifier: Apache-2.0
"""`python fakegpu/gen --symbols F --out DIR cuda|nvml OBJ…`: writes what the objects of one library lack.

Into DIR: <api>_stubs.c, cuda_symtab.c, and for every flavour <api>_flavour_<f>.c, <api>_<f>.map and <api>_<f>.list.
A file whose text stays the same is not touched, so make links nothing again. Fails when an object defines a name of
the API that no header knows (a typing error) or two objects define the same one.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import flavours
import sources

SINCE = Path(__file__).with_name("nvml_since.txt")
_API = {"cuda": re.compile(r"cu[A-Z]\w*"), "nvml": re.compile(r"nvml[A-Z]\w*")}


def defined(objects: list[Path]) -> list[str]:
    """Global functions and data that the object files define, by nm."""
    if not objects:
        return []
    command = ["nm", "--defined-only", "--extern-only", "--portability", *map(str, objects)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line.split()[0] for line in run.stdout.splitlines() if line and not line.endswith(":")]


def write_if_changed(path: Path, text: str) -> None:
    """Leaves the file and its time alone when it already says this."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    path.write_text(text, encoding="utf-8")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="fakegpu/gen", description=__doc__)
    parser.add_argument("api", choices=sorted(_API))
    parser.add_argument("--symbols", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("objects", type=Path, nargs="*")
    options = parser.parse_args()
    api: str = options.api
    table = json.loads(options.symbols.read_text(encoding="utf-8"))
    functions, since = table["functions"], flavours.read_since(SINCE.read_text(encoding="utf-8"))
    options.out.mkdir(parents=True, exist_ok=True)
    unknown = [name for name in since if name not in functions]
    if unknown:
        print(f"{SINCE.name} dates names that no header has: {', '.join(unknown)}", file=sys.stderr)
        return 1
    ours = [name for name in defined(options.objects) if _API[api].fullmatch(name)]
    known = {name for name, row in functions.items() if row["api"] == api}
    known |= set(flavours.UNDECLARED if api == "nvml" else ())
    wrong = sorted({name for name in ours if name not in known or ours.count(name) > 1})
    if wrong:
        print(f"objects of the {api} library define unknown or doubled API names: {', '.join(wrong)}", file=sys.stderr)
        return 1
    write_if_changed(options.out / f"{api}_stubs.c", sources.stubs(api, known - set(ours)))
    for flavour in flavours.FLAVOURS:
        names = flavours.exported(flavour, api, functions, since)
        write_if_changed(options.out / f"{api}_{flavour.name}.map", sources.version_script(names))
        write_if_changed(options.out / f"{api}_{flavour.name}.list", "".join(f"{name}\n" for name in names))
        write_if_changed(options.out / f"{api}_flavour_{flavour.name}.c", sources.flavour(flavour))
    if api == "cuda":
        write_if_changed(options.out / "cuda_symtab.c", sources.symbol_table(table["entry_points"]))
    print(f"fakegpu: {api} {len(known)} names, {len(ours)} implemented, {len(known) - len(ours)} stubs")
    (options.out / f"{api}_done").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
