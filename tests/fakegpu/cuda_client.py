# SPDX-License-Identifier: Apache-2.0
"""The driver API for programs that tests start: ctypes, nothing in between.

Every call goes through `cu`, with its C types, and answers with the driver's code; helpers name what they expect.
Imported by programs (the fixture `cuda_machine` puts this folder on their path), never by pytest.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

U64P, SIZEP, VOIDP, INTP, UINTP = (
    POINTER(c_uint64),
    POINTER(c_size_t),
    POINTER(c_void_p),
    POINTER(c_int),
    POINTER(c_uint),
)
MIB = 1 << 20
GIB = 1 << 30


class Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class Prop(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class PoolProps(ctypes.Structure):
    """CUmemPoolProps."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("max_size", c_size_t),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 54),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


class ArrayDescriptor(ctypes.Structure):
    """CUDA_ARRAY_DESCRIPTOR."""

    _fields_ = (("width", c_size_t), ("height", c_size_t), ("format", c_int), ("channels", c_uint))


class Array3DDescriptor(ctypes.Structure):
    """CUDA_ARRAY3D_DESCRIPTOR."""

    _fields_ = (
        ("width", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
        ("format", c_int),
        ("channels", c_uint),
        ("flags", c_uint),
    )


class KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS."""

    _fields_ = (
        ("func", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("params", c_void_p),
        ("extra", c_void_p),
        ("kern", c_void_p),
        ("ctx", c_void_p),
    )


class AllocNode(ctypes.Structure):
    """CUDA_MEM_ALLOC_NODE_PARAMS."""

    _fields_ = (
        ("pool", PoolProps),
        ("access", c_void_p),
        ("access_count", c_size_t),
        ("size", c_size_t),
        ("address", c_uint64),
    )


class IpcHandle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * 64),)


_TYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (INTP,),
    "cuDeviceGetCount": (INTP,),
    "cuDeviceGet": (INTP, c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetUuid": (c_void_p, c_int),
    "cuDeviceGetUuid_v2": (c_void_p, c_int),
    "cuDeviceGetAttribute": (INTP, c_int, c_int),
    "cuDeviceTotalMem": (UINTP, c_int),
    "cuDeviceTotalMem_v2": (SIZEP, c_int),
    "cuDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "cuDeviceGetByPCIBusId": (INTP, c_char_p),
    "cuDeviceCanAccessPeer": (INTP, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (VOIDP, c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuDevicePrimaryCtxReset_v2": (c_int,),
    "cuDevicePrimaryCtxGetState": (c_int, UINTP, INTP),
    "cuCtxCreate": (VOIDP, c_uint, c_int),
    "cuCtxCreate_v2": (VOIDP, c_uint, c_int),
    "cuCtxCreate_v3": (VOIDP, c_void_p, c_int, c_uint, c_int),
    "cuCtxCreate_v4": (VOIDP, c_void_p, c_uint, c_int),
    "cuCtxDestroy_v2": (c_void_p,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxGetCurrent": (VOIDP,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (VOIDP,),
    "cuCtxGetDevice": (INTP,),
    "cuCtxGetApiVersion": (c_void_p, UINTP),
    "cuCtxSynchronize": (),
    "cuMemAlloc": (UINTP, c_uint),
    "cuMemAlloc_v2": (U64P, c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemAllocPitch_v2": (U64P, SIZEP, c_size_t, c_size_t, c_uint),
    "cuMemAllocManaged": (U64P, c_size_t, c_uint),
    "cuMemPrefetchAsync": (c_uint64, c_size_t, c_int, c_void_p),
    "cuMemGetInfo_v2": (SIZEP, SIZEP),
    "cuMemGetInfo": (UINTP, UINTP),
    "cuMemGetAddressRange_v2": (U64P, SIZEP, c_uint64),
    "cuMemHostAlloc": (VOIDP, c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemcpy": (c_uint64, c_uint64, c_size_t),
    "cuMemcpyHtoD_v2": (c_uint64, c_void_p, c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
    "cuMemcpyDtoD_v2": (c_uint64, c_uint64, c_size_t),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemsetD8_v2": (c_uint64, ctypes.c_ubyte, c_size_t),
    "cuMemsetD8Async": (c_uint64, ctypes.c_ubyte, c_size_t, c_void_p),
    "cuMemsetD32_v2": (c_uint64, c_uint, c_size_t),
    "cuMemAllocAsync": (U64P, c_size_t, c_void_p),
    "cuMemFreeAsync": (c_uint64, c_void_p),
    "cuMemAllocFromPoolAsync": (U64P, c_size_t, c_void_p, c_void_p),
    "cuMemPoolCreate": (VOIDP, POINTER(PoolProps)),
    "cuMemPoolDestroy": (c_void_p,),
    "cuMemPoolTrimTo": (c_void_p, c_size_t),
    "cuMemPoolGetAttribute": (c_void_p, c_int, c_void_p),
    "cuMemPoolSetAttribute": (c_void_p, c_int, c_void_p),
    "cuDeviceGetDefaultMemPool": (VOIDP, c_int),
    "cuMemCreate": (U64P, c_size_t, POINTER(Prop), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemAddressReserve": (U64P, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(Access), c_size_t),
    "cuMemRetainAllocationHandle": (U64P, c_void_p),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (U64P, c_void_p, c_int),
    "cuMemGetAllocationGranularity": (SIZEP, POINTER(Prop), c_int),
    "cuArrayCreate_v2": (VOIDP, POINTER(ArrayDescriptor)),
    "cuArray3DCreate_v2": (VOIDP, POINTER(Array3DDescriptor)),
    "cuArrayDestroy": (c_void_p,),
    "cuMipmappedArrayCreate": (VOIDP, POINTER(Array3DDescriptor), c_uint),
    "cuMipmappedArrayDestroy": (c_void_p,),
    "cuMemcpyHtoA_v2": (c_void_p, c_size_t, c_void_p, c_size_t),
    "cuMemcpyAtoH_v2": (c_void_p, c_void_p, c_size_t, c_size_t),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuIpcGetMemHandle": (POINTER(IpcHandle), c_uint64),
    "cuIpcOpenMemHandle_v2": (U64P, IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuModuleLoadData": (VOIDP, c_char_p),
    "cuModuleGetFunction": (VOIDP, c_void_p, c_char_p),
    "cuModuleGetGlobal_v2": (U64P, SIZEP, c_void_p, c_char_p),
    "cuModuleUnload": (c_void_p,),
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p, c_void_p),
    "cuLaunchCooperativeKernel": (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p),
    "cuLaunchHostFunc": (c_void_p, c_void_p, c_void_p),
    "cuStreamCreate": (VOIDP, c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamQuery": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, VOIDP),
    "cuStreamIsCapturing": (c_void_p, INTP),
    "cuEventCreate": (VOIDP, c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cuEventDestroy_v2": (c_void_p,),
    "cuGraphCreate": (VOIDP, c_uint),
    "cuGraphDestroy": (c_void_p,),
    "cuGraphAddKernelNode_v2": (VOIDP, c_void_p, VOIDP, c_size_t, POINTER(KernelParams)),
    "cuGraphAddMemAllocNode": (VOIDP, c_void_p, VOIDP, c_size_t, POINTER(AllocNode)),
    "cuGraphAddMemFreeNode": (VOIDP, c_void_p, VOIDP, c_size_t, c_uint64),
    "cuGraphGetNodes": (c_void_p, VOIDP, SIZEP),
    "cuGraphClone": (VOIDP, c_void_p),
    "cuGraphInstantiateWithFlags": (VOIDP, c_void_p, c_uint64),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphExecDestroy": (c_void_p,),
    "cuGraphExecUpdate": (c_void_p, c_void_p, VOIDP, INTP),
    "cuGraphExecKernelNodeSetParams_v2": (c_void_p, c_void_p, POINTER(KernelParams)),
    "cuDeviceGetGraphMemAttribute": (c_int, c_int, c_void_p),
    "cuDeviceGraphMemTrim": (c_int,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuGetProcAddress": (c_char_p, VOIDP, c_int, c_uint64),
    "cuGetProcAddress_v2": (c_char_p, VOIDP, c_int, c_uint64, INTP),
    "cuGetExportTable": (VOIDP, c_void_p),
    "cuGLInit": (),
}


class Driver:
    """libcuda.so.1, each function with its types."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        function.argtypes = _TYPES[name]
        function.restype = c_int
        setattr(self, name, function)
        return function


cu = Driver()


def start(device: int = 0) -> c_void_p:
    """cuInit and a context on a device, made current."""
    expect(cu.cuInit(0))
    context = c_void_p()
    expect(cu.cuCtxCreate_v2(byref(context), 0, device))
    return context


def expect(code: int, wanted: int = 0) -> None:
    """Stops the program unless the driver said what it should."""
    if code != wanted:
        raise AssertionError(f"the driver said {code}, not {wanted}")


def alloc(size: int) -> int:
    """cuMemAlloc that must succeed."""
    address = c_uint64()
    expect(cu.cuMemAlloc_v2(byref(address), size))
    return address.value


def try_alloc(size: int) -> int:
    """The code of cuMemAlloc; what it gives is freed at once."""
    address = c_uint64()
    code: int = cu.cuMemAlloc_v2(byref(address), size)
    if code == 0:
        expect(cu.cuMemFree_v2(address))
    return code


def info() -> tuple[int, int]:
    """(free, total) of the current device."""
    free, total = c_size_t(), c_size_t()
    expect(cu.cuMemGetInfo_v2(byref(free), byref(total)))
    return free.value, total.value


def used() -> int:
    """Bytes in use on the current device, by everybody."""
    free, total = info()
    return total - free


def attribute(which: int, device: int = 0) -> int:
    """A device attribute."""
    value = c_int()
    expect(cu.cuDeviceGetAttribute(byref(value), which, device))
    return value.value


def kernel(name: str) -> c_void_p:
    """A function of that name."""
    module, function = c_void_p(), c_void_p()
    expect(cu.cuModuleLoadData(byref(module), b"image"))
    expect(cu.cuModuleGetFunction(byref(function), module, name.encode()))
    return function


def launch(function: c_void_p, stream: c_void_p | None = None) -> int:
    """One block of one thread."""
    code: int = cu.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, None, None)
    return code


def stream(flags: int = 0) -> c_void_p:
    """A stream."""
    made = c_void_p()
    expect(cu.cuStreamCreate(byref(made), flags))
    return made


def event(flags: int = 0) -> c_void_p:
    """An event."""
    made = c_void_p()
    expect(cu.cuEventCreate(byref(made), flags))
    return made


def elapsed(begin: c_void_p, end: c_void_p) -> float:
    """Milliseconds between two events that are done."""
    value = c_float()
    expect(cu.cuEventElapsedTime(byref(value), begin, end))
    return value.value


def device_prop(device: int = 0, *, shareable: bool = False, location: int = 1) -> Prop:
    """The properties of memory on a device (location 1), or of the host (2, 3)."""
    prop = Prop(type=1, handle_types=int(shareable))
    prop.location.type, prop.location.id = location, device
    return prop


def create(size: int, prop: Prop | None = None) -> int:
    """cuMemCreate that must succeed."""
    handle = c_uint64()
    expect(cu.cuMemCreate(byref(handle), size, byref(prop or device_prop()), 0))
    return handle.value


def kernel_params(function: c_void_p) -> KernelParams:
    """Of a kernel node, one block of one thread."""
    return KernelParams(func=function, grid=(1, 1, 1), block=(1, 1, 1))
