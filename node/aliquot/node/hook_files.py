# SPDX-License-Identifier: Apache-2.0
"""The hook library on the node: `<state dir>/hook/<build id>/{libvgpu.so,ld.so.preload}`, mounted into containers.

It never writes into a file that is installed: truncating or overwriting a mapped library kills the programs that
use it, so every build has a folder of its own, named by its content, that appears whole by one rename and goes
only when no live grant uses it. Guarded invariant: a folder whose name is a build id holds exactly that build.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aliquot.api.errors import HardwareError, InternalError, foreign
from aliquot.api.names import CONTAINER_LIBRARY

LIBRARY: Final = "libvgpu.so"
PRELOAD: Final = "ld.so.preload"
PRELOAD_TEXT: Final = f"{CONTAINER_LIBRARY}\n"

_BUILD_ID: Final = re.compile(r"[0-9a-f]{32}")
_TEMPORARY: Final = ".new-"


@dataclass(frozen=True, slots=True)
class InstalledHook:
    """One installed build: host paths that edits mount."""

    build_id: str
    library: Path
    preload: Path


class HookFiles:
    """The folder of installed builds below `state_dir`. Methods raise `HardwareError` when it cannot be used."""

    def __init__(self, state_dir: Path) -> None:
        self.folder = state_dir / "hook"

    def installed(self, build_id: str) -> InstalledHook:
        """The paths of a build, whether or not it is there."""
        folder = self.folder / build_id
        return InstalledHook(build_id, folder / LIBRARY, folder / PRELOAD)

    def install(self, source: Path) -> InstalledHook:
        """Install a built library, once; what is there already is verified byte by byte.

        The build id is the first 32 hex digits of the file's SHA-256. Raises `InternalError` when the folder of
        that id holds something else: it is left alone, since containers may have it mapped.
        """
        try:
            data = source.read_bytes()
        except OSError as e:
            raise HardwareError(f"hook library {source} cannot be read: {foreign(e)}; build it with `make hook`") from e
        build_id = hashlib.sha256(data).hexdigest()[:32]
        target = self.folder / build_id
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o755)
            if not target.exists():
                self._place(target, data)
            self._verify(target, data)
        except OSError as e:
            raise HardwareError(
                f"hook library cannot be installed in {target}: {foreign(e)}; make room on that disk "
                "or repair its rights"
            ) from e
        return self.installed(build_id)

    def builds(self) -> frozenset[str]:
        """Build ids that are installed."""
        try:
            return frozenset(entry.name for entry in self.folder.iterdir() if _BUILD_ID.fullmatch(entry.name))
        except FileNotFoundError:
            return frozenset()

    def prune(self, in_use: Iterable[str]) -> tuple[str, ...]:
        """Remove every build not in `in_use` (build ids of live grants, and the current one); return what went.

        Left-over temporary folders go too. One folder that cannot be removed does not keep the others.
        """
        keep = frozenset(in_use)
        with contextlib.suppress(OSError):
            for entry in list(self.folder.iterdir()):
                if entry.name.startswith(_TEMPORARY):
                    shutil.rmtree(entry, ignore_errors=True)
        gone = []
        for build_id in sorted(self.builds() - keep):
            # First the name, so that a kill half way never leaves a build without one of its files.
            doomed = self.folder / f"{_TEMPORARY}{build_id}-{os.getpid()}"
            with contextlib.suppress(OSError):
                (self.folder / build_id).rename(doomed)
                gone.append(build_id)
                shutil.rmtree(doomed, ignore_errors=True)
        return tuple(gone)

    def _place(self, target: Path, data: bytes) -> None:
        temporary = self.folder / f"{_TEMPORARY}{target.name}-{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        temporary.chmod(0o755)  # whatever the umask
        _write(temporary / LIBRARY, data, 0o755)
        _write(temporary / PRELOAD, PRELOAD_TEXT.encode(), 0o644)
        _sync(temporary)
        try:
            temporary.rename(target)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            # Another daemon placed the same build meanwhile; whether it is the same is verified next.
            if not target.exists():
                raise
        _sync(self.folder)

    def _verify(self, target: Path, data: bytes) -> None:
        for path, wanted in ((target / LIBRARY, data), (target / PRELOAD, PRELOAD_TEXT.encode())):
            if path.is_symlink() or not path.is_file() or path.read_bytes() != wanted:
                raise InternalError(
                    f"{path} is not what was installed under that build id; drain the node, then remove {target}"
                )


def _write(path: Path, data: bytes, mode: int) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        # Whatever the umask: containers of any user read it.
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
