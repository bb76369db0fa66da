# SPDX-License-Identifier: Apache-2.0
"""How programs find the driver's functions with the hook in between: every way, over the smallest driver there is."""

from __future__ import annotations

import time

import pytest

STUB = "GPU-" + "-".join(["aa" * 4, "aa" * 2, "aa" * 2, "aa" * 2, "aa" * 6])
MIB = 1 << 20


@pytest.fixture
def limited(stub_box):
    stub_box.grant("g", STUB, 100 * MIB)
    return stub_box


def test_handle_lookup_is_limited(limited):
    result = limited.run("start()\nsay(first=alloc(60*MIB)[0], second=alloc(60*MIB)[0], total=total(), used=used())")
    assert result.last == {"first": 0, "second": 2, "total": 100 * MIB, "used": 60 * MIB}
    assert result.err == ""


def test_without_the_hook_the_stub_is_unlimited(limited):
    result = limited.run("start()\nsay(first=alloc(60*MIB)[0], second=alloc(60*MIB)[0])", hooked=False)
    assert result.last == {"first": 0, "second": 0}


WAYS = """
from ctypes import *
libdl = CDLL(None)
dlsym = libdl.dlsym
dlsym.restype, dlsym.argtypes = c_void_p, [c_void_p, c_char_p]
dlvsym = libdl.dlvsym
dlvsym.restype, dlvsym.argtypes = c_void_p, [c_void_p, c_char_p, c_char_p]
ALLOC = CFUNCTYPE(c_int, POINTER(c_uint64), c_size_t)
def twice(address):
    out = c_uint64()
    return [ALLOC(address)(byref(out), 60 * MIB) for _ in range(2)]
"""


@pytest.mark.parametrize("handle", ["cuda._handle", "CDLL(None)._handle"])
def test_dlsym_by_handle_again_and_again(limited, handle):
    code = (
        WAYS
        + f"""
CDLL("libcuda.so.1", RTLD_GLOBAL); start()
found = {{dlsym({handle}, b"cuMemAlloc_v2") for _ in range(100)}}
say(n=len(found), rc=twice(found.pop()))
"""
    )
    assert limited.run(code).last == {"n": 1, "rc": [0, 2]}


def test_dlvsym(limited):
    """The stub has no versions, so the driver's answer is none; the hook must not make one up."""
    code = WAYS + 'start(); say(found=dlvsym(cuda._handle, b"cuMemAlloc_v2", b"NOPE_1"))'
    assert limited.run(code).last["found"] == limited.run(code, hooked=False).last["found"]


LINKED = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stddef.h>
int cuInit(unsigned); int cuCtxCreate_v2(void **, unsigned, int); int cuMemAlloc_v2(uint64_t *, size_t);
int cuMemFree_v2(uint64_t);
typedef int alloc(uint64_t *, size_t);
int main(void)
{
	void *context; uint64_t address[16];
	alloc *by[] = {cuMemAlloc_v2, 0, 0, 0, 0};
	if (cuInit(0) || cuCtxCreate_v2(&context, 0, 0)) return 1;
	for (int i = 0; i < 100; i++) {
		by[1] = (alloc *)dlsym(RTLD_NEXT, "cuMemAlloc_v2");
		by[2] = (alloc *)dlsym(RTLD_DEFAULT, "cuMemAlloc_v2");
		by[3] = (alloc *)dlsym(dlopen(NULL, RTLD_LAZY), "cuMemAlloc_v2");
		by[4] = (alloc *)dlsym(dlopen("libcuda.so.1", RTLD_LAZY | RTLD_DEEPBIND), "cuMemAlloc_v2");
	}
	for (int i = 0; i < 5; i++) {
		int first = by[i](&address[0], 60u << 20), second = by[i](&address[1], 60u << 20);
		printf("{\\"way\\": %d, \\"rc\\": [%d, %d]}\\n", i, first, second);
		cuMemFree_v2(address[0]);
	}
	return 0;
}
"""


@pytest.fixture
def linked(compile_c, stub_driver):
    return compile_c(LINKED, f"-L{stub_driver}", "-l:libcuda.so.1", "-Wl,--no-as-needed", name="linked")


@pytest.mark.parametrize("bind_now", ["", "1"])
def test_b231_link_time_next_default_program_and_deep_handle(limited, linked, bind_now):
    result = limited.run([str(linked)], env={"LD_BIND_NOW": bind_now})
    assert [line["rc"] for line in result.lines] == [[0, 2]] * 5
    bare = limited.run([str(linked)], hooked=False)
    assert [line["rc"] for line in bare.lines] == [[0, 0]] * 5


def test_b187_other_names_and_paths_of_the_same_file(limited, stub_driver, tmp_path):
    (tmp_path / "libother.so").symlink_to(stub_driver / "libcuda.so.1")
    for path in (str(stub_driver / "libcuda.so.1"), str(tmp_path / "libother.so")):
        result = limited.run("start()\nsay(rc=[alloc(60*MIB)[0], alloc(60*MIB)[0]])", env={"LIBCUDA": path})
        assert result.last == {"rc": [0, 2]}, path


def test_b187_a_program_with_a_path_of_its_own(limited, compile_c, stub_driver):
    """RPATH and RUNPATH in the program; nothing in the environment says where the driver is."""
    for tag in ("--disable-new-dtags", "--enable-new-dtags"):
        flags = [f"-L{stub_driver}", "-l:libcuda.so.1", "-Wl,--no-as-needed", f"-Wl,-rpath,{stub_driver},{tag}"]
        program = compile_c(LINKED, *flags, name="linked")
        result = limited.run([str(program)], env={"LD_LIBRARY_PATH": None})
        assert [line["rc"] for line in result.lines] == [[0, 2]] * 5, tag


def test_b187_a_copy_of_the_driver_is_limited_too(limited, stub_driver, tmp_path):
    copy = tmp_path / "copy" / "driver.so"
    copy.parent.mkdir()
    copy.write_bytes((stub_driver / "libcuda.so.1").read_bytes())
    result = limited.run("start()\nsay(rc=[alloc(60*MIB)[0], alloc(60*MIB)[0]])", env={"LIBCUDA": str(copy)})
    assert result.last == {"rc": [0, 2]}


def test_b179_the_driver_finds_its_own(limited):
    """The stub's cuInit looks a function of its own up by name, before anything else has."""
    code = (
        WAYS
        + """
start()
cuda.stub_inner.restype = c_void_p
inner = cuda.stub_inner()
outer = dlsym(cuda._handle, b"cuMemAlloc_v2")
say(inner=twice(inner), outer=twice(outer), differ=inner != outer)
"""
    )
    assert limited.run(code).last == {"inner": [0, 0], "outer": [0, 2], "differ": True}


def test_b178_names_that_are_not_ours_are_left_alone(limited):
    """Names like the driver's of other libraries, and the driver's own names that need no work."""
    code = (
        WAYS
        + """
names = [b"cuProfilerStart", b"cublasCreate_v2", b"cudnnCreate", b"curl_easy_init", b"cuserid", b"cuMemAlloc_v9"]
names += [b"malloc"]
before = [bool(dlsym(cuda._handle, n)) for n in names]
say(found=before, same=dlsym(cuda._handle, b"cuProfilerStart") == cast(cuda.cuProfilerStart, c_void_p).value)
"""
    )
    hooked, bare = limited.run(code).last, limited.run(code, hooked=False).last
    assert hooked == bare
    assert hooked["found"] == [True, False, False, False, True, False, True]


OUTER = """
#define _GNU_SOURCE
#include <dlfcn.h>
/* As CUDA's libraries do that come in two halves: each name is looked up behind itself. */
#define NEXT(name) ((int (*)(void))dlsym(RTLD_NEXT, name))
#define NAME(name) int name(void) { return NEXT(#name) ? NEXT(#name)() + 1 : -1; }
NAME(cudnnCreate) NAME(cublasCreate_v2) NAME(curandCreateGenerator) NAME(cuserid_like) NAME(cuMemAlloc_v9)
"""
INNER = "\n".join(
    f"int {n}(void) {{ return 41; }}"
    for n in ("cudnnCreate", "cublasCreate_v2", "curandCreateGenerator", "cuserid_like", "cuMemAlloc_v9")
)


def test_b178_libraries_that_look_their_own_names_up_behind_themselves(limited, compile_c):
    inner = compile_c(INNER + "\n", "-shared", "-fPIC", name="libinner.so")
    outer = compile_c(
        OUTER, "-shared", "-fPIC", "-Wl,--no-as-needed", f"-L{inner.parent}", "-l:libinner.so", name="libouter.so"
    )
    code = f"""
lib = c.CDLL({str(outer)!r})
say(a=[getattr(lib, n)() for n in ("cudnnCreate", "cublasCreate_v2", "curandCreateGenerator", "cuserid_like",
                                   "cuMemAlloc_v9")])
"""
    env = {"LD_LIBRARY_PATH": f"{inner.parent}:{limited.driver}"}
    for hooked in (True, False):
        assert limited.run(code, env=env, hooked=hooked).last == {"a": [42] * 5}


@pytest.mark.parametrize(
    ("table", "forms"),
    [
        ("3020:2,11040:3,12050:4", {2000: None, 3020: 2, 11040: 3, 12040: 3, 12090: 4, 13000: 4}),
        ("2000:0,3020:2,13000:4", {2000: 0, 3020: 2, 11040: 2, 12040: 2, 12090: 2, 13000: 4}),
        ("2000:4,13000:0", {2000: 4, 11040: 4, 13000: 0}),
    ],
)
@pytest.mark.parametrize("lookup", ["cuGetProcAddress", "cuGetProcAddress_v2"])
def test_b182_the_form_is_the_one_the_driver_gives(limited, table, forms, lookup):
    code = (
        WAYS
        + f"""
init()
look = getattr(cuda, {lookup!r})
F = {{0: CFUNCTYPE(c_int, POINTER(c_void_p), c_uint, c_int), 2: CFUNCTYPE(c_int, POINTER(c_void_p), c_uint, c_int),
     3: CFUNCTYPE(c_int, POINTER(c_void_p), c_void_p, c_int, c_uint, c_int),
     4: CFUNCTYPE(c_int, POINTER(c_void_p), c_void_p, c_uint, c_int)}}
A = {{0: (5, 0), 2: (5, 0), 3: (None, 77, 5, 0), 4: (None, 5, 0)}}
got = {{}}
for version, form in {forms!r}.items():
    p, status = c_void_p(), c_int(-7)
    more = [byref(status)] if {lookup!r}.endswith("v2") else []
    rc = look(b"cuCtxCreate", byref(p), version, c_uint64(0), *more)
    if form is None:
        got[version] = None if rc == 500 else ("found", rc)
        continue
    out = c_void_p()
    own = dlsym(cuda._handle, b"cuCtxCreate" + (b"_v%d" % form if form else b""))
    called = F[form](p.value)(byref(out), *A[form])
    got[version] = cuda.stub_last_form() if called == 0 and p.value == own else ("wrong", called)
    if more:
        assert status.value == 0
say(got=list(got.items()))
"""
    )
    result = limited.run(code, env={"STUB_FORMS": table})
    assert dict(map(tuple, result.last["got"])) == forms


def test_cu_get_proc_address_limits_and_names_the_unknown(limited):
    code = (
        WAYS
        + """
start()
p, status = c_void_p(), c_int()
rc = [cuda.cuGetProcAddress_v2(b"cuMemAlloc", byref(p), 12000, c_uint64(0), byref(status)), status.value]
limited = twice(p.value)
unknown = [cuda.cuGetProcAddress_v2(b"cuNoSuchThing", byref(p), 12000, c_uint64(0), byref(status)), status.value]
nostatus = cuda.cuGetProcAddress_v2(b"cuNoSuchThing", byref(p), 12000, c_uint64(0), None)
say(rc=rc, limited=limited, unknown=unknown, nostatus=nostatus)
"""
    )
    assert limited.run(code).last == {"rc": [0, 0], "limited": [0, 2], "unknown": [500, 1], "nostatus": 500}


def test_b183_and_b181_an_old_driver_without_newer_functions(make_box, compile_c):
    old = compile_c(
        "driver_stub.c",
        "-DSTUB_OLD",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
        "-Wl,-Bsymbolic",
        "-Wl,-soname,libcuda.so.1",
        name="libcuda.so.1",
    ).parent
    box = make_box(old)
    box.grant("g", STUB, 100 * MIB)
    code = (
        WAYS
        + """
start()
p = c_void_p()
say(absent=[dlsym(cuda._handle, n) for n in (b"cuMemAllocAsync", b"cuGetProcAddress_v2", b"cuCtxCreate_v4")],
    rc=cuda.cuGetProcAddress(b"cuMemAlloc", byref(p), 11030, c_uint64(0)), limited=twice(p.value))
"""
    )
    assert box.run(code).last == {"absent": [None, None, None], "rc": 0, "limited": [0, 2]}
    direct = compile_c(
        """
#include <stdio.h>
#include <stdint.h>
#include <stddef.h>
#pragma weak cuInit
#pragma weak cuMemAllocAsync
int cuInit(unsigned);
int cuMemAllocAsync(uint64_t *, size_t, void *);
int main(void) { uint64_t a; cuInit(0); printf("{\\"rc\\": %d}\\n", cuMemAllocAsync(&a, 1, 0)); return 0; }
""",
        f"-L{old}",
        "-l:libcuda.so.1",
        "-Wl,--no-as-needed",
        name="direct",
    )
    assert box.run([str(direct)]).last == {"rc": 500}


def test_b184_slow_lookups_are_done_one_by_one(limited):
    """A driver that takes 1 ms per look-up: what the program asks for is asked of the driver, and little more."""
    began = time.monotonic()
    limited.run("start()\nsay(rc=alloc(1)[0])", env={"STUB_SLOW": "1000"})
    assert time.monotonic() - began < 3


DLSYM_WRAPPER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
static void *(*next)(void *, const char *);
static int depth;
void *dlsym(void *handle, const char *name)
{
	if (depth > 50) __builtin_trap();
	depth++;
	if (!next) next = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
	void *found = next(handle, name);
	depth--;
	return found;
}
"""


@pytest.mark.parametrize("first", [True, False])
def test_b186_a_tool_that_wraps_dlsym_before_or_after_us(limited, compile_c, first):
    tool = compile_c(DLSYM_WRAPPER, "-shared", "-fPIC", "-Wno-nonnull-compare", name="libtool.so")
    order = f"{tool} {limited.library}" if first else f"{limited.library} {tool}"
    code = "start()\nsay(rc=[alloc(60*MIB)[0], alloc(60*MIB)[0]])"
    result = limited.run(code, hooked=False, env={"LD_PRELOAD": order})
    assert result.last == {"rc": [0, 2]}


def test_dlsym_of_a_process_without_cuda_is_what_it_was(limited, compile_c):
    program = compile_c(
        """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
int main(void)
{
	printf("{\\"cu\\": %d, \\"next\\": %d, \\"nul\\": \\"%s\\"}\\n", dlsym(RTLD_DEFAULT, "cuMemAlloc_v2") != NULL,
		dlsym(RTLD_NEXT, "printf") == (void *)printf || dlsym(RTLD_NEXT, "printf") != NULL,
		dlsym(RTLD_DEFAULT, "no_such_name") ? "found" : strstr(dlerror(), "no_such_name") ? "named" : "other");
	return 0;
}
""",
        name="plain",
    )
    assert limited.run([str(program)]).last == limited.run([str(program)], hooked=False).last
