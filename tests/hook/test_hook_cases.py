# SPDX-License-Identifier: Apache-2.0
"""Every behaviour that is asked of the hook and every case from the field has a test that bears its number.

The numbers are fixed labels: behaviours 1 to 35 (what a limit is, what is counted, processes, the program around), and
the cases B131 to B201 and B230 to B233 that concern a preloaded library.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
CASES = {
    "memory": "131 133 134 135 136 137 138 139 141 142 143 144 145 146 147 148 149",
    "oversubscription": "151 152 153 154",
    "compute": "155 157 158 159 160 161 162 163",
    "processes": "165 166 167 169 170 171 172 173 174 176 177",
    "symbols": "178 179 180 181 182 183 184 186 187",
    "NVML": "189 190 191 192 193",
    "frameworks": "194 195 196 198 199 200 201",
    "tenants": "230 231 232 233",
}
BEHAVIOURS = range(1, 36)


def numbers_of(name: str) -> tuple[set[int], set[int]]:
    """Behaviours and cases that a test's name bears: `behaviours_1_to_5_and_7`, `b171`."""
    behaviours: set[int] = set()
    named = re.search(r"behaviours?_((?:\d+_|to_|and_)*\d+)(?=_|$)", name)
    words = named[1].split("_") if named else []
    for place, word in enumerate(words):
        if word.isdigit():
            behaviours.add(int(word))
        elif word == "to":
            behaviours.update(range(int(words[place - 1]), int(words[place + 1])))
    return behaviours, {int(n) for n in re.findall(r"(?<=_)b(\d{3})(?=_|$)", name)}


def named_tests() -> list[str]:
    trees = (ast.parse(path.read_text()) for path in HERE.glob("test_*.py"))
    return [
        node.name
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def test_names_are_read_as_they_are_meant():
    assert numbers_of("test_behaviours_1_to_5_and_7_fits") == ({1, 2, 3, 4, 5, 7}, set())
    assert numbers_of("test_behaviour_29_and_b171_racing") == ({29}, {171})
    assert numbers_of("test_behaviours_27_and_28_what_a_dead") == ({27, 28}, set())
    assert numbers_of("test_b158_b159_limits") == (set(), {158, 159})


def test_nothing_that_is_asked_for_is_without_a_test():
    behaviours: set[int] = set()
    cases: set[int] = set()
    for name in named_tests():
        found = numbers_of(name)
        behaviours |= found[0]
        cases |= found[1]
    missing = {area: [n for n in map(int, text.split()) if n not in cases] for area, text in CASES.items()}
    assert {area: numbers for area, numbers in missing.items() if numbers} == {}
    assert sorted(set(BEHAVIOURS) - behaviours) == []
