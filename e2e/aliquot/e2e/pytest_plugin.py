# SPDX-License-Identifier: Apache-2.0
"""pytest fixtures for tests that need a real API server.

Loaded with `-p aliquot.e2e.pytest_plugin` or from a conftest's `pytest_plugins`. Imports nothing heavy before a
fixture is asked for. Invariant: servers are shared by the whole session, namespaces by nothing: what a test makes
inside its namespace never meets another test. What is cluster-scoped (nodes, slices, classes) does: name it after
the test's namespace.
"""

from __future__ import annotations

import itertools
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from aliquot.e2e.api import Api
    from aliquot.e2e.control_plane import ControlPlane
    from aliquot.e2e.faults import FaultProxy

_numbers = itertools.count(1)
_MINOR_VARIABLE = "ALIQUOT_MINOR"


@pytest.fixture(scope="session")
def control_plane_of() -> Iterator[Callable[..., ControlPlane]]:
    """`control_plane_of(minor="1.34", feature_gates={...}, scheduler=True, …)`: a running control plane.

    Takes the fields of `control_plane.Options`. The same arguments give the same servers for the whole session.
    Skips, saying what to run, where the binaries are missing.
    """
    from aliquot.e2e.control_plane import ControlPlane, Options  # noqa: PLC0415 - only when somebody asks
    from aliquot.e2e.toolchain import DEFAULT_MINOR, MissingPartError  # noqa: PLC0415

    running: dict[str, ControlPlane] = {}
    with tempfile.TemporaryDirectory(prefix="aliquot-cp-") as directory:

        def get(**fields: Any) -> ControlPlane:
            fields.setdefault("minor", os.environ.get(_MINOR_VARIABLE, DEFAULT_MINOR))
            options = Options(**fields)
            if options.key not in running:
                try:
                    plane = ControlPlane(Path(directory) / str(len(running)), options)
                except MissingPartError as error:
                    pytest.skip(str(error))
                running[options.key] = plane.start()
            return running[options.key]

        try:
            yield get
        finally:
            for plane in running.values():
                plane.stop()


@pytest.fixture(scope="session")
def control_plane(control_plane_of: Callable[..., ControlPlane]) -> ControlPlane:
    """API server and etcd of the default minor (`ALIQUOT_MINOR`), with default gates: no scheduler, no controllers."""
    return control_plane_of()


@pytest.fixture
def api(control_plane: ControlPlane) -> Api:
    """The administrator's client of `control_plane`."""
    return control_plane.api


@pytest.fixture
def new_namespace(request: pytest.FixtureRequest) -> Callable[[ControlPlane], str]:
    """`new_namespace(plane)` makes a namespace named after the test, at most 40 characters, and returns its name.

    It is left behind: without a controller-manager no namespace ever finishes deleting.
    """

    def make(plane: ControlPlane) -> str:
        slug = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[:30].strip("-")
        name = f"{slug}-{os.getpid() % 10000}-{next(_numbers)}"
        plane.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        return name

    return make


@pytest.fixture
def namespace(control_plane: ControlPlane, new_namespace: Callable[[ControlPlane], str]) -> str:
    """A namespace of this test's own in `control_plane`."""
    return new_namespace(control_plane)


@pytest.fixture
def fault_proxy(control_plane: ControlPlane) -> Iterator[FaultProxy]:
    """A fault proxy of this test's own in front of `control_plane`."""
    from aliquot.e2e.faults import FaultProxy  # noqa: PLC0415

    with FaultProxy(control_plane) as proxy:
        yield proxy
