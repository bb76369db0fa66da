# SPDX-License-Identifier: Apache-2.0
"""Who offers a card on this node: one door, never both (B118).

It never looks at claims or pods. A card is owned through a lock on a file of its own, `<state dir>/cards/<uuid>`,
that names the door; the kernel drops the lock with the process, so nothing is left behind by a kill. Two daemons
of the same door may own a card together (rolling update). A door that ended may have left containers running on
a card: the other door gets it only when nothing is left on it, which the caller finds out (`in_use`).

Guarded invariant: at no time do processes of two doors hold the same card.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from aliquot.api.errors import ConflictError, HardwareError, InternalError, foreign

_UUID: Final = re.compile(r"[A-Za-z0-9-]{1,95}")
_ATTEMPTS: Final = 100


class CardOwnership:
    """The cards that this process owns for `door`. For one thread at a time."""

    def __init__(self, state_dir: Path, door: str) -> None:
        self._folder = state_dir / "cards"
        self._door = door
        self._held: dict[str, int] = {}

    def held(self) -> frozenset[str]:
        """UUIDs of the cards that are ours."""
        return frozenset(self._held)

    def acquire(self, uuid: str, *, in_use: Callable[[str], str | None] = lambda _uuid: None) -> None:
        """Own a card until `release` or the end of the process; nothing happens when it is ours already.

        `in_use` is asked only when the card last belonged to the other door, and says what is still on it, or None.
        Raises `ConflictError` naming the holder, `HardwareError` when the folder cannot be used.
        """
        if uuid in self._held:
            return
        if not _UUID.fullmatch(uuid):
            raise InternalError(f"{uuid!r} is not the UUID of a card; report this")
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = os.open(self._folder / uuid, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as e:
            raise HardwareError(
                f"card {uuid} cannot be locked in {self._folder}: {foreign(e)}; repair that folder"
            ) from e
        try:
            self._lock(file, uuid, in_use)
        except BaseException:
            os.close(file)
            raise
        self._held[uuid] = file

    def release(self, uuid: str) -> None:
        """Let go of a card; nothing happens when it is not ours."""
        file = self._held.pop(uuid, None)
        if file is not None:
            os.close(file)

    def close(self) -> None:
        """Let go of all cards."""
        for uuid in list(self._held):
            self.release(uuid)

    def _lock(self, file: int, uuid: str, in_use: Callable[[str], str | None]) -> None:
        """End with the file naming our door and a shared lock on it.

        Only the first of a door comes through the exclusive lock and may write the name; it then shares the lock
        with others of its door. Going from exclusive to shared is not one step for the kernel, so the name is
        looked at again afterwards; the loop ends as soon as either happened undisturbed.
        """
        for _ in range(_ATTEMPTS):
            if _try(file, fcntl.LOCK_EX):
                before = _name(file)
                if before not in ("", self._door) and (rest := in_use(uuid)) is not None:
                    raise ConflictError(
                        f"card {uuid} was offered by {before}, and {rest} is still on it; end that first, then it can "
                        f"change to {self._door}"
                    )
                os.pwrite(file, self._door.encode() + b"\n", 0)
                os.ftruncate(file, len(self._door) + 1)
                os.fsync(file)
            if not _try(file, fcntl.LOCK_SH):
                continue
            if _name(file) == self._door:
                return
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)
            break
        raise ConflictError(
            f"card {uuid} is offered by {_name(file) or 'another daemon'} on this node; one card has one door: take it "
            "out of that daemon's configuration or stop that daemon"
        )


def _try(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _name(file: int) -> str:
    return os.pread(file, 256, 0).decode("utf-8", "replace").strip()
