# SPDX-License-Identifier: Apache-2.0
"""Card sizes from CUDA, for cards whose size NVML does not know (unified memory, B193).

The question is asked in a process of its own: initialising CUDA costs memory for as long as a process lives, and a
driver that hangs or crashes in there must not take the node daemon with it. No context is made.
Run as a module it is that process: `python -m aliquot.node.cuda_probe LIBRARY` prints a JSON object, UUID to bytes.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Final

from aliquot.api.errors import foreign
from aliquot.api.log import get_logger

_log = get_logger(__name__)

SONAME: Final = "libcuda.so.1"
_TIMEOUT_S: Final = 30.0


class CudaSizes:
    """Bytes of a card by its UUID, or None; what `read_inventory` takes as `cuda_memory`.

    `library` names `libcuda.so.1`; None leaves the search to the loader. CUDA is asked at the first call and, as
    long as it does not answer, at every later one; sizes of cards do not change.
    """

    def __init__(self, library: Path | None = None, *, timeout_s: float = _TIMEOUT_S) -> None:
        self._library = str(library or SONAME)
        self._timeout_s = timeout_s
        self._sizes: dict[str, int] = {}

    def __call__(self, card_uuid: str) -> int | None:
        """Never raises; why CUDA could not be asked is logged."""
        if not self._sizes:
            self._sizes = self._ask()
        return self._sizes.get(card_uuid)

    def _ask(self) -> dict[str, int]:
        environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
        try:
            done = subprocess.run(
                [sys.executable, "-m", "aliquot.node.cuda_probe", self._library],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self._timeout_s,
                check=True,
                text=True,
                env=environment,
            )
            return {str(key): int(value) for key, value in json.loads(done.stdout).items()}
        except subprocess.CalledProcessError as e:
            reason = str(e.stderr).strip().rpartition("\n")[2] or f"ended with status {e.returncode}"
        except (OSError, ValueError, AttributeError, subprocess.TimeoutExpired) as e:
            reason = str(e)
        _log.warning("cuda could not be asked for card sizes", library=self._library, reason=foreign(reason))
        return {}


def _probe(library: str) -> dict[str, int]:
    """Ask the driver API directly. Raises `OSError`, `RuntimeError`."""
    cuda = ctypes.CDLL(library)

    def call(name: str, *args: object) -> None:
        code = getattr(cuda, name)(*args)
        if code != 0:
            raise RuntimeError(f"{name} answered {code}")

    count = ctypes.c_int()
    call("cuInit", 0)
    call("cuDeviceGetCount", ctypes.byref(count))
    sizes: dict[str, int] = {}
    for ordinal in range(count.value):
        device, raw, size = ctypes.c_int(), (ctypes.c_ubyte * 16)(), ctypes.c_size_t()
        call("cuDeviceGet", ctypes.byref(device), ordinal)
        call("cuDeviceGetUuid", raw, device)
        call("cuDeviceTotalMem_v2", ctypes.byref(size), device)
        sizes[f"GPU-{uuid.UUID(bytes=bytes(raw))}"] = size.value
    return sizes


if __name__ == "__main__":
    try:
        sys.stdout.write(json.dumps(_probe(sys.argv[1])))
    except (OSError, RuntimeError, AttributeError) as e:
        sys.exit(f"cuda: {e}")
