# SPDX-License-Identifier: Apache-2.0
"""The plan of NodePrepareResources: what a claim gets, and every way in which it is refused."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.api.errors import ClusterError, ConflictError, HardwareError, RequestError
from aliquot.api.grant import CorePolicy
from aliquot.dra.config import decode_config
from aliquot.dra.prepare import Action, Book, ClaimRef, plan_prepare
from aliquot.dra.records import ClaimRecord, State, cards_in, held_layouts, outdated

GIB = 1 << 30
S1, S2 = "11111111-1111-4111-8111-111111111111", "22222222-2222-4222-8222-222222222222"
SHARED = "gpu-aaaaaaaa-shared"


class Node:
    """A node in values: offers devices, keeps records."""

    def __init__(self, make, *cards, **kwargs):
        self.make = make
        self.offer = make.offer(*(cards or (make.card(0), make.card(1))), **kwargs)
        self.records = {}
        self.unreadable = {}

    def plan(self, uid, *results, **claim):
        document = self.make.claim(uid, *results, **claim)
        ref = ClaimRef(uid=uid, namespace="t", name=claim.get("name", "c"))
        book = Book(records=self.records, unreadable=self.unreadable)
        return plan_prepare(ref, self.make.decoded(document), book, self.offer, pool=self.make.pool, boot_id="b")

    def prepare(self, uid, *results, **claim):
        plan = self.plan(uid, *results, **claim)
        # As it would come back from disk.
        stored = msgspec.json.decode(
            msgspec.json.encode(msgspec.structs.replace(plan.record, state=State.COMPLETED)), type=ClaimRecord
        )
        self.records[uid] = stored
        return plan


@pytest.fixture
def node(make):
    return Node(make)


def share(make, memory=4 * GIB, cores=0, slots=1, share=S1, device=SHARED, **more):
    return make.result(device, share=share, memory=memory, cores=cores, slots=slots, **more)


def exclusive(make, *cards):
    config = decode_config(b'{"defaults": {"mode": "exclusive"}}', where="f")
    return Node(make, *cards, config=config)


def test_b104_a_share_is_what_the_scheduler_counted(make, node):
    plan = node.plan(make.uid(), share(make, 4 * GIB, 30))
    (held,) = plan.record.results
    assert plan.action is Action.NEW
    assert (held.grant.memory_bytes, held.grant.core_percent) == (4 * GIB, 30)
    assert held.grant.card_uuid == make.uuids[0]
    assert held.grant.physical_bytes == 24 * GIB
    assert plan.record.state is State.STARTED


def test_b104_quantities_are_read_as_kubernetes_writes_them(make, node):
    result = share(make)
    result["consumedCapacity"] = {"memory": "4Gi", "gpu.aliquot.dev/cores": "30", "slots": "1"}
    (held,) = node.plan(make.uid(), result).record.results
    assert (held.grant.memory_bytes, held.grant.core_percent) == (4 * GIB, 30)


def test_b106_shares_of_one_device_have_names_of_their_own(make, node):
    one, two = make.uid(), make.uid()
    first = node.prepare(one, share(make, 4 * GIB, share=S1))
    second = node.prepare(two, share(make, 6 * GIB, share=S2))
    grants = [plan.record.results[0].grant for plan in (first, second)]
    assert [g.name for g in grants] == [f"c-{one}-{SHARED}-{S1}", f"c-{two}-{SHARED}-{S2}"]
    assert [g.memory_bytes for g in grants] == [4 * GIB, 6 * GIB]


def test_slots_and_whole_cards_give_fixed_amounts(make):
    slots = Node(make, features=make.no_shares)
    (held,) = slots.plan(make.uid(), make.result("gpu-aaaaaaaa-s1")).record.results
    assert (held.grant.memory_bytes, held.grant.core_percent) == (6 * GIB, 25)
    (held,) = exclusive(make).plan(make.uid(), make.result("gpu-aaaaaaaa")).record.results
    assert (held.grant.memory_bytes, held.grant.core_percent) == (0, 0)


def test_a_claim_with_two_cards_keeps_allocation_order(make, node):
    results = [
        share(make, device="gpu-bbbbbbbb-shared", share=S2, request="gpus"),
        share(make, device=SHARED, share=S1, request="gpus"),
    ]
    plan = node.plan(make.uid(), *results)
    assert [held.asked.device for held in plan.record.results] == ["gpu-bbbbbbbb-shared", SHARED]


def test_an_extended_resource_claim_is_an_ordinary_one(make, node):
    plan = node.plan(
        make.uid(),
        share(make, 24 * GIB, request="container-0-request-0"),
        annotations={"resource.kubernetes.io/extended-resource-claim": "true"},
    )
    assert plan.record.results[0].asked.main_request == "container-0-request-0"


def test_b090_an_exclusive_device_has_one_holder_and_admin_access_is_outside(make):
    node = exclusive(make)
    one, two, three = make.uid(), make.uid(), make.uid()
    node.prepare(one, make.result("gpu-aaaaaaaa"), name="first")
    with pytest.raises(ConflictError) as caught:
        node.prepare(two, make.result("gpu-aaaaaaaa"), name="second")
    assert caught.value.retryable
    for word in (one, "t/first", "t/second", two, "gpu-aaaaaaaa", "kubelet retries"):
        assert word in str(caught.value)
    admin = node.prepare(three, make.result("gpu-aaaaaaaa", admin=True))
    assert admin.record.results[0].grant.memory_bytes == 0
    del node.records[one]
    node.prepare(two, make.result("gpu-aaaaaaaa"))


def test_b090_admin_access_to_a_share_gets_no_limit_and_takes_no_room(make, node):
    node.prepare(make.uid(), make.result(SHARED, share=S2, admin=True, memory=24 * GIB, cores=0, slots=10))
    (held,) = node.prepare(make.uid(), share(make, 24 * GIB)).record.results
    assert held.grant.memory_bytes == 24 * GIB
    admin = next(r for r in node.records.values() if r.results[0].asked.admin).results[0]
    assert (admin.grant.memory_bytes, admin.grant.core_percent) == (0, 0)


def test_admin_and_own_access_to_one_device_have_two_names(make):
    node = exclusive(make)
    plan = node.plan(make.uid(), make.result("gpu-aaaaaaaa"), make.result("gpu-aaaaaaaa", request="watch", admin=True))
    names = [held.grant.name for held in plan.record.results]
    assert len(set(names)) == 2


def test_memory_of_a_card_is_never_given_twice(make, node):
    one = make.uid()
    node.prepare(one, share(make, 20 * GIB), name="big")
    with pytest.raises(ConflictError) as caught:
        node.plan(make.uid(), share(make, 5 * GIB, share=S2))
    text = str(caught.value)
    assert "5Gi were allocated, but of 24Gi only 4Gi are free" in text
    assert f"claim t/big (UID {one})" in text
    node.plan(make.uid(), share(make, 4 * GIB, share=S2))
    node.plan(make.uid(), share(make, 24 * GIB, share=S2, device="gpu-bbbbbbbb-shared"))


def test_two_shares_of_one_claim_on_one_card_count_together(make, node):
    with pytest.raises(ConflictError, match="the same claim"):
        node.plan(make.uid(), share(make, 20 * GIB), share(make, 5 * GIB, share=S2, request="b"))


def test_places_of_a_card_are_counted(make):
    config = decode_config(b'{"defaults": {"maxShares": 2}}', where="f")
    node = Node(make, make.card(), config=config)
    node.prepare(make.uid(), share(make, GIB, share=make.uid()))
    node.prepare(make.uid(), share(make, GIB, share=make.uid()))
    with pytest.raises(ConflictError, match="all of its 2 places are taken"):
        node.plan(make.uid(), share(make, GIB, share=make.uid()))


def test_one_share_belongs_to_one_claim(make, node):
    node.prepare(make.uid(), share(make, GIB))
    with pytest.raises(ConflictError, match=f"its share {S1} belongs to"):
        node.plan(make.uid(), share(make, GIB))


def test_a_shareable_device_without_share_id_was_given_whole(make, node):
    result = make.result(SHARED)
    (held,) = node.prepare(make.uid(), result).record.results
    assert held.grant.memory_bytes == 24 * GIB
    with pytest.raises(ConflictError, match="held whole by"):
        node.plan(make.uid(), share(make, GIB))
    other = Node(make)
    other.prepare(make.uid(), share(make, GIB))
    with pytest.raises(ConflictError):
        other.plan(make.uid(), result)


def test_a_slot_has_one_holder_and_its_neighbours_are_free(make):
    node = Node(make, features=make.no_shares)
    node.prepare(make.uid(), make.result("gpu-aaaaaaaa-s0"))
    node.prepare(make.uid(), make.result("gpu-aaaaaaaa-s1"))
    with pytest.raises(ConflictError):
        node.plan(make.uid(), make.result("gpu-aaaaaaaa-s0"))


def test_a_card_that_was_recut_is_not_given_beside_its_old_holders(make):
    node = Node(make, features=make.no_shares)
    node.prepare(make.uid(), make.result("gpu-aaaaaaaa-s0"))
    node.offer = make.offer(make.card(0))  # as if the layout had flipped in spite of the holder
    with pytest.raises(ConflictError):
        node.plan(make.uid(), share(make, GIB))


def test_held_layouts_are_those_of_the_records(make, node):
    node.prepare(make.uid(), share(make, GIB))
    node.prepare(make.uid(), make.result("gpu-bbbbbbbb-shared", share=S2, admin=True))
    assert held_layouts(node.records) == {make.uuids[0]: node.offer.choices[make.uuids[0]].layout}


def test_b107_equal_repeats_are_idempotent_and_changed_ones_refused(make, node):
    uid = make.uid()
    node.prepare(uid, share(make, 4 * GIB))
    again = node.plan(uid, share(make, 4 * GIB))
    assert again.action is Action.REPEAT
    assert again.record == node.records[uid]
    for changed in (share(make, 4 * GIB, device="gpu-bbbbbbbb-shared"), share(make, 6 * GIB), share(make, share=S2)):
        with pytest.raises(ConflictError) as caught:
            node.plan(uid, changed)
        assert "has to unprepare it" in str(caught.value)
        assert "4Gi" in str(caught.value)


def test_b130_only_claims_of_this_boot_and_of_another_driver_are_outdated(make, node):
    uid, other = make.uid(), make.uid()
    node.prepare(uid, share(make))
    node.prepare(other, share(make, share=S2))
    node.records[other] = msgspec.structs.replace(node.records[other], boot_id="earlier", driver_version="1.2")
    assert outdated(node.records, driver_version="570.195.03", boot_id="b") == {}
    assert set(outdated(node.records, driver_version="580.2", boot_id="b")) == {uid}
    assert outdated(node.records, driver_version=None, boot_id="b") == {}
    # After a reboot the next container gets the driver of then.
    again = node.plan(other, share(make, share=S2))
    assert (again.action, again.record.driver_version) == (Action.REPEAT, "570.195.03")


def test_b107_an_unfinished_try_is_continued_or_redone(make, node):
    uid = make.uid()
    node.prepare(uid, share(make, 4 * GIB))
    node.records[uid] = msgspec.structs.replace(node.records[uid], state=State.STARTED)
    assert node.plan(uid, share(make, 4 * GIB)).action is Action.CONTINUE
    redo = node.plan(uid, share(make, 6 * GIB))
    assert redo.action is Action.REDO
    assert redo.record.results[0].grant.memory_bytes == 6 * GIB


def test_b107_an_equal_repeat_needs_no_card(make, node):
    uid = make.uid()
    node.prepare(uid, share(make))
    node.offer = make.offer()
    assert node.plan(uid, share(make)).action is Action.REPEAT


def test_b101_other_drivers_devices_are_skipped(make, node):
    plan = node.plan(make.uid(), make.result("nic1", driver="nic.example.com", pool="x"), share(make))
    assert [held.asked.device for held in plan.record.results] == [SHARED]
    assert node.plan(make.uid(), make.result("nic1", driver="nic.example.com", pool="x")).record.results == ()


def test_another_uid_is_another_claim(make, node):
    uid = make.uid()
    document = make.decoded(make.claim(make.uid(), share(make)))
    with pytest.raises(ClusterError, match="deleted and made anew"):
        plan_prepare(ClaimRef(uid=uid, namespace="t", name="c"), document, Book(records={}), node.offer, pool="n1/gpu")


def test_a_claim_that_is_not_allocated_or_ending_is_refused(make, node):
    uid = make.uid()
    ref = ClaimRef(uid=uid, namespace="t", name="c")
    bare = make.claim(uid)
    bare["status"] = {}
    with pytest.raises(ClusterError, match="not allocated"):
        plan_prepare(ref, make.decoded(bare), Book(records={}), node.offer, pool="n1/gpu")
    ending = make.claim(uid, share(make), deletionTimestamp="2026-01-01T00:00:00Z")
    node.plan(uid, share(make), deletionTimestamp="2026-01-01T00:00:00Z")
    ending["status"]["reservedFor"] = []
    with pytest.raises(ClusterError, match="reserved for no pod"):
        plan_prepare(ref, make.decoded(ending), Book(records={}), node.offer, pool="n1/gpu")


def test_another_nodes_pool_and_a_missing_device_are_refused(make, node):
    with pytest.raises(ClusterError, match="this node's is n1/gpu"):
        node.plan(make.uid(), share(make, pool="n2/gpu"))
    with pytest.raises(HardwareError, match="gpu-0000 is not offered by node pool n1/gpu"):
        node.plan(make.uid(), share(make, device="gpu-0000"))


@pytest.mark.parametrize("amounts", [{"memory": 25 * GIB}, {"memory": 0}, {"cores": 101}])
def test_impossible_amounts_are_refused(make, node, amounts):
    with pytest.raises(ClusterError, match="the scheduler gave"):
        node.plan(make.uid(), share(make, **amounts))


def opaque(parameters, *, source="FromClaim", requests=(), driver="gpu.aliquot.dev"):
    body = {"apiVersion": "gpu.aliquot.dev/v1", "kind": "Share", **parameters}
    return {"source": source, "requests": list(requests), "opaque": {"driver": driver, "parameters": body}}


def test_b099_a_misspelt_field_is_named(make, node):
    with pytest.raises(RequestError) as caught:
        node.plan(make.uid(), share(make), config=[opaque({"memroyLimit": "4Gi"})])
    assert "memroyLimit" in str(caught.value)
    assert "t/c" in str(caught.value)


def test_b099_a_stored_record_with_unknown_fields_still_reads(make, node):
    uid = make.uid()
    node.prepare(uid, share(make))
    document = msgspec.json.decode(msgspec.json.encode(node.records[uid]))
    document["results"][0]["asked"]["terms"] = {"memroyLimit": "4Gi"}
    document["newer"] = {"x": 1}
    assert msgspec.json.decode(msgspec.json.encode(document), type=ClaimRecord).results[0].grant.memory_bytes == 4 * GIB


def test_b102_main_and_sub_request_match_and_the_claim_wins_over_the_class(make, node):
    config = [
        opaque({"corePolicy": "force", "priority": 1}, source="FromClass"),
        opaque({"corePolicy": "disable"}, requests=["gpu/small"]),
        opaque({"corePolicy": "force", "memoryOversubscribe": True}, requests=["gpu"]),
        opaque({"priority": 0}, requests=["gpu/big"]),
        opaque({"nonsense": 1}, driver="nic.example.com"),
    ]
    (held,) = node.plan(make.uid(), share(make, request="gpu/small"), config=config).record.results
    assert held.grant.core_policy is CorePolicy.DISABLE
    assert held.grant.priority == 1
    assert held.grant.oversubscribe
    assert held.asked.main_request == "gpu"


def test_no_limiter_is_for_whole_devices_only(make, node):
    config = [opaque({"limiter": "none"})]
    with pytest.raises(RequestError, match="allowed for whole devices only"):
        node.plan(make.uid(), share(make), config=config)
    (held,) = exclusive(make).plan(make.uid(), make.result("gpu-aaaaaaaa"), config=config).record.results
    assert held.asked.terms.hook is False


def test_b089_a_record_that_cannot_be_read_holds_its_cards(make, node):
    other = make.uid()
    raw = b'{"state": "half", "results": [{"card_uuid": "%s", "x": [1, {"y": 2}]}]}' % make.uuids[0].encode()
    assert cards_in(raw) == {make.uuids[0]}
    assert cards_in(b"\xff{") == frozenset()
    node.unreadable = {other: cards_in(raw)}
    with pytest.raises(ConflictError, match=other):
        node.plan(make.uid(), share(make))
    node.plan(make.uid(), share(make, device="gpu-bbbbbbbb-shared"))
    node.unreadable = {other: frozenset()}
    with pytest.raises(ConflictError, match=other):
        node.plan(make.uid(), share(make, device="gpu-bbbbbbbb-shared"))


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 4), st.booleans()), max_size=30))
def test_whatever_the_scheduler_says_a_card_is_never_overbooked(make, asks):
    node = Node(make, make.card())
    numbers = iter(range(1, 1000))
    for gib, slots, leave in asks:
        uid = f"00000000-0000-4000-8000-{next(numbers):012d}"
        try:
            node.prepare(uid, share(make, gib * GIB, slots=slots, share=uid))
        except (ConflictError, ClusterError):
            if leave and node.records:
                node.records.pop(next(iter(node.records)))
        held = [h for r in node.records.values() for h in r.results]
        assert sum(h.memory_bytes for h in held) <= 24 * GIB
        assert sum(h.slots for h in held) <= 10
        assert all(h.grant.memory_bytes == h.memory_bytes for h in held)


def test_a_device_replaced_by_a_card_with_other_memory_cannot_be_overbooked(make, node):
    node.prepare(make.uid(), share(make, 20 * GIB))
    layout = node.offer.by_name[SHARED].layout
    smaller = replace(node.offer.by_name[SHARED], layout=msgspec.structs.replace(layout, memory_bytes=20 * GIB))
    node.offer = replace(node.offer, devices=(smaller,))
    with pytest.raises(ConflictError):
        node.plan(make.uid(), share(make, GIB, share=S2))
