# SPDX-License-Identifier: Apache-2.0
"""Stream-ordered memory, virtual memory and IPC of the fake libcuda."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

PRELUDE = "from cuda_client import *\n"
POOL = """
def attr(pool, which):
    value = c_uint64()
    expect(cu.cuMemPoolGetAttribute(pool, which, byref(value)))
    return value.value >> 20
def from_pool(pool, size):
    address = c_uint64()
    return cu.cuMemAllocFromPoolAsync(byref(address), size, pool, None), address
default = c_void_p()
expect(cu.cuDeviceGetDefaultMemPool(byref(default), 0))
own = c_void_p()
props = PoolProps(type=1, location=Location(1, 0))
expect(cu.cuMemPoolCreate(byref(own), byref(props)))
RESERVED, RESERVED_HIGH, USED, USED_HIGH, THRESHOLD = 5, 6, 7, 8, 4
"""


def run(machine: Any, code: str) -> Any:
    return machine.python(PRELUDE + "start()\n" + code)


def test_a_pool_takes_steps_and_gives_back_at_a_synchronisation(cuda_machine: Callable[..., Any]) -> None:
    code = (
        POOL
        + """
result = []
code, address = from_pool(own, 33 * MIB)
result.append([code, attr(own, RESERVED), attr(own, USED), used() >> 20])
result.append(cu.cuMemFreeAsync(address, None))
result.append([attr(own, RESERVED), attr(own, USED), used() >> 20])
expect(cu.cuStreamSynchronize(None))
result.append([attr(own, RESERVED), attr(own, RESERVED_HIGH), attr(own, USED_HIGH), used() >> 20])
"""
    )
    assert run(cuda_machine(), code) == [[0, 64, 33, 64], 0, [64, 0, 64], [0, 64, 33, 0]]


def test_a_release_threshold_keeps_memory_until_it_is_trimmed(cuda_machine: Callable[..., Any]) -> None:
    code = (
        POOL
        + """
keep = c_uint64(100 * MIB)
expect(cu.cuMemPoolSetAttribute(own, THRESHOLD, byref(keep)))
pieces = [from_pool(own, 50 * MIB)[1] for _ in range(6)]
result = [attr(own, RESERVED)]
for piece in pieces:
    expect(cu.cuMemFreeAsync(piece, None))
expect(cu.cuCtxSynchronize())
result.append(attr(own, RESERVED))
expect(cu.cuMemPoolTrimTo(own, 0))
result += [attr(own, RESERVED), used() >> 20]
"""
    )
    assert run(cuda_machine(), code) == [320, 128, 0, 0]


def test_b135_allocating_and_freeing_for_ever_uses_one_pool(cuda_machine: Callable[..., Any]) -> None:
    code = """
worst = 0
for _ in range(1000):
    address = c_uint64()
    expect(cu.cuMemAllocAsync(byref(address), GIB, None))
    worst = max(worst, used())
    expect(cu.cuMemFreeAsync(address, None))
    expect(cu.cuStreamSynchronize(None))
result = [worst >> 20, used()]
"""
    assert run(cuda_machine({"memory_bytes": "2GiB"}), code) == [1024, 0]


def test_pools_give_way_to_each_other_and_end_with_their_last_piece(cuda_machine: Callable[..., Any]) -> None:
    code = (
        POOL
        + """
keep = c_uint64(2**64 - 1)
expect(cu.cuMemPoolSetAttribute(default, THRESHOLD, byref(keep)))
address = c_uint64()
expect(cu.cuMemAllocAsync(byref(address), 900 * MIB, None))
expect(cu.cuMemFreeAsync(address, None))
expect(cu.cuStreamSynchronize(None))
result = [used() >> 20]
code, piece = from_pool(own, 500 * MIB)  # the default pool sits on what this needs
result += [code, used() >> 20]
result += [cu.cuMemPoolDestroy(own), used() >> 20, cu.cuMemFreeAsync(piece, None), used() >> 20]
result += [cu.cuMemPoolDestroy(default), from_pool(own, 10)[0]]
"""
    )
    assert run(cuda_machine({"memory_bytes": "1GiB"}), code) == [928, 0, 512, 0, 512, 0, 0, 1, 1]


def test_b133_an_explicit_pool_is_charged_and_refused(cuda_machine: Callable[..., Any]) -> None:
    code = POOL + "code, _ = from_pool(own, GIB)\nresult = [code, used() >> 20]"
    assert run(cuda_machine({"memory_bytes": "512MiB"}), code) == [2, 0]
    assert run(cuda_machine({"memory_bytes": "2GiB"}), code) == [0, 1024]


def test_b138_a_handle_lives_while_it_is_held_or_mapped(cuda_machine: Callable[..., Any]) -> None:
    code = """
size = 768 * MIB
handle = create(size)
where = c_uint64()
expect(cu.cuMemAddressReserve(byref(where), 4 * GIB, 0, 0, 0))
result = [used() >> 20]
expect(cu.cuMemMap(where.value, size, 0, handle, 0))
expect(cu.cuMemMap(where.value + 2 * GIB, size, 0, handle, 0))
result += [used() >> 20, cu.cuMemRelease(handle), used() >> 20]
again = c_uint64()
result += [cu.cuMemCreate(byref(again), size, byref(device_prop()), 0)]
result += [cu.cuMemMap(where.value + GIB, size, 0, handle, 0)]  # the handle is gone, its mappings live
access = Access(Location(1, 0), 3)
result.append(cu.cuMemcpyHtoD_v2(where.value, b"abc", 3))  # mapped, but nobody was given access
expect(cu.cuMemSetAccess(where.value, size, byref(access), 1))
expect(cu.cuMemSetAccess(where.value + 2 * GIB, size, byref(access), 1))
expect(cu.cuMemcpyHtoD_v2(where.value + 5, b"abc", 3))
back = ctypes.create_string_buffer(3)
expect(cu.cuMemcpyDtoH_v2(back, where.value + 2 * GIB + 5, 3))  # the same bytes by the other address
result.append(back.raw.decode())
result += [cu.cuMemUnmap(where.value, 2 * MIB), cu.cuMemUnmap(where.value, size), used() >> 20]
result += [cu.cuMemAddressFree(where.value, 4 * GIB)]  # something is mapped in it
kept = c_uint64()
expect(cu.cuMemRetainAllocationHandle(byref(kept), where.value + 2 * GIB + 77))
result += [cu.cuMemUnmap(where.value + 2 * GIB, size), used() >> 20, cu.cuMemRelease(kept), used() >> 20]
result += [cu.cuMemAddressFree(where.value, 4 * GIB)]
result += [cu.cuMemCreate(byref(again), size, byref(device_prop()), 0), cu.cuMemCreate(byref(again), size,
        byref(device_prop()), 0)]
"""
    assert run(cuda_machine({"memory_bytes": "1GiB"}), code) == [
        *(768, 768, 0, 768),
        2,
        1,
        1,
        "abc",
        *(1, 0, 768),
        1,
        *(0, 768, 0, 0),
        0,
        *(0, 2),
    ]


def test_pools_go_with_the_last_context(cuda_machine: Callable[..., Any]) -> None:
    code = """
first = c_void_p()
expect(cu.cuCtxGetCurrent(byref(first)))
second = start()
result = []
for size in (MIB, 100 * MIB):
    expect(cu.cuCtxSetCurrent(second))
    address = c_uint64()
    expect(cu.cuMemAllocAsync(byref(address), size, None))
result.append(used() >> 20)
expect(cu.cuCtxDestroy_v2(second))
expect(cu.cuCtxSetCurrent(first))
result.append(used() >> 20)  # another context is left
expect(cu.cuCtxDestroy_v2(first))
start()
result += [used() >> 20, cu.cuMemFreeAsync(address, None)]
"""
    assert run(cuda_machine(), code) == [128, 128, 0, 1]


def test_sizes_of_handles_must_fit_the_granularity(cuda_machine: Callable[..., Any]) -> None:
    code = """
handle, size = c_uint64(), c_size_t()
expect(cu.cuMemGetAllocationGranularity(byref(size), byref(device_prop()), 0))
result = [size.value >> 10, cu.cuMemCreate(byref(handle), 4096, byref(device_prop()), 0),
          cu.cuMemCreate(byref(handle), 0, byref(device_prop()), 0), cu.cuMemAddressReserve(byref(handle), 4096,
                  0, 0, 0)]
"""
    assert run(cuda_machine(), code) == [2048, 1, 1, 1]


SEND = """
import array, socket
def send(path, fd):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        socket.send_fds(sock, [b"x"], [fd])
"""


def test_a_handle_passes_to_another_process_and_is_charged_once(
    cuda_machine: Callable[..., Any], tmp_path: Any
) -> None:
    machine = cuda_machine()
    path = str(tmp_path / "socket")
    importer = """
import socket
sock = socket.socket(socket.AF_UNIX)
sock.bind(sys.argv[1])
sock.listen()
print("ready", flush=True)
start()
peer, _ = sock.accept()
_, fds, _, _ = socket.recv_fds(peer, 1, 1)
handle, where = c_uint64(), c_uint64()
expect(cu.cuMemImportFromShareableHandle(byref(handle), c_void_p(fds[0]), 1))
expect(cu.cuMemAddressReserve(byref(where), 4 * MIB, 0, 0, 0))
expect(cu.cuMemMap(where, 4 * MIB, 0, handle, 0))
expect(cu.cuMemSetAccess(where, 4 * MIB, byref(Access(Location(1, 0), 3)), 1))
back = ctypes.create_string_buffer(5)
expect(cu.cuMemcpyDtoH_v2(back, where, 5))
result = [back.raw.decode(), used() >> 20]
peer.send(b"x")
"""
    exporter = """
import socket
start()
handle, where, fd = create(4 * MIB, device_prop(shareable=True)), c_uint64(), c_int()
expect(cu.cuMemAddressReserve(byref(where), 4 * MIB, 0, 0, 0))
expect(cu.cuMemMap(where, 4 * MIB, 0, handle, 0))
expect(cu.cuMemSetAccess(where, 4 * MIB, byref(Access(Location(1, 0), 3)), 1))
expect(cu.cuMemcpyHtoD_v2(where, b"hello", 5))
expect(cu.cuMemExportToShareableHandle(byref(fd), handle, 1, 0))
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect(sys.argv[1])
    socket.send_fds(sock, [b"x"], [fd.value])
    sock.recv(1)
result = [used() >> 20]
"""
    with machine.start(PRELUDE + importer, path) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        assert machine.python(PRELUDE + exporter, path) == [4]
        out, err = program.communicate(timeout=30)
    assert program.returncode == 0, err
    assert json.loads(out.splitlines()[-1]) == ["hello", 4]


def test_ipc_memory_is_the_same_memory_and_goes_with_its_owner(cuda_machine: Callable[..., Any]) -> None:
    machine = cuda_machine()
    owner = """
start()
address, handle = alloc(1000), IpcHandle()
expect(cu.cuMemcpyHtoD_v2(address, b"before", 6))
expect(cu.cuIpcGetMemHandle(byref(handle), address))
expect(cu.cuMemcpyHtoD_v2(address + 6, b" after", 6))
again = c_uint64()
print(bytes(handle.data).hex(), cu.cuIpcOpenMemHandle_v2(byref(again), handle, 1), flush=True)
sys.stdin.readline()
back = ctypes.create_string_buffer(5)
expect(cu.cuMemcpyDtoH_v2(back, address + 12, 5))
print(back.raw.decode(), flush=True)
sys.stdin.readline()
"""
    other = """
start()
handle = IpcHandle()
handle.data[:] = bytes.fromhex(sys.argv[1])
address, twice = c_uint64(), c_uint64()
code = cu.cuIpcOpenMemHandle_v2(byref(address), handle, 1)
result = [code]
if code == 0:
    expect(cu.cuIpcOpenMemHandle_v2(byref(twice), handle, 1))
    back = ctypes.create_string_buffer(12)
    expect(cu.cuMemcpyDtoH_v2(back, address, 12))
    expect(cu.cuMemcpyHtoD_v2(address.value + 12, b"other", 5))
    result += [back.raw.decode(), twice.value == address.value, cu.cuMemFree_v2(address), used(),
               cu.cuIpcCloseMemHandle(address), cu.cuIpcCloseMemHandle(address), cu.cuIpcCloseMemHandle(address)]
"""
    with machine.start(PRELUDE + owner) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        handle, own = program.stdout.readline().split()
        assert own == "201"  # not in the process that made it
        assert machine.python(PRELUDE + other, handle) == [0, "before after", True, 1, 1024, 0, 0, 1]
        program.stdin.write("\n")
        program.stdin.flush()
        assert program.stdout.readline() == "other\n"
        program.kill()
        program.communicate(timeout=30)
    assert machine.python(PRELUDE + other, handle) == [1]
    assert list(machine.config.parent.glob("*.shared/*")) == []
