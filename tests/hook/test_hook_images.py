# SPDX-License-Identifier: Apache-2.0
"""Images as they come: the loader's own preload file, other libcs, static programs, other allocators, bare mounts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

A = "GPU-aaaaaaaa-0000-4000-8000-00000000000a"
GIB, MIB = 1 << 30, 1 << 20
LIMITED = {"rc": [0, 2]}
CODE = "from client import *\nstart()\nsay(rc=[alloc(600*MIB)[0], alloc(600*MIB)[0]])"
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")


@pytest.fixture
def image(box, tmp_path):
    """Runs a shell text with the hook in /etc/ld.so.preload, as in a container, and nothing in the environment."""
    etc = tmp_path / "etc"
    shutil.copytree("/etc", etc, symlinks=True, ignore_dangling_symlinks=True)
    (etc / "ld.so.preload").write_text(f"{box.library}\n")
    box.grant("a", A, GIB)
    for path in (tmp_path, *tmp_path.parents):
        if path.owner() == "root" and not path.stat().st_mode & 0o001:
            path.chmod(path.stat().st_mode | 0o011)

    def run(text: str, **more: object):
        inside = f'mount --bind "{etc}" /etc && {text}'
        return box.run(["unshare", "--mount", "sh", "-c", inside], hooked=False, **more)

    return run


def program(box, code: str = CODE) -> str:
    """A command line that brings its own environment, since what called it may have dropped it."""
    env = " ".join(f'{k}="{v}"' for k, v in box.env.items())
    script = box.root.parent / "program.py"
    script.write_text(code)
    return f"{env} {sys.executable} {script}"


@root_only
@pytest.mark.parametrize(
    "shell",
    [
        "env -i sh -c '{}'",
        "su -l root -s /bin/sh -c '{}'",
        "setsid sh -lc 'unset LD_PRELOAD; {}'",
        "LD_PRELOAD= sh -c '{}'",
    ],
    ids=["env", "su", "cron", "empty"],
)
def test_b177_login_shells_and_clean_environments_are_limited(box, image, shell):
    first = box.python(CODE + "\nwait()")
    first.stdout.readline()
    line = program(box, CODE.replace("600", "300").replace("alloc(300*MIB)[0]]", "alloc(200*MIB)[0]]"))
    assert image(shell.format(line)).last == LIMITED, "it shares what is left with the other"
    first.communicate("\n", timeout=20)


@root_only
def test_an_image_with_preloads_of_its_own(box, image, compile_c):
    """Its LD_PRELOAD comes on top; its own preload file lies under ours."""
    own = """
#include <unistd.h>
__attribute__((constructor)) static void here(void) { if (write(1, "{}\\n", 3) != 3) _exit(9); }
"""
    other = compile_c(own, "-shared", "-fPIC", name="libimage.so")
    result = image(f"exec env LD_PRELOAD={other} {program(box)}")
    assert result.lines[0] == {}
    assert result.last == LIMITED


@root_only
def test_a_program_without_cuda_in_an_image_is_what_it_was(image):
    got = image("cd /; ls -d /etc; env -i /bin/echo hello; exec id -u")
    assert (got.out, got.err) == ("/etc\nhello\n0\n", "")


@root_only
@pytest.mark.parametrize("link", [["-static"], ["-static-pie"]], ids=["static", "static-pie"])
def test_static_programs_start_and_are_not_disturbed(image, compile_c, link):
    built = compile_c('#include <stdio.h>\nint main(void) { puts("{\\"x\\": 1}"); return 0; }\n', *link, name="static")
    got = image(f"exec {built}")
    assert (got.last, got.err) == ({"x": 1}, "")


@root_only
@pytest.mark.skipif(not shutil.which("musl-gcc"), reason="needs musl-tools")
@pytest.mark.parametrize("link", [[], ["-static"]], ids=["dynamic", "static"])
def test_b180_programs_of_another_libc_start_as_ever(image, tmp_path, link):
    """musl's loader reads no preload file: no limit from us, no line on stderr, no difference."""
    source = tmp_path / "hello.c"
    source.write_text(
        '#include <stdio.h>\n#include <dlfcn.h>\nint main(void) { printf("{\\"found\\": %d}\\n", '
        'dlsym(RTLD_DEFAULT, "cuInit") != 0); return 0; }\n'
    )
    built = tmp_path / "hello"
    subprocess.run(["musl-gcc", *link, "-o", str(built), str(source)], check=True, timeout=60)
    got = image(f"exec {built}")
    assert (got.last, got.err) == ({"found": 0}, "")


JEMALLOC = {"libjemalloc.so.2": "mallctl", "libtcmalloc_minimal.so.4": "MallocExtension_ReleaseFreeMemory"}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", JEMALLOC)
def test_real_allocators_preloaded(box, name, first):
    found = sorted(Path("/usr/lib").glob(f"*-linux-gnu/{name}"))
    if not found:
        pytest.skip(f"{name} is not installed")
    box.grant("a", A, GIB)
    order = [str(found[0]), str(box.library)] if first else [str(box.library), str(found[0])]
    code = f"{CODE}\nthere = hasattr(c.CDLL(None), {JEMALLOC[name]!r})\nsay(there=there)"
    result = box.run(code, hooked=False, env={"LD_PRELOAD": " ".join(order)})
    assert (result.lines, result.err) == ([LIMITED, {"there": True}], "")


@root_only
def test_no_dev_shm_and_a_read_only_root(box, tmp_path):
    """Only the folder of the usage file can be written; /dev/shm, /tmp and /run are not there."""
    box.grant("a", A, GIB)
    inside = (
        f'mount --bind "{tmp_path}" "{tmp_path}" && mount -o remount,ro,bind / '
        "&& mount -t tmpfs -o ro none /dev/shm && mount -t tmpfs -o ro none /run "
        '&& ! touch /var/x 2>/dev/null && exec "$0" "$@"'
    )
    result = box.run(["unshare", "--mount", "sh", "-c", inside, sys.executable, "-c", CODE], env={"TMPDIR": "/none"})
    assert (result.last, result.err) == (LIMITED, "")


def test_a_program_that_closes_every_descriptor(box):
    box.grant("a", A, GIB)
    got = box.run(
        "start(); rc = alloc(600*MIB)[0]; out = os.dup(1); os.dup2(out, 900); os.closerange(3, 900)\n"
        "call('cuCtxSynchronize'); more = [alloc(600*MIB)[0], alloc(300*MIB)[0]]\n"
        "pid = os.fork()\nif pid == 0:\n    os._exit(0)\nos.waitpid(pid, 0)\nsay(rc=[rc, *more], used=used())"
    ).last
    assert got == {"rc": [0, 2, 0], "used": 900 * MIB}


HANDLER = """
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/time.h>
int cuInit(unsigned); int cuCtxCreate_v2(void **, unsigned, int); int cuMemAlloc_v2(uint64_t *, size_t);
int cuMemFree_v2(uint64_t); int cuMemGetInfo_v2(size_t *, size_t *);
static volatile long times, bad;
static int off;
/* Whatever the program was in the middle of: only the hook is entered here, the stub holds no lock. */
static void on_signal(int signal)
{
	uint64_t p; size_t f, t;
	(void)signal;
	if (off) return;
	int rc = cuMemAlloc_v2(&p, 4096);
	if (rc == 0) bad += cuMemFree_v2(p) != 0; else bad += rc != 2;
	bad += cuMemGetInfo_v2(&f, &t) != 0;
	times++;
}
int main(void)
{
	void *c; uint64_t p[64] = {0};
	struct itimerval often = {{0, 300}, {0, 300}};
	if (cuInit(0) || cuCtxCreate_v2(&c, 0, 0)) return 1;
	signal(SIGALRM, on_signal); setitimer(ITIMER_REAL, &often, NULL);
	for (long i = 0; times < 1500; i++) {
		uint64_t *at = &p[i % 64];
		if (*at) bad += cuMemFree_v2(*at) != 0, *at = 0;
		else if (cuMemAlloc_v2(at, 100000)) *at = 0;
	}
	off = 1;
	for (int i = 0; i < 64; i++) if (p[i]) bad += cuMemFree_v2(p[i]) != 0;
	size_t f, t; cuMemGetInfo_v2(&f, &t);
	printf("{\\"bad\\": %ld, \\"used\\": %zu}\\n", bad, t - f);
	return 0;
}
"""


def test_the_driver_called_from_a_signal_handler(stub_box, stub_driver, compile_c):
    """The handler comes in the middle of the hook's own steps and goes through the same ones."""
    stub_box.grant("g", "GPU-" + "-".join(["aa" * 4, "aa" * 2, "aa" * 2, "aa" * 2, "aa" * 6]), 4 * MIB)
    built = compile_c(HANDLER, "-O2", f"-L{stub_driver}", "-l:libcuda.so.1", "-Wl,--no-as-needed", name="handler")
    assert stub_box.run([str(built)], timeout=60).last == {"bad": 0, "used": 0}
