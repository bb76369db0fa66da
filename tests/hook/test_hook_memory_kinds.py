# SPDX-License-Identifier: Apache-2.0
"""Every kind of memory: managed, pitched, stream-ordered, pools, handles and maps, arrays (hook.md 5.1, 13 to 25)."""

from __future__ import annotations

import json
import sys

import pytest

A = "GPU-aaaaaaaa-0000-4000-8000-00000000000a"
B = "GPU-bbbbbbbb-0000-4000-8000-00000000000b"
GIB, MIB = 1 << 30, 1 << 20

MORE = "from memory import *\n"
pytestmark = pytest.mark.every_driver


def test_behaviour_13_managed_is_counted_and_stays_managed(run):
    got = run("""
start(); rc, p = managed(600*MIB)
is_managed = c_int(0)
call("cuPointerGetAttribute", byref(is_managed), 8, c_uint64(p))
say(rc=rc, used=used(), more=managed(500*MIB)[0], managed=is_managed.value, free=free(p), after=used())
""")
    assert got == {"rc": 0, "used": 600 * MIB, "more": 2, "managed": 1, "free": 0, "after": 0}


def test_b145_pitch_is_the_real_one(run):
    got = run("""
start(); rc = [pitch(1, 4*MIB)[0]]
fits, p, step = pitch(1, MIB)
say(rc=rc, fits=fits, pitch=step, used=used(), freed=free(p), after=used(),
    wide=pitch(2**63, 4)[0], tall=pitch(512, 2**60)[0], zero=pitch(0, 4)[0], end=used())
""")
    assert got == {
        "rc": [2],
        "fits": 0,
        "pitch": 512,
        "used": 512 * MIB,
        "freed": 0,
        "after": 0,
        "wide": 2,
        "tall": 2,
        "zero": 1,
        "end": 0,
    }


@pytest.mark.parametrize("align", [256, 4096])
def test_b145_pitch_of_a_driver_that_aligns_otherwise(box, cards, align):
    config = json.loads(cards.read_text()) | {"pitch_align": align}
    cards.write_text(json.dumps(config))
    box.grant("a", A, GIB)
    got = box.run(
        MORE
        + """
start(); rc, p, step = pitch(1, 4096)
one = used()
full = pitch(1, 2**30 // step - 4096)[0]
say(rc=rc, step=step, one=one, used=used(), full=full, over=pitch(1, 1)[0], free=free(p), after=used())
"""
    ).last
    assert got == {
        "rc": 0,
        "step": align,
        "one": 4096 * align,
        "used": GIB,
        "full": 0,
        "over": 2,
        "free": 0,
        "after": GIB - 4096 * align,
    }


def test_behaviours_14_and_18_stream_ordered(run):
    got = run("""
start(); rc, p = alloc_async(512*MIB)
seen = used()
over = alloc_async(600*MIB)[0]
say(rc=rc, used=seen, over=over, free=free_async(p), sync=sync(), after=used())
""")
    assert got == {"rc": 0, "used": 512 * MIB, "over": 2, "free": 0, "sync": 0, "after": 0}


def test_behaviours_15_and_19_and_b133_explicit_pool(run):
    got = run(
        """
start(); own = pool()
over = alloc_pool(GIB, own)[0]
after_over = used()
rc, p = alloc_pool(256*MIB, own)
seen = used()
say(over=over, after_over=after_over, rc=rc, used=seen, free=free_async(p), sync=sync(), after=used(),
    again=alloc_pool(512*MIB, own)[0])
""",
        memory=512 * MIB,
    )
    assert got == {"over": 2, "after_over": 0, "rc": 0, "used": 256 * MIB, "free": 0, "sync": 0, "after": 0, "again": 0}


def test_b135_async_again_and_again(run):
    got = run(
        """
start(); bad = 0
for _ in range(1000):
    rc, p = alloc_async(GIB); bad += rc != 0
    free_async(p); sync()
held = used(); trim(default_pool())
say(bad=bad, held=held, after=used())
""",
        memory=2 * GIB,
    )
    assert got["bad"] == 0
    assert got["held"] <= GIB
    assert got["after"] == 0


def test_pool_that_keeps_its_memory_is_charged_for_it_and_serves_from_it(run):
    got = run("""
start(); own = pool(); threshold(own, 2**63)
rc, p = alloc_pool(768*MIB, own); free_async(p); sync()
kept = used()
again = alloc_pool(512*MIB, own)
second = alloc_pool(256*MIB, own)
full = alloc_pool(512*MIB, own)[0]
free_async(again[1]); free_async(second[1]); sync()
plain = alloc(1000*MIB)[0]
say(rc=rc, kept=kept, again=again[0], second=second[0], full=full, plain=plain, used=used())
""")
    assert got == {"rc": 0, "kept": 768 * MIB, "again": 0, "second": 0, "full": 2, "plain": 0, "used": 1000 * MIB}


def test_destroyed_pool_lives_until_its_memory_is_free(run):
    got = run("""
start(); own = pool(); rc, p = alloc_pool(512*MIB, own)
destroyed = call("cuMemPoolDestroy", c_void_p(own)); held = used()
over = alloc(600*MIB)[0]
freed = free_async(p); sync(); after = used()
say(destroyed=destroyed, held=held, over=over, freed=freed, after=after,
    twice=call("cuMemPoolDestroy", c_void_p(own)) != 0)
""")
    assert got == {"destroyed": 0, "held": 512 * MIB, "over": 2, "freed": 0, "after": 0, "twice": True}


def test_behaviour_21_and_b131_free_by_any_legal_call(run):
    got = run("""
start()
rc, p = alloc_async(512*MIB); one = [free(p), sync(), used()]
rc, p = alloc(512*MIB); two = [free_async(p), sync(), used()]
rc, p = managed(512*MIB); three = [free(p), used()]
here = c_void_p(); call("cuCtxGetCurrent", byref(here))
rc, p = alloc(512*MIB); four = [thread(lambda: [call("cuCtxSetCurrent", here), free(p)])[1], used()]
say(one=one, two=two, three=three, four=four)
""")
    assert got == {"one": [0, 0, 0], "two": [0, 0, 0], "three": [0, 0], "four": [0, 0]}


FOREIGN = """
class Handle(Structure):
    _fields_ = [("type", c_int), ("gap", c_int), ("fd", c_int), ("pad", c_ubyte * 12), ("size", c_ulonglong),
                ("flags", c_uint), ("rest", c_uint * 16)]
class Buffer(Structure):
    _fields_ = [("offset", c_ulonglong), ("size", c_ulonglong), ("flags", c_uint), ("rest", c_uint * 16)]
if len(sys.argv) > 1:  # the other process: what it imports was charged where it was made
    start(); fd, out, at = int(sys.argv[1]), c_uint64(), reserve(64*MIB); before = used()
    rc = [call("cuMemImportFromShareableHandle", byref(out), c_void_p(fd), 1), mapped(at, 64*MIB, out.value)]
    say(rc=rc, wrong=free(at), more=used() - before, end=[unmap(at, 64*MIB), release(out.value)], after=used() - before)
    sys.exit()
import subprocess, tempfile
start()
extern, address, plain = c_void_p(), c_uint64(), tempfile.TemporaryFile(); plain.truncate(MIB)
assert call("cuImportExternalMemory", byref(extern), byref(Handle(1, fd=os.dup(plain.fileno()), size=MIB))) == 0
assert call("cuExternalMemoryGetMappedBuffer", byref(address), extern, byref(Buffer(0, MIB))) == 0
held = used(); first = free(address.value)
say(held=held, first=first, second=free(address.value), after=used(), destroy=call("cuDestroyExternalMemory", extern))
prop = Prop(1, 1, Location(1, 0)); handle, fd = c_uint64(), c_int()
assert call("cuMemCreate", byref(handle), c_size_t(64*MIB), byref(prop), c_ulonglong(0)) == 0
assert call("cuMemExportToShareableHandle", byref(fd), handle, 1, c_ulonglong(0)) == 0
os.set_inheritable(fd.value, True)
subprocess.run([sys.executable, sys.argv[0], str(fd.value)], check=True, close_fds=False)
say(mine=used(), release=release(handle.value), end=used())
"""


def test_b131_pointers_that_were_charged_elsewhere_are_the_drivers_to_free(box, tmp_path):
    """External memory, and a handle of another process: the driver is called once, and its word is passed on."""
    box.grant("a", A, GIB)
    script = tmp_path / "foreign.py"
    script.write_text(MORE + FOREIGN)
    log = tmp_path / "calls"
    hooked = box.run([sys.executable, str(script)], env={"FAKEGPU_LOG": str(log)}).lines
    freed = [line for line in log.read_text().splitlines() if json.loads(line)["f"] == "cuMemFree_v2"]
    bare = box.run([sys.executable, str(script)], hooked=False).lines
    assert len(freed) == 3
    codes = [[hooked[0][k] for k in ("first", "second", "destroy")], [hooked[1][k] for k in ("rc", "wrong", "end")]]
    assert codes == [[bare[0][k] for k in ("first", "second", "destroy")], [bare[1][k] for k in ("rc", "wrong", "end")]]
    assert hooked[1]["rc"] == [0, 0]
    assert [hooked[0]["held"], hooked[0]["after"], hooked[1]["more"], hooked[1]["after"]] == [0, 0, 0, 0]
    assert hooked[2] == {"mine": 64 * MIB, "release": 0, "end": 0}


def test_behaviour_22_stray_pointers_get_the_drivers_own_error(box):
    box.grant("a", A, GIB)
    code = (
        MORE
        + """
start(); rc, p = alloc(MIB)
say(rc=[free(0), free(12345), free(p + 512), free_async(0), free_async(99), free(p), free(p), release(5),
        unmap(4096, 4096), call("cuArrayDestroy", c_void_p(0))])
"""
    )
    assert box.run(code).last == box.run(code, hooked=False).last
    assert box.used("a") == 0


def test_behaviour_16_and_b138_handles_and_maps(run):
    got = run("""
start(); size = 768*MIB
rc, h = create(size); one = used()
at = reserve(2*size); m = [mapped(at, size, h), mapped(at + size, size, h)]; two = used()
r = release(h); three = used()
u = [unmap(at, size), used(), unmap(at + size, size), used()]
again, h2 = create(size); over = create(size)[0]
say(rc=rc, one=one, m=m, two=two, r=r, three=three, u=u, again=again, over=over, used=used())
""")
    size = 768 * MIB
    assert got == {
        "rc": 0,
        "one": size,
        "m": [0, 0],
        "two": size,
        "r": 0,
        "three": size,
        "u": [0, size, 0, 0],
        "again": 0,
        "over": 2,
        "used": size,
    }


def test_one_unmap_for_several_maps_and_a_handle_taken_back(run):
    got = run("""
start(); size = 64*MIB; at = reserve(4*size)
handles = [create(size)[1] for _ in range(4)]
for i, h in enumerate(handles): mapped(at + i*size, size, h); release(h)
full = used()
back = c_uint64(); rc = call("cuMemRetainAllocationHandle", byref(back), c_void_p(at + size + 4096))
u = unmap(at, 4*size); kept = used()
say(full=full, rc=rc, u=u, kept=kept, r=release(back.value), after=used())
""")
    assert got == {"full": 256 * MIB, "rc": 0, "u": 0, "kept": 64 * MIB, "r": 0, "after": 0}


def test_behaviour_23_create_map_release_in_a_loop_cannot_pass(run):
    got = run("""
start(); size = 256*MIB; at = reserve(16*size); n = 0
while n < 16:
    rc, h = create(size)
    if rc: break
    mapped(at + n*size, size, h); release(h); n += 1
say(n=n, rc=rc)
""")
    assert got == {"n": 4, "rc": 2}


def test_b136_host_location_and_other_devices(box):
    box.grant("a", A, GIB)
    box.grant("b", B, GIB)
    code = (
        MORE
        + """
start()
host = [create(GIB, 0, 2)[0], create(GIB, 0, 3)[0], nvml(0)[2], nvml(1)[2]]
other = [create(512*MIB, 1)[0], nvml(0)[2], nvml(1)[2]]
say(host=host, other=other, none=create(2*MIB, 99)[0], negative=create(2*MIB, -1)[0])
"""
    )
    got = box.run(code).last
    bare = box.run(code, hooked=False).last
    assert got["host"][:2] == bare["host"][:2]
    assert got["host"][2:] == [0, 0]
    assert got["other"] == [0, 0, 512 * MIB]
    assert [got["none"], got["negative"]] == [bare["none"], bare["negative"]]


def test_behaviour_24_and_b137_thread_without_a_context(box):
    box.grant("a", A, GIB)
    code = (
        MORE
        + """
start()
def bare():
    rc, h = create(2*MIB)
    f, t = c_size_t(), c_size_t()
    return [rc, alloc(MIB)[0], call("cuMemGetInfo_v2", byref(f), byref(t)), free(4096), managed(MIB)[0],
            array2d(8, 8)[0]]
say(got=thread(bare), used=nvml()[2])
"""
    )
    got, bare = box.run(code).last, box.run(code, hooked=False).last
    assert got["got"] == bare["got"]
    assert got["got"][0] == 0
    assert got["used"] == 2 * MIB


def test_behaviour_25_threads_create_and_release_handles(run):
    got = run("""
start(); bad = []
def work():
    for _ in range(2000):
        rc, h = create(2*MIB)
        if rc or release(h): bad.append(rc)
threads = [threading.Thread(target=work) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
say(bad=len(bad), used=used())
""")
    assert got == {"bad": 0, "used": 0}


def test_behaviours_17_and_20_arrays(run):
    got = run("""
start()
rc, a = array2d(8192, 8192); one = used()
over = [array2d(16384, 16384)[0], array(4096, 4096, 32)[0], mipmap(16384, 16384, 5)[0]]
d = [call("cuArrayDestroy", a), used()]
rc3, b = array(1024, 1024, 64); two = used(); call("cuArrayDestroy", b)
rcm, m = mipmap(8192, 8192, 14); three = used()
d2 = [call("cuMipmappedArrayDestroy", m), used()]
say(rc=[rc, rc3, rcm], one=one, over=over, d=d, two=two, three=three, d2=d2)
""")
    assert got["rc"] == [0, 0, 0]
    assert got["one"] == 256 * MIB
    assert got["over"] == [2, 2, 2]
    assert got["d"] == [0, 0]
    assert got["two"] == 256 * MIB
    assert 341 * MIB <= got["three"] <= 345 * MIB
    assert got["d2"] == [0, 0]
