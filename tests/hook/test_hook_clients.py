# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's own packages over the fake driver with the hook in between, and drivers of every age."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

A = "GPU-aaaaaaaa-0000-4000-8000-00000000000a"
GIB, MIB = 1 << 30, 1 << 20
BUILD = Path(__file__).parents[2] / "build"
MORE = "from memory import *\n"


def test_cuda_bindings_are_limited(box):
    pytest.importorskip("cuda.bindings")
    box.grant("a", A, GIB)
    got = box.run("""
from cuda.bindings import driver
def ok(result):
    assert result[0] == driver.CUresult.CUDA_SUCCESS, result
    return result[1] if len(result) == 2 else result[1:]
driver.cuInit(0); device = ok(driver.cuDeviceGet(0))
try: context = ok(driver.cuCtxCreate(None, 0, device))
except TypeError: context = ok(driver.cuCtxCreate(0, device))
first = ok(driver.cuMemAlloc(600*MIB))
second, _ = driver.cuMemAlloc(600*MIB)
free_now, total_now = ok(driver.cuMemGetInfo())
ordered, p = driver.cuMemAllocAsync(600*MIB, 0)
driver.cuMemFree(first)
third, p = driver.cuMemAllocAsync(600*MIB, 0)
say(second=int(second), ordered=int(ordered), third=int(third), free=free_now, total=total_now,
    size=ok(driver.cuDeviceTotalMem(device)))
""").last
    assert got == {"second": 2, "ordered": 2, "third": 0, "free": 424 * MIB, "total": GIB, "size": GIB}


def test_cuda_core_is_limited(box):
    pytest.importorskip("cuda.core")
    box.grant("a", A, GIB)
    result = box.run("""
try:
    from cuda.core import Device
except ImportError:
    from cuda.core.experimental import Device
device = Device(0); device.set_current()
stream = device.default_stream
first = device.allocate(600*MIB, stream=stream)
try:
    device.allocate(600*MIB, stream=stream); second = "given"
except Exception as error:
    second = str(error)
first.close(); stream.sync()
third = device.allocate(600*MIB, stream=stream)
say(second=second)
""")
    assert "OUT_OF_MEMORY" in result.last["second"]


def test_nvidia_ml_py_shows_the_share(box):
    pytest.importorskip("pynvml")
    box.grant("a", A, GIB)
    result = box.run("""
import pynvml
pynvml.nvmlInit(); h = pynvml.nvmlDeviceGetHandleByIndex(0)
start(); alloc(300*MIB)
m, m2 = pynvml.nvmlDeviceGetMemoryInfo(h), pynvml.nvmlDeviceGetMemoryInfo(h, version=pynvml.nvmlMemory_v2)
other = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(1))
say(v1=[m.total, m.free, m.used], v2=[m2.total, m2.free, m2.used, m2.reserved], count=pynvml.nvmlDeviceGetCount(),
    uuid=pynvml.nvmlDeviceGetUUID(h), other=other.total)
pynvml.nvmlShutdown(); pynvml.nvmlInit(); h = pynvml.nvmlDeviceGetHandleByIndex(0)
say(again=pynvml.nvmlDeviceGetMemoryInfo(h).total)
""")
    assert result.lines[0] == {
        "v1": [GIB, 724 * MIB, 300 * MIB],
        "v2": [GIB, 724 * MIB, 300 * MIB, 0],
        "count": 2,
        "uuid": A,
        "other": 24 * GIB,
    }
    assert result.last == {"again": GIB}


@pytest.mark.every_driver
def test_drivers_of_every_age(box):
    box.grant("a", A, GIB, context_overhead=64 * MIB)
    got = box.run(
        MORE
        + """
start(); n = c_int(); call("cuDriverGetVersion", byref(n))
rc = [alloc(500*MIB)[0], alloc(600*MIB)[0], managed(100*MIB)[0], pitch(512, 2000)[0], array2d(1024, 1024)[0]]
rc += [alloc_async(64*MIB)[0], create(64*MIB)[0]]
before = used()
p = c_void_p(); look = cuda.cuGetProcAddress; status = look(b"cuMemAlloc", byref(p), 11030, c_uint64(0))
out = c_uint64(); over = CFUNCTYPE(c_int, POINTER(c_uint64), c_size_t)(p.value)(byref(out), GIB) if status == 0 else 2
primary = c_void_p(); retain = call("cuDevicePrimaryCtxRetain", byref(primary), 0)
say(version=n.value, rc=rc, over=over, retain=retain, nvml=nvml(), used=before)
"""
    ).last
    assert got["rc"][:5] == [0, 2, 0, 0, 0]
    assert got["rc"][5:] == [0, 0]
    assert got["over"] == 2
    assert got["retain"] == 0
    assert got["nvml"][0] == GIB
    assert got["nvml"][2] == got["used"]


def test_nvidia_smi_shows_the_share(box):
    box.grant("a", A, GIB)
    smi = BUILD / "fakegpu" / "usr" / "bin" / "nvidia-smi"
    holder = box.python("start(); alloc(300*MIB); say(x=1); wait()")
    holder.stdout.readline()
    query = [str(smi), "--query-gpu=memory.total,memory.used,memory.free", "--format=csv,noheader,nounits", "-i", "0"]
    assert box.run(query).out.split() == ["1024,", "300,", "724"]
    holder.communicate("\n", timeout=20)


def test_b201_python_and_a_c_library_share_the_limit(box, compile_c):
    """One part allocates through ctypes, one through a library that finds the driver by itself, in both orders."""
    library = compile_c(
        """
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
static int (*look)(const char *, void **, int, uint64_t);
static void *find(const char *name)
{
	void *address = NULL;
	void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
	if (!look)
		look = (int (*)(const char *, void **, int, uint64_t))dlsym(cuda, "cuGetProcAddress");
	return look(name, &address, 11030, 0) ? NULL : address;
}
int engine_alloc(uint64_t *out, size_t size) { return ((int (*)(uint64_t *, size_t))find("cuMemAlloc"))(out, size); }
int engine_async(uint64_t *out, size_t size)
{
	return ((int (*)(uint64_t *, size_t, void *))find("cuMemAllocAsync"))(out, size, NULL);
}
int engine_info(size_t *f, size_t *t) { return ((int (*)(size_t *, size_t *))find("cuMemGetInfo"))(f, t); }
""",
        "-shared",
        "-fPIC",
        name="libengine.so",
    )
    box.grant("a", A, GIB)
    code = f"""
from ctypes import *
engine = CDLL({str(library)!r})
def theirs(size):
    out = c_uint64(); return engine.engine_alloc(byref(out), c_size_t(size)), out.value
start(); rc, p = alloc(600*MIB); second = theirs(600*MIB)[0]; free(p)
rc2, q = theirs(600*MIB); third = alloc(600*MIB)[0]; out = c_uint64()
ordered = engine.engine_async(byref(out), c_size_t(600*MIB))
f, t = c_size_t(), c_size_t(); engine.engine_info(byref(f), byref(t))
say(rc=[rc, second, rc2, third, ordered], used=used(), same=[f.value, t.value] == list(info()))
"""
    assert box.run(code).last == {"rc": [0, 2, 0, 2, 2], "used": 600 * MIB, "same": True}


def test_b194_eight_processes_over_eight_cards(box, cards):
    """As an inference engine does: each sees all cards, makes host memory, shared handles, and fills its own card."""
    uuids = [f"GPU-{i:08x}-0000-4000-8000-000000000000" for i in range(8)]
    cards.write_text(json.dumps({"version": 1, "cards": [{"profile": "Fake24G", "uuid": u} for u in uuids]}))
    for i, uuid in enumerate(uuids):
        box.grant(f"g{i}", uuid, GIB)
    code = (
        MORE
        + """
mine = int(sys.argv[1]); init(); contexts = [context(d) for d in range(8)]; call("cuCtxSetCurrent", contexts[mine])
rc = [create(2*MIB, 0, 2)[0]]
for d in range(8):
    can = c_int()
    call("cuDeviceCanAccessPeer", byref(can), mine, d)
    if d != mine and can.value: rc.append(call("cuCtxEnablePeerAccess", contexts[d], 0))
out = c_uint64(); fd = c_int()
rc.append(call("cuMemCreate", byref(out), c_size_t(32*MIB), byref(Prop(1, 1, Location(1, mine))), c_ulonglong(0)))
rc.append(call("cuMemExportToShareableHandle", byref(fd), c_uint64(out.value), 1, c_ulonglong(0)))
back = c_uint64(); rc.append(call("cuMemImportFromShareableHandle", byref(back), c_void_p(fd.value), 1))
rc.append(alloc(GIB * 9 // 10)[0])
say(rc=sorted(set(rc)), used=used()); wait(); rc = [release(back.value), release(out.value)]; say(rc=rc, used=used())
"""
    )
    running = [box.popen([sys.executable, "-c", "from client import *\n" + code, str(i)]) for i in range(8)]
    for process in running:
        got = json.loads(process.stdout.readline())
        assert got["rc"] == [0]
        assert abs(got["used"] - (GIB * 9 // 10 + 32 * MIB)) < GIB // 100
    for process in running:
        out, _ = process.communicate("\n", timeout=30)
        got = json.loads(out)
        assert got["rc"] == [0, 0]
        assert abs(got["used"] - GIB * 9 // 10) < 1024
