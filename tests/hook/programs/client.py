# SPDX-License-Identifier: Apache-2.0
"""What test programs say to the driver, through ctypes (dlopen and dlsym, the way pynvml and frameworks go)."""

from __future__ import annotations

import ctypes as c
import json
import os
import sys

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10
cuda = c.CDLL(os.environ.get("LIBCUDA", "libcuda.so.1"))


def call(name: str, *arguments: object) -> int:
    return int(getattr(cuda, name)(*arguments))


def init() -> int:
    return call("cuInit", 0)


def context(device: int = 0) -> c.c_void_p:
    """A new context, current in this thread."""
    out = c.c_void_p()
    rc = call("cuCtxCreate_v2", c.byref(out), 0, device)
    if rc:
        raise RuntimeError(f"cuCtxCreate: {rc}")
    return out


def start(device: int = 0) -> c.c_void_p:
    rc = init()
    if rc:
        raise RuntimeError(f"cuInit: {rc}")
    return context(device)


def alloc(size: int) -> tuple[int, int]:
    out = c.c_uint64()
    rc = call("cuMemAlloc_v2", c.byref(out), c.c_size_t(size))
    return rc, out.value


def free(address: int) -> int:
    return call("cuMemFree_v2", c.c_uint64(address))


def info() -> tuple[int, int]:
    """Free and total as cuMemGetInfo says."""
    a, b = c.c_size_t(), c.c_size_t()
    rc = call("cuMemGetInfo_v2", c.byref(a), c.byref(b))
    if rc:
        raise RuntimeError(f"cuMemGetInfo: {rc}")
    return a.value, b.value


def used() -> int:
    a, b = info()
    return b - a


def total(device: int = 0) -> int:
    out = c.c_size_t()
    rc = call("cuDeviceTotalMem_v2", c.byref(out), device)
    if rc:
        raise RuntimeError(f"cuDeviceTotalMem: {rc}")
    return out.value


def fill(step: int) -> int:
    """Allocates `step` bytes at a time until refused; how often that went well."""
    n = 0
    while alloc(step)[0] == 0:
        n += 1
    return n


def say(**values: object) -> None:
    """One line of JSON for the test."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def wait() -> str:
    """A line from the test: where the two have to take turns."""
    return sys.stdin.readline().strip()
