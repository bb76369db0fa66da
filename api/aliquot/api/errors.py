# SPDX-License-Identifier: Apache-2.0
"""The one exception tree, split by whose fault it is.

Nothing here acts. Invariant: whoever catches an `AliquotError` knows from its class who has to do something,
and from its text what: the text names the object, the value, the limit and the next step. Foreign errors are
wrapped once, where they enter, with the cause chained and their text capped.
"""

from __future__ import annotations

from typing import Final

FOREIGN_TEXT_LIMIT: Final = 256
"""Characters of another program's message that we repeat; enough to recognise it, too little to flood an event."""


class AliquotError(Exception):
    """Base of every error that is ours to report; `retryable` tells a caller whether waiting can help."""

    retryable: bool = False


class RequestError(AliquotError):
    """The user's request cannot be served as written; the user has to change it."""


class ClusterError(AliquotError):
    """The cluster (API server, kubelet, runtime, RBAC) did not do its part; usually passes, so it is retried."""

    retryable = True


class HardwareError(AliquotError):
    """A card, its driver or a file of the driver is missing or broken; the node's owner has to look."""

    retryable = True


class ConflictError(AliquotError):
    """What is asked for is held by somebody else; the text names the holder. Passes when the holder lets go."""

    retryable = True


class SettingsError(AliquotError):
    """A flag, environment variable or file that the operator gave is wrong; waiting cannot help."""


class InternalError(AliquotError):
    """Our own bug or our own damaged state; the text says what was kept and where to report it."""


def foreign(text: object) -> str:
    """One line of another program's message, control characters removed, at most `FOREIGN_TEXT_LIMIT` characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return line if len(line) <= FOREIGN_TEXT_LIMIT else line[: FOREIGN_TEXT_LIMIT - 1] + "…"
