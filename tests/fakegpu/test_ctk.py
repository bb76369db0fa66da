# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's own generator of CDI specs takes a driver root of ours for a driver (cdi.md 2)."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aliquot.e2e import gocompiler
from aliquot.e2e.once import alone, say
from aliquot.e2e.toolchain import MissingPartError, cache_root

MODULE = Path(__file__).parents[2] / "e2e/tools/nvidia-ctk"
PACKAGE = "github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-ctk"
MAKE_ROOT = Path(__file__).parents[2] / "fakegpu/make_root.py"

# Building it takes twenty seconds with Go's caches warm, a few minutes with none.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def nvidia_ctk() -> Path:
    """The tool, built once into the cache; skips where there is no Go and none can be had."""
    mark = hashlib.sha256((MODULE / "go.mod").read_bytes() + (MODULE / "go.sum").read_bytes()).hexdigest()[:16]
    program = cache_root() / "tools" / f"nvidia-ctk-{mark}"
    with alone("nvidia-ctk", "waiting for another run that builds nvidia-ctk", say):
        if not program.exists():
            try:
                go = gocompiler.find_or_install(say)
            except MissingPartError as error:
                pytest.skip(f"nvidia-ctk cannot be built: {error}")
            program.parent.mkdir(parents=True, exist_ok=True)
            partial = program.with_suffix(".partial")
            build = subprocess.run(
                [go, "build", "-trimpath", "-ldflags", "-s -w", "-o", partial, PACKAGE],
                cwd=MODULE,
                env={
                    **os.environ,
                    "GOFLAGS": "-mod=readonly",
                    "GOWORK": "off",
                    "GOTOOLCHAIN": "local",
                    "CGO_ENABLED": "1",
                },
                capture_output=True,
                text=True,
                timeout=580,
                check=False,
            )
            if build.returncode:
                pytest.skip(f"nvidia-ctk cannot be built: {build.stderr.strip()[-400:]}")
            partial.rename(program)
    return program


@pytest.fixture(scope="module")
def generated(
    as_root: None, nvidia_ctk: Path, build_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A driver root with three cards, and the spec that nvidia-ctk generates for it."""
    folder = tmp_path_factory.mktemp("ctk")
    config, root = folder / "config.json", folder / "root"
    cards = [{"profile": "A100-40", "count": 2, "minor": 3}, {"profile": "H100"}]
    config.write_text(json.dumps({"version": 1, "cards": cards, "driver_version": "590.44.01"}))
    subprocess.run([sys.executable, str(MAKE_ROOT), "--config", str(config), str(root)], check=True, timeout=60)
    environment = {
        "PATH": "/usr/bin:/bin",
        "FAKEGPU_CONFIG": str(root / "config.json"),
        "FAKEGPU_VISIBLE_DEVICES": "all",
    }
    command = [str(nvidia_ctk), "cdi", "generate", f"--driver-root={root}", "--format=json"]
    done = subprocess.run(
        [*command, "--nvidia-cdi-hook-path=/usr/bin/nvidia-cdi-hook"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Auto-detected mode as 'nvml'" in done.stderr
    return root, json.loads(done.stdout)


def test_every_card_is_a_device_by_index_and_uuid(generated):
    root, spec = generated
    nodes = {
        device["name"]: [node["path"] for node in device["containerEdits"]["deviceNodes"]] for device in spec["devices"]
    }
    assert [nodes[name] for name in ("0", "1", "2")] == [["/dev/nvidia3"], ["/dev/nvidia4"], ["/dev/nvidia2"]]
    assert sorted(nodes["all"]) == ["/dev/nvidia2", "/dev/nvidia3", "/dev/nvidia4"]
    uuids = [name for name in nodes if name.startswith("GPU-")]
    told = [path.read_text() for path in (root / "proc/driver/nvidia/gpus").glob("*/information")]
    assert len(uuids) == 3
    assert all(any(uuid in text for text in told) for uuid in uuids)


def test_libraries_tools_and_common_nodes_are_mounted(generated):
    root, spec = generated
    folder = "/usr/lib/" + next((root / "usr/lib").iterdir()).name
    mounts = {mount["containerPath"]: mount["hostPath"] for mount in spec["containerEdits"]["mounts"]}
    assert set(mounts) == {
        f"{folder}/libcuda.so.590.44.01",
        f"{folder}/libnvidia-ml.so.590.44.01",
        "/usr/bin/nvidia-smi",
        "/usr/bin/nvidia-cuda-mps-control",
    }
    assert all(host == f"{root}{path}" for path, host in mounts.items())
    common = {node["path"] for node in spec["containerEdits"]["deviceNodes"]}
    assert common == {"/dev/nvidia-modeset", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidiactl"}


def test_links_come_from_sonames(generated):
    """A library without SONAME gets a link under its plain name only, and no program finds it (cdi.md 2.5)."""
    root, spec = generated
    folder = "/usr/lib/" + next((root / "usr/lib").iterdir()).name
    hooks = {hook["args"][1]: hook["args"] for hook in spec["containerEdits"]["hooks"]}
    links = [hooks["create-symlinks"][i + 1] for i, word in enumerate(hooks["create-symlinks"]) if word == "--link"]
    assert f"libcuda.so.590.44.01::{folder}/libcuda.so.1" in links
    assert f"libnvidia-ml.so.590.44.01::{folder}/libnvidia-ml.so.1" in links
    assert "--host-driver-version=590.44.01" in hooks["enable-cuda-compat"]


def test_the_spec_needs_no_newer_version_than_ours(generated):
    """No group of a node that would raise it (cdi.md 2.3): all are open to everyone."""
    assert generated[1]["cdiVersion"] == "0.5.0"
    assert generated[1]["kind"] == "nvidia.com/gpu"
