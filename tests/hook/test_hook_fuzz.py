# SPDX-License-Identifier: Apache-2.0
"""Random input to what reads others' input. ALIQUOT_FUZZ_ROUNDS=10000000 for a night; a hundred thousand here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ["account", "files", "grants", "identity", "lookup", "maps", "mode", "say", "table"]
ROUNDS = int(os.environ.get("ALIQUOT_FUZZ_ROUNDS", "100000"))
SLOWER = {"names": 5, "usage": 2, "grants": 20}


@pytest.fixture(scope="module")
def fuzzer(compile_c, hook_builds):
    generated = hook_builds / "gen"
    return compile_c(
        "fuzz.c",
        "-O1",
        "-D_GNU_SOURCE",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        f"-I{ROOT}/hook/include",
        f"-I{ROOT}/hook/src",
        f"-I{generated}",
        *[f"{ROOT}/hook/src/{s}.c" for s in SOURCES],
        str(generated / "names.c"),
    )


@pytest.mark.parametrize("what", ["names", "texts", "usage", "grants"])
def test_fuzz(fuzzer, tmp_path, what):
    rounds = ROUNDS // SLOWER.get(what, 1)
    done = subprocess.run(
        [str(fuzzer), what, str(rounds), "1", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=max(110, ROUNDS // 1000),
        check=False,
        env={"ASAN_OPTIONS": "detect_leaks=0"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
