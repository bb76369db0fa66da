# SPDX-License-Identifier: Apache-2.0
"""The control plane fixture itself: what comes up is a real API server with real authorization."""

from __future__ import annotations

import pytest

from aliquot.e2e.api import RESOURCE_API, ApiError, eventually
from aliquot.e2e.control_plane import DRA_SHARING_GATES

pytestmark = pytest.mark.cluster

NODE = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": ""}}


def _shared_slice(name, node):
    capacity = {"value": "16Gi", "requestPolicy": {"default": "1Gi", "validRange": {"min": "1Mi", "step": "1Mi"}}}
    return {
        "apiVersion": RESOURCE_API,
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {
            "driver": "probe.aliquot.dev",
            "nodeName": node,
            "pool": {"name": name, "generation": 1, "resourceSliceCount": 1},
            "devices": [
                {"name": "card", "allowMultipleAllocations": True, "capacity": {"memory": capacity}},
            ],
        },
    }


def test_version_is_the_one_asked_for(control_plane):
    version = control_plane.api.request("GET", "/version")
    assert version["gitVersion"].startswith(f"v{control_plane.options.minor}.")


def test_anonymous_and_unprivileged_users_are_held_back(control_plane, namespace):
    nobody = control_plane.client(control_plane.kubeconfig_for("nobody"))
    with pytest.raises(ApiError) as refused:
        nobody.list("v1", "Pod", namespace)
    assert refused.value.status == 403


def test_service_account_token_is_bound_to_its_node(control_plane, namespace):
    api = control_plane.api
    node = f"node-{namespace}"
    api.create({**NODE, "metadata": {"name": node}})
    api.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "driver"}}, namespace)
    pod = api.create(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "driver"},
            "spec": {
                "serviceAccountName": "driver",
                "nodeName": node,
                "containers": [{"name": "c", "image": "none"}],
            },
        },
        namespace,
    )
    token = control_plane.service_account_token("driver", namespace, pod=pod["metadata"])
    who = control_plane.client(control_plane.kubeconfig_with_token(f"{namespace}-driver", token)).request(
        "POST",
        "/apis/authentication.k8s.io/v1/selfsubjectreviews",
        body={"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"},
    )
    assert who["status"]["userInfo"]["extra"]["authentication.kubernetes.io/node-name"] == [node]


@pytest.mark.parametrize(
    ("minor", "gates", "kept"),
    [
        ("1.34", {}, False),
        ("1.34", DRA_SHARING_GATES, True),
        ("1.36", {}, True),
        ("1.37", {}, True),
    ],
)
@pytest.mark.slow
def test_what_each_minor_keeps_of_a_shared_device(control_plane_of, new_namespace, minor, gates, kept):
    plane = control_plane_of(minor=minor, feature_gates=gates)
    name = new_namespace(plane)
    plane.api.create({**NODE, "metadata": {"name": name}})
    stored = plane.api.create(_shared_slice(name, name))
    device = stored["spec"]["devices"][0]
    assert device.get("allowMultipleAllocations", False) is kept
    assert ("requestPolicy" in device["capacity"]["memory"]) is kept


def test_scheduler_shares_a_card_until_it_is_full(control_plane_of, new_namespace):
    plane = control_plane_of(scheduler=True, controller_manager=True)
    name = new_namespace(plane)
    api = plane.api
    api.create({**NODE, "metadata": {"name": name}})
    node = api.get("v1", "Node", name)
    node["status"] = {
        "allocatable": {"cpu": "4", "memory": "8Gi", "pods": "50"},
        "capacity": {"cpu": "4", "memory": "8Gi", "pods": "50"},
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    api.replace_status(node)
    api.create(_shared_slice(name, name))
    expression = "device.driver == 'probe.aliquot.dev'"
    api.create(
        {
            "apiVersion": RESOURCE_API,
            "kind": "DeviceClass",
            "metadata": {"name": name},
            "spec": {"selectors": [{"cel": {"expression": expression}}]},
        }
    )
    request = {"deviceClassName": name, "capacity": {"requests": {"memory": "6Gi"}}}
    template = {
        "apiVersion": RESOURCE_API,
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "six"},
        "spec": {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": request}]}}},
    }
    api.create(template, name)
    eventually(lambda: api.find("v1", "ServiceAccount", "default", name), 30, "the default service account")
    for n in range(3):
        api.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": f"p{n}"},
                "spec": {
                    "tolerations": [{"operator": "Exists"}],
                    "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "six"}],
                    "containers": [{"name": "c", "image": "none", "resources": {"claims": [{"name": "gpu"}]}}],
                },
            },
            name,
        )

    def settled():
        pods = api.list("v1", "Pod", name)
        bound = [p for p in pods if p["spec"].get("nodeName")]
        conditions = [c for p in pods for c in p["status"].get("conditions", []) if c.get("reason") == "Unschedulable"]
        return (len(bound), conditions) if len(bound) == 2 and conditions else None

    bound, conditions = eventually(settled, 30, "two pods bound and one refused")
    assert bound == 2
    assert "cannot allocate all claims" in conditions[0]["message"]
