# SPDX-License-Identifier: Apache-2.0
"""Answers other than success: one class per way out, texts that say what to do."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.api.errors import ClusterError
from aliquot.kube import errors, paths


def answer(code, reason="", message="said", headers=None, about=None, **details):
    body = json.dumps({"kind": "Status", "reason": reason, "message": message, "details": details}).encode()
    about = about or paths.target("GET", paths.claim("ns", "c"))
    return errors.api_error(code, headers or {}, body, about)


@pytest.mark.parametrize(
    ("code", "reason", "kind", "retryable"),
    [
        (400, "BadRequest", errors.Invalid, False),
        (401, "Unauthorized", errors.Unauthorized, True),
        (403, "Forbidden", errors.Forbidden, True),
        (404, "NotFound", errors.NotFound, True),
        (405, "MethodNotAllowed", errors.Invalid, False),
        (409, "Conflict", errors.Conflict, True),
        (409, "AlreadyExists", errors.AlreadyExists, True),
        (410, "Expired", errors.Gone, True),
        (422, "Invalid", errors.Invalid, False),
        (429, "TooManyRequests", errors.TooManyRequests, True),
        (302, "", errors.ServerError, True),
        (500, "InternalError", errors.ServerError, True),
        (503, "ServiceUnavailable", errors.ServerError, True),
        (504, "Timeout", errors.ServerError, True),
    ],
)
def test_every_status_has_its_class(code, reason, kind, retryable):
    error = answer(code, reason)
    assert type(error) is kind
    assert isinstance(error, ClusterError)
    assert (error.status, error.reason, error.retryable) == (code, reason, retryable)
    assert "get resourceclaims.resource.k8s.io ns/c" in str(error)
    assert "said" in str(error)


def test_a_created_object_that_exists_is_also_a_conflict():
    assert isinstance(answer(409, "AlreadyExists"), errors.Conflict)


@pytest.mark.parametrize(
    ("method", "path", "query", "rule"),
    [
        (
            "GET",
            paths.SLICES,
            [("watch", "1")],
            'apiGroups ["resource.k8s.io"], resources ["resourceslices"], verbs ["watch"]',
        ),
        ("GET", paths.node("n"), [], 'apiGroups [""], resources ["nodes"], verbs ["get"]'),
        (
            "PATCH",
            paths.claim("n", "c") + "/status",
            [],
            'apiGroups ["resource.k8s.io"], resources ["resourceclaims/status"], verbs ["patch"]',
        ),
        ("GET", paths.VERSION, [], 'nonResourceURLs ["/version"], verbs ["get"]'),
    ],
)
def test_forbidden_names_the_missing_rule(method, path, query, rule):
    error = answer(403, "Forbidden", about=paths.target(method, path, query))
    assert f"our role needs {rule}" in str(error)


@pytest.mark.parametrize(
    ("headers", "details", "seconds"),
    [
        ({"Retry-After": "7"}, {}, 7),
        ({}, {"retryAfterSeconds": 3}, 3),
        ({"Retry-After": "1"}, {"retryAfterSeconds": 3}, 3),
        ({"Retry-After": "86400"}, {}, errors.RETRY_AFTER_LIMIT_S),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, {}, 0),
        ({"Retry-After": "-5"}, {}, 0),
        ({}, {}, 0),
    ],
)
def test_the_wait_a_server_asks_for(headers, details, seconds):
    assert answer(429, headers=headers, **details).retry_after_s == seconds


def test_a_long_message_is_capped_and_made_printable():
    error = answer(500, message="x\n\x1b[31m" + "y" * 10_000)
    assert len(str(error)) < 400
    assert "\x1b" not in str(error)
    assert "\n" not in str(error)


@given(st.binary(max_size=300), st.integers(300, 599))
def test_any_body_gives_an_error(body, code):
    error = errors.api_error(code, {}, body, paths.target("GET", paths.SLICES))
    assert error.status == code


def test_a_page_of_a_proxy_is_shown():
    error = errors.api_error(502, {}, b"<html>Bad Gateway</html>", paths.target("GET", paths.SLICES))
    assert type(error) is errors.ServerError
    assert "Bad Gateway" in str(error)
