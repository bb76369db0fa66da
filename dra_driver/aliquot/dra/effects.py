# SPDX-License-Identifier: Apache-2.0
"""What preparing a claim changes on the node, and how that is undone: regions, sidecar, CDI spec.

Never decides anything: what to make stands in the record. Every step can be done again at any time and then changes
nothing, or makes again what a reboot, an operator or a kill took away. Undoing goes in the opposite order, and
undoing what was never made succeeds. Invariant: a CDI spec exists only while the grant files and usage folders that
it mounts exist, so no container starts without its limit.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from aliquot.api.errors import AliquotError, HardwareError, InternalError, foreign
from aliquot.api.grant import Grant
from aliquot.cdi.driver_files import CardAddress, DriverFiles, Host, Roots, look
from aliquot.cdi.edits import Limiter, merge, spec_for
from aliquot.cdi.model import EMPTY_EDITS, ContainerEdits, Spec
from aliquot.cdi.store import SpecStore, StagedSpec
from aliquot.dra.records import ClaimRecord, Held
from aliquot.dra.settings import is_uid
from aliquot.node.hook_files import InstalledHook
from aliquot.node.inventory import Card
from aliquot.node.regions import Regions

Steps = Callable[[str], None]

MAKE_STEPS: Final = ("sidecar", "regions", "spec", "verify")
UNMAKE_STEPS: Final = ("remove spec", "remove regions", "remove sidecar")
"""Names passed to `steps`, each before what it names; tests end the process there."""

_FRESH_S: Final = 0.5
"""How old a look at the host may be; one is taken while the API server is asked, which may take long."""


class HostLook:
    """One look at the host, for everybody who came before it began."""

    __slots__ = ("done", "found", "taken_s")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.found: Host | None = None
        """None after `done`: something is wrong; whoever needs it has to look alone, and is told."""
        self.taken_s = 0.0


class DriverSource:
    """Where the driver's files and the installed hook are; looked at anew for each claim (dra.md 9, row 16).

    Claims that come together share one look, which begins after the last of them came. Never remembers one.
    """

    def __init__(
        self, roots: Roots, hook: InstalledHook, run_dir: Path, extra_edits: ContainerEdits = EMPTY_EDITS
    ) -> None:
        self.roots = roots
        self._hook = hook
        self._run_dir = run_dir
        self._extra_edits = extra_edits
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._next: HostLook | None = None

    def look(self) -> HostLook:
        """Look at the host as it is after this call came; what is wrong is told by `files`."""
        with self._lock:
            first = self._next is None
            shared = self._next = self._next or HostLook()
        if first:
            with self._looking:
                with self._lock:
                    self._next = None
                try:
                    shared.taken_s = time.monotonic()
                    shared.found = look(self.roots)
                except AliquotError:
                    shared.found = None
                finally:
                    shared.done.set()
        else:
            shared.done.wait()
        return shared

    def files(self, cards: Sequence[CardAddress], seen: HostLook | None = None) -> DriverFiles:
        """What containers with these cards need, as it is now. Raises `HardwareError` naming what is missing.

        `seen`: a look of a moment ago; an older one does not count (an update may have begun since).
        """
        if seen is None or time.monotonic() - seen.taken_s > _FRESH_S:
            seen = self.look()
        host = seen.found or look(self.roots)
        return host.files(
            cards,
            hook_library=str(self._hook.library),
            preload_file=str(self._hook.preload),
            run_dir=str(self._run_dir),
            extra_edits=self._extra_edits,
        )


class Sidecars:
    """A copy of each claim's record in the run directory, for the day the checkpoint is damaged (cases.md B089).

    Not durable on purpose: it lives as long as the containers it speaks of, and costs no write to a disk.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "claims"

    def put(self, uid: str, record: ClaimRecord) -> None:
        """Write the copy, whole or not at all. Raises `HardwareError`."""
        # Text, not Paths: making those took longer than writing the file.
        path = f"{self._folder}/{uid}.json"
        temporary = f"{self._folder}/{uid}.tmp"
        data = msgspec.json.encode(record)
        try:
            try:
                _write(temporary, data)
            except FileNotFoundError:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                _write(temporary, data)
            os.rename(temporary, path)  # noqa: PTH104 - as above
        except OSError as err:
            raise HardwareError(
                f"{path} cannot be written: {foreign(err.strerror)}; look at the run directory"
            ) from err

    def remove(self, uid: str) -> None:
        """Forget a claim; nothing happens when it is not known."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (self._folder / f"{uid}.json").unlink()

    def uids(self) -> frozenset[str]:
        """Claims that have a copy."""
        try:
            return frozenset(path.stem for path in self._folder.glob("*.json") if is_uid(path.stem))
        except OSError:
            return frozenset()

    def get(self, uid: str) -> ClaimRecord | None:
        """The copy, None where there is none or it cannot be read."""
        try:
            return msgspec.json.decode((self._folder / f"{uid}.json").read_bytes(), type=ClaimRecord)
        except (OSError, msgspec.MsgspecError, ValueError):
            return None


class Effects:
    """The hands of the door. Safe for many threads as long as no two work on one claim."""

    def __init__(
        self,
        *,
        driver: DriverSource,
        regions: Regions,
        store: SpecStore,
        sidecars: Sidecars,
        card: Callable[[str], Card],
        steps: Steps = lambda _step: None,
    ) -> None:
        """`card` gives a card by UUID as it is now; raises `HardwareError` when it is not there."""
        self.regions = regions
        self.store = store
        self.sidecars = sidecars
        self._driver = driver
        self._card = card
        self._steps = steps

    def look(self) -> HostLook:
        """Look at the host now, for a `draft` that comes in a moment."""
        return self._driver.look()

    def draft(self, uid: str, record: ClaimRecord, seen: HostLook | None = None) -> StagedSpec:
        """Say what the CDI spec of a claim has to be, and write it where no runtime reads it; makes nothing else.

        `seen` is a `look` begun after the call for the claim came. Whoever gets the draft hands it to `make` or
        discards it. Raises `HardwareError` for missing driver files or nodes, `SettingsError` for a directory or
        edits of the operator's, `ConflictError` for a CDI file of somebody else's.
        """
        files = self._driver.files([self._address(held) for held in record.results], seen)
        return self.store.stage(_spec(record, files), uid)

    def make(self, uid: str, record: ClaimRecord, draft: Callable[[], StagedSpec] | None = None) -> bool:
        """Make everything of a claim, or what is missing of it; true: it is durable after the next `settle`.

        `draft` gives its fresh draft, when that is needed; it is made here if not given. Raises as `draft` does,
        `InternalError` for damage of our own files.
        """
        self._steps("sidecar")
        self.sidecars.put(uid, record)
        self._steps("regions")
        for held in record.results:
            self.regions.create(held.grant)
        with self.draft(uid, record) if draft is None else draft() as staged:
            self._steps("spec")
            changed = staged.put()
        self._steps("verify")
        self._verify(record)
        return changed

    def settle(self) -> None:
        """Make durable what `make` put into the CDI directory. Raises `HardwareError`."""
        self.store.settle()

    def unmake(self, uid: str) -> None:
        """Remove everything of a claim, whoever made it and however far that came."""
        self._steps("remove spec")
        self.store.remove(uid)
        self._steps("remove regions")
        for name in self.grants_of(uid):
            self.regions.remove(name)
        self._steps("remove sidecar")
        self.sidecars.remove(uid)

    def drop_strays(self, uid: str, record: ClaimRecord) -> None:
        """Remove regions that an earlier try for another allocation left."""
        for name in self.grants_of(uid) - {held.grant.name for held in record.results}:
            self.regions.remove(name)

    def grants_of(self, uid: str) -> frozenset[str]:
        """Names of the claim's regions, half made ones included."""
        return frozenset(name for name in self.regions.names() if name.startswith(f"c-{uid}-"))

    def _address(self, held: Held) -> CardAddress:
        """Where the card is in /dev now: a reboot may have dealt the minor numbers anew, so none is remembered."""
        card, uuid = self._card(held.card_uuid), held.grant.card_uuid
        if card.minor is None:
            raise HardwareError(
                f"card {card.uuid} has no minor number, so its device node is not known; check it with nvidia-smi"
            )
        if uuid == card.uuid:
            return CardAddress(uuid=uuid, minor=card.minor)
        instance = next((one for one in card.mig if one.uuid == uuid), None)
        if instance is None:
            raise HardwareError(
                f"MIG instance {uuid} is no longer on card {card.uuid}; make it again, or delete the pods of the claim"
            )
        return CardAddress(
            uuid=uuid,
            minor=card.minor,
            gpu_instance=instance.gpu_instance,
            compute_instance=instance.compute_instance,
        )

    def _verify(self, record: ClaimRecord) -> None:
        """What the spec mounts is there: a runtime would fail much later, and say much less."""
        for held in record.results:
            name = held.grant.name
            for path in (self.regions.grant_file(name), self.regions.usage_file(name)):
                if not path.is_file():
                    raise InternalError(f"{path} vanished while it was made; look at who cleans {self.regions.run_dir}")


def _write(path: str, data: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
    finally:
        os.close(file)


def _spec(record: ClaimRecord, files: DriverFiles) -> Spec:
    grants: list[tuple[Grant, Limiter]] = [
        (held.grant, "hook" if held.asked.terms.hook else "none") for held in record.results
    ]
    spec = spec_for(grants, files)
    if not any(held.asked.terms.env for held in record.results):
        return spec
    devices = tuple(
        msgspec.structs.replace(
            device,
            container_edits=merge(
                device.container_edits,
                ContainerEdits(env=tuple(f"{name}={value}" for name, value in sorted(held.asked.terms.env.items()))),
            ),
        )
        for device, held in zip(spec.devices, record.results, strict=True)
    )
    return msgspec.structs.replace(spec, devices=devices)
