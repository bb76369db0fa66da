# SPDX-License-Identifier: Apache-2.0
"""How programs find the driver's functions with the hook in between: every way, over the smallest driver there is."""

from __future__ import annotations

import pytest

STUB = "GPU-" + "-".join(["aa" * 4, "aa" * 2, "aa" * 2, "aa" * 2, "aa" * 6])
MIB = 1 << 20


@pytest.fixture
def limited(stub_box):
    stub_box.grant("g", STUB, 100 * MIB)
    return stub_box


def test_handle_lookup_is_limited(limited):
    result = limited.run("start()\nsay(first=alloc(60*MIB)[0], second=alloc(60*MIB)[0], total=total(), used=used())")
    assert result.last == {"first": 0, "second": 2, "total": 100 * MIB, "used": 60 * MIB}
    assert result.err == ""


def test_without_the_hook_the_stub_is_unlimited(limited):
    result = limited.run("start()\nsay(first=alloc(60*MIB)[0], second=alloc(60*MIB)[0])", hooked=False)
    assert result.last == {"first": 0, "second": 0}
