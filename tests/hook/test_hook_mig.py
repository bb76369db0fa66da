# SPDX-License-Identifier: Apache-2.0
"""MIG: a grant of one instance, named by its own UUID, whichever way a program names it."""

from __future__ import annotations

import json
import os

import pytest

CARD = "GPU-aaaaaaaa-0000-4000-8000-00000000000a"
GIB, MIB = 1 << 30, 1 << 20
pytestmark = [pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make instances"), pytest.mark.every_driver]

CUT = """
from ctypes import *
lib = CDLL("libnvidia-ml.so.1"); card, made = c_void_p(), []
def ok(name, *arguments): assert getattr(lib, name)(*arguments) == 0, name
ok("nvmlInit_v2"); ok("nvmlDeviceGetHandleByIndex_v2", 0, byref(card))
profile = (c_uint * 32)(); ok("nvmlDeviceGetGpuInstanceProfileInfo", card, 0, profile)  # one slice; its id first
for i in range(2):
    instance, part, device = c_void_p(), c_void_p(), c_void_p()
    ok("nvmlDeviceCreateGpuInstance", card, profile[0], byref(instance))
    ok("nvmlGpuInstanceCreateComputeInstance", instance, 0, byref(part))
    ok("nvmlDeviceGetMigDeviceHandleByIndex", card, i, byref(device))
    uuid, gi, ci = create_string_buffer(96), c_uint(), c_uint()
    ok("nvmlDeviceGetUUID", device, uuid, 96); ok("nvmlDeviceGetGpuInstanceId", device, byref(gi))
    ok("nvmlDeviceGetComputeInstanceId", device, byref(ci)); made.append([uuid.value.decode(), gi.value, ci.value])
say(made=made)
"""
# NVML by hand: the MIG devices of card 0 in their order, and the card itself.
NVML_VIEW = """
from memory import *
lib = CDLL("libnvidia-ml.so.1"); assert lib.nvmlInit_v2() == 0
card = c_void_p(); assert lib.nvmlDeviceGetHandleByIndex_v2(0, byref(card)) == 0
mig = [c_void_p(), c_void_p()]
for i in range(2): assert lib.nvmlDeviceGetMigDeviceHandleByIndex(card, i, byref(mig[i])) == 0
def memory(d):
    m = NvmlMemory(); rc = lib.nvmlDeviceGetMemoryInfo(d, byref(m)); return [rc, m.total, m.used]
def text(f, d):
    b = create_string_buffer(96); getattr(lib, f)(d, b, 96); return b.value.decode()
"""


@pytest.fixture
def mig(box, cards):
    """A card cut in two; the box, and (uuid, gi, ci) of both instances."""
    row = {"profile": "A100-40", "uuid": CARD, "mig_enabled": True, "context_bytes": 0}
    cards.write_text(json.dumps({"version": 1, "cards": [row]}))
    return box, box.run(CUT, hooked=False).last["made"]


LIMITED = "from memory import *\nstart()\nsay(total=total(), rc=[alloc(600*MIB)[0], alloc(600*MIB)[0]], info=info())"


def test_a_granted_instance_is_limited_however_it_is_named(mig):
    box, ((uuid, gi, ci), _) = mig
    box.grant("m", uuid, GIB)
    for name in (uuid, f"MIG-{CARD}/{gi}/{ci}", "0"):
        got = box.run(LIMITED, env={"CUDA_VISIBLE_DEVICES": name, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).last
        assert got == {"total": GIB, "rc": [0, 2], "info": [424 * MIB, GIB]}, name
    assert box.run(LIMITED).last["rc"] == [0, 2], "and where it is not named at all"
    bare = box.run(LIMITED, env={"CUDA_VISIBLE_DEVICES": uuid}, hooked=False).last
    assert bare["rc"] == [0, 0]


def test_the_other_instance_and_the_card_are_not_granted_with_it(mig):
    box, ((uuid, *_), (other, *_)) = mig
    box.grant("m", uuid, GIB)
    result = box.run("say(rc=init())", env={"CUDA_VISIBLE_DEVICES": other})
    assert result.last == {"rc": 800}
    assert "no visible device is among the grants" in result.err
    assert box.run("say(rc=init())", env={"CUDA_VISIBLE_DEVICES": uuid}).last == {"rc": 0}
    box.root.joinpath("grants", "m").unlink()
    box.grant("card", CARD, GIB)
    assert box.run("say(rc=init())", env={"CUDA_VISIBLE_DEVICES": uuid}).last == {"rc": 800}, "nor it with the card"


def test_instances_of_one_card_have_accounts_of_their_own(mig):
    box, ((one, *_), (two, *_)) = mig
    box.grant("one", one, GIB)
    box.grant("two", two, 2 * GIB)
    hold = "start()\nsay(total=total(), rc=alloc(800*MIB)[0]); wait()"
    held = [box.python(hold, env={"CUDA_VISIBLE_DEVICES": u}) for u in (one, two)]
    assert [json.loads(p.stdout.readline()) for p in held] == [{"total": n * GIB, "rc": 0} for n in (1, 2)]
    assert [box.used("one"), box.used("two")] == [800 * MIB, 800 * MIB]
    seen = box.run(NVML_VIEW + "say(mig=[memory(m) for m in mig], card=memory(card)[1] > 20*GIB)").last
    assert seen == {"mig": [[0, GIB, 800 * MIB], [0, 2 * GIB, 800 * MIB]], "card": True}
    for process in held:
        process.communicate("\n", timeout=20)


def test_handles_names_and_places_are_unchanged(mig):
    box, ((uuid, *_), _) = mig
    box.grant("m", uuid, GIB)
    code = (
        NVML_VIEW
        + """
def number(f, d):
    out = c_uint(); rc = getattr(lib, f)(d, byref(out)); return [rc, out.value]
def parent(d):
    out = c_void_p(); rc = lib.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(d, byref(out))
    return [rc, text("nvmlDeviceGetUUID", out)]
say(a=[[text("nvmlDeviceGetUUID", d), text("nvmlDeviceGetName", d), number("nvmlDeviceIsMigDeviceHandle", d),
        number("nvmlDeviceGetGpuInstanceId", d), number("nvmlDeviceGetComputeInstanceId", d),
        number("nvmlDeviceGetMaxMigDeviceCount", d), parent(d)] for d in (*mig, card)])
"""
    )
    assert box.run(code).last == box.run(code, hooked=False).last


def test_process_lists_of_an_instance_are_the_containers_own(mig):
    box, ((one, *_), (two, *_)) = mig
    box.grant("one", one, GIB)
    hold = "start()\nsay(rc=alloc(100*MIB)[0]); wait()"
    own = box.python(hold, env={"CUDA_VISIBLE_DEVICES": one})
    strangers = [box.python(hold, env={"CUDA_VISIBLE_DEVICES": u}, hooked=False) for u in (one, two)]
    for process in (own, *strangers):
        assert json.loads(process.stdout.readline()) == {"rc": 0}
    look = (
        NVML_VIEW
        + """
import nvml_view
def pids(d): return sorted(e[0] for e in nvml_view.ask("nvmlDeviceGetComputeRunningProcesses", d, 64, nvml_view.V1)[2])
say(a=[pids(d) for d in (*mig, card)])
"""
    )
    seen = box.run(look).last["a"]
    assert seen[0] == [own.pid]
    assert seen[1] == []
    assert set(seen[2]) <= {own.pid}
    assert {p.pid for p in strangers} & {p for row in box.run(look, hooked=False).last["a"] for p in row}
    for process in (own, *strangers):
        process.communicate("\n", timeout=20)


def test_an_instance_named_as_old_drivers_did_is_refused(mig):
    box, ((_, gi, ci), _) = mig
    box.grant("m", f"MIG-{CARD}/{gi}/{ci}", GIB)
    result = box.run("say(rc=init())")
    assert result.last == {"rc": 800}
    assert "names no card" in result.err


def test_the_compute_limit_of_an_instance(mig):
    box, ((uuid, *_), _) = mig
    box.grant("m", uuid, GIB, core_percent=25, core_policy=1)
    code = "from limited import *\nstart()\nf = function('spin_us_1000')\nsay(a=busy(lambda: launch(f), 1000, 1.0))"
    assert 10 < box.run(code, env={"CUDA_VISIBLE_DEVICES": uuid}).last["a"] <= 25 + 3 + 1 + 3
