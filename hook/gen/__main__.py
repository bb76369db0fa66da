# SPDX-License-Identifier: Apache-2.0
"""Writes the hook's name tables: `python hook/gen SYMBOLS.json CLASSES.txt FOLDER`.

Out of what the driver's headers declare (hook/symbols) and what each name means (symbols-class.txt) come
`names.h` (numbers, prototypes), `names.c` (the look-up), `wrappers.S` (where each wrapper lies, without a
relocation) and `exports-<machine>.map` (the closed list of what the library exports). Nothing of these is committed.

Never decides what a name means. Fails, naming them, on names that look like a door and are in no section.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from classes import ClassError, Names, read_classes
from tables import GLIBC_BASE, exports, names_c, names_h, wrappers

USAGE = "usage: python hook/gen SYMBOLS.json CLASSES.txt FOLDER"


def main(arguments: list[str]) -> int:
    """Exit status: 1 when a name is not classified, 2 for a wrong call."""
    if len(arguments) != 3:
        print(USAGE, file=sys.stderr)
        return 2
    symbols, class_file, folder = (Path(a) for a in arguments)
    try:
        names = Names(json.loads(symbols.read_text())["functions"], read_classes(class_file.read_text()))
    except ClassError as error:
        print(f"{class_file}: {error}", file=sys.stderr)
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("names.h", names_h(names)),
        ("names.c", names_c(names)),
        ("wrappers.S", wrappers(names)),
        *((f"exports-{machine}.map", exports(names, base)) for machine, base in GLIBC_BASE.items()),
    ):
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    print(names.summary())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
