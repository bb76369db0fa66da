# SPDX-License-Identifier: Apache-2.0
"""MIG: mode, profiles, placements, instances and their devices."""

from __future__ import annotations

import os

import pytest

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root may change MIG")

# Small words for long calls; pynvml leaves buffers of lists to the caller.
HELPERS = """
def gi_profile(card, profile):
    return nvmlDeviceGetGpuInstanceProfileInfoV(card, profile)

def create(card, profile, compute=True):
    info = nvmlDeviceGetGpuInstanceProfileInfo(card, profile)
    gi = nvmlDeviceCreateGpuInstance(card, info.id)
    ci = None
    if compute:
        same = {NVML_GPU_INSTANCE_PROFILE_1_SLICE: 0, NVML_GPU_INSTANCE_PROFILE_2_SLICE: 1,
            NVML_GPU_INSTANCE_PROFILE_3_SLICE: 2, NVML_GPU_INSTANCE_PROFILE_4_SLICE: 3,
            NVML_GPU_INSTANCE_PROFILE_7_SLICE: 4}.get(profile, 0)
        ci = nvmlGpuInstanceCreateComputeInstance(gi, same)
    return gi, ci

def room(card):
    free = {}
    for profile in range(NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info = nvmlDeviceGetGpuInstanceProfileInfo(card, profile)
            free[info.id] = nvmlDeviceGetGpuInstanceRemainingCapacity(card, info.id)
        except NVMLError_NotSupported:
            pass
    return free

def mig_devices(card):
    found = []
    for index in range(nvmlDeviceGetMaxMigDeviceCount(card)):
        try:
            found.append(nvmlDeviceGetMigDeviceHandleByIndex(card, index))
        except NVMLError_NotFound:
            pass
    return found
"""
A100 = {"profile": "A100-40", "mig_enabled": True}


@root_only
def test_mode_can_be_turned_on_and_off(machine):
    code = """
    steps = [nvmlDeviceGetMigMode(card), nvmlDeviceSetMigMode(card, 1), nvmlDeviceGetMigMode(card)]
    steps += [nvmlDeviceSetMigMode(card, 0), nvmlDeviceGetMigMode(card), error_of(nvmlDeviceSetMigMode, card, 2)]
    result = steps
    """
    host = machine({"profile": "A100-40"})
    assert host.nvml(code) == [[0, 0], 0, [1, 1], 0, [0, 0], "InvalidArgument"]


@pytest.mark.usefixtures("as_root")
def test_cards_without_mig_say_so(machine):
    code = """
    result = [error_of(call, card) for call in (nvmlDeviceGetMigMode,)] + [
        error_of(nvmlDeviceSetMigMode, card, 1), nvmlDeviceGetMaxMigDeviceCount(card),
        error_of(nvmlDeviceGetMigDeviceHandleByIndex, card, 0), error_of(nvmlDeviceGetGpuInstanceProfileInfo, card, 0),
        nvmlDeviceIsMigDeviceHandle(card).value]
    """
    assert machine().nvml(code) == ["NotSupported", "NotSupported", 0, "NotSupported", "NotSupported", 0]


@pytest.mark.parametrize(
    ("card", "names"),
    [
        ("A30", ["1g.6gb", "2g.12gb", "4g.24gb", "1g.6gb+me", "2g.12gb+me"]),
        ("A100-40", ["1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb", "1g.5gb+me", "1g.10gb"]),
        ("A100-80", ["1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb", "1g.10gb+me", "1g.20gb"]),
        ("H100", ["1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb", "1g.10gb+me", "1g.20gb"]),
        ("H200", ["1g.18gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb", "1g.18gb+me", "1g.35gb"]),
        ("B200", ["1g.23gb", "2g.45gb", "3g.90gb", "4g.90gb", "7g.180gb", "1g.23gb+me", "1g.45gb"]),
        ("RTX-PRO-6000", ["1g.24gb", "2g.48gb", "4g.96gb", "1g.24gb+me"]),
    ],
)
def test_profiles_of_the_families(machine, card, names):
    code = (
        HELPERS
        + """
found = []
for profile in range(NVML_GPU_INSTANCE_PROFILE_COUNT):
    try:
        info = gi_profile(card, profile)
    except NVMLError_NotSupported:
        continue
    found.append((info.name, info.sliceCount, info.memorySizeMB))
result = found, nvmlDeviceGetMemoryInfo(card).total >> 20
"""
    )
    found, total = machine({"profile": card}).nvml(code)
    assert [name.removeprefix("MIG ") for name, _, _ in found] == names
    # The memory in a profile's name is about what it gets.
    for name, _, mib in found:
        said = int(name.split(".")[1].split("gb")[0]) * 1024
        assert 0.8 * said <= mib <= 1.06 * said, name
        assert mib <= total


def test_versions_of_the_profile_structure(machine):
    code = """
    lib = ctypes.CDLL("libnvidia-ml.so.1")
    second, wrong = c_nvmlGpuInstanceProfileInfo_v2_t(), c_nvmlGpuInstanceProfileInfo_v2_t()
    second.version, wrong.version = nvmlGpuInstanceProfileInfo_v2, 0x04000000
    call = lib.nvmlDeviceGetGpuInstanceProfileInfoV
    result = [call(card, 0, ctypes.byref(second)), second.name, call(card, 0, ctypes.byref(wrong)),
        call(card, 99, ctypes.byref(second)), call(card, 5, ctypes.byref(second))]
    """
    assert machine({"profile": "A100-40"}).nvml(code) == [0, "MIG 1g.5gb", 25, 2, 3]


@root_only
def test_instances_fill_a_card_and_their_devices_tell_of_themselves(machine):
    code = (
        HELPERS
        + """
for slices in (3, 2, 1):
    create(card, globals()[f"NVML_GPU_INSTANCE_PROFILE_{slices}_SLICE"])
told = []
for device in mig_devices(card):
    what = nvmlDeviceGetAttributes_v2(device)
    told.append([nvmlDeviceGetName(device), nvmlDeviceGetGpuInstanceId(device), nvmlDeviceGetComputeInstanceId(device),
        nvmlDeviceGetIndex(device), what.multiprocessorCount, what.gpuInstanceSliceCount,
        what.memorySizeMB == nvmlDeviceGetMemoryInfo(device).total >> 20, nvmlDeviceIsMigDeviceHandle(device).value,
        nvmlDeviceGetIndex(nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)),
        nvmlDeviceGetUUID(nvmlDeviceGetHandleByUUID(nvmlDeviceGetUUID(device))) == nvmlDeviceGetUUID(device)])
result = told, room(card)
"""
    )
    told, room = machine(A100).nvml(code)
    name = "NVIDIA A100-SXM4-40GB MIG "
    assert told == [
        [name + "3g.20gb", 1, 0, 0, 42, 3, True, 1, 0, True],
        [name + "2g.10gb", 5, 0, 1, 28, 2, True, 1, 0, True],
        [name + "1g.5gb", 13, 0, 2, 14, 1, True, 1, 0, True],
    ]
    # One memory slice is left, and it is the eighth, where no instance may start.
    assert set(room.values()) == {0}
    assert len(room) == 7


@root_only
@pytest.mark.parametrize(
    ("profile", "most"),
    [("1_SLICE", 7), ("2_SLICE", 3), ("3_SLICE", 2), ("4_SLICE", 1), ("7_SLICE", 1), ("1_SLICE_REV2", 4)],
)
def test_as_many_of_a_profile_as_it_says(machine, profile, most):
    code = (
        HELPERS
        + f"""
profile = NVML_GPU_INSTANCE_PROFILE_{profile}
info = nvmlDeviceGetGpuInstanceProfileInfo(card, profile)
made = []
while True:
    free = nvmlDeviceGetGpuInstanceRemainingCapacity(card, info.id)
    try:
        made.append(nvmlGpuInstanceGetInfo(nvmlDeviceCreateGpuInstance(card, info.id)))
    except NVMLError_InsufficientResources:
        break
    assert free == info.instanceCount - len(made) + 1, free
taken = [set(range(m.placement.start, m.placement.start + m.placement.size)) for m in made]
apart = sum(len(t) for t in taken) == len(set().union(*taken))
result = len(made), info.instanceCount, apart, len({{m.id for m in made}})
"""
    )
    assert machine(A100).nvml(code) == [most, most, True, most]


@root_only
def test_placements_are_kept_to(machine):
    code = (
        HELPERS
        + """
info = nvmlDeviceGetGpuInstanceProfileInfo(card, NVML_GPU_INSTANCE_PROFILE_2_SLICE)
list_, count = (c_nvmlGpuInstancePlacement_t * 8)(), c_uint(8)
nvmlDeviceGetGpuInstancePossiblePlacements(card, info.id, list_, ctypes.byref(count))
possible = [(p.start, p.size) for p in list_[:count.value]]
short = c_uint(2)
too_short = error_of(nvmlDeviceGetGpuInstancePossiblePlacements, card, info.id, list_, ctypes.byref(short))
def at(start, size):
    place = c_nvmlGpuInstancePlacement_t(start, size)
    return error_of(nvmlDeviceCreateGpuInstanceWithPlacement, card, info.id, ctypes.byref(place))
result = possible, [too_short, short.value], [at(1, 2), at(2, 1), at(2, 2), at(2, 2), at(0, 2), at(6, 2)]
"""
    )
    possible, short, made = machine(A100).nvml(code)
    assert possible == [[0, 2], [2, 2], [4, 2]]
    assert short == ["InsufficientSize", 3]
    assert made == [
        "InvalidArgument",
        "InvalidArgument",
        "Success",
        "InsufficientResources",
        "Success",
        "InvalidArgument",
    ]


@root_only
def test_compute_instances_share_a_gpu_instance(machine):
    code = (
        HELPERS
        + """
gi, _ = create(card, NVML_GPU_INSTANCE_PROFILE_3_SLICE, compute=False)
one, two = nvmlGpuInstanceCreateComputeInstance(gi, 0), nvmlGpuInstanceCreateComputeInstance(gi, 1)
infos = [nvmlComputeInstanceGetInfo_v2(ci) for ci in (one, two)]
names = [nvmlDeviceGetName(d).split("MIG ")[1] for d in mig_devices(card)]
memory = {nvmlDeviceGetMemoryInfo(d).total for d in mig_devices(card)}
left = nvmlGpuInstanceGetComputeInstanceRemainingCapacity(gi, 0)
beyond = error_of(nvmlGpuInstanceCreateComputeInstance, gi, 0)
busy = error_of(nvmlGpuInstanceDestroy, gi)
nvmlComputeInstanceDestroy(one)
nvmlComputeInstanceDestroy(two)
nvmlGpuInstanceDestroy(gi)
gone = [error_of(nvmlComputeInstanceGetInfo_v2, one), error_of(nvmlGpuInstanceGetInfo, gi)]
places = [[i.id, i.placement.start, i.placement.size] for i in infos]
result = places, names, len(memory), left, beyond, busy, gone, room(card)[0]
"""
    )
    infos, names, memories, left, beyond, busy, gone, whole = machine(A100).nvml(code)
    assert infos == [[0, 0, 1], [1, 1, 2]]
    assert names == ["1c.3g.20gb", "2c.3g.20gb"]
    assert memories == 1
    assert left == 0
    assert beyond == "InsufficientResources"
    assert busy == "InUse"
    assert gone == ["InvalidArgument", "InvalidArgument"]
    assert whole == 1


@root_only
def test_a_stale_device_handle_is_recognised(machine):
    code = (
        HELPERS
        + """
gi, ci = create(card, NVML_GPU_INSTANCE_PROFILE_1_SLICE)
device = mig_devices(card)[0]
nvmlComputeInstanceDestroy(ci)
stale = error_of(nvmlDeviceGetName, device)
other = nvmlDeviceGetGpuInstanceProfileInfo(card, NVML_GPU_INSTANCE_PROFILE_2_SLICE)
nvmlGpuInstanceDestroy(gi)
create(card, NVML_GPU_INSTANCE_PROFILE_2_SLICE)
result = stale, error_of(nvmlDeviceGetName, device), nvmlDeviceGetName(mig_devices(card)[0])[-7:]
"""
    )
    assert machine(A100).nvml(code) == ["InvalidArgument", "InvalidArgument", "2g.10gb"]


@root_only
def test_an_empty_slot_is_not_found_and_the_next_is_there(machine):
    code = (
        HELPERS
        + """
pairs = [create(card, NVML_GPU_INSTANCE_PROFILE_1_SLICE) for _ in range(3)]
nvmlComputeInstanceDestroy(pairs[1][1])
result = [error_of(nvmlDeviceGetMigDeviceHandleByIndex, card, i) for i in (0, 1, 2, 3, 7)]
"""
    )
    assert machine(A100).nvml(code) == ["Success", "NotFound", "Success", "NotFound", "InvalidArgument"]


@root_only
def test_uuids_of_instances_follow_from_card_and_place(machine):
    code = (
        HELPERS
        + """
create(card, NVML_GPU_INSTANCE_PROFILE_1_SLICE)
create(card, NVML_GPU_INSTANCE_PROFILE_1_SLICE)
result = [nvmlDeviceGetUUID(d) for d in mig_devices(card)]
"""
    )
    first, second = (machine(A100).nvml(code) for _ in range(2))
    assert first == second
    assert len(set(first)) == 2
    assert all(uuid.startswith("MIG-") for uuid in first)


@root_only
def test_the_mode_stays_while_instances_are_there(machine):
    code = (
        HELPERS
        + """
gi, ci = create(card, NVML_GPU_INSTANCE_PROFILE_1_SLICE)
first = error_of(nvmlDeviceSetMigMode, card, 0)
nvmlComputeInstanceDestroy(ci)
nvmlGpuInstanceDestroy(gi)
result = first, error_of(nvmlDeviceSetMigMode, card, 0), nvmlDeviceGetMigMode(card)
"""
    )
    assert machine(A100).nvml(code) == ["InUse", "Success", [0, 0]]


@root_only
def test_a_card_in_mig_mode_does_not_tell_what_only_instances_know(machine):
    code = """
    result = [error_of(nvmlDeviceGetUtilizationRates, card), error_of(nvmlDeviceGetProcessUtilization, card, 0)]
    """
    assert machine(A100).nvml(code) == ["NotSupported", "NotSupported"]


@root_only
def test_processes_of_instances(machine):
    host = machine(A100)
    host.control(
        processes=[
            {"card": 0, "pid": 41, "memory_bytes": "1GiB", "gi": 7, "ci": 0},
            {"card": 0, "pid": 42, "gi": 8, "ci": 0},
        ]
    )
    code = (
        HELPERS
        + """
create(card, NVML_GPU_INSTANCE_PROFILE_1_SLICE)
create(card, NVML_GPU_INSTANCE_PROFILE_1_SLICE)
def told(device):
    return [[p.pid, p.gpuInstanceId, p.computeInstanceId] for p in nvmlDeviceGetComputeRunningProcesses(device)]
result = told(card), [told(d) for d in mig_devices(card)]
"""
    )
    assert host.nvml(code) == [[[41, 7, 0], [42, 8, 0]], [[[41, 7, 0]], [[42, 8, 0]]]]


def test_only_root_changes_mig(machine):
    code = """
    os.setresuid(65534, 65534, 65534)
    result = [error_of(nvmlDeviceSetMigMode, card, 0), error_of(nvmlDeviceCreateGpuInstance, card, 0),
        error_of(nvmlDeviceSetPersistenceMode, card, 0), error_of(nvmlDeviceSetComputeMode, card, 0)]
    """
    if os.geteuid() != 0:
        code = code.replace("os.setresuid(65534, 65534, 65534)", "")
    assert machine(A100).nvml(code) == ["NoPermission"] * 4
