# SPDX-License-Identifier: Apache-2.0
"""Reading Kubernetes objects: the fields we use, whatever else is there, one bad item never costs the others."""

from __future__ import annotations

import json

import msgspec
import pytest

from aliquot.api.share import ConfigEntry
from aliquot.kube.objects import (
    Decoder,
    Document,
    Node,
    Object,
    Pod,
    ResourceClaim,
    ResourceSlice,
)

CLAIM = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "ResourceClaim",
    "metadata": {
        "name": "train",
        "namespace": "team-a",
        "uid": "u1",
        "resourceVersion": "7",
        "creationTimestamp": None,
        "managedFields": [{"manager": "kubectl"}],
        "annotations": {"resource.kubernetes.io/pod-claim-name": "gpu"},
        "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "p1", "controller": True}],
    },
    "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "share.gpu.aliquot.dev"}}]}},
    "status": {
        "allocation": {
            "devices": {
                "results": [
                    {
                        "request": "gpu/small",
                        "driver": "gpu.aliquot.dev",
                        "pool": "n1/gpu",
                        "device": "gpu-0a1b2c3d-shared",
                        "shareID": "s1",
                        "adminAccess": None,
                        "consumedCapacity": {"memory": "4Gi", "slots": "1"},
                        "futureField": {"x": 1},
                    }
                ],
                "config": [
                    {
                        "source": "FromClaim",
                        "requests": ["gpu"],
                        "opaque": {"driver": "gpu.aliquot.dev", "parameters": {"kind": "Share"}},
                    }
                ],
            },
            "nodeSelector": {"nodeSelectorTerms": []},
        },
        "reservedFor": [{"resource": "pods", "name": "p", "uid": "p1"}],
    },
}

SLICE = {
    "metadata": {"name": "s", "resourceVersion": "9"},
    "spec": {
        "driver": "gpu.aliquot.dev",
        "nodeName": "n1",
        "pool": {"name": "n1/gpu", "generation": 3, "resourceSliceCount": 1},
        "devices": [
            {
                "name": "gpu-0",
                "attributes": {"uuid": {"string": "GPU-0"}, "index": {"int": 0}, "migCapable": {"bool": False}},
                "capacity": {"memory": {"value": "80Gi", "requestPolicy": {"default": "1Gi"}}},
                "allowMultipleAllocations": True,
            }
        ],
    },
}


def text(value: object) -> bytes:
    return json.dumps(value).encode()


class TestRead:
    def test_a_claim(self):
        claim = Decoder(ResourceClaim).one(text(CLAIM))
        assert (claim.metadata.key, claim.metadata.uid, claim.metadata.resource_version) == ("team-a/train", "u1", "7")
        assert claim.metadata.owner_references[0].uid == "p1"
        (result,) = claim.allocation.results
        assert (result.request, result.main_request, result.pool) == ("gpu/small", "gpu", "n1/gpu")
        assert (result.share_id, result.admin_access) == ("s1", None)
        assert result.consumed_capacity == {"memory": "4Gi", "slots": "1"}
        (entry,) = claim.allocation.config
        assert isinstance(entry, ConfigEntry)
        assert bytes(entry.opaque.parameters) == b'{"kind": "Share"}'
        assert claim.status.reserved_for[0].uid == "p1"

    def test_a_claim_that_is_not_allocated(self):
        assert Decoder(ResourceClaim).one(text({"metadata": {"name": "c"}})).allocation is None
        assert Decoder(ResourceClaim).one(text({"metadata": {"name": "c"}, "status": {}})).allocation is None

    def test_a_slice(self):
        spec = Decoder(ResourceSlice).one(text(SLICE)).spec
        assert (spec.driver, spec.node_name, spec.pool.generation, spec.pool.resource_slice_count) == (
            "gpu.aliquot.dev",
            "n1",
            3,
            1,
        )
        (device,) = spec.devices
        assert {name: value.value for name, value in device.attributes.items()} == {
            "uuid": "GPU-0",
            "index": 0,
            "migCapable": False,
        }
        assert device.capacity["memory"].value == "80Gi"
        assert device.allow_multiple_allocations

    def test_a_node_and_a_pod(self):
        node = Decoder(Node).one(
            text({"metadata": {"uid": "n"}, "status": {"nodeInfo": {"kubeletVersion": "v1.36.3"}}})
        )
        assert (node.metadata.uid, node.status.node_info.kubelet_version) == ("n", "v1.36.3")
        pod = Decoder(Pod).one(text({"spec": {"nodeName": "n1"}, "status": {"phase": "Running"}}))
        assert (pod.spec.node_name, pod.status.phase) == ("n1", "Running")

    @pytest.mark.parametrize("bad", [b"", b"[]", b"null", b"{", b'{"metadata":1}', b'{"metadata":{"name":"\xff"}}'])
    def test_what_is_no_object_is_an_error(self, bad):
        for item in (ResourceClaim, Document, Object):
            with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
                Decoder(item).one(bad)


class TestDocument:
    def test_everything_is_kept_and_a_change_is_made_on_a_copy(self):
        document = Decoder(Document).one(text(CLAIM))
        assert document.body == CLAIM
        assert document.metadata.key == "team-a/train"
        changed = document.changed(lambda body: body["metadata"].update(name="other"))
        assert changed["metadata"]["name"] == "other"
        assert changed["status"] == CLAIM["status"]
        assert document.body == CLAIM


class TestPage:
    @pytest.mark.parametrize("item", [ResourceClaim, Document])
    def test_items_and_metadata(self, item):
        page = {
            "metadata": {"resourceVersion": "12", "continue": "tok", "remainingItemCount": 3},
            "items": [CLAIM, CLAIM],
        }
        items, metadata, problems = Decoder(item).page(text(page))
        assert [one.metadata.key for one in items] == ["team-a/train"] * 2
        assert (metadata.resource_version, metadata.continue_, metadata.remaining_item_count) == ("12", "tok", 3)
        assert problems == []

    @pytest.mark.parametrize("item", [ResourceClaim, Document])
    def test_an_unreadable_item_is_named_and_the_others_are_kept(self, item):
        bad = {"metadata": {"name": "bad", "namespace": "x", "labels": {"a": 1}}}
        items, metadata, problems = Decoder(item).page(
            text({"metadata": {"resourceVersion": "1"}, "items": [CLAIM, bad, 7]})
        )
        assert [one.metadata.name for one in items] == ["train"]
        assert metadata.resource_version == "1"
        assert len(problems) == 2

    def test_an_unreadable_field_names_its_object(self):
        bad = CLAIM | {"metadata": {"name": "bad", "namespace": "x"}, "status": {"allocation": []}}
        _, _, problems = Decoder(ResourceClaim).page(text({"items": [bad]}))
        assert problems[0].startswith("x/bad: ")

    @pytest.mark.parametrize("bad", [b"", b"[]", b'{"items":{}}'])
    def test_what_is_no_list_is_an_error(self, bad):
        with pytest.raises(msgspec.MsgspecError):
            Decoder(ResourceClaim).page(bad)

    def test_an_empty_list_written_as_null_is_read(self):
        # A Go server writes a nil slice as null.
        items, _, problems = Decoder(ResourceClaim).page(b'{"metadata":{"resourceVersion":"1"},"items":null}')
        assert (items, problems) == ([], [])
