# SPDX-License-Identifier: Apache-2.0
"""The main job: pods share a card, each held to what it was given, and what one gives back another gets."""

from __future__ import annotations

import pytest

from aliquot.api import names
from aliquot.e2e import install
from aliquot.e2e.api import RESOURCE_API, eventually, load_manifests
from aliquot.e2e.objects import claim, claim_template, container, from_template, is_card, named, pod, share
from aliquot.e2e.stage import GIB
from aliquot.node.checkpoint import look

pytestmark = [pytest.mark.cluster, pytest.mark.node, pytest.mark.slow, pytest.mark.timeout(300)]

OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"


def cards_of(cluster, node):
    """UUIDs of a node's cards, as published."""
    found = []
    for device in install.devices(cluster, node):
        attributes = device["attributes"]
        uuid = attributes.get("parentUUID", attributes["uuid"])["string"]
        if uuid not in found:
            found.append(uuid)
    return found


def test_two_pods_share_a_card_and_a_third_waits_until_one_is_gone(cluster, stage, variant):
    node = cluster.nodes[0]
    card = cards_of(cluster, node)[0]
    stage.create(
        claim_template("ten", share("10Gi", selectors=[is_card(card)])),
        *(pod(p, claims={"gpu": from_template("ten")}) for p in ("first", "second")),
    )
    stage.running("first", "second")
    first, second = stage.allocations("first")[0], stage.allocations("second")[0]
    assert first.memory_bytes == second.memory_bytes == (10 if variant.shares else 12) * GIB
    for name, given in (("first", first), ("second", second)):
        (seen,) = stage.show(name)
        assert seen["uuid"] == card
        assert seen["total"] == seen["device_total"] == given.memory_bytes

    # One takes all it may: the next byte is refused, with CUDA's own error, and the neighbour does not notice.
    stage.hold("first", "9Gi")
    (refused,) = stage.allocate("first", "4Gi")
    assert refused["result"] == OUT_OF_MEMORY
    (fine,) = stage.allocate("second", "9Gi")
    assert fine["result"] == "CUDA_SUCCESS"
    assert stage.show("second")[0]["free"] > 9 * GIB

    # What does not fit waits, with a reason, and starts when a share comes back.
    stage.create(pod("third", claims={"gpu": from_template("ten")}))
    assert "cannot allocate all claims" in stage.refusal("third")
    stage.delete_pod("first")
    stage.running("third", timeout_s=90)
    assert stage.show("third")[0]["free"] > 9 * GIB


def test_nothing_is_left_on_the_node_when_the_pods_are_gone(local, stage):
    node = local.nodes[0]
    card = cards_of(local, node)[0]
    stage.create(
        claim_template("four", share("4Gi", selectors=[is_card(card)])),
        pod("only", claims={"gpu": from_template("four")}),
    )
    stage.running("only")
    (given,) = stage.allocations("only")
    assert traces(local, node, given), "the checks below must be able to find something"
    stage.hold("only", "1Gi")
    stage.delete_pod("only")
    eventually(lambda: traces(local, node, given) == [], 30, "end of every trace of the claim")


def traces(local, node, given):
    """Paths on a node that speak of an allocation."""
    at = local.node(node)
    found = []
    for folder in ("/run/aliquot/grants", "/run/aliquot/usage", "/var/run/cdi"):
        found += [str(p) for p in at.path(folder).glob("*") if given.claim_uid in p.name]
    if given.claim_uid in look(at.path("/var/lib/aliquot/checkpoint.json")).claims:
        found.append("checkpoint")
    return found


def test_b094_named_claim_is_one_share_for_both_of_its_pods(stage):
    stage.create(
        claim("team", share("6Gi")),
        *(pod(p, claims={"gpu": named("team")}) for p in ("first", "second")),
    )
    stage.running("first", "second")
    assert stage.node_of("first") == stage.node_of("second")
    limit = stage.allocations("first")[0].memory_bytes
    assert stage.show("first")[0]["uuid"] == stage.show("second")[0]["uuid"]
    half = f"{limit // GIB * 2 // 3}Gi"
    stage.hold("first", half)
    (refused,) = stage.allocate("second", half)
    assert refused["result"] == OUT_OF_MEMORY
    # Only the last pod takes the share with it.
    stage.delete_pod("first")
    (fine,) = stage.allocate("second", half)
    assert fine["result"] == "CUDA_SUCCESS"


def test_template_gives_each_pod_a_claim_of_its_own(stage):
    stage.create(
        claim_template("four", share("4Gi")),
        *(pod(p, claims={"gpu": from_template("four")}) for p in ("first", "second")),
    )
    stage.running("first", "second")
    (first,), (second,) = stage.allocations("first"), stage.allocations("second")
    assert first.claim_uid != second.claim_uid
    stage.hold("first", "3Gi")
    assert stage.allocate("second", "3Gi")[0]["result"] == "CUDA_SUCCESS"


def test_b104_b106_two_shares_of_one_card_hold_what_each_was_given(cluster, stage, variant):
    card = cards_of(cluster, cluster.nodes[0])[0]
    stage.create(
        claim_template("four", share("4Gi", selectors=[is_card(card)])),
        claim_template("six", share("6Gi", selectors=[is_card(card)])),
        pod("four", claims={"gpu": from_template("four")}),
        pod("six", claims={"gpu": from_template("six")}),
    )
    stage.running("four", "six")
    if variant.shares:
        assert [stage.allocations(p)[0].memory_bytes for p in ("four", "six")] == [4 * GIB, 6 * GIB]
        assert stage.allocations("four")[0].device == stage.allocations("six")[0].device
    for name in ("four", "six"):
        (given,) = stage.allocations(name)
        (seen,) = stage.show(name)
        assert (seen["uuid"], seen["total"]) == (card, given.memory_bytes)
        one_more = f"{given.memory_bytes // GIB + 1}Gi"
        assert stage.allocate(name, one_more)[0]["result"] == OUT_OF_MEMORY
    stage.delete_pod("four")
    assert stage.show("six")[0]["total"] == stage.allocations("six")[0].memory_bytes
    assert stage.allocate("six", "5Gi")[0]["result"] == "CUDA_SUCCESS"


def test_claim_with_two_cards_shows_both_in_the_claims_order(cluster, stage):
    node = cluster.nodes[1]
    zero, one = cards_of(cluster, node)[:2]
    stage.create(
        claim_template(
            "two",
            share("6Gi", name="large", selectors=[is_card(one)]),
            share("3Gi", name="small", selectors=[is_card(zero)]),
        ),
        pod("both", claims={"gpus": from_template("two")}),
    )
    stage.running("both")
    given = stage.allocations("both")
    seen = {d["uuid"]: d for d in stage.show("both")}
    assert set(seen) == {zero, one}
    by_request = {a.request: a.memory_bytes for a in given}
    assert seen[one]["total"] == by_request["large"]
    assert seen[zero]["total"] == by_request["small"]
    # Each card has its own limit.
    ordinal = {uuid: str(d["ordinal"]) for uuid, d in seen.items()}
    too_much = str(by_request["small"] + 1)
    answers = stage.allocate("both", "--device", ordinal[zero], too_much, "--device", ordinal[one], "5Gi")
    assert [a["result"] for a in answers] == [OUT_OF_MEMORY, "CUDA_SUCCESS"]


def test_b103_only_the_container_that_names_the_claim_gets_the_card(stage):
    stage.create(
        claim_template("four", share("4Gi")),
        pod(
            "mixed",
            claims={"gpu": from_template("four")},
            containers=[container("has", ["workload", "idle"], claims=["gpu"]), container("not", ["workload", "idle"])],
        ),
    )
    stage.running("mixed")
    assert len(stage.show("mixed", container="has")) == 1
    without = stage.exec("mixed", "workload", "show", container="not")
    assert without.lines[-1]["why"] == "libcuda.so.1 cannot be loaded"
    inside = "ls /usr/local/vgpu /etc/ld.so.preload /dev/nvidia0; env | grep -c NVIDIA_VISIBLE_DEVICES"
    assert "vgpu" not in stage.exec("mixed", "sh", "-c", inside, container="not").stdout


@pytest.mark.needs_extended_resources
def test_b103_an_extended_resource_reaches_the_container_that_asks_for_it(cluster, stage):
    """The scheduler makes a claim of its own, with a request mapping instead of the pod's references."""
    resource = f"{stage.namespace}.example.com/gpu"
    card = cards_of(cluster, cluster.nodes[0])[0]
    whole = {
        "apiVersion": RESOURCE_API,
        "kind": "DeviceClass",
        "metadata": {"name": f"{stage.namespace}.example.com"},
        "spec": {
            "extendedResourceName": resource,
            "selectors": [{"cel": {"expression": f'device.driver == "{names.DRIVER}" && ({is_card(card)})'}}],
        },
    }
    asking = pod("mixed", containers=[container(n, ["workload", "idle"]) for n in ("has", "not")])
    asking["spec"]["containers"][0]["resources"] = {"requests": {resource: "1"}, "limits": {resource: "1"}}
    cluster.api.create(whole)
    try:
        stage.create(asking)
        stage.running("mixed")
        assert [d["uuid"] for d in stage.show("mixed", container="has")] == [card]
        assert stage.exec("mixed", "cat", names.CONTAINER_PRELOAD, container="has").stdout.strip()
        without = stage.exec("mixed", "workload", "show", container="not")
        assert without.lines[-1]["why"] == "libcuda.so.1 cannot be loaded"
        assert stage.exec("mixed", "ls", names.CONTAINER_PRELOAD, container="not").status != 0
        stage.delete_pod("mixed")
    finally:
        cluster.api.delete(RESOURCE_API, "DeviceClass", whole["metadata"]["name"])


def test_b127_libraries_and_tools_are_found_without_any_setting(stage):
    stage.create(claim_template("four", share("4Gi")), pod("plain", claims={"gpu": from_template("four")}))
    stage.running("plain")
    total_mib = stage.allocations("plain")[0].memory_bytes >> 20
    table = stage.smi("plain")
    assert f"{total_mib}MiB" in table
    listed = stage.smi("plain", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
    assert listed.strip() == str(total_mib)
    environment = stage.exec("plain", "env").stdout
    assert "LD_LIBRARY_PATH" not in environment
    assert "LD_PRELOAD" not in environment


def test_b128_preload_names_exactly_the_library_that_is_there(stage):
    stage.create(claim_template("four", share("4Gi")), pod("plain", claims={"gpu": from_template("four")}))
    stage.running("plain")
    assert stage.exec("plain", "cat", names.CONTAINER_PRELOAD).stdout == names.CONTAINER_LIBRARY + "\n"
    assert stage.exec("plain", "test", "-s", names.CONTAINER_LIBRARY).status == 0


@pytest.mark.needs_shares  # a card that is cut into slots is never offered whole
def test_whole_card_is_not_shared_and_has_all_its_memory(cluster, stage):
    node = cluster.nodes[1]
    card = cards_of(cluster, node)[1]
    whole = share("24Gi", selectors=[is_card(card)])
    whole["exactly"]["deviceClassName"] = names.CLASS_WHOLE
    stage.create(
        claim_template("whole", whole),
        claim_template("one", share("1Gi", selectors=[is_card(card)])),
        pod("whole", claims={"gpu": from_template("whole")}),
    )
    stage.running("whole")
    assert stage.show("whole")[0]["total"] == 24 * GIB
    stage.create(pod("late", claims={"gpu": from_template("one")}))
    assert "cannot allocate all claims" in stage.refusal("late")


def test_examples_run_as_they_are(cluster, stage, repository, variant):
    """What the documentation points at; on their own, so that all fit."""
    for path in sorted((repository / "deploy" / "examples").glob("*.yaml")):
        if path.stem == "two-cards" and not variant.shares:
            continue  # its constraint is dropped there, and both slots may be of one card, as the file says
        if path.stem == "whole-card" and not variant.shares:
            continue
        objects = load_manifests(path)
        stage.create(*objects)
        pods = [o["metadata"]["name"] for o in objects if o["kind"] == "Pod"]
        stage.running(*pods)
        for name in pods:
            wanted = 2 if path.stem == "two-cards" else 1
            assert len({d["uuid"] for d in stage.show(name)}) == wanted, path.name
        for name in pods:
            stage.delete_pod(name)
        for obj in objects:
            if obj["kind"] == "ResourceClaim":
                cluster.api.delete(RESOURCE_API, "ResourceClaim", obj["metadata"]["name"], stage.namespace)
