# SPDX-License-Identifier: Apache-2.0
"""Run by tests in a process of its own: changes a checkpoint and ends, SIGKILLed, before the step it is told.

Arguments: file, JSON list of [uid, record or null], step, how many times that step is let pass, limit of the journal.
Prints a line for each change that became durable.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from aliquot.node.checkpoint import Checkpoint

path, changes, deadly, passes = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4])
seen: list[str] = []


def steps(step: str) -> None:
    if step == deadly:
        seen.append(step)
        if len(seen) > passes:
            os.kill(os.getpid(), signal.SIGKILL)


checkpoint = Checkpoint(path, dict, boot_id="b", steps=steps, journal_limit=int(sys.argv[5]))
for uid, record in changes:
    if record is None:
        checkpoint.delete(uid)
    else:
        checkpoint.put(uid, record)
    print(json.dumps([uid, record]), flush=True)  # noqa: T201
checkpoint.close()
