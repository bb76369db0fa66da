# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of the driver, kubelet and containerd while pods come and go: what was asked for happens all the same."""

from __future__ import annotations

import os
import signal

import pytest

from aliquot.e2e import install
from aliquot.e2e.api import eventually
from aliquot.e2e.objects import claim_template, from_template, pod, share

pytestmark = [pytest.mark.cluster, pytest.mark.node, pytest.mark.slow, pytest.mark.timeout(420)]

SIZE = "10Gi"


def kill_driver(local, node):
    os.kill(install.driver_pid(local, node), signal.SIGKILL)


def kill_kubelet(local, node):
    local.node(node).kubelet.stop()
    local.node(node).kubelet.start()


def kill_containerd(local, node):
    local.node(node).containerd.stop()
    local.node(node).path("/run/containerd/containerd.sock").unlink(missing_ok=True)
    local.node(node).start_containerd()
    local.node(node).wait_containerd()


KILLS = {"driver": kill_driver, "kubelet": kill_kubelet, "containerd": kill_containerd}


def new_pod(node):
    """One that is being started when something is killed: kubelet fails a container whose start was cut off, so it
    has to be one that is restarted."""
    return pod("starts", claims={"gpu": from_template("ten")}, node=node, restart="Always")


def grants_of(local, node, uid):
    found = local.node(node).path("/run/aliquot/grants").glob("*")
    return [p.name for p in found if uid in p.name]


@pytest.mark.parametrize("part", list(KILLS))
def test_kill_between_pods_that_come_and_go(local, stage, part):
    """A pod that runs is not harmed, one that starts starts, one that ends gives everything back."""
    node = local.nodes[0]
    stage.create(claim_template("ten", share(SIZE)), pod("runs", claims={"gpu": from_template("ten")}, node=node))
    stage.running("runs")
    stage.hold("runs", "9Gi")
    stage.create(pod("ends", claims={"gpu": from_template("ten")}, node=node))
    stage.running("ends")
    (ending,) = stage.allocations("ends")
    (kept,) = stage.allocations("runs")

    stage.create(new_pod(node))
    stage.delete_pod("ends", wait=False)
    KILLS[part](local, node)

    stage.running("starts", timeout_s=200)
    local.wait_gone(stage.namespace, "ends", timeout_s=200)
    eventually(lambda: not grants_of(local, node, ending.claim_uid), 120, "end of the ended pod's grant")

    # What ran holds what it held, and its limit.
    assert grants_of(local, node, kept.claim_uid)
    assert stage.allocate("runs", "4Gi")[0]["result"] == "CUDA_ERROR_OUT_OF_MEMORY"
    (given,) = stage.allocations("starts")
    assert stage.show("starts")[0]["total"] == given.memory_bytes
    # kubelet deletes the node's slices when it starts; they have to be there again.
    eventually(lambda: install.devices(local, node), 60, "the node's devices again")
    local.wait_nodes_ready()
    install.wait_ready(local, 120)


@pytest.mark.parametrize("part", list(KILLS))
def test_kill_while_a_pod_is_prepared(local, stage, part):
    """The kill comes as soon as the pod is bound, which is when kubelet begins to ask for its claim."""
    node = local.nodes[1]
    stage.create(claim_template("ten", share(SIZE)), new_pod(node))
    eventually(lambda: local.api.get("v1", "Pod", "starts", stage.namespace)["spec"].get("nodeName"), 60, "the binding")
    KILLS[part](local, node)
    stage.running("starts", timeout_s=240)
    (given,) = stage.allocations("starts")
    assert stage.show("starts")[0]["total"] == given.memory_bytes
    assert grants_of(local, node, given.claim_uid) == [given.grant]
    stage.delete_pod("starts")
    eventually(lambda: not grants_of(local, node, given.claim_uid), 120, "end of the grant")
    local.wait_nodes_ready()
    install.wait_ready(local, 120)
