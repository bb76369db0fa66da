# SPDX-License-Identifier: Apache-2.0
"""How the driver ends: the exit codes, each documented in `--help`.

Invariant: a code that is not 0 means that starting the same command again without changing anything outside
gives the same code; what can pass by waiting is waited for, not ready, and never ends the process.
"""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """Exit status of `aliquot-dra-driver`."""

    OK = 0
    BUG = 1
    USAGE = 2
    FILE = 3
    HELD = 4
    NEWER_STATE = 5
    CHECK_FAILED = 6


MEANINGS: dict[Exit, str] = {
    Exit.OK: "ended on SIGTERM or SIGINT; or --check found everything in order",
    Exit.BUG: "a bug of ours; the traceback is in the log, please report it",
    Exit.USAGE: "a flag or environment variable is wrong",
    Exit.FILE: "a file or directory that is needed (configuration, kubeconfig, hook, state …) is missing or wrong",
    Exit.HELD: "another Aliquot driver owns this node's sockets or state",
    Exit.NEWER_STATE: "the state directory was written by a newer Aliquot; nothing was touched",
    Exit.CHECK_FAILED: "--check found something that does not work",
}
