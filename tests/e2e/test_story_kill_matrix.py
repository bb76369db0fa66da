# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of the driver at every step of preparing and unpreparing, with kubelet on the other side."""

from __future__ import annotations

import itertools

import pytest

from aliquot.dra.effects import MAKE_STEPS, UNMAKE_STEPS
from aliquot.dra.engine import PREPARE_STEPS, UNPREPARE_STEPS
from aliquot.e2e import cards, install
from aliquot.e2e.api import eventually
from aliquot.e2e.local.cluster import LocalCluster, LocalOptions
from aliquot.e2e.objects import claim_template, from_template, pod, share
from aliquot.node.checkpoint import APPEND_STEPS as CHECKPOINT_STEPS

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.node,
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.timeout(3600),
]

NODE = "node-a"
MOST_STEPS = 60
"""More than there are; reaching it means that steps are counted wrongly."""


@pytest.fixture(scope="module")
def cluster(variant, images):
    options = LocalOptions(minor=variant.minor, nodes=(NODE,), feature_gates=variant.gates)
    settings = install.Settings(node_config={"defaults": {"mode": "auto", "slots": 2}}, step_killer=True)
    with LocalCluster(options, images, prepare_node=cards.furnish) as running:
        install.install(running, settings)
        yield running


class Killer:
    """Orders the death of the node's driver at a step, and tells which step it was."""

    def __init__(self, cluster):
        self._cluster = cluster
        at = cluster.node(NODE).path
        self._order, self._done = at("/run/aliquot/die-at"), at("/run/aliquot/died-at")

    def order(self, number):
        self._done.unlink(missing_ok=True)
        half = self._order.with_name(".die-at")
        half.write_text(str(number))
        half.rename(self._order)

    def took_place(self):
        """Name of the step, or None where that many steps do not exist; clears the order."""
        self._order.unlink(missing_ok=True)
        return self._done.read_text() if self._done.exists() else None

    def renew(self):
        """A fresh pod of the driver, so that Kubernetes' back-off for crashing containers does not add up."""
        name = install.driver_pod(self._cluster, NODE)["metadata"]["name"]
        self._cluster.api.delete("v1", "Pod", name, install.NAMESPACE, grace_s=0)
        eventually(
            lambda: self._cluster.api.find("v1", "Pod", name, install.NAMESPACE) is None, 60, "end of the old driver"
        )
        install.wait_ready(self._cluster, 90)


@pytest.fixture
def killer(cluster):
    return Killer(cluster)


def left_of(cluster, given):
    at = cluster.node(NODE).path
    folders = ("/run/aliquot/grants", "/run/aliquot/usage", "/var/run/cdi")
    return [p.name for f in folders for p in at(f).glob("*") if given.claim_uid in p.name]


def test_killed_at_every_step_of_preparing(cluster, stage, killer):
    stage.create(claim_template("ten", share("10Gi")))
    steps = []
    for number in itertools.count(1):
        assert number < MOST_STEPS
        killer.order(number)
        name = f"p{number}"
        stage.create(pod(name, claims={"gpu": from_template("ten")}))
        stage.running(name, timeout_s=240)
        step = killer.took_place()
        (given,) = stage.allocations(name)
        assert stage.show(name)[0]["total"] == given.memory_bytes, step
        if step is not None:
            steps.append(step)
            killer.renew()
        stage.delete_pod(name)
        eventually(lambda given=given: left_of(cluster, given) == [], 120, f"an empty node after a kill at {step}")
        if step is None:
            break
    checkpoint = {f"checkpoint: {step}" for step in CHECKPOINT_STEPS}
    assert {*PREPARE_STEPS, *MAKE_STEPS, *checkpoint} <= set(steps)


def test_killed_at_every_step_of_unpreparing(cluster, stage, killer):
    stage.create(claim_template("ten", share("10Gi")))
    steps = []
    for number in itertools.count(1):
        assert number < MOST_STEPS
        name = f"p{number}"
        stage.create(pod(name, claims={"gpu": from_template("ten")}))
        stage.running(name, timeout_s=240)
        (given,) = stage.allocations(name)
        killer.order(number)
        cluster.api.delete("v1", "Pod", name, stage.namespace)
        cluster.wait_gone(stage.namespace, name, timeout_s=240)
        step = killer.took_place()
        eventually(lambda given=given: left_of(cluster, given) == [], 120, f"an empty node after a kill at {step}")
        if step is None:
            break
        steps.append(step)
        killer.renew()
    checkpoint = {f"checkpoint: {step}" for step in CHECKPOINT_STEPS}
    assert {*UNPREPARE_STEPS, *UNMAKE_STEPS, *checkpoint} <= set(steps)
