# SPDX-License-Identifier: Apache-2.0
"""cuGetProcAddress for every name, every version and every stream flavour, as the bare driver would answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

A = "GPU-aaaaaaaa-0000-4000-8000-00000000000a"
SYMBOLS = Path(__file__).parents[2] / "build" / "symbols.json"

# Each answer as (code, status, the driver's symbols at that address), each different one once.
ASK = """
from ctypes import *
names, versions, symbols = json.loads(open(sys.argv[1]).read())
dlsym = CDLL(None).dlsym
dlsym.restype, dlsym.argtypes = c_void_p, [c_void_p, c_char_p]
init()
at = {}
for symbol in symbols:
    where = dlsym(cuda._handle, symbol.encode())
    if where: at.setdefault(where, []).append(symbol)
def ask(look, more):
    rows = {}
    for name in names:
        for version in versions:
            for flag in (0, 1, 2):
                p, status = c_void_p(7), c_int(-7)
                rc = look(name.encode(), byref(p), version, c_uint64(flag), *([byref(status)] if more else []))
                where = at.get(p.value, "none of its own") if p.value else None
                rows.setdefault(name, []).append([rc, status.value, where])
    return rows
answers = {}
for form in ("cuGetProcAddress", "cuGetProcAddress_v2"):
    if dlsym(cuda._handle, form.encode()): answers[form] = ask(getattr(cuda, form), form.endswith("v2"))
say(**answers)
"""


@pytest.mark.every_driver
def test_behaviour_35_every_name_version_and_flavour_as_the_driver_answers(box, tmp_path):
    known = json.loads(SYMBOLS.read_text())
    points = [p for p in known["entry_points"] if p["symbol"].startswith("cu")]
    names = sorted({p["name"] for p in points} | {"cuNoSuchName", "cu", "", "cuMemAlloc_v2", "cuMemAllocX"})
    versions = sorted({p["version"] for p in points} | {0, 1999, 99999})
    question = tmp_path / "question.json"
    question.write_text(json.dumps([names, versions, sorted(s for s in known["functions"] if s.startswith("cu"))]))
    box.grant("a", A, 1 << 30)
    script = tmp_path / "ask.py"
    script.write_text("from client import *\n" + ASK)

    command = [sys.executable, str(script), str(question)]
    hooked, bare = box.run(command).last, box.run(command, hooked=False).last
    assert hooked.keys() == bare.keys() >= {"cuGetProcAddress"}
    wrong, given = [], 0
    for form, rows in bare.items():
        for name, answers in rows.items():
            for place, ((rc, status, at), own) in enumerate(zip(answers, hooked[form][name], strict=True)):
                given += rc == 0
                # The driver may have several names at one address, and a wrapper is one of them.
                same = own[2] == at or (at and own[2] and set(own[2]) <= set(at))
                if own[:2] != [rc, status] or not same:
                    wrong.append((form, name, versions[place // 3], place % 3, (rc, status, at), own))
    assert given > 20_000
    assert wrong == []
