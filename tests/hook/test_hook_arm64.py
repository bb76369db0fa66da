# SPDX-License-Identifier: Apache-2.0
"""The hook for arm64: built by a cross compiler, run under qemu over the smallest driver."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
STUB = "GPU-" + "-".join(["aa" * 4, "aa" * 2, "aa" * 2, "aa" * 2, "aa" * 6])
MIB = 1 << 20
CC = "aarch64-linux-gnu-gcc"
QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")

pytestmark = pytest.mark.skipif(
    not (shutil.which(CC) and QEMU),
    reason="apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static",
)


@pytest.fixture(scope="module")
def built(hook_builds):
    command = ["make", "-s", "-j2", "-f", "hook/build.mk", "arm64", f"PY={sys.executable}"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    return ROOT / "build" / "hook-arm64"


def test_shape(built):
    for name in ("libvgpu.so", "libvgpu-strict.so"):
        assert (built / name).stat().st_size <= 100 * 1024
        dynamic = subprocess.run(["readelf", "-dW", built / name], capture_output=True, text=True, check=True).stdout
        assert re.findall(r"NEEDED.*\[(.*)\]", dynamic) == ["libc.so.6"]
        assert "INIT" not in dynamic
        symbols = subprocess.run(
            ["readelf", "-W", "--dyn-syms", built / name], capture_output=True, text=True, check=True
        )
        needed = re.findall(r"UND \w+@GLIBC_([\d.]+)", symbols.stdout)
        assert set(needed) == {"2.17"}


WAYS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
int cuInit(unsigned); int cuCtxCreate_v2(void **, unsigned, int); int cuMemAlloc_v2(uint64_t *, size_t);
int cuMemFree_v2(uint64_t); int cuMemGetInfo_v2(size_t *, size_t *);
typedef int alloc(uint64_t *, size_t);
int main(void)
{
	void *context, *cuda; uint64_t p[2]; size_t f, t;
	alloc *by[7] = {cuMemAlloc_v2};
	int (*look)(const char *, void **, int, uint64_t, int *);
	if (cuInit(0) || cuCtxCreate_v2(&context, 0, 0)) return 1;
	cuda = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_DEEPBIND);
	by[1] = (alloc *)dlsym(RTLD_NEXT, "cuMemAlloc_v2");
	by[2] = (alloc *)dlsym(RTLD_DEFAULT, "cuMemAlloc_v2");
	by[3] = (alloc *)dlsym(dlopen(NULL, RTLD_LAZY), "cuMemAlloc_v2");
	by[4] = (alloc *)dlsym(cuda, "cuMemAlloc_v2");
	look = (int (*)(const char *, void **, int, uint64_t, int *))dlsym(cuda, "cuGetProcAddress_v2");
	if (look("cuMemAlloc", (void **)&by[5], 12000, 0, NULL)) return 2;
	if (dlsym(RTLD_NEXT, "printf") != (void *)printf && !dlsym(RTLD_NEXT, "printf")) return 3;
	if (dlvsym(RTLD_DEFAULT, "printf", "GLIBC_2.17") == NULL) return 4;
	for (int i = 0; i < 6; i++) {
		int first = by[i](&p[0], 60u << 20), second = by[i](&p[1], 60u << 20);
		cuMemGetInfo_v2(&f, &t);
		printf("{\\"rc\\": [%d, %d], \\"info\\": [%zu, %zu]}\\n", first, second, f, t);
		cuMemFree_v2(p[0]);
	}
	return 0;
}
"""


def test_every_way_under_qemu(built, make_box, compile_c, tmp_path):
    driver = tmp_path / "driver"
    driver.mkdir()
    flags = ["-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-Bsymbolic", "-Wl,-soname,libcuda.so.1"]
    stub = [CC, "-w", *flags, "-o", str(driver / "libcuda.so.1"), str(PROGRAMS / "driver_stub.c"), "-ldl"]
    subprocess.run(stub, check=True)
    source = tmp_path / "ways.c"
    source.write_text(WAYS)
    program = tmp_path / "ways"
    link = [f"-L{driver}", "-l:libcuda.so.1", "-Wl,--no-as-needed", "-ldl"]
    subprocess.run([CC, "-w", "-o", str(program), str(source), *link], check=True)
    box = make_box(driver)
    box.grant("g", STUB, 100 * MIB)
    box.install(built / "test" / "libvgpu-strict.so")

    def run(*more: str) -> list[dict]:
        command = [QEMU, "-L", "/usr/aarch64-linux-gnu", "-E", f"LD_LIBRARY_PATH={driver}", *more, str(program)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env={})
        assert (done.returncode, done.stderr) == (0, "")
        return [json.loads(line) for line in done.stdout.splitlines()]

    assert [line["rc"] for line in run()] == [[0, 0]] * 6
    assert run("-E", f"LD_PRELOAD={box.library}") == [{"rc": [0, 2], "info": [40 * MIB, 100 * MIB]}] * 6
