# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002, F403, F405, RUF012
"""Every kind of memory, as test programs ask for it; `from memory import *` brings `client` along."""

from __future__ import annotations

import threading
from ctypes import *

from client import *

OOM = 2


def alloc_async(size, stream=0):
    out = c_uint64()
    return call("cuMemAllocAsync", byref(out), c_size_t(size), c_void_p(stream)), out.value


def free_async(address, stream=0):
    return call("cuMemFreeAsync", c_uint64(address), c_void_p(stream))


def sync():
    return call("cuCtxSynchronize")


class Location(Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class PoolProps(Structure):
    _fields_ = [
        ("alloc", c_int),
        ("handles", c_int),
        ("location", Location),
        ("win", c_void_p),
        ("max", c_size_t),
        ("rest", c_ubyte * 56),
    ]


class Prop(Structure):
    _fields_ = [("type", c_int), ("handles", c_int), ("location", Location), ("win", c_void_p), ("flags", c_ubyte * 8)]


def pool(device=0):
    out = c_void_p()
    rc = call("cuMemPoolCreate", byref(out), byref(PoolProps(1, 0, Location(1, device))))
    assert rc == 0, rc
    return out.value


def alloc_pool(size, pool, stream=0):
    out = c_uint64()
    return call("cuMemAllocFromPoolAsync", byref(out), c_size_t(size), c_void_p(pool), c_void_p(stream)), out.value


def default_pool(device=0):
    out = c_void_p()
    assert call("cuDeviceGetDefaultMemPool", byref(out), device) == 0
    return out.value


def trim(pool, keep=0):
    return call("cuMemPoolTrimTo", c_void_p(pool), c_size_t(keep))


def threshold(pool, value):
    return call("cuMemPoolSetAttribute", c_void_p(pool), 4, byref(c_uint64(value)))


def managed(size):
    out = c_uint64()
    return call("cuMemAllocManaged", byref(out), c_size_t(size), 1), out.value


def pitch(width, height, element=4):
    out, p = c_uint64(), c_size_t()
    rc = call("cuMemAllocPitch_v2", byref(out), byref(p), c_size_t(width), c_size_t(height), element)
    return rc, out.value, p.value


def create(size, device=0, kind=1):
    out = c_uint64()
    prop = Prop(1, 0, Location(kind, device))
    return call("cuMemCreate", byref(out), c_size_t(size), byref(prop), c_ulonglong(0)), out.value


def release(handle):
    return call("cuMemRelease", c_uint64(handle))


def reserve(size):
    out = c_uint64()
    assert call("cuMemAddressReserve", byref(out), c_size_t(size), c_size_t(0), c_uint64(0), c_ulonglong(0)) == 0
    return out.value


def mapped(address, size, handle):
    return call("cuMemMap", c_uint64(address), c_size_t(size), c_size_t(0), c_uint64(handle), c_ulonglong(0))


def unmap(address, size):
    return call("cuMemUnmap", c_uint64(address), c_size_t(size))


class Array3D(Structure):
    _fields_ = [
        ("w", c_size_t),
        ("h", c_size_t),
        ("d", c_size_t),
        ("format", c_int),
        ("channels", c_uint),
        ("flags", c_uint),
    ]


class Array2D(Structure):
    _fields_ = [("w", c_size_t), ("h", c_size_t), ("format", c_int), ("channels", c_uint)]


def array(w, h, d=0, format=0x20, channels=1, flags=0):
    out = c_void_p()
    return call("cuArray3DCreate_v2", byref(out), byref(Array3D(w, h, d, format, channels, flags))), out


def array2d(w, h, format=0x20, channels=1):
    out = c_void_p()
    return call("cuArrayCreate_v2", byref(out), byref(Array2D(w, h, format, channels))), out


def mipmap(w, h, levels, d=0):
    out = c_void_p()
    return call("cuMipmappedArrayCreate", byref(out), byref(Array3D(w, h, d, 0x20, 1, 0)), levels), out


def thread(function):
    out = []
    t = threading.Thread(target=lambda: out.append(function()))
    t.start()
    t.join()
    return out[0]


class NvmlMemory(Structure):
    _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]


class NvmlMemory2(Structure):
    _fields_ = [
        ("version", c_uint),
        ("total", c_ulonglong),
        ("reserved", c_ulonglong),
        ("free", c_ulonglong),
        ("used", c_ulonglong),
    ]


NVML = []


def nvml(index=0):
    if not NVML:
        NVML.append(CDLL("libnvidia-ml.so.1"))
        assert NVML[0].nvmlInit_v2() == 0
    device, memory = c_void_p(), NvmlMemory()
    assert NVML[0].nvmlDeviceGetHandleByIndex_v2(index, byref(device)) == 0
    assert NVML[0].nvmlDeviceGetMemoryInfo(device, byref(memory)) == 0
    return memory.total, memory.free, memory.used


class AllocNode(Structure):
    """CUDA_MEM_ALLOC_NODE_PARAMS."""

    _fields_ = [
        ("pool", PoolProps),
        ("access", c_void_p),
        ("count", c_size_t),
        ("size", c_size_t),
        ("address", c_uint64),
    ]


def graph() -> c_void_p:
    out = c_void_p()
    assert call("cuGraphCreate", byref(out), 0) == 0
    return out


def alloc_node(g, size: int, device: int = 0, after: tuple = ()):
    """A node that allocates; (node, address)."""
    node, params = c_void_p(), AllocNode(PoolProps(1, 0, Location(1, device)), None, 0, size, 0)
    list_of = (c_void_p * max(1, len(after)))(*after)
    rc = call("cuGraphAddMemAllocNode", byref(node), g, list_of, c_size_t(len(after)), byref(params))
    assert rc == 0, rc
    return node, params.address


def free_node(g, address: int, after: tuple = ()):
    node = c_void_p()
    list_of = (c_void_p * max(1, len(after)))(*after)
    rc = call("cuGraphAddMemFreeNode", byref(node), g, list_of, c_size_t(len(after)), c_uint64(address))
    assert rc == 0, rc
    return node


def instantiate(g, flags: int = 0) -> c_void_p:
    out = c_void_p()
    rc = call("cuGraphInstantiateWithFlags", byref(out), g, c_ulonglong(flags))
    assert rc == 0, rc
    return out


def launch(exec_) -> int:
    return call("cuGraphLaunch", exec_, None)


def upload(exec_) -> int:
    return call("cuGraphUpload", exec_, None)


def stream() -> c_void_p:
    out = c_void_p()
    assert call("cuStreamCreate", byref(out), 1) == 0
    return out


def trim_graphs(device: int = 0) -> int:
    return call("cuDeviceGraphMemTrim", device)
