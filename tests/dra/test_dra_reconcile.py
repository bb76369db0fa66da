# SPDX-License-Identifier: Apache-2.0
"""When a claim is given up, as a table; turns and the gate; names of grants read back."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from aliquot.api.errors import ConflictError
from aliquot.dra.prepare import Book, ClaimRef, grant_name, plan_prepare
from aliquot.dra.reconcile import GRACE_S, Verdict, judge
from aliquot.dra.records import State
from aliquot.dra.restore import claim_of
from aliquot.dra.turns import Gate, Turns

S1, S2 = "11111111-1111-4111-8111-111111111111", "22222222-2222-4222-8222-222222222222"
SHARED = "gpu-aaaaaaaa-shared"


@pytest.fixture
def prepared(make):
    uid = make.uid()
    claim = make.claim(uid, make.result(SHARED, share=S1, memory=1 << 30, cores=0, slots=1))
    ref = ClaimRef(uid=uid, namespace="t", name="c")
    plan = plan_prepare(
        ref, make.decoded(claim), Book(records={}), make.offer(make.card()), pool="n1/gpu", boot_id="now"
    )
    return uid, claim, msgspec.structs.replace(plan.record, state=State.COMPLETED)


def verdict(prepared, claim, *, record=None, gone_for_s=0.0, in_use=False, boot_id="now"):
    uid, _, known = prepared
    return judge(record or known, uid, claim, gone_for_s=gone_for_s, in_use=in_use, boot_id=boot_id)


def test_a_claim_that_is_there_is_kept_whatever_else(make, prepared):
    uid, claim, record = prepared
    started = msgspec.structs.replace(record, state=State.STARTED)
    for one in (record, started):
        assert verdict(prepared, make.decoded(claim), record=one, gone_for_s=1e9, boot_id="later") is Verdict.KEEP
    more = make.claim(uid, make.result("other", share=S2), make.result(SHARED, share=S1))
    assert verdict(prepared, make.decoded(more), gone_for_s=1e9) is Verdict.KEEP


def gone(make, prepared):
    """Every way in which a claim can be gone."""
    uid, _, _ = prepared
    bare = make.claim(uid)
    bare["status"] = {}
    return [
        None,
        make.decoded(make.claim(make.uid(), make.result(SHARED, share=S1))),
        make.decoded(bare),
        make.decoded(make.claim(uid, make.result(SHARED, share=S2))),
        make.decoded(make.claim(uid, make.result("gpu-bbbbbbbb-shared", share=S1))),
    ]


def test_a_claim_that_is_gone_waits_for_its_grace(make, prepared):
    for claim in gone(make, prepared):
        assert verdict(prepared, claim) is Verdict.WAIT
        assert verdict(prepared, claim, gone_for_s=GRACE_S - 1) is Verdict.WAIT
        assert verdict(prepared, claim, gone_for_s=GRACE_S) is Verdict.GIVE_UP


def test_a_share_that_a_process_uses_is_never_given_up(make, prepared):
    for claim in gone(make, prepared):
        assert verdict(prepared, claim, gone_for_s=1e9, in_use=True) is Verdict.WAIT


def test_nothing_outlives_a_reboot_and_nobody_has_what_was_only_started(make, prepared):
    _, _, record = prepared
    started = msgspec.structs.replace(record, state=State.STARTED)
    for claim in gone(make, prepared):
        assert verdict(prepared, claim, boot_id="later") is Verdict.GIVE_UP
        assert verdict(prepared, claim, record=started) is Verdict.GIVE_UP
        unknown = msgspec.structs.replace(record, boot_id="")
        assert verdict(prepared, claim, record=unknown, boot_id="later") is Verdict.WAIT


def test_grant_names_tell_their_claim():
    for name in (grant_name(S1, SHARED, S2), grant_name(S1, "gpu-a-s1", ""), grant_name(S1, "gpu-a", "", 1)):
        assert claim_of(name) == S1
    for other in ("p-pod-container-0", "c-short-gpu", "", f"x-{S1}-gpu"):
        assert claim_of(other) is None


def test_turns_are_per_claim_and_leave_nothing():
    turns = Turns()
    with turns.enter("a") as one, one.hold("a", 1):
        with turns.enter("b") as other, other.hold("b", 0):
            assert turns.busy() == {"a", "b"}
        with turns.enter("a") as same:
            assert same is one
            with pytest.raises(ConflictError, match="claim a"), same.hold("a", 0.01):
                pass
    assert turns.busy() == frozenset()


def test_the_gate_lets_few_in_and_nobody_waits_longer_than_the_patience():
    gate = Gate(2, 30.0)
    inside, most, lock, go = [0], [0], threading.Lock(), threading.Event()

    def call():
        with gate.enter():
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            go.wait(0.001)
            with lock:
                inside[0] -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: call(), range(50)))
    assert most[0] <= 2
    hasty = Gate(2, 0.05)
    with hasty.enter(), hasty.enter(), hasty.enter():
        pass  # two that hang do not keep the third out
