# SPDX-License-Identifier: Apache-2.0
"""Which programs a cluster of ours is made of, at which version, and where they lie on this machine.

Standard library only, because `e2e/tools/build.py` imports it before there is a virtual environment; never
builds or downloads anything itself. Invariant: a path that `locate` returns is a program of exactly the version
in the table below (or of the same Kubernetes minor, where the user handed in a folder of ready binaries).
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ASSETS_VARIABLE: Final = "KUBEBUILDER_ASSETS"
"""A folder of ready binaries, under the name that users of controller test suites know."""


class MissingPartError(RuntimeError):
    """Something of the machine or the cache is missing; the text is one sentence with the next step."""


@dataclass(frozen=True)
class Binary:
    """One program: the Go package it is built from and what building it cold takes on two cores."""

    name: str
    package: str
    expected_s: int
    size_mb: int


@dataclass(frozen=True)
class Tool:
    """One Go module under `e2e/tools/`, the binaries it builds and the version they all have."""

    key: str
    """What a user types and what the folder under `e2e/tools/` is called."""
    version: str
    """With the leading `v`, as the module's go.mod pins it."""
    cache: str
    """Folder below the cache root; the version is appended."""
    binaries: tuple[Binary, ...]
    ldflags: str = "-s -w"
    expected_cache_mb: int = 300
    """What Go's own build cache grows by when this is built cold."""

    @property
    def folder(self) -> Path:
        """Where the built binaries lie."""
        return cache_root() / self.cache / self.version


def _kubernetes(minor: str, patch: int, first_s: int) -> Tool:
    version = f"v{minor}.{patch}"
    stamp = "k8s.io/component-base/version"
    major, minor_number = minor.split(".")
    command = "k8s.io/kubernetes/cmd/"
    return Tool(
        key=f"k8s-{minor}",
        version=version,
        cache="kubernetes",
        binaries=(
            Binary("kube-apiserver", command + "kube-apiserver", first_s, 105),
            Binary("kube-scheduler", command + "kube-scheduler", 25, 73),
            Binary("kube-controller-manager", command + "kube-controller-manager", 45, 96),
            Binary("kubelet", command + "kubelet", 20, 85),
            Binary("kubectl", command + "kubectl", 30, 60),
        ),
        ldflags=(
            f"-s -w -X {stamp}.gitVersion={version} -X {stamp}.gitMajor={major} -X {stamp}.gitMinor={minor_number}"
        ),
        expected_cache_mb=2000,
    )


KUBERNETES: Final = {
    "1.34": _kubernetes("1.34", 4, 240),
    "1.36": _kubernetes("1.36", 3, 260),
    "1.37": _kubernetes("1.37", 2, 240),
}
DEFAULT_MINOR: Final = "1.36"
ETCD: Final = Tool(
    key="etcd",
    version="v3.6.16",
    cache="etcd",
    binaries=(Binary("etcd", "go.etcd.io/etcd/server/v3", 25, 22),),
)
CONTAINERD: Final = Tool(
    key="containerd",
    version="v2.4.2",
    cache="containerd",
    binaries=(
        Binary("containerd", "github.com/containerd/containerd/v2/cmd/containerd", 70, 43),
        Binary("containerd-shim-runc-v2", "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2", 3, 9),
        Binary("ctr", "github.com/containerd/containerd/v2/cmd/ctr", 5, 22),
    ),
    ldflags="-s -w -X github.com/containerd/containerd/v2/version.Version=v2.4.2",
)
KIND: Final = Tool(
    key="kind",
    version="v0.33.0",
    cache="kind",
    binaries=(Binary("kind", "sigs.k8s.io/kind", 40, 9),),
    expected_cache_mb=100,
)


def all_tools() -> tuple[Tool, ...]:
    """Every Go module that this table knows."""
    return (*KUBERNETES.values(), ETCD, CONTAINERD, KIND)


def cache_root() -> Path:
    """`$XDG_CACHE_HOME/aliquot`, else `~/.cache/aliquot`: outside the work tree, so `make clean` leaves it."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "aliquot"


def kubernetes(minor: str) -> Tool:
    """The Kubernetes of one minor, as in "1.36". Raises `MissingPartError` for a minor that is not in the table."""
    try:
        return KUBERNETES[minor.removeprefix("v")]
    except KeyError:
        known = ", ".join(KUBERNETES)
        raise MissingPartError(f"Kubernetes {minor} is not one that we test with; use one of {known}") from None


def locate(name: str, minor: str = DEFAULT_MINOR) -> Path:
    """The program `name`, from `KUBEBUILDER_ASSETS` when it has the right minor there, else from the cache.

    Raises `MissingPartError` that names the command which builds it.
    """
    tools = [t for t in (kubernetes(minor), ETCD, CONTAINERD, KIND) if any(b.name == name for b in t.binaries)]
    if not tools:
        raise MissingPartError(f"no tool of ours builds a program called {name}")
    tool = tools[0]
    handed_in = os.environ.get(ASSETS_VARIABLE)
    if handed_in:
        for candidate in (Path(handed_in) / tool.version / name, Path(handed_in) / name):
            if candidate.is_file() and _fits(candidate, tool):
                return candidate
    built = tool.folder / name
    if built.is_file():
        return built
    raise MissingPartError(
        f"{name} {tool.version} is not built yet: run `make control-plane` "
        f"(or `python3 e2e/tools/build.py {tool.key}`), or set {ASSETS_VARIABLE} to a folder that has it"
    )


@functools.cache
def _fits(program: Path, tool: Tool) -> bool:
    """Whether a handed-in program has the table's minor (Kubernetes) or major and minor (everything else)."""
    arguments = ["version", "--client"] if program.name == "kubectl" else ["--version"]
    try:
        output = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    found = re.search(r"v?(\d+\.\d+)\.\d+", output)
    return found is not None and tool.version.startswith(f"v{found.group(1)}.")
