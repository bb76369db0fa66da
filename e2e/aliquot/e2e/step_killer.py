# SPDX-License-Identifier: Apache-2.0
"""The driver as it is, started by a program that kills it at a step: runs inside the driver's own container.

Only for stories: it is brought in as a file of the config map, no image of ours carries it. Write a number N into
ORDER: at the N-th step of preparing or unpreparing after that the process kills itself, and writes the step's name
to DONE. Invariant: without an order it is the driver.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from aliquot.api import log as logs
from aliquot.dra.driver import Driver
from aliquot.dra.settings import read_settings

ORDER = Path("/run/aliquot/die-at")
DONE = Path("/run/aliquot/died-at")


def main() -> int:
    """Serves until told to end, or until the ordered step."""
    settings = read_settings(sys.argv[1:], os.environ)
    logs.configure(level=settings.log_level, fmt="json" if settings.log_format == "json" else "console")
    lock = threading.Lock()
    count = 0

    def step(name: str) -> None:
        nonlocal count
        with lock:
            try:
                order = int(ORDER.read_text())
            except (OSError, ValueError):
                count = 0
                return
            count += 1
            if count >= order:
                DONE.write_text(name)
                ORDER.unlink()
                os.kill(os.getpid(), signal.SIGKILL)

    driver = Driver(settings, steps=step)
    signal.signal(signal.SIGTERM, lambda *_: driver.stop.set())
    driver.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
