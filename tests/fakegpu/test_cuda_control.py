# SPDX-License-Identifier: Apache-2.0
"""What can be changed while the machine runs: faults, slowness, lost cards, names that are missing, the call log."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PRELUDE = "from cuda_client import *\n"


def run(machine: Any, code: str, **env: str) -> Any:
    return machine.python(PRELUDE + "start()\n" + code, **env)


def test_a_fault_hits_the_calls_it_names(cuda_machine: Callable[..., Any]) -> None:
    machine = cuda_machine()
    machine.control(faults=[{"function": "cuMemAlloc_v2", "code": 2, "after": 2, "count": 3}])
    code = "result = [[try_alloc(10) for _ in range(8)], used(), cu.cuCtxSynchronize()]"
    assert run(machine, code) == [[0, 0, 2, 2, 2, 0, 0, 0], 0, 0]
    # The counts are the machine's: the next process finds them used up.
    assert run(machine, code)[0] == [0] * 8


def test_faults_by_beginning_and_by_process(cuda_machine: Callable[..., Any]) -> None:
    machine = cuda_machine()
    machine.tool("fakegpuctl", "fault", "cuMem*", "999", "count=2")
    assert run(machine, "result = [try_alloc(1), try_alloc(1), try_alloc(1), cu.cuCtxSynchronize()]") == [
        999,
        999,
        0,
        0,
    ]
    machine.tool("fakegpuctl", "clear")
    machine.tool("fakegpuctl", "fault", "cuMemAlloc_v2", "2", "pid=1")
    assert run(machine, "result = try_alloc(1)") == 0


def test_b134_a_query_that_fails_at_its_third_call(cuda_machine: Callable[..., Any]) -> None:
    machine = cuda_machine()
    machine.control(faults=[{"function": "cuMemPoolGetAttribute", "code": 1, "after": 2, "count": 1}])
    code = """
pool, value = c_void_p(), c_uint64()
expect(cu.cuDeviceGetDefaultMemPool(byref(pool), 0))
result = [cu.cuMemPoolGetAttribute(pool, 5, byref(value)) for _ in range(4)]
"""
    assert run(machine, code) == [0, 0, 1, 0]


def test_a_slow_call_is_slow(cuda_machine: Callable[..., Any]) -> None:
    machine = cuda_machine()
    code = "begin = time.monotonic()\nexpect(cu.cuCtxSynchronize())\nresult = time.monotonic() - begin"
    quick = run(machine, code)
    machine.tool("fakegpuctl", "slow", "cuCtxSynchronize", "30000")
    assert quick < 0.03 <= run(machine, code)


def test_a_running_process_follows_at_its_next_call(cuda_machine: Callable[..., Any]) -> None:
    """With fakegpuctl, whatever the call; with a file alone, at the next allocation that is 2 ms later."""
    machine = cuda_machine()
    code = """
start()
print("ready", flush=True)
for line in sys.stdin:
    print(cu.cuCtxSynchronize() if line == "sync\\n" else try_alloc(1), flush=True)
"""
    with machine.start(PRELUDE + code) as program:
        assert program.stdin is not None
        assert program.stdout is not None

        def ask(what: str) -> str:
            print(what, file=program.stdin, flush=True)
            return str(program.stdout.readline().strip())

        assert program.stdout.readline() == "ready\n"
        assert ask("sync") == "0"
        machine.tool("fakegpuctl", "fault", "cuCtxSynchronize", "700")
        assert ask("sync") == "700"
        machine.tool("fakegpuctl", "clear")
        assert ask("sync") == "0"
        assert ask("alloc") == "0"
        machine.control(faults=[{"function": "cuMemAlloc_v2", "code": 2}])
        answers = {ask("alloc") for _ in range(2000)}
        assert "2" in answers
        program.communicate(timeout=30)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "line 1 column 2: a key in double quotes is wanted here"),
        ('{"faults": [}', "line 1 column 13: not a JSON value"),
        ('{"fault": []}', "fault: unknown key"),
        ('{"faults": [{"function": "cuInit", "cod": 3}]}', 'faults[0]: needs "code" or "slow_us"'),
        ('{"faults": [{"function": "cuInit", "code": 3, "x": 1}]}', "faults[0].x: unknown key"),
        ('{"faults": [{"function": "cu*Init", "code": 3}]}', "faults[0].function: a name, or a beginning"),
        ('{"cards": [{"card": 7, "lost": true}]}', "cards[0].card: 7 is not a whole number from 0 to 1"),
        ('{"launch_ns": -1}', "launch_ns: -1 is not a whole number"),
        ('{"shut_down": 1}', "shut_down: must be true or false"),
        ('{"log": "a", "log": "b"}', "this key stands here twice"),
        ("\0\1\2garbage", "not a JSON value"),
    ],
)
def test_a_scribbled_file_changes_nothing_and_is_told_once(
    cuda_machine: Callable[..., Any], text: str, complaint: str
) -> None:
    machine = cuda_machine()
    machine.tool("fakegpuctl", "fault", "cuCtxSynchronize", "700")
    machine.config.with_name("config.json.control").write_text(text)
    code = "start()\nresult = [cu.cuCtxSynchronize() for _ in range(3)]"
    with machine.start(PRELUDE + code) as program:
        out, err = program.communicate(timeout=30)
    assert json.loads(out.splitlines()[-1]) == [700, 700, 700]
    assert err.count("fakegpu:") == 1
    assert complaint in err
    with machine.start(PRELUDE + code) as program:
        assert "fakegpu:" not in program.communicate(timeout=30)[1]


def test_a_lost_card_and_its_return(cuda_machine: Callable[..., Any]) -> None:
    machine = cuda_machine({}, {})
    code = """
first = start()
address = alloc(4096)
print("ready", flush=True)
for line in sys.stdin:
    context = c_void_p()
    print(cu.cuCtxSynchronize(), try_alloc(1), cu.cuCtxCreate_v2(byref(context), 0, 0), flush=True)
    cu.cuCtxSetCurrent(first)
"""
    visible = "cu.cuInit(0)\ncount = c_int()\ncu.cuDeviceGetCount(byref(count))\nresult = count.value"
    with machine.start(PRELUDE + code) as program:
        assert program.stdin is not None
        assert program.stdout is not None

        def ask() -> list[int]:
            print(file=program.stdin, flush=True)
            return [int(word) for word in program.stdout.readline().split()]

        assert program.stdout.readline() == "ready\n"
        assert ask() == [0, 0, 0]
        machine.tool("fakegpuctl", "lose", "0")
        assert ask() == [999, 999, 46]
        assert machine.python(PRELUDE + visible) == 1
        machine.tool("fakegpuctl", "recover", "0")
        assert ask() == [999, 999, 0]  # the old context stays dead, a new one lives
        assert machine.python(PRELUDE + visible) == 2
        program.communicate(timeout=30)


def test_an_xid_can_end_the_contexts_of_its_card(cuda_machine: Callable[..., Any]) -> None:
    machine = cuda_machine({}, {})
    code = """
one, two = start(0), start(1)
print("ready", flush=True)
sys.stdin.readline()
said = [cu.cuCtxSynchronize()]
expect(cu.cuCtxSetCurrent(one))
said += [cu.cuCtxSynchronize(), cu.cuCtxSynchronize()]
print(said, flush=True)
"""
    with machine.start(PRELUDE + code) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        machine.tool("fakegpuctl", "xid", "0", "48", "kill=214")
        out, _ = program.communicate("\n", timeout=30)
    assert out.splitlines()[0] == "[0, 214, 214]"
    assert run(machine, "result = cu.cuCtxSynchronize()") == 0


def test_b198_a_driver_that_has_shut_down(cuda_machine: Callable[..., Any]) -> None:
    machine = cuda_machine()
    code = """
machine_control = sys.argv[1]
import subprocess
subprocess.run([machine_control, "shut-down", "on"], check=True)
result = [cu.cuCtxSynchronize(), try_alloc(1), cu.cuInit(0)]
subprocess.run([machine_control, "shut-down", "off"], check=True)
result += [cu.cuCtxSynchronize()]
"""
    tool = str(machine.root.parent / "fakegpu-tools" / "fakegpuctl")
    assert machine.python(PRELUDE + "start()\n" + code, tool) == [4, 4, 4, 0]


def test_b195_a_driver_that_forbids_queries_in_a_capture(cuda_machine: Callable[..., Any]) -> None:
    machine = cuda_machine()
    code = """
own, graph = stream(1), c_void_p()
expect(cu.cuStreamBeginCapture_v2(own, 2))
result = [cu.cuMemGetInfo_v2(None, None), cu.cuStreamEndCapture(own, byref(graph))]
"""
    assert run(machine, code) == [0, 0]
    machine.tool("fakegpuctl", "forbid-in-capture", "on")
    assert run(machine, code) == [900, 901]


def test_the_call_log(cuda_machine: Callable[..., Any], tmp_path: Path) -> None:
    machine = cuda_machine()
    log = tmp_path / 'a "log".jsonl'
    run(machine, "alloc(1234)\nresult = cu.cuCtxSynchronize()", FAKEGPU_LOG=str(log))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["f"] for line in lines] == ["cuInit", "cuCtxCreate_v2", "cuMemAlloc_v2", "cuCtxSynchronize"]
    assert "bytesize=1234" in lines[2]["a"]
    assert [line["n"] for line in lines] == [1, 2, 3, 4]
    assert len({line["pid"] for line in lines}) == 1
    log.unlink()
    machine.tool("fakegpuctl", "log", str(log))
    run(machine, "cu.cuMemFree_v2(0x77)\nresult = 0")
    logged = [json.loads(line)["f"] for line in log.read_text().splitlines()]
    assert logged[-1] == "cuMemFree_v2"
    machine.tool("fakegpuctl", "log", "off")
    before = log.read_text()
    run(machine, "result = 0")
    assert log.read_text() == before


def test_one_log_has_the_calls_of_all_processes_and_both_libraries_in_order(
    cuda_machine: Callable[..., Any], tmp_path: Path
) -> None:
    machine, log = cuda_machine(), tmp_path / "calls.jsonl"
    machine.control(log=str(log))
    code = "cu.cuInit(0)\nnvmlInit()\nprint('ready', flush=True)\nfor line in sys.stdin:\n    "
    code += "print(cu.cuDriverGetVersion(byref(c_int())), nvmlDeviceGetCount(), flush=True)"
    with machine.start(PRELUDE + code) as one, machine.start(PRELUDE + code) as two:
        for program in (one, two):
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
        log.unlink()
        for program in (one, two) * 5:
            assert program.stdin is not None
            assert program.stdout is not None
            print(file=program.stdin, flush=True)
            assert program.stdout.readline() == "0 2\n"
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        pids = [one.pid, two.pid]
        for program in (one, two):
            program.communicate(timeout=30)
    numbers = [line["n"] for line in lines]
    assert numbers == list(range(numbers[0], numbers[0] + 20))
    calls = ("cuDriverGetVersion", "nvmlDeviceGetCount_v2")
    assert [(line["pid"], line["f"]) for line in lines] == [(pid, f) for pid in pids * 5 for f in calls]


def test_names_that_are_missing_and_forms_that_are_given(cuda_machine: Callable[..., Any]) -> None:
    machine = cuda_machine()
    machine.tool("fakegpuctl", "missing", "cuMemAllocAsync", "cuGraphLaunch")
    machine.tool("fakegpuctl", "form", "cuCtxCreate", "12050", "11040")
    code = """
library = ctypes.CDLL("libcuda.so.1")
def entry(name, version):
    address, status = c_void_p(), c_int(-1)
    code = cu.cuGetProcAddress_v2(name.encode(), byref(address), version, 0, byref(status))
    symbols = [s for s in ("cuCtxCreate", "cuCtxCreate_v2", "cuCtxCreate_v3", "cuCtxCreate_v4", "cuMemAllocAsync")
               if ctypes.cast(getattr(library, s), c_void_p).value == address.value]
    return [code, status.value, symbols]
result = [entry("cuMemAllocAsync", 13000), entry("cuCtxCreate", 11040), entry("cuCtxCreate", 12050),
        entry("cuCtxCreate", 13000)]
result.append(cu.cuGetProcAddress(b"cuMemAllocAsync", byref(c_void_p()), 12000, 0))
"""
    assert run(machine, code) == [
        [0, 1, []],
        [0, 0, ["cuCtxCreate_v3"]],
        [0, 0, ["cuCtxCreate_v3"]],
        [0, 0, ["cuCtxCreate_v3"]],
        500,
    ]


def test_the_hand_says_what_it_does_not_do(cuda_machine: Callable[..., Any]) -> None:
    machine = cuda_machine()
    for command, status in (
        (("lose", "9"), 1),
        (("set", "0", "warmth", "3"), 1),
        (("fault", "cuInit", "x"), 2),
        (("fault", "cu*x", "3"), 1),
        (("nonsense",), 2),
        ((), 2),
        (("load", "/nonexistent"), 1),
    ):
        done = machine.tool("fakegpuctl", *command, status=status)
        assert done.stderr.strip()
    assert not machine.config.with_name("config.json.control").exists()
    machine.tool("fakegpuctl", "set", "0", "temperature", "88")
    machine.tool("fakegpuctl", "set", "0", "temperature", "77")
    machine.tool("fakegpuctl", "process", "1", "5001", "1000", "train")
    shown = json.loads(machine.tool("fakegpuctl", "show").stdout)
    assert shown["cards"] == [{"card": 0, "temperature": 77}]
    assert shown["processes"][0]["pid"] == 5001
    machine.config.unlink()
    assert "FAKEGPU_CONFIG" in machine.tool("fakegpuctl", "status", status=1).stderr
