# SPDX-License-Identifier: Apache-2.0
"""API paths: names are quoted, targets are named as RBAC names them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.kube import paths


@pytest.mark.parametrize(
    ("method", "path", "query", "words"),
    [
        ("GET", paths.SLICES, [], "list resourceslices.resource.k8s.io"),
        ("GET", paths.SLICES, [("watch", "1")], "watch resourceslices.resource.k8s.io"),
        ("POST", paths.SLICES, [], "create resourceslices.resource.k8s.io"),
        ("DELETE", paths.SLICES, [], "deletecollection resourceslices.resource.k8s.io"),
        ("DELETE", paths.slice_("a"), [], "delete resourceslices.resource.k8s.io a"),
        ("GET", paths.claim("ns", "c"), [], "get resourceclaims.resource.k8s.io ns/c"),
        ("PATCH", paths.claim("ns", "c") + "/status", [], "patch resourceclaims/status.resource.k8s.io ns/c"),
        ("GET", paths.node("n1"), [], "get nodes n1"),
        ("GET", "/api/v1/namespaces/ns/pods", [], "list pods ns"),
        ("GET", "/api/v1/namespaces/ns", [], "get namespaces ns"),
        ("PUT", "/api/v1/namespaces/ns/pods/p/status", [], "update pods/status ns/p"),
        ("GET", paths.VERSION, [], "get /version"),
        ("GET", "/apis/resource.k8s.io/v1", [], "get /apis/resource.k8s.io/v1"),
    ],
)
def test_a_request_in_the_words_of_rbac(method, path, query, words):
    assert str(paths.target(method, path, query)) == words


@given(st.text(max_size=30))
def test_no_name_reaches_another_object(name):
    path = paths.claim(name, name)
    assert path.count("/") == paths.claim("a", "b").count("/")
    assert "?" not in path
    assert "#" not in path


@given(st.text(max_size=60), st.sampled_from(["GET", "PATCH", "BREW"]))
def test_any_path_can_be_named(path, method):
    assert str(paths.target(method, path))
