# SPDX-License-Identifier: Apache-2.0
"""Bad claims, many pods at once, an API server on a bad day: clear words, and nobody else is harmed."""

from __future__ import annotations

import pytest

from aliquot.e2e import install
from aliquot.e2e.api import eventually
from aliquot.e2e.faults import Rule
from aliquot.e2e.objects import claim_template, from_template, opaque, pod, share
from aliquot.e2e.stage import GIB

pytestmark = [pytest.mark.cluster, pytest.mark.node, pytest.mark.slow, pytest.mark.timeout(300)]

SHARE = {"apiVersion": "gpu.aliquot.dev/v1", "kind": "Share"}


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({**SHARE, "memroyLimit": "4Gi"}, "memroyLimit"),
        ({**SHARE, "corePolicy": "sometimes"}, "sometimes"),
        ({**SHARE, "kind": "Sahre"}, "Sahre"),
    ],
    ids=["unknown field", "unknown value", "unknown kind"],
)
def test_wrong_parameters_are_told_in_the_pods_events_and_harm_nobody(stage, parameters, named):
    stage.create(
        claim_template("good", share("2Gi")),
        claim_template("bad", share("2Gi"), config=[opaque(parameters)]),
        pod("good", claims={"gpu": from_template("good")}),
    )
    stage.running("good")
    stage.hold("good", "1Gi")
    stage.create(pod("bad", claims={"gpu": from_template("bad")}))
    text = stage.event("bad", "FailedPrepareDynamicResources")
    assert named in text
    assert stage.namespace in text, "the claim is named"
    # The neighbour goes on, and a newcomer gets its share.
    assert stage.allocate("good", "512Mi")[0]["code"] == 0
    stage.create(pod("next", claims={"gpu": from_template("good")}))
    stage.running("next")
    # And it can be deleted: unprepare of what was never prepared is no error.
    stage.delete_pod("bad")


def test_twenty_pods_at_once_on_two_nodes(cluster, stage, variant):
    if variant.shares:
        count, size, each = min(20, 12 * variant.cards_a_node), "4Gi", 4 * GIB
    else:
        count, size, each = 8, "10Gi", 12 * GIB  # two slots on each of four cards
    names = [f"p{n:02}" for n in range(count)]
    stage.create(claim_template("part", share(size)), *(pod(n, claims={"gpu": from_template("part")}) for n in names))
    stage.wait_pods(names, timeout_s=180)
    used: dict[str, int] = {}
    grants = set()
    nodes = set()
    for name in names:
        (given,) = stage.allocations(name)
        used[given.pool + "/" + given.device] = used.get(given.pool + "/" + given.device, 0) + given.memory_bytes
        grants.add(given.grant)
        nodes.add(stage.node_of(name))
        assert given.memory_bytes == each
    assert len(grants) == count, "each pod has a grant of its own"
    assert nodes == set(cluster.nodes)
    assert max(used.values()) <= 24 * GIB
    for name in names[::5]:
        assert stage.show(name)[0]["total"] == each


def test_driver_lives_through_an_api_server_that_drops_watches_and_answers_429_and_500(local, stage, bad_days):
    proxy = bad_days
    stage.create(claim_template("part", share("2Gi")))
    before = {s["metadata"]["name"]: s["metadata"]["uid"] for s in install.slices(local)}

    # Half of the claim reads fail, in turn with 500, 429 and a broken connection; watches are cut all the while.
    proxy.set(
        Rule(path="/resourceclaims/", status=500, times=2),
        Rule(path="/resourceclaims/", status=429, retry_after_s=1, times=2),
        Rule(path="/resourceclaims/", cut=True, times=2),
        Rule(path="/resourceslices", watch=True, status=410, times=1),
    )
    proxy.cut_watches()
    names = [f"p{n}" for n in range(4)]
    stage.create(*(pod(n, claims={"gpu": from_template("part")}) for n in names))
    stage.wait_pods(names, timeout_s=240)
    assert sum(proxy.hits[:3]) >= 3, "the faults have to have happened"
    proxy.cut_watches()

    # A slice deleted meanwhile comes back (cases.md B110), although its watch was cut.
    name = min(before)
    local.api.delete("resource.k8s.io/v1", "ResourceSlice", name)
    eventually(lambda: name in {s["metadata"]["name"] for s in install.slices(local)}, 20, "the deleted slice again")
    for pod_name in names:
        stage.delete_pod(pod_name)


@pytest.mark.full
def test_silent_watch_is_noticed(local, stage, bad_days):
    """A connection that is open and says nothing for ever must not hide a deleted slice for ever."""
    proxy = bad_days
    eventually(lambda: [p for p in proxy.open_watches if "resourceslices" in p], 30, "watches of slices")
    proxy.silence_watches("resourceslices")
    name = min(s["metadata"]["name"] for s in install.slices(local))
    local.api.delete("resource.k8s.io/v1", "ResourceSlice", name)
    eventually(lambda: name in {s["metadata"]["name"] for s in install.slices(local)}, 150, "the deleted slice again")


def test_b110_slice_deleted_by_hand_comes_back(cluster):
    (victim, *_) = install.slices(cluster)
    name, generation = victim["metadata"]["name"], victim["spec"]["pool"]["generation"]
    cluster.api.delete("resource.k8s.io/v1", "ResourceSlice", name)

    def again():
        found = [s for s in install.slices(cluster) if s["spec"]["pool"]["name"] == victim["spec"]["pool"]["name"]]
        return found[0] if found and found[0]["metadata"]["uid"] != victim["metadata"]["uid"] else None

    restored = eventually(again, 10, "the deleted slice again")
    assert restored["spec"]["pool"]["generation"] >= generation
    assert restored["spec"]["devices"] == victim["spec"]["devices"]


def test_b116_rolling_update_keeps_slices_and_serves_all_the_while(local, stage):
    """The new instance serves before the old one goes; pods come and go meanwhile."""
    before = {s["metadata"]["name"]: s["metadata"]["uid"] for s in install.slices(local)}
    stage.create(claim_template("part", share("2Gi")), pod("old", claims={"gpu": from_template("part")}))
    stage.running("old")
    stage.hold("old", "1Gi")
    rollout = install.begin_restart(local)
    made = 0
    while not rollout.done():
        name = f"during-{made}"
        stage.create(pod(name, claims={"gpu": from_template("part")}))
        stage.running(name)
        stage.delete_pod(name)
        made += 1
    assert made >= 1
    assert {s["metadata"]["name"]: s["metadata"]["uid"] for s in install.slices(local)} == before
    assert stage.allocate("old", "512Mi")[0]["code"] == 0
    # What the old instance prepared the new one undoes.
    (given,) = stage.allocations("old")
    node = stage.node_of("old")
    stage.delete_pod("old")
    grants = local.node(node).path("/run/aliquot/grants")
    eventually(lambda: not [p for p in grants.glob("*") if given.claim_uid in p.name], 30, "end of the old grant")
    # No socket of an instance that is gone is left.
    uids = {p["metadata"]["uid"] for p in install.driver_pods(local)}
    for each in local.nodes:
        sockets = local.node(each).path("/var/lib/kubelet/plugins_registry").glob("gpu.aliquot.dev*")
        assert all(any(uid in s.name for uid in uids) for s in sockets)
