# SPDX-License-Identifier: Apache-2.0
"""Kernels, streams, captures and graphs, as test programs use them."""

from __future__ import annotations

import ctypes as c
import time
from collections.abc import Callable

from client import call


class KernelNode(c.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("func", c.c_void_p),
        *[(n, c.c_uint) for n in ("gx", "gy", "gz", "bx", "by", "bz", "shared")],
        *[(n, c.c_void_p) for n in ("params", "extra", "kern", "ctx")],
    ]


def check(rc: int) -> None:
    if rc:
        raise RuntimeError(f"code {rc}")


def function(name: str) -> c.c_void_p:
    module, out = c.c_void_p(), c.c_void_p()
    check(call("cuModuleLoadData", c.byref(module), b"limited"))
    check(call("cuModuleGetFunction", c.byref(out), module, name.encode()))
    return out


def stream() -> c.c_void_p:
    out = c.c_void_p()
    check(call("cuStreamCreate", c.byref(out), 1))
    return out


def launch(f: c.c_void_p, on: c.c_void_p | None = None) -> None:
    check(call("cuLaunchKernel", f, 1, 1, 1, 1, 1, 1, 0, on, None, None))


def synchronize() -> None:
    check(call("cuCtxSynchronize"))


def timed(work: Callable[[], object]) -> float:
    """Seconds that it took."""
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


def busy(work: Callable[[], object], microseconds: int, seconds: float, _f: object = None) -> float:
    """Percent of the time that the card was ours, launching as fast as it goes."""
    count, begin = 0, time.monotonic()
    while time.monotonic() - begin < seconds:
        work()
        count += 1
    synchronize()
    return 100 * count * microseconds / 1e6 / (time.monotonic() - begin)


def begin_capture(s: c.c_void_p, mode: int) -> None:
    check(call("cuStreamBeginCapture_v2", s, mode))


def end_capture(s: c.c_void_p) -> tuple[int, int]:
    """Code, and the number of nodes."""
    out, count = c.c_void_p(), c.c_size_t()
    rc = call("cuStreamEndCapture", s, c.byref(out))
    if rc == 0:
        check(call("cuGraphGetNodes", out, None, c.byref(count)))
    return rc, count.value


def graph(f: c.c_void_p, kernels: int, s: c.c_void_p) -> tuple[c.c_void_p, list[c.c_void_p]]:
    """An executable graph of so many kernels one after the other, and its nodes."""
    begin_capture(s, 0)
    for _ in range(kernels):
        launch(f, s)
    made, out, count = c.c_void_p(), c.c_void_p(), c.c_size_t(kernels)
    check(call("cuStreamEndCapture", s, c.byref(made)))
    nodes = (c.c_void_p * kernels)()
    check(call("cuGraphGetNodes", made, nodes, c.byref(count)))
    check(call("cuGraphInstantiateWithFlags", c.byref(out), made, c.c_ulonglong(0)))
    return out, [c.c_void_p(n) for n in nodes]


def replay(made: c.c_void_p, s: c.c_void_p) -> None:
    check(call("cuGraphLaunch", made, s))


def change(made: c.c_void_p, node: c.c_void_p, f: c.c_void_p) -> int:
    """Makes a node of the executable graph run another kernel."""
    params = KernelNode(f, 1, 1, 1, 1, 1, 1, 0, None, None, None, None)
    return call("cuGraphExecKernelNodeSetParams_v2", made, node, c.byref(params))
