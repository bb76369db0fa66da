# SPDX-License-Identifier: Apache-2.0
"""Runs tests/kube with another version of the official Kubernetes client: the oldest that we support.

    python tests/kube/run_other_client.py [--version 36.0.3] [pytest arguments]

The version and what it needs go into a folder of the cache, once, and from there in front of everything else on the
path; this environment is not changed. Two runs at once wait for each other.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

OLDEST = "36.0.3"
ROOT = Path(__file__).resolve().parents[2]


def say(text: str) -> None:
    sys.stderr.write(text + "\n")


def cache() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "aliquot" / "clients"


def provide(version: str) -> Path:
    """The folder with that version, installed if need be; complete or not there at all."""
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    folder = cache() / f"kubernetes-{version}-{python}"
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            say(f"installing kubernetes {version} into {folder}")
            with tempfile.TemporaryDirectory(dir=cache(), prefix="install-") as fresh:
                command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
                subprocess.run([*command, "--target", fresh, f"kubernetes=={version}"], check=True)
                shutil.copytree(fresh, f"{folder}.part", dirs_exist_ok=True)
                Path(f"{folder}.part").rename(folder)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", default=OLDEST)
    options, pytest_arguments = parser.parse_known_args()
    folder = provide(options.version)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}
    found = subprocess.run(
        [sys.executable, "-c", "import kubernetes; print(kubernetes.__version__)"],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    if found != options.version:
        say(f"asked for kubernetes {options.version}, but {found} is what Python imports")
        return 2
    say(f"tests/kube with kubernetes {found}")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/kube", *pytest_arguments]
    return subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
