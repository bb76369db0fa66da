# SPDX-License-Identifier: Apache-2.0
"""Memory of every kind under a limit, over the fake driver: what is charged, what is refused, what comes back."""

from __future__ import annotations

import ctypes
import errno
import json

import pytest

A = "GPU-aaaaaaaa-0000-4000-8000-00000000000a"
B = "GPU-bbbbbbbb-0000-4000-8000-00000000000b"
GIB, MIB = 1 << 30, 1 << 20

MORE = "from memory import *\n"


@pytest.mark.every_driver
def test_behaviours_1_to_5_and_7_fits_exact_back_and_shown(run):
    got = run("""
start()
rc, p = alloc(600*MIB)
seen = [rc, info(), total(), nvml()]
refused = alloc(500*MIB)[0]
rest = [alloc(424*MIB)[0], alloc(1)[0], info()[0]]
back = [free(p), info()[0], alloc(600*MIB)[0], alloc(1)[0]]
say(seen=seen, refused=refused, rest=rest, back=back)
""")
    assert got["seen"] == [0, [424 * MIB, GIB], GIB, [GIB, 424 * MIB, 600 * MIB]]
    assert got["refused"] == 2
    assert got["rest"] == [0, 2, 0]
    assert got["back"] == [0, 600 * MIB, 0, 2]


@pytest.mark.every_driver
def test_behaviour_6_no_limit_shows_the_card(run):
    got = run("start()\nsay(t=total(), i=info(), n=nvml()[0])", memory=0)
    assert got == {"t": 24 * GIB, "i": [24 * GIB, 24 * GIB], "n": 24 * GIB}


@pytest.mark.every_driver
def test_behaviour_8_each_card_its_own(box):
    box.grant("a", A, GIB)
    box.grant("b", B, 2 * GIB)
    got = box.run(
        MORE
        + """
start(0); first = [total(0), total(1), alloc(GIB)[0], alloc(1)[0]]
context(1); second = [alloc(2*GIB)[0], alloc(1)[0], info()]
say(first=first, second=second, nvml=[nvml(0), nvml(1)])
"""
    ).last
    assert got["first"] == [GIB, 2 * GIB, 0, 2]
    assert got["second"] == [0, 2, [0, 2 * GIB]]
    assert got["nvml"] == [[GIB, 0, GIB], [2 * GIB, 0, 2 * GIB]]


def test_b200_four_cards_each_with_its_own(box, cards):
    uuids = [f"GPU-{c * 8}-0000-4000-8000-00000000000{c}" for c in "abcd"]
    cards.write_text(json.dumps({"version": 1, "cards": [{"profile": "Fake24G", "uuid": u} for u in uuids]}))
    for n, uuid in enumerate(uuids):
        box.grant(f"g{n}", uuid, 24000 * MIB)
    code = """
init(); n = c_int(); call("cuDeviceGetCount", byref(n)); seen = []
for i in range(n.value):
    uuid = (c_ubyte * 16)(); call("cuDeviceGetUuid_v2", uuid, i); context(i)
    seen.append([bytes(uuid)[0], total(i), alloc(20*GIB)[0], alloc(5*GIB)[0]])
device = c_int(); say(n=n.value, seen=seen, fifth=call("cuDeviceGet", byref(device), 4))
"""
    got = box.run(MORE + code).last
    assert got == {"n": 4, "seen": [[c, 24000 * MIB, 0, 2] for c in (0xAA, 0xBB, 0xCC, 0xDD)], "fifth": 101}


def test_b193_a_card_whose_memory_nvml_does_not_tell(box, cards):
    """Unified memory: the size is CUDA's, the limit holds, and NVML goes on saying that it does not know."""
    row = {"profile": "Fake24G", "uuid": A, "memory_bytes": "120GiB", "memory_from_nvml": False}
    cards.write_text(json.dumps({"version": 1, "cards": [row]}))
    code = """
start(); lib, device, m = CDLL("libnvidia-ml.so.1"), c_void_p(), NvmlMemory(); lib.nvmlInit_v2()
lib.nvmlDeviceGetHandleByIndex_v2(0, byref(device)); said = lib.nvmlDeviceGetMemoryInfo(device, byref(m))
say(total=total(), rc=[alloc(60*GIB)[0], alloc(30*GIB)[0]], nvml=[said, m.total])
"""
    box.grant("a", A, 80 * GIB)
    assert box.run(MORE + code).last == {"total": 80 * GIB, "rc": [0, 2], "nvml": [3, 0]}
    box.regrant("a", memory_limit=200 * GIB)
    assert box.run(MORE + code).last == {"total": 120 * GIB, "rc": [0, 0], "nvml": [3, 0]}


def test_a_card_that_was_not_granted(box):
    """Both cards are visible, one is granted: the other is there, and cannot be used."""
    box.grant("a", A, GIB)
    result = box.run(
        MORE
        + """
init(); n = c_int(); call("cuDeviceGetCount", byref(n)); out = c_void_p()
rc = [call("cuCtxCreate_v2", byref(out), 0, 1), call("cuDevicePrimaryCtxRetain", byref(out), 1), create(2*MIB, 1)[0],
      call("cuMemPoolCreate", byref(out), byref(PoolProps(1, 0, Location(1, 1)))),
      call("cuCtxCreate_v2", byref(out), 0, 9)]
context(0)
say(n=n.value, rc=rc, mine=[alloc(GIB)[0], alloc(1)[0]])
"""
    )
    assert result.last == {"n": 2, "rc": [800, 800, 800, 800, 101], "mine": [0, 2]}
    assert result.err.count("\n") == 1
    assert box.complaints("a") == 4


@pytest.mark.every_driver
@pytest.mark.parametrize("visible", ["1", B, "GPU-bbbbbbbb"])
def test_behaviours_9_and_10_visible_devices(box, visible):
    box.grant("a", A, GIB)
    box.grant("b", B, 2 * GIB)
    code = MORE + "start()\nsay(total=total(0), rc=[alloc(2*GIB)[0], alloc(1)[0]], nvml=nvml(1))"
    got = box.run(code, env={"CUDA_VISIBLE_DEVICES": visible}).last
    assert got == {"total": 2 * GIB, "rc": [0, 2], "nvml": [2 * GIB, 0, 2 * GIB]}
    assert box.used("a") == 0


def test_b165_two_processes_on_two_cards(box):
    box.grant("a", A, 4 * GIB)
    box.grant("b", B, 4 * GIB)
    code = MORE + "start()\nsay(rc=alloc(3*GIB)[0], nvml=[nvml(0)[2], nvml(1)[2]]); wait()"
    one = box.python(code, env={"CUDA_VISIBLE_DEVICES": "0"})
    one.stdout.readline()
    two = box.python(code, env={"CUDA_VISIBLE_DEVICES": "1"})
    assert f'"rc": 0, "nvml": [{3 * GIB}, {3 * GIB}]' in two.stdout.readline()
    one.communicate("\n", timeout=20)
    two.communicate("\n", timeout=20)


@pytest.mark.every_driver
def test_behaviour_11_a_context_costs_once_per_process(box):
    box.grant("a", A, GIB, context_overhead=200 * MIB)
    got = box.run(
        MORE
        + """
init()
primary = c_void_p()
free_before = None
say(rc=[call("cuDevicePrimaryCtxRetain", byref(primary), 0) for _ in range(3)])
call("cuCtxPushCurrent_v2", primary)
one = info()[0]
second = context(); two = info()[0]
call("cuCtxDestroy_v2", second); call("cuCtxSetCurrent", primary); three = info()[0]
call("cuDevicePrimaryCtxRelease_v2", 0); call("cuDevicePrimaryCtxRelease_v2", 0); four = info()[0]
call("cuDevicePrimaryCtxRelease_v2", 0)
say(n=nvml()[1])
context(); five = info()[0]
say(one=one, two=two, three=three, four=four, five=five)
"""
    )
    assert got.lines[0] == {"rc": [0, 0, 0]}
    assert got.lines[1] == {"n": GIB}
    assert set(got.last.values()) == {824 * MIB}


def test_context_that_does_not_fit_is_refused(box):
    box.grant("a", A, GIB, context_overhead=200 * MIB)
    holder = box.python("start()\nsay(rc=alloc(700*MIB)[0]); wait()")
    holder.stdout.readline()
    got = box.run(
        "init()\nout=c.c_void_p()\nsay(rc=[call('cuCtxCreate_v2', c.byref(out), 0, 0), "
        "call('cuDevicePrimaryCtxRetain', c.byref(out), 0)])"
    ).last
    assert got == {"rc": [2, 2]}
    holder.communicate("\n", timeout=20)


def test_b147_limit_below_the_context(box):
    box.grant("a", A, 300 * MIB, context_overhead=346 * MIB)
    result = box.run("start()\nsay(info=info(), rc=alloc(1)[0])")
    assert result.last == {"info": [0, 300 * MIB], "rc": 2}
    assert "smaller than what one CUDA context takes" in result.err
    assert box.complaints("a") == 1


@pytest.mark.every_driver
def test_memory_goes_with_its_context(run):
    got = run(
        """
init(); one, two = context(), context()
alloc(100*MIB); managed(50*MIB); array2d(1024, 1024)
call("cuCtxSetCurrent", one); alloc(200*MIB)
before = used()
call("cuCtxDestroy_v2", two); middle = used()
call("cuCtxDestroy_v2", one); context()
say(before=before, middle=middle, after=used())
""",
        context_overhead=64 * MIB,
    )
    assert got == {"before": 418 * MIB, "middle": 264 * MIB, "after": 64 * MIB}


@pytest.mark.every_driver
def test_reset_of_the_primary_context_gives_everything_back(run):
    got = run(
        """
init(); p = c_void_p(); call("cuDevicePrimaryCtxRetain", byref(p), 0); call("cuCtxSetCurrent", p)
alloc(300*MIB); before = used()
rc = call("cuDevicePrimaryCtxReset_v2", 0)
say(before=before, rc=rc, after=nvml()[2])
""",
        context_overhead=64 * MIB,
    )
    assert got == {"before": 364 * MIB, "rc": 0, "after": 0}


@pytest.mark.every_driver
def test_b142_every_call_over_the_limit_says_out_of_memory(run):
    got = run("""
start(); own = pool(); big = 2*GIB
rc = {"alloc": alloc(big)[0], "managed": managed(big)[0], "pitch": pitch(512, big // 512)[0],
      "async": alloc_async(big)[0], "pool": alloc_pool(big, own)[0], "create": create(big)[0],
      "array": array2d(32768, 32768)[0], "array3d": array(2048, 2048, 256)[0], "mipmap": mipmap(32768, 32768, 3)[0]}
name = c_char_p(); call("cuGetErrorName", rc["alloc"], byref(name))
say(rc=rc, name=name.value.decode(), used=used(), smaller=alloc(GIB)[0])
""")
    assert set(got["rc"].values()) == {2}
    assert (got["name"], got["used"], got["smaller"]) == ("CUDA_ERROR_OUT_OF_MEMORY", 0, 0)


@pytest.mark.every_driver
def test_b139_figures_step_by_step(run):
    got = run("""
start(); seen = []
for size in (100*MIB, 200*MIB, 1):
    alloc(size); seen.append(used())
say(seen=seen, nvml=nvml()[2])
""")
    assert got == {"seen": [100 * MIB, 300 * MIB, 300 * MIB + 512], "nvml": 300 * MIB + 512}


@pytest.mark.every_driver
def test_b146_outputs_that_are_missing(box):
    box.grant("a", A, GIB)
    code = (
        MORE
        + """
start(); f, t, m = c_size_t(), c_size_t(), c_void_p()
nvml()
rc = [call("cuMemGetInfo_v2", None, byref(t)), call("cuMemGetInfo_v2", byref(f), None),
      call("cuMemGetInfo_v2", None, None)]
device = c_void_p(); NVML[0].nvmlDeviceGetHandleByIndex_v2(0, byref(device))
rc += [NVML[0].nvmlDeviceGetMemoryInfo(device, None), NVML[0].nvmlDeviceGetMemoryInfo(None, byref(NvmlMemory())),
       call("cuDeviceTotalMem_v2", None, 0), call("cuMemAlloc_v2", None, c_size_t(4096)),
       call("cuMemAlloc_v2", byref(f), c_size_t(0))]
say(rc=rc, f=f.value, t=t.value, used=used())
"""
    )
    got, bare = box.run(code).last, box.run(code, hooked=False).last
    assert got["rc"] == bare["rc"]
    assert got["t"] == GIB
    assert got["used"] == 0


def test_b189_and_b192_every_view_says_the_same(run):
    got = run(
        """
start(); alloc(GIB)
v1 = nvml(); device = c_void_p(); NVML[0].nvmlDeviceGetHandleByIndex_v2(0, byref(device))
m = NvmlMemory2(version=0x2000028); rc = NVML[0].nvmlDeviceGetMemoryInfo_v2(device, byref(m))
wrong = NvmlMemory2(version=7); bad = NVML[0].nvmlDeviceGetMemoryInfo_v2(device, byref(wrong))
say(cuda=info(), total=total(), v1=v1, rc=rc, v2=[m.total, m.free, m.used, m.reserved], bad=bad)
""",
        memory=4 * GIB,
    )
    assert got["cuda"] == [3 * GIB, 4 * GIB]
    assert got["total"] == 4 * GIB
    assert got["v1"] == [4 * GIB, 3 * GIB, GIB]
    assert (got["rc"], got["v2"]) == (0, [4 * GIB, 3 * GIB, GIB, 0])
    assert got["bad"] not in (0, 13)


def test_b149_all_of_the_compute_keeps_the_memory_limit(run):
    got = run("start()\nsay(t=total(), rc=alloc(2*GIB)[0])", core_percent=100)
    assert got == {"t": GIB, "rc": 2}


def test_b196_a_fresh_container_is_nearly_all_free(run, box):
    got = run("start()\nf, t = info()\nsay(f=f, t=t, rc=alloc(int(0.9*t))[0])", memory=4 * GIB)
    assert got["f"] >= 0.98 * got["t"]
    assert got["rc"] == 0
    assert box.used("a") in (0, int(0.9 * 4 * GIB) // 512 * 512 + 512)


def test_failed_driver_call_books_nothing(box, cards):
    """The card is full of others: the driver refuses what the limit allows."""
    box.grant("a", A, 20 * GIB)
    holder = box.python("start()\nsay(rc=alloc(20*GIB)[0]); wait()", hooked=False)
    holder.stdout.readline()
    got = box.run(
        MORE
        + """
start()
rc = [alloc(10*GIB)[0], managed(2**40)[0], pitch(512, 20*MIB)[0], create(10*GIB)[0], alloc_async(10*GIB)[0],
      array2d(65536, 65536)[0]]
say(rc=rc, used=nvml()[2], free=info()[0])
"""
    ).last
    holder.communicate("\n", timeout=20)
    assert got["rc"][0] == 2
    assert got["used"] == 0
    assert got["free"] == 4 * GIB, "free shows what nobody can get"


def test_b143_what_the_driver_sees_beyond_our_count_is_added_by_the_node(box, node):
    """The driver says 400 MiB where we charged 100: contexts, modules, workspaces."""
    box.grant("a", A, 512 * MIB)
    process = box.python(
        MORE
        + """
start(); rc, p = alloc(100*MIB); say(rc=rc); wait()
say(used=used(), rc=alloc(200*MIB)[0], fits=alloc(112*MIB)[0]); wait()
say(free=free(p), used=used()); wait(); say(used=used()); wait()
"""
    )

    def step() -> dict:
        process.stdin.write("\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    def observe(charged: int, driver: int) -> int:
        raw = box.region("a").read_bytes()
        owner = int.from_bytes(raw[4096:4104], "little")
        call = node.lib.aq_usage_observe
        call.argtypes = [ctypes.c_char_p, ctypes.c_uint32, *[ctypes.c_uint64] * 3]
        return call(str(box.region("a")).encode(), 0, owner, charged, driver)

    assert json.loads(process.stdout.readline()) == {"rc": 0}
    assert observe(50 * MIB, 400 * MIB) == -errno.EAGAIN, "two figures of different moments"
    assert observe(100 * MIB, 400 * MIB) == 0
    assert step() == {"used": 400 * MIB, "rc": 2, "fits": 0}
    assert observe(512 * MIB, 500 * MIB) == 0  # the driver says a little less now
    assert step() == {"free": 0, "used": 400 * MIB}
    assert observe(400 * MIB, 0) == 0
    assert step() == {"used": 112 * MIB}
    process.kill()
    process.communicate()
    assert box.run("start()\nsay(used=used())").last == {"used": 0}


def test_context_that_the_driver_refuses_to_end_keeps_its_memory(box, cards):
    box.grant("a", A, GIB, context_overhead=64 * MIB)
    control = {"faults": [{"function": "cuCtxDestroy_v2", "code": 999, "count": 1}]}
    cards.with_name("config.json.control").write_text(json.dumps(control))
    got = box.run(
        MORE
        + """
here = start(); rc, p = alloc(100*MIB); ended = call("cuCtxDestroy_v2", here)
middle = used(); back = free(p); again = alloc(100*MIB)[0]
say(ended=ended, middle=middle, back=back, again=again, used=used(), now=call("cuCtxDestroy_v2", here), nvml=nvml()[2])
"""
    ).last
    assert got == {
        "ended": 999, "middle": 164 * MIB, "back": 0, "again": 0, "used": 164 * MIB, "now": 0, "nvml": 0,
    }  # fmt: skip


def test_contexts_come_and_go_in_many_threads(run):
    """The driver may give a thread the handle and the addresses that another thread's context just had."""
    got = run(
        """
start(); bad = []
def work(seed):
    import random
    chance = random.Random(seed)
    for _ in range(150):
        mine = context()
        for _ in range(chance.randrange(5)):
            rc, p = alloc(chance.choice([512, 4096, MIB]))
            if rc: bad.append(rc)
            if chance.random() < 0.3: bad.extend([1] if free(p) else [])
        if call("cuCtxDestroy_v2", mine): bad.append("destroy")
threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
[t.start() for t in threads]; [t.join() for t in threads]
say(bad=bad, used=used(), all=[alloc(GIB - 64*MIB)[0], alloc(512)[0]])
""",
        context_overhead=64 * MIB,
    )
    assert got == {"bad": [], "used": 64 * MIB, "all": [0, 2]}


def test_primary_context_in_many_threads(run):
    got = run(
        """
init(); bad = []
def work():
    for _ in range(300):
        p = c_void_p()
        if call("cuDevicePrimaryCtxRetain", byref(p), 0): bad.append("retain"); continue
        if call("cuDevicePrimaryCtxRelease_v2", 0): bad.append("release")
threads = [threading.Thread(target=work) for _ in range(6)]
[t.start() for t in threads]; [t.join() for t in threads]
end = nvml()[2]; p = c_void_p(); call("cuDevicePrimaryCtxRetain", byref(p), 0); one = nvml()[2]
call("cuDevicePrimaryCtxRelease_v2", 0)
say(bad=bad, end=end, one=one, last=nvml()[2])
""",
        context_overhead=64 * MIB,
    )
    assert got == {"bad": [], "end": 0, "one": 64 * MIB, "last": 0}
