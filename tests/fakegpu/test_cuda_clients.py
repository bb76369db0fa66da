# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's own clients on the fake driver: cuda-bindings and cuda-core from PyPI, unmodified."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("cuda.bindings.driver")
pytest.importorskip("cuda.core")


def test_cuda_bindings_allocate_copy_launch_and_measure(cuda_machine: Callable[..., Any]) -> None:
    found = cuda_machine({"profile": "H100", "context_bytes": 0, "reserved_bytes": 0}).python(
        """
from cuda.bindings import driver as d
def ok(answer):
    assert answer[0] == d.CUresult.CUDA_SUCCESS, answer
    return answer[1] if len(answer) == 2 else answer[1:]
ok(d.cuInit(0))
device = ok(d.cuDeviceGet(0))
context = ok(d.cuDevicePrimaryCtxRetain(device))
ok(d.cuCtxSetCurrent(context))
free, total = ok(d.cuMemGetInfo())
address = ok(d.cuMemAlloc(1 << 20))
data = bytes(range(256)) * 4096
back = bytearray(len(data))
ok(d.cuMemcpyHtoD(address, data, len(data)))
ok(d.cuMemcpyDtoH(back, address, len(data)))
stream = ok(d.cuStreamCreate(0))
begin, end = ok(d.cuEventCreate(0)), ok(d.cuEventCreate(0))
function = ok(d.cuModuleGetFunction(ok(d.cuModuleLoadData(b"image")), b"spin_us_3000"))
ok(d.cuEventRecord(begin, stream))
ok(d.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0))
ok(d.cuEventRecord(end, stream))
ok(d.cuEventSynchronize(end))
piece = ok(d.cuMemAllocAsync(1 << 20, stream))
pooled = total - ok(d.cuMemGetInfo())[0]
ok(d.cuMemFreeAsync(piece, stream))
ok(d.cuStreamSynchronize(stream))
prop = d.CUmemAllocationProp()
prop.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
prop.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
handle = ok(d.cuMemCreate(4 << 20, prop, 0))
with_handle = total - ok(d.cuMemGetInfo())[0]
ok(d.cuMemRelease(handle))
ok(d.cuMemFree(address))
result = {"whole": free == total, "same": bytes(back) == data, "ms": ok(d.cuEventElapsedTime(begin, end)),
          "pooled": pooled >> 20, "handle": with_handle >> 20, "left": total - ok(d.cuMemGetInfo())[0],
          "too much": int(d.cuMemAlloc(1 << 40)[0]), "stray": int(d.cuMemFree(0x1234)[0]),
          "name": ok(d.cuDeviceGetName(64, device)).rstrip(b"\\0").decode()}
"""
    )
    assert 3.0 <= found.pop("ms") < 10.0
    assert found == {
        "whole": True,
        "same": True,
        "pooled": 33,
        "handle": 5,
        "left": 0,
        "too much": 2,
        "stray": 1,
        "name": "NVIDIA H100 80GB HBM3",
    }


def test_cuda_core_allocates_copies_launches_and_measures(cuda_machine: Callable[..., Any]) -> None:
    found = cuda_machine({"profile": "A100-80"}).python(
        r"""
from cuda.core import Device, DeviceMemoryResource, EventOptions, LaunchConfig
from cuda.core import LegacyPinnedMemoryResource, ObjectCode, launch
device = Device(0)
device.set_current()
stream = device.create_stream()
buffer = device.allocate(1 << 20, stream=stream)
code = ObjectCode.from_ptx(b".version 8.0\n.target sm_80\n.visible .entry spin_us_4000()\n{ ret; }\n")
kernel = code.get_kernel("spin_us_4000")
begin = stream.record(options=EventOptions(timing_enabled=True))
launch(stream, LaunchConfig(grid=1, block=32), kernel)
end = stream.record(options=EventOptions(timing_enabled=True))
end.sync()
host = LegacyPinnedMemoryResource().allocate(1 << 20)
import ctypes
ctypes.memset(int(host.handle), 9, 1 << 20)
buffer.copy_from(host, stream=stream)
ctypes.memset(int(host.handle), 0, 1 << 20)
buffer.copy_to(host, stream=stream)
stream.sync()
same = ctypes.string_at(int(host.handle), 1 << 20) == b"\x09" * (1 << 20)
own = DeviceMemoryResource(device).allocate(1 << 20, stream=stream)
own.close(stream)
buffer.close(stream)
builder = device.create_graph_builder()
builder.begin_building()
launch(builder, LaunchConfig(grid=1, block=1), kernel)
builder.end_building()
graph = builder.complete()
before = time.monotonic()
graph.launch(stream)
stream.sync()
result = {"name": device.name, "uuid": device.uuid, "capability": list(device.compute_capability), "ms": end - begin,
          "same": same, "graph": time.monotonic() - before}
"""
    )
    assert found["name"] == "NVIDIA A100-SXM4-80GB"
    assert found["capability"] == [8, 0]
    assert 4.0 <= found["ms"] < 20.0
    assert found["graph"] >= 0.004
    assert found["same"]
