# SPDX-License-Identifier: Apache-2.0
"""What else NVML tells of processes (accounting mode, encoder and capture sessions): a container's own only."""

from __future__ import annotations

import json
import os

import pytest

CARD_A = "GPU-aaaaaaaa-0000-4000-8000-00000000000a"
MIB = 1 << 20
HOLD = "start()\nsay(rc=alloc(20*MIB)[0])\nwait()"
LOOK = f"""
from nvml_view import *
d = device({CARD_A!r})
def pids(room=64, into=True):
    array, count = (c.c_uint * max(1, room))(*[7] * max(1, room)), c.c_uint(room)
    code = nvml.nvmlDeviceGetAccountingPids(d, c.byref(count), array if into else None)
    return code, count.value, sorted(array[: count.value]) if code == 0 and into else list(array[:2])
class Stats(c.Structure):
    _fields_ = [("gpu", c.c_uint), ("memory", c.c_uint), ("most", c.c_ulonglong), ("rest", c.c_ubyte * 64)]
def stats(pid):
    out = Stats(); code = nvml.nvmlDeviceGetAccountingStats(d, c.c_uint(pid), c.byref(out)); return code, out.most
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to switch the mode on")


def hold(box, **more):
    process = box.python(HOLD, **more)
    assert json.loads(process.stdout.readline()) == {"rc": 0}
    return process


@pytest.fixture
def noted(box):
    """Two processes of the container and a stranger, all noted by accounting mode."""
    box.grant("g", CARD_A, 1024 * MIB)
    on = "assert nvml.nvmlDeviceSetAccountingMode(d, 1) == 0"
    box.run(LOOK + on, hooked=False)
    held = [hold(box), hold(box), hold(box, hooked=False)]
    yield box, *(p.pid for p in held)
    for process in held:
        process.communicate("\n", timeout=30)


def test_accounting_names_own_processes_only(noted):
    box, first, second, stranger = noted
    assert box.run(LOOK + "say(a=pids())", hooked=False).last["a"][2] == sorted([first, second, stranger])
    assert box.run(LOOK + "say(a=pids())").last["a"] == [0, 2, sorted([first, second])]


def test_accounting_keeps_the_protocol_of_two_calls(noted):
    box, *_ = noted
    code = "say(none=pids(0), asked=pids(0, False), one=pids(1), missing=pids(3, False))"
    got = box.run(LOOK + code).last
    assert got["none"][:2] == got["asked"][:2] == [7, 2]
    assert got["one"][:2] == [7, 2]
    assert got["one"][2] == [7], "nothing is written where it does not fit"
    bare = box.run(LOOK + code + "\nsay(null=nvml.nvmlDeviceGetAccountingPids(d, None, None))", hooked=False)
    assert got["missing"][0] == bare.lines[0]["missing"][0]
    hooked = box.run(LOOK + "say(null=nvml.nvmlDeviceGetAccountingPids(d, None, None))").last
    assert hooked == bare.last


def test_accounting_figures_of_strangers_are_not_found(noted):
    box, first, _, stranger = noted
    got = box.run(LOOK + f"say(own=stats({first}), other=stats({stranger}), nobody=stats(1))").last
    assert got["own"][0] == 0
    assert got["own"][1] >= 20 * MIB
    assert got["other"] == got["nobody"] == [6, 0]
    null = f"say(a=nvml.nvmlDeviceGetAccountingStats(d, c.c_uint({first}), None))"
    assert box.run(LOOK + null).last == box.run(LOOK + null, hooked=False).last


def test_accounting_off_is_the_drivers_to_say(box):
    box.grant("g", CARD_A, 1024 * MIB)
    code = "say(pids=pids(), stats=stats(1))"
    assert box.run(LOOK + code).last == box.run(LOOK + code, hooked=False).last


SESSIONS = """
#include <string.h>
typedef struct { unsigned a[8]; } encoder;
typedef struct { unsigned a[12]; } capture;
static int list(unsigned *count, void *into, const void *from, unsigned size)
{
	unsigned room = *count;
	*count = 3;
	if (room == 0) return 0;
	if (room < 3) return 7;
	memcpy(into, from, 3 * size);
	return 0;
}
static unsigned pid;
void sessions_of(unsigned p) { pid = p; }
int nvmlDeviceGetEncoderSessions(void *d, unsigned *count, encoder *into)
{
	encoder e[3] = {{{1, 6000}}, {{2, pid, 0, 1, 1920, 1080, 30, 9}}, {{3, 6001}}};
	return (void)d, list(count, into, e, sizeof(*e));
}
int nvmlDeviceGetFBCSessions(void *d, unsigned *count, capture *into)
{
	capture e[3] = {{{1, 6000}}, {{2, 6001}}, {{3, pid, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9}}};
	return (void)d, list(count, into, e, sizeof(*e));
}
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetUUID(void *d, char *text, unsigned length)
{
	return (void)d, length < 41 ? 7 : (strcpy(text, "GPU-aaaaaaaa-0000-4000-8000-00000000000a"), 0);
}
"""


def test_encoder_and_capture_sessions_of_others_are_left_out(box, compile_c):
    """Over a small NVML that has sessions of three processes, one of them ours."""
    library = compile_c(SESSIONS, "-shared", "-fPIC", "-w", "-Wl,-soname,libnvidia-ml.so.1", name="libnvidia-ml.so.1")
    box.grant("g", CARD_A, 1024 * MIB)
    process = hold(box)
    code = f"""
import ctypes as c
nvml = c.CDLL({str(library)!r}); nvml.sessions_of({process.pid})
def ask(name, words, room):
    array, count = (c.c_uint * (words * 4))(*[7] * words * 4), c.c_uint(room)
    rc = getattr(nvml, name)(c.c_void_p(1), c.byref(count), array)
    return rc, count.value, list(array[:words + 1])
say(enc=[ask("nvmlDeviceGetEncoderSessions", 8, n) for n in (0, 3)],
    fbc=[ask("nvmlDeviceGetFBCSessions", 12, n) for n in (0, 3)])
"""
    got = box.run(code, env={"LD_LIBRARY_PATH": f"{library.parent}:{box.driver}"}).last
    process.communicate("\n", timeout=20)
    own = process.pid
    assert got["enc"] == [[0, 1, [7] * 9], [0, 1, [2, own, 0, 1, 1920, 1080, 30, 9, 7]]]
    assert got["fbc"] == [[0, 1, [7] * 13], [0, 1, [3, own, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 7]]]
