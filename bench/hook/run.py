# SPDX-License-Identifier: Apache-2.0
"""What the hook costs a program, and how well it keeps a compute limit, beside the bare driver of the same run.

Runs each measurement in turn with the hook and without, so that whatever else the machine does meets both, and
prints medians. The driver is the fake one; the limits are real grants in a folder of the run. Where a start is
measured, an empty library that is preloaded instead shows what no hook could do without. Budgets are those of
the design (`docs/hook-limits.md`). Exit status: 0 when all of them hold, 1 when one is missed.

    bench/hook/run.py [--quick] [--only calls,starts,shares] [--output json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from aliquot.api.grant import CorePolicy, Grant
from aliquot.node.hints import Activity, advise
from aliquot.node.regions import Regions

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
HOOK: Final = ROOT / "build" / "hook"
MARK: Final = b"@AQ_ROOT_PATCHABLE@"
MARK_ROOM: Final = 256
CARD: Final = "GPU-aaaaaaaa-0000-4000-8000-00000000000a"
GIB: Final = 1 << 30
NEIGHBOURS: Final = 63
SHARED_MEMORY: Final = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table; `floor` is what the bare driver or the machine shows in the same run."""

    name: str
    unit: str
    value: float
    floor: float
    budget: float | None  # None: only to compare with
    at_most: bool = True

    @property
    def holds(self) -> bool:
        if self.budget is None:
            return True
        return self.value <= self.budget if self.at_most else self.value >= self.budget


class Container:
    """What a container has: its grants, its usage, and the library that looks for them."""

    def __init__(self, folder: Path, config: Path, driver: Path) -> None:
        self.folder = folder
        root = self.folder / "vgpu"
        root.mkdir()
        self.regions = Regions(root, HOOK / "libaliquot-region.so")
        source = (HOOK / "test" / "libvgpu-strict.so").read_bytes()
        place = source.index(MARK)
        path = str(root).encode().ljust(MARK_ROOM, b"\0")
        self.library = self.folder / "libvgpu.so"
        self.library.write_bytes(source[:place] + path + source[place + MARK_ROOM :])
        self.env = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(driver), "FAKEGPU_CONFIG": str(config)}

    def grant(self, percent: int = 0, policy: CorePolicy = CorePolicy.FORCE) -> None:
        self.regions.create(
            Grant(name="g", card_uuid=CARD, memory_bytes=16 * GIB, core_percent=percent, core_policy=policy)
        )

    def popen(self, command: Sequence[str], *, hooked: bool = True) -> subprocess.Popen[str]:
        env = self.env | ({"LD_PRELOAD": str(self.library)} if hooked else {})
        return subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(self, command: Sequence[str], *, hooked: bool = True) -> dict[str, Any]:
        return finish(self.popen(command, hooked=hooked))


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The line of JSON that a program of ours ends with."""
    out, _ = process.communicate(timeout=300)
    if process.returncode:
        raise SystemExit(f"bench: {process.args!r} ended with {process.returncode}")
    result: dict[str, Any] = json.loads(out)
    return result


class Machine:
    """One fake card, the compiled programs, and containers on it.

    Grants and usage lie in memory, as a node's /run does: on a disk every start would pay for the file system.
    """

    def __init__(self, folder: Path, memory: Path) -> None:
        self.folder = folder
        self.memory = memory
        self.driver = ROOT / "build" / "fakegpu" / "usr" / "lib" / "x86_64-linux-gnu"
        self._count = 0
        for name in ("calls", "share", "starts"):
            command = ["cc", "-O2", "-o", str(folder / name), str(HERE / f"{name}.c"), "-ldl"]
            subprocess.run(command, check=True, timeout=60)
        self.empty = folder / "empty.so"
        link = ["cc", "-shared", "-nostartfiles", "-xc", "/dev/null", "-o", str(self.empty)]
        subprocess.run(link, check=True, timeout=60)

    def program(self, name: str) -> str:
        return str(self.folder / name)

    def card(self, **driver: int) -> Path:
        """A new machine with one card; `driver` as fakegpu's configuration names it."""
        self._count += 1
        folder = self.folder / f"card{self._count}"
        folder.mkdir()
        config = folder / "config.json"
        config.write_text(json.dumps({"version": 1, "cards": [{"profile": "Fake24G", "uuid": CARD}], **driver}))
        return config

    def container(self, config: Path, **grant: Any) -> Container:
        self._count += 1
        folder = self.memory / f"c{self._count}"
        folder.mkdir()
        made = Container(folder, config, self.driver)
        made.grant(**grant)
        return made


# ---- calls ------------------------------------------------------------------------------------------------------

CALLS: Final = {
    "pass": ("a call that is none of ours", 1.0),
    "launch": ("launch, no limit", 2.0),
    "launch limited": ("launch, limit not binding", 10.0),
    "alloc_free": ("alloc and free", 40.0),
    "alloc_free_live": ("alloc and free, 10,000 live", 60.0),
    "memory_info": ("memory info", 10.0),
    "nvml_memory": ("NVML memory info", 10.0),
    "look_up": ("cuGetProcAddress, ours", 50.0),
    "look_up_other": ("cuGetProcAddress, other", 50.0),
    "dlsym": ("dlsym, ours", 50.0),
    "dlsym_other": ("dlsym, other", 50.0),
}


def added(runs: list[tuple[dict[str, float], dict[str, float]]], key: str) -> tuple[float, float]:
    """Nanoseconds that the hook adds, each run against its neighbour, and what the bare call takes: the medians."""
    return statistics.median(h[key] - b[key] for b, h in runs), statistics.median(b[key] for b, _ in runs)


def in_turn(container: Container, command: list[str], rounds: int) -> list[tuple[dict[str, float], dict[str, float]]]:
    runs = []
    for i in range(rounds):
        first = container.run(command, hooked=bool(i % 2))
        second = container.run(command, hooked=not i % 2)
        runs.append((second, first) if i % 2 else (first, second))
    return runs


@contextlib.contextmanager
def neighbours(container: Container, command: list[str], count: int) -> Iterator[None]:
    """That many processes of the container that hold memory and do nothing."""
    idle = [container.popen(command) for _ in range(count)]
    try:
        for process in idle:
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise SystemExit("bench: a neighbour did not start")
        yield
    finally:
        for process in idle:
            process.kill()
            process.communicate()


def measure_calls(machine: Machine, rounds: int) -> Iterator[Figure]:
    command = [machine.program("calls"), "all"]
    free = machine.container(machine.card())
    runs = in_turn(free, command, rounds)
    for key, (name, budget) in CALLS.items():
        if key != "launch limited":
            value, bare = added(runs, key)
            yield Figure(name, "ns added", value, bare, budget)
    limited = machine.container(machine.card(), percent=50)
    value, bare = added(in_turn(limited, command, rounds), "launch")
    yield Figure(CALLS["launch limited"][0], "ns added", value, bare, CALLS["launch limited"][1])
    crowded = machine.container(machine.card())
    with neighbours(crowded, [machine.program("calls"), "idle"], NEIGHBOURS):
        runs = in_turn(crowded, command, max(3, rounds // 2))
    for key in ("alloc_free", "alloc_free_live", "memory_info", "nvml_memory"):
        value, bare = added(runs, key)
        yield Figure(f"{CALLS[key][0]}, {NEIGHBOURS} neighbours", "ns added", value, bare, CALLS[key][1])


# ---- starts -----------------------------------------------------------------------------------------------------


def measure_starts(machine: Machine, rounds: int) -> Iterator[Figure]:
    starts, calls = machine.program("starts"), machine.program("calls")

    def lives(config: Path, count: int, at_once: int, *command: str) -> dict[str, Any]:
        container = machine.container(config)
        libraries = [str(container.library), str(machine.empty)]
        line = [starts, *libraries, str(count), str(at_once), *command]
        return container.run(line, hooked=False)

    seen = lives(machine.card(), rounds * 40, 1, "/bin/true")
    yield Figure("start without CUDA", "us added", seen["hooked_us"], seen["bare_us"], 35)
    yield Figure("start without CUDA, an empty library", "us added", seen["empty_us"], seen["bare_us"], None)
    for name, driver in (("", {}), (", contexts of 100 ms", {"context_create_ns": 100_000_000})):
        count = rounds * 20 if not driver else rounds
        for at_once, budget in ((1, 1.1), (8, 1.05)):
            seen = lives(machine.card(**driver), count, at_once, calls, "start")
            label = f"start with CUDA{name}" + (f", {at_once} at once" if at_once > 1 else "")
            for key, suffix, most in (("hooked_us", "", budget), ("empty_us", ", an empty library", None)):
                times = 1 + seen[key] / seen["bare_us"]
                yield Figure(label + suffix, "times", times, seen["bare_us"], most)


# ---- compute shares ---------------------------------------------------------------------------------------------

KINDS: Final = ("kernel", "ex", "cooperative", "multi", "graph", "thread", "streams", "sync")
LENGTHS: Final = (100, 1000, 10000)
LIMITS: Final = (10, 25, 50, 75, 90)
STALL_MS: Final = 30.0


def oversleep_ms(seconds: float) -> float:
    """The machine's own share in a stall: by how much a sleep of 2 ms is late at worst."""
    worst, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        begin = time.monotonic()
        time.sleep(0.002)
        worst = max(worst, time.monotonic() - begin - 0.002)
    return worst * 1e3


def one_share(machine: Machine, kind: str, length: int, limit: int, seconds: float) -> Iterator[Figure]:
    container = machine.container(machine.card(), percent=limit)
    process = container.popen([machine.program("share"), kind, str(length), str(seconds)])
    late = oversleep_ms(seconds * 0.9)
    seen = finish(process)
    label = f"{kind}, {length} us, limit {limit}"
    # A bucket that was never touched is full: 30 ms of the time are no error of the rate.
    error = abs(seen["share"] - limit)
    yield Figure(f"share: {label}", "points off", error, seen["share"], 2)
    worst = max(limit - seen["worst"], seen["best"] - limit)
    yield Figure(f"any second: {label}", "points off", worst, seen["worst"], 5)
    if limit == 50:
        yield Figure(f"longest stall: {label}", "ms", seen["stall_ms"], late, STALL_MS + late)


def advise_until(containers: Sequence[Container], processes: Sequence[subprocess.Popen[str]]) -> None:
    """The node's part: what each share is told of the others, twice a second, until the programs have ended."""
    while any(process.poll() is None for process in processes):
        now = time.monotonic_ns()
        seen = [
            Activity(
                name=str(i),
                card_uuid=CARD,
                last_launch_ns=container.regions.usage("g").last_launch_ns,
                processes=1,
                core_percent=50,
                core_policy=CorePolicy.DEFAULT,
                priority=0,
            )
            for i, container in enumerate(containers)
        ]
        advice = advise(seen, now)
        for i, container in enumerate(containers):
            one = advice[str(i)]
            container.regions.hint(
                "g", burst_until_ns=one.burst_until_ns, hold_until_ns=one.hold_until_ns, heartbeat_ns=now
            )
        time.sleep(0.5)


def two_shares(machine: Machine, length: int, limits: tuple[int, int], seconds: float) -> Iterator[Figure]:
    config = machine.card(queue_depth=64)
    both = [machine.container(config, percent=limit, policy=CorePolicy.DEFAULT) for limit in limits]
    begin = time.monotonic_ns() + 300_000_000
    command = [machine.program("share"), "kernel", str(length), str(seconds), str(begin)]
    started = [container.popen(command) for container in both]
    advise_until(both, started)
    for limit, process in zip(limits, started, strict=True):
        seen = finish(process)
        label = f"{limit} of {limits[0]} + {limits[1]}, {length} us"
        yield Figure(f"share: {label}", "points off", abs(seen["share"] - limit), seen["share"], 2)


def measure_shares(machine: Machine, seconds: float, *, quick: bool) -> Iterator[Figure]:
    for limit in LIMITS:
        for length in LENGTHS:
            if not quick or (limit, length) in {(10, 100), (50, 1000), (90, 10000), (50, 10000)}:
                yield from one_share(machine, "kernel", length, limit, seconds)
    for kind in KINDS[1:]:
        yield from one_share(machine, kind, 1000, 50, seconds)
    for limits in ((30, 70), (50, 50)):
        for length in LENGTHS:
            yield from two_shares(machine, length, limits, seconds)


# ---- the table --------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and shorter ones")
    parser.add_argument("--only", default="calls,starts,shares", help="of calls, starts, shares")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    arguments = parser.parse_args(argv)
    wanted = arguments.only.split(",")
    rounds = 5 if arguments.quick else 15
    folder = Path(tempfile.mkdtemp(prefix="aliquot-bench-hook-"))
    memory = Path(tempfile.mkdtemp(prefix="aliquot-bench-hook-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None))
    figures: list[Figure] = []
    try:
        machine = Machine(folder, memory)
        parts: list[Iterator[Figure]] = []
        if "calls" in wanted:
            parts.append(measure_calls(machine, rounds))
        if "starts" in wanted:
            parts.append(measure_starts(machine, rounds))
        if "shares" in wanted:
            parts.append(measure_shares(machine, 4 if arguments.quick else 10, quick=arguments.quick))
        for part in parts:
            for figure in part:
                figures.append(figure)
                if arguments.output == "table":
                    mark = "" if figure.holds else "  MISSED"
                    budget = "" if figure.budget is None else f"  budget {figure.budget:7.2f}"
                    sys.stdout.write(
                        f"{figure.name:65} {figure.value:9.2f} {figure.unit:10} floor {figure.floor:10.2f}"
                        f"{budget}{mark}\n"
                    )
                    sys.stdout.flush()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)
    if arguments.output == "json":
        sys.stdout.write(json.dumps([asdict(f) | {"holds": f.holds} for f in figures], indent=1) + "\n")
    return 0 if all(f.holds for f in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
