# SPDX-License-Identifier: Apache-2.0
"""What Prometheus is told."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from aliquot.node.checkpoint import Checkpoint
from aliquot.node.health import Event, Health, after_event
from aliquot.node.inventory import BadCard, Card, Inventory, MemorySource
from aliquot.node.metrics import NodeCollector, checkpoint_histogram
from aliquot.node.reaper import Reaper
from aliquot.node.regions import Regions

CARD = Card(
    uuid="GPU-a",
    index=0,
    minor=3,
    name="NVIDIA Fäke 24G",
    serial=None,
    bus_id="0000:01:00.0",
    pci_root=None,
    numa_node=0,
    memory_bytes=24 << 30,
    memory_source=MemorySource.NVML,
    reserved_bytes=None,
    compute_capability=(8, 0),
    architecture="Ampere",
    brand="Nvidia",
    multiprocessors=108,
    ecc=False,
    mig_capable=False,
    mig_enabled=False,
    mig=(),
)
INVENTORY = Inventory(
    cards=(CARD,),
    bad=(BadCard(index=1, uuid=None, bus_id=None, reason="GPU is lost"),),
    driver_version="550.54.15",
    cuda_version=(12, 4),
)


class Node:
    def __init__(self, regions: Regions) -> None:
        self.registry = CollectorRegistry()
        self.inventory: Inventory | None = INVENTORY
        self.health = Health()
        self.reaper = Reaper(regions)
        self.registry.register(
            NodeCollector(
                inventory=lambda: self.inventory,
                health=lambda: self.health,
                regions=regions,
                reaper=self.reaper,
                claims=lambda: 7,
                clock_ns=lambda: 5_000_000_000,
            )
        )

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


@pytest.fixture
def node(regions: Regions):
    one = Node(regions)
    yield one
    one.reaper.stop()


def test_cards_are_told_with_their_health(node: Node):
    text = generate_latest(node.registry).decode()
    assert 'aliquot_card_info{architecture="Ampere",bus_id="0000:01:00.0",cuda="12.4",driver="550.54.15"' in text
    assert node.value("aliquot_card_memory_bytes", uuid="GPU-a") == 24 << 30
    assert node.value("aliquot_card_healthy", uuid="GPU-a") == 1
    assert node.value("aliquot_cards_unreadable") == 1
    node.health = after_event(Health(), Event("GPU-a", 79), CARD)
    assert node.value("aliquot_card_healthy", uuid="GPU-a") == 0


def test_without_a_driver_the_rest_is_still_told(node: Node):
    node.inventory = None
    assert node.value("aliquot_card_memory_bytes", uuid="GPU-a") is None
    assert node.value("aliquot_checkpoint_claims") == 7


def test_a_grant_is_told_while_it_lives(node: Node, regions: Regions, grant, owner):
    regions.create(grant())
    one = owner(regions.usage_file("c-1-gpu-0"))
    one.do("reserve 1048576")
    labels = {"grant": "c-1-gpu-0", "uuid": "GPU-a"}
    assert node.value("aliquot_grant_memory_used_bytes", **labels) == 1 << 20
    assert node.value("aliquot_grant_memory_limit_bytes", **labels) == 1 << 30
    assert node.value("aliquot_grant_core_limit_ratio", **labels) == 0.5
    assert node.value("aliquot_grant_processes", **labels) == 1
    assert node.value("aliquot_grant_region_readable", **labels) == 1
    one.end()
    node.reaper.round()
    assert node.value("aliquot_grant_memory_used_bytes", **labels) == 0
    assert node.value("aliquot_reaper_reaped_total") == 1
    assert node.value("aliquot_reaper_rounds_total") == 1
    regions.remove("c-1-gpu-0")
    assert node.value("aliquot_grant_memory_used_bytes", **labels) is None


def test_b213_a_damaged_region_costs_only_its_own_series(node: Node, regions: Regions, grant):
    for n in range(4):
        regions.create(grant(f"c-{n}-gpu-0"))
    os.truncate(regions.usage_file("c-0-gpu-0"), 0)
    os.truncate(regions.usage_file("c-1-gpu-0"), 804681)
    regions.usage_file("c-2-gpu-0").write_bytes(b"\xff" * regions.usage_file("c-2-gpu-0").stat().st_size)

    def readable(n: int) -> float | None:
        return node.value("aliquot_grant_region_readable", grant=f"c-{n}-gpu-0", uuid="GPU-a")

    assert [readable(n) for n in range(4)] == [0, 1, 0, 1]
    assert node.value("aliquot_grant_memory_used_bytes", grant="c-0-gpu-0", uuid="GPU-a") is None
    node.reaper.round()
    troubles = {"finding": "not a usage file of a version we read"}
    assert node.value("aliquot_region_troubles_total", **troubles) == 2


def test_b215_one_part_that_fails_leaves_the_others(node: Node):
    def broken() -> Health:
        raise RuntimeError("no idea")

    node.registry.unregister(next(iter(node.registry._collector_to_names)))
    node.registry.register(
        NodeCollector(inventory=lambda: INVENTORY, health=broken, reaper=node.reaper, claims=lambda: 2)
    )
    assert node.value("aliquot_checkpoint_claims") == 2
    assert node.value("aliquot_reaper_rounds_total") == 0


def test_checkpoint_writes_are_timed(tmp_path: Path):
    registry = CollectorRegistry()
    histogram = checkpoint_histogram(registry)
    checkpoint = Checkpoint(tmp_path / "checkpoint.json", dict, boot_id="b", observe=histogram.observe)
    checkpoint.put("u1", {})
    checkpoint.put("u2", {})
    assert registry.get_sample_value("aliquot_checkpoint_write_seconds_count") == 2
    checkpoint.close()


def test_sixty_four_grants_are_scraped_within_the_budget(node: Node, regions: Regions, grant):
    for n in range(64):
        regions.create(grant(f"c-{n}-gpu-0", card_uuid=f"GPU-{n % 8}"))
    generate_latest(node.registry)
    took = []
    for _ in range(5):
        started = time.process_time()
        generate_latest(node.registry)
        took.append(time.process_time() - started)
    # Budget 20 ms (design.md 7); the processor time of the best of five, for a machine that is shared.
    assert min(took) < 0.02, took
