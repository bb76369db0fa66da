# SPDX-License-Identifier: Apache-2.0
"""The contract with kubelet over its sockets: registration, prepare, unprepare, restarts, against a real API server."""

from __future__ import annotations

import json
import shutil
import threading

import dra_rig
import grpc
import pytest
from dra_rig import GIB, SHARED

from aliquot.api.grpc.kubelet.dra.v1 import api_pb2_grpc as v1_grpc
from aliquot.dra.cards import View

pytestmark = pytest.mark.cluster

S1, S2, S3 = (f"{d * 8}-1111-4111-8111-{d * 12}" for d in "123")


def share(rig, memory=4 * GIB, cores=0, *, share=S1, device=SHARED[0], **more):
    return rig.make.result(device, share=share, memory=memory, cores=cores, slots=1, **more)


def test_registration_says_who_we_are_newest_version_first(rig):
    daemon = rig.start()
    assert any("kubelet has not asked yet" in problem for problem in daemon.driver.not_ready())
    info = rig.kubelet.register()
    assert (info.type, info.name) == ("DRAPlugin", "gpu.aliquot.dev")
    assert list(info.supported_versions)[:2] == ["v1.DRAPlugin", "v1beta1.DRAPlugin"]
    assert "v1alpha1.DRAResourceHealth" in info.supported_versions
    assert info.endpoint == str(rig.kubelet.service_sockets()[0])
    assert daemon.driver.not_ready() == []


def test_prepare_makes_everything_and_unprepare_leaves_nothing(rig):
    rig.start()
    claim = rig.cluster.claim("c1", share(rig, 4 * GIB, 30))
    uid = claim["metadata"]["uid"]
    (device,) = rig.kubelet.prepared(claim)
    assert list(device.request_names) == ["gpu"]
    assert (device.pool_name, device.device_name) == (f"{rig.folders.name}/gpu", SHARED[0])
    assert list(device.cdi_device_ids) == [f"gpu.aliquot.dev/claim=c-{uid}-{SHARED[0]}-{S1}"]
    assert device.HasField("share_id")
    assert device.share_id == S1
    record = rig.folders.checkpoint()[uid]
    assert record["state"] == "completed"
    spec = rig.folders.spec(uid)
    assert [d["name"] for d in spec["devices"]] == [f"c-{uid}-{SHARED[0]}-{S1}"]
    rig.kubelet.undone(claim)
    assert rig.folders.artefacts(uid) == []
    assert uid not in rig.folders.checkpoint()


def test_v1beta1_is_served_by_the_same_state(rig):
    rig.start()
    claim = rig.cluster.claim("c1", share(rig))
    (old,) = rig.kubelet.prepared(claim, beta=True)
    (new,) = rig.kubelet.prepared(claim)
    assert list(old.cdi_device_ids) == list(new.cdi_device_ids)
    assert "share_id" not in type(old).DESCRIPTOR.fields_by_name
    rig.kubelet.undone(claim, beta=True)
    assert rig.folders.checkpoint() == {}


def test_b104_the_limits_are_in_the_grant_and_the_hook_is_mounted(rig):
    daemon = rig.start()
    claim = rig.cluster.claim("c1", share(rig, 4 * GIB, 30))
    uid = claim["metadata"]["uid"]
    rig.kubelet.prepared(claim)
    name = f"c-{uid}-{SHARED[0]}-{S1}"
    grant = daemon.driver.regions.grant(name)
    assert (grant.memory_bytes, grant.core_percent) == (4096 << 20, 30)
    spec = rig.folders.spec(uid)
    mounts = {
        mount["containerPath"]: mount["hostPath"]
        for edits in (spec.get("containerEdits", {}), spec["devices"][0]["containerEdits"])
        for mount in edits.get("mounts", ())
    }
    assert mounts[f"/usr/local/vgpu/grants/{name}"] == str(rig.folders.run / "grants" / name)
    assert mounts["/usr/local/vgpu/libvgpu.so"] == str(daemon.driver.hook.library)
    assert mounts["/etc/ld.so.preload"] == str(daemon.driver.hook.preload)


def test_b106_two_shares_of_one_card_are_two_devices_and_end_apart(rig):
    daemon = rig.start()
    one = rig.cluster.claim("c1", share(rig, 4 * GIB, share=S1))
    two = rig.cluster.claim("c2", share(rig, 6 * GIB, share=S2))
    first, second = rig.kubelet.prepared(one)[0], rig.kubelet.prepared(two)[0]
    assert first.cdi_device_ids != second.cdi_device_ids
    rig.kubelet.undone(one)
    name = f"c-{two['metadata']['uid']}-{SHARED[0]}-{S2}"
    assert daemon.driver.regions.grant(name).memory_bytes == 6 * GIB
    assert rig.folders.spec(two["metadata"]["uid"])["devices"][0]["name"] == name


def test_b094_two_pods_of_one_claim_have_one_limit(rig):
    daemon = rig.start()
    claim = rig.cluster.claim("c1", share(rig))
    assert rig.kubelet.prepared(claim) == rig.kubelet.prepared(claim)
    assert len(daemon.driver.regions.names()) == 1
    rig.kubelet.undone(claim)
    assert daemon.driver.regions.names() == frozenset()


def test_a_claim_with_two_cards_keeps_the_order(rig):
    rig.start()
    claim = rig.cluster.claim("c1", share(rig, device=SHARED[1], share=S2), share(rig, device=SHARED[0], share=S1))
    assert [d.device_name for d in rig.kubelet.prepared(claim)] == [SHARED[1], SHARED[0]]
    assert len(rig.folders.spec(claim["metadata"]["uid"])["devices"]) == 2


def test_a_call_with_several_claims_answers_each(rig):
    rig.start()
    good = rig.cluster.claim("good", share(rig))
    bad = rig.cluster.claim("bad", share(rig, device="gpu-99999999-shared", share=S2))
    missing = {"metadata": {"name": "missing", "namespace": rig.cluster.namespace, "uid": rig.make.uid()}}
    answer = rig.kubelet.prepare(good, bad, missing)
    assert set(answer.claims) == {c["metadata"]["uid"] for c in (good, bad, missing)}
    assert answer.claims[good["metadata"]["uid"]].error == ""
    assert "is not offered" in answer.claims[bad["metadata"]["uid"]].error
    assert "does not exist" in answer.claims[missing["metadata"]["uid"]].error


def test_a_claim_made_anew_under_its_name_is_another(rig):
    rig.start()
    claim = rig.cluster.claim("c1", share(rig))
    rig.cluster.delete(claim)
    rig.cluster.claim("c1", share(rig))
    assert "deleted and made anew" in rig.kubelet.refused(claim)


@pytest.mark.parametrize("uid", ["", "../../etc/passwd", "u1"])
def test_a_uid_that_is_none_is_refused_and_its_unprepare_succeeds(rig, uid):
    rig.start()
    claim = {"metadata": {"name": "x", "namespace": rig.cluster.namespace, "uid": uid}}
    assert "which is none" in rig.kubelet.refused(claim)
    rig.kubelet.undone(claim)


def test_b096_unprepare_of_unknown_succeeds(rig):
    daemon = rig.start()
    unknown = {"metadata": {"name": "x", "namespace": rig.cluster.namespace, "uid": rig.make.uid()}}
    rig.kubelet.undone(unknown)
    claim = rig.cluster.claim("c1", share(rig))
    rig.kubelet.prepared(claim)
    rig.kubelet.undone(claim)
    rig.kubelet.undone(claim)
    rig.kubelet.prepared(claim)
    daemon.stop()
    for path in rig.folders.state.glob("checkpoint.json*"):
        path.unlink()
    rig.start()
    rig.kubelet.undone(claim)
    assert rig.folders.artefacts(claim["metadata"]["uid"]) == []


def test_b099_a_misspelt_field_fails_the_claim_and_names_it(rig):
    rig.start()
    parameters = {"apiVersion": "gpu.aliquot.dev/v1", "kind": "Share", "memroyLimit": "4Gi"}
    config = [{"source": "FromClaim", "opaque": {"driver": "gpu.aliquot.dev", "parameters": parameters}}]
    claim = rig.cluster.claim("c1", share(rig), config=config)
    assert "memroyLimit" in rig.kubelet.refused(claim)
    rig.kubelet.undone(claim)


def test_b101_another_drivers_device_is_none_of_our_business(rig, log_lines):
    rig.start()
    foreign = rig.make.result("nic1", driver="nic.example.com", pool="nics", request="nic")
    claim = rig.cluster.claim("c1", foreign, share(rig))
    assert [d.device_name for d in rig.kubelet.prepared(claim)] == [SHARED[0]]
    only = rig.cluster.claim("c2", foreign)
    assert rig.kubelet.prepared(only) == []
    assert only["metadata"]["uid"] not in rig.folders.checkpoint()
    loud = [line for line in log_lines() if line["log_level"] in {"warning", "error"}]
    assert not [line for line in loud if "nic" in str(line)]


def test_b102_alternatives_are_answered_under_their_main_request(rig):
    rig.start()
    claim = rig.cluster.claim("c1", share(rig, request="gpu/small"))
    (device,) = rig.kubelet.prepared(claim)
    assert list(device.request_names) == ["gpu"]


def test_b107_a_changed_allocation_is_refused_while_the_old_one_is_prepared(rig):
    rig.start()
    claim = rig.cluster.claim("c1", share(rig))
    rig.kubelet.prepared(claim)
    rig.cluster.deallocate(claim)
    current = rig.cluster.api.get("resource.k8s.io/v1", "ResourceClaim", "c1", rig.cluster.namespace)
    current |= {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim"}
    rig.cluster.allocate(current, share(rig, share=S2, device=SHARED[1]))
    assert "has to unprepare it" in rig.kubelet.refused(claim)
    rig.kubelet.undone(claim)
    assert [d.device_name for d in rig.kubelet.prepared(claim)] == [SHARED[1]]


def test_b090_the_other_holder_is_named(rig):
    config = rig.folders.root / "exclusive.json"
    config.write_text(json.dumps({"defaults": {"mode": "exclusive"}}))
    daemon = rig.start("--config", str(config))
    one = rig.cluster.claim("c1", rig.make.result("gpu-aaaaaaaa"))
    two = rig.cluster.claim("c2", rig.make.result("gpu-aaaaaaaa"))
    namespace = rig.cluster.api.get("v1", "Namespace", rig.cluster.namespace)
    labels = {**namespace["metadata"].get("labels", {}), "resource.kubernetes.io/admin-access": "true"}
    path = f"/api/v1/namespaces/{rig.cluster.namespace}"
    rig.cluster.api.request("PUT", path, body={**namespace, "metadata": {**namespace["metadata"], "labels": labels}})
    admin = rig.cluster.claim("c3", rig.make.result("gpu-aaaaaaaa", admin=True))
    (device,) = rig.kubelet.prepared(one)
    assert not device.HasField("share_id")
    error = rig.kubelet.refused(two)
    assert one["metadata"]["uid"] in error
    assert f"{rig.cluster.namespace}/c1" in error
    # Whoever looks after the card gets in beside its holder, unlimited, and keeps nobody out.
    rig.kubelet.prepared(admin)
    grant = daemon.driver.regions.grant(f"c-{admin['metadata']['uid']}-gpu-aaaaaaaa")
    assert (grant.memory_bytes, grant.core_percent) == (0, 0)
    assert one["metadata"]["uid"] in rig.kubelet.refused(two)
    rig.kubelet.undone(one)
    rig.kubelet.prepared(two)


def test_a_reboot_wipes_run_and_cdi_and_prepare_makes_them_again(rig):
    daemon = rig.start()
    claim = rig.cluster.claim("c1", share(rig))
    before = rig.kubelet.prepared(claim)
    made = rig.folders.artefacts(claim["metadata"]["uid"])
    shutil.rmtree(rig.folders.cdi)
    shutil.rmtree(rig.folders.run)
    assert rig.kubelet.prepared(claim) == before
    assert rig.folders.artefacts(claim["metadata"]["uid"]) == made
    daemon.stop()
    shutil.rmtree(rig.folders.cdi)
    shutil.rmtree(rig.folders.run)
    second = rig.start()
    dra_rig.wait_for(lambda: not second.driver.rebuild.pending, "rebuild")
    assert rig.folders.artefacts(claim["metadata"]["uid"]) == made


def test_after_a_reboot_that_dealt_the_minor_numbers_anew_the_right_node_is_given(rig):
    daemon = rig.start()
    claim = rig.cluster.claim("c1", share(rig))
    uid = claim["metadata"]["uid"]
    rig.kubelet.prepared(claim)

    def nodes():
        return [n["path"] for n in rig.folders.spec(uid)["devices"][0]["containerEdits"]["deviceNodes"]]

    assert nodes() == ["/dev/nvidia0"]
    daemon.stop()
    swapped = rig.make.inventory(rig.make.card(0, minor=1), rig.make.card(1, minor=0))
    second = rig.start(inventory=swapped)
    dra_rig.wait_for(lambda: not second.driver.rebuild.pending, "rebuild")
    assert nodes() == ["/dev/nvidia1"]
    rig.kubelet.prepared(claim)
    assert nodes() == ["/dev/nvidia1"]


def test_b130_a_driver_update_is_seen_by_new_claims_and_old_ones_are_told_to_restart(rig):
    """The driver's files change while we run; then its version does, and whoever runs on with the old one is named."""
    daemon = rig.start()
    old, new = rig.cluster.claim("old", share(rig)), rig.cluster.claim("new", share(rig, share=S2))
    rig.kubelet.prepared(old)

    def libraries(claim):
        mounts = rig.folders.spec(claim["metadata"]["uid"])["containerEdits"]["mounts"]
        return {m["hostPath"].rpartition(".so.")[2] for m in mounts if "/libcuda.so." in m["hostPath"]}

    def outdated():
        return daemon.driver.metrics.registry.get_sample_value("aliquot_dra_claims_of_other_driver")

    assert libraries(old) == {"580.1"}
    assert outdated() == 0
    folder = rig.folders.driver / "usr/lib/x86_64-linux-gnu"
    for stem in ("libcuda", "libnvidia-ml"):
        (folder / f"{stem}.so.580.1").rename(folder / f"{stem}.so.590.2")
        (folder / f"{stem}.so.1").unlink()
        (folder / f"{stem}.so.1").symlink_to(f"{stem}.so.590.2")
    updated = rig.make.inventory(*rig.inventory.cards, driver_version="590.2")
    daemon.driver.cards.set(View(inventory=updated, problem=""))
    rig.kubelet.prepared(new)
    assert libraries(new) == {"590.2"}
    assert outdated() == 1

    def told():
        events = rig.cluster.api.list("events.k8s.io/v1", "Event", "default")
        return [e["note"] for e in events if e["reason"] == "DriverUpdated" and rig.folders.name in str(e["regarding"])]

    (note,) = dra_rig.wait_for(told, "an event about the node")
    assert "is 590.2 now" in note
    assert f"{rig.cluster.namespace}/old (570.195.03)" in note
    assert "restart their pods" in note
    assert "/new" not in note
    # Asked for again it is the same claim, whose container still is the old one.
    rig.kubelet.prepared(old)
    assert outdated() == 1
    rig.kubelet.undone(old)
    assert outdated() == 0
    # What only another process can use ends this one, by way of /healthz.
    assert daemon.driver.not_alive() == []
    daemon.driver.cards.outdated = "the driver was upgraded under a running library; restart this daemon"
    assert daemon.driver.not_alive() == [daemon.driver.cards.outdated]


def test_b097_an_idle_connection_and_a_new_one_both_work(rig):
    """Idle beyond the limit, the client's side hangs up (after half an hour, here after a second)."""
    rig.start()
    socket = rig.kubelet.service_sockets()[0]
    channel = grpc.insecure_channel(f"unix:{socket}", options=[("grpc.client_idle_timeout_ms", 1000)])
    stub = v1_grpc.DRAPluginStub(channel)
    states, idle = [], threading.Event()

    def changed(state):
        states.append(state)
        if state is grpc.ChannelConnectivity.IDLE and grpc.ChannelConnectivity.READY in states:
            idle.set()

    channel.subscribe(changed)
    one = rig.cluster.claim("c1", share(rig))
    rig.kubelet.prepared(one, stub=stub)
    identity = socket.stat().st_ino
    assert idle.wait(20), states
    two = rig.cluster.claim("c2", share(rig, share=S2))
    rig.kubelet.prepared(two, stub=stub)
    rig.kubelet.prepared(two, stub=rig.kubelet.stub())
    assert socket.stat().st_ino == identity
    channel.close()


def test_a_vanished_socket_is_served_again(rig):
    daemon = rig.start()
    for path in (*rig.kubelet.registration_sockets(), *rig.kubelet.service_sockets()):
        path.unlink()
    dra_rig.wait_for(
        lambda: daemon.driver.registration_server.intact() and daemon.driver.service_server.intact(), "healed sockets"
    )
    rig.kubelet.register()
    rig.kubelet.prepared(rig.cluster.claim("c1", share(rig)))
