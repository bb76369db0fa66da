# SPDX-License-Identifier: Apache-2.0
"""The script for a machine with a real GPU says so where there is none, and holds over the fake driver."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "hook" / "tests" / "gpu.sh"
DRIVER_ROOT = ROOT / "build" / "fakegpu" / "usr"


def run(**env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), sys.executable], env=os.environ | env, capture_output=True, text=True, timeout=110, check=False
    )


def test_it_says_that_there_is_no_gpu(tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    done = run(PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, done.stdout) == (77, "no GPU here: nothing was tried\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make the folder that the grant is mounted on")
def test_every_check_of_the_driver_holds_over_the_fake_one(hook_builds, cards):
    done = run(
        PATH=f"{DRIVER_ROOT / 'bin'}:{os.environ['PATH']}",
        LD_LIBRARY_PATH=str(DRIVER_ROOT / "lib" / "x86_64-linux-gnu"),
        FAKEGPU_CONFIG=str(cards),
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout
    assert sum(line.startswith("ok ") for line in lines) >= 9
    assert not [line for line in lines if line.startswith("WRONG")]
