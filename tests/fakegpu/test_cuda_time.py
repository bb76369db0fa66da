# SPDX-License-Identifier: Apache-2.0
"""Time on the fake card: kernels have a length, one runs at a time, processes take turns."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

PRELUDE = "from cuda_client import *\n"
# Wall clock on a busy machine: late is allowed, early never is.
LATE = 0.25


def run(machine: Any, code: str, *arguments: str, **env: str) -> Any:
    return machine.python(PRELUDE + "start()\n" + code, *arguments, **env)


def test_a_kernel_takes_as_long_as_its_name_says(cuda_machine: Callable[..., Any]) -> None:
    code = """
result = []
for name in ("spin_us_2000", "_Z9spin_ms_3v", "spin_ns_5000000"):
    function, begin, end = kernel(name), event(), event()
    expect(cu.cuEventRecord(begin, None))
    expect(launch(function))
    expect(cu.cuEventRecord(end, None))
    result.append(cu.cuEventQuery(end))
    before = time.monotonic()
    expect(cu.cuEventSynchronize(end))
    result += [round(elapsed(begin, end), 1), cu.cuEventQuery(end)]
"""
    found = run(cuda_machine(), code)
    assert found[0::3] == [600, 600, 600]
    assert found[2::3] == [0, 0, 0]
    for measured, length in zip(found[1::3], (2.0, 3.0, 5.0), strict=True):
        assert length <= measured < length + 1.5  # a little between the first record and the launch


def test_lengths_come_from_name_environment_control_and_configuration(cuda_machine: Callable[..., Any]) -> None:
    code = """
def ms_of(name):
    function, begin, end = kernel(name), event(), event()
    expect(cu.cuCtxSynchronize())
    expect(launch(function))  # so that both events stand right behind a kernel
    expect(cu.cuEventRecord(begin, None))
    expect(launch(function))
    expect(cu.cuEventRecord(end, None))
    expect(cu.cuCtxSynchronize())
    return round(elapsed(begin, end))
result = [ms_of("plain"), ms_of("spin_us_7000")]
"""
    machine = cuda_machine(launch_ns=3_000_000)
    assert run(machine, code) == [3, 7]
    machine.tool("fakegpuctl", "launch", "5000000")
    assert run(machine, code) == [5, 7]
    assert run(machine, code, FAKEGPU_LAUNCH_NS="2000000") == [2, 7]


def test_synchronising_waits_and_launching_does_not(cuda_machine: Callable[..., Any]) -> None:
    code = """
function = kernel("spin_us_1000")
begin = time.monotonic()
for _ in range(100):
    expect(launch(function))
launched = time.monotonic() - begin
busy = cu.cuStreamQuery(None)
expect(cu.cuStreamSynchronize(None))
result = [launched, busy, time.monotonic() - begin, cu.cuStreamQuery(None)]
"""
    launched, busy, waited, idle = run(cuda_machine(), code)
    assert launched < 0.08
    assert (busy, idle) == (600, 0)
    assert 0.1 <= waited < 0.1 + LATE


def test_a_queue_of_its_depth_blocks_the_launch(cuda_machine: Callable[..., Any]) -> None:
    code = """
function = kernel("spin_us_5000")
begin = time.monotonic()
for _ in range(8):
    expect(launch(function))
quick = time.monotonic() - begin
for _ in range(4):
    expect(launch(function))
result = [quick, time.monotonic() - begin]
"""
    quick, blocked = run(cuda_machine(queue_depth=8), code)
    assert quick < 0.015
    assert 0.015 <= blocked < 0.015 + LATE


def test_streams_of_a_card_share_it_and_cards_are_independent(cuda_machine: Callable[..., Any]) -> None:
    code = """
def both(first, second):
    begin = time.monotonic()
    expect(launch(*first)); expect(launch(*second))
    for function, own in (first, second):
        expect(cu.cuStreamSynchronize(own))
    return time.monotonic() - begin
one = kernel("spin_ms_30")
a, b = stream(1), stream(1)
same = both((one, a), (one, b))
other = start(1)
two, c = kernel("spin_ms_30"), stream(1)
begin = time.monotonic()
expect(launch(two, c))
expect(cu.cuCtxPopCurrent_v2(byref(other)))
expect(launch(one, a))
expect(cu.cuStreamSynchronize(a))
expect(cu.cuStreamSynchronize(c))
result = [same, time.monotonic() - begin]
"""
    same, different = run(cuda_machine({}, {}), code)
    assert 0.06 <= same < 0.06 + LATE
    assert 0.03 <= different < 0.06


def test_streams_wait_for_events_and_for_the_legacy_stream(cuda_machine: Callable[..., Any]) -> None:
    code = """
long = kernel("spin_ms_20")
a, b, free = stream(), stream(), stream(1)
mark = event(2)
expect(launch(long, a))
expect(cu.cuEventRecord(mark, a))
result = [cu.cuStreamQuery(b), cu.cuStreamWaitEvent(b, mark, 0), cu.cuStreamQuery(b), cu.cuStreamQuery(free)]
result += [cu.cuStreamQuery(None)]  # the legacy stream stands behind blocking streams
expect(cu.cuCtxSynchronize())
expect(launch(long, None))
result += [cu.cuStreamQuery(a), cu.cuStreamQuery(free)]
expect(cu.cuCtxSynchronize())
result += [cu.cuStreamQuery(a)]
"""
    assert run(cuda_machine(), code) == [0, 0, 600, 0, 600, 600, 0, 0]


def test_events_remember_when_for_longer_than_the_queue_is(cuda_machine: Callable[..., Any]) -> None:
    code = """
function = kernel("spin_us_10")
begin, end = event(), event()
expect(launch(function)); expect(cu.cuEventRecord(begin, None))
for _ in range(5000):
    expect(launch(function))
expect(cu.cuEventRecord(end, None))
for _ in range(5000):
    expect(launch(function))
expect(cu.cuCtxSynchronize())
result = elapsed(begin, end)
"""
    assert 50.0 <= run(cuda_machine(), code) < 250.0
    # Kernels so long that the queue is full to the last place when the event's own place is used again.
    full = code.replace("spin_us_10", "spin_us_300").replace("5000", "1100")
    assert 330.0 <= run(cuda_machine(), full) < 600.0


def test_copies_take_time_when_the_configuration_says_so(cuda_machine: Callable[..., Any]) -> None:
    code = """
a, own, text = alloc(10 * MIB), stream(1), ctypes.create_string_buffer(10 * MIB)
begin, end = event(), event()
expect(cu.cuEventRecord(begin, own))
expect(cu.cuMemcpyHtoDAsync_v2(a, text, 10 * MIB, own))
expect(cu.cuEventRecord(end, own))
expect(cu.cuStreamSynchronize(own))
before = time.monotonic()
expect(cu.cuMemcpyHtoD_v2(a, text, 10 * MIB))
result = [elapsed(begin, end), time.monotonic() - before]
"""
    asynchronous, synchronous = run(cuda_machine(copy_bytes_per_second=1 << 30), code)
    assert asynchronous >= 9.7
    assert synchronous >= 0.0097


def test_host_functions_run_in_order_when_their_turn_comes(cuda_machine: Callable[..., Any]) -> None:
    code = """
order = []
HOST = ctypes.CFUNCTYPE(None, c_void_p)
functions = [HOST(lambda _, i=i: order.append((i, round(time.monotonic() - begin, 2)))) for i in range(3)]
begin = time.monotonic()
own, slow = stream(1), kernel("spin_ms_30")
def later(i):
    expect(cu.cuLaunchHostFunc(own, ctypes.cast(functions[i], c_void_p), None))
later(0)
expect(launch(slow, own))
later(1)
later(2)
result = [len(order), cu.cuStreamQuery(own)]
time.sleep(0.05)
still = len(order)
expect(cu.cuStreamSynchronize(own))
result += [still, [i for i, _ in order], order[1][1] >= 0.03]
"""
    assert run(cuda_machine(), code) == [1, 600, 1, [0, 1, 2], True]


SHARE = """
function = kernel(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
done, end = 0, time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    for _ in range(int(sys.argv[3])):
        expect(launch(function))
    expect(cu.cuCtxSynchronize())
    done += int(sys.argv[3])
result = done
"""


def share(machine: Any, *programs: tuple[str, str]) -> list[int]:
    """Runs programs of (kernel, batch) side by side for a second: how many kernels each got done."""
    started = [machine.start(PRELUDE + "start()\n" + SHARE, name, "1.0", batch) for name, batch in programs]
    for program in started:
        assert program.stdout.readline() == "ready\n"
    for program in started:
        program.stdin.write("\n")
        program.stdin.flush()
    return [json.loads(program.communicate(timeout=60)[0].splitlines()[-1]) for program in started]


def test_two_processes_share_the_time_of_a_card(cuda_machine: Callable[..., Any]) -> None:
    one, other = share(cuda_machine(), ("spin_us_1000", "20"), ("spin_us_1000", "20"))
    assert one + other <= 1080  # the second, and the last batch of each
    assert 0.35 <= one / (one + other) <= 0.65


def test_short_kernels_do_not_starve_beside_long_ones(cuda_machine: Callable[..., Any]) -> None:
    """Turns are turns of time: 2 ms each by default, and a kernel that is longer is put aside."""
    short, long = share(cuda_machine(), ("spin_us_500", "64"), ("spin_us_20000", "4"))
    assert 0.3 <= short * 0.5 / (short * 0.5 + long * 20) <= 0.7


def test_without_a_time_slice_a_kernel_runs_to_its_end(cuda_machine: Callable[..., Any]) -> None:
    short, long = share(cuda_machine(time_slice_ns=0), ("spin_us_500", "64"), ("spin_us_20000", "4"))
    assert short * 0.5 < 0.2 * long * 20


def test_a_deep_queue_is_the_problem_of_its_owner(cuda_machine: Callable[..., Any]) -> None:
    """A process that has queued a second of work does not keep another from its turn."""
    machine = cuda_machine()
    flood = """
function = kernel('spin_us_1000')
for _ in range(1000):
    expect(launch(function))
print('ready', flush=True)
sys.stdin.readline()
"""
    program = machine.start(PRELUDE + "start()\n" + flood)
    assert program.stdout.readline() == "ready\n"
    code = """
function = kernel("spin_us_1000")
begin = time.monotonic()
expect(launch(function))
expect(cu.cuCtxSynchronize())
result = time.monotonic() - begin
"""
    assert run(machine, code) < 0.1
    program.kill()
    program.communicate(timeout=30)
    assert run(machine, code) < 0.05  # the work of the dead is gone


def test_utilisation_is_what_ran(cuda_machine: Callable[..., Any]) -> None:
    machine = cuda_machine()
    machine.tool("cuda-probe", "load:2000:600")
    busy = json.loads(machine.tool("fakegpuctl", "status").stdout)["cards"]
    assert busy[0]["busy_percent_1s"] > 30
    assert busy[1]["busy_percent_1s"] == 0
    assert abs(busy[0]["busy_ns"] - busy[0]["kernels"] * 2_000_000) <= 2_000_000
