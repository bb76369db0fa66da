# SPDX-License-Identifier: Apache-2.0
"""Graphs and stream capture of the fake libcuda."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PRELUDE = "from cuda_client import *\n"


def run(machine: Any, code: str, **env: str) -> Any:
    return machine.python(PRELUDE + "start()\n" + code, **env)


def test_a_launch_takes_the_sum_of_its_kernels(cuda_machine: Callable[..., Any]) -> None:
    code = """
function, graph, node, exec, own = kernel("spin_us_100"), c_void_p(), c_void_p(), c_void_p(), stream(1)
expect(cu.cuGraphCreate(byref(graph), 0))
for i in range(100):
    after = (c_void_p * 1)(node)
    expect(cu.cuGraphAddKernelNode_v2(byref(node), graph, after if i else None, min(i, 1),
            byref(kernel_params(function))))
expect(cu.cuGraphInstantiateWithFlags(byref(exec), graph, 0))
begin, end = event(), event()
expect(cu.cuEventRecord(begin, own))
for _ in range(3):
    expect(cu.cuGraphLaunch(exec, own))
expect(cu.cuEventRecord(end, own))
expect(cu.cuStreamSynchronize(own))
# An update of the executable graph changes what is run.
slow = kernel("spin_us_5100")
expect(cu.cuGraphExecKernelNodeSetParams_v2(exec, node, byref(kernel_params(slow))))
again = event()
expect(cu.cuGraphLaunch(exec, own))
expect(cu.cuEventRecord(again, own))
expect(cu.cuStreamSynchronize(own))
count = c_size_t()
expect(cu.cuGraphGetNodes(graph, None, byref(count)))
result = [elapsed(begin, end), elapsed(end, again), count.value, cu.cuGraphExecDestroy(exec), cu.cuGraphDestroy(graph),
          cu.cuGraphDestroy(graph), cu.cuGraphLaunch(exec, own)]
"""
    first, second, nodes, *codes = run(cuda_machine(), code)
    assert 30.0 <= first < 40.0
    assert 15.0 <= second < 100.0
    assert (nodes, codes) == (100, [0, 0, 1, 1])


ALLOC = """
def alloc_graph(size):
    graph, node, exec = c_void_p(), c_void_p(), c_void_p()
    params = AllocNode(pool=PoolProps(type=1, location=Location(1, 0)), size=size)
    expect(cu.cuGraphCreate(byref(graph), 0))
    expect(cu.cuGraphAddMemAllocNode(byref(node), graph, None, 0, byref(params)))
    return graph, node, params.address
def graph_memory(which):
    value = c_uint64()
    expect(cu.cuDeviceGetGraphMemAttribute(0, which, byref(value)))
    return value.value >> 20
def instantiate(graph, flags=0):
    exec = c_void_p()
    expect(cu.cuGraphInstantiateWithFlags(byref(exec), graph, flags))
    return exec
"""


def test_b144_memory_of_graph_nodes_is_charged_from_launch_to_free(cuda_machine: Callable[..., Any]) -> None:
    code = (
        ALLOC
        + """
graph, node, address = alloc_graph(64 * MIB)
exec = instantiate(graph)
result = [used() >> 20]
for i in range(8):
    expect(cu.cuGraphLaunch(exec, None))
    expect(cu.cuMemcpyHtoD_v2(address, b"x", 1))
    if i == 0:
        result += [used() >> 20, cu.cuGraphLaunch(exec, None)]  # not freed yet
    expect(cu.cuMemFree_v2(address))
result += [cu.cuMemFree_v2(address), used() >> 20, [graph_memory(i) for i in range(4)]]
expect(cu.cuDeviceGraphMemTrim(0))
result += [used() >> 20, graph_memory(2)]
"""
    )
    assert run(cuda_machine(), code) == [0, 64, 1, 1, 64, [0, 64, 64, 64], 0, 0]


def test_graph_memory_that_does_not_fit(cuda_machine: Callable[..., Any]) -> None:
    code = (
        ALLOC
        + """
graph, _, _ = alloc_graph(200 * MIB)
for _ in range(1):
    params, node = AllocNode(pool=PoolProps(type=1, location=Location(1, 0)), size=100 * MIB), c_void_p()
    expect(cu.cuGraphAddMemAllocNode(byref(node), graph, None, 0, byref(params)))
exec = instantiate(graph)
result = [cu.cuGraphLaunch(exec, None), used() >> 20, try_alloc(256 * MIB)]
"""
    )
    answer = run(cuda_machine({"memory_bytes": "256MiB"}), code)
    assert answer[0] == 2
    assert answer[2] in (0, 2)


def test_a_graph_may_free_what_it_allocates_and_be_launched_again(cuda_machine: Callable[..., Any]) -> None:
    code = (
        ALLOC
        + """
graph, node, address = alloc_graph(10 * MIB)
free_node = c_void_p()
expect(cu.cuGraphAddMemFreeNode(byref(free_node), graph, byref(node), 1, address))
exec = instantiate(graph)
result = [cu.cuGraphLaunch(exec, None) for _ in range(3)] + [graph_memory(0), cu.cuMemFree_v2(address)]
graph, node, address = alloc_graph(10 * MIB)
exec = instantiate(graph, 1)  # what is left over is freed by the next launch
result += [cu.cuGraphLaunch(exec, None) for _ in range(3)] + [graph_memory(0)]
result += [cu.cuGraphExecDestroy(exec), cu.cuGraphDestroy(graph), graph_memory(0), cu.cuMemFree_v2(address),
        graph_memory(0)]
result += [cu.cuGraphClone(byref(c_void_p()), alloc_graph(1)[0])]
"""
    )
    assert run(cuda_machine(), code) == [0, 0, 0, 0, 1, 0, 0, 0, 10, 0, 0, 10, 0, 0, 801]


def test_capturing_records_instead_of_running(cuda_machine: Callable[..., Any]) -> None:
    code = """
own, side, mark, join = stream(1), stream(1), event(2), event(2)
function, graph, exec = kernel("spin_ms_10"), c_void_p(), c_void_p()
address, status, count = c_uint64(), c_int(), c_size_t()
target = alloc(16)
begin = time.monotonic()
expect(cu.cuStreamBeginCapture_v2(own, 0))
expect(launch(function, own))
expect(cu.cuEventRecord(mark, own))
expect(cu.cuStreamWaitEvent(side, mark, 0))  # the other stream joins
expect(launch(function, side))
expect(cu.cuMemsetD8Async(target, 7, 16, side))
expect(cu.cuStreamIsCapturing(side, byref(status)))
expect(cu.cuMemAllocAsync(byref(address), MIB, own))
expect(cu.cuMemFreeAsync(address, own))
expect(cu.cuEventRecord(join, side))
expect(cu.cuStreamWaitEvent(own, join, 0))
expect(cu.cuStreamEndCapture(own, byref(graph)))
quick = time.monotonic() - begin
back = ctypes.create_string_buffer(2)
expect(cu.cuMemcpyDtoH_v2(back, target, 2))
result = [quick < 0.01, status.value, back.raw.hex()]
expect(cu.cuGraphGetNodes(graph, None, byref(count)))
expect(cu.cuGraphInstantiateWithFlags(byref(exec), graph, 0))
begin = time.monotonic()
expect(cu.cuGraphLaunch(exec, own))
expect(cu.cuStreamSynchronize(own))
expect(cu.cuMemcpyDtoH_v2(back, target, 2))
result += [count.value, time.monotonic() - begin >= 0.02, back.raw.hex()]
"""
    assert run(cuda_machine(), code) == [True, 1, "0000", 5, True, "0707"]


def test_what_a_capture_refuses(cuda_machine: Callable[..., Any]) -> None:
    code = """
own, graph, other, function = stream(), c_void_p(), stream(1), kernel("x")
def broken(call, mode=0):
    expect(cu.cuStreamBeginCapture_v2(own, mode))
    code = call()
    return [code, cu.cuStreamEndCapture(own, byref(graph))]
address = alloc(16)
mark = event(2)
expect(cu.cuEventRecord(mark, other))
def unjoined():
    join = event(2)
    expect(cu.cuEventRecord(join, own))
    expect(cu.cuStreamWaitEvent(other, join, 0))
    return launch(function, other)
result = [broken(lambda: try_alloc(16)), broken(lambda: try_alloc(16), 2),
        broken(lambda: cu.cuStreamSynchronize(own), 2),
          broken(lambda: cu.cuStreamQuery(own), 2), broken(lambda: cu.cuMemsetD8_v2(address, 1, 16)),
          broken(lambda: cu.cuCtxSynchronize()), broken(lambda: cu.cuStreamWaitEvent(own, mark, 0)), broken(unjoined),
          cu.cuStreamBeginCapture_v2(None, 0), cu.cuStreamEndCapture(own, byref(graph)), launch(function, own),
          cu.cuStreamSynchronize(own)]
"""
    assert run(cuda_machine(), code) == [
        [900, 901],
        [0, 0],
        [900, 901],
        [900, 901],
        [900, 901],
        [900, 901],
        [905, 901],
        [0, 904],
        900,
        401,
        0,
        0,
    ]


def test_an_executable_graph_follows_another_of_its_shape(cuda_machine: Callable[..., Any]) -> None:
    code = """
def graph_of(*names):
    graph, node = c_void_p(), c_void_p()
    expect(cu.cuGraphCreate(byref(graph), 0))
    for i, name in enumerate(names):
        after = (c_void_p * 1)(node)
        expect(cu.cuGraphAddKernelNode_v2(byref(node), graph, after if i else None, min(i, 1),
                byref(kernel_params(kernel(name)))))
    return graph
exec, bad, why = c_void_p(), c_void_p(), c_int()
expect(cu.cuGraphInstantiateWithFlags(byref(exec), graph_of("a", "b"), 0))
library = ctypes.CDLL("libcuda.so.1")
result = [cu.cuGraphExecUpdate(exec, graph_of("spin_ms_5", "c"), byref(bad), byref(why)), why.value]
begin = time.monotonic()
expect(cu.cuGraphLaunch(exec, None))
expect(cu.cuCtxSynchronize())
result += [time.monotonic() - begin >= 0.005, cu.cuGraphExecUpdate(exec, graph_of("a"), byref(bad), byref(why)),
        why.value]
"""
    assert run(cuda_machine(), code) == [0, 0, True, 910, 2]


def test_b199_memory_grows_at_the_step_that_takes_it(cuda_machine: Callable[..., Any]) -> None:
    code = (
        ALLOC
        + """
own, graph, address = stream(1), c_void_p(), c_uint64()
seen = [used() >> 20]
expect(cu.cuStreamBeginCapture_v2(own, 2))
expect(cu.cuMemAllocAsync(byref(address), 600 * MIB, own))
expect(cu.cuStreamEndCapture(own, byref(graph)))
seen.append(used() >> 20)
exec = instantiate(graph)
seen.append(used() >> 20)
expect(cu.cuGraphLaunch(exec, own))
seen.append(used() >> 20)
result = seen
"""
    )
    assert run(cuda_machine(), code) == [0, 0, 0, 600]
