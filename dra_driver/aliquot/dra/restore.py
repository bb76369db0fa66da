# SPDX-License-Identifier: Apache-2.0
"""What a start does before it serves: makes the node agree with the checkpoint, or the checkpoint with the node.

Never forgets a claim because a file was damaged: what lies on the node (sidecars, grant files, CDI specs) is put
together into records, which hold their cards until kubelet or the API server says otherwise (cases.md B089). Never
removes what belongs to a record. Invariant: afterwards every record has its artefacts, or is named in the log as
one that could not be made again yet, and no artefact of ours is without a record.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from aliquot.api import names
from aliquot.api.errors import AliquotError
from aliquot.api.grant import Grant
from aliquot.api.log import get_logger
from aliquot.dra.devices import Kind
from aliquot.dra.effects import Effects
from aliquot.dra.engine import Engine
from aliquot.dra.records import Asked, ClaimRecord, Held, State
from aliquot.node.checkpoint import Checkpoint

log = get_logger(__name__)

_UID: Final = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_NAME: Final = re.compile(
    rf"c-(?P<uid>{_UID})-(?P<device>gpu-[0-9a-f]+(?:-shared|-s\d+|-mig-[a-z0-9]+-\d+-\d+)?)"
    rf"(?:-(?P<share>{_UID}))?(?:-t\d+)?"
)
_CLAIMS: Final = re.compile(rf"c-(?P<uid>{_UID})-")


def claim_of(name: str) -> str | None:
    """UID of the claim that a grant's name is about, None for a name of another door."""
    match = _CLAIMS.match(name)
    return match["uid"] if match else None


def recover(checkpoint: Checkpoint[ClaimRecord], effects: Effects, *, pool: str, boot_id: str) -> tuple[str, ...]:
    """Put together records for claims that lie on the node and that the checkpoint does not know any more.

    Called only when the checkpoint was lost or is one write behind. Returns their UIDs. A CDI spec alone is no
    reason: without the run directory's files the node has been rebooted, and no container lives.
    """
    with checkpoint.session():
        known = checkpoint.records().keys() | checkpoint.damaged().keys()
        names_there, grants = sorted(effects.regions.names()), effects.regions.grants()
        found = {uid for name in names_there if (uid := claim_of(name))} | effects.sidecars.uids()
        lost = sorted(found - known)
        tickets = []
        for uid in lost:
            record = effects.sidecars.get(uid) or _pieced_together(uid, names_there, grants, pool, boot_id)
            # Kubelet may have been told, whatever the sidecar says: it is written once, at the beginning.
            tickets.append(checkpoint.stage(uid, msgspec.structs.replace(record, state=State.COMPLETED)))
        for ticket in tickets:
            ticket.wait()
    for uid in lost:
        log.warning("claim recovered from what lay on the node", claim_uid=uid)
    return tuple(lost)


def sweep(checkpoint: Checkpoint[ClaimRecord], effects: Effects) -> None:
    """Remove what a kill left of claims that are forgotten. Files of other doors and of other vendors stay."""
    with checkpoint.session():
        live = checkpoint.records().keys() | checkpoint.damaged().keys()
        try:
            effects.store.sweep(live)
        except AliquotError as err:
            log.warning("CDI directory not swept", error=str(err))
        for name in sorted(effects.regions.names()):
            uid = claim_of(name)
            if uid is not None and uid not in live:
                effects.regions.remove(name)
                log.info("region of a forgotten claim removed", grant=name)
        for uid in effects.sidecars.uids() - live:
            effects.sidecars.remove(uid)


class Rebuild:
    """Makes prepared claims' artefacts again after a start; what cannot be made yet is tried again later."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pending = {uid for uid, record in engine.checkpoint.records().items() if record.completed}
        self._told: set[str] = set()

    @property
    def pending(self) -> frozenset[str]:
        """Claims whose artefacts are not known to be there."""
        return frozenset(self._pending)

    def round(self) -> None:
        """Try all that are pending; one that a call is about just now is left to that call."""
        for uid in sorted(self._pending):
            try:
                with (
                    self._engine.turns.enter(uid) as turn,
                    turn.hold(uid, 0.0),
                    self._engine.checkpoint.session(),
                ):
                    record = self._engine.checkpoint.get(uid)
                    if record is not None and record.results and not record.pieced_together:
                        self._engine.effects.make(uid, record)
                        self._engine.effects.settle()
            except AliquotError as err:
                if uid not in self._told:
                    self._told.add(uid)
                    log.warning("claim not made again yet", claim_uid=uid, error=str(err))
                continue
            self._pending.discard(uid)


def _pieced_together(
    uid: str, names_there: Sequence[str], grants: Mapping[str, Grant], pool: str, boot_id: str
) -> ClaimRecord:
    """A record from names and grant files alone: enough to hold what the claim holds, and to undo it.

    Where a grant file cannot be read, the device is taken for held whole.
    """
    results = []
    for name in names_there:
        match = _NAME.fullmatch(name)
        if match is None or match["uid"] != uid:
            continue
        share, device, grant = match["share"] or "", match["device"], grants.get(name)
        kind = _kind(device)
        consumed: dict[str, int] = {}
        if grant is None:
            kind = Kind.WHOLE if kind is Kind.SHARED else kind
        elif share:
            consumed = {
                names.CAPACITY_MEMORY: grant.memory_bytes,
                names.CAPACITY_CORES: grant.core_percent,
                names.CAPACITY_SLOTS: 1,
            }
        results.append(
            Held(
                asked=Asked(request="", pool=pool, device=device, share_id=share, consumed=consumed),
                kind=kind,
                card_uuid=grant.card_uuid if grant else "",
                grant=grant or Grant(name=name, card_uuid=""),
            )
        )
    return ClaimRecord(state=State.COMPLETED, namespace="", name="", results=tuple(results), boot_id=boot_id)


def _kind(device: str) -> Kind:
    if device.endswith("-shared"):
        return Kind.SHARED
    if "-mig-" in device:
        return Kind.MIG
    return Kind.SLOT if re.search(r"-s\d+$", device) else Kind.WHOLE
