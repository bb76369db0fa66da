# SPDX-License-Identifier: Apache-2.0
"""ResourceSlices at real API servers: what is stored, what happens to it, and that nothing is written at rest."""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import replace

import dra_rig
import pytest
from dra_rig import SHARED

from aliquot.api.quantity import parse
from aliquot.dra.cards import View
from aliquot.dra.layout import SHARED_DROPPED, SHARED_KEPT, SHARED_REFUSED, Features, Kept
from aliquot.dra.probe import Prober, probe
from aliquot.e2e.faults import Rule
from aliquot.kube.client import Kube

pytestmark = pytest.mark.cluster


def devices(rig):
    return [device for item in rig.cluster.slices() for device in item["spec"]["devices"]]


def until(rig, look, what, timeout_s=20.0):
    return dra_rig.wait_for(lambda: look(rig.cluster.slices()), what, timeout_s)


def test_shares_are_stored_with_owner_reason_and_annotations(rig):
    daemon = rig.start()
    (item,) = rig.cluster.slices()
    assert item["metadata"]["name"] == f"00000-gpu.aliquot.dev-{rig.folders.name}"
    (owner,) = item["metadata"]["ownerReferences"]
    node = rig.cluster.api.get("v1", "Node", rig.folders.name)
    assert (owner["kind"], owner["uid"]) == ("Node", node["metadata"]["uid"])
    assert set(item["metadata"]["annotations"]) == {
        "aliquot.dev/version", "aliquot.dev/content", "aliquot.dev/instance-started",
    }  # fmt: skip
    assert [d["name"] for d in item["spec"]["devices"]] == SHARED
    assert item["spec"]["devices"][0]["attributes"]["modeReason"] == {"string": SHARED_KEPT}
    assert item["spec"]["pool"] == {"name": f"{rig.folders.name}/gpu", "generation": 1, "resourceSliceCount": 1}
    events = dra_rig.wait_for(
        lambda: [
            e
            for e in rig.cluster.api.list("events.k8s.io/v1", "Event", "default")
            if e["regarding"]["name"] == rig.folders.name
        ],
        "an event about the node",
    )
    assert any("offered as shared" in e["note"] for e in events)
    assert daemon.driver.publisher.problem == ""


@pytest.mark.slow
def test_without_the_gate_cards_are_slots(rig_on):
    rig = rig_on(minor="1.34")
    daemon = rig.start()
    found = devices(rig)
    assert len(found) == 8
    assert {parse(d["capacity"]["memory"]["value"]) for d in found} == {6 << 30}
    assert found[0]["attributes"]["modeReason"] == {"string": SHARED_DROPPED}
    assert daemon.driver.prober.features.consumable_capacity is Kept.DROPPED
    slot = rig.cluster.claim("c1", rig.make.result("gpu-aaaaaaaa-s2"))
    (device,) = rig.kubelet.prepared(slot)
    assert not device.HasField("share_id")
    name = f"c-{slot['metadata']['uid']}-gpu-aaaaaaaa-s2"
    assert daemon.driver.regions.grant(name).memory_bytes == 6 << 30


@pytest.mark.slow
def test_with_the_gate_1_34_shares(rig_on):
    rig = rig_on(minor="1.34", feature_gates={"DRAConsumableCapacity": True})
    rig.start()
    assert [d["name"] for d in devices(rig)] == SHARED


def test_nothing_is_written_at_rest(rig, proxied):
    """Three seconds here; bench/driver.py watches a minute."""
    daemon = rig.start()
    until(rig, lambda s: len(s) == 1, "the slice")
    assert daemon.driver.events.flush(5)
    dra_rig.wait_for(lambda: proxied.open_watches, "the watch")
    threading.Event().wait(1.5)  # our own write's event and the look that follows it
    before = len(proxied.requests)
    threading.Event().wait(3.0)
    after = [(r["method"], r["path"]) for r in proxied.requests[before:] if not r["watch"]]
    assert after == []


def test_b110_a_deleted_slice_comes_back_with_a_generation_not_lower(rig, proxied):
    daemon = rig.start()
    dra_rig.wait_for(lambda: proxied.open_watches, "the watch")
    (before,) = rig.cluster.slices()
    rig.cluster.api.delete("resource.k8s.io/v1", "ResourceSlice", before["metadata"]["name"])
    (again,) = until(rig, list, "the slice", 10)
    assert again["spec"]["pool"]["name"] == before["spec"]["pool"]["name"]
    assert again["spec"]["pool"]["generation"] >= before["spec"]["pool"]["generation"]
    proxied.set(Rule(cut=True))
    proxied.cut_watches()
    rig.cluster.api.delete_all(
        "resource.k8s.io/v1",
        "ResourceSlice",
        fieldSelector=f"spec.nodeName={rig.folders.name},spec.driver=gpu.aliquot.dev",
    )
    reflector = daemon.driver.publisher._reflector
    dra_rig.wait_for(lambda: reflector._backoff.failures >= 2, "failures")
    reflector._backoff.failures = 30  # as after minutes of it: the waits are as long as they get
    assert rig.cluster.slices() == []
    proxied.set()
    started = time.monotonic()
    (third,) = until(rig, list, "the slice", 15)
    assert time.monotonic() - started < 10
    assert third["spec"]["pool"]["generation"] >= again["spec"]["pool"]["generation"]
    dra_rig.wait_for(lambda: daemon.driver.publisher.problem == "", "the publisher to be content")


def test_a_hand_that_changes_the_slice_is_undone(rig):
    rig.start()
    (item,) = rig.cluster.slices()
    item |= {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice"}
    item["spec"]["devices"] = item["spec"]["devices"][:1]
    item["metadata"]["labels"] = {"theirs": "stays"}
    rig.cluster.api.request("PUT", f"/apis/resource.k8s.io/v1/resourceslices/{item['metadata']['name']}", body=item)
    (again,) = until(rig, lambda s: [i for i in s if len(i["spec"]["devices"]) == 2], "both devices")
    assert again["metadata"]["labels"] == {"theirs": "stays"}


def test_a_node_that_is_made_anew_becomes_the_owner(rig):
    rig.start()
    rig.cluster.api.delete("v1", "Node", rig.folders.name)
    node = rig.cluster.api.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": rig.folders.name}})
    (item,) = rig.cluster.slices()
    rig.cluster.api.delete("resource.k8s.io/v1", "ResourceSlice", item["metadata"]["name"])
    (again,) = until(rig, list, "the slice")
    assert again["metadata"]["ownerReferences"][0]["uid"] == node["metadata"]["uid"]


def test_b111_b112_long_names_and_many_cards_are_accepted(rig):
    long = "NVIDIÄ " + "Ü" * 40 + "x "
    inventory = rig.make.inventory(*[rig.make.card(n, name=long) for n in range(130)])
    daemon = rig.start(inventory=inventory)
    slices = rig.cluster.slices()
    assert sorted(len(s["spec"]["devices"]) for s in slices) == [2, 128]
    assert {s["spec"]["pool"]["resourceSliceCount"] for s in slices} == {2}
    sick = {rig.make.card(5).uuid: "lost"}
    daemon.driver.cards.set(
        View(inventory=rig.make.inventory(*[rig.make.card(n) for n in range(70)]), sick=sick, problem="")
    )
    slices = until(
        rig, lambda s: s if sorted(len(i["spec"]["devices"]) for i in s) == [6, 64] else None, "64 and 6 devices"
    )
    assert len({s["spec"]["pool"]["generation"] for s in slices}) == 1
    assert sum("taints" in d for s in slices for d in s["spec"]["devices"]) == 1
    daemon.driver.cards.set(View(inventory=rig.inventory, problem=""))
    until(rig, lambda s: s if [len(i["spec"]["devices"]) for i in s] == [2] else None, "one slice")


def test_b113_what_cannot_be_published_is_logged_and_turns_readiness_false(rig, proxied, log_lines):
    """A bad device of ours is left out by name; a refusal by the server is told in the server's words."""
    daemon = rig.start()
    rig.kubelet.register()
    assert daemon.driver.not_ready() == []
    offering, good = daemon.driver.offering, daemon.driver.offering.offer
    bad = replace(good.devices[0], attributes={**good.devices[0].attributes, "numa-1": {"int": 1}})
    offering._offer = replace(good, devices=(bad, *good.devices[1:]))
    daemon.driver.publisher.changed()
    until(rig, lambda s: [i for i in s if [d["name"] for d in i["spec"]["devices"]] == SHARED[1:]], "one device")
    says = f"device {SHARED[0]}: attribute 'numa-1' is no C identifier"
    assert [problem for problem in daemon.driver.not_ready() if says in problem]
    assert [line for line in log_lines() if line["log_level"] == "error" and says in str(line.get("problems"))]
    offering._offer = good
    proxied.set(Rule(path="/resourceslices/", method="PUT", status=422, message="spec.devices[0].attributes: Invalid"))
    daemon.driver.publisher.changed()
    dra_rig.wait_for(lambda: "spec.devices[0].attributes: Invalid" in daemon.driver.publisher.problem, "the refusal")
    assert daemon.driver.publisher.problem in daemon.driver.not_ready()
    assert [line for line in log_lines() if "spec.devices[0].attributes: Invalid" in str(line.get("error"))]
    proxied.set()
    dra_rig.wait_for(lambda: daemon.driver.not_ready() == [], "readiness")


def test_b114_cards_without_a_device_to_publish_are_an_error(rig):
    """MIG is on and nobody made an instance: found, but nothing to offer."""
    empty = rig.make.card(0, mig_capable=True, mig_enabled=True, mig=())
    daemon = rig.start(inventory=rig.make.inventory(empty))
    rig.kubelet.register()
    until(rig, lambda s: [i for i in s if not i["spec"].get("devices")], "a slice without devices")
    (problem,) = daemon.driver.not_ready()
    assert "cards were found but there is no device to publish" in problem
    assert "nvidia-smi mig -cgi" in problem


def test_b109_no_card_at_first_is_not_ready_and_cards_appear_without_a_restart(rig):
    daemon = rig.start(inventory=rig.make.inventory())
    daemon.driver.cards.set(View(inventory=rig.make.inventory(), problem="the driver knows no card"))
    rig.kubelet.register()
    until(rig, lambda s: [i for i in s if not i["spec"].get("devices")], "a slice without devices")
    assert daemon.driver.not_ready() == ["the driver knows no card"]
    daemon.driver.cards.set(View(inventory=rig.inventory, problem=""))
    until(rig, lambda s: [i for i in s if len(i["spec"].get("devices", ())) == 2], "two devices")
    assert daemon.driver.not_ready() == []


def test_a_card_that_claims_hold_keeps_its_form_until_they_end(rig):
    """The server's features change under a held card: nothing flips before the claim is gone (dra.md 10.5)."""
    daemon = rig.start()
    claim = rig.cluster.claim(
        "c1", rig.make.result(SHARED[0], share="11111111-1111-4111-8111-111111111111", memory=1 << 30, cores=0, slots=1)
    )
    rig.kubelet.prepared(claim)
    without = Features(
        consumable_capacity=Kept.DROPPED, taints=Kept.DROPPED, counters=Kept.DROPPED, server_version="v1.36.3"
    )
    daemon.driver.offering.set_features(without)
    names = [d.name for d in daemon.driver.offering.offer.devices]
    assert names == [*[f"gpu-bbbbbbbb-s{k}" for k in range(4)], SHARED[0]]
    until(rig, lambda s: [i for i in s if len(i["spec"]["devices"]) == 5], "five devices")
    rig.kubelet.undone(claim)
    until(rig, lambda s: [i for i in s if len(i["spec"]["devices"]) == 8], "eight slots")


def test_probing_says_what_each_server_keeps(rig):
    kube = Kube.load(rig.plane.kubeconfig)
    try:
        found = probe(kube, node_name=rig.folders.name)
    finally:
        kube.close()
    assert (found.consumable_capacity, found.taints, found.counters) == (Kept.YES, Kept.YES, Kept.YES)
    assert found.server_version.startswith("v1.36")
    assert rig.cluster.slices() == []


def test_a_refused_dry_run_never_counts_as_kept_and_never_unlearns(rig, proxied):
    kube = Kube.load(rig.folders.kubeconfig)
    now = [0.0]
    try:
        prober = Prober(kube, node_name=rig.folders.name, clock=lambda: now[0])
        proxied.set(Rule(path="/resourceslices$", method="POST", status=403))
        assert prober.refresh()
        assert prober.features.consumable_capacity is Kept.REFUSED
        proxied.set()
        now[0] += 3601
        assert prober.due_in_s() <= 0
        assert prober.refresh()
        assert prober.features.consumable_capacity is Kept.YES
        proxied.set(Rule(path="/resourceslices$", method="POST", status=403))
        now[0] += 3601
        assert not prober.refresh()
        assert prober.features.consumable_capacity is Kept.YES
        now[0] += 301
        seen = len(proxied.requests)
        assert not prober.refresh()
        assert [r["path"] for r in proxied.requests[seen:]] == ["/version"]
    finally:
        kube.close()


def test_a_server_that_refuses_to_be_asked_gets_slots(rig, proxied):
    proxied.set(Rule(path="/resourceslices$", method="POST", status=403, times=3))
    rig.start()
    found = devices(rig)
    assert found[0]["attributes"]["modeReason"] == {"string": SHARED_REFUSED}
    assert len(found) == 8


def test_an_absent_node_is_named_and_waited_for(rig):
    rig.cluster.api.delete("v1", "Node", rig.folders.name)
    daemon = dra_rig.Daemon(rig.folders, rig.inventory)
    daemon._thread.start()
    try:
        dra_rig.wait_for(lambda: "there is no Node" in daemon.driver.publisher.problem, "the sentence")
        assert any("check --node-name" in problem for problem in daemon.driver.not_ready())
        rig.cluster.add_node()
        until(rig, list, "the slice")
    finally:
        daemon.stop()


def test_stopping_leaves_slices_and_no_sockets(rig):
    daemon = rig.start()
    (before,) = rig.cluster.slices()
    daemon.stop()
    assert [s["metadata"]["uid"] for s in rig.cluster.slices()] == [before["metadata"]["uid"]]
    assert rig.kubelet.registration_sockets() == []
    assert rig.kubelet.service_sockets() == []
    rig.start()
    assert [s["metadata"]["resourceVersion"] for s in rig.cluster.slices()] == [before["metadata"]["resourceVersion"]]


U1, U2 = "aaaaaaaa-1111-4111-8111-aaaaaaaaaaaa", "bbbbbbbb-1111-4111-8111-bbbbbbbbbbbb"


def test_b116_two_instances_overlap_and_nothing_is_lost(rig):
    """Instance 2 starts while 1 serves; 1 stops; Prepare works at every moment; slices stay the same objects."""
    first = rig.start("--pod-uid", U1)
    (before,) = rig.cluster.slices()
    share = {"memory": 1 << 30, "cores": 0, "slots": 1}
    one = rig.cluster.claim("c1", rig.make.result(SHARED[0], share=U1, **share))
    two = rig.cluster.claim("c2", rig.make.result(SHARED[0], share=U2, **share))
    old = rig.kubelet.stub(first.driver.sockets.service)
    rig.kubelet.prepared(one, stub=old)
    second = rig.start("--pod-uid", U2)
    new = rig.kubelet.stub(second.driver.sockets.service)
    assert len(rig.kubelet.registration_sockets()) == 2
    rig.kubelet.prepared(two, stub=old)
    # Each knows at once what the other did.
    assert rig.kubelet.prepared(two, stub=new) == rig.kubelet.prepared(two, stub=old)
    rig.kubelet.undone(one, stub=new)
    assert set(rig.folders.checkpoint()) == {two["metadata"]["uid"]}
    first.stop()
    assert [s["metadata"]["uid"] for s in rig.cluster.slices()] == [before["metadata"]["uid"]]
    assert rig.kubelet.registration_sockets() == [second.driver.sockets.registration]
    rig.kubelet.prepared(two, stub=new)
    rig.kubelet.undone(two, stub=new)
    second.stop()
    # What a killed instance leaves behind is gone with the next start.
    left = [second.driver.sockets.service, second.driver.sockets.registration]
    for path in left:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        os.utime(path, (1.0, 1.0))
    third = rig.start("--pod-uid", U1)
    assert not [path for path in left if path.exists()]
    rig.kubelet.prepared(one, stub=rig.kubelet.stub(third.driver.sockets.service))


def test_b116_an_older_instance_leaves_a_newer_ones_slices_alone_and_does_not_fight(rig):
    """Two versions want different slices; over the minute of an update the later started one has its way."""
    now = [1000.0]
    first = rig.start("--pod-uid", U1)
    renamed = rig.make.inventory(*[rig.make.card(n, name="as the new version spells it") for n in range(2)])
    second = rig.start("--pod-uid", U2, inventory=renamed)

    def name():
        return rig.cluster.slices()[0]["spec"]["devices"][0]["attributes"]["productName"]["string"]

    dra_rig.wait_for(lambda: name() == "as the new version spells it", "the newer instance's slice")
    publisher = first.driver.publisher
    publisher._clock = lambda: now[0]
    before = rig.cluster.slices()[0]["metadata"]["resourceVersion"]
    for _ in range(3):
        assert publisher._sync(first.driver.offering.desired())
    assert rig.cluster.slices()[0]["metadata"]["resourceVersion"] == before
    second.stop()
    now[0] += 61
    assert publisher._sync(first.driver.offering.desired())
    assert name() == "NVIDIA-Fake24G"
