# SPDX-License-Identifier: Apache-2.0
"""What processes had of a card, from the real pynvml over the fake driver."""

from __future__ import annotations

G0 = "GPU-aaaaaaaa-0000-4000-8000-00000000000a"

PROGRAM = """
from aliquot.node.nvml import Nvml
from aliquot.node.utilization import ProcessUtilization
import time
nvml = Nvml(NVML)
ask = ProcessUtilization(nvml)
say(ask(sys.argv[3]))
nvml.open()
began = time.monotonic_ns()
first = ask(sys.argv[3])
say(first and first.percent)
again = None
while again is None and time.monotonic_ns() - began < 5e9:
    again = ask(sys.argv[3])
    time.sleep(0.02)
say(again and [again.percent, abs(again.from_ns - first.to_ns) < 1e6, 0 < again.to_ns - again.from_ns < 2e9])
say(again and abs(time.monotonic_ns() - again.to_ns) < 1e9)
say(ask("GPU-there-is-none"))
"""


def test_what_processes_had_window_after_window(fake):
    fake.cards({"profile": "Fake24G", "uuid": G0})
    fake.control(processes=[{"card": 0, "pid": 5001, "memory_bytes": "400MiB", "sm_utilization": 30}])
    closed, first, again, recent, unknown = fake.run(PROGRAM, G0)
    assert closed is None, "NVML is not open: no answer, and no error"
    assert first == {"5001": 30.0}
    assert again == [{"5001": 30.0}, True, True]
    assert recent
    assert unknown is None


def test_a_card_that_tells_nothing_of_processes(fake):
    fake.cards({"profile": "Fake24G", "uuid": G0})
    fake.control(faults=[{"function": "nvmlDeviceGetProcessUtilization", "code": 3}])
    assert fake.run(PROGRAM, G0) == [None, None, None, None, None]


HANGS = """
from aliquot.node.nvml import Nvml
from aliquot.node.utilization import BoundedUtilization, ProcessUtilization
import time
nvml = Nvml(NVML)
nvml.open()
ask = BoundedUtilization(ProcessUtilization(nvml), patience_s=0.1)
began = time.monotonic()
said = [ask(sys.argv[3]), ask(sys.argv[3]), ask(sys.argv[3])]
say([said, time.monotonic() - began < 1])
usage = None
while usage is None and time.monotonic() - began < 20:
    usage = ask(sys.argv[3])
    time.sleep(0.02)
say([usage and usage.percent, time.monotonic() - began > 1.5])
"""


def test_a_driver_that_hangs_keeps_nobody_waiting(fake):
    fake.cards({"profile": "Fake24G", "uuid": G0})
    fake.control(
        processes=[{"card": 0, "pid": 5001, "memory_bytes": "400MiB", "sm_utilization": 30}],
        faults=[{"function": "nvmlDeviceGetProcessUtilization", "slow_us": 1500000, "count": 1}],
    )
    assert fake.run(HANGS, G0) == [[[None, None, None], True], [{"5001": 30.0}, True]]
