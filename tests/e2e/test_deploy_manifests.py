# SPDX-License-Identifier: Apache-2.0
"""The plain manifests against real API servers: nothing of them is dropped, and rights are what they say."""

from __future__ import annotations

import copy
import json

import pytest

from aliquot.api import names
from aliquot.e2e.api import RESOURCE_API, ApiError, eventually, load_manifests, tolerating
from aliquot.e2e.control_plane import DRA_SHARING_GATES

pytestmark = pytest.mark.cluster

ONE_NODE = {"key": "metadata.name", "operator": "In", "values": ["node-x"]}
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
MINORS = pytest.mark.parametrize("minor", ["1.34", "1.36", "1.37"])


@pytest.fixture(scope="session")
def manifests(repository):
    return load_manifests(*sorted((repository / "deploy").glob("*.yaml")))


@pytest.fixture(scope="session")
def deployed(control_plane, manifests):
    for obj in manifests:
        control_plane.api.apply(obj)
    return control_plane


def _slice(name, node="node-x", **spec):
    return {
        "apiVersion": RESOURCE_API,
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {
            "driver": names.DRIVER,
            "nodeName": node,
            "pool": {"name": f"{node}/gpu", "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "gpu-1"}],
            **spec,
        },
    }


@pytest.fixture(scope="session")
def driver_on(deployed):
    """A client with the very identity that the driver's pod on a node has."""

    def client(node):
        api = deployed.api
        with tolerating(409):
            api.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"driver-{node}"},
            "spec": {
                "serviceAccountName": "aliquot-dra-driver",
                "nodeName": node,
                "containers": [{"name": "c", "image": "none"}],
            },
        }
        with tolerating(409):
            api.create(pod, "aliquot-system")
        stored = api.get("v1", "Pod", f"driver-{node}", "aliquot-system")
        token = deployed.service_account_token("aliquot-dra-driver", "aliquot-system", pod=stored["metadata"])
        own = deployed.client(deployed.kubeconfig_with_token(f"driver-{node}", token))
        # A policy that was stored is not yet one that is enforced.
        eventually(lambda: _confined(own), 30, "the policy of the manifests enforced")
        return own

    return client


def _confined(driver):
    try:
        driver.request("POST", SLICES, query={"dryRun": "All"}, body=_slice("probe", node="node-of-nobody"))
    except ApiError as error:
        return "may only touch ResourceSlices" in str(error)
    return False


@pytest.mark.slow
@MINORS
def test_no_minor_drops_or_refuses_a_field_of_ours(control_plane_of, manifests, minor):
    plane = control_plane_of(minor=minor)
    for obj in manifests:
        stored = plane.api.apply(obj)
        assert _missing(obj, stored) == [], f"{obj['kind']} {obj['metadata']['name']}"


def _missing(sent, stored, where=""):
    """Paths that were sent and did not come back."""
    if isinstance(sent, dict):
        return [
            p
            for k, v in sent.items()
            for p in ([f"{where}.{k}"] if k not in (stored or {}) else _missing(v, stored[k], f"{where}.{k}"))
        ]
    if isinstance(sent, list):
        if len(sent) != len(stored):
            return [where]
        return [p for i, v in enumerate(sent) for p in _missing(v, stored[i], f"{where}[{i}]")]
    return []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("minor", "gates"),
    [("1.34", {}), ("1.34", DRA_SHARING_GATES), ("1.36", {}), ("1.37", {})],
)
def test_examples_are_accepted_and_mean_the_same_where_requests_are_dropped(
    control_plane_of, new_namespace, repository, minor, gates
):
    plane = control_plane_of(minor=minor, feature_gates=gates)
    namespace = new_namespace(plane)
    for path in sorted((repository / "deploy" / "examples").glob("*.yaml")):
        for obj in load_manifests(path):
            stored = plane.api.create(obj, namespace)
            text = json.dumps(obj)
            if "capacity" in text and "requests" in text and obj["kind"] != "Pod":
                assert "compareTo(quantity(" in json.dumps(stored), f"{path.name}: nothing holds where requests drop"


def test_driver_publishes_for_its_own_node_only(driver_on):
    here = driver_on("node-x")
    here.create(_slice("own-node"))
    with pytest.raises(ApiError, match="may only touch ResourceSlices of that node") as refused:
        here.create(_slice("other-node", node="node-y"))
    assert refused.value.status == 422 or refused.value.status == 403
    here.delete(RESOURCE_API, "ResourceSlice", "own-node")


@pytest.mark.parametrize(
    "spec",
    [
        {"nodeName": None, "allNodes": True},
        {"nodeName": None, "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [ONE_NODE]}]}},
        {"driver": "gpu.example.com"},
    ],
    ids=["all nodes", "a selector", "another driver"],
)
def test_driver_cannot_reach_beyond_its_node_by_another_field(driver_on, spec):
    bad = _slice("beyond", **spec)
    bad["spec"] = {k: v for k, v in bad["spec"].items() if v is not None}
    with pytest.raises(ApiError, match="may only touch ResourceSlices"):
        driver_on("node-x").create(bad)


def test_driver_neither_changes_nor_deletes_slices_of_other_nodes(driver_on):
    there = driver_on("node-y")
    stored = there.create(_slice("of-y", node="node-y"))
    here = driver_on("node-x")
    stolen = copy.deepcopy(stored)
    stolen["spec"]["devices"] = [{"name": "gpu-2"}]
    path = f"{SLICES}/of-y"
    with pytest.raises(ApiError, match="may only touch ResourceSlices of that node"):
        here.request("PUT", path, body=stolen)
    with pytest.raises(ApiError, match="may only touch ResourceSlices of that node"):
        here.request("DELETE", path)
    there.request("DELETE", path)


def test_token_without_a_node_publishes_nothing(deployed):
    token = deployed.service_account_token("aliquot-dra-driver", "aliquot-system")
    loose = deployed.client(deployed.kubeconfig_with_token("driver-loose", token))
    eventually(lambda: loose.list(RESOURCE_API, "ResourceSlice") is not None, 5, "rights of the driver")
    with pytest.raises(ApiError, match="bound to no node"):
        loose.create(_slice("loose"))


@pytest.mark.parametrize(
    ("verb", "path"),
    [
        ("GET", "/api/v1/secrets"),
        ("GET", "/api/v1/pods"),
        ("GET", "/api/v1/nodes"),
        ("GET", "/apis/resource.k8s.io/v1/resourceclaims"),
        ("DELETE", "/api/v1/nodes/node-x"),
    ],
)
def test_driver_has_no_right_it_does_not_need(driver_on, verb, path):
    with pytest.raises(ApiError) as refused:
        driver_on("node-x").request(verb, path)
    assert refused.value.status == 403


def test_driver_reads_its_node_and_named_claims(driver_on, deployed, namespace):
    claim = {
        "apiVersion": RESOURCE_API,
        "kind": "ResourceClaim",
        "metadata": {"name": "c"},
        "spec": {"devices": {"requests": [{"name": "g", "exactly": {"deviceClassName": names.CLASS_SHARE}}]}},
    }
    deployed.api.create(claim, namespace)
    here = driver_on("node-x")
    assert here.get("v1", "Node", "node-x")
    assert here.get(RESOURCE_API, "ResourceClaim", "c", namespace)


def test_classes_are_the_ones_the_code_names(manifests):
    classes = {o["metadata"]["name"] for o in manifests if o["kind"] == "DeviceClass"}
    assert classes == {names.CLASS_SHARE, names.CLASS_WHOLE}
