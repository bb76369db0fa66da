# SPDX-License-Identifier: Apache-2.0
"""What the tests of the DRA door share: cards, offers and claims as plain values."""

from __future__ import annotations

import itertools
import uuid
from types import SimpleNamespace

import msgspec
import pytest

from aliquot.api import names
from aliquot.dra.config import NodeConfig
from aliquot.dra.devices import offer
from aliquot.dra.layout import Features, Kept, choose_layout
from aliquot.kube.objects import ResourceClaim
from aliquot.node.inventory import Card, Inventory, MemorySource

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
