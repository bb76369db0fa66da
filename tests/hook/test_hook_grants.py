# SPDX-License-Identifier: Apache-2.0
"""Where limits come from: grants, several of them, changing ones, broken ones, none; and HAMi's variables."""

from __future__ import annotations

import json
import os

import pytest

STUB = "GPU-" + "-".join(["aa" * 4, "aa" * 2, "aa" * 2, "aa" * 2, "aa" * 6])
OTHER = "GPU-" + "-".join(["bb" * 4, "bb" * 2, "bb" * 2, "bb" * 2, "bb" * 6])
MIB = 1 << 20


def refused(box, **more) -> str:
    """CUDA is refused, with one line; that line."""
    result = box.run("say(rc=init(), rc2=init())", **more)
    assert result.last == {"rc": 800, "rc2": 800}
    assert result.err.count("\n") == 1, result.err
    assert result.err.startswith("aliquot: ")
    return result.err


def test_strict_build_refuses_without_a_grant(stub_box):
    assert "no grant in" in refused(stub_box)
    (stub_box.root / "grants").mkdir()
    assert "no grant in" in refused(stub_box)


def test_a_program_that_does_not_use_cuda_hears_nothing(stub_box):
    result = stub_box.run(["/bin/sh", "-c", "echo hello; env -i ls / >/dev/null"])
    assert (result.out, result.err) == ("hello\n", "")


def test_b230_the_environment_gains_nothing(stub_box):
    stub_box.grant("g", STUB, 100 * MIB)
    tricks = {
        "CUDA_DISABLE_CONTROL": "true",
        "CUDA_DEVICE_MEMORY_LIMIT": "0",
        "CUDA_DEVICE_MEMORY_LIMIT_0": "80g",
        "CUDA_REDIRECT": "/dev/null",
        "GPU_CORE_UTILIZATION_POLICY": "disable",
        "AQ_ROOT": "/tmp",
        "LD_BIND_NOW": "1",
    }
    result = stub_box.run("start()\nsay(total=total(), rc=[alloc(60*MIB)[0], alloc(60*MIB)[0]])", env=tricks)
    assert result.last == {"total": 100 * MIB, "rc": [0, 2]}
    assert stub_box.complaints("g") == 16, "the operator is not told"


def test_limit_is_exact_to_the_unit(stub_box):
    stub_box.grant("g", STUB, 100 * MIB + 700)
    code = """
start()
say(rc=[alloc(100*MIB - 512)[0], alloc(513)[0], alloc(1)[0], alloc(1)[0], alloc(1)[0]], info=info())
"""
    assert stub_box.run(code).last == {"rc": [0, 0, 2, 2, 2], "info": [0, 100 * MIB + 512]}


def test_size_that_overflows_everything(stub_box):
    stub_box.grant("g", STUB, 100 * MIB)
    code = "start()\nsay(rc=[alloc(n)[0] for n in (2**64-1, 2**64-512, 2**63, 2**42, 2**42-512)], used=used())"
    assert stub_box.run(code).last == {"rc": [2] * 5, "used": 0}


def test_two_grants_on_one_card_add_up(stub_box):
    stub_box.grant("b", STUB, 40 * MIB)
    stub_box.grant("a", STUB, 100 * MIB)
    code = """
start()
rc, p = alloc(120*MIB)
say(total=total(), rc=rc, info=info(), more=[alloc(21*MIB)[0], alloc(20*MIB)[0], alloc(1)[0]])
wait()
free(p)
say(info=info())
wait()
"""
    process = stub_box.python(code)
    first = json.loads(process.stdout.readline())
    assert first == {"total": 140 * MIB, "rc": 0, "info": [20 * MIB, 140 * MIB], "more": [2, 0, 2]}
    assert [stub_box.used("a"), stub_box.used("b")] == [100 * MIB, 40 * MIB]
    process.stdin.write("\n")
    process.stdin.flush()
    assert json.loads(process.stdout.readline()) == {"info": [120 * MIB, 140 * MIB]}
    assert stub_box.used("a") + stub_box.used("b") == 20 * MIB
    process.communicate("\n", timeout=20)


def test_whole_card_grant_has_no_limit(stub_box):
    stub_box.grant("g", STUB, 0)
    code = "start()\nsay(total=total(), info=info(), rc=alloc(30*GIB)[0])"
    assert stub_box.run(code).last == {"total": 24 << 30, "info": [20 << 30, 24 << 30], "rc": 0}


def test_b148_limit_above_the_card_shows_the_card(stub_box):
    stub_box.grant("g", STUB, 30 << 30)
    code = "start()\nsay(total=total(), info=info())"
    # The stub says 20 of 24 GiB are free: more than that nobody can get.
    assert stub_box.run(code).last == {"total": 24 << 30, "info": [20 << 30, 24 << 30]}


def test_limit_changes_while_the_program_runs(stub_box):
    stub_box.grant("g", STUB, 100 * MIB)
    process = stub_box.python("""
start()
rc, p = alloc(60*MIB)
while (line := wait()) != "end":
    say(rc=alloc(int(line)*MIB)[0], info=info(), total=total())
free(p)
say(info=info())
""")

    def ask(line: str) -> dict:
        process.stdin.write(line + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    assert ask("50")["rc"] == 2
    stub_box.regrant("g", memory_limit=200 * MIB)
    assert ask("50") == {"rc": 0, "info": [90 * MIB, 200 * MIB], "total": 200 * MIB}
    stub_box.regrant("g", memory_limit=80 * MIB)
    assert ask("1") == {"rc": 2, "info": [0, 80 * MIB], "total": 80 * MIB}
    assert ask("end")["info"] == [30 * MIB, 80 * MIB]
    process.communicate(timeout=20)


def test_b233_grant_of_another_card_refuses_cuda(stub_box):
    stub_box.grant("g", OTHER, 100 * MIB)
    assert "no visible device is among the grants" in refused(stub_box)
    assert stub_box.complaints("g") == 4


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda g, u: g.write_bytes(b"x" * 4096), "version"),
        (lambda g, u: g.write_bytes(b""), "cannot be opened"),
        (lambda g, u: g.write_bytes(g.read_bytes()[:600] + b"\xff" * (4096 - 600)), "damaged"),
        (lambda g, u: u.unlink(), "cannot be opened for writing"),
        (lambda g, u: os.truncate(u, 10), "cut short"),
        (lambda g, u: u.write_bytes(b"\xff" * 135168), "damaged or of another version"),
        (lambda g, u: (u.unlink(), u.mkdir()), "cannot be opened"),
        (lambda g, u: (u.unlink(), os.mkfifo(u)), "cut short"),
    ],
)
def test_b173_and_b233_what_cannot_be_read_refuses_cuda(stub_box, damage, says):
    stub_box.grant("g", STUB, 100 * MIB)
    grant, usage = stub_box.root / "grants" / "g", stub_box.region("g")
    grant.chmod(0o644)
    damage(grant, usage)
    assert says in refused(stub_box)


def test_b233_the_standalone_build_refuses_a_broken_grant_too(make_box, stub_driver, tmp_path, hook_builds):
    box = make_box(stub_driver, "libvgpu.so")
    box.grant("g", STUB, 100 * MIB)
    os.truncate(box.region("g"), 10)
    assert "cut short" in refused(box, env={"CUDA_DEVICE_MEMORY_LIMIT": "1g"})


def test_damaged_newest_slot_leaves_the_one_before(stub_box):
    stub_box.grant("g", STUB, 100 * MIB)
    stub_box.regrant("g", memory_limit=50 * MIB)
    grant = stub_box.root / "grants" / "g"
    grant.chmod(0o644)
    raw = bytearray(grant.read_bytes())
    raw[512 + 1024 + 700] ^= 0xFF
    grant.write_bytes(raw)
    assert stub_box.run("start()\nsay(total=total())").last == {"total": 100 * MIB}


def test_non_root_program_shares_the_account(stub_box):
    stub_box.grant("g", STUB, 100 * MIB)
    code = "import os\nos.setgid(65534); os.setuid(65534)\nstart()\nsay(rc=[alloc(60*MIB)[0], alloc(60*MIB)[0]])"
    for path in (stub_box.root.parent, *stub_box.root.parent.parents):
        if path.owner() == "root" and not path.stat().st_mode & 0o005:
            path.chmod(path.stat().st_mode | 0o055)
    assert stub_box.run(code).last == {"rc": [0, 2]}


def test_behaviour_34_nothing_is_left_open_and_nothing_changes_around_the_program(stub_box):
    stub_box.grant("g", STUB, 100 * MIB)
    code = """
import locale, signal, resource, ctypes
def around():
    mask = os.umask(0o027); os.umask(mask)
    return [[f for f in range(3, 200) if os.path.exists(f"/proc/self/fd/{f}")],
            [str(signal.getsignal(s)) for s in signal.valid_signals()], mask, locale.setlocale(locale.LC_ALL),
            len(os.listdir("/proc/self/task")), dict(os.environ) == env, os.getcwd()]
env = dict(os.environ)
before = around()
ctypes.set_errno(0)
start(); rc, p = alloc(60*MIB); alloc(60*MIB); info(); total(); free(p)
after = around()
say(same=before == after, before=str(before), after=str(after))
"""
    result = stub_box.run(code)
    assert result.last["same"], result.last
    assert result.err == ""


def test_errno_stays(stub_box, compile_c, stub_driver):
    stub_box.grant("g", STUB, 100 * MIB)
    program = compile_c(
        """
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <dlfcn.h>
int cuInit(unsigned); int cuCtxCreate_v2(void **, unsigned, int); int cuMemAlloc_v2(uint64_t *, size_t);
int cuMemFree_v2(uint64_t); int cuMemGetInfo_v2(size_t *, size_t *);
int main(void)
{
	void *c; uint64_t a, b; size_t f, t; int bad = 0;
	errno = 77; cuInit(0); bad |= errno != 77;
	errno = 77; cuCtxCreate_v2(&c, 0, 0); bad |= (errno != 77) << 1;
	errno = 77; cuMemAlloc_v2(&a, 60 << 20); bad |= (errno != 77) << 2;
	errno = 77; cuMemAlloc_v2(&b, 60 << 20); bad |= (errno != 77) << 3;
	errno = 77; cuMemGetInfo_v2(&f, &t); bad |= (errno != 77) << 4;
	errno = 77; cuMemFree_v2(a); bad |= (errno != 77) << 5;
	printf("{\\"bad\\": %d}\\n", bad);
}
""",
        f"-L{stub_driver}",
        "-l:libcuda.so.1",
        "-Wl,--no-as-needed",
        name="errno",
    )
    assert stub_box.run([str(program)]).last == {"bad": 0}
