# SPDX-License-Identifier: Apache-2.0
"""Where the built hook libraries lie; nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_PACKAGED: Final = Path(__file__).parent / "lib"
_BUILT: Final = Path(__file__).parents[3] / "build" / "hook"

STANDALONE: Final = "libvgpu.so"
STRICT: Final = "libvgpu-strict.so"
REGION: Final = "libaliquot-region.so"


def library(name: str) -> Path:
    """Path of a built library: beside this module in a wheel, under build/hook in a checkout.

    Raises `FileNotFoundError` naming both places when it is in neither.
    """
    for folder in (_PACKAGED, _BUILT):
        path = folder / name
        if path.is_file():
            return path
    raise FileNotFoundError(f"{name} is neither in {_PACKAGED} nor in {_BUILT}; build it with `make hook`")
