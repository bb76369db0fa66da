# SPDX-License-Identifier: Apache-2.0
"""Changing an object that others change too.

Never writes over a change it has not seen: the resourceVersion that was read goes back with the write, and a conflict
means reading again. Invariant: what `change` did not touch is written back exactly as it was read, fields unknown to us
included.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from aliquot.kube.backoff import Backoff
from aliquot.kube.client import Kube
from aliquot.kube.errors import Conflict

TRIES: Final = 5


def change_object(
    kube: Kube,
    path: str,
    change: Callable[[dict[str, Any]], bool],
    *,
    stop: threading.Event,
    backoff: Backoff | None = None,
) -> dict[str, Any]:
    """Reads, changes, writes; on conflict again with what is there then, at most `TRIES` times in all.

    `change` edits the object in place and returns whether there is anything to write. Returns the object as it is
    now on the server. Raises `Conflict` when others were faster each time, or `stop` was set; else as `Kube` does.
    """
    backoff = backoff if backoff is not None else Backoff(0.05, 2.0)
    while True:
        body = kube.get_json(path)
        if not change(body):
            return body
        try:
            return kube.replace(path, body)
        except Conflict:
            if backoff.failures + 1 >= TRIES or backoff.wait(stop):
                raise
