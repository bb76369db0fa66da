# SPDX-License-Identifier: Apache-2.0
"""What the CDI tests share: the reference library as a program that answers questions."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from aliquot.e2e import gocompiler
from aliquot.e2e.once import alone
from aliquot.e2e.toolchain import MissingPartError, cache_root

MODULE = Path(__file__).parents[2] / "e2e" / "tools" / "cdi"


def say(text: str) -> None:
    """Progress of a build, past pytest's capture of standard output."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class Reference:
    """The Go library of the runtimes, asked through `e2e/tools/cdi`."""

    def __init__(self, program: Path) -> None:
        self.program = program

    def ask(self, requests: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """One answer per request, in order."""
        lines = [json.dumps(request) for request in requests]
        done = subprocess.run(
            [self.program], input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=120, check=True
        )
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(answers) == len(lines), done.stderr
        assert not [answer for answer in answers if answer["error"].startswith("request:")]
        return answers


@pytest.fixture(scope="session")
def reference() -> Reference:
    """The reference library, built once into the cache; skips where there is no Go and none can be had."""
    sources = [MODULE / name for name in ("main.go", "go.mod", "go.sum")]
    mark = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    program = cache_root() / "tools" / f"cdi-check-{mark}"
    with alone("cdi-check", "waiting for another run that builds cdi-check", say):
        if not program.exists():
            try:
                go = gocompiler.find_or_install(say)
            except MissingPartError as error:
                pytest.skip(f"the reference library cannot be built: {error}")
            program.parent.mkdir(parents=True, exist_ok=True)
            partial = program.with_suffix(".partial")
            build = subprocess.run(
                [go, "build", "-trimpath", "-o", partial, "."],
                cwd=MODULE,
                env={**os.environ, "GOFLAGS": "-mod=readonly", "GOWORK": "off", "GOTOOLCHAIN": "local"},
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            if build.returncode:
                pytest.skip(f"the reference library cannot be built: {build.stderr.strip()[-400:]}")
            partial.rename(program)
    return Reference(program)
