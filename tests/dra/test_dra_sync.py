# SPDX-License-Identifier: Apache-2.0
"""What is written to make the stored slices the desired ones: nothing at rest, in order, with the right generation."""

from __future__ import annotations

import copy
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from aliquot.api.quantity import format_count, parse_exact
from aliquot.dra.slices import SLICE_LIMIT, pool_for
from aliquot.dra.sync import (
    ANNOTATION_CONTENT,
    ANNOTATION_STARTED,
    Author,
    fingerprint,
    plan_sync,
    slice_index,
    slice_name,
)

ME = Author(version="1.0", started_ns=100)
OWNER = {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "node-1", "controller": True}


def pool(make, *cards, **kwargs):
    return pool_for(make.offer(*cards, **kwargs), node_name="n1", pool="n1/gpu", taints_kept=True)


class Server:
    """Just enough of an API server to apply a plan: names, resourceVersions, quantities in its own form."""

    def __init__(self):
        self.stored = []
        self.versions = 0

    def apply(self, plan):
        for item in plan.deletes:
            self.stored.remove(item)
        for item in plan.updates:
            (old,) = [s for s in self.stored if s["metadata"]["name"] == item["metadata"]["name"]]
            assert item["metadata"]["resourceVersion"] == old["metadata"]["resourceVersion"]
            self.stored[self.stored.index(old)] = self._kept(item)
        for item in plan.creates:
            assert item["metadata"]["name"] not in [s["metadata"]["name"] for s in self.stored]
            self.stored.append(self._kept(item))

    def _kept(self, item):
        self.versions += 1
        kept = copy.deepcopy(item)
        kept["metadata"] |= {"resourceVersion": str(self.versions), "uid": f"u{self.versions}"}
        for device in kept["spec"]["devices"]:
            for capacity in device.get("capacity", {}).values():
                capacity["value"] = format_count(int(parse_exact(capacity["value"])))
            for taint in device.get("taints", ()):
                taint.setdefault("timeAdded", "2026-01-01T00:00:00Z")
        return kept

    def sync(self, desired, author=ME, **kwargs):
        plan = plan_sync(self.stored, desired, author=author, owner=OWNER, **kwargs)
        self.apply(plan)
        again = plan_sync(self.stored, desired, author=author, owner=OWNER, **kwargs)
        assert again.empty
        return plan


def test_first_publish_creates_generation_one_with_owner_and_annotations(make):
    server = Server()
    plan = server.sync(pool(make, make.card()))
    (created,) = plan.creates
    assert created["metadata"]["name"] == "00000-gpu.aliquot.dev-n1"
    assert created["metadata"]["ownerReferences"] == [OWNER]
    assert created["metadata"]["annotations"][ANNOTATION_STARTED] == "100"
    assert len(created["metadata"]["annotations"][ANNOTATION_CONTENT]) == 16
    assert created["spec"]["pool"] == {"name": "n1/gpu", "generation": 1, "resourceSliceCount": 1}
    assert created["spec"]["nodeName"] == "n1"
    assert "allNodes" not in created["spec"]


def test_quantities_are_compared_as_numbers_so_nothing_is_written_at_rest(make):
    server = Server()
    server.sync(pool(make, make.card()))
    assert server.stored[0]["spec"]["devices"][0]["capacity"]["memory"]["value"] != "24Gi"
    assert plan_sync(server.stored, pool(make, make.card()), author=ME, owner=OWNER).empty


def test_one_changed_slice_is_updated_in_place_and_keeps_the_generation(make):
    server = Server()
    server.sync(pool(make, make.card()))
    server.stored[0]["metadata"]["labels"] = {"theirs": "stays"}
    plan = server.sync(pool(make, make.card(), make.card(1)))
    assert (len(plan.updates), len(plan.creates), len(plan.deletes), plan.generation) == (1, 0, 0, 1)
    assert plan.updates[0]["metadata"]["labels"] == {"theirs": "stays"}


def test_b112_growing_and_shrinking_changes_count_generation_and_removes_surplus(make):
    server = Server()
    server.sync(pool(make, *[make.card(n) for n in range(3)]))
    grown = server.sync(pool(make, *[make.card(n) for n in range(SLICE_LIMIT + 2)]))
    assert (len(grown.creates), len(grown.updates), grown.generation) == (1, 1, 2)
    assert {s["spec"]["pool"]["generation"] for s in server.stored} == {2}
    assert {s["spec"]["pool"]["resourceSliceCount"] for s in server.stored} == {2}
    assert [slice_index(s["metadata"]["name"]) for s in server.stored] == [0, 1]
    shrunk = server.sync(pool(make, *[make.card(n) for n in range(2)]))
    assert len(shrunk.deletes) == 1
    assert len(server.stored) == 1
    assert shrunk.generation >= grown.generation


def test_b110_a_deleted_pool_comes_back_with_a_higher_generation(make):
    server = Server()
    server.sync(pool(make, make.card()))
    server.stored.clear()
    plan = plan_sync(server.stored, pool(make, make.card()), author=ME, owner=OWNER, last_generation=5)
    assert plan.generation == 6
    assert plan.creates[0]["spec"]["pool"]["name"] == "n1/gpu"


def test_a_slice_of_another_name_or_pool_of_ours_goes(make):
    server = Server()
    desired = pool(make, make.card())
    server.sync(desired)
    old_style = copy.deepcopy(server.stored[0])
    old_style["metadata"]["name"] = "n1-gpu.aliquot.dev-x7k2p"
    other_pool = copy.deepcopy(server.stored[0])
    other_pool["metadata"]["name"] = "00000-gpu.aliquot.dev-n1-x"
    other_pool["spec"]["pool"]["name"] = "n1"
    server.stored += [old_style, other_pool]
    plan = server.sync(desired)
    assert {s["metadata"]["name"] for s in plan.deletes} == {
        old_style["metadata"]["name"],
        other_pool["metadata"]["name"],
    }


def test_duplicates_of_an_index_leave_one(make):
    server = Server()
    desired = pool(make, make.card())
    server.sync(desired)
    twin = copy.deepcopy(server.stored[0])
    twin["metadata"]["name"] += "-twin"
    twin["spec"]["pool"]["generation"] = 0
    server.stored.append(twin)
    plan = server.sync(desired)
    assert [s["metadata"]["name"] for s in plan.deletes] == [twin["metadata"]["name"]]


def test_a_node_made_anew_becomes_the_owner(make):
    server = Server()
    desired = pool(make, make.card())
    server.sync(desired)
    plan = plan_sync(server.stored, desired, author=ME, owner={**OWNER, "uid": "node-2"})
    assert [o["uid"] for o in plan.updates[0]["metadata"]["ownerReferences"]] == ["node-2"]
    assert plan_sync(server.stored, desired, author=ME, owner=None).empty


def test_what_a_server_drops_is_accepted_and_not_written_again(make):
    server = Server()
    desired = pool(make, make.card())
    server.sync(desired)
    sent = fingerprint(desired.spec(0, 1))
    del server.stored[0]["spec"]["devices"][0]["allowMultipleAllocations"]
    for capacity in server.stored[0]["spec"]["devices"][0]["capacity"].values():
        capacity.pop("requestPolicy")
    assert not plan_sync(server.stored, desired, author=ME, owner=OWNER).empty
    accepted = {sent: fingerprint(server.stored[0]["spec"])}
    assert plan_sync(server.stored, desired, author=ME, owner=OWNER, accepted=accepted).empty
    other = pool(make, make.card(), make.card(1))
    assert not plan_sync(server.stored, other, author=ME, owner=OWNER, accepted=accepted).empty


def test_taint_times_are_the_servers_and_are_carried_along(make):
    server = Server()
    sick = {make.card(0).uuid: "lost"}
    server.sync(pool(make, make.card(), sick=sick))
    plan = server.sync(pool(make, make.card(), make.card(1), sick=sick))
    (taint,) = plan.updates[0]["spec"]["devices"][0]["taints"]
    assert taint["timeAdded"] == "2026-01-01T00:00:00Z"


def test_b116_the_older_instance_yields_to_the_newer_for_a_while(make):
    old, new = ME, replace(ME, version="2.0", started_ns=200)
    server = Server()
    server.sync(pool(make, make.card()), author=old)
    differing = pool(make, make.card(name="as the new version spells it"))
    server.sync(differing, author=new)
    plan = plan_sync(server.stored, pool(make, make.card()), author=old, owner=OWNER, yield_to_newer=True)
    assert plan.empty
    assert plan.yields_to_newer
    assert plan_sync(server.stored, pool(make, make.card()), author=old, owner=OWNER).updates
    assert plan_sync(server.stored, differing, author=replace(new, started_ns=300), owner=OWNER).empty


def test_b116_two_instances_on_the_same_hardware_want_the_same(make):
    server = Server()
    server.sync(pool(make, make.card()), author=ME)
    other = replace(ME, started_ns=200)
    assert plan_sync(server.stored, pool(make, make.card()), author=other, owner=OWNER).empty


@settings(deadline=None, max_examples=15)
@given(st.lists(st.sampled_from([0, 1, 2, SLICE_LIMIT - 1, SLICE_LIMIT, SLICE_LIMIT + 1]), min_size=1, max_size=4))
def test_any_history_of_pools_ends_complete_and_at_rest(make, sizes):
    server = Server()
    last = 0
    for size in sizes:
        plan = server.sync(pool(make, *[make.card(n) for n in range(size)]), last_generation=last)
        assert plan.generation >= last
        last = plan.generation
        specs = [s["spec"] for s in sorted(server.stored, key=lambda s: s["metadata"]["name"])]
        assert {s["pool"]["generation"] for s in specs} == {plan.generation}
        assert {s["pool"]["resourceSliceCount"] for s in specs} == {len(specs)}
        assert sum(len(s["devices"]) for s in specs) == size


def test_names_keep_order_and_length():
    assert slice_name(0, "n1") < slice_name(1, "n1") < slice_name(16, "n1")
    assert slice_index(slice_name(18, "n1")) == 18
    assert len(slice_name(1, "n" * 253)) <= 253
    assert slice_name(1, "n" * 253) != slice_name(1, "m" * 253)
    assert slice_index("gpu-n1-x") is None
