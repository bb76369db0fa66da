# SPDX-License-Identifier: Apache-2.0
"""Finding the driver's functions: every name, version and flavour that NVIDIA's headers know."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PRELUDE = "from cuda_client import *\n"
WAYS = ("handle", "default", "next", "proc", "proc2")
SWEEP = """
import json as _json
library = ctypes.CDLL("libcuda.so.1")
table = _json.load(open(sys.argv[1]))["entry_points"]
driver = c_int()
expect(cu.cuDriverGetVersion(byref(driver)))
def address_of(symbol):
    return ctypes.cast(getattr(library, symbol), c_void_p).value
bad, asked = [], 0
second = hasattr(library, "cuGetProcAddress_v2")
names = sorted({row["name"] for row in table})
versions = sorted({row["version"] for row in table} | {11030, 12000, 12080, 13000})
for name in names:
    rows = [row for row in table if row["name"] == name and row["version"] <= driver.value]
    for version in versions:
        if version > driver.value:
            continue
        for flags in (0, 1, 2):
            fit = [row for row in rows if row["version"] <= version and (row["flavour"] == "legacy" or flags == 2)]
            twins = [row for row in fit if row["flavour"] != "legacy"]
            best = max(twins or fit, key=lambda row: row["version"], default=None)
            found, status = c_void_p(), c_int(-1)
            asked += 1
            wanted = (0, address_of(best["symbol"]), 0) if best else (0, None, 2 if rows else 1)
            if second:
                code = cu.cuGetProcAddress_v2(name.encode(), byref(found), version, flags, byref(status))
                if (code, found.value, status.value) != wanted:
                    bad.append([name, version, flags, code, status.value, best and best["symbol"]])
            old = c_void_p()
            code = cu.cuGetProcAddress(name.encode(), byref(old), version, flags)
            if (code, old.value) != ((0, wanted[1]) if best else (500, None)):
                bad.append([name, version, flags, code, "v1"])
result = [bad[:20], asked]
"""


@pytest.mark.parametrize("flavour", ["470", "525", "550", "580"])
def test_every_name_version_and_flavour(cuda_machine: Callable[..., Any], build_dir: Path, flavour: str) -> None:
    bad, asked = cuda_machine(flavour=flavour).python(PRELUDE + SWEEP, str(build_dir / "symbols.json"))
    assert bad == []
    assert asked > 20_000


def test_b181_odd_questions(cuda_machine: Callable[..., Any]) -> None:
    code = """
found, status = c_void_p(7), c_int(-1)
result = [cu.cuGetProcAddress_v2(b"cuNoSuchThing", byref(found), 12000, 0, byref(status)), status.value, found.value,
          cu.cuGetProcAddress_v2(b"cuNoSuchThing", byref(found), 12000, 0, None),
          cu.cuGetProcAddress(b"cuNoSuchThing", byref(found), 12000, 0),
          cu.cuGetProcAddress_v2(b"cuMemAlloc_v2", byref(found), 12000, 0, byref(status)), status.value,
          cu.cuGetProcAddress_v2(None, byref(found), 12000, 0, None), cu.cuGetProcAddress_v2(b"cuInit", None,
                  12000, 0, None),
          cu.cuGetProcAddress_v2(b"cuInit", byref(found), 12000, 3, None), cu.cuGetProcAddress_v2(b"cuInit",
                  byref(found), 12000, 8, None),
          cu.cuGetProcAddress_v2(b"", byref(found), 12000, 0, byref(status)), status.value]
"""
    assert cuda_machine().python(PRELUDE + code) == [0, 1, None, 0, 500, 0, 1, 1, 1, 1, 1, 0, 1]


def test_there_are_no_export_tables(cuda_machine: Callable[..., Any]) -> None:
    code = "table = c_void_p(5)\nresult = [cu.cuGetExportTable(byref(table), b'0' * 16), table.value]"
    assert cuda_machine().python(PRELUDE + code) == [500, None]


def test_what_nobody_implemented_is_not_supported(cuda_machine: Callable[..., Any]) -> None:
    code = """
library = ctypes.CDLL('libcuda.so.1')
start()
result = [library.cuCheckpointProcessLock(1, None), library.cuTexRefCreate(None)]
"""
    assert cuda_machine().python(PRELUDE + code) == [801, 801]


@pytest.mark.parametrize("way", [*WAYS, "link"])
def test_a_c_program_allocates_by_every_way_of_finding_symbols(cuda_machine: Callable[..., Any], way: str) -> None:
    machine = cuda_machine({"memory_bytes": "1GiB"})
    program = "cuda-probe-linked" if way == "link" else "cuda-probe"
    steps = [
        "alloc:512M",
        "getinfo",
        "copy:0",
        "alloc:600M",
        "alloc:64M:vmm",
        "alloc:1M:async",
        "spin:10:5",
        "sync",
        "free:0",
    ]
    out = machine.tool(program, "--way", way, *steps).stdout
    lines = [json.loads(line) for line in out.splitlines()]
    assert lines[0] == {"op": "init", "way": way, "code": 0}
    assert [line["code"] for line in lines] == [0, 0, 0, 0, 2, 0, 0, 0, 0, 0]
    assert (lines[2]["free"], lines[2]["total"]) == (512 << 20, 1 << 30)
    assert lines[3]["same"]


def test_a_ctypes_program_allocates_by_every_way_of_finding_symbols(cuda_machine: Callable[..., Any]) -> None:
    code = """
import ctypes.util
library = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
libc = ctypes.CDLL(None)
libc.dlsym.restype, libc.dlsym.argtypes = c_void_p, (c_void_p, c_char_p)
SIGNATURE = ctypes.CFUNCTYPE(c_int, U64P, c_size_t)
def by_proc(function):
    found = c_void_p()
    expect(function(b"cuMemAlloc", byref(found), 12000, 0, *((None,) if function is cu.cuGetProcAddress_v2 else ())))
    return found.value
ways = {"attribute": ctypes.cast(library.cuMemAlloc_v2, c_void_p).value, "handle": libc.dlsym(library._handle,
        b"cuMemAlloc_v2"),
        "default": libc.dlsym(None, b"cuMemAlloc_v2"), "next": libc.dlsym(2**64 - 1, b"cuMemAlloc_v2"),
        "proc": by_proc(cu.cuGetProcAddress), "proc2": by_proc(cu.cuGetProcAddress_v2)}
start()
result = {}
for way, address in ways.items():
    if address:
        before = used()
        result[way] = [SIGNATURE(address)(byref(c_uint64()), 4096), used() - before]
"""
    found = cuda_machine().python(PRELUDE + code)
    assert {"attribute", "handle", "default", "proc", "proc2"} <= set(found)
    assert all(answer == [0, 4096] for answer in found.values())


def test_b183_a_driver_without_a_function(cuda_machine: Callable[..., Any]) -> None:
    """One that an older driver lacks is not there by name either, and everything else works."""
    code = """
library = ctypes.CDLL('libcuda.so.1')
start()
result = [hasattr(library, 'cuLibraryLoadData'), hasattr(library, 'cuMemAllocAsync'), try_alloc(1)]
"""
    assert cuda_machine(flavour="470").python(PRELUDE + code) == [False, True, 0]
    assert cuda_machine().python(PRELUDE + code) == [True, True, 0]


def test_functions_of_images(cuda_machine: Callable[..., Any]) -> None:
    """Any image is taken; one that is PTX has what it defines and nothing else."""
    code = """
start()
def find(image, name):
    module, function = c_void_p(), c_void_p()
    expect(cu.cuModuleLoadData(byref(module), image))
    return cu.cuModuleGetFunction(byref(function), module, name)
ptx = b"//\\n.version 8.0\\n.target sm_80\\n.visible .entry alpha(.param .u64 x)\\n{ ret; }\\n"
result = [find(b"\\x7fELF", b"anything"), find(ptx, b"alpha"), find(ptx, b"alph"), find(ptx, b"beta"), find(ptx, b"")]
"""
    assert cuda_machine().python(PRELUDE + code) == [0, 0, 500, 500, 500]
