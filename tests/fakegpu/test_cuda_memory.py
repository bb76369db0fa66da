# SPDX-License-Identifier: Apache-2.0
"""Memory of the fake libcuda: what each kind is charged, what is refused and how, and that bytes are real."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

PRELUDE = "from cuda_client import *\n"
MIB = 1 << 20


def run(machine: Any, code: str, **env: str) -> Any:
    """The `result` of a program that has a context."""
    return machine.python(PRELUDE + "start()\n" + code, **env)


@pytest.mark.parametrize(
    ("call", "charge"),
    [
        ("expect(cu.cuMemAlloc_v2(byref(c_uint64()), 1))", 512),
        ("expect(cu.cuMemAlloc_v2(byref(c_uint64()), 513))", 1024),
        ("expect(cu.cuMemAlloc_v2(byref(c_uint64()), 3 * MIB + 1))", 3 * MIB + 512),
        ("expect(cu.cuMemAllocPitch_v2(byref(c_uint64()), byref(c_size_t()), 1, 1000, 4))", 512_000),
        ("expect(cu.cuMemAllocPitch_v2(byref(c_uint64()), byref(c_size_t()), 513, 10, 16))", 10_240),
        ("expect(cu.cuMemAllocManaged(byref(c_uint64()), 100 * MIB, 1))", 0),
        ("expect(cu.cuMemHostAlloc(byref(c_void_p()), 100 * MIB, 0))", 0),
        ("expect(cu.cuMemAllocAsync(byref(c_uint64()), 1, None))", 32 * MIB),
        ("expect(cu.cuMemAllocAsync(byref(c_uint64()), 33 * MIB, None))", 64 * MIB),
        ("create(2 * MIB)", 2 * MIB),
        ("create(64 * MIB, device_prop(location=2))", 0),
        ("create(64 * MIB, device_prop(location=3))", 0),
        ("expect(cu.cuArrayCreate_v2(byref(c_void_p()), byref(ArrayDescriptor(1, 1000, 1, 1))))", 512_000),
        ("expect(cu.cuArrayCreate_v2(byref(c_void_p()), byref(ArrayDescriptor(200, 0, 0x20, 4))))", 3584),
        ("expect(cu.cuArray3DCreate_v2(byref(c_void_p()), byref(Array3DDescriptor(8, 8, 8, 1, 4, 0))))", 32_768),
        # 64x64 and its six halves, each row padded to 512 bytes: 127 rows in all
        (
            "expect(cu.cuMipmappedArrayCreate(byref(c_void_p()), byref(Array3DDescriptor(64, 64, 0, 1, 1, 0)), 99))",
            65_024,
        ),
        ("expect(cu.cuModuleGetGlobal_v2(None, None, module_of(), b'v'))", 4096),
    ],
)
def test_what_each_kind_is_charged(cuda_machine: Callable[..., Any], call: str, charge: int) -> None:
    code = (
        "def module_of():\n    module = c_void_p()\n    expect(cu.cuModuleLoadData(byref(module), b'x'))\n"
        "    return module\n"
    )
    assert run(cuda_machine(), f"{code}before = used()\n{call}\nresult = used() - before") == charge


def test_roundings_are_the_configurations(cuda_machine: Callable[..., Any]) -> None:
    machine = cuda_machine(plain_round=4096, pitch_align=256, vmm_granularity=65536, pool_grow_bytes="2MiB")
    code = """
marks = [used()]
alloc(1); marks.append(used())
pitch = c_size_t()
expect(cu.cuMemAllocPitch_v2(byref(c_uint64()), byref(pitch), 1, 16, 4)); marks.append(used())
create(65536); marks.append(used())
expect(cu.cuMemAllocAsync(byref(c_uint64()), 1, None)); marks.append(used())
result = [b - a for a, b in zip(marks, marks[1:])] + [pitch.value]
"""
    assert run(machine, code) == [4096, 4096, 65536, 2 * MIB, 256]


def test_all_of_it_can_be_had_and_nothing_more(cuda_machine: Callable[..., Any]) -> None:
    machine = cuda_machine({"memory_bytes": "1GiB"})
    code = """
free, total = info()
address = c_uint64()
first = cu.cuMemAlloc_v2(byref(address), free)
result = [free == total == GIB, first, try_alloc(1), info()[0], cu.cuMemFree_v2(address), try_alloc(free),
        info()[0] == free]
"""
    assert run(machine, code) == [True, 0, 2, 0, 0, 0, True]


@pytest.mark.parametrize(
    "call",
    [
        "cu.cuMemAlloc_v2(byref(a), 2 * GIB)",
        "cu.cuMemAlloc_v2(byref(a), 2**64 - 1)",
        "cu.cuMemAllocPitch_v2(byref(a), byref(c_size_t()), 1, 4 << 20, 4)",  # naive 4 MiB, real 2 GiB
        "cu.cuMemAllocPitch_v2(byref(a), byref(c_size_t()), 2**63, 4, 4)",
        "cu.cuMemAllocAsync(byref(a), 2 * GIB, None)",
        "cu.cuMemCreate(byref(a), 2 * GIB, byref(device_prop()), 0)",
        "cu.cuArrayCreate_v2(byref(c_void_p()), byref(ArrayDescriptor(1, 4 << 20, 1, 1)))",
        "cu.cuMipmappedArrayCreate(byref(c_void_p()), byref(Array3DDescriptor(1 << 15, 1 << 15, 0, 1, 4, 0)), 1)",
        "cu.cuMemAlloc(byref(c_uint()), 4096)",  # the form of CUDA 2 has no room for an address of today
    ],
)
def test_what_does_not_fit_is_out_of_memory_and_leaves_nothing(cuda_machine: Callable[..., Any], call: str) -> None:
    code = f"a = c_uint64()\nresult = [[{call} for _ in range(3)], used(), try_alloc(GIB)]"
    assert run(cuda_machine({"memory_bytes": "1GiB"}), code) == [[2, 2, 2], 0, 0]


def test_pitched_memory_has_the_pitch_of_the_device(cuda_machine: Callable[..., Any]) -> None:
    code = """
result = []
for width in (1, 512, 513):
    address, pitch = c_uint64(), c_size_t()
    expect(cu.cuMemAllocPitch_v2(byref(address), byref(pitch), width, 3, 4))
    result.append(pitch.value)
result.append(cu.cuMemAllocPitch_v2(byref(address), byref(pitch), 1, 1, 5))
"""
    assert run(cuda_machine(), code) == [512, 512, 1024, 1]


def test_stray_pointers_get_invalid_value(cuda_machine: Callable[..., Any]) -> None:
    code = """
address = alloc(4096)
host = c_void_p()
expect(cu.cuMemHostAlloc(byref(host), 4096, 0))
handle = create(2 * MIB)
result = [cu.cuMemFree_v2(0), cu.cuMemFree_v2(0x1234), cu.cuMemFree_v2(address + 512), cu.cuMemFree_v2(2**63),
          cu.cuMemFree_v2(host.value), cu.cuMemFree_v2(address), cu.cuMemFree_v2(address),
          cu.cuMemFreeAsync(address, None),
          cu.cuMemFreeHost(c_void_p(address)), cu.cuMemFreeHost(host), cu.cuMemFreeHost(host),
          cu.cuMemRelease(handle), cu.cuMemRelease(handle), cu.cuMemRelease(77), used(),
          cu.cuMemcpyHtoD_v2(address, b'x', 1)]
"""
    assert run(cuda_machine(), code) == [0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 0, 1, 1, 0, 1]


def test_b131_memory_of_pools_and_external_memory_is_freed_by_cumemfree(cuda_machine: Callable[..., Any]) -> None:
    code = """
import os
class MemoryDesc(ctypes.Structure):
    _fields_ = (("type", c_int), ("handle", c_void_p * 2), ("size", c_uint64), ("flags", c_uint), ("reserved",
            c_uint * 16))
class BufferDesc(ctypes.Structure):
    _fields_ = (("offset", c_uint64), ("size", c_uint64), ("flags", c_uint), ("reserved", c_uint * 16))
address, memory = c_uint64(), c_void_p()
expect(cu.cuMemAllocAsync(byref(address), MIB, None))
result = [cu.cuMemFree_v2(address)]
expect(cu.cuCtxSynchronize())
result.append(used())
fd = os.memfd_create("other")
os.truncate(fd, 8192)
desc = MemoryDesc(type=1, size=8192)
desc.handle[0] = fd
library = ctypes.CDLL("libcuda.so.1")
expect(library.cuImportExternalMemory(byref(memory), byref(desc)))
expect(library.cuExternalMemoryGetMappedBuffer(byref(address), memory, byref(BufferDesc(offset=4096, size=4096))))
result += [used(), cu.cuMemsetD8_v2(address, 7, 4096), cu.cuMemFree_v2(address), cu.cuMemFree_v2(address)]
expect(library.cuDestroyExternalMemory(memory))
"""
    assert run(cuda_machine(), code) == [0, 0, 0, 0, 0, 1]


def test_b139_usage_adds_up(cuda_machine: Callable[..., Any]) -> None:
    code = "result = []\nfor size in (100 * MIB, 200 * MIB, 1):\n    alloc(size)\n    result.append(used())"
    assert run(cuda_machine(), code) == [100 * MIB, 300 * MIB, 300 * MIB + 512]


def test_b146_a_query_takes_null_outputs(cuda_machine: Callable[..., Any]) -> None:
    code = """
free, total = c_size_t(), c_size_t()
result = [cu.cuMemGetInfo_v2(None, byref(total)), cu.cuMemGetInfo_v2(byref(free), None), cu.cuMemGetInfo_v2(None, None),
          total.value == free.value == 24 * GIB]
"""
    assert run(cuda_machine(), code) == [0, 0, 0, True]


def test_b137_a_thread_without_a_context(cuda_machine: Callable[..., Any]) -> None:
    code = """
import threading
said = []
def other():
    address, handle, free = c_uint64(), c_uint64(), c_size_t()
    said.extend([cu.cuMemCreate(byref(handle), 2 * MIB, byref(device_prop()), 0), cu.cuMemAlloc_v2(byref(address), 10),
                 cu.cuMemGetInfo_v2(byref(free), None), cu.cuMemFree_v2(4096), cu.cuMemRelease(handle)])
thread = threading.Thread(target=other)
thread.start()
thread.join(10)
result = said
"""
    assert run(cuda_machine(), code) == [0, 201, 201, 201, 0]


def test_b136_locations_of_handles(cuda_machine: Callable[..., Any]) -> None:
    code = """
handle = c_uint64()
result = []
for prop in (device_prop(0, location=2), device_prop(0, location=3), device_prop(1), device_prop(99),
        device_prop(0, location=9)):
    result.append(cu.cuMemCreate(byref(handle), GIB, byref(prop), 0))
result.append(used())
other = c_void_p()
expect(cu.cuCtxCreate_v2(byref(other), 0, 1))
result.append(used())
"""
    assert run(cuda_machine({}, {}), code) == [0, 0, 0, 101, 1, 0, 1 << 30]


def test_bytes_are_real(cuda_machine: Callable[..., Any]) -> None:
    code = """
text = bytes(range(256)) * 4096
size = len(text)
a, b = alloc(size), alloc(size)
back = ctypes.create_string_buffer(size)
expect(cu.cuMemcpyHtoD_v2(a, text, size))
expect(cu.cuMemcpyDtoD_v2(b, a, size))
expect(cu.cuMemcpyDtoH_v2(back, b, size))
result = [back.raw == text]
expect(cu.cuMemcpyDtoH_v2(back, a + 1000, 100))
result.append(back.raw[:100] == text[1000:1100])
expect(cu.cuMemsetD32_v2(a, 0x01020304, size // 4))
expect(cu.cuMemcpyDtoH_v2(back, a, size))
result.append(back.raw == bytes([4, 3, 2, 1]) * (size // 4))
expect(cu.cuMemcpy(b, ctypes.addressof(back), size))
expect(cu.cuMemcpy(ctypes.addressof(back), a, size))
result.append(back.raw == bytes([4, 3, 2, 1]) * (size // 4))
result += [cu.cuMemcpyDtoH_v2(back, a, size + 513), cu.cuMemcpyHtoD_v2(0x1000, text, 10), cu.cuMemcpyDtoD_v2(a, 0, 10),
           cu.cuMemsetD8_v2(max(a, b) + size, 0, 1)]
"""
    assert run(cuda_machine(), code) == [True, True, True, True, 1, 1, 1, 1]


def test_an_80_gib_card_needs_no_80_gib(cuda_machine: Callable[..., Any]) -> None:
    """Memory becomes real only where bytes other than zero are written to it."""
    code = """
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
before = resident()
a, b = alloc(38 * GIB), alloc(38 * GIB)
expect(cu.cuMemsetD8_v2(a, 0, 38 * GIB))
expect(cu.cuMemcpyHtoD_v2(a + 37 * GIB, b"x" * MIB, MIB))
expect(cu.cuMemcpyDtoD_v2(b + 37 * GIB, a + 37 * GIB, GIB))
back = ctypes.create_string_buffer(8)
expect(cu.cuMemcpyDtoH_v2(back, b + 37 * GIB + MIB - 4, 8))
grown = resident() - before
expect(cu.cuMemFree_v2(a))
expect(cu.cuMemFree_v2(b))
result = [back.raw.decode("latin1"), grown < 64 * MIB, used()]
"""
    assert run(cuda_machine({"profile": "A100-80", "context_bytes": 0}), code) == ["xxxx\0\0\0\0", True, 0]


def test_the_host_cannot_follow_a_device_address(cuda_machine: Callable[..., Any]) -> None:
    machine = cuda_machine()
    with machine.start(PRELUDE + "start()\nctypes.string_at(alloc(4096), 1)") as program:
        program.communicate(timeout=30)
    assert program.returncode == -11


def test_addresses_are_unique_and_ranges_are_known(cuda_machine: Callable[..., Any]) -> None:
    code = """
import random
random.seed(5)
live, ok = {}, True
for step in range(20000):
    if live and random.random() < 0.48:
        address = random.choice(list(live)) if step % 50 == 0 else next(iter(live))
        del live[address]
        ok &= cu.cuMemFree_v2(address) == 0
    else:
        size = random.choice((1, 512, 700, 5000, 65536, MIB, MIB + 1, 3 * MIB,
                600 * MIB)) if step % 3 else random.randint(1, 9 * MIB)
        address = c_uint64()
        if cu.cuMemAlloc_v2(byref(address), size) == 0:
            ok &= address.value not in live
            live[address.value] = size
spans = sorted(live.items())
ok &= all(a + n <= b for (a, n), (b, _) in zip(spans, spans[1:]))
base, size = c_uint64(), c_size_t()
for address, length in spans:
    expect(cu.cuMemGetAddressRange_v2(byref(base), byref(size), address + length - 1))
    ok &= (base.value, size.value) == (address, length)
    ok &= address % 512 == 0
result = [ok, used() == sum((size + 511) // 512 * 512 for size in live.values()), len(live) > 100,
          cu.cuMemGetAddressRange_v2(byref(base), byref(size), 0x1000)]
"""
    assert run(cuda_machine({"profile": "A100-80"} | {"context_bytes": 0}), code) == [True, True, True, 500]


def test_managed_memory_may_be_more_than_the_card(cuda_machine: Callable[..., Any]) -> None:
    """It is charged where it is moved to, as far as there is room."""
    code = """
a, b = c_uint64(), c_uint64()
expect(cu.cuMemAllocManaged(byref(a), 3 * GIB, 1))
expect(cu.cuMemAllocManaged(byref(b), 100 * MIB, 1))
result = [used() >> 20]
expect(cu.cuMemPrefetchAsync(b, 100 * MIB, 0, None)); result.append(used() >> 20)
expect(cu.cuMemPrefetchAsync(a, 3 * GIB, 0, None)); result.append(used() >> 20)
expect(cu.cuMemPrefetchAsync(a, 3 * GIB, -1, None)); result.append(used() >> 20)
expect(cu.cuMemPrefetchAsync(a, 200 * MIB, 0, None)); result.append(used() >> 20)
expect(cu.cuMemFree_v2(a)); result.append(used() >> 20)
ctypes.memset(b.value, 7, 100)  # the host reaches it
back = ctypes.create_string_buffer(4)
expect(cu.cuMemcpyDtoH_v2(back, b, 4))
managed = ctypes.c_ubyte()
expect(cu.cuPointerGetAttribute(byref(managed), 8, b))
result += [back.raw.hex(), managed.value]
"""
    assert run(cuda_machine({"memory_bytes": "1GiB"}), code) == [0, 100, 1024, 0, 200, 0, "07070707", 1]


def test_pointer_attributes(cuda_machine: Callable[..., Any]) -> None:
    code = """
def ask(address, which, kind):
    value = kind()
    code = cu.cuPointerGetAttribute(byref(value), which, address)
    return value.value if code == 0 else -code
device, host = alloc(1000), c_void_p()
expect(cu.cuMemHostAlloc(byref(host), 1000, 0))
mine = ctypes.create_string_buffer(5000)
expect(cu.cuMemHostRegister_v2(mine, 5000, 0))
context = c_void_p()
expect(cu.cuCtxGetCurrent(byref(context)))
result = [ask(device + 9, 2, c_int), ask(host.value, 2, c_int), ask(ctypes.addressof(mine) + 4999, 2, c_int),
          ask(device, 1, c_uint64) == context.value, ask(device + 9, 9, c_int), ask(device + 9, 11, c_uint64) == device,
          ask(device + 9, 12, c_uint64), ask(device, 13, ctypes.c_ubyte), ask(0x1000, 2, c_int), ask(device, 4,
                  c_uint64),
          ask(host.value, 4, c_uint64) == host.value, ask(device, 7, c_uint64) != ask(host.value, 7, c_uint64)]
result += [cu.cuMemHostRegister_v2(mine, 10, 0), cu.cuMemHostUnregister(mine), cu.cuMemHostUnregister(mine)]
"""
    assert run(cuda_machine(), code) == [2, 1, 1, True, 0, True, 1000, 1, -1, -1, True, True, 712, 0, 713]


def test_arrays_hold_bytes_and_go(cuda_machine: Callable[..., Any]) -> None:
    code = """
array = c_void_p()
expect(cu.cuArrayCreate_v2(byref(array), byref(ArrayDescriptor(100, 0, 1, 1))))
expect(cu.cuMemcpyHtoA_v2(array, 10, b"hello", 5))
back = ctypes.create_string_buffer(7)
expect(cu.cuMemcpyAtoH_v2(back, array, 9, 7))
result = [back.raw.decode("latin1"), cu.cuMemcpyHtoA_v2(array, 99, b"xx", 2), used(), cu.cuArrayDestroy(array), used(),
          cu.cuArrayDestroy(array)]
mipmap = c_void_p()
expect(cu.cuMipmappedArrayCreate(byref(mipmap), byref(Array3DDescriptor(64, 64, 0, 1, 1, 0)), 3))
result += [used(), cu.cuMipmappedArrayDestroy(mipmap), used()]
"""
    assert run(cuda_machine(), code) == ["\0hello\0", 1, 512, 0, 0, 400, (64 + 32 + 16) * 512, 0, 0]
