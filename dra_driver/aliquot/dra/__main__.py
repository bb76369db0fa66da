# SPDX-License-Identifier: Apache-2.0
"""`aliquot-dra-driver`: settings in, signals in, exit status out. Wiring only; see `driver.py` for what runs.

Invariant: whatever goes wrong before serving is one sentence on standard error and a documented status.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import FrameType

from aliquot.api import log as logs
from aliquot.api.errors import AliquotError, ConflictError, SettingsError
from aliquot.dra.exits import Exit
from aliquot.dra.settings import exit_code, read_settings


def main() -> int:
    """Run the driver, or `--check`."""
    try:
        settings = read_settings(sys.argv[1:], os.environ)
        logs.configure(level=settings.log_level, fmt="json" if settings.log_format == "json" else "console")
    except SettingsError as err:
        return _say(str(err), exit_code(err))
    # Only now: these imports are most of the start, and --help does not need them. They leave no garbage, and what
    # they make stays: the collector need not look at it, now or during a claim.
    gc.disable()
    from aliquot.dra.check import run_checks  # noqa: PLC0415
    from aliquot.dra.driver import Driver  # noqa: PLC0415
    from aliquot.node.checkpoint_format import NewerCheckpointError  # noqa: PLC0415

    if settings.check:
        return run_checks(settings, sys.stdout)
    try:
        driver = Driver(settings)
        gc.freeze()
        gc.enable()

        def end(_number: int, _frame: FrameType | None) -> None:
            driver.stop.set()  # nothing else is safe in a signal handler (dra.md 7.8, T14)

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, end)
        driver.run()
    except NewerCheckpointError as err:
        return _say(str(err), Exit.NEWER_STATE)
    except SettingsError as err:
        return _say(str(err), exit_code(err))
    except ConflictError as err:
        return _say(str(err), Exit.HELD)
    except AliquotError as err:
        return _say(str(err), Exit.FILE)
    return Exit.OK


def _say(text: str, code: Exit) -> int:
    print(f"aliquot-dra-driver: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
