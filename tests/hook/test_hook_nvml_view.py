# SPDX-License-Identifier: Apache-2.0
"""What NVML tells a container about processes: its own, under its own pids, and how busy they keep the card."""

from __future__ import annotations

import ctypes as c
import json
import struct
from pathlib import Path

import pytest

CARD_A = "GPU-aaaaaaaa-0000-4000-8000-00000000000a"
CARD_B = "GPU-bbbbbbbb-0000-4000-8000-00000000000b"
MIB = 1 << 20
KINDS = ("Compute", "Graphics", "MPSCompute")
SLOT = struct.Struct("<8Q")
HOLD = "start()\nsay(rc=alloc({size})[0])\nwait()"


def control(cards: Path, rows: list[dict]) -> None:
    """Processes that the fake driver shall speak of beside the real ones."""
    path = cards.with_name(cards.name + ".control")
    path.write_text(json.dumps({"processes": rows}))


def hold(box, size: int):
    """A process of the container that holds `size` bytes of card 0 until it is told to end."""
    process = box.python(HOLD.format(size=size))
    assert json.loads(process.stdout.readline()) == {"rc": 0}
    return process


def let_go(*processes) -> None:
    for process in processes:
        process.communicate("\n", timeout=30)


def name_outside(box, grant: str, pids: dict[int, int]) -> None:
    """What the node does: pids as the host knows them, beside the slots of their owners."""
    region = box.region(grant)
    data = region.read_bytes()
    for index in range(1024):
        owner = SLOT.unpack_from(data, 4096 + 128 * index)[0]
        outside = pids.get(owner & ((1 << 22) - 1))
        if owner and outside:
            rc = box.node.lib.aq_usage_set_host_pid(
                str(region).encode(), c.c_uint32(index), c.c_uint64(owner), c.c_uint64(outside)
            )
            assert rc == 0


def look(box, code: str):
    """What a process without CUDA sees."""
    return box.run(f"from nvml_view import *\nd = device({CARD_A!r})\n{code}").last


@pytest.fixture
def two(box, cards):
    """A container with two processes, which are 5001 and 5002 on the host, and a stranger beside them."""
    box.grant("g", CARD_A, 4096 * MIB)
    first, second = hold(box, 100 * MIB), hold(box, 200 * MIB)
    name_outside(box, "g", {first.pid: 5001, second.pid: 5002})
    rows = [
        {"card": 0, "pid": pid, "type": kind, "memory_bytes": 64 * MIB, "sm_utilization": percent}
        for pid, percent in ((5001, 20), (5002, 30), (6000, 40))
        for kind in "CGM"
    ]
    control(cards, rows)
    yield box, first, second
    let_go(first, second)


def test_b190_only_own_processes_under_the_pids_inside(two):
    box, first, second = two
    seen = look(
        box,
        f"say(**{{k: ask(f'nvmlDeviceGet{{k}}RunningProcesses_v3', d, 64)[:3] for k in {KINDS!r}}})",
    )
    for kind in KINDS:
        code, count, entries = seen[kind]
        assert (code, count) == (0, 2), kind
        assert {e[0] for e in entries} == {first.pid, second.pid}, kind
    memory = dict(map(tuple, seen["Compute"][2]))
    assert memory[first.pid] >= 100 * MIB
    assert memory[second.pid] - memory[first.pid] == 100 * MIB


def test_b190_memory_in_the_list_adds_up_to_what_is_used(two):
    box, *_ = two
    seen = look(
        box,
        "m = (c.c_ulonglong * 3)()\nassert nvml.nvmlDeviceGetMemoryInfo(d, m) == 0\n"
        "say(list=ask('nvmlDeviceGetComputeRunningProcesses_v3', d, 64)[2], used=m[2])",
    )
    assert sum(e[1] for e in seen["list"]) == seen["used"]


@pytest.mark.parametrize(("suffix", "entry"), [("", "V1"), ("_v2", "V2"), ("_v3", "V2")])
@pytest.mark.parametrize("kind", KINDS)
def test_b191_room_for_one_and_guard_bytes(two, kind, suffix, entry):
    box, *_ = two
    name = f"nvmlDeviceGet{kind}RunningProcesses{suffix}"
    seen = look(box, f"say(a=[ask({name!r}, d, n, {entry}) for n in (0, 1, 2, 9)])")["a"]
    none, one, fit, more = seen
    assert (none[0], none[1]) == (7, 2)
    assert (one[0], one[1], one[3]) == (7, 2, True)
    assert (fit[0], fit[1], fit[3]) == (0, 2, True)
    assert more == fit


def test_b191_wrong_version_gets_the_drivers_own_code(two):
    box, *_ = two
    code = "say(hooked=[details(d, number=n)[0] for n in (0, 2, 9)], empty=details(d, mode=7)[0])"
    bare = box.run(f"from nvml_view import *\nd = device({CARD_A!r})\n{code}", hooked=False).last
    assert look(box, code) == bare


def test_detail_list_shows_the_same(two):
    box, first, second = two
    code, count, entries = look(box, "say(a=details(d))")["a"]
    assert (code, count) == (0, 2)
    assert {e[0] for e in entries} == {first.pid, second.pid}
    assert look(box, "say(a=details(d, room=1)[:2])")["a"] == [7, 2]


def test_missing_outputs_are_the_drivers_to_judge(two):
    box, *_ = two
    code = """
f = nvml.nvmlDeviceGetComputeRunningProcesses_v3
n = c.c_uint(3)
say(a=[f(d, None, None), f(None, c.byref(n), None), f(d, c.byref(n), None), nvml.nvmlDeviceGetUtilizationRates(d, None),
       nvml.nvmlDeviceGetProcessUtilization(d, None, None, c.c_ulonglong(0))])
"""
    bare = box.run(f"from nvml_view import *\nd = device({CARD_A!r})\n{code}", hooked=False).last
    assert look(box, code)["a"][:2] == bare["a"][:2]
    assert look(box, code)["a"][3:] == bare["a"][3:]


def test_utilization_is_the_containers_own(two):
    box, first, second = two
    seen = look(box, "say(samples=samples(d), infos=infos(d), rates=rates(d))")
    expected = {str(first.pid): 20, str(second.pid): 30}
    for what in ("samples", "infos"):
        code, percents = seen[what]
        assert code == 0
        assert set(percents) == set(expected), what
    assert seen["rates"][0] == 0
    assert seen["rates"][1] < 90, "the stranger's 40 % are nobody's business"


def test_without_the_nodes_word_pids_of_the_same_namespace_serve(box):
    box.grant("g", CARD_A, 1024 * MIB)
    process = hold(box, 10 * MIB)
    stranger = box.python(HOLD.format(size=20 * MIB), hooked=False)
    assert json.loads(stranger.stdout.readline()) == {"rc": 0}
    code, count, entries = look(box, "say(a=ask('nvmlDeviceGetComputeRunningProcesses_v3', d, 64)[:3])")["a"]
    assert (code, count, entries[0][0]) == (0, 1, process.pid)
    let_go(process, stranger)


def test_b165_each_card_lists_its_own(box):
    box.grant("a", CARD_A, 1024 * MIB)
    box.grant("b", CARD_B, 1024 * MIB)
    on_a = box.python(HOLD.format(size=10 * MIB), env={"CUDA_VISIBLE_DEVICES": CARD_A})
    on_b = box.python(HOLD.format(size=30 * MIB), env={"CUDA_VISIBLE_DEVICES": CARD_B})
    for process in (on_a, on_b):
        assert json.loads(process.stdout.readline()) == {"rc": 0}
    for card, process in ((CARD_A, on_a), (CARD_B, on_b)):
        seen = box.run(
            f"from nvml_view import *\nsay(a=ask('nvmlDeviceGetComputeRunningProcesses_v3', device({card!r}), 9)[:3])"
        ).last["a"]
        assert (seen[1], seen[2][0][0]) == (1, process.pid)
    let_go(on_a, on_b)


def test_b192_name_uuid_index_and_count_are_unchanged(box):
    box.grant("b", CARD_B, 1024 * MIB)
    code = f"""
from nvml_view import *
d = device({CARD_B!r})
name, uuid, index, count = c.create_string_buffer(96), c.create_string_buffer(96), c.c_uint(), c.c_uint()
nvml.nvmlDeviceGetName(d, name, 96), nvml.nvmlDeviceGetUUID(d, uuid, 96)
nvml.nvmlDeviceGetIndex(d, c.byref(index)), nvml.nvmlDeviceGetCount_v2(c.byref(count))
say(name=name.value.decode(), uuid=uuid.value.decode(), index=index.value, count=count.value)
"""
    assert box.run(code).last == box.run(code, hooked=False).last


def test_scribbled_slots_show_nobody_and_crash_nobody(box):
    box.grant("g", CARD_A, 1024 * MIB)
    process = hold(box, 10 * MIB)
    region = box.region("g")
    data = bytearray(region.read_bytes())
    for i in range(4096, len(data)):
        data[i] = (i * 167 + 13) & 0xFF
    data[128 + 24 : 128 + 32] = b"\xff" * 8  # slots_used
    with region.open("r+b") as file:
        file.write(data)
    seen = look(box, "say(a=[ask(f'nvmlDeviceGet{k}RunningProcesses_v3', d, 4)[0] for k in ('Compute', 'Graphics')])")
    assert all(code in (0, 7) for code in seen["a"])
    process.kill()
    process.communicate()
