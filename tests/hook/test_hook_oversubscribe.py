# SPDX-License-Identifier: Apache-2.0
"""Shares beyond the card: what moves to managed memory, what is refused, and that both are told."""

from __future__ import annotations

import json
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
