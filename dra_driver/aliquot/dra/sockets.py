# SPDX-License-Identifier: Apache-2.0
"""Our sockets below kubelet's root: their names, who owns them, and what earlier instances left.

Never takes a socket from a living process and never removes one that is not ours: gRPC binds over a live socket
without a word, and whoever stops first deletes the other's file (dra.md 1.2, M7). Invariant: each instance has names
of its own (the pod's UID), or is the only one, which a lock proves for as long as the process lives.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import hashlib
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aliquot.api import names
from aliquot.api.errors import ConflictError, SettingsError, foreign
from aliquot.api.log import get_logger

log = get_logger(__name__)

PATH_LIMIT: Final = 107
"""Bytes of a UNIX socket's path (dra.md 1.2, M6)."""
_SETTLED_S: Final = 10.0
"""A socket that is younger may belong to an instance that binds but does not listen yet."""


@dataclass(frozen=True, slots=True)
class SocketPaths:
    """Where one instance serves."""

    service: Path
    registration: Path


def socket_paths(plugin_dir: Path, registry_dir: Path, pod_uid: str) -> SocketPaths:
    """Paths for the instance of `pod_uid`, or for the only instance of the node where that is empty.

    Where the plain name is too long, a hash takes the place of its parts. Raises `SettingsError` when even that is
    too long: then kubelet's root is.
    """
    if not pod_uid:
        service, registration = ["dra.sock"], [f"{names.DRIVER}-reg.sock", "dra-reg.sock"]
    else:
        short = _hash(pod_uid.encode(), 8)
        service = [f"dra-{pod_uid}.sock", f"dra-{short}.sock"]
        registration = [
            f"{names.DRIVER}-{pod_uid}-reg.sock",
            f"{names.DRIVER}-{short}-reg.sock",
            f"dra-{_hash(names.DRIVER.encode() + bytes(1) + pod_uid.encode(), 16)}-reg.sock",
        ]
    return SocketPaths(service=_fitting(plugin_dir, service), registration=_fitting(registry_dir, registration))


def _hash(data: bytes, length: int) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()[:length]).rstrip(b"=").decode()


def _fitting(folder: Path, candidates: list[str]) -> Path:
    for name in candidates:
        if len(os.fsencode(folder / name)) <= PATH_LIMIT:
            return folder / name
    raise SettingsError(
        f"socket path {folder / candidates[-1]} has more than {PATH_LIMIT} bytes; use a shorter --kubelet-root, for "
        "example through a symbolic link"
    )


class InstanceLock:
    """Proof that this is the only instance, or that all instances have names of their own; dies with the process."""

    def __init__(self, plugin_dir: Path, *, alone: bool) -> None:
        """Raises `ConflictError` when another instance lives that would share our names."""
        path = plugin_dir / "instance.lock"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._file, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._file)
            raise ConflictError(
                f"another instance of the driver (process {holder}) serves {plugin_dir}; end it first, or give every "
                "instance its --pod-uid so that two can overlap during an update"
            ) from None
        os.pwrite(self._file, b"%-10d\n" % os.getpid(), 0)

    def close(self) -> None:
        """Let the next one in."""
        os.close(self._file)


def remove_stale(
    plugin_dir: Path, registry_dir: Path, own: SocketPaths, *, now: Callable[[], float] = time.time
) -> list[Path]:
    """Remove sockets of this driver at which nobody listens any more, else kubelet dials them for half an hour.

    Living ones, ones that might just be starting, and those of other drivers stay. Returns what was removed.
    """
    removed: list[Path] = []
    candidates = [*_glob(plugin_dir, "dra*.sock"), *_glob(registry_dir, f"{names.DRIVER}-*reg.sock")]
    for path in candidates:
        with contextlib.suppress(OSError):
            status = path.lstat()
            if not stat.S_ISSOCK(status.st_mode) or not _abandoned(path):
                continue
            if path in (own.service, own.registration) or now() - status.st_mtime > _SETTLED_S:
                path.unlink()
                removed.append(path)
    if removed:
        log.info("stale sockets removed", paths=[str(path) for path in removed])
    return removed


def _glob(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def _abandoned(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError as err:
            return err.errno == errno.ECONNREFUSED
    return False


def inode(path: Path) -> tuple[int, int] | None:
    """What is at the path now, None for nothing."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


@contextlib.contextmanager
def sparing(path: Path, ours: tuple[int, int] | None) -> Iterator[None]:
    """While inside, gRPC may unlink `path`: what is there but is not ours is put aside and back again."""
    there = inode(path)
    if there is None or there == ours:
        yield
        return
    aside = path.with_name(f".{path.name}.aside")
    try:
        path.rename(aside)
    except OSError as err:
        log.warning("foreign socket not spared", path=str(path), error=foreign(err))
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            aside.rename(path)
