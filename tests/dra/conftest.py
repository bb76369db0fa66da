# SPDX-License-Identifier: Apache-2.0
"""What the tests of the DRA door share: cards, offers and claims as plain values."""

from __future__ import annotations

import itertools
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import structlog

from aliquot.api import names
from aliquot.dra.config import NodeConfig
from aliquot.dra.devices import offer
from aliquot.dra.layout import Features, Kept, choose_layout
from aliquot.kube.objects import ResourceClaim
from aliquot.node.inventory import Card, Inventory, MemorySource

sys.path.insert(0, str(Path(__file__).parent))
import dra_rig

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
UUIDS = [f"GPU-{letter * 8}-0000-4000-8000-00000000000{letter}" for letter in "abcdef"]
POOL = "n1/gpu"
SHARES = Features(consumable_capacity=Kept.YES, taints=Kept.YES, counters=Kept.YES, server_version="v1.36.3")
NO_SHARES = Features(
    consumable_capacity=Kept.DROPPED, taints=Kept.DROPPED, counters=Kept.DROPPED, server_version="v1.34.4"
)


def make_card(number: int = 0, **changes) -> Card:
    fields = {
        "uuid": UUIDS[number] if number < len(UUIDS) else f"GPU-{number:08x}-0000-4000-8000-000000000000",
        "index": number,
        "minor": number,
        "name": "NVIDIA-Fake24G",
        "serial": None,
        "bus_id": f"0000:{number + 1:02x}:00.0",
        "pci_root": "pci0000:00",
        "numa_node": 0,
        "memory_bytes": 24 * GIB,
        "memory_source": MemorySource.NVML,
        "reserved_bytes": None,
        "compute_capability": (8, 6),
        "architecture": "Ampere",
        "brand": "Nvidia",
        "multiprocessors": 84,
        "ecc": False,
        "mig_capable": False,
        "mig_enabled": False,
        "mig": (),
    }
    return Card(**(fields | changes))


def make_inventory(*cards: Card, **changes) -> Inventory:
    fields = {"cards": cards, "driver_version": "570.195.03", "cuda_version": (12, 8)}
    return Inventory(**(fields | changes))


def make_offer(*cards: Card, config=None, features=SHARES, held=None, sick=None):
    config = config or NodeConfig()
    return offer(
        make_inventory(*cards),
        lambda card: config.card(card.uuid, card.name),
        lambda card, settings: choose_layout(card, settings, features, (held or {}).get(card.uuid)),
        sick=sick,
    )


def make_result(device: str, *, request="gpu", share=None, pool=POOL, driver=names.DRIVER, admin=None, **consumed):
    out = {"request": request, "driver": driver, "pool": pool, "device": device}
    if share is not None:
        out["shareID"] = share
    if admin is not None:
        out["adminAccess"] = admin
    if consumed:
        out["consumedCapacity"] = {key: str(value) for key, value in consumed.items()}
    return out


def make_claim(uid: str, *results, name="c", namespace="t", config=(), **metadata) -> dict:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": namespace, "uid": uid, **metadata},
        "spec": {},
        "status": {
            "allocation": {"devices": {"results": list(results), "config": list(config)}},
            "reservedFor": [{"resource": "pods", "name": "p", "uid": "p"}],
        },
    }


def decoded(claim: dict) -> ResourceClaim:
    return msgspec.json.decode(msgspec.json.encode(claim), type=ResourceClaim)


@pytest.fixture(scope="session")
def make() -> SimpleNamespace:
    """Builders of plain values: `make.card()`, `make.offer(card, …)`, `make.claim(uid, result, …)` and so on."""
    numbers = itertools.count(1)
    return SimpleNamespace(
        card=make_card,
        inventory=make_inventory,
        offer=make_offer,
        result=make_result,
        claim=make_claim,
        decoded=decoded,
        uid=lambda: str(uuid.UUID(int=next(numbers))),
        pool=POOL,
        shares=SHARES,
        no_shares=NO_SHARES,
        uuids=UUIDS,
        gib=GIB,
    )


@pytest.fixture
def rig(as_root, tmp_path_factory, control_plane, new_namespace, make, request):
    """One node of a real API server: `rig.cluster`, `rig.folders`, `rig.kubelet`, `rig.start()`."""
    if not (ROOT / "build/hook/libaliquot-region.so").exists():
        pytest.skip("the region library is not built: make hook")
    return _rig(tmp_path_factory, control_plane, new_namespace(control_plane), make, request)


@pytest.fixture
def rig_on(as_root, tmp_path_factory, control_plane_of, new_namespace, make, request):
    """`rig_on(minor="1.34")`: like `rig` at another control plane."""

    def on(**fields):
        plane = control_plane_of(**fields)
        return _rig(tmp_path_factory, plane, new_namespace(plane), make, request)

    return on


def _rig(tmp_path_factory, plane, namespace, make, request):
    folders = dra_rig.NodeFolders(tmp_path_factory.mktemp("node"), namespace, plane.kubeconfig)
    request.addfinalizer(folders.close)
    cluster = dra_rig.Cluster(plane.api, namespace, namespace)
    cluster.add_node()
    kubelet = dra_rig.Kubelet(folders)
    request.addfinalizer(kubelet.close)
    inventory = make_inventory(make_card(0), make_card(1))
    running = []

    def start(*more, inventory=inventory, steps=None):
        daemon = dra_rig.Daemon(folders, inventory, *more, steps=steps)
        running.append(daemon)
        return daemon.start()

    def stop():
        for daemon in reversed(running):
            daemon.stop()

    request.addfinalizer(stop)
    return SimpleNamespace(
        plane=plane, cluster=cluster, folders=folders, kubelet=kubelet, start=start, inventory=inventory, make=make
    )


@pytest.fixture
def log_lines():
    """What this process logged since, as `log_lines()`: dictionaries with `event` and `log_level`."""
    structlog.reset_defaults()
    with structlog.testing.capture_logs() as lines:
        yield lambda: list(lines)


@pytest.fixture
def proxied(rig):
    """The rig's node with a fault proxy between it and its API server: `proxied.set(Rule(...))`."""
    from aliquot.e2e.faults import FaultProxy  # noqa: PLC0415 - starts a process

    with FaultProxy(rig.plane) as proxy:
        rig.folders.kubeconfig = proxy.kubeconfig_for("admin-through-proxy", ["system:masters"])
        yield proxy
