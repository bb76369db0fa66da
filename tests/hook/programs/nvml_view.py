# SPDX-License-Identifier: Apache-2.0
"""What test programs ask NVML about processes, through ctypes, with room and guard bytes of their own."""

from __future__ import annotations

import ctypes as c
import os

nvml = c.CDLL(os.environ.get("LIBNVML", "libnvidia-ml.so.1"))
GUARD = 0xA5


class V1(c.Structure):
    _fields_ = [("pid", c.c_uint), ("bytes", c.c_ulonglong)]


class V2(c.Structure):
    _fields_ = [("pid", c.c_uint), ("bytes", c.c_ulonglong), ("gi", c.c_uint), ("ci", c.c_uint)]


class Sample(c.Structure):
    _fields_ = [("pid", c.c_uint), ("time", c.c_ulonglong), *[(n, c.c_uint) for n in ("sm", "mem", "enc", "dec")]]


class Info(c.Structure):
    _fields_ = [("time", c.c_ulonglong), *[(n, c.c_uint) for n in ("pid", "sm", "mem", "enc", "dec", "jpg", "ofa")]]


class Infos(c.Structure):
    _fields_ = [("version", c.c_uint), ("count", c.c_uint), ("since", c.c_ulonglong), ("array", c.POINTER(Info))]


class Detail(c.Structure):
    _fields_ = [*V2._fields_, ("protected", c.c_ulonglong)]


class Details(c.Structure):
    _fields_ = [("version", c.c_uint), ("mode", c.c_uint), ("count", c.c_uint), ("array", c.POINTER(Detail))]


class Rates(c.Structure):
    _fields_ = [("gpu", c.c_uint), ("memory", c.c_uint)]


def version(struct: type[c.Structure], number: int = 1) -> int:
    return c.sizeof(struct) | number << 24


def device(uuid: str) -> c.c_void_p:
    assert nvml.nvmlInit_v2() == 0
    handle = c.c_void_p()
    assert nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), c.byref(handle)) == 0
    return handle


def ask(function: str, handle: c.c_void_p, room: int, entry: type[c.Structure] = V2) -> tuple[int, int, list, bool]:
    """Code, count, entries as (pid, bytes), and whether the bytes behind the room are as they were."""
    raw = (c.c_uint8 * (room * c.sizeof(entry) + 64))(*[GUARD] * (room * c.sizeof(entry) + 64))
    count = c.c_uint(room)
    code = getattr(nvml, function)(handle, c.byref(count), raw if room else None)
    entries = (entry * room).from_buffer(raw) if room else []
    seen = [(e.pid, e.bytes) for e in entries[: count.value]] if code == 0 else []
    return code, count.value, seen, all(b == GUARD for b in raw[room * c.sizeof(entry) :])


def rates(handle: c.c_void_p) -> tuple[int, int]:
    out = Rates()
    code = nvml.nvmlDeviceGetUtilizationRates(handle, c.byref(out))
    return code, out.gpu


def samples(handle: c.c_void_p, room: int = 64) -> tuple[int, dict[int, int]]:
    """Code, and pid → percent."""
    array, count = (Sample * room)(), c.c_uint(room)
    code = nvml.nvmlDeviceGetProcessUtilization(handle, array, c.byref(count), c.c_ulonglong(0))
    return code, {s.pid: s.sm for s in array[: count.value]} if code == 0 else {}


def infos(handle: c.c_void_p, room: int = 64) -> tuple[int, dict[int, int]]:
    array = (Info * room)()
    whole = Infos(version(Infos), room, 0, array)
    code = nvml.nvmlDeviceGetProcessesUtilizationInfo(handle, c.byref(whole))
    return code, {s.pid: s.sm for s in array[: whole.count]} if code == 0 else {}


def details(handle: c.c_void_p, mode: int = 0, room: int = 64, number: int = 1) -> tuple[int, int, list]:
    array = (Detail * room)()
    whole = Details(version(Details, number), mode, room, array)
    code = nvml.nvmlDeviceGetRunningProcessDetailList(handle, c.byref(whole))
    return code, whole.count, [(d.pid, d.bytes) for d in array[: whole.count]] if code == 0 else []
