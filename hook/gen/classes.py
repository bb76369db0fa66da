# SPDX-License-Identifier: Apache-2.0
"""Which symbol belongs to which class, and which of them the hook stands in front of.

Pure. Invariant: every symbol of every header is either classified or does not look like a door.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

HOOKED: Final = ("entry", "context", "allocate", "free", "track", "query", "launch", "process")
"""Classes whose every symbol has a wrapper."""


class ClassError(Exception):
    """The class file and the headers do not fit together."""


def read_classes(text: str) -> dict[str, list[str]]:
    """Sections of the class file: name → words. Raises ClassError on a word before the first section."""
    sections: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        for word in line.split("#")[0].split():
            if word.endswith(":"):
                current = sections.setdefault(word[:-1], [])
            elif current is None:
                raise ClassError(f"{word!r} stands before the first section")
            else:
                current.append(word)
    return sections


class Names:
    """The symbols of the headers, sorted into classes.

    `hooked` and `used` are symbols in the order of their numbers; symbols of one base name are neighbours.
    """

    def __init__(self, functions: Mapping[str, Mapping[str, Any]], sections: dict[str, list[str]]) -> None:
        suspects = sections.pop("suspect", [])
        if not suspects:
            raise ClassError("no section `suspect:`")
        self.functions = functions
        bases: dict[str, list[str]] = {}
        for symbol, row in functions.items():
            bases.setdefault(row["base"], []).append(symbol)
        self.of_base: dict[str, str] = {}
        for section, words in sections.items():
            for word in words:
                if word not in bases:
                    raise ClassError(f"no header declares {word!r} of section {section}")
                if word in self.of_base:
                    raise ClassError(f"{word!r} stands in {self.of_base[word]} and in {section}")
                self.of_base[word] = section
        looks = re.compile("|".join(suspects))
        unknown = sorted(b for b in bases if b not in self.of_base and looks.search(b))
        if unknown:
            raise ClassError(
                f"{len(unknown)} names look as if they allocate, launch or tell what is free and are in no "
                f"section: {' '.join(unknown)}; decide what each means and add it"
            )
        self.hooked: list[str] = []
        self.used: list[str] = []
        self.groups: dict[str, tuple[int, int]] = {}
        for base in sorted(b for b, s in self.of_base.items() if s in HOOKED):
            members = sorted(
                bases[base], key=lambda s: (functions[s]["number"], functions[s]["flavour"] != "legacy", s)
            )
            self.groups[base] = (len(self.hooked), len(members))
            self.hooked += members
        for base in sorted(b for b, s in self.of_base.items() if s == "use"):
            self.used += [s for s in sorted(bases[base]) if functions[s]["flavour"] == "legacy"]

    def class_of(self, symbol: str) -> str:
        """Section of a symbol, `pass` where none is named."""
        return self.of_base.get(self.functions[symbol]["base"], "pass")

    def summary(self) -> str:
        """Classified symbols of each API and CUDA major, as a table for people."""
        lines = []
        for api in ("cuda", "nvml"):
            for major in (11, 12, 13):
                rows = [s for s, r in self.functions.items() if r["api"] == api and major in r["majors"]]
                counts = Counter(self.class_of(s) for s in rows)
                hooked = sum(counts[c] for c in HOOKED)
                detail = ", ".join(f"{c} {counts[c]}" for c in HOOKED if counts[c])
                lines.append(f"{api} {major}: {len(rows)} symbols, {hooked} hooked ({detail})")
        return "\n".join(lines)
