# SPDX-License-Identifier: Apache-2.0
"""The daemon put together: what it is made of, in which order it starts, what runs, and how it ends.

Never decides anything. Order of the start: what can only fail for good (settings, state, hook) comes first and ends
the process; then everything that may have to wait is started at once and waited for side by side: driver and cards,
API server, kubelet. Invariants: /readyz says yes only while kubelet has taken us, the slices are stored and there is
a card; and stopping never deletes slices nor leaves a registration socket behind (dra.md 1.6).
"""

from __future__ import annotations

import importlib.metadata
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

import grpc

from aliquot import hook
from aliquot.api import names
from aliquot.api.errors import AliquotError, ConflictError, SettingsError
from aliquot.api.log import get_logger
from aliquot.cdi.driver_files import Roots
from aliquot.cdi.load import load_extra_edits
from aliquot.cdi.model import EMPTY_EDITS, ContainerEdits
from aliquot.cdi.store import SpecStore
from aliquot.dra import rpc
from aliquot.dra.cards import CardWatch, View, find_library
from aliquot.dra.effects import DriverSource, Effects, Sidecars, Steps
from aliquot.dra.engine import Engine
from aliquot.dra.health import MAX_STREAMS, HealthBoard
from aliquot.dra.metrics import Metrics
from aliquot.dra.offering import Offering
from aliquot.dra.probe import Prober
from aliquot.dra.publish import Publisher
from aliquot.dra.reconcile import Reconciler
from aliquot.dra.records import ClaimRecord, outdated
from aliquot.dra.registration import Registration
from aliquot.dra.restore import Rebuild, recover, sweep
from aliquot.dra.serving import SocketServer
from aliquot.dra.settings import FileSettingsError, Settings
from aliquot.dra.sockets import InstanceLock, remove_stale, socket_paths
from aliquot.dra.sync import Author
from aliquot.kube.client import Kube
from aliquot.kube.events import EventRecorder, Reference
from aliquot.node.charging import Usage
from aliquot.node.checkpoint import Checkpoint, Source, read_boot_id
from aliquot.node.endpoint import Endpoint
from aliquot.node.health import Health
from aliquot.node.health_watch import HealthWatch
from aliquot.node.hook_files import HookFiles, InstalledHook
from aliquot.node.metrics import NodeCollector, checkpoint_histogram
from aliquot.node.nvml import Nvml
from aliquot.node.ownership import CardOwnership
from aliquot.node.reaper import Reaper
from aliquot.node.regions import Regions
from aliquot.node.utilization import BoundedUtilization, ProcessUtilization

log = get_logger(__name__)

T = TypeVar("T")
P = TypeVar("P")

DOOR: Final = "aliquot-dra-driver"
"""Our name on the cards that we offer; no other door of the node offers them at the same time."""
CALL_WORKERS: Final = 32
"""Calls of kubelet worked on at once; threads are made as they are needed."""
CLAIM_WORKERS: Final = 16
"""Further claims of calls that bring several."""
TICK_S: Final = 2.0
"""Between two looks at kubelet's directories and our sockets."""
PRUNE_AFTER_S: Final = 600.0
"""Until builds of the hook that no spec names any more are removed; by then an update's other instance is gone."""
_NAMED: Final = 5
"""Claims named in one event."""
GRACE_S: Final = 10.0
"""For calls under way when we are told to end; below the 15 s after which our manifest has Kubernetes kill."""


def program_version() -> str:
    """Version of the installed distribution."""
    try:
        return importlib.metadata.version("aliquot")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


class Driver:
    """One instance. `run` serves until `stop` is set."""

    def __init__(self, settings: Settings, *, steps: Steps = lambda _step: None, proc: Path = Path("/proc")) -> None:
        """Everything that fails for good fails here.

        Raises `SettingsError`, `FileSettingsError`, `NewerCheckpointError`, `ConflictError` (another instance holds
        the state), `HardwareError` or `InternalError` of a disk that does not do its part.
        """
        self.settings = settings
        self.metrics = Metrics(version=program_version())
        self.stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lock: InstanceLock | None = None
        self._told_version: str | None = None
        """Of the GPU driver, when claims of another one were last spoken of."""
        self._wait_problem = "kubelet's directories have not been looked at yet"
        boot_id = self._boot_id = read_boot_id(proc)
        self.endpoint = (
            Endpoint(
                settings.http_address or ("::" if socket.has_dualstack_ipv6() else ""),
                settings.http_port,
                self.metrics.registry,
                healthy={"driver": lambda: _first(self.not_alive())},
                ready={"driver": lambda: _first(self.not_ready())},
            )
            if settings.http_port
            else None
        )
        extra = _of_a_file(load_extra_edits, settings.extra_edits) if settings.extra_edits else EMPTY_EDITS
        self._hooks = HookFiles(settings.state_dir)
        self.hook = self._hooks.install(hook_library(settings, hook.STRICT))
        self.regions = Regions(settings.run_dir, hook_library(settings, hook.REGION))
        store = SpecStore(settings.cdi_dir)
        store.prepare()
        self.checkpoint: Checkpoint[ClaimRecord] = Checkpoint(
            settings.state_dir / "checkpoint.json",
            ClaimRecord,
            boot_id=boot_id,
            steps=lambda step: steps(f"checkpoint: {step}"),
            observe=checkpoint_histogram(self.metrics.registry).observe,
        )
        self.kube = _of_a_file(
            lambda path: Kube.load(path, user_agent=f"aliquot-dra-driver/{program_version()}"), settings.kubeconfig
        )
        self.events = EventRecorder(self.kube, component=names.DRIVER, instance=settings.node_name)
        self.offering = Offering(
            config=settings.config,
            node_name=settings.node_name,
            pool=settings.pool,
            records=self.checkpoint.records,
            metrics=self.metrics,
            changed=self._offer_changed,
            announce=self._announce,
        )
        self.effects = Effects(
            driver=driver_source(settings, self.hook, extra),
            regions=self.regions,
            store=store,
            sidecars=Sidecars(settings.run_dir),
            card=self.offering.card,
            steps=steps,
        )
        self.engine = Engine(
            kube=self.kube,
            checkpoint=self.checkpoint,
            effects=self.effects,
            offered=self.offering.current,
            pool=settings.pool,
            boot_id=boot_id,
            stop=self.stop,
            released=self.offering.released,
            observe=self.metrics.part,
            steps=steps,
        )
        self.reconciler = Reconciler(self.engine, self.metrics, boot_id=boot_id)
        self.engine.reconsider = self.reconciler.reconsider
        self.prober = Prober(self.kube, node_name=settings.node_name)
        self.publisher = Publisher(
            kube=self.kube,
            node_name=settings.node_name,
            author=Author(version=program_version(), started_ns=time.time_ns()),
            prober=self.prober,
            desired=self.offering.desired,
            metrics=self.metrics,
            probed=lambda: self.offering.set_features(self.prober.features),
            dropped=lambda text: self._announce("FieldsDropped", text, warning=True),
        )
        self._ownership = CardOwnership(settings.state_dir, DOOR)
        self.cards = CardWatch(
            library=lambda: find_library(settings.nvml_library, settings.driver_root, settings.host_prefix),
            held=self.offering.held_cards,
            changed=self.cards_changed,
            metrics=self.metrics,
            opened=self._watch_health,
            own=lambda uuid: self._ownership.acquire(uuid, in_use=self._left_on),
        )
        self.health: HealthWatch | None = None
        self.board = HealthBoard(settings.pool)
        self.sockets = socket_paths(settings.plugin_dir, settings.registry_dir, settings.pod_uid)
        self.registration = Registration(self.sockets.service)
        self._executor = ThreadPoolExecutor(max_workers=CLAIM_WORKERS, thread_name_prefix="claim")
        service = rpc.DraService(self.engine, self.metrics, self._executor)

        def add_services(server: grpc.Server) -> None:
            rpc.add_to(server, service)
            self.board.add_to(server)

        self.service_server = SocketServer(
            self.sockets.service, add_services, workers=CALL_WORKERS + MAX_STREAMS, name="dra"
        )
        self.registration_server = SocketServer(
            self.sockets.registration, self.registration.add_to, workers=2, name="registration"
        )
        self._utilization: BoundedUtilization | None = None
        self.reaper = Reaper(self.regions, proc=proc, utilization=self._usage_of)
        self.metrics.registered.set_function(lambda: float(self.registration.registered))
        self.metrics.outdated.set_function(lambda: float(len(self._outdated())))
        self.metrics.ready.set_function(lambda: float(not self.not_ready()))
        self.metrics.registry.register(
            NodeCollector(
                inventory=lambda: self.offering.view.inventory,
                health=lambda: self.health.health if self.health else Health(),
                regions=self.regions,
                reaper=self.reaper,
                claims=lambda: len(self.checkpoint.records()),
            )
        )
        self.rebuild: Rebuild | None = None

    # ---- what is wrong

    def not_alive(self) -> list[str]:
        """Why the process should be restarted; empty when it should not."""
        dead = [thread.name for thread in self._threads if not thread.is_alive()] if not self.stop.is_set() else []
        problems = [f"thread {name} has ended; restart the driver and report this with its log" for name in dead]
        return [*problems, self.cards.outdated] if self.cards.outdated else problems

    def not_ready(self) -> list[str]:
        """Why pods cannot be served yet; empty when they can."""
        problems = [
            self._wait_problem,
            self.registration.problem if not self._wait_problem else "",
            self.offering.problem(),
            self.publisher.problem,
            *self.not_alive(),
            "the driver is ending" if self.stop.is_set() else "",
        ]
        return [problem for problem in dict.fromkeys(problems) if problem]

    # ---- life

    def run(self) -> None:
        """Serve until `stop` is set; returns after calls under way have ended."""
        if self.endpoint is not None:
            self.endpoint.start()
        self.events.start()
        self._restore()
        self.reaper.start()
        self._spawn("cards", self.cards.run)
        self._spawn("publish", self.publisher.run)
        self._spawn("reconcile", self.reconciler.run)
        try:
            self._serve()
        finally:
            self._end()

    def _restore(self) -> None:
        """Make checkpoint and node agree, before anybody can call."""
        recovery = self.checkpoint.recovery
        if recovery.source is not Source.MAIN:
            found = recover(self.checkpoint, self.effects, pool=self.settings.pool, boot_id=self._boot_id)
            if found or recovery.quarantined:
                self.metrics.recoveries.inc()
                kept = ", ".join(str(path) for path in recovery.quarantined)
                self._announce(
                    "CheckpointRecovered",
                    f"the checkpoint was damaged or missing ({recovery.reason or 'no file'}); {len(found)} claims were "
                    f"recovered from what lay on the node{f'; the bad file is kept as {kept}' if kept else ''}",
                    warning=True,
                )
        sweep(self.checkpoint, self.effects)
        self.checkpoint.accept_boot()
        self.rebuild = Rebuild(self.engine)

    def _serve(self) -> None:
        """Keep both sockets served, as soon as kubelet's directories are there."""
        prune_at: float | None = time.monotonic() + PRUNE_AFTER_S
        while not self.stop.is_set():
            try:
                self._look_after_sockets()
            except AliquotError as err:
                self._wait(str(err))
                self.metrics.errors.labels("sockets").inc()
                if isinstance(err, ConflictError | SettingsError):
                    raise
            if self.rebuild is not None and self.rebuild.pending:
                if self.offering.view.inventory is not None:
                    self.rebuild.round()
            elif prune_at is not None and time.monotonic() >= prune_at:
                self._hooks.prune({self.hook.build_id})
                prune_at = None
            self.stop.wait(TICK_S)

    def _look_after_sockets(self) -> None:
        if self._lock is None:
            if not self.settings.registry_dir.is_dir():
                self._wait(
                    f"{self.settings.registry_dir} is not there; start kubelet, or give its --root-dir as "
                    "--kubelet-root"
                )
                return
            self.settings.plugin_dir.mkdir(parents=True, exist_ok=True, mode=0o750)
            self._lock = InstanceLock(self.settings.plugin_dir, alone=not self.settings.pod_uid)
            remove_stale(self.settings.plugin_dir, self.settings.registry_dir, self.sockets)
            # Kubelet dials the service as soon as it sees the registration.
            self.service_server.start()
            self.registration_server.start()
            log.info("serving", service=str(self.sockets.service), registration=str(self.sockets.registration))
        elif self.service_server.heal() | self.registration_server.heal():
            log.warning("sockets had vanished and are served again", registration=str(self.sockets.registration))
        self._wait_problem = ""

    def _wait(self, problem: str) -> None:
        if problem != self._wait_problem:
            log.warning("waiting for kubelet", reason=problem)
        self._wait_problem = problem

    def _end(self) -> None:
        log.info("ending")
        self.stop.set()
        self.publisher.wake()
        self.board.stop()
        self.registration_server.stop(1.0)
        self.service_server.stop(GRACE_S)
        self._executor.shutdown(wait=True, cancel_futures=True)
        for thread in self._threads:
            thread.join(5.0)
        if self.health is not None:
            self.health.stop()
        self.reaper.stop()
        self.events.stop()
        if self.endpoint is not None:
            self.endpoint.stop()
        self.kube.close()
        if not self.engine.turns.busy():  # a call that outlived its grace goes on until the process ends
            self.checkpoint.close()
            self._ownership.close()
        if self._lock is not None:
            self._lock.close()
        log.info("ended")

    def _spawn(self, name: str, work: Callable[[threading.Event], None]) -> None:
        thread = threading.Thread(target=work, args=(self.stop,), name=name, daemon=True)
        thread.start()
        self._threads.append(thread)  # only now: one that has not begun is not alive either

    # ---- what leads to what

    def cards_changed(self, view: View) -> None:
        """The cards, or the driver under them, are different."""
        self.offering.set_view(view)
        version = view.inventory.driver_version if view.inventory else None
        old = self._outdated()
        if not old or version == self._told_version:
            return
        self._told_version = version
        shown = ", ".join(f"{record.namespace}/{record.name} ({record.driver_version})" for record in old[:_NAMED])
        more = f" and {len(old) - _NAMED} more" if len(old) > _NAMED else ""
        text = (
            f"the GPU driver is {version} now; claims prepared before may have containers that run on with the "
            f"libraries they were started with: {shown}{more}; restart their pods"
        )
        log.warning("claims of another driver version", version=version, claims=[record.name for record in old])
        self._announce("DriverUpdated", text, warning=True)

    def _outdated(self) -> list[ClaimRecord]:
        inventory = self.offering.view.inventory
        version = inventory.driver_version if inventory else None
        return list(outdated(self.checkpoint.records(), driver_version=version, boot_id=self._boot_id).values())

    def _left_on(self, uuid: str) -> str | None:
        """What the other door left on a card that is to become ours."""
        left = self.regions.on_card(uuid)
        return f"{len(left)} share(s), {left[0]} first," if left else None

    def _watch_health(self, nvml: Nvml) -> None:
        """The driver answers: listen to what it says about its cards."""
        self.health = HealthWatch(
            nvml, lambda: self.offering.view.inventory, on_change=self._health_changed, reopened=self.cards.wake
        )
        self.health.start()
        self._utilization = BoundedUtilization(ProcessUtilization(nvml))

    def _usage_of(self, uuid: str) -> Usage | None:
        """What processes had of a card; nothing before the driver answers."""
        return self._utilization(uuid) if self._utilization else None

    def _health_changed(self, health: Health) -> None:
        faults = {uuid: fault.text or fault.kind.value for uuid, fault in health.faults.items()}
        for uuid in faults.keys() - self.offering.faults.keys():
            log.warning("card not fit for use", uuid=uuid, reason=faults[uuid])
            self._announce("CardUnhealthy", f"{uuid}: {faults[uuid]}", warning=True)
        for uuid in self.offering.faults.keys() - faults.keys():
            log.info("card fit for use again", uuid=uuid)
            self._announce("CardHealthy", f"{uuid} is fit for use again")
        self.offering.set_faults(faults)

    def _offer_changed(self) -> None:
        sick = self.offering.sick()
        self.board.update(
            {d.name: sick.get(d.card_uuid) or sick.get(d.grant_uuid, "") for d in self.offering.offer.devices}
        )
        self.publisher.changed()

    def _announce(self, reason: str, note: str, *, warning: bool = False) -> None:
        node = Reference("v1", "Node", self.settings.node_name, uid=self.settings.node_name)
        (self.events.warning if warning else self.events.normal)(node, reason, note)


def _first(problems: list[str]) -> str | None:
    return "; ".join(problems) or None


def _of_a_file(load: Callable[[P], T], path: P) -> T:
    """`load(path)`, a complaint about the file's content being one about a file."""
    try:
        return load(path)
    except SettingsError as err:
        raise FileSettingsError(str(err)) from err


def hook_library(settings: Settings, name: str) -> Path:
    """Path of one of the built libraries. Raises `FileSettingsError` when it is not there."""
    if settings.hook_dir is not None:
        path = settings.hook_dir / name
        if not path.is_file():
            raise FileSettingsError(
                f"--hook-dir {settings.hook_dir} has no {name}; give the directory of the built hook"
            )
        return path
    try:
        return hook.library(name)
    except FileNotFoundError as err:
        raise FileSettingsError(f"{err}; or give its directory as --hook-dir") from err


def driver_source(settings: Settings, installed: InstalledHook, extra_edits: ContainerEdits) -> DriverSource:
    """Where the driver's files are looked for."""
    roots = Roots(driver_root=str(settings.driver_root), host_prefix=settings.host_prefix)
    return DriverSource(roots, installed, settings.run_dir, extra_edits)
