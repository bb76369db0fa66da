# SPDX-License-Identifier: Apache-2.0
"""Metrics, liveness and readiness over HTTP."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Gauge

from aliquot.api.errors import SettingsError
from aliquot.node.endpoint import Endpoint


class Face:
    """An endpoint whose checks a test turns over."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.registry = CollectorRegistry()
        self.endpoint = Endpoint(
            "127.0.0.1",
            0,
            self.registry,
            healthy={"reaper": lambda: None},
            ready={"driver": lambda: self.reason, "registered": lambda: None},
        )
        self.endpoint.start()

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.endpoint.port, timeout=5)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), answer.headers["Content-Type"]
        finally:
            connection.close()


@pytest.fixture
def face() -> Iterator[Face]:
    one = Face()
    yield one
    one.endpoint.stop()


def test_ready_while_all_checks_hold(face: Face):
    assert face.get("/readyz")[:2] == (200, "ok\n")
    face.reason = "libnvidia-ml.so.1 is not there"
    assert face.get("/readyz")[:2] == (503, "driver: libnvidia-ml.so.1 is not there\n")
    assert face.get("/healthz")[:2] == (200, "ok\n")
    face.reason = None
    assert face.get("/readyz/?verbose")[:2] == (200, "ok\n")


def test_a_check_that_raises_is_a_failed_check():
    def broken() -> str | None:
        raise ValueError("no idea")

    endpoint = Endpoint("127.0.0.1", 0, CollectorRegistry(), healthy={}, ready={"driver": broken})
    endpoint.start()
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=5)
    connection.request("GET", "/readyz")
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (503, b"driver: cannot tell: no idea\n")
    connection.close()
    endpoint.stop()


def test_metrics_in_the_form_that_is_asked_for(face: Face):
    Gauge("aliquot_test", "x", registry=face.registry).set(3)
    status, body, kind = face.get("/metrics")
    assert status == 200
    assert "aliquot_test 3.0" in body
    assert kind.startswith("text/plain")
    assert "openmetrics" in face.get("/metrics", Accept="application/openmetrics-text; version=1.0.0")[2]


def test_anything_else_is_not_found_and_head_has_no_body(face: Face):
    assert face.get("/debug")[0] == 404
    assert face.get("/healthz", "HEAD")[:2] == (200, "")
    assert face.get("/metrics", "POST")[0] == 501


def test_clients_that_say_nothing_do_not_keep_others_out(face: Face):
    silent = [socket.create_connection(("127.0.0.1", face.endpoint.port)) for _ in range(5)]
    assert face.get("/healthz")[0] == 200
    for client in silent:
        client.close()


def test_a_taken_port_ends_the_daemon_with_a_sentence(face: Face):
    with pytest.raises(SettingsError, match=rf"cannot listen on 127\.0\.0\.1:{face.endpoint.port} .* use another"):
        Endpoint("127.0.0.1", face.endpoint.port, CollectorRegistry(), healthy={}, ready={})
