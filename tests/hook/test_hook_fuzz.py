# SPDX-License-Identifier: Apache-2.0
"""Any input to what reads others' input, under the sanitizers: libFuzzer, where clang has it, else at random.

A hundred thousand inputs each; `make fuzz` gives ALIQUOT_FUZZ_ROUNDS=10000000, and ALIQUOT_FUZZ_CORPUS keeps what
was found worth keeping from one night to the next.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FUZZ = Path(__file__).parent / "programs" / "fuzz.c"
ROUNDS = int(os.environ.get("ALIQUOT_FUZZ_ROUNDS", "100000"))
CORPUS = os.environ.get("ALIQUOT_FUZZ_CORPUS")
TARGETS = {
    "names": ["account", "files", "grants", "identity", "lookup", "maps", "mode", "say", "table"],
    "environment": ["account", "files", "grants", "identity", "lookup", "maps", "mode", "say", "table"],
    "usage": ["account", "files", "grants", "identity", "lookup", "maps", "mode", "say", "table"],
    "grants": ["account", "grants", "identity", "lookup", "maps", "mode", "say", "table"],
}
ANSWERS = re.compile(r"number_of_executed_units:\s*(\d+)")


def build(what: str, out: Path, generated: Path, *how: str) -> Path:
    sources = [f"{ROOT}/hook/src/{s}.c" for s in TARGETS[what]] + [str(generated / "names.c")]
    includes = [f"-I{ROOT}/hook/include", f"-I{ROOT}/hook/src", f"-I{generated}"]
    common = ["-std=gnu11", "-O1", "-g", "-w", "-D_GNU_SOURCE", f"-DFUZZ_{what}", "-fno-sanitize-recover=all"]
    program = out / f"fuzz-{what}"
    subprocess.run([*how, *common, *includes, "-o", str(program), str(FUZZ), *sources], check=True, timeout=240)
    return program


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command,
        cwd=folder,  # where libFuzzer leaves an input that was too much
        capture_output=True,
        text=True,
        timeout=max(110, ROUNDS // 500),
        check=False,
        env={"ASAN_OPTIONS": "detect_leaks=0"},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.mark.timeout(max(120, ROUNDS // 400))
@pytest.mark.parametrize("what", TARGETS)
def test_fuzz(hook_builds, tmp_path, what):
    generated = hook_builds / "gen"
    if not shutil.which("clang"):
        alone = build(what, tmp_path, generated, "gcc", "-DALONE", "-fsanitize=address,undefined")
        assert int(run([str(alone), str(ROUNDS), "1"], tmp_path)) == ROUNDS
        return
    program = build(what, tmp_path, generated, "clang", "-fsanitize=fuzzer,address,undefined")
    corpus = tmp_path / "corpus"
    if CORPUS:
        (Path(CORPUS) / what).mkdir(parents=True, exist_ok=True)
        corpus.symlink_to(Path(CORPUS) / what)
    else:
        corpus.mkdir()
    said = run(
        [
            str(program),
            f"-runs={ROUNDS}",
            "-seed=1",
            "-max_len=400",
            "-timeout=10",
            "-print_final_stats=1",
            str(corpus),
        ],
        tmp_path,
    )
    assert int(ANSWERS.search(said)[1]) >= ROUNDS
    assert any(corpus.iterdir()), "nothing was found to be new, so nothing was instrumented"
