# SPDX-License-Identifier: Apache-2.0
"""A usage file that somebody in the container scribbles over, cuts short or removes while programs run."""

from __future__ import annotations

import json
import os
import random
import signal
import sys

import pytest

A = "GPU-aaaaaaaa-0000-4000-8000-00000000000a"
B = "GPU-bbbbbbbb-0000-4000-8000-00000000000b"
GIB, MIB = 1 << 30, 1 << 20

BUSY = """
start(); rc, p = alloc(64*MIB); say(rc=rc)
codes, n = set(), 0
import select
while n < 100 or not select.select([sys.stdin], [], [], 0)[0]:
    rc, q = alloc(MIB); codes.add(rc)
    if rc == 0: free(q)
    info(); total(); n += 1
say(codes=sorted(codes), free=free(p), n=n, last=alloc(MIB)[0])
"""


def busy(box, **more):
    process = box.python(BUSY, **more)
    assert json.loads(process.stdout.readline()) == {"rc": 0}
    return process


def finish(process) -> tuple[dict, str]:
    out, err = process.communicate("\n", timeout=30)
    assert process.returncode == 0, (process.returncode, err)
    return json.loads(out.splitlines()[-1]), err


@pytest.mark.parametrize("size", [0, 1, 4096, 4096 + 128])
def test_b232_file_cut_short_hurts_nobody_and_grants_nothing_more(box, size):
    box.grant("a", A, GIB)
    box.grant("b", B, GIB)
    running = [busy(box) for _ in range(2)]
    os.truncate(box.region("a"), size)
    for process in running:
        process.stdin.write("")
        got, err = finish(process)
        assert set(got["codes"]) <= {0, 2}
        assert got["free"] == 0
        if size == 0:
            assert got["last"] == 2
            assert "cut short" in err
    assert "cut short" in box.run("say(rc=init())").err


def test_b232_a_program_with_a_sigbus_handler_keeps_it(box):
    box.grant("a", A, GIB)
    code = """
import ctypes as c, faulthandler, mmap, signal, tempfile
libc = c.CDLL(None)
seen = []
signal.signal(signal.SIGBUS, lambda *_: seen.append(1))
start(); alloc(MIB)
mine = signal.getsignal(signal.SIGBUS) is not signal.SIG_DFL
os.kill(os.getpid(), signal.SIGBUS)
os.truncate(sys.argv[1], 0)
rc = alloc(MIB)[0]
os.kill(os.getpid(), signal.SIGBUS)
other = signal.signal(signal.SIGBUS, signal.SIG_DFL)
say(seen=len(seen), mine=mine, rc=rc, now=str(signal.getsignal(signal.SIGBUS)))
"""
    process = box.popen([sys.executable, "-c", "from client import *\n" + code, str(box.region("a"))])
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert json.loads(out) == {"seen": 2, "mine": True, "rc": 2, "now": "0"} or json.loads(out)["now"].endswith(
        "SIG_DFL"
    )
    assert json.loads(out)["seen"] == 2
    assert json.loads(out)["rc"] == 2


@pytest.mark.parametrize("handler", ["SIG_DFL", "handler"])
def test_a_sigbus_that_is_the_programs_own_ends_or_reaches_it_as_ever(box, compile_c, handler):
    box.grant("a", A, GIB)
    program = compile_c(
        """
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <dlfcn.h>
static void on_bus(int number, siginfo_t *info, void *context)
{
	(void)context;
	printf("{\\"got\\": %d, \\"code\\": %d}\\n", number, info->si_code);
	fflush(stdout);
	_exit(0);
}
int main(int count, char **words)
{
	void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
	int (*init)(unsigned) = (int (*)(unsigned))dlsym(cuda, "cuInit");
	struct sigaction action, old;
	char path[] = "/tmp/busXXXXXX";
	memset(&action, 0, sizeof(action));
	action.sa_sigaction = on_bus; action.sa_flags = SA_SIGINFO;
	if (init(0)) return 9;
	sigaction(SIGBUS, NULL, &old);
	if (old.sa_handler != SIG_DFL) return 8;
	if (count > 1 && strcmp(words[1], "handler") == 0) sigaction(SIGBUS, &action, NULL);
	sigaction(SIGBUS, NULL, &old);
	if (count > 1 && strcmp(words[1], "handler") == 0 && old.sa_sigaction != on_bus) return 7;
	int fd = mkstemp(path);
	unlink(path);
	if (ftruncate(fd, 4096)) return 6;
	volatile char *map = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (ftruncate(fd, 0)) return 6;
	return *map;
}
""",
        name="bus",
    )
    result = box.run([str(program), handler], ok=False)
    if handler == "handler":
        assert result.last == {"got": 7, "code": 2}
        assert result.code == 0
    else:
        assert result.code == -signal.SIGBUS


@pytest.mark.parametrize("seed", range(6))
def test_scribbling_harms_only_the_share_itself(box, seed):
    """Random bytes into random places while two programs work: no crash, no hang, no strange code."""
    box.grant("a", A, GIB)
    box.grant("b", B, GIB)
    running = [busy(box) for _ in range(2)]
    other = box.python("start(1); rc, p = alloc(600*MIB); say(rc=rc); wait(); say(used=used(), rc=alloc(600*MIB)[0])")
    assert json.loads(other.stdout.readline()) == {"rc": 0}
    chance = random.Random(seed)
    with box.region("a").open("r+b") as f:
        for _ in range(3000):
            f.seek(chance.choice([chance.randrange(400), chance.randrange(4096, 5000), chance.randrange(135168 - 64)]))
            f.write(chance.choice([b"\xff" * 8, b"\0" * 8, chance.randbytes(chance.randrange(1, 64))]))
            f.flush()
    for process in running:
        got, err = finish(process)
        assert set(got["codes"]) <= {0, 2}
        assert err.count("\n") <= 1
    out, _ = other.communicate("\n", timeout=20)
    assert json.loads(out) == {"used": 600 * MIB, "rc": 2}


@pytest.mark.parametrize("fill", [b"\x00", b"\xff"])
def test_whole_file_overwritten(box, fill):
    box.grant("a", A, GIB)
    process = busy(box)
    with box.region("a").open("r+b") as f:
        f.write(fill * 135168)
    got, _ = finish(process)
    assert set(got["codes"]) <= {0, 2}
    assert got["free"] == 0


def test_file_removed_under_a_program_changes_nothing_for_it(box):
    box.grant("a", A, GIB)
    process = busy(box)
    box.region("a").unlink()
    got, _ = finish(process)
    assert got["codes"] == [0]
    assert "cannot be opened for writing" in box.run("say(rc=init())").err
