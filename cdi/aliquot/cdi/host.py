# SPDX-License-Identifier: Apache-2.0
"""The host's file tree, as a process sees it that may itself stand in a container.

Two things make a plain `open` wrong. The host's `/` may be mounted somewhere else in our own pod (`prefix`), while
CDI wants host paths. And a driver can have a root of its own (a driver container), in which absolute symbolic
links mean that root and not the host's. So links are followed here, component by component, inside the root they
belong to; the kernel is never asked to follow one. Invariant: no path that `resolve` returns leaves its root.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_LINK_LIMIT: Final = 40
"""As the kernel's."""


class HostTree:
    """The host's files. Every path taken and returned is a host path, as CDI wants it.

    One object is one look at the host: which of the directories on a way are links is asked once.
    """

    def __init__(self, prefix: str = "") -> None:
        """`prefix`: where this process sees the host's `/`; "" = at `/`."""
        self.prefix = prefix.rstrip("/")
        self._links: dict[str, str] = {}
        """Where a link leads that was on a way already; "" for what is none."""

    def local(self, path: str) -> Path:
        """Where this process finds the host's `path`. Links in it have to be resolved before."""
        return Path(f"{self.prefix}{path}")

    def resolve(self, path: str, root: str = "/") -> str:
        """The real place of `root`/`path`, links followed inside `root`; `root` itself has none left.

        Raises `FileNotFoundError` (or another `OSError`) as `os.stat` would.
        """
        root = root.rstrip("/")
        pending = [part for part in reversed(path.split("/")) if part not in {"", "."}]
        done: list[str] = []
        links = 0
        while pending:
            part = pending.pop()
            if part == "..":
                if done:
                    done.pop()
                continue
            # Text, not a Path: this is asked a hundred times a claim, and making Paths took most of the time.
            here = "/".join([root, *done, part])
            target = self._links.get(here) if pending else None
            if target is None:
                target = self._links[here] = self._target(here)
            if not target:
                done.append(part)
                continue
            links += 1
            if links > _LINK_LIMIT:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), here)
            if target.startswith("/"):
                done = []
            pending += [item for item in reversed(target.split("/")) if item not in {"", "."}]
        return "/".join([root, *done]) if done else root or "/"

    def find(self, path: str, root: str = "/") -> str:
        """As `resolve`, but "" when there is nothing at that place."""
        try:
            return self.resolve(path, root)
        except (FileNotFoundError, NotADirectoryError):
            return ""

    def has(self, path: str, root: str = "/") -> bool:
        """Whether there is an entry at `root`/`path`, be it a link that leads nowhere."""
        folder, _, name = path.rpartition("/")
        parent = self.find(folder, root)
        return bool(parent) and os.path.lexists(self.local(f"{parent.rstrip('/')}/{name}"))

    def entries(self, directory: str) -> Iterator[os.DirEntry[str]]:
        """What stands in a resolved directory; nothing when it is none."""
        try:
            with os.scandir(self.prefix + directory) as found:
                yield from found
        except (FileNotFoundError, NotADirectoryError):
            return

    def is_file(self, path: str) -> bool:
        """Whether the resolved `path` is a plain file."""
        return stat.S_ISREG(self._mode(path))

    def is_directory(self, path: str) -> bool:
        """Whether the resolved `path` is a directory."""
        return stat.S_ISDIR(self._mode(path))

    def is_character_device(self, path: str) -> bool:
        """Whether the resolved `path` is a character device."""
        return stat.S_ISCHR(self._mode(path))

    def text(self, path: str) -> str:
        """Content of a small file; "" when there is none."""
        try:
            return self.local(path).read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return ""

    def _target(self, path: str) -> str:
        """Where the link at `path` leads; "" when something else is there. Raises `OSError` when nothing is."""
        if not stat.S_ISLNK(os.lstat(self.prefix + path).st_mode):
            return ""
        return os.readlink(self.prefix + path)  # noqa: PTH115 - as above

    def _mode(self, path: str) -> int:
        try:
            return os.lstat(self.prefix + path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return 0
