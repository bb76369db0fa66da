# SPDX-License-Identifier: Apache-2.0
"""Random sequences of operations: after each the hook's account is the driver's own, and never above the limit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

A = "GPU-aaaaaaaa-0000-4000-8000-00000000000a"
MIB = 1 << 20
PROGRAM = Path(__file__).parent / "programs" / "random_ops.py"


@pytest.mark.parametrize("seed", range(5))
def test_the_account_is_the_drivers(box, seed):
    limit = 300 * MIB
    box.grant("a", A, limit)
    other = box.python("start()\nwhile True:\n    wait(); say(used=used())", hooked=False)
    subject = box.popen([sys.executable, str(PROGRAM), str(seed), "700"])
    refused, done = 0, {}
    history = []
    while True:
        line = subject.stdout.readline()
        if not line:
            break
        done = json.loads(line)
        history.append(done)
        other.stdin.write("\n")
        other.stdin.flush()
        real = json.loads(other.stdout.readline())["used"]
        assert done["rc"] in (0, 2), history[-5:]
        refused += done["rc"] == 2
        assert done["used"] <= limit, history[-5:]
        assert real <= limit, history[-5:]
        # Managed memory is charged in full, wherever its pages are at the moment.
        assert real <= done["used"] <= real + done["managed"], history[-5:]
        if done["op"] != "end":
            subject.stdin.write("\n")
            subject.stdin.flush()
    other.kill()
    other.communicate()
    _, err = subject.communicate(timeout=20)
    assert (subject.returncode, err) == (0, "")
    assert done == {"op": "end", "rc": 0, "used": 0, "managed": 0}
    assert refused > 20
    assert box.used("a") == 0
