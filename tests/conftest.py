# SPDX-License-Identifier: Apache-2.0
"""What every test shares: where the built parts are, and that nothing is skipped where everything must be there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Real API servers: control_plane, control_plane_of, api, namespace.
pytest_plugins = ["aliquot.e2e.pytest_plugin"]

NO_SKIPS = os.environ.get("ALIQUOT_NO_SKIPS") == "1"


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def as_root() -> None:
    """Skips without root: for what runs as root on a node and relies on it."""
    if os.geteuid() != 0:
        pytest.skip("what this tests runs as root on a node; run the tests as root")


@pytest.fixture(scope="session")
def fake_driver_root() -> Path:
    """The fake driver as a driver root; skips when it has not been built."""
    root = ROOT / "build" / "fakegpu"
    if not (root / "usr/lib/x86_64-linux-gnu/libcuda.so.1").exists():
        pytest.skip("the fake driver is not built: make fakegpu")
    return root


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """Turn a skip into a failure where the environment promises that nothing is missing."""
    report = yield
    if NO_SKIPS and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, and here no part may be missing: {reason}"
    return report
