# SPDX-License-Identifier: Apache-2.0
"""CUDA on MIG devices: one compute instance is the device, its memory is its GPU instance's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

PRELUDE = "from cuda_client import *\n"
# Two GPU instances of 1g.5gb with their compute instances; the UUIDs of both MIG devices.
CUT = """
made = []
profile = nvmlDeviceGetGpuInstanceProfileInfo(card, NVML_GPU_INSTANCE_PROFILE_1_SLICE).id
for _ in range(2):
    gi = nvmlDeviceCreateGpuInstance(card, profile)
    nvmlGpuInstanceCreateComputeInstance(gi, NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE)
for i in range(nvmlDeviceGetMaxMigDeviceCount(card)):
    try:
        made.append(nvmlDeviceGetUUID(nvmlDeviceGetMigDeviceHandleByIndex(card, i)))
    except NVMLError_NotFound:
        break
result = made
"""
LOOK = """
code = cu.cuInit(0)
count, total = c_int(), c_size_t()
if code == 0:
    expect(cu.cuDeviceGetCount(byref(count)))
    expect(cu.cuDeviceTotalMem_v2(byref(total), 0))
    name, own, card = (ctypes.create_string_buffer(96) for _ in range(3))
    expect(cu.cuDeviceGetName(name, 96, 0))
    expect(cu.cuDeviceGetUuid_v2(own, 0))
    expect(cu.cuDeviceGetUuid(card, 0))
    start()
    free, _ = info()
    result = [count.value, total.value >> 20, name.value.decode(), own.raw[:16].hex(), card.raw[:16].hex(),
            attribute(16),
              try_alloc(free), try_alloc(free + 1)]
else:
    result = code
"""


@pytest.fixture
def cut(cuda_machine: Callable[..., Any]) -> tuple[Any, list[str]]:
    """A machine whose first card is cut into two, and the MIG devices' UUIDs."""
    machine = cuda_machine(
        {"profile": "A100-40", "mig_enabled": True, "context_bytes": 0}, {"profile": "T4", "context_bytes": 0}
    )
    return machine, machine.nvml(CUT)


def test_a_mig_device_is_seen_by_its_uuid(cut: tuple[Any, list[str]]) -> None:
    machine, uuids = cut
    assert len(set(uuids)) == 2
    for uuid in uuids:
        count, total, name, own, card, sms, fits, more = machine.python(PRELUDE + LOOK, CUDA_VISIBLE_DEVICES=uuid)
        assert (count, fits, more) == (1, 0, 2)
        assert 4500 < total <= 5120
        assert name == "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
        assert own == uuid.removeprefix("MIG-").replace("-", "")
        assert card != own
        assert sms == 14


def test_without_a_list_plain_cards_are_seen_and_a_cut_one_by_its_first_instance(cut: tuple[Any, list[str]]) -> None:
    machine, uuids = cut
    assert machine.python(PRELUDE + LOOK)[2] == "Tesla T4"
    seen = machine.python(PRELUDE + LOOK, CUDA_VISIBLE_DEVICES="0", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert seen[3] == uuids[0].removeprefix("MIG-").replace("-", "")
    assert machine.python(PRELUDE + LOOK, CUDA_VISIBLE_DEVICES=",".join(uuids))[0] == 1  # one a process
    assert machine.python(PRELUDE + LOOK, CUDA_VISIBLE_DEVICES="MIG-00000000-0000-0000-0000-000000000000") == 100


def test_instances_are_apart_in_memory_and_time(cut: tuple[Any, list[str]]) -> None:
    machine, uuids = cut
    hold = PRELUDE + "start()\nfree, _ = info()\nalloc(free)\nprint('ready', flush=True)\nsys.stdin.readline()"
    with machine.start(hold, CUDA_VISIBLE_DEVICES=uuids[0]) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        code = "start()\nfree, total = info()\nresult = [free == total, try_alloc(free)]"
        assert machine.python(PRELUDE + code, CUDA_VISIBLE_DEVICES=uuids[1]) == [True, 0]
        code = "start()\nresult = [info()[0], try_alloc(1)]"
        assert machine.python(PRELUDE + code, CUDA_VISIBLE_DEVICES=uuids[0]) == [0, 2]
        used = "memory = nvmlDeviceGetMemoryInfo(card)\nresult = memory.used >> 20"
        assert 4500 < machine.nvml(used) < 6000  # the whole card knows of it too
        program.communicate("\n", timeout=30)
    spin = """
start()
function = kernel("spin_ms_100")
print("ready", flush=True)
sys.stdin.readline()
begin = time.monotonic()
expect(launch(function))
expect(cu.cuCtxSynchronize())
print(time.monotonic() - begin, flush=True)
"""
    programs = [machine.start(PRELUDE + spin, CUDA_VISIBLE_DEVICES=uuid) for uuid in uuids]
    for program in programs:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
    took = [float(program.communicate("\n", timeout=30)[0].splitlines()[0]) for program in programs]
    assert all(0.1 <= seconds < 0.19 for seconds in took)
