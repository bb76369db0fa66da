# SPDX-License-Identifier: Apache-2.0
"""Providers kind and existing, as far as they can be checked without what they need."""

from __future__ import annotations

import json
import subprocess

import pytest

from aliquot.api.errors import SettingsError
from aliquot.e2e.existing import ExistingCluster
from aliquot.e2e.kind import KindOptions, config, why_not
from aliquot.e2e.toolchain import MissingPartError, locate


@pytest.fixture
def options(tmp_path):
    return KindOptions(
        minor="1.36", node_folders={"node-a": tmp_path / "a", "node-b": tmp_path / "b"}, feature_gates={"Some": True}
    )


def test_kind_configuration_gives_each_worker_its_own_cards(options, tmp_path):
    nodes = config(options)["nodes"]
    assert [n["role"] for n in nodes] == ["control-plane", "worker", "worker"]
    paths = [{m["containerPath"]: m["hostPath"] for m in n.get("extraMounts", [])} for n in nodes[1:]]
    assert paths[0]["/run/nvidia/driver"] == str(tmp_path / "a" / "driver")
    assert paths[1]["/run/fakegpu"] == str(tmp_path / "b" / "state")


def test_kind_itself_takes_the_configuration(options, tmp_path):
    """kind decodes the file strictly before it asks for Docker, so a wrong field fails here without one."""
    try:
        kind = locate("kind")
    except MissingPartError:
        pytest.skip("kind is not built: python3 e2e/tools/build.py kind")
    if not why_not():
        pytest.skip("there is a Docker daemon here: the stories on provider kind check more than this")

    def complaint(content):
        path = tmp_path / "kind.json"
        path.write_text(json.dumps(content))
        done = subprocess.run(
            [kind, "create", "cluster", "--config", path], capture_output=True, text=True, check=False
        )
        assert done.returncode != 0
        return done.stderr

    wrong = config(options)
    wrong["nodes"][1]["extraMount"] = []
    assert "decode config" in complaint(wrong)
    assert "decode config" not in complaint(config(options))


def test_existing_needs_a_kubeconfig_that_is_there(tmp_path):
    with pytest.raises(SettingsError, match="ALIQUOT_E2E_KUBECONFIG"):
        ExistingCluster(tmp_path / "none")


@pytest.mark.cluster
def test_existing_names_the_label_that_nodes_need(control_plane, tmp_path, monkeypatch):
    program = tmp_path / "kubectl"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(SettingsError, match=r"aliquot\.dev/gpu=true"):
        ExistingCluster(control_plane.kubeconfig)
