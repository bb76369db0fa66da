# SPDX-License-Identifier: Apache-2.0
"""Fake cards for a node: the fake driver's root and its state folder, where a real node would have the real ones.

The one place that knows how the fake driver is laid out. Invariant: cards of different nodes have different UUIDs,
the same on every run, because their seed is the node's name.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from aliquot.api.errors import ClusterError, foreign
from aliquot.e2e.images.recipes import ROOT
from aliquot.e2e.install import FAKE_DRIVER_ROOT, FAKE_STATE
from aliquot.e2e.local.node import Node
from aliquot.e2e.toolchain import MissingPartError

TWO_CARDS: Final[Sequence[Mapping[str, Any]]] = ({"profile": "Fake24G", "count": 2},)
"""Two cards of 24 GiB."""
ONE_CARD: Final[Sequence[Mapping[str, Any]]] = ({"profile": "Fake24G"},)


def require_fake_driver() -> None:
    """Raises `MissingPartError` where the fake driver has not been built."""
    if not (ROOT / "build" / "fakegpu" / "usr").is_dir():
        raise MissingPartError("the fake driver is not built: run `make fakegpu`")


def make_folders(driver: Path, state: Path, seed: str, cards: Sequence[Mapping[str, Any]] = TWO_CARDS) -> None:
    """Lays out a driver root in `driver` and the configuration that it finds in `state`."""
    require_fake_driver()
    state.chmod(0o777)  # every container's programs keep the cards' state here
    config = state / "config.json"
    config.write_text(json.dumps({"version": 1, "seed": seed, "cards": list(cards)}))
    config.chmod(0o644)
    argv = [sys.executable, str(ROOT / "fakegpu" / "make_root.py"), "--config", str(config), str(driver)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise ClusterError(f"the fake driver's root could not be made: {foreign(done.stderr or done.stdout)}")


def furnish(node: Node, cards: Sequence[Mapping[str, Any]] = TWO_CARDS) -> None:
    """Gives a local node its cards."""
    make_folders(node.path(FAKE_DRIVER_ROOT), node.path(FAKE_STATE), node.name, cards)


def card_table(node: Node) -> list[dict[str, Any]]:
    """What the driver itself says of a node's cards: uuid, name, memory in MiB, as nvidia-smi tells the host."""
    query = "--query-gpu=index,uuid,name,memory.total,memory.used"
    library_path = f"LD_LIBRARY_PATH={FAKE_DRIVER_ROOT}/usr/lib/x86_64-linux-gnu"
    smi = f"{FAKE_DRIVER_ROOT}/usr/bin/nvidia-smi"
    text = node.run("env", library_path, smi, query, "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in line.split(",")] for line in text.strip().splitlines()]
    return [
        {"index": int(r[0]), "uuid": r[1], "name": r[2], "total_mib": int(r[3]), "used_mib": int(r[4])} for r in rows
    ]
