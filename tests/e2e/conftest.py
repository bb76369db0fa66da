# SPDX-License-Identifier: Apache-2.0
"""Clusters for the stories: one at a time, every story on each Kubernetes we support, on the provider asked for."""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

from aliquot.api.errors import AliquotError
from aliquot.e2e import cards
from aliquot.e2e.control_plane import DRA_SHARING_GATES
from aliquot.e2e.existing import KUBECONFIG_VARIABLE, ExistingCluster
from aliquot.e2e.faults import FaultProxy
from aliquot.e2e.images.recipes import ROOT, build_images
from aliquot.e2e.install import Settings, install
from aliquot.e2e.kind import KindCluster, KindOptions
from aliquot.e2e.local.cluster import LocalCluster, LocalOptions
from aliquot.e2e.stage import Stage
from aliquot.e2e.toolchain import MissingPartError

PROVIDER = os.environ.get("ALIQUOT_E2E_PROVIDER", "local")
NODES = ("node-a", "node-b")
PROXY_PORT = 6443
LOGS = ROOT / "build" / "e2e-logs"


@dataclass(frozen=True)
class Variant:
    """One Kubernetes that every story runs on."""

    name: str
    minor: str
    gates: dict[str, bool] = field(default_factory=dict)
    shares: bool = True
    """The API server keeps consumable capacity; without it the driver offers slots."""
    extended_resources: bool = True
    """A DeviceClass can stand for an extended resource."""
    cards_a_node: int = 2
    """How many of a node's two cards the scheduler can fill."""


VARIANTS = [
    Variant("1.36", "1.36"),
    Variant("1.37", "1.37"),
    # Its allocator looks at the capacity of the first device of a slice, whichever it is about to give away, so that
    # nothing more is given away of a slice when its first card is full.
    Variant("1.34-sharing", "1.34", dict(DRA_SHARING_GATES), extended_resources=False, cards_a_node=1),
    Variant("1.34-slots", "1.34", shares=False, extended_resources=False),
]
# Two slots of 12 GiB on a card of 24 GiB, so that a claim of 10 GiB fits twice and no third time in either mode.
NODE_CONFIG = {"defaults": {"mode": "auto", "slots": 2}}

_numbers = itertools.count(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `-n 2`: all stories of a variant go to one worker, which then has one cluster for them."""

    class ByVariant(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            names = re.findall(r"\[([^]]*)\]", nodeid)
            return next((v.name for v in VARIANTS if names and names[0].startswith(v.name)), "no cluster")

    return ByVariant(config, log)


def pytest_collection_modifyitems(config, items):
    """What a variant lacks is left out, not skipped."""
    lacking = {i for i in items if (v := _variant_of(i)) and _lacks(v, i)}
    if lacking:
        config.hook.pytest_deselected(items=list(lacking))
        items[:] = [i for i in items if i not in lacking]


def _lacks(variant, item):
    return bool(
        (item.get_closest_marker("needs_shares") and not variant.shares)
        or (item.get_closest_marker("needs_extended_resources") and not variant.extended_resources)
    )


def _variant_of(item):
    return item.callspec.params.get("variant") if hasattr(item, "callspec") else None


def pytest_report_header():
    return f"stories run on provider: {PROVIDER}"


def start_cluster(variant, images, *, settings, name):
    """A running cluster of the provider asked for, with Aliquot in it."""
    if PROVIDER == "existing":
        cluster = ExistingCluster(Path(os.environ.get(KUBECONFIG_VARIABLE, "kubeconfig")))
    elif PROVIDER == "kind":
        folder = ROOT / "build" / "e2e-kind"
        nodes = {}
        for node in NODES:
            (folder / node / "driver").mkdir(parents=True, exist_ok=True)
            (folder / node / "state").mkdir(parents=True, exist_ok=True)
            cards.make_folders(folder / node / "driver", folder / node / "state", node)
            nodes[node] = folder / node
        options = KindOptions(minor=variant.minor, node_folders=nodes, feature_gates=variant.gates)
        cluster = KindCluster(options, images, folder).start()
    else:
        options = LocalOptions(minor=variant.minor, nodes=NODES, feature_gates=variant.gates)
        cluster = LocalCluster(options, images, prepare_node=cards.furnish, keep_logs=LOGS / name).start()
        settings = drivers_through_proxy(settings)
    try:
        if isinstance(cluster, LocalCluster):
            cluster.fault_proxy = FaultProxy(cluster.plane, port=PROXY_PORT).start()
        install(cluster, settings)
    except BaseException:
        cluster.stop()
        raise
    return cluster


def drivers_through_proxy(settings):
    """The drivers' pods believe that the API server serves at the fault proxy's port."""
    return replace(settings, environment={**settings.environment, "KUBERNETES_SERVICE_PORT": str(PROXY_PORT)})


@pytest.fixture(scope="session")
def images():
    try:
        cards.require_fake_driver()
        return build_images(tell=lambda _: None)
    except MissingPartError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session", params=VARIANTS, ids=lambda v: v.name)
def variant(request):
    return request.param


def _settings():
    return Settings(
        node_config=NODE_CONFIG,
        environment={"ALIQUOT_LOG_LEVEL": "debug"},
        fake=PROVIDER != "existing",
        image=os.environ.get("ALIQUOT_E2E_IMAGE", ""),
    )


@pytest.fixture(scope="session")
def cluster(variant, images):
    """Two nodes with two cards each, and Aliquot; shared by all stories of a variant.

    In a local one the drivers talk to the API server through a fault proxy, which is invisible until told otherwise.
    """
    try:
        running = start_cluster(variant, images, settings=_settings(), name=variant.name)
    except (MissingPartError, AliquotError) as error:
        if isinstance(error, MissingPartError) or PROVIDER != "local":
            pytest.skip(str(error))
        raise
    yield running
    running.stop()


@pytest.fixture
def bad_days(local):
    """The proxy between the drivers and the API server; without faults again afterwards."""
    yield local.fault_proxy
    local.fault_proxy.set()


@pytest.fixture
def local(cluster):
    """The same, for stories that touch the inside of nodes."""
    if not isinstance(cluster, LocalCluster):
        pytest.skip(f"provider {PROVIDER} does not let a test into its nodes")
    return cluster


@pytest.fixture
def stage(cluster, request):
    """A namespace of this story; afterwards its pods and claims are gone."""
    slug = re.sub(r"[^a-z0-9]+", "-", request.node.name.partition("[")[0].removeprefix("test_").lower())
    with Stage(cluster, f"{slug[:40].strip('-')}-{next(_numbers)}") as here:
        yield here
