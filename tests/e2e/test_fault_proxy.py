# SPDX-License-Identifier: Apache-2.0
"""The fault proxy: invisible without rules, and each fault is what a client of a bad server meets."""

from __future__ import annotations

import http.client
import json
import time

import pytest

from aliquot.api.errors import ClusterError
from aliquot.e2e.api import ApiError, eventually
from aliquot.e2e.faults import Rule

pytestmark = pytest.mark.cluster


@pytest.fixture
def through(control_plane, fault_proxy):
    return control_plane.client(fault_proxy.kubeconfig_for("admin", ["system:masters"]))


def _open_watch(client, path):
    """A raw watch connection and the response on it."""
    connection = client._connect(20.0)
    client._local.connection = None
    connection.request("GET", f"{path}?watch=1&timeoutSeconds=60")
    return connection, connection.getresponse()


def test_without_rules_it_is_invisible(through, control_plane, namespace):
    stored = through.create(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"k": "ü"}}, namespace
    )
    assert control_plane.api.get("v1", "ConfigMap", "a", namespace) == stored


def test_caller_keeps_its_own_identity(control_plane, fault_proxy, namespace):
    somebody = control_plane.client(fault_proxy.kubeconfig_for("somebody", ["people"]))
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    who = somebody.request("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", body=review)
    assert who["status"]["userInfo"]["username"] == "somebody"
    assert "people" in who["status"]["userInfo"]["groups"]
    with pytest.raises(ApiError) as refused:
        somebody.list("v1", "Pod", namespace)
    assert refused.value.status == 403


def test_token_stays_the_token_of_its_caller(control_plane, fault_proxy, namespace):
    api = control_plane.api
    api.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "someone"}}, namespace)
    token = control_plane.service_account_token("someone", namespace)
    client = control_plane.client(fault_proxy.kubeconfig_for(f"{namespace}-someone", token=token))
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    who = client.request("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", body=review)
    assert who["status"]["userInfo"]["username"] == f"system:serviceaccount:{namespace}:someone"


def test_headers_of_another_identity_are_not_passed_on(control_plane, fault_proxy):
    """Otherwise a test would prove nothing about rights."""
    client = control_plane.client(fault_proxy.kubeconfig_for("somebody"))
    connection = client._connect(20.0)
    connection.request("GET", "/api/v1/nodes", headers={"X-Remote-User": "admin", "X-Remote-Group": "system:masters"})
    response = connection.getresponse()
    response.read()
    assert response.status == 403


@pytest.mark.parametrize("status", [410, 429, 500])
def test_answers_a_status_as_often_as_told(through, fault_proxy, namespace, status):
    fault_proxy.set(Rule(path="/configmaps", status=status, times=2, retry_after_s=3 if status == 429 else None))
    for _ in range(2):
        with pytest.raises(ApiError) as error:
            through.list("v1", "ConfigMap", namespace)
        assert error.value.status == status
        assert error.value.headers.get("retry-after") == ("3" if status == 429 else None)
    through.list("v1", "ConfigMap", namespace)
    assert fault_proxy.hits == [2]


def test_slow_answers(through, fault_proxy, namespace):
    fault_proxy.set(Rule(delay_s=0.3, times=1))
    start = time.monotonic()
    through.list("v1", "ConfigMap", namespace)
    assert time.monotonic() - start >= 0.3


def test_connection_cut_without_an_answer(through, fault_proxy, namespace):
    fault_proxy.set(Rule(path="/configmaps", cut=True))
    with pytest.raises(ClusterError):
        through.list("v1", "ConfigMap", namespace)


def test_open_watch_is_cut(through, fault_proxy, namespace):
    connection, response = _open_watch(through, f"/api/v1/namespaces/{namespace}/configmaps")
    eventually(lambda: fault_proxy.open_watches, 5, "an open watch")
    assert fault_proxy.cut_watches("/configmaps") == 1
    with pytest.raises((ConnectionError, http.client.IncompleteRead)):
        response.read()
    connection.close()


def test_silent_watch_says_nothing_more(through, control_plane, fault_proxy, namespace):
    connection, response = _open_watch(through, f"/api/v1/namespaces/{namespace}/configmaps")

    def next_name():
        # The namespace has a config map of its own (the root CA) only where controllers run.
        return json.loads(response.readline())["object"]["metadata"]["name"]

    create = control_plane.api.create
    create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "before"}}, namespace)
    assert next_name() == "before"
    assert fault_proxy.silence_watches("/configmaps") == 1
    create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "after"}}, namespace)
    response.fp.raw._sock.settimeout(0.5)
    with pytest.raises(TimeoutError):
        response.readline()
    assert fault_proxy.open_watches
    response.close()
    connection.close()


def test_expired_watch_says_so_as_an_event(through, fault_proxy, namespace):
    fault_proxy.set(Rule(path="/configmaps", watch=True, status=410, times=1))
    answer = through.request("GET", f"/api/v1/namespaces/{namespace}/configmaps", query={"watch": "1"})
    assert answer["type"] == "ERROR"
    assert answer["object"]["code"] == 410
