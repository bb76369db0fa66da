# SPDX-License-Identifier: Apache-2.0
"""Slow, racing, late and half-done calls; damaged state; claims that vanish. Real sockets, real API server."""

from __future__ import annotations

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dra_rig
import grpc
import pytest
from dra_rig import GIB, SHARED

from aliquot.dra.reconcile import Reconciler
from aliquot.e2e.faults import Rule
from aliquot.node.checkpoint_format import NewerCheckpointError

pytestmark = pytest.mark.cluster

S1, S2 = "11111111-1111-4111-8111-111111111111", "22222222-2222-4222-8222-222222222222"


def share(rig, memory=GIB, *, share=S1, device=SHARED[0], **more):
    return rig.make.result(device, share=share, memory=memory, cores=0, slots=1, **more)


def sid(number: int) -> str:
    return f"{number:08d}-0000-4000-8000-000000000000"


class Gate:
    """A step at which calls for one claim wait until they are let through."""

    def __init__(self, step: str) -> None:
        self.step = step
        self.closed = threading.Event()
        self.reached = threading.Event()
        self.open = threading.Event()
        self._first = threading.Lock()

    def __call__(self, step: str) -> None:
        if step == self.step and self.closed.is_set() and self._first.acquire(blocking=False):
            self.reached.set()
            assert self.open.wait(60)


def test_b084_a_prepare_that_stops_half_way_is_undone(rig):
    daemon = rig.start()
    claim = rig.cluster.claim("c1", share(rig))
    uid = claim["metadata"]["uid"]
    # A folder in place of the spec file: as unwritable to root as a read-only directory is to anybody.
    blocker = rig.folders.cdi / f"gpu.aliquot.dev-claim_{uid}.json"
    (blocker / "x").mkdir(parents=True)
    assert "CDI directory" in rig.kubelet.refused(claim)
    assert rig.folders.checkpoint()[uid]["state"] == "started"
    shutil.rmtree(blocker)
    rig.kubelet.undone(claim)
    assert rig.folders.artefacts(uid) == []
    assert uid not in rig.folders.checkpoint()

    (blocker / "x").mkdir(parents=True)
    rig.kubelet.refused(claim)
    daemon.stop()
    shutil.rmtree(blocker)
    rig.cluster.delete(claim)
    second = rig.start()
    dra_rig.wait_for(lambda: uid not in rig.folders.checkpoint(), "one clean-up round")
    assert rig.folders.artefacts(uid) == []
    assert second.driver.checkpoint.records() == {}


def test_b086_a_retry_inside_the_driver_does_not_bring_back_an_unprepared_claim(rig, proxied):
    rig.start()
    claim = rig.cluster.claim("c1", share(rig, 20 * GIB))
    uid = claim["metadata"]["uid"]
    proxied.set(Rule(path="/resourceclaims/c1$", method="GET", status=503))
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(rig.kubelet.prepare, claim)
        dra_rig.wait_for(lambda: proxied.hits[0] >= 2, "a retry inside the driver")
        rig.kubelet.undone(claim)
        rig.cluster.delete(claim)
        proxied.set()
        error = late.result(30).claims[uid].error
    assert "does not exist" in error
    assert uid not in rig.folders.checkpoint()
    assert rig.folders.artefacts(uid) == []
    rig.kubelet.prepared(rig.cluster.claim("c2", share(rig, 20 * GIB, share=S2)))


def test_b086_a_claim_fetched_before_an_unprepare_is_fetched_again(rig):
    """The claim was fine when it was fetched; it was undone and deleted before its turn came."""
    gate = Gate("plan")
    daemon = rig.start(steps=gate)
    claim = rig.cluster.claim("c1", share(rig))
    uid = claim["metadata"]["uid"]
    engine = daemon.driver.engine
    with ThreadPoolExecutor(1) as pool, engine.turns.enter(uid) as turn:
        with turn.hold(uid, 1):
            late = pool.submit(rig.kubelet.prepare, claim)
            dra_rig.wait_for(lambda: turn.calls == 2, "the Prepare to come")
            # It fetches without the turn; only then is it undone and deleted.
            dra_rig.wait_for(lambda: parts_of(daemon, "get") == 1, "the fetch")
            engine.undo(uid, turn)
            rig.cluster.delete(claim)
        assert "does not exist" in late.result(30).claims[uid].error
    assert rig.folders.artefacts(uid) == []
    assert uid not in rig.folders.checkpoint()


def parts_of(daemon, part: str) -> float:
    """How many Prepares have finished a part."""
    name = "aliquot_dra_prepare_part_seconds_count"
    return daemon.driver.metrics.registry.get_sample_value(name, {"part": part}) or 0.0


@pytest.mark.slow
def test_b091_a_slow_claim_holds_up_nobody(rig):
    gate = Gate("spec")
    config = rig.folders.root / "config.json"
    config.write_text(json.dumps({"defaults": {"maxShares": 20}}))
    rig.start("--config", str(config), steps=gate)
    slow = rig.cluster.claim("slow", share(rig))
    others = [rig.cluster.claim(f"c{n}", share(rig, share=sid(n), device=SHARED[n % 2])) for n in range(20)]
    gate.closed.set()
    with ThreadPoolExecutor(24) as pool:
        first = pool.submit(rig.kubelet.prepare, slow)
        assert gate.reached.wait(10)

        def timed(claim):
            started = time.monotonic()
            rig.kubelet.prepared(claim)
            return time.monotonic() - started

        took = list(pool.map(timed, others))
        assert max(took) < 2.0
        assert not first.done()
        gate.open.set()
        assert first.result(10).claims[slow["metadata"]["uid"]].error == ""


def test_b092_a_call_that_outlives_its_deadline_leaves_one_set_of_artefacts(rig):
    gate = Gate("spec")
    daemon = rig.start(steps=gate)
    claim = rig.cluster.claim("c1", share(rig))
    uid = claim["metadata"]["uid"]
    gate.closed.set()
    for _ in range(2):
        # The caller gives up, or hears at the last moment that an earlier call is still at work.
        try:
            assert rig.kubelet.prepare(claim, timeout_s=2.0).claims[uid].error
        except grpc.RpcError as err:
            assert err.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # noqa: PT017
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(rig.kubelet.prepared, claim)
        gate.open.set()
        devices = last.result(20)
    assert [list(d.cdi_device_ids) for d in devices] == [[f"gpu.aliquot.dev/claim=c-{uid}-{SHARED[0]}-{S1}"]]
    assert len(rig.folders.spec(uid)["devices"]) == 1
    dra_rig.wait_for(lambda: daemon.driver.engine.turns.busy() == frozenset(), "all calls to end")


@pytest.mark.slow
def test_b093_prepare_and_unprepare_of_one_claim_race(rig):
    """After both have ended the node is in one of the two orders' states; 500 rounds, started together."""
    daemon = rig.start()
    claim = rig.cluster.claim("c1", share(rig))
    uid = claim["metadata"]["uid"]
    stub = rig.kubelet.stub()
    outcomes = set()
    with ThreadPoolExecutor(2) as pool:
        for _ in range(500):
            rig.kubelet.undone(claim, stub=stub)
            barrier = threading.Barrier(2)

            def together(call, barrier=barrier):
                barrier.wait()
                return call(claim, stub=stub)

            prepared, undone = pool.submit(together, rig.kubelet.prepare), pool.submit(together, rig.kubelet.unprepare)
            answer = prepared.result(20).claims[uid]
            assert undone.result(20).claims[uid].error == ""
            assert answer.error == ""
            known = uid in rig.folders.checkpoint()
            outcomes.add(known)
            assert bool(rig.folders.artefacts(uid)) == known
            assert (daemon.driver.checkpoint.get(uid) is not None) == known
    assert outcomes


def test_many_claims_of_one_card_at_once_are_never_overbooked(rig):
    """Sixteen claims of 2 GiB and more were allocated on a card of 24 GiB: the scheduler was wrong."""
    daemon = rig.start()
    claims = [rig.cluster.claim(f"c{n}", share(rig, 4 * GIB, share=sid(n))) for n in range(12)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda claim: rig.kubelet.prepare(claim).claims[claim["metadata"]["uid"]], claims))
    good = [answer for answer in answers if not answer.error]
    assert len(good) == 6
    assert all("were allocated, but of" in answer.error for answer in answers if answer.error)
    assert len(daemon.driver.checkpoint.records()) == 6


def test_b089_a_truncated_checkpoint_never_hands_a_device_out_twice(rig):
    daemon = rig.start()
    one = rig.cluster.claim("c1", share(rig, 20 * GIB))
    rig.kubelet.prepared(one)
    daemon.stop()
    for path in rig.folders.state.glob("checkpoint.json*"):
        if path.name != "checkpoint.json.lock":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    second = rig.start()
    two = rig.cluster.claim("c2", share(rig, 20 * GIB, share=S2))
    assert one["metadata"]["uid"] in rig.kubelet.refused(two)
    assert list(rig.folders.state.glob("checkpoint.json.corrupt-*"))
    assert second.driver.metrics.registry.get_sample_value("aliquot_dra_checkpoint_recoveries_total") == 1.0
    assert len(rig.kubelet.prepared(one)) == 1
    rig.kubelet.undone(one)
    rig.kubelet.prepared(two)


def test_b089_grant_files_alone_are_enough(rig):
    """The same with the sidecars gone too: what the claim holds is read from its grant files."""
    daemon = rig.start()
    one = rig.cluster.claim("c1", share(rig, 20 * GIB))
    before = rig.kubelet.prepared(one)
    daemon.stop()
    for path in rig.folders.state.glob("checkpoint.json*"):
        path.unlink()
    shutil.rmtree(rig.folders.run / "claims")
    rig.start()
    two = rig.cluster.claim("c2", share(rig, 20 * GIB, share=S2))
    assert one["metadata"]["uid"] in rig.kubelet.refused(two)
    small = rig.cluster.claim("c3", share(rig, 4 * GIB, share=sid(3)))
    rig.kubelet.prepared(small)
    assert rig.kubelet.prepared(one) == before
    assert rig.folders.checkpoint()[one["metadata"]["uid"]]["name"] == "c1"
    rig.kubelet.undone(one)


def test_b087_the_first_releases_checkpoint_is_still_read(rig, proxied):
    """golden/checkpoint-1.0.json was written by release 0.1.0 and never changes: its claim is known and unprepared."""
    proxied.set(Rule(path="/namespaces/t/resourceclaims/", status=500))  # its claim exists nowhere
    golden = Path(__file__).parent / "golden" / "checkpoint-1.0.json"
    rig.folders.state.mkdir()
    shutil.copy(golden, rig.folders.state / "checkpoint.json")
    daemon = rig.start()
    (uid,) = daemon.driver.checkpoint.records()
    assert daemon.driver.checkpoint.damaged() == {}
    rival = rig.cluster.claim("c2", share(rig, 24 * GIB, share=S2))
    assert uid in rig.kubelet.refused(rival)
    rig.kubelet.undone({"metadata": {"name": "golden", "namespace": "t", "uid": uid}})
    assert rig.folders.checkpoint() == {}
    rig.kubelet.prepared(rival)


def test_b087_a_newer_releases_checkpoint_is_read_and_its_fields_are_kept(rig):
    daemon = rig.start()
    claim = rig.cluster.claim("c1", share(rig))
    uid = claim["metadata"]["uid"]
    rig.kubelet.prepared(claim)
    daemon.stop()
    rewrite(rig.folders, lambda claims: claims[uid].update({"newer": {"a": 1}}))
    rig.start()
    other = rig.cluster.claim("c2", share(rig, share=S2))
    rig.kubelet.prepared(other)
    rig.kubelet.prepared(claim)
    assert rig.folders.checkpoint()[uid]["newer"] == {"a": 1}
    rig.kubelet.undone(claim)


def test_b087_a_checkpoint_of_another_major_version_is_refused_untouched(rig):
    rig.start().stop()
    path = rig.folders.state / "checkpoint.json"
    rig.folders.state.mkdir(exist_ok=True)
    path.write_text(json.dumps({"version": "2.0", "checksum": "x", "payload": {"different": True}}))
    before = path.read_bytes()
    with pytest.raises(NewerCheckpointError, match=r"version 2\.0"):
        rig.start()
    assert path.read_bytes() == before


def rewrite(folders, change) -> None:
    """Change the records of the checkpoint as another release would have written them."""
    import hashlib  # noqa: PLC0415

    path = folders.state / "checkpoint.json"
    envelope = json.loads(path.read_bytes())
    payload = json.loads(envelope["payload"])
    change(payload["claims"])
    envelope["payload"] = json.dumps(payload)
    envelope["checksum"] = f"sha256:{hashlib.sha256(envelope['payload'].encode()).hexdigest()}"
    path.write_text(json.dumps(envelope))


def test_a_deleted_claim_is_given_up_after_its_grace_and_not_before(rig):
    daemon = rig.start()
    claim = rig.cluster.claim("c1", share(rig, 20 * GIB))
    uid = claim["metadata"]["uid"]
    rig.kubelet.prepared(claim)
    now = [1000.0]
    reconciler = Reconciler(
        daemon.driver.engine, daemon.driver.metrics, boot_id=daemon.driver._boot_id, clock=lambda: now[0]
    )
    assert reconciler.round() is False
    rig.cluster.delete(claim)
    two = rig.cluster.claim("c2", share(rig, 20 * GIB, share=S2))
    assert uid in rig.kubelet.refused(two)
    assert reconciler.round() is True
    now[0] += 59
    assert reconciler.round() is True
    assert uid in rig.folders.checkpoint()
    now[0] += 2
    assert reconciler.round() is False
    assert uid not in rig.folders.checkpoint()
    assert rig.folders.artefacts(uid) == []
    rig.kubelet.prepared(two)


def test_a_claim_that_stands_in_the_way_is_reconsidered_at_once(rig):
    """`started` and deleted: nobody was told, so the next claim need not wait for a round."""
    rig.start()
    claim = rig.cluster.claim("c1", share(rig, 20 * GIB))
    uid = claim["metadata"]["uid"]
    blocker = rig.folders.cdi / f"gpu.aliquot.dev-claim_{uid}.json"
    (blocker / "x").mkdir(parents=True)
    rig.kubelet.refused(claim)
    shutil.rmtree(blocker)
    rig.cluster.delete(claim)
    rig.kubelet.prepared(rig.cluster.claim("c2", share(rig, 20 * GIB, share=S2)))
    assert uid not in rig.folders.checkpoint()


def test_an_api_server_in_trouble_keeps_everything(rig, proxied):
    daemon = rig.start()
    claim = rig.cluster.claim("c1", share(rig))
    rig.kubelet.prepared(claim)
    proxied.set(Rule(path="/resourceclaims/", status=500))
    assert daemon.driver.reconciler.round() is False
    assert daemon.driver.reconciler.reconsider(claim["metadata"]["uid"]) is False
    assert claim["metadata"]["uid"] in rig.folders.checkpoint()
    rig.kubelet.undone(claim)  # asks nobody


def test_a_busy_api_server_is_asked_again(rig, proxied):
    rig.start()
    claim = rig.cluster.claim("c1", share(rig))
    proxied.set(
        Rule(path="/resourceclaims/c1$", status=429, times=1), Rule(path="/resourceclaims/c1$", cut=True, times=2)
    )
    assert len(rig.kubelet.prepared(claim)) == 1


def test_missing_driver_files_fail_the_claim_with_the_path(rig):
    rig.start()
    claim = rig.cluster.claim("c1", share(rig))
    node = rig.folders.driver / "dev/nvidia0"
    node.unlink()
    assert str(node) in rig.kubelet.refused(claim)
    node.symlink_to("/dev/null")
    rig.kubelet.prepared(claim)
