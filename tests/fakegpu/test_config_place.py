# SPDX-License-Identifier: Apache-2.0
"""Where the libraries look for their configuration when nobody names one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Counts the cards by both libraries; the error code where there is no driver.
LOOK = """
import ctypes, json
cuda, nvml = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvidia-ml.so.1")
count, codes = ctypes.c_uint(), [nvml.nvmlInit_v2(), cuda.cuInit(0)]
for library, function in ((nvml, "nvmlDeviceGetCount_v2"), (cuda, "cuDeviceGetCount")):
    count.value = 0
    library[function](ctypes.byref(count))
    codes.append(count.value)
print(json.dumps(codes))
"""
NO_DRIVER = [9, 100, 0, 0]
DEFAULT = Path("/run/fakegpu/config.json")


def look(libraries: Path, *before: str, **environment: str) -> list[int]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("FAKEGPU_", "CUDA_"))}
    done = subprocess.run(
        [*before, sys.executable, "-c", LOOK],
        env=clean | {"LD_LIBRARY_PATH": str(libraries), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    codes: list[int] = json.loads(done.stdout)
    return codes


def write(path: Path, cards: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"version": 1, "cards": [{"count": cards}]}))
    return path


@pytest.fixture
def root(build_dir: Path, tmp_path: Path) -> Path:
    """A driver root of its own with three cards; programs see all of them, as no card has a node."""
    folder = tmp_path / "usr/lib/deep/root"  # the last usr/lib of a path is the one that counts
    source = next((build_dir / "fakegpu/usr/lib").iterdir())
    shutil.copytree(source, folder / "usr/lib" / source.name, symlinks=True)
    write(folder / "config.json", 3)
    return folder


def libraries(root: Path) -> Path:
    return next((root / "usr/lib").iterdir())


@pytest.mark.skipif(DEFAULT.exists(), reason="this machine has a configuration in the default place")
def test_the_configuration_of_the_librarys_own_root_is_found(root: Path) -> None:
    assert look(libraries(root)) == [0, 0, 3, 3]
    assert (root / "config.json.state").is_file()
    link = root.parent / "link"
    link.symlink_to(libraries(root))
    assert look(link) == [0, 0, 3, 3]
    (root / "config.json").unlink()
    assert look(libraries(root)) == NO_DRIVER


def test_a_named_configuration_is_the_only_one(root: Path, tmp_path: Path) -> None:
    assert look(libraries(root), FAKEGPU_CONFIG=str(write(tmp_path / "other.json", 1))) == [0, 0, 1, 1]
    assert look(libraries(root), FAKEGPU_CONFIG=str(tmp_path / "none.json")) == NO_DRIVER


@pytest.mark.usefixtures("as_root")
def test_the_default_place_comes_first_and_an_images_own_root_is_nobodys(root: Path, tmp_path: Path) -> None:
    """In a mount namespace, as containers have one: with a /run of its own, and the libraries in /usr/lib."""
    run = tmp_path / "run"
    (run / "fakegpu").mkdir(parents=True)
    inside = ("unshare", "--mount", "sh", "-c", 'mount --bind "$RUN" /run && exec "$0" "$@"')
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("needs the right to make mount namespaces")
    assert look(libraries(root), *inside, RUN=str(run)) == [0, 0, 3, 3]
    write(run / "fakegpu/config.json", 2)
    assert look(libraries(root), *inside, RUN=str(run)) == [0, 0, 2, 2]


@pytest.mark.usefixtures("as_root")
def test_in_a_container_what_lies_at_the_top_of_the_image_is_nobodys(
    build_dir: Path, root: Path, tmp_path: Path
) -> None:
    image = tmp_path / "image"
    folder = image / "usr/lib/x"
    shutil.copytree(libraries(root), folder)
    shutil.copy2(build_dir / "fakegpu-tools/cuda-probe", image)
    shutil.copy2(root / "config.json", image)
    for program in (image / "cuda-probe", folder / "libcuda.so.1"):
        told = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True).stdout
        for needed in re.findall(r"(/\S+) \(", told):
            (image / needed.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(needed, image / needed.lstrip("/"))

    def code(**environment: str) -> int:
        done = subprocess.run(
            ["chroot", str(image), "/cuda-probe", "info"],
            env={"LD_LIBRARY_PATH": "/usr/lib/x", "PATH": os.environ["PATH"], **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        answer: int = json.loads(done.stdout.splitlines()[0])["code"]
        return answer

    assert code(FAKEGPU_CONFIG="/config.json") == 0
    assert code() == 100
