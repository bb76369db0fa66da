# SPDX-License-Identifier: Apache-2.0
"""What the built library looks like from outside: its exports, its needs, its size. And what the generator refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBC = ["dlopen", "dlsym", "dlvsym", "sigaction", "signal"]
PRODUCTS = ["libvgpu.so", "libvgpu-strict.so"]


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def hooked() -> list[str]:
    """The symbols of the hooked classes, out of the class file and the headers alone."""
    sections: dict[str, list[str]] = {}
    for line in (ROOT / "hook/symbols-class.txt").read_text().splitlines():
        for word in line.split("#")[0].split():
            if word.endswith(":"):
                current = sections.setdefault(word[:-1], [])
            else:
                current.append(word)
    bases = {
        b
        for c in ("entry", "context", "allocate", "free", "track", "query", "launch", "process")
        for b in sections.get(c, [])
    }
    functions = json.loads((ROOT / "build/symbols.json").read_text())["functions"]
    return sorted(s for s, row in functions.items() if row["base"] in bases)


@pytest.mark.parametrize("product", PRODUCTS)
def test_exports_are_the_list_and_nothing_else(hook_builds, product):
    lines = output("nm", "-D", "--defined-only", str(hook_builds / product)).splitlines()
    names = sorted({line.split()[2].split("@")[0] for line in lines if line.split()[1] != "A"})
    assert names == sorted([*LIBC, *hooked()])


@pytest.mark.parametrize("product", PRODUCTS)
def test_b180_needs_only_an_old_libc(hook_builds, product):
    undefined = output("nm", "-D", "--undefined-only", str(hook_builds / product))
    versions = {tuple(map(int, v.split("."))) for v in re.findall(r"@+GLIBC_([\d.]+)", undefined)}
    assert versions
    assert max(versions) <= (2, 17)
    assert "PRIVATE" not in undefined
    dynamic = output("readelf", "-dW", str(hook_builds / product))
    assert re.findall(r"NEEDED.*\[(.*)\]", dynamic) == ["libc.so.6"]
    assert "INIT" not in dynamic, "a constructor runs in every process of the container"
    assert "TEXTREL" not in dynamic


@pytest.mark.parametrize("product", PRODUCTS)
def test_is_small(hook_builds, product):
    assert (hook_builds / product).stat().st_size <= 100 * 1024


def test_thread_storage_is_not_used(hook_builds):
    """A preloaded library's static thread storage comes out of a small reserve."""
    assert "TLS" not in output("readelf", "-lW", str(hook_builds / "libvgpu-strict.so"))


def generate(tmp_path: Path, functions: dict, classes: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "s.json").write_text(json.dumps({"functions": functions}))
    (tmp_path / "c.txt").write_text(classes)
    return subprocess.run(
        [
            sys.executable,
            str(ROOT / "hook/gen"),
            str(tmp_path / "s.json"),
            str(tmp_path / "c.txt"),
            str(tmp_path / "o"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    "name", ["cuMemAllocSideways", "cuLaunchRocket", "cuPoolCreate", "nvmlDeviceGetMemoryInfoFast"]
)
def test_new_name_that_looks_like_a_door_fails_the_build(tmp_path, name):
    functions = json.loads((ROOT / "build/symbols.json").read_text())["functions"]
    classes = (ROOT / "hook/symbols-class.txt").read_text()
    assert generate(tmp_path, functions, classes).returncode == 0
    functions[name] = functions["cuMemAlloc"] | {"base": name}
    result = generate(tmp_path, functions, classes)
    assert result.returncode == 1
    assert name in result.stderr


def test_new_version_of_a_hooked_name_asks_for_a_wrapper(tmp_path):
    functions = json.loads((ROOT / "build/symbols.json").read_text())["functions"]
    functions["cuMemAlloc_v3"] = functions["cuMemAlloc_v2"] | {"number": 3}
    assert generate(tmp_path, functions, (ROOT / "hook/symbols-class.txt").read_text()).returncode == 0
    assert "hook_cuMemAlloc_v3" in (tmp_path / "o/wrappers.S").read_text()


def test_harmless_new_name_passes(tmp_path):
    functions = json.loads((ROOT / "build/symbols.json").read_text())["functions"]
    functions["cuDeviceGetMood"] = functions["cuDeviceGetName"] | {"base": "cuDeviceGetMood"}
    assert generate(tmp_path, functions, (ROOT / "hook/symbols-class.txt").read_text()).returncode == 0


@pytest.mark.parametrize(
    ("classes", "says"),
    [
        ("cuMemAlloc\n", "before the first section"),
        ("suspect: X\npass: cuNoSuchName\n", "no header declares"),
        ("suspect: X\npass: cuInit\nentry: cuInit\n", "stands in pass and in entry"),
        ("entry: cuInit\n", "no section `suspect:`"),
    ],
)
def test_class_file_that_does_not_fit_is_named(tmp_path, classes, says):
    functions = json.loads((ROOT / "build/symbols.json").read_text())["functions"]
    result = generate(tmp_path, functions, classes)
    assert result.returncode == 1
    assert says in result.stderr


ABI = """
#define __CUDA_API_VERSION_INTERNAL
#include <stddef.h>
#include "cuda.h"
#include "nvml.h"
#include <stdio.h>
#define S(t) printf("size " #t " %zu\\n", sizeof(t))
#define O(t, f) printf("at " #t "." #f " %zu\\n", offsetof(t, f))
int main(void)
{
LIST
return 0; }
"""

TYPES = {
    "CUmemLocation": ["type", "id"],
    "CUmemAllocationProp": ["type", "requestedHandleTypes", "location", "win32HandleMetaData", "allocFlags"],
    "CUmemPoolProps": ["allocType", "handleTypes", "location", "win32SecurityAttributes", "maxSize"],
    "CUDA_ARRAY_DESCRIPTOR_v1": ["Width", "Height", "Format", "NumChannels"],
    "CUDA_ARRAY_DESCRIPTOR": ["Width", "Height", "Format", "NumChannels"],
    "CUDA_ARRAY3D_DESCRIPTOR_v1": ["Width", "Height", "Depth", "Format", "NumChannels", "Flags"],
    "CUDA_ARRAY3D_DESCRIPTOR": ["Width", "Height", "Depth", "Format", "NumChannels", "Flags"],
    "CUDA_ARRAY_MEMORY_REQUIREMENTS": ["size", "alignment"],
    "CUDA_MEM_ALLOC_NODE_PARAMS": ["poolProps", "accessDescs", "accessDescCount", "bytesize", "dptr"],
    "CUDA_GRAPH_INSTANTIATE_PARAMS": ["flags", "hUploadStream", "hErrNode_out", "result_out"],
    "CUlaunchConfig": ["gridDimX", "blockDimX", "sharedMemBytes", "hStream", "attrs", "numAttrs"],
    "CUDA_LAUNCH_PARAMS": ["function", "gridDimX", "blockDimX", "sharedMemBytes", "hStream", "kernelParams"],
    "CUuuid": ["bytes"],
    "nvmlMemory_t": ["total", "free", "used"],
    "nvmlMemory_v2_t": ["version", "total", "reserved", "free", "used"],
    "nvmlUtilization_t": ["gpu", "memory"],
    "nvmlProcessInfo_v1_t": ["pid", "usedGpuMemory"],
    "nvmlProcessInfo_v2_t": ["pid", "usedGpuMemory", "gpuInstanceId", "computeInstanceId"],
}


@pytest.mark.parametrize("major", [12, 13])
def test_our_types_are_the_drivers(tmp_path, major):
    lines = "\n".join(f"S({t}); " + " ".join(f"O({t}, {f});" for f in fields) for t, fields in TYPES.items())
    texts = []
    for folder, header in ((ROOT / "build/headers" / str(major), None), (ROOT / "hook/src", "driver.h")):
        text = ABI.replace("LIST", lines)
        if header:
            text = text.replace('#include "cuda.h"\n#include "nvml.h"', f'#include "{header}"')
        source = tmp_path / f"abi{len(texts)}.c"
        source.write_text(text)
        output("gcc", "-w", f"-I{folder}", "-o", str(source.with_suffix("")), str(source))
        texts.append(output(str(source.with_suffix(""))))
    assert texts[0] == texts[1]
