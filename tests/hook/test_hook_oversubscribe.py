# SPDX-License-Identifier: Apache-2.0
"""Shares beyond the card: what moves to managed memory, what is refused, and that both are told."""

from __future__ import annotations

import json
import select
import struct

import pytest

A = "GPU-aaaaaaaa-0000-4000-8000-00000000000a"
GIB, MIB = 1 << 30, 1 << 20
MORE = "from memory import *\n"
OVERSUBSCRIBE = 1
KINDS = ("linear", "pitched", "managed", "async", "handle", "array", "mipmap", "graph", "context")


@pytest.fixture
def card(cards):
    """Sets the size of both cards."""

    def size(text: str) -> None:
        config = json.loads(cards.read_text())
        for row in config["cards"]:
            row["memory_bytes"] = text
        cards.write_text(json.dumps(config))

    return size


def refused(box) -> dict[str, int]:
    words = struct.unpack_from("<12Q", box.region("a").read_bytes(), 32)
    return {k: n for k, n in zip(KINDS, words, strict=False) if n}


def spilled(box) -> int:
    raw = box.region("a").read_bytes()
    return sum(struct.unpack_from("<Q", raw, 4096 + 128 * i + 40)[0] for i in range(1024))


def test_b151_figures_are_those_of_the_share(box, card):
    card("10GiB")
    box.grant("a", A, 20 * GIB, flags=OVERSUBSCRIBE)
    neighbour = box.python("start()\nsay(rc=[alloc(GIB)[0] for _ in range(9)]); wait()", hooked=False)
    neighbour.stdout.readline()
    got = box.run(
        MORE
        + """
start(); first = [alloc(GIB)[0] for _ in range(8)]
seen = [info(), total(), nvml()]
rest = alloc(info()[0])[0]
say(first=first, seen=seen, rest=rest, end=[info()[0], alloc(1)[0]])
"""
    ).last
    assert got["first"] == [0] * 8
    assert got["seen"] == [[12 * GIB, 20 * GIB], 20 * GIB, [20 * GIB, 12 * GIB, 8 * GIB]]
    assert got["rest"] == 0
    assert got["end"] == [0, 2]
    neighbour.communicate("\n", timeout=20)


def test_b152_a_single_process_beyond_the_card(box, card):
    card("24576MiB")
    code = (
        MORE
        + """
start(); free_at, rc, kinds = [], [], []
for size in [GIB]*23 + [784*MIB] + [GIB]*8:
    code, p = alloc(size); rc.append(code); free_at.append(info()[0])
    kind = c_ubyte(); call("cuPointerGetAttribute", byref(kind), 8, c_uint64(p)); kinds.append(kind.value)
say(rc=rc, free=free_at, total=total(), kinds=kinds)
wait()
"""
    )
    box.grant("a", A, 60000 * MIB, flags=OVERSUBSCRIBE)
    process = box.python(code)
    got = json.loads(process.stdout.readline())
    assert got["rc"] == [0] * 32
    assert got["total"] == 60000 * MIB
    steps = [a - b for a, b in zip(got["free"], got["free"][1:], strict=False)]
    assert steps == [GIB] * 22 + [784 * MIB] + [GIB] * 8
    assert got["kinds"][:23] == [0] * 23, "what fits is not managed"
    assert spilled(box) == sum(got["kinds"]) * GIB > 0
    process.communicate("\n", timeout=20)
    box.regrant("a", flags=0)
    got = box.run(code.replace("wait()\n", "")).last
    assert got["total"] == 24 * GIB
    assert got["free"][0] == 23 * GIB
    assert got["rc"].index(2) == 24


def test_b153_each_kind_spills_or_says_out_of_memory_and_is_counted(box, card):
    card("1GiB")
    box.grant("a", A, 2 * GIB, flags=OVERSUBSCRIBE)
    half = {
        "linear": "alloc(1536*MIB)",
        "pitched": "pitch(512, 3*MIB)",
        "managed": "managed(1536*MIB)",
        "async": "alloc_async(1536*MIB)",
        "pool": "alloc_pool(1536*MIB, pool())",
        "handle": "create(1536*MIB)",
        "array": "array(4096, 4096, 24)",
    }
    got = {}
    for kind, call in half.items():
        ends = {"handle": "release(p)", "array": "call('cuArrayDestroy', p)", "async": "free_async(p)"}
        end = ends.get(kind, "free(p)")
        line = f"start(); got = {call}; p = got[1]\nseen = used(); back = {end} if got[0] == 0 else 0\n"
        line += "say(rc=got[0], used=seen, back=back, after=used())"
        got[kind] = box.run(MORE + line).last
    for kind in ("linear", "pitched", "managed"):
        assert got[kind] == {"rc": 0, "used": 1536 * MIB, "back": 0, "after": 0}, kind
    for kind in ("async", "pool", "handle", "array"):
        assert got[kind]["rc"] == 2, kind
        assert got[kind]["after"] == 0, kind
    assert spilled(box) == 0
    assert refused(box) == {"async": 2, "handle": 1, "array": 1}


def test_refusals_are_counted_by_the_call(box):
    box.grant("a", A, GIB)
    box.run(
        MORE
        + """
start(); big = 2*GIB
alloc(big); alloc(big); managed(big); pitch(512, 4*MIB); alloc_async(big); create(big); array(4096, 4096, 64)
mipmap(32768, 32768, 2); g = graph(); alloc_node(g, big); launch(instantiate(g))
"""
    )
    assert refused(box) == {
        "linear": 2, "managed": 1, "pitched": 1, "async": 1, "handle": 1, "array": 1, "mipmap": 1, "graph": 1,
    }  # fmt: skip


def test_standalone_oversubscription_by_hamis_variable(free_box, card, tmp_path):
    card("1GiB")
    env = {"CUDA_DEVICE_MEMORY_LIMIT": "2g", "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(tmp_path / "c.cache")}
    code = "start()\nsay(total=total(), rc=[alloc(1536*MIB)[0], alloc(513*MIB)[0]])"
    got = free_box.run(code, env=env | {"CUDA_OVERSUBSCRIBE": "true"}).last
    assert got == {"total": 2 * GIB, "rc": [0, 2]}
    assert free_box.run(code, env=env).last == {"total": GIB, "rc": [2, 0]}


# ---- waiting for room ------------------------------------------------------------------------------------------

ASKED = """
import time
start(); say(x=1); wait(); began = time.monotonic(); rc = {call}[0]
say(rc=rc, took=time.monotonic() - began)
"""
WAITERS = ["alloc(512*MIB)", "pitch(512, MIB)", "create(512*MIB)", "alloc_async(512*MIB)"]
WAITERS += ["alloc_pool(512*MIB, pool())"]


def waiter(box, call: str, milliseconds: int | None):
    env = {} if milliseconds is None else {"ALIQUOT_MEMORY_WAIT_MS": str(milliseconds)}
    process = box.python(MORE + ASKED.format(call=call), env=env)
    assert json.loads(process.stdout.readline()) == {"x": 1}
    return process


def go(process) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def answer(process) -> dict:
    return json.loads(process.communicate(timeout=30)[0])


HOLDER = "start(); rc, p = alloc(768*MIB); say(rc=rc); wait(); free(p); say(x=1); wait()"


@pytest.fixture
def neighbours(box, card, tmp_path):
    """Two containers of 1 GiB each on a card of 1 GiB."""
    card("1GiB")
    (tmp_path / "other").mkdir()
    other = type(box)(tmp_path / "other", "libvgpu-strict.so", box.driver, box.config)
    for each in (box, other):
        each.grant("a", A, GIB)
    return box, other


@pytest.mark.parametrize("call", WAITERS)
def test_b154_an_allocation_waits_for_a_neighbour_on_a_full_card(neighbours, call):
    box, other = neighbours
    first = other.python(HOLDER)
    first.stdout.readline()
    patient = waiter(box, call, 20_000)
    go(patient)
    assert not select.select([patient.stdout], [], [], 0.4)[0], "it must wait"
    go(first)
    assert json.loads(first.stdout.readline()) == {"x": 1}, "a free is not held up by whoever waits"
    got = answer(patient)
    assert got["rc"] == 0
    assert 0.2 <= got["took"] < 10
    assert waits(box) == 1
    first.communicate("\n", timeout=20)


@pytest.mark.parametrize(("milliseconds", "least"), [(300, 0.3), (0, 0), (None, 0)])
def test_b154_the_wait_ends_when_it_was_to_end(neighbours, milliseconds, least):
    box, other = neighbours
    first = other.python(HOLDER)
    first.stdout.readline()
    patient = waiter(box, "alloc(512*MIB)", milliseconds)
    go(patient)
    got = answer(patient)
    assert got["rc"] == 2
    assert least <= got["took"] < least + 2
    assert waits(box) == (1 if least else 0)
    assert refused(box)["linear"] == 1
    first.communicate("\n\n", timeout=20)


@pytest.mark.parametrize("call", ["alloc(512*MIB)", "array(4096, 4096, 8)", "alloc_async(512*MIB)"])
def test_b154_an_allocation_waits_for_another_process_of_its_share(box, call):
    box.grant("a", A, GIB)
    first = box.python(HOLDER)
    first.stdout.readline()
    patient = waiter(box, call, 20_000)
    go(patient)
    assert not select.select([patient.stdout], [], [], 0.4)[0], "it must wait"
    first.kill()
    first.communicate()
    assert answer(patient)["rc"] == 0


def test_b154_nobody_waits_for_itself_or_for_what_can_never_be(box):
    box.grant("a", A, GIB)
    code = "import time\nstart(); alloc(768*MIB); began = time.monotonic()\n"
    code += "say(rc=[alloc(512*MIB)[0], alloc(2*GIB)[0], create(512*MIB)[0]], took=time.monotonic() - began)"
    got = box.run(MORE + code, env={"ALIQUOT_MEMORY_WAIT_MS": "60000"}).last
    assert got["rc"] == [2, 2, 2]
    assert got["took"] < 2
    assert waits(box) == 0


def waits(box) -> int:
    return struct.unpack_from("<Q", box.region("a").read_bytes(), 32 + 8 * 9)[0]
