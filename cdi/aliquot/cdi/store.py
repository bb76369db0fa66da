# SPDX-License-Identifier: Apache-2.0
"""Our spec files in the directory that the container runtime reads: one per claim, named by the claim's UID.

Invariants. A reader of the directory sees each of our files whole or not at all, at any instant, whatever is
killed where: content goes into a temporary file in the same directory, under a suffix that no scanner reads, is
made durable, and is renamed into place (a running runtime notices a rename inside the directory, but neither a
file renamed in from elsewhere nor a hard link, cdi.md 1.5). And never is a file touched that is not a claim's of
our vendor and class: others write into this directory as well.

A temporary file is held with `flock` while its writer lives, so a sweep can tell what a dead writer left from
what another process is just writing, without looking at a clock or at process ids of other containers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final, Self

import structlog

from aliquot.api.errors import AliquotError, ConflictError, HardwareError, InternalError, SettingsError
from aliquot.api.names import CDI_CLASS, CDI_VENDOR
from aliquot.cdi import codec, names
from aliquot.cdi.load import SPEC_SUFFIXES
from aliquot.cdi.model import Spec
from aliquot.cdi.validate import FILE_LIMIT, Level, validate

log = structlog.get_logger(__name__)

TEMPORARY_SUFFIX: Final = ".tmp"
STATIC_DIR: Final = Path("/etc/cdi")
"""The other directory that runtimes read by default; what is there ranks below `/var/run/cdi`."""

_UID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_ID: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_OPERATOR_ERRORS: Final = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}


class StagedSpec:
    """A claim's spec file on its way into the directory: `put` in place, or `discard`ed; for one thread at a time."""

    def __init__(self, store: SpecStore, path: Path, data: bytes, temporary: tuple[Path, int] | None) -> None:
        """`temporary`: the written file and its locked descriptor; None: the right content is in place already."""
        self.path = path
        """Where the file will be."""
        self._store = store
        self._data = data
        self._file = temporary

    def put(self) -> bool:
        """Put the file in place, whole or not at all, and read it back; durable after the store's next `settle`.

        False when the right content was there already, and nothing changed. Raises as `SpecStore.write` does.
        """
        if self._file is None:
            return False
        with self._store._reporting(f"write {self.path.name}"):  # noqa: SLF001 - the two are one thing
            try:
                self._rename()
            except FileNotFoundError:
                # The directory was taken away, and with it what had been written.
                self._file = self._store._temporary(self.path, self._data)  # noqa: SLF001
                self._rename()
            if not _holds(self.path, self._data):
                raise HardwareError(f"{self.path} reads back different from what was written; look at the file system")
        return True

    def _rename(self) -> None:
        assert self._file is not None
        temporary, descriptor = self._file
        self._file = None
        try:
            temporary.rename(self.path)
        except BaseException:
            _drop(temporary, descriptor)
            raise
        os.close(descriptor)

    def discard(self) -> None:
        """Leave the directory as it was, unless `put` came before; may be repeated."""
        if self._file is not None:
            _drop(*self._file)
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


class SpecStore:
    """One CDI directory, and in it the files of one vendor and class. Safe for many threads and processes."""

    def __init__(
        self,
        directory: Path,
        *,
        vendor: str = CDI_VENDOR,
        class_: str = CDI_CLASS,
        also_read: Sequence[Path] = (STATIC_DIR,),
    ) -> None:
        """`also_read`: further directories of the runtime, looked at for files that claim names of ours."""
        self.directory = directory
        self.vendor = vendor
        self.class_ = class_
        self.kind = f"{vendor}/{class_}"
        self._other_directories = tuple(path for path in also_read if path != directory)
        self._foreign: dict[str, tuple[tuple[int, int, int], bytes]] = {}
        self._own_names: set[str] = set()
        """File names that were seen lately to be a claim's, which the name says by itself."""

    def path(self, transient_id: str) -> Path:
        """Where the file of `transient_id` (a claim's UID) lies. Raises `InternalError` for an id that is none."""
        if not _ID.fullmatch(transient_id) or len(transient_id) > 128:
            raise InternalError(
                f"{transient_id!r} cannot name a CDI spec file; a claim UID was expected, please report this"
            )
        return self.directory / names.transient_file_name(self.vendor, self.class_, transient_id)

    def prepare(self) -> None:
        """Create the directory (0755, whatever the umask) and prove that we may write there.

        Raises `SettingsError` or `HardwareError` naming the directory and what is wrong with it.
        """
        with self._reporting("prepare"):
            self._make_directory()
            name = self.directory / f".{self.vendor}-{self.class_}_probe.{secrets.token_hex(6)}{TEMPORARY_SUFFIX}"
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            name.unlink()
            with os.scandir(self.directory):
                pass

    def write(self, spec: Spec, transient_id: str) -> Path:
        """Put `spec` in place of the claim's file: whole or not at all, durable, readable by everyone, read back.

        A file with the same content stays as it is, so a repeated Prepare does not wake the runtime.
        Raises `InternalError` for a spec that our strict rules refuse, `ConflictError` when another file claims
        one of its names, `SettingsError` or `HardwareError` when the directory does not take the file.
        """
        with self.stage(spec, transient_id) as staged:
            if staged.put():
                self.settle()
        return staged.path

    def stage(self, spec: Spec, transient_id: str) -> StagedSpec:
        """The first, slow half of `write`: everything is judged and durable, but under a name that no runtime reads.

        Raises as `write` does. Whoever gets it puts it in place or discards it.
        """
        path = self.path(transient_id)
        data = self._encoded(spec)
        with self._reporting(f"write {path.name}"):
            self._refuse_conflicts(spec, path.name)
            return StagedSpec(self, path, data, None if _holds(path, data) else self._temporary(path, data))

    def settle(self) -> None:
        """Make durable what was put in place: the directory's own entries. Raises `HardwareError`."""
        with self._reporting("settle"):
            self._sync_directory()

    def remove(self, transient_id: str) -> bool:
        """Remove the claim's file; True when there was one. Its absence is no error."""
        path = self.path(transient_id)
        with self._reporting(f"remove {path.name}"):
            try:
                path.unlink()
            except FileNotFoundError:
                return False
            self._sync_directory()
        return True

    def list_own(self) -> tuple[str, ...]:
        """Ids (claim UIDs) of our claim files, sorted. A missing directory holds none.

        A file counts as ours when its name is one that `path` makes *and* its devices are named after that id; so
        a file that somebody wrote by hand for our vendor does not. One that cannot be read as a spec counts when
        the id is a UID: nobody else makes such a name, and a damaged file must not stay for ever.
        """
        with self._reporting("list"):
            return tuple(sorted(filter(self._is_own, self._ids())))

    def sweep(self, live: Collection[str]) -> tuple[str, ...]:
        """Remove our claim files whose id is not in `live`, and what dead writers left; returns the ids removed.

        One file that cannot be removed does not keep the others: it is logged and left.
        """
        removed: list[str] = []
        for transient_id in self.list_own():
            if transient_id in live:
                continue
            try:
                if self.remove(transient_id):
                    removed.append(transient_id)
            except AliquotError as error:
                log.warning("spec file kept", file=str(self.path(transient_id)), error=str(error))
        with self._reporting("sweep"):
            self._sweep_temporaries()
        if removed:
            log.info("spec files of dead claims removed", claims=removed)
        return tuple(removed)

    def _encoded(self, spec: Spec) -> bytes:
        try:
            validate(spec, Level.STRICT)
        except SettingsError as error:
            raise InternalError(
                f"a spec of ours is not valid and was not written, please report this: {error}"
            ) from error
        if spec.kind != self.kind:
            raise InternalError(f"a spec of kind {spec.kind} does not belong among those of {self.kind}")
        data = codec.encode(spec)
        if len(data) > FILE_LIMIT:
            raise InternalError(
                f"a spec file of {len(data)} bytes is more than the {FILE_LIMIT} that we write; "
                "ask for fewer devices in one claim, or shorten the extra edits"
            )
        return data

    def _refuse_conflicts(self, spec: Spec, file_name: str) -> None:
        """Files of other claims cannot conflict (device names hold the UID); all others are searched.

        A search in the text is enough, and works for YAML that we cannot parse: a device name of ours is too
        odd to stand in a file by accident.
        """
        kind = spec.kind.encode()
        wanted = [device.name.encode() for device in spec.devices]
        for directory in (self.directory, *self._other_directories):
            for path in self._foreign_files(directory):
                text = self._foreign_text(path, kind)
                held = next(
                    (name for name in wanted if re.search(rb"(?<![\w.:-])%b(?![\w.:-])" % re.escape(name), text)), None
                )
                if held is not None:
                    raise ConflictError(
                        f"{path} also defines {spec.kind}={held.decode()}, so a runtime would refuse both; "
                        f"remove that file, then {file_name} can be written"
                    )

    def _foreign_files(self, directory: Path) -> Iterator[str]:
        """Paths of the spec files in a directory that are not a claim's of ours."""
        try:
            names = set(os.listdir(directory))  # noqa: PTH208 - a hundred files for each claim: no objects for them
        except FileNotFoundError:
            return
        if directory != self.directory:
            yield from (f"{directory}/{name}" for name in sorted(names) if name.endswith(SPEC_SUFFIXES))
            return
        own = self._own_names & names
        foreign = []
        for name in sorted(names - own):
            if self._id_of(name):
                own.add(name)
            elif name.endswith(SPEC_SUFFIXES):
                foreign.append(f"{directory}/{name}")
        self._own_names = own
        yield from foreign

    def _foreign_text(self, path: str, kind: bytes) -> bytes:
        """Content of a file, when it speaks of our kind at all; remembered until the file changes."""
        try:
            status = os.stat(path)  # noqa: PTH116 - as above
            mark = (status.st_ino, status.st_mtime_ns, status.st_size)
            known = self._foreign.get(path)
            if known is None or known[0] != mark:
                content = Path(path).read_bytes() if status.st_size <= 16 * FILE_LIMIT else b""
                known = (mark, content if kind in content else b"")
                self._foreign[path] = known
            return known[1]
        except OSError:
            return b""  # gone, or not for us to read: then a runtime says so, not we

    def _temporary(self, path: Path, data: bytes) -> tuple[Path, int]:
        """A durable file with that content beside `path`, and its descriptor, whose lock says that we live."""
        try:
            return self._written(path, data)
        except FileNotFoundError:
            # A reboot or an operator took the directory away (/run is a tmpfs).
            self._make_directory()
            return self._written(path, data)

    def _written(self, path: Path, data: bytes) -> tuple[Path, int]:
        temporary, descriptor = self._open_temporary(path)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fchmod(descriptor, 0o644)  # rootless runtimes read it too, whatever our umask
            os.fsync(descriptor)
        except BaseException:
            _drop(temporary, descriptor)
            raise
        return temporary, descriptor

    def _open_temporary(self, path: Path) -> tuple[Path, int]:
        while True:
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}{TEMPORARY_SUFFIX}")
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                self._lock(descriptor)
                if os.fstat(descriptor).st_nlink:
                    return temporary, descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # a sweep took it between open and lock; the next name is our own

    def _lock(self, descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)

    def _sweep_temporaries(self) -> None:
        prefix = f".{self.vendor}-{self.class_}_"
        for entry in _entries(self.directory):
            if not (entry.name.startswith(prefix) and entry.name.endswith(TEMPORARY_SUFFIX)):
                continue
            try:
                descriptor = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    Path(entry.path).unlink()
                finally:
                    os.close(descriptor)
            except (FileNotFoundError, BlockingIOError):
                continue  # its writer has renamed it, or is alive
            except OSError as error:
                log.warning("temporary spec file kept", file=entry.path, error=str(error))

    def _ids(self) -> Iterator[str]:
        for entry in _entries(self.directory):
            transient_id = self._id_of(entry.name)
            if transient_id and entry.is_file(follow_symlinks=False):
                yield transient_id

    def _id_of(self, file_name: str) -> str:
        """The id in a file name of ours; "" for any other name."""
        prefix, suffix = f"{self.vendor}-{self.class_}_", ".json"
        if not (file_name.startswith(prefix) and file_name.endswith(suffix)):
            return ""
        transient_id = file_name[len(prefix) : -len(suffix)]
        return transient_id if _ID.fullmatch(transient_id) else ""

    def _is_own(self, transient_id: str) -> bool:
        try:
            spec = Spec.from_dict(codec.decode_json(self.path(transient_id).read_bytes(), "spec"))
        except FileNotFoundError:
            return False
        except (SettingsError, OSError):
            return _UID.fullmatch(transient_id) is not None
        return spec.kind == self.kind and all(device.name.startswith(f"c-{transient_id}-") for device in spec.devices)

    def _make_directory(self) -> None:
        missing: list[Path] = []
        directory = self.directory
        while not directory.exists():
            missing.append(directory)
            directory = directory.parent
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                path.chmod(0o755)

    def _sync_directory(self) -> None:
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _reporting(self, what: str) -> Iterator[None]:
        """Turn what the file system says into our errors, with the directory and the next step."""
        try:
            yield
        except OSError as error:
            text = f"CDI directory {self.directory}: cannot {what}: {error.strerror or error}"
            if error.errno in _OPERATOR_ERRORS:
                raise SettingsError(
                    f"{text}; it has to be a directory that this process can write and the runtime reads"
                ) from error
            raise HardwareError(f"{text}; look at the disk behind it") from error


def _drop(temporary: Path, descriptor: int) -> None:
    """Remove a file that nobody will put in place."""
    with contextlib.suppress(OSError):
        temporary.unlink()
    os.close(descriptor)


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _holds(path: Path, data: bytes) -> bool:
    """Whether `path` is a plain file, readable by everyone, that holds exactly `data`."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            return status.st_mode & 0o777 == 0o644 and status.st_size == len(data) and file.read() == data
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno == errno.ELOOP:  # a symbolic link is replaced by the rename, its target left alone
            return False
        raise
