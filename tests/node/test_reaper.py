# SPDX-License-Identifier: Apache-2.0
"""Dead processes' charges come back within a second, and nobody else's do."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aliquot.node.charging import Usage
from aliquot.node.reaper import Reaper
from aliquot.node.regions import Regions

MIB, SECOND = 1 << 20, 1_000_000_000
IN_NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.fixture
def reaper(regions: Regions) -> Iterator[Reaper]:
    one = Reaper(regions)
    one.start()
    yield one
    one.stop()


def used(regions: Regions, name: str = "c-1-gpu-0") -> int:
    return regions.usage(name).used_bytes


def can_unshare() -> bool:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    return subprocess.run([*IN_NAMESPACE, "true"], check=False, capture_output=True).returncode == 0


needs_namespaces = pytest.mark.skipif(not can_unshare(), reason="needs root and PID namespaces")


def test_charge_is_back_within_a_second_of_a_sigkill(regions, reaper, grant, owner, until):
    regions.create(grant())
    path = regions.usage_file("c-1-gpu-0")
    one, two = owner(path), owner(path)
    assert one.do(f"reserve {300 * MIB}") == 0
    assert two.do(f"reserve {200 * MIB}") == 0
    until(lambda: reaper.counters.processes == 2, within=2)
    assert used(regions) == 500 * MIB
    one.kill()
    took = until(lambda: used(regions) == 200 * MIB, within=1)
    assert took < 1
    # The survivor goes on as if nothing had been.
    assert two.do(f"release {200 * MIB}") == 0
    assert used(regions) == 0


def test_a_process_that_came_and_went_between_two_rounds_is_found(regions, reaper, grant, owner, until):
    regions.create(grant())
    one = owner(regions.usage_file("c-1-gpu-0"))
    one.do(f"reserve {MIB}")
    one.end()  # reaped by its parent too: nothing of it is left in /proc
    until(lambda: used(regions) == 0, within=1)


def test_a_zombie_holds_nothing(regions, reaper, grant, owner, until):
    regions.create(grant())
    one = owner(regions.usage_file("c-1-gpu-0"))
    one.do(f"reserve {MIB}")
    one.kill()  # not waited for: the entry in /proc stays
    until(lambda: used(regions) == 0, within=1)
    assert Path(f"/proc/{one.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_process_whose_main_thread_ended_is_alive(regions, grant, owner, until):
    regions.create(grant())
    one = owner(regions.usage_file("c-1-gpu-0"))
    one.do(f"reserve {MIB}")
    one.do("leave")
    state = Path(f"/proc/{one.pid}/stat")
    until(lambda: state.read_text().rpartition(")")[2].split()[0] == "Z", within=5)
    reaper = Reaper(regions)  # a new one, that has to find it in /proc
    for _ in range(3):
        reaper.round()
    assert used(regions) == MIB
    assert reaper.counters.processes == 1
    reaper.stop()


def test_half_a_reservation_of_a_killed_process_comes_back(regions, reaper, grant, owner, until):
    regions.create(grant())
    path = regions.usage_file("c-1-gpu-0")
    one, two = owner(path), owner(path)
    two.do(f"reserve {2 * MIB}")
    one.do(f"half {MIB}")
    assert used(regions) == 3 * MIB
    one.kill()
    until(lambda: used(regions) == 2 * MIB, within=1)


def test_what_a_reaper_killed_half_way_left_is_repaired_by_the_next(regions, grant, owner):
    regions.create(grant())
    one = owner(regions.usage_file("c-1-gpu-0"))
    one.do(f"reserve {MIB}")
    one.do(f"half {MIB}")  # the account is too large and nobody is dead
    reaper = Reaper(regions)
    reaper.round()
    reaper.round()
    assert used(regions) == MIB
    assert reaper.counters.repaired_bytes == MIB
    reaper.stop()


@needs_namespaces
def test_a_process_in_another_pid_namespace_is_found_told_and_reaped(regions, reaper, grant, owner, until):
    regions.create(grant())
    path = regions.usage_file("c-1-gpu-0")
    inside, outside = owner(path, prefix=IN_NAMESPACE), owner(path)
    assert inside.pid == 1  # as its own namespace sees it
    inside.do(f"reserve {3 * MIB}")
    outside.do(f"reserve {MIB}")

    def told() -> list[int | None]:
        return [p.host_pid for p in regions.usage("c-1-gpu-0").processes]

    until(lambda: all(told()) and len(told()) == 2, within=2)
    host_pid = dict(zip([p.pid for p in regions.usage("c-1-gpu-0").processes], told(), strict=True))[1]
    assert host_pid not in (None, 1)
    assert Path(f"/proc/{host_pid}/exe").readlink().name == "owner"
    os.kill(host_pid, 9)
    until(lambda: used(regions) == MIB, within=1)


@needs_namespaces
def test_two_containers_with_equal_pids_are_told_apart(regions, reaper, grant, owner, until):
    regions.create(grant())
    path = regions.usage_file("c-1-gpu-0")
    one, two = owner(path, prefix=IN_NAMESPACE), owner(path, prefix=IN_NAMESPACE)
    one.do(f"reserve {3 * MIB}")
    two.do(f"reserve {5 * MIB}")
    until(lambda: reaper.counters.processes == 2, within=2)
    one.end()
    until(lambda: used(regions) == 5 * MIB, within=1)
    assert two.do(f"reserve {MIB}") == 0
    assert used(regions) == 6 * MIB


@needs_namespaces
def test_a_daemon_that_cannot_see_the_container_gives_nothing_back(
    regions, grant, owner, owner_program, tmp_path, python, until
):
    """Without hostPID the daemon sees only itself; taking every owner for dead would double the memory."""
    regions.create(grant())
    one = owner(regions.usage_file("c-1-gpu-0"))
    one.do(f"reserve {MIB}")
    program = (
        "import sys; from pathlib import Path; from aliquot.node.reaper import Reaper;"
        "from aliquot.node.regions import Regions; from aliquot.hook import REGION, library;"
        "found = [];"
        "r = Reaper(Regions(Path(sys.argv[1]), library(REGION)), on_trouble=lambda *a: found.append(a));"
        "r.round(); r.round(); print(r.counters.reaped, r.counters.uncertain, found)"
    )
    done = subprocess.run(
        [*IN_NAMESPACE, python, "-c", program, str(regions.run_dir)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1].startswith("0 1 [('c-1-gpu-0', 'owners in a PID namespace that this daemon")
    assert used(regions) == MIB


@needs_namespaces
def test_a_daemon_in_a_namespace_of_its_own_may_use_the_nodes_procfs(regions, grant, owner, python):
    """Then the PIDs it reads are not those its own system calls take."""
    regions.create(grant())
    one, two = owner(regions.usage_file("c-1-gpu-0")), owner(regions.usage_file("c-1-gpu-0"))
    one.do(f"reserve {MIB}")
    two.do(f"reserve {2 * MIB}")
    program = (
        "import os, signal, sys; from pathlib import Path; from aliquot.node.reaper import Reaper;"
        "from aliquot.node.regions import Regions; from aliquot.hook import REGION, library;"
        "r = Reaper(Regions(Path(sys.argv[1]), library(REGION)));"
        "r.round(); r.round(); print(r.counters.reaped, r.counters.processes, r.counters.uncertain, flush=True);"
        "sys.stdin.readline(); r.round(); print(r.counters.reaped, r.counters.processes, flush=True)"
    )
    daemon = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", python, "-c", program, str(regions.run_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert daemon.stdout is not None
    assert daemon.stdout.readline() == "0 2 0\n"
    two.end()
    out, _ = daemon.communicate("\n", timeout=20)
    assert out.splitlines()[-1] == "1 1"
    assert used(regions) == MIB


@needs_namespaces
def test_a_process_without_proc_is_known_by_the_file_it_has_mapped(regions, reaper, grant, owner, until):
    regions.create(grant("c-1-gpu-0"))
    regions.create(grant("c-2-gpu-0"))
    path = regions.usage_file("c-1-gpu-0")
    blind, other = owner(path, prefix=IN_NAMESPACE, more=["blind"]), owner(path)
    # Somebody else with PID 1 in his namespace and another share.
    third = owner(regions.usage_file("c-2-gpu-0"), prefix=IN_NAMESPACE)
    blind.do(f"reserve {3 * MIB}")
    other.do(f"reserve {MIB}")
    until(lambda: reaper.counters.processes == 3, within=2)
    assert used(regions) == 4 * MIB
    blind.end()
    until(lambda: used(regions) == MIB, within=1)
    assert third.do("reserve 512") == 0


def test_a_claim_that_was_killed_half_way_frees_its_slot(regions, grant, owner):
    regions.create(grant())
    path = regions.usage_file("c-1-gpu-0")
    one = owner(path)
    word = one.word
    claiming = (word & ~(1 << 62)) | 1 << 63
    with path.open("r+b") as file:  # as the claim leaves it before it is complete
        file.seek(4096 + 128 * one.index)
        file.write(claiming.to_bytes(8, "little"))
    reaper = Reaper(regions)
    reaper.round()
    assert [p.pid for p in regions.usage("c-1-gpu-0").processes] == [one.pid]  # it may still be at it
    reaper.round()
    assert regions.usage("c-1-gpu-0").processes == ()
    reaper.stop()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: os.truncate(path, 10),
        lambda path: os.truncate(path, 0),
        lambda path: path.write_bytes(b"\xff" * path.stat().st_size),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
        lambda path: path.unlink(),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.unlink(), path.symlink_to("/etc/passwd")),
        lambda path: (path.unlink(), os.mkfifo(path)),
    ],
    ids=["cut", "emptied", "all ones", "all zeros", "deleted", "a folder", "a link", "a fifo"],
)
def test_b232_a_damaged_region_is_reported_once_and_harms_nobody_else(
    regions: Regions, grant, owner, damage: Callable[[Path], object]
):
    regions.create(grant("c-1-gpu-0"))
    regions.create(grant("c-2-gpu-0"))
    neighbour = owner(regions.usage_file("c-2-gpu-0"))
    neighbour.do(f"reserve {MIB}")
    found: list[tuple[str, str]] = []
    reaper = Reaper(regions, on_trouble=lambda name, finding: found.append((name, finding)))
    reaper.round()
    passwd = Path("/etc/passwd").read_bytes()
    damage(regions.usage_file("c-1-gpu-0"))
    for _ in range(3):
        reaper.round()
    assert [name for name, _ in found] == ["c-1-gpu-0"]
    assert sum(reaper.counters.troubles.values()) == 1
    neighbour.end()
    reaper.round()
    assert used(regions, "c-2-gpu-0") == 0
    assert Path("/etc/passwd").read_bytes() == passwd
    reaper.stop()


def test_findings_that_come_and_go_are_reported_once_until_a_minute_of_quiet(regions, grant):
    regions.create(grant())
    path = regions.usage_file("c-1-gpu-0")
    whole = path.read_bytes()
    now, found = [0], []
    reaper = Reaper(regions, clock_ns=lambda: now[0], on_trouble=lambda _name, finding: found.append(finding))
    for _ in range(5):
        path.write_bytes(b"\xff" * len(whole))
        reaper.round()
        path.write_bytes(whole)
        reaper.round()
        now[0] += 10_000_000_000
    assert len(found) == 1
    now[0] += 61_000_000_000
    reaper.round()
    path.write_bytes(b"\xff" * len(whole))
    reaper.round()
    assert len(found) == 2
    reaper.stop()


def test_random_scribble_neither_stops_nor_slows_it(regions, grant):
    import random  # noqa: PLC0415

    rng = random.Random(7)
    regions.create(grant())
    path = regions.usage_file("c-1-gpu-0")
    whole = path.read_bytes()
    reaper = Reaper(regions)
    for _ in range(30):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 400)):
            at = rng.randrange(0, len(data) - 8) & ~7
            data[at : at + 8] = rng.randbytes(8)
        path.write_bytes(data)
        reaper.round()
    assert reaper.counters.rounds == 30
    reaper.stop()


def test_it_stops_at_once_and_from_any_state(regions):
    reaper = Reaper(regions, tick_s=60)
    reaper.start()
    reaper.stop()
    Reaper(regions).stop()


def test_it_goes_on_after_the_run_folder_was_away_for_a_while(regions, grant, owner, until, tmp_path):
    regions.create(grant())
    one = owner(regions.usage_file("c-1-gpu-0"))
    one.do(f"reserve {MIB}")
    reaper = Reaper(regions, proc=tmp_path / "proc", tick_s=0.06)  # no such folder: rounds fail
    (tmp_path / "proc").symlink_to("/nowhere")
    reaper.start()
    until(lambda: reaper.counters.failed_rounds > 0, within=5)
    assert not reaper.alive(0.0)
    (tmp_path / "proc").unlink()
    (tmp_path / "proc").symlink_to("/proc")
    until(lambda: reaper.counters.rounds > 0, within=8)
    assert used(regions) == MIB
    reaper.stop()


def test_callbacks_that_raise_do_not_end_it(regions, grant, owner, until):
    regions.create(grant())
    one = owner(regions.usage_file("c-1-gpu-0"))
    one.do(f"reserve {MIB}")
    called: list[object] = []

    def raising(*args: object) -> None:
        called.append(args)
        raise RuntimeError

    reaper = Reaper(regions, on_reaped=raising, on_trouble=raising)
    reaper.round()
    one.end()
    reaper.round()
    reaper.round()
    assert called == [("c-1-gpu-0", 1, MIB)]
    reaper.stop()


def test_hints_reach_the_grant_file(regions: Regions, grant, owner):
    from aliquot.api.region import parse_grant_file  # noqa: PLC0415

    regions.create(grant("c-1-gpu-0"))
    regions.create(grant("c-2-gpu-0", priority=1))
    busy = owner(regions.usage_file("c-1-gpu-0"))
    busy.do("launch")
    reaper = Reaper(regions)
    reaper.round()

    def hints(name: str):
        found = parse_grant_file(regions.grant_file(name).read_bytes())
        assert found is not None
        return found.hints

    assert hints("c-1-gpu-0").burst_until_ns > hints("c-1-gpu-0").heartbeat_ns > 0
    assert hints("c-1-gpu-0").hold_until_ns == 0
    assert hints("c-2-gpu-0").burst_until_ns == 0
    assert hints("c-2-gpu-0").hold_until_ns > hints("c-2-gpu-0").heartbeat_ns
    regions.suspend("c-2-gpu-0", True)
    reaper.round()
    assert hints("c-2-gpu-0").suspended == 1  # the reaper leaves what it does not own alone
    reaper.stop()


def test_shares_that_take_turns_are_told_what_their_charges_are_worth(regions: Regions, grant, owner):
    from aliquot.api.region import parse_grant_file  # noqa: PLC0415
    from aliquot.api.region_layout import RATIO_ONE  # noqa: PLC0415

    a_card = grant("c-1-gpu-0").card_uuid
    half, now, asked = SECOND // 2, [100 * SECOND], []

    def utilization(uuid: str) -> Usage:
        asked.append(uuid)
        return Usage(now[0] - 2 * half, now[0] - half, {one.pid: 30.0, two.pid: 35.0, 1: 20.0})

    regions.create(grant("c-1-gpu-0", core_percent=30))
    regions.create(grant("c-2-gpu-0", core_percent=70))
    one, two = owner(regions.usage_file("c-1-gpu-0")), owner(regions.usage_file("c-2-gpu-0"))
    reaper = Reaper(regions, clock_ns=lambda: now[0], utilization=utilization)

    def ratios() -> list[int]:
        found = [parse_grant_file(regions.grant_file(f"c-{i}-gpu-0").read_bytes()) for i in (1, 2)]
        return [file.hints.ratio if file else -1 for file in found]

    def rounds(count: int, *busy) -> None:
        for _ in range(count):
            now[0] += half
            for process, percent in busy:
                process.do(f"launch {now[0]}")
                process.do(f"done {half * percent // 100}")
            reaper.round()

    rounds(4, (one, 60))
    assert (asked, ratios()) == ([], [0, 0]), "alone: what it measures is the truth"
    rounds(6, (one, 60), (two, 35))
    assert set(asked) == {a_card}
    first, second = ratios()
    assert abs(first - RATIO_ONE // 2) < RATIO_ONE // 50
    assert abs(second - RATIO_ONE) < RATIO_ONE // 50
    rounds(4, (one, 60))
    assert ratios() == [0, 0], "the other one has gone quiet"
    reaper.stop()


def test_shares_that_begin_to_take_turns_are_compared_soon_and_then_twice_a_second(regions: Regions, grant, owner):
    """The first answer is of a time in which they did not share the card, so it is only the beginning of a window."""
    from aliquot.api.region import parse_grant_file  # noqa: PLC0415

    step, now, asked = SECOND // 5, [100 * SECOND], []

    def utilization(_uuid: str) -> Usage:
        asked.append(now[0])
        return Usage(now[0] - step, now[0], {one.pid: 30.0, two.pid: 35.0})

    names = ("c-1-gpu-0", "c-2-gpu-0")
    for name in names:
        regions.create(grant(name, core_percent=50))
    one, two = (owner(regions.usage_file(name)) for name in names)
    reaper = Reaper(regions, clock_ns=lambda: now[0], utilization=utilization)
    known = []
    for _ in range(10):
        now[0] += step
        for process in (one, two):
            process.do(f"launch {now[0]}")
            process.do(f"done {step * 6 // 10}")
        reaper.round()
        files = [parse_grant_file(regions.grant_file(name).read_bytes()) for name in names]
        known.append(all(file is not None and file.hints.ratio > 0 for file in files))
    reaper.stop()
    assert known == [False, *[True] * 9]
    begun = asked[0]
    assert asked[1] - begun == step
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked[1:])]
    assert gaps == [2 * step] * len(gaps)
