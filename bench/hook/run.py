# SPDX-License-Identifier: Apache-2.0
"""What the hook costs a program, and how well it keeps a compute limit, beside the bare driver of the same run.

Runs each measurement in turn with the hook and without, so that whatever else the machine does meets both, and
prints medians. The driver is the fake one; the limits are real grants in a folder of the run. Where a start is
measured, an empty library that is preloaded instead shows what no hook could do without. Budgets are those of
the design (`docs/hook-limits.md`). Exit status: 0 when all of them hold, 1 when one is missed.

    bench/hook/run.py [--quick] [--only calls,starts,shares] [--part K/N] [--output json]
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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import shares

from aliquot.api.grant import CorePolicy, Grant
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
        made = self.bare_container(config)
        made.grant(**grant)
        return made

    def bare_container(self, config: Path) -> Container:
        """One without a grant yet."""
        self._count += 1
        folder = self.memory / f"c{self._count}"
        folder.mkdir()
        return Container(folder, config, self.driver)


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


# ---- the table --------------------------------------------------------------------------------------------------


def measure_shares(machine: Machine, part: str, *, quick: bool, show: bool) -> Iterator[Figure]:
    which, of = (int(number) for number in part.split("/"))
    lines = sys.stdout if show else sys.stderr

    def line(text: str) -> None:
        lines.write(text + "\n")
        lines.flush()

    for figure in shares.measure(machine, uuid=CARD, quick=quick, part=(which, of), show=line):
        yield Figure(*figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and shorter ones")
    parser.add_argument("--only", default="calls,starts,shares", help="of calls, starts, shares")
    parser.add_argument("--part", default="1/1", help="the K-th of N parts of the shares (all: a quarter of an hour)")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    arguments = parser.parse_args(argv)
    wanted = arguments.only.split(",")
    rounds = 5 if arguments.quick else 15
    table = arguments.output == "table"
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
            parts.append(measure_shares(machine, arguments.part, quick=arguments.quick, show=table))
        for part in parts:
            for figure in part:
                figures.append(figure)
                if table:
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
    if not table:
        sys.stdout.write(json.dumps([asdict(f) | {"holds": f.holds} for f in figures], indent=1) + "\n")
    return 0 if all(f.holds for f in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
