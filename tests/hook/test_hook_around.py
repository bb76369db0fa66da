# SPDX-License-Identifier: Apache-2.0
"""The program around the hook: sanitizers, other preloads, early and late calls, filters, odd file systems."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

A = "GPU-aaaaaaaa-0000-4000-8000-00000000000a"
GIB, MIB = 1 << 30, 1 << 20
DRIVER = Path(__file__).parents[2] / "build/fakegpu/usr/lib/x86_64-linux-gnu"
LINK = [f"-L{DRIVER}", "-l:libcuda.so.1", "-Wl,--no-as-needed"]

EVERYWHERE = """
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int cuInit(unsigned); int cuCtxCreate_v2(void **, unsigned, int); int cuMemAlloc_v2(uint64_t *, size_t);
int cuMemFree_v2(uint64_t); int cuMemGetInfo_v2(size_t *, size_t *); int cuCtxSetCurrent(void *);
static uint64_t early, middle;
static int early_rc[2];
static void *context;
static void out(const char *when, int a, int b) { printf("{\\"%s\\": [%d, %d]}\\n", when, a, b); fflush(stdout); }
__attribute__((constructor)) static void before_main(void)
{
	cuInit(0); cuCtxCreate_v2(&context, 0, 0);
	early_rc[0] = cuMemAlloc_v2(&early, 600u << 20);
	early_rc[1] = cuMemAlloc_v2(&middle, 600u << 20);
}
__attribute__((destructor)) static void after_exit(void)
{
	uint64_t late;
	int one = cuMemFree_v2(early), two = cuMemAlloc_v2(&late, 900u << 20);
	out("destructor", one, two);
}
static void at_end(void)
{
	uint64_t late;
	out("atexit", cuMemAlloc_v2(&late, 100u << 20), cuMemAlloc_v2(&late, 600u << 20));
	cuMemFree_v2(late);
}
static void *work(void *x)
{
	cuCtxSetCurrent(context);
	for (int i = 0; i < 3000; i++) {
		uint64_t p; size_t f, t;
		if (cuMemAlloc_v2(&p, 4096) == 0) cuMemFree_v2(p);
		cuMemGetInfo_v2(&f, &t);
	}
	return x;
}
int main(void)
{
	pthread_t thread[4];
	char *heap = malloc(100); free(heap);
	out("constructor", early_rc[0], early_rc[1]);
	for (int i = 0; i < 4; i++) pthread_create(&thread[i], NULL, work, NULL);
	for (int i = 0; i < 4; i++) pthread_join(thread[i], NULL);
	atexit(at_end);
	return 0;
}
"""
EXPECTED = [{"constructor": [0, 2]}, {"atexit": [0, 2]}, {"destructor": [0, 0]}]


@pytest.mark.parametrize("flags", [["-O2"], ["-fsanitize=address,undefined"], ["-fsanitize=thread"], ["-pg"]], ids=str)
def test_before_main_after_exit_and_under_sanitizers(box, compile_c, flags):
    box.grant("a", A, GIB)
    program = compile_c(EVERYWHERE, *LINK, *flags, name="everywhere")
    env = {}
    if any("sanitize" in f for f in flags):
        # A sanitizer wants to come first; then its own names stand before ours.
        which = "asan" if "address" in flags[0] else "tsan"
        library = subprocess.run(
            ["gcc", f"-print-file-name=lib{which}.so"], capture_output=True, text=True, check=True
        ).stdout.strip()
        env = {
            "LD_PRELOAD": f"{os.path.realpath(library)} {box.library}",
            "ASAN_OPTIONS": "detect_leaks=0",
            "TSAN_OPTIONS": "detect_deadlocks=0",  # those are the fake driver's
        }
    result = box.run([str(program)], hooked=not env, env=env, cwd=box.root)
    assert result.lines == EXPECTED
    assert result.err == ""


ALLOCATOR = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>
static char heap[64 << 20];
static size_t used;
static void *(*next_malloc)(size_t);
/* As jemalloc and tcmalloc do: an allocator that looks for the one behind it, from within an allocation. */
void *malloc(size_t size)
{
	if (!next_malloc) next_malloc = (void *(*)(size_t))dlsym(RTLD_NEXT, "malloc");
	size = (size + 31) & ~(size_t)15;
	size_t at = __atomic_fetch_add(&used, size, __ATOMIC_RELAXED);
	if (at + size > sizeof(heap)) return NULL;
	*(size_t *)(heap + at) = size - 16;
	return heap + at + 16;
}
void free(void *p) { (void)p; }
void *calloc(size_t a, size_t b) { void *p = malloc(a * b); if (p) memset(p, 0, a * b); return p; }
void *realloc(void *old, size_t size)
{
	void *p = malloc(size);
	if (p && old) { size_t had = ((size_t *)old)[-2]; memcpy(p, old, had < size ? had : size); }
	return p;
}
"""


@pytest.mark.parametrize("first", [True, False])
def test_another_allocator_preloaded(box, compile_c, first):
    box.grant("a", A, GIB)
    program = compile_c(EVERYWHERE, *LINK, "-O2", name="everywhere")
    allocator = compile_c(ALLOCATOR, "-shared", "-fPIC", "-fno-builtin", name="liballocator.so")
    order = [str(allocator), str(box.library)] if first else [str(box.library), str(allocator)]
    result = box.run([str(program)], hooked=False, env={"LD_PRELOAD": " ".join(order)})
    assert result.lines == EXPECTED


def test_an_auditor_of_the_loader(box, compile_c):
    """LD_AUDIT: a library in a namespace of its own watches every binding."""
    box.grant("a", A, GIB)
    auditor = compile_c(
        """
#define _GNU_SOURCE
#include <link.h>
unsigned la_version(unsigned v) { return v; }
unsigned la_objopen(struct link_map *m, Lmid_t l, uintptr_t *c)
{ (void)m, (void)l, (void)c; return LA_FLG_BINDTO | LA_FLG_BINDFROM; }
uintptr_t la_symbind64(Elf64_Sym *s, unsigned n, uintptr_t *r, uintptr_t *d, unsigned *f, const char *name)
{ (void)n, (void)r, (void)d, (void)f, (void)name; return s->st_value; }
""",
        "-shared",
        "-fPIC",
        name="libaudit.so",
    )
    got = box.run("start()\nsay(rc=[alloc(600*MIB)[0], alloc(600*MIB)[0]])", env={"LD_AUDIT": str(auditor)}).last
    assert got == {"rc": [0, 2]}


def test_loaded_late_by_hand(box):
    """Nobody preloads it; a program opens it after it has started CUDA. Then it serves whoever asks it by name."""
    box.grant("a", A, GIB)
    got = box.run(
        f"""
start(); late = c.CDLL({str(box.library)!r}); out = c.c_uint64()
rc = [late.cuMemAlloc_v2(c.byref(out), c.c_size_t(n*MIB)) for n in (600, 600)]
say(rc=rc, free=late.cuMemFree_v2(out))
""",
        hooked=False,
    ).last
    assert got["rc"] == [0, 2]


def test_preloaded_twice_and_beside_an_empty_file(box, tmp_path):
    box.grant("a", A, GIB)
    again = tmp_path / "again.so"
    again.symlink_to(box.library)
    result = box.run(
        "start()\nsay(rc=[alloc(600*MIB)[0], alloc(600*MIB)[0]])",
        hooked=False,
        env={"LD_PRELOAD": f"{box.library} {again}"},
    )
    assert result.last == {"rc": [0, 2]}


SECCOMP = """
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
#define DENY(n) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, n, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM)
int main(int count, char **words)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),
		DENY(SYS_kill), DENY(SYS_madvise), DENY(SYS_clock_nanosleep), DENY(SYS_sched_yield), DENY(SYS_readlink),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = {sizeof(code) / sizeof(*code), code};
	prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
	if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) return 9;
	execv(words[1], words + 1);
	return count;
}
"""


def test_system_calls_that_a_filter_forbids(box, compile_c):
    """Without kill, madvise, readlink: it cannot judge neighbours any more, and limits all the same."""
    box.grant("a", A, GIB)
    confine = compile_c(SECCOMP, name="confine")
    code = "from client import *\nstart()\nsay(rc=[alloc(600*MIB)[0], alloc(600*MIB)[0]], used=used())"
    assert box.run([str(confine), sys.executable, "-c", code]).last == {"rc": [0, 2], "used": 600 * MIB}


def test_old_kernel_fork_without_wipe(box, compile_c):
    """Where pages cannot be emptied in a child, a handler does it: the child has a slot of its own."""
    box.grant("a", A, GIB)
    confine = compile_c(SECCOMP, name="confine")
    code = (
        "from client import *\ncuda.cuInit\npid = os.fork()\n"
        "if pid == 0:\n    start(); rc = alloc(300*MIB)[0]; say(rc=rc); os._exit(0)\n"
        "os.waitpid(pid, 0); start(); say(rc=[alloc(MIB)[0]])"
    )
    assert box.run([str(confine), sys.executable, "-c", code]).lines == [{"rc": 0}, {"rc": [0]}]


def test_a_small_stack(box, compile_c):
    box.grant("a", A, GIB)
    program = compile_c(
        """
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
int cuInit(unsigned); int cuCtxCreate_v2(void **, unsigned, int); int cuMemAlloc_v2(uint64_t *, size_t);
static int rc[3];
static void *work(void *x)
{
	uint64_t p; void *c;
	rc[0] = cuInit(0); rc[1] = cuCtxCreate_v2(&c, 0, 0); rc[2] = cuMemAlloc_v2(&p, 4096);
	return x;
}
int main(void)
{
	pthread_attr_t attr; pthread_t thread;
	pthread_attr_init(&attr); pthread_attr_setstacksize(&attr, 64 << 10);
	pthread_create(&thread, &attr, work, NULL); pthread_join(thread, NULL);
	printf("{\\"rc\\": [%d, %d, %d]}\\n", rc[0], rc[1], rc[2]);
	return 0;
}
""",
        *LINK,
        name="small",
    )
    assert box.run([str(program)]).last == {"rc": [0, 0, 0]}


def test_read_only_usage_file_refuses_cuda(box):
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    box.grant("a", A, GIB)
    usage = box.root / "usage"
    command = f'mount --bind "{usage}" "{usage}" && mount -o remount,ro,bind "{usage}" && exec "$0" "$@"'
    result = box.run(
        ["unshare", "--mount", "sh", "-c", command, sys.executable, "-c", "from client import *\nsay(rc=init())"]
    )
    assert result.last == {"rc": 800}
    assert "cannot be opened for writing" in result.err


def test_no_standard_streams(box, tmp_path):
    """Descriptors 0 to 2 are closed: files of ours must not become the program's stdout."""
    box.grant("a", A, GIB)
    out = tmp_path / "out"
    code = f"""
import os
for fd in (0, 1, 2): os.close(fd)
from client import *
rc = [init()]; context(); rc += [alloc(600*MIB)[0], alloc(600*MIB)[0]]
held = [os.readlink(f"/proc/self/fd/{{fd}}") for fd in range(3) if os.path.exists(f"/proc/self/fd/{{fd}}")]
open({str(out)!r}, "w").write(str([rc, [h for h in held if "vgpu" in h]]))
"""
    box.popen([sys.executable, "-c", code]).communicate(timeout=30)
    assert out.read_text() == "[[0, 0, 2], []]"
