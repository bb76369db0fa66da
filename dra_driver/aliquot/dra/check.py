# SPDX-License-Identifier: Apache-2.0
"""`--check`: what works on this node and what does not, each with the next step.

Looks, and changes nothing: a probe device stands in the CDI directory for a moment. Never stops at the first fault:
every line is found out by itself, so that one run says everything. Invariant: a line that says `ok` was tried just
now, the same way the driver will.
"""

from __future__ import annotations

import enum
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TextIO

from aliquot import hook
from aliquot.api import names
from aliquot.api.errors import AliquotError, SettingsError, foreign
from aliquot.cdi.check import check as check_cdi
from aliquot.cdi.driver_files import PRELOAD_CONTENT, CardAddress, Roots, discover
from aliquot.cdi.load import load_extra_edits
from aliquot.dra.cards import find_library
from aliquot.dra.defects import defects_of, parse_version
from aliquot.dra.driver import hook_library
from aliquot.dra.exits import Exit
from aliquot.dra.layout import Features, Kept, choose_layout
from aliquot.dra.probe import probe
from aliquot.dra.settings import Settings
from aliquot.dra.sockets import socket_paths
from aliquot.kube import paths
from aliquot.kube.client import Kube
from aliquot.kube.objects import Node, ServerVersion
from aliquot.node.checkpoint import look
from aliquot.node.inventory import Inventory, read_inventory
from aliquot.node.nvml import Nvml

OLDEST_KUBELET: Final = (1, 34, 2)
"""1.34.0 and 1.34.1 lose the connection to idle plugins (kubernetes/kubernetes#133920)."""


class Outcome(enum.Enum):
    """How a line ended."""

    OK = "ok"
    WARNING = "warning"
    """Works, but something is less than it could be."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One thing looked at."""

    area: str
    subject: str
    outcome: Outcome
    text: str
    next_step: str = ""


RIGHTS: Final = (
    ("get", "", "nodes", "owner of the slices", True),
    ("get", "resource.k8s.io", "resourceclaims", "what a claim was given", True),
    *((verb, "resource.k8s.io", "resourceslices", "publish the cards", True)
      for verb in ("get", "list", "watch", "create", "update", "delete")),
    ("create", "events.k8s.io", "events", "tell users what happens", False),
    ("patch", "events.k8s.io", "events", "tell users what happens", False),
)  # fmt: skip


def run_checks(settings: Settings, out: TextIO) -> Exit:
    """Look at everything, print the report, and say whether all is well."""
    lines = list(check(settings))
    if settings.check_output == "json":
        out.write(json.dumps([line_as_json(line) for line in lines], indent=2) + "\n")
    else:
        out.write(table(lines))
    return Exit.CHECK_FAILED if any(line.outcome is Outcome.FAILED for line in lines) else Exit.OK


def line_as_json(line: Line) -> dict[str, str]:
    """One line for programs."""
    return {
        "area": line.area,
        "subject": line.subject,
        "outcome": line.outcome.value,
        "text": line.text,
        "nextStep": line.next_step,
    }


def table(lines: list[Line]) -> str:
    """The report for people: aligned, next steps below what needs one."""
    width = max(len(f"{line.area}: {line.subject}") for line in lines)
    rows = []
    for line in lines:
        rows.append(f"{line.outcome.value:<8} {f'{line.area}: {line.subject}':<{width}}  {line.text}")
        if line.next_step:
            rows.append(f"{'':<8} {'':<{width}}  → {line.next_step}")
    failed = sum(line.outcome is Outcome.FAILED for line in lines)
    warned = sum(line.outcome is Outcome.WARNING for line in lines)
    return "\n".join(rows) + f"\n{len(lines)} checked, {failed} failed, {warned} with a warning\n"


def check(settings: Settings) -> Iterator[Line]:
    """Every line, in the order in which the driver needs the things."""
    inventories: list[Inventory] = []
    features: list[Features] = []
    yield from _hook(settings)
    yield from _driver(settings, inventories)
    yield from _kubelet(settings)
    yield from _directories(settings)
    yield from _api(settings, features)
    for inventory in inventories:
        yield from _cards(settings, inventory, features[0] if features else None)


def _tried(area: str, subject: str, work: Callable[[], str], next_step: str = "") -> Line:
    """What `work` returns is good news; what it raises is a failure in its own words."""
    try:
        return Line(area=area, subject=subject, outcome=Outcome.OK, text=work())
    except AliquotError as err:
        return Line(area=area, subject=subject, outcome=Outcome.FAILED, text=str(err), next_step=next_step)
    except OSError as err:
        text = f"{err.filename}: {foreign(err.strerror)}" if err.filename else foreign(err)
        return Line(area=area, subject=subject, outcome=Outcome.FAILED, text=text, next_step=next_step)


def _warning(area: str, subject: str, text: str, next_step: str) -> Line:
    return Line(area=area, subject=subject, outcome=Outcome.WARNING, text=text, next_step=next_step)


def _hook(settings: Settings) -> Iterator[Line]:
    for name in (hook.STRICT, hook.REGION):
        yield _tried("hook", name, partial(lambda name: str(hook_library(settings, name)), name))
    if settings.extra_edits is not None:
        path = settings.extra_edits
        yield _tried("hook", "extra edits", lambda: f"{path}: {len(load_extra_edits(path).mounts)} mounts")


def _driver(settings: Settings, found: list[Inventory]) -> Iterator[Line]:
    """The GPU driver; what it knows is appended to `found`."""
    library = find_library(settings.nvml_library, settings.driver_root, settings.host_prefix)

    def ask() -> str:
        with Nvml(library) as nvml:
            found.append(read_inventory(nvml))
        return f"version {found[0].driver_version or 'unknown'}, {len(found[0].cards)} card(s)"

    yield _tried("driver", "NVML", ask)
    if not found:
        return
    inventory = found[0]
    for bad in inventory.bad:
        yield Line(area="driver", subject=f"card {bad.uuid or bad.index}", outcome=Outcome.FAILED, text=bad.reason)
    if not inventory.cards:
        yield Line(
            area="driver",
            subject="cards",
            outcome=Outcome.FAILED,
            text="the driver knows no card that can be used",
            next_step="see `nvidia-smi -L` and whether another driver (vfio) has bound them",
        )
    roots = Roots(driver_root=str(settings.driver_root), host_prefix=settings.host_prefix)
    yield _tried("driver", "files for containers", lambda: _files(roots, inventory))


def _files(roots: Roots, inventory: Inventory) -> str:
    """Everything that edits need of the driver is there; the hook's own files are put there by the start."""
    with tempfile.NamedTemporaryFile("w", suffix="-aliquot") as preload:
        preload.write(PRELOAD_CONTENT)
        preload.flush()
        files = discover(
            roots,
            [CardAddress(uuid=card.uuid, minor=card.minor) for card in inventory.cards if card.minor is not None],
            hook_library=preload.name,
            preload_file=preload.name,
            run_dir=names.DEFAULT_RUN_DIR,
        )
    return f"{len(files.libraries)} libraries of {files.version}, {len(files.binaries)} programs, all device nodes"


def _cards(settings: Settings, inventory: Inventory, features: Features | None) -> Iterator[Line]:
    for card in inventory.cards:
        if features is None:
            text = f"{card.name}: how it is offered depends on the API server, which could not be asked"
            yield _warning("offer", card.uuid, text, "see the lines about the API server")
            continue
        choice = choose_layout(card, settings.config.card(card.uuid, card.name), features)
        slots = f", {len(choice.layout.slots)} slots" if choice.layout.slots else ""
        yield Line(
            area="offer",
            subject=card.uuid,
            outcome=Outcome.OK,
            text=f"{card.name}: {choice.layout.mode.value}{slots} ({choice.reason})",
        )
    for selector in settings.config.unmatched([(card.uuid, card.name) for card in inventory.cards]):
        yield _warning(
            "offer", selector, "the configuration names a card that is not here", f"see {settings.config_file}"
        )


def _kubelet(settings: Settings) -> Iterator[Line]:
    step = "start kubelet, or give its --root-dir as --kubelet-root"
    yield _tried("kubelet", "registration directory", lambda: _writable(settings.registry_dir), step)
    yield _tried("kubelet", "plugin directory", lambda: _creatable(settings.plugin_dir), step)
    yield _tried(
        "kubelet",
        "socket paths",
        lambda: str(socket_paths(settings.plugin_dir, settings.registry_dir, settings.pod_uid).registration),
    )


def _directories(settings: Settings) -> Iterator[Line]:
    step = "run as root, or give another directory; host and pod must see it at the same path"
    for subject, path in (("CDI", settings.cdi_dir), ("state", settings.state_dir), ("run", settings.run_dir)):
        yield _tried("directory", subject, partial(_creatable, path), step)
    if settings.cdi_dir.is_dir():
        for finding in check_cdi(settings.cdi_dir, host_prefix=settings.host_prefix):
            yield Line(area="CDI", subject=finding.subject, outcome=Outcome(finding.state.value), text=finding.text)
    checkpoint = settings.state_dir / "checkpoint.json"
    if checkpoint.exists():
        yield _tried(
            "directory",
            "checkpoint",
            lambda: f"{len(look(checkpoint).claims)} claims are held",
            "start the driver: it keeps the damaged file aside and recovers what lies on the node",
        )


def _api(settings: Settings, found: list[Features]) -> Iterator[Line]:
    """The API server, what it keeps and what we may; what it keeps is appended to `found`."""
    try:
        kube = Kube.load(settings.kubeconfig, user_agent="aliquot-dra-driver")
    except SettingsError as err:
        yield Line(area="api server", subject="credentials", outcome=Outcome.FAILED, text=str(err))
        return
    version = _tried(
        "api server", "version", lambda: f"{kube.get(paths.VERSION, ServerVersion).git_version} at {kube.host}"
    )
    yield version
    if version.outcome is Outcome.FAILED:
        yield _warning("api server", "fields and rights", "could not be asked for", "first see that it answers")
        return
    node: list[Node] = []
    yield _tried("api server", f"node {settings.node_name}", lambda: _node(kube, settings.node_name, node))
    for one in node:
        kubelet = parse_version(one.status.node_info.kubelet_version)
        if kubelet is not None and kubelet < OLDEST_KUBELET:
            yield _warning(
                "kubelet",
                "version",
                f"{one.status.node_info.kubelet_version} can lose the connection to an idle plugin",
                "upgrade to 1.34.2 or later",
            )

    def ask() -> str:
        found.append(probe(kube, node_name=settings.node_name))
        return "asked by dry run"

    yield _tried("api server", "ResourceSlices", ask)
    for features in found:
        yield from _fields(features)
    for verb, group, resource, why, needed in RIGHTS:
        yield _right(kube, verb, group, resource, why, needed=needed)


def _fields(features: Features) -> Iterator[Line]:
    for subject, kept, gate, without in (
        ("shares", features.consumable_capacity, "DRAConsumableCapacity", "cards are cut into slots"),
        ("taints", features.taints, "DRADeviceTaints", "a card that fails while it is held is not marked"),
    ):
        if kept is Kept.YES:
            yield Line(area="api server", subject=subject, outcome=Outcome.OK, text="kept")
        else:
            step = f"switch on feature gate {gate} on API server, scheduler and kubelet, or upgrade to 1.36"
            yield _warning("api server", subject, f"{kept.value}: {without}", step)
    if features.consumable_capacity is Kept.YES:
        for defect in defects_of(features.server_version, frozenset({"shares"})):
            yield _warning("api server", defect.issue, defect.effect, "upgrade the control plane by a patch release")


def _node(kube: Kube, name: str, found: list[Node]) -> str:
    found.append(kube.get(paths.node(name), Node))
    return f"UID {found[0].metadata.uid}"


def _right(kube: Kube, verb: str, group: str, resource: str, why: str, *, needed: bool) -> Line:
    subject = f"may {verb} {resource}"
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {"verb": verb, "group": group, "resource": resource}},
    }
    try:
        answer = kube.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
    except AliquotError as err:
        return Line(area="rights", subject=subject, outcome=Outcome.FAILED, text=str(err))
    if answer.get("status", {}).get("allowed"):
        return Line(area="rights", subject=subject, outcome=Outcome.OK, text="yes")
    step = f'our role needs apiGroups ["{group}"], resources ["{resource}"], verbs ["{verb}"]'
    outcome = Outcome.FAILED if needed else Outcome.WARNING
    return Line(area="rights", subject=subject, outcome=outcome, text=f"no; needed to {why}", next_step=step)


def _writable(path: Path) -> str:
    """`path` when it is a directory that we can write in; tried with a file that is gone again at once."""
    if not path.is_dir():
        raise SettingsError(f"{path} is not there" if not path.exists() else f"{path} is no directory")
    try:
        with tempfile.TemporaryFile(dir=path):
            return str(path)
    except OSError as err:
        raise SettingsError(f"{path} cannot be written: {foreign(err.strerror)}") from err


def _creatable(path: Path) -> str:
    """`path` when it is such a directory, or the nearest one above it that is there."""
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    _writable(there)
    return str(path) if there == path else f"{path} (will be made)"
