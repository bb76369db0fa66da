# SPDX-License-Identifier: Apache-2.0
"""Builds the programs of a cluster from their pinned Go modules into the cache, once per machine and version.

Standard library only, so that it runs before there is a virtual environment. Never builds what is there, never
leaves half a program under its final name. Invariant: two runs at once do not build the same thing twice, the
second waits and then finds it done.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from aliquot.e2e import gocompiler
from aliquot.e2e.once import alone, say
from aliquot.e2e.toolchain import (
    CONTAINERD,
    DEFAULT_MINOR,
    ETCD,
    KUBERNETES,
    Binary,
    MissingPartError,
    Tool,
    all_tools,
    cache_root,
    kubernetes,
    locate,
)

MODULES: Final = Path(__file__).resolve().parents[2] / "tools"
"""The Go modules, one folder per tool."""
CONTROL_PLANE: Final = frozenset({"kube-apiserver", "kube-scheduler", "kube-controller-manager"})
_REPORT_S: Final = 20.0


def wanted(what: Sequence[str], minors: Sequence[str]) -> list[tuple[Tool, Binary]]:
    """The binaries that a list of words stands for: `control-plane`, `cluster`, `all`, or keys of tools.

    Raises `MissingPartError` for a word or minor that nobody knows.
    """
    by_key = {tool.key: tool for tool in all_tools()}
    result: dict[tuple[str, str], tuple[Tool, Binary]] = {}

    def add(tool: Tool, only: frozenset[str] | None = None) -> None:
        for binary in tool.binaries:
            if only is None or binary.name in only:
                result.setdefault((tool.key, binary.name), (tool, binary))

    for word in what:
        if word in {"control-plane", "cluster"}:
            add(ETCD)
            for minor in minors:
                add(kubernetes(minor), CONTROL_PLANE if word == "control-plane" else None)
            if word == "cluster":
                add(CONTAINERD)
        elif word == "all":
            for tool in all_tools():
                add(tool)
        elif word in by_key:
            add(by_key[word])
        else:
            raise MissingPartError(
                f"{word!r} is nothing to build; use control-plane, cluster, all or {', '.join(by_key)}"
            )
    return list(result.values())


def missing(binaries: Sequence[tuple[Tool, Binary]]) -> list[tuple[Tool, Binary]]:
    """Those that are neither in the cache nor in the folder the user handed in."""
    return [(tool, binary) for tool, binary in binaries if not _is_there(tool, binary)]


def _is_there(tool: Tool, binary: Binary) -> bool:
    try:
        locate(
            binary.name,
            tool.version.removeprefix("v").rpartition(".")[0] if tool.cache == "kubernetes" else DEFAULT_MINOR,
        )
    except MissingPartError:
        return False
    return True


def build(binaries: Sequence[tuple[Tool, Binary]]) -> None:
    """Builds what is missing, with progress. Raises `MissingPartError` in one sentence where it cannot."""
    if not missing(binaries):
        return
    with alone("build", "another run is building the test cluster's programs; waiting for it"):
        todo = missing(binaries)  # the run we waited for may have built it all
        if not todo:
            return
        go = gocompiler.find_or_install(say)
        check_disk(go, todo)
        total = sum(binary.expected_s for _, binary in todo)
        say(
            f"building {len(todo)} programs of the test cluster into {cache_root()}: about {_minutes(total)}, only once"
        )
        started = time.monotonic()
        for number, (tool, binary) in enumerate(todo, 1):
            _build_one(go, tool, binary, f"[{number}/{len(todo)}]")
        say(f"built in {_minutes(time.monotonic() - started)}")


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _environment() -> dict[str, str]:
    ours = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOWORK": "off", "GOFLAGS": "-mod=readonly"}
    return {**os.environ, **ours}


def check_disk(
    go: Path,
    todo: Sequence[tuple[Tool, Binary]],
    free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
) -> None:
    """Refuses before the disk is full: programs, Go's build cache and the downloaded modules."""
    answer = subprocess.run(
        [go, "env", "GOCACHE", "GOMODCACHE"],
        capture_output=True,
        text=True,
        check=True,
        env=_environment(),
        cwd=MODULES,
    ).stdout.split()
    modules_mb = 1500 if not Path(answer[1]).exists() else 300
    tools = {tool.key: tool for tool, _ in todo}.values()
    needs: dict[int, int] = {}
    places: dict[int, Path] = {}
    for place, megabytes in (
        (cache_root(), sum(b.size_mb for _, b in todo)),
        (Path(answer[0]), sum(t.expected_cache_mb for t in tools)),
        (Path(answer[1]), modules_mb),
    ):
        existing = place
        while not existing.exists():
            existing = existing.parent
        device = existing.stat().st_dev
        needs[device] = needs.get(device, 0) + megabytes
        places.setdefault(device, existing)
    for device, megabytes in needs.items():
        free_mb = free_bytes(places[device]) // 1_000_000
        if free_mb < megabytes:
            raise MissingPartError(
                f"building needs about {megabytes} MB on the disk of {places[device]} and {free_mb} MB are free; "
                "free some, or set XDG_CACHE_HOME (and GOCACHE, GOMODCACHE) to a larger disk"
            )


def _build_one(go: Path, tool: Tool, binary: Binary, mark: str) -> None:
    target = tool.folder / binary.name
    target.parent.mkdir(parents=True, exist_ok=True)
    half = target.with_name(f".{binary.name}.half")
    argv = [str(go), "build", "-trimpath", "-ldflags", tool.ldflags, "-o", str(half), binary.package]
    label = f"{mark} {binary.name} {tool.version}"
    say(f"{label}: building, about {_minutes(binary.expected_s)}")
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            argv, cwd=MODULES / tool.key, env=_environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            while True:
                try:
                    process.wait(_REPORT_S)
                    break
                except subprocess.TimeoutExpired:
                    say(f"{label}: {time.monotonic() - started:.0f} s of about {binary.expected_s} s")
        except BaseException:
            process.kill()
            process.wait()
            half.unlink(missing_ok=True)
            raise
        if process.returncode != 0:
            output.seek(0)
            text = output.read().decode(errors="replace").strip()
            half.unlink(missing_ok=True)
            raise MissingPartError(
                f"{binary.name} {tool.version} could not be built (exit status {process.returncode}); go said:\n"
                + "\n".join(text.splitlines()[-12:])
            )
    half.rename(target)
    say(f"{label}: done in {time.monotonic() - started:.0f} s, {target.stat().st_size // 1_000_000} MB")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of `e2e/tools/build.py`."""
    parser = argparse.ArgumentParser(
        prog="build.py",
        description="Builds the programs of a test cluster into the cache: nothing that is there is built again.",
        epilog=f"Set KUBEBUILDER_ASSETS to a folder of ready binaries to use those. Minors: {', '.join(KUBERNETES)}.",
    )
    parser.add_argument(
        "what",
        nargs="*",
        default=["control-plane"],
        help="control-plane (etcd, API server, scheduler, controllers), cluster (with kubelet, kubectl, containerd), "
        "all, or the name of a folder under e2e/tools",
    )
    parser.add_argument("--minor", action="append", help=f"Kubernetes minor, may be repeated (default {DEFAULT_MINOR})")
    parser.add_argument("--list", action="store_true", help="say what is there and what is missing, build nothing")
    options = parser.parse_args(arguments)
    try:
        binaries = wanted(options.what, options.minor or [DEFAULT_MINOR])
        if options.list:
            lacking = missing(binaries)
            for tool, binary in binaries:
                say(f"{'missing' if (tool, binary) in lacking else 'ready  '} {tool.version:9} {binary.name}")
            return 1 if lacking else 0
        build(binaries)
    except MissingPartError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; what was finished stays, the rest is built next time", file=sys.stderr)
        return 130
    return 0
