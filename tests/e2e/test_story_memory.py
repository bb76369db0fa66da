# SPDX-License-Identifier: Apache-2.0
"""Memory under races and kills: never a byte over a share, and what a killed process held is back within a second."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from aliquot.e2e.cards import card_table
from aliquot.e2e.objects import claim, claim_template, from_template, is_card, named, pod, share
from aliquot.e2e.stage import GIB

pytestmark = [pytest.mark.cluster, pytest.mark.node, pytest.mark.slow, pytest.mark.timeout(420)]

PROCESSES = 4
ALLOCATIONS = 12_500
"""Asked for by each process: with four of them in each of two containers 100,000 in all."""
LARGEST = "768Mi"
BACK_WITHIN_S = 1.0


def race(stage, jobs, seed=7):
    """Runs one racing program per (pod, tally file, limit) at once; their last lines."""

    def one(number, job):
        name, tally, limit = job
        argv = ["workload", "race", str(PROCESSES), str(ALLOCATIONS), LARGEST, str(limit), str(seed + number), tally]
        return stage.exec(name, *argv, timeout_s=300)

    with ThreadPoolExecutor(len(jobs)) as pool:
        outputs = list(pool.map(one, range(len(jobs)), jobs))
    for output in outputs:
        assert output.lines, output
        assert output.lines[-1]["broken"] == 0, output
    return [output.lines[-1] for output in outputs]


class Watcher:
    """Looks at a card from outside, as the host's driver sees it, for as long as it is open."""

    def __init__(self, node, uuid):
        self._node = node
        self._uuid = uuid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.peak_mib = 0
        self.looks = 0

    def _look(self):
        while not self._stop.wait(0.05):
            (card,) = [c for c in card_table(self._node) if c["uuid"] == self._uuid]
            self.peak_mib = max(self.peak_mib, card["used_mib"])
            self.looks += 1

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


def test_racing_processes_of_two_containers_on_one_claim_never_pass_its_limit(local, stage):
    stage.create(
        claim("team", share("6Gi")),
        *(pod(p, claims={"gpu": named("team")}, host_folder="/run/race-one") for p in ("first", "second")),
    )
    stage.running("first", "second")
    (given,) = stage.claim_allocations("team")
    limit = given.memory_bytes
    uuid = stage.show("first")[0]["uuid"]
    node = local.node(stage.node_of("first"))
    with Watcher(node, uuid) as watcher:
        answers = race(stage, [("first", "/shared/tally", limit), ("second", "/shared/tally", limit)])
    last = max(answers, key=lambda a: a["allocations"])
    assert last["allocations"] == 2 * PROCESSES * ALLOCATIONS
    assert last["refused"] > 1000, "a race that never met the limit proves nothing"
    assert last["peak"] <= limit
    assert last["peak"] > limit * 0.9, "and it came close"
    assert watcher.looks > 5
    assert watcher.peak_mib <= limit >> 20
    # Nothing is left: the whole share can be had again, less what the context takes.
    assert stage.show("second")[0]["total"] == limit
    assert stage.allocate("first", str(limit - GIB))[0]["code"] == 0


def test_racing_processes_on_two_claims_of_one_card_never_pass_either_limit(local, stage):
    card = card_table(local.node(local.nodes[0]))[0]["uuid"]
    stage.create(
        claim_template("ten", share("10Gi", selectors=[is_card(card)])),
        *(
            pod(p, claims={"gpu": from_template("ten")}, node=local.nodes[0], host_folder="/run/race-two")
            for p in ("first", "second")
        ),
    )
    stage.running("first", "second")
    (first,), (second,) = stage.allocations("first"), stage.allocations("second")
    uuids = {name: stage.show(name)[0]["uuid"] for name in ("first", "second")}
    assert len(set(uuids.values())) == 1, "both have to be on one card"
    node = local.node(local.nodes[0])
    with Watcher(node, uuids["first"]) as watcher:
        answers = race(
            stage,
            [("first", "/shared/first", first.memory_bytes), ("second", "/shared/second", second.memory_bytes)],
        )
    for answer, given in zip(answers, (first, second), strict=True):
        assert answer["allocations"] == PROCESSES * ALLOCATIONS
        assert answer["refused"] > 500
        assert given.memory_bytes * 0.9 < answer["peak"] <= given.memory_bytes
    assert watcher.looks > 5
    assert watcher.peak_mib <= (first.memory_bytes + second.memory_bytes) >> 20


def test_killed_process_gives_its_share_back_within_a_second_to_its_own_container(stage):
    stage.create(claim_template("ten", share("10Gi")), pod("only", claims={"gpu": from_template("ten")}))
    stage.running("only")
    holder = stage.hold("only", "9Gi")
    assert stage.allocate("only", "9Gi")[0]["result"] == "CUDA_ERROR_OUT_OF_MEMORY"
    stage.exec("only", "kill", "-9", str(holder))
    (answer,) = [a for a in stage.exec("only", "workload", "wait-free", "9Gi", "5000").lines if a["event"] == "waited"]
    assert answer["code"] == 0
    assert answer["ms"] <= BACK_WITHIN_S * 1000


def test_killed_process_gives_its_share_back_within_a_second_to_another_container(stage):
    """Neighbours cannot see each other's processes there: only the node's daemon can tell that one is dead."""
    stage.create(claim("team", share("10Gi")), *(pod(p, claims={"gpu": named("team")}) for p in ("first", "second")))
    stage.running("first", "second")
    holder = stage.hold("first", "9Gi")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stage.exec, "second", "workload", "wait-free", "9Gi", "20000")
        # It has to be refused for a while first, so the wait is under way when the holder dies.
        assert stage.allocate("second", "9Gi")[0]["result"] == "CUDA_ERROR_OUT_OF_MEMORY"
        assert not waiting.done()
        stage.exec("first", "kill", "-9", str(holder))
        killed = time.monotonic()
        output = waiting.result()
    took = time.monotonic() - killed
    assert output.lines[-1]["code"] == 0, output
    assert took <= BACK_WITHIN_S


def test_killed_container_gives_its_share_back_within_a_second(stage):
    """The same for a whole container, whose processes the kernel ends one by one."""
    stage.create(claim("team", share("10Gi")), *(pod(p, claims={"gpu": named("team")}) for p in ("first", "second")))
    stage.running("first", "second")
    for size in ("3Gi", "3Gi", "3Gi"):
        stage.hold("first", size)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stage.exec, "second", "workload", "wait-free", "9Gi", "20000")
        assert stage.allocate("second", "9Gi")[0]["result"] == "CUDA_ERROR_OUT_OF_MEMORY"
        # PID 1 of a container ignores signals from inside it, so its children are killed all at once instead.
        stage.exec("first", "sh", "-c", "kill -9 $(pidof workload | tr ' ' '\\n' | grep -vx 1)")
        killed = time.monotonic()
        output = waiting.result()
    took = time.monotonic() - killed
    assert output.lines[-1]["code"] == 0, output
    assert took <= BACK_WITHIN_S
