# SPDX-License-Identifier: Apache-2.0
"""Graphs with memory of their own, captures, and queries that fail at the wrong moment."""

from __future__ import annotations

import json

import pytest

A = "GPU-aaaaaaaa-0000-4000-8000-00000000000a"
GIB, MIB = 1 << 30, 1 << 20
MORE = "from memory import *\n"


@pytest.mark.every_driver
def test_b144_graph_memory_is_part_of_the_use(run):
    got = run(
        """
start(); seen = []
execs = []
for n in range(5):
    g = graph(); node, p = alloc_node(g, 64*MIB); execs.append((instantiate(g), p))
before = used()
rc = [launch(e) for e, _ in execs]; sync()
full = used()
freed = [free_async(p) for _, p in execs[:4]]; sync(); trim_graphs()
say(before=before, rc=rc, full=full, freed=freed, after=used())
""",
        memory=256 * MIB,
    )
    assert got == {"before": 0, "rc": [0, 0, 0, 0, 2], "full": 256 * MIB, "freed": [0] * 4, "after": 0}


def test_b144_a_graph_launched_again_and_again(run):
    got = run(
        """
start(); g = graph(); node, p = alloc_node(g, 200*MIB); e = instantiate(g); rc = []
for _ in range(8):
    rc.append(launch(e)); rc.append(free(p)); sync()
say(rc=sorted(set(rc)), used=used() <= 200*MIB, trim=[trim_graphs(), used()])
""",
        memory=256 * MIB,
    )
    assert got == {"rc": [0], "used": True, "trim": [0, 0]}


def test_graph_that_frees_by_itself_and_one_that_frees_at_launch(run):
    got = run(
        """
start(); g = graph(); node, p = alloc_node(g, 200*MIB); free_node(g, p, (node,)); own = instantiate(g)
rc = [launch(own) for _ in range(5)]; sync(); trim_graphs(); middle = used()
g = graph(); node, p = alloc_node(g, 200*MIB); auto = instantiate(g, 1)
rc += [launch(auto) for _ in range(5)]; sync()
say(rc=rc, middle=middle, end=used())
""",
        memory=256 * MIB,
    )
    assert got == {"rc": [0] * 10, "middle": 0, "end": 200 * MIB}


def test_upload_and_child_graphs_take_memory_too(run):
    got = run(
        """
start(); child = graph(); node, p = alloc_node(child, 100*MIB)
e = instantiate(child); rc = [upload(e)]; one = used()
big = graph(); alloc_node(big, 300*MIB); e2 = instantiate(big); rc += [upload(e2), launch(e2)]
say(rc=rc, one=one <= 128*MIB, used=used() <= 256*MIB)
""",
        memory=256 * MIB,
    )
    assert got["rc"][1:] == [2, 2]
    assert got["one"]
    assert got["used"]


@pytest.mark.every_driver
def test_b199_differences_are_the_same_in_both_views(run):
    got = run(
        """
start(); s = stream(); seen = []
def look(): seen.append([info()[0], nvml()[1], info()[1]])
look()
assert call("cuStreamBeginCapture_v2", s, 2) == 0
rc, p = alloc_async(600*MIB, s.value); g = c_void_p()
assert call("cuStreamEndCapture", s, byref(g)) == 0
look(); e = instantiate(g); look(); launched = launch(e); sync(); look()
say(rc=rc, launched=launched, seen=seen)
""",
        memory=8 * GIB,
    )
    free = [row[0] for row in got["seen"]]
    assert got["rc"] == got["launched"] == 0
    assert all(row[0] == row[1] and row[2] == 8 * GIB for row in got["seen"])
    assert free[0] == free[1] == 8 * GIB
    assert free[0] - free[3] == 600 * MIB


@pytest.mark.every_driver
def test_b195_nothing_of_ours_is_called_in_a_capture_that_must_not_be(box, cards):
    """The driver fails every query and synchronisation while a capture is active, and so breaks the capture."""
    cards.with_name("config.json.control").write_text(json.dumps({"forbid_in_capture": True}))
    box.grant("a", A, GIB)
    got = box.run(
        MORE
        + """
start(); s = stream()
module, f = c_void_p(), c_void_p()
warm = alloc_async(64*MIB); free_async(warm[1]); sync()
assert call("cuStreamBeginCapture_v2", s, 0) == 0
rc = []
one = alloc_async(100*MIB, s.value); two = alloc_async(100*MIB, s.value)
rc += [one[0], two[0]]
rc += [free_async(one[1], s.value)]
g = c_void_p(); end = call("cuStreamEndCapture", s, byref(g))
e = instantiate(g); rc += [launch(e), sync()]
big = graph(); alloc_node(big, 2*GIB)
say(rc=rc, end=end, over=launch(instantiate(big)))
"""
    ).last
    assert got == {"rc": [0] * 5, "end": 0, "over": 2}


@pytest.mark.parametrize("function", ["cuMemPoolGetAttribute", "cuDeviceGetMemPool", "cuStreamIsCapturing"])
def test_b134_a_query_that_fails_after_an_allocation_leaks_nothing(box, cards, function):
    control = {"faults": [{"function": function, "code": 999, "after": 2}]}
    box.grant("a", A, GIB)
    got = box.run(
        MORE
        + f"""
start(); import resource; pool_now = default_pool()
for n in range(200):
    if n == 3:
        open(os.environ["FAKEGPU_CONFIG"] + ".control", "w").write({json.dumps(json.dumps(control))})
    rc, p = alloc_async(10*MIB)
    if rc == 0: free_async(p)
    sync()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for n in range(2000):
    rc, p = alloc_async(10*MIB)
    if rc == 0: free_async(p)
    sync()
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
os.unlink(os.environ["FAKEGPU_CONFIG"] + ".control"); time = __import__("time"); end = time.monotonic() + 5
while call("cuMemPoolGetAttribute", c_void_p(pool_now), 5, byref(c_uint64())) and time.monotonic() < end: info()
rc, p = alloc_async(MIB); free_async(p); sync(); trim(default_pool())
say(rc=rc, grown=grown, used=used())
"""
    ).last
    assert got["rc"] == 0
    assert got["grown"] < 1024
    assert got["used"] == 0


def test_b198_a_driver_that_has_ended_gets_no_line_from_us(box, cards):
    box.grant("a", A, GIB)
    control = {"faults": [{"function": "cu*", "code": 4}]}
    result = box.run(
        MORE
        + f"""
start(); rc, p = alloc(MIB); time = __import__("time")
open(os.environ["FAKEGPU_CONFIG"] + ".control", "w").write({json.dumps(json.dumps(control))})
codes = set(); end = time.monotonic() + 5
while (got := alloc(MIB))[0] != 4 and time.monotonic() < end: free(got[1])
for _ in range(2500):
    f, t = c_size_t(), c_size_t()
    codes |= {{alloc(MIB)[0], free(p), call("cuMemGetInfo_v2", byref(f), byref(t)), call("cuInit", 0)}}
say(codes=sorted(codes))
"""
    )
    assert result.last == {"codes": [4]}
    assert result.err == ""


def test_a_graph_with_memory_on_two_cards(box):
    b = "GPU-bbbbbbbb-0000-4000-8000-00000000000b"
    box.grant("a", A, 256 * MIB)
    box.grant("b", b, 256 * MIB)
    got = box.run(
        MORE
        + """
context(0) if init() else None; here = context(0)
g = graph(); one, p = alloc_node(g, 100*MIB, 0); two, q = alloc_node(g, 200*MIB, 1); e = instantiate(g)
rc = [launch(e)]; sync(); first = [nvml(0)[2], nvml(1)[2]]
big = graph(); alloc_node(big, 50*MIB, 0); alloc_node(big, 100*MIB, 1); rc += [launch(instantiate(big))]
second = [nvml(0)[2], nvml(1)[2]]
free_async(p); free_async(q); sync(); trim_graphs(0); trim_graphs(1)
say(rc=rc, first=first, second=second, end=[nvml(0)[2], nvml(1)[2]])
"""
    ).last
    assert got == {"rc": [0, 2], "first": [100 * MIB, 200 * MIB], "second": [100 * MIB, 200 * MIB], "end": [0, 0]}
