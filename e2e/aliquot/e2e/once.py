# SPDX-License-Identifier: Apache-2.0
"""One run at a time: a lock in the cache that the second run waits for, saying so.

Standard library only. Invariant: the lock dies with its process, so a killed run blocks nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator

from aliquot.e2e.toolchain import cache_root


def say(text: str) -> None:
    """One line of progress, at once."""
    print(text, flush=True)


@contextlib.contextmanager
def alone(name: str, waiting: str, tell: Callable[[str], None] = say) -> Iterator[None]:
    """Holds the lock `name`; tells `waiting` once when another run holds it."""
    cache_root().mkdir(parents=True, exist_ok=True)
    with (cache_root() / f"{name}.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(waiting)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
