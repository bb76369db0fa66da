# SPDX-License-Identifier: Apache-2.0
"""The node daemon's part in a measurement of shares: a reaper over the shares of a folder, with NVML.

    bench/hook/node.py RUN_DIR REGION_LIBRARY

Says `ready` after the first round and ends with its standard input. NVML is whatever the loader finds; where it is
none, shares are charged as their hooks measure, as on a node whose driver says nothing about processes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from aliquot.api.errors import HardwareError
from aliquot.node.nvml import Nvml
from aliquot.node.reaper import Reaper
from aliquot.node.regions import Regions
from aliquot.node.utilization import BoundedUtilization, ProcessUtilization


def main(run_dir: str, library: str) -> int:
    nvml = Nvml()
    try:
        nvml.open()
    except HardwareError as e:
        sys.stderr.write(f"bench: without NVML: {e}\n")
    utilization = BoundedUtilization(ProcessUtilization(nvml))
    reaper = Reaper(Regions(Path(run_dir), Path(library)), utilization=utilization)
    reaper.round()
    reaper.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    reaper.stop()
    return 0


# A program only, and no bench by itself: the list of those goes by the usual last lines.
sys.exit(main(*sys.argv[1:]))
