# SPDX-License-Identifier: Apache-2.0
"""Unmodified pynvml over everything: what inventory, health and exporter use answers; no getter ends in a surprise."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

# What our node daemons, and exporters of others, call on every card. Each must return a value on a data center card.
USED = """
used = {
    "nvmlSystemGetDriverVersion": (), "nvmlSystemGetNVMLVersion": (), "nvmlSystemGetCudaDriverVersion": (),
    "nvmlDeviceGetCount": (),
    **{name: (card,) for name in '''
        nvmlDeviceGetName nvmlDeviceGetUUID nvmlDeviceGetSerial nvmlDeviceGetIndex nvmlDeviceGetMinorNumber
        nvmlDeviceGetPciInfo nvmlDeviceGetBrand nvmlDeviceGetArchitecture nvmlDeviceGetCudaComputeCapability
        nvmlDeviceGetNumGpuCores nvmlDeviceGetMemoryBusWidth nvmlDeviceGetMemoryInfo nvmlDeviceGetBAR1MemoryInfo
        nvmlDeviceGetUtilizationRates nvmlDeviceGetEncoderUtilization nvmlDeviceGetDecoderUtilization
        nvmlDeviceGetJpgUtilization nvmlDeviceGetOfaUtilization nvmlDeviceGetPowerUsage nvmlDeviceGetEnforcedPowerLimit
        nvmlDeviceGetPowerManagementLimit nvmlDeviceGetPowerManagementDefaultLimit
        nvmlDeviceGetPowerManagementLimitConstraints nvmlDeviceGetTotalEnergyConsumption nvmlDeviceGetPerformanceState
        nvmlDeviceGetCurrentClocksEventReasons nvmlDeviceGetSupportedClocksEventReasons
        nvmlDeviceGetPersistenceMode nvmlDeviceGetComputeMode nvmlDeviceGetEccMode nvmlDeviceGetMigMode
        nvmlDeviceGetMaxMigDeviceCount nvmlDeviceIsMigDeviceHandle nvmlDeviceGetVirtualizationMode
        nvmlDeviceGetComputeRunningProcesses nvmlDeviceGetGraphicsRunningProcesses
        nvmlDeviceGetMPSComputeRunningProcesses nvmlDeviceGetRemappedRows nvmlDeviceGetRowRemapperHistogram
        nvmlDeviceGetSupportedEventTypes nvmlDeviceGetCurrPcieLinkGeneration nvmlDeviceGetMaxPcieLinkGeneration
        nvmlDeviceGetCurrPcieLinkWidth nvmlDeviceGetMaxPcieLinkWidth nvmlDeviceGetPcieReplayCounter
        nvmlDeviceGetAccountingMode nvmlDeviceGetAccountingBufferSize nvmlDeviceGetVbiosVersion
        nvmlDeviceGetBoardPartNumber nvmlDeviceGetInforomImageVersion nvmlDeviceGetGspFirmwareVersion
        nvmlDeviceGetDisplayActive nvmlDeviceGetNumaNodeId nvmlDeviceGetModuleId nvmlDeviceGetNumFans
    '''.split()},
    "nvmlDeviceGetTemperature": (card, NVML_TEMPERATURE_GPU), "nvmlDeviceGetClockInfo": (card, NVML_CLOCK_SM),
    "nvmlDeviceGetMaxClockInfo": (card, NVML_CLOCK_MEM), "nvmlDeviceGetApplicationsClock": (card, NVML_CLOCK_MEM),
    "nvmlDeviceGetTemperatureThreshold": (card, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
    "nvmlDeviceGetTotalEccErrors": (card, 1, 0), "nvmlDeviceGetPcieThroughput": (card, NVML_PCIE_UTIL_RX_BYTES),
    "nvmlDeviceGetViolationStatus": (card, NVML_PERF_POLICY_POWER), "nvmlDeviceGetCpuAffinity": (card, 4),
    "nvmlDeviceGetMemoryAffinity": (card, 1, 0), "nvmlDeviceGetTopologyNearestGpus": (card, NVML_TOPOLOGY_SYSTEM),
    "nvmlDeviceGetSupportedMemoryClocks": (card,), "nvmlDeviceGetSupportedGraphicsClocks": (card, 1215),
    "nvmlDeviceGetSamples": (card, NVML_GPU_UTILIZATION_SAMPLES, 0), "nvmlDeviceGetNvLinkState": (card, 0),
    "nvmlDeviceGetFieldValues": (card, [NVML_FI_DEV_MEMORY_TEMP, NVML_FI_DEV_POWER_INSTANT]),
}
"""


@pytest.mark.parametrize("profile", ["A100-40", "H100", "B200"])
def test_what_daemons_use_answers(machine, profile):
    code = USED + "\nresult = {name: error_of(globals()[name], *arguments) for name, arguments in used.items()}"
    if profile != "A100-40":
        code = code.replace("(card, 1215)", "(card, nvmlDeviceGetMaxClockInfo(card, NVML_CLOCK_MEM))")
    told = machine({"profile": profile, "count": 2}).nvml(code)
    assert {name: error for name, error in told.items() if error != "Success"} == {}


def test_every_getter_of_one_device_returns_or_says_not_supported(machine):
    """A sweep as in cdi.md 4.1: nothing crashes, nothing ends in an unknown error."""
    code = """
    import inspect
    told = {}
    for name, call in sorted(vars(pynvml).items()):
        if not name.startswith("nvmlDeviceGet") or not inspect.isfunction(call):
            continue
        needed = [p for p in inspect.signature(call).parameters.values() if p.default is p.empty]
        if len(needed) != 1 or needed[0].name not in ("handle", "device", "self"):
            continue
        try:
            told[name] = error_of(call, card)
        except (TypeError, ctypes.ArgumentError) as error:  # a defect of the binding, before it calls
            told[name] = "binding"
    result = told
    """
    told = machine({"profile": "A100-40"}).nvml(code)
    data = [name for name, error in told.items() if error == "Success"]
    allowed = {"Success", "NotSupported", "InvalidArgument", "ArgumentVersionMismatch", "NotFound", "binding"}
    assert {name: error for name, error in told.items() if error not in allowed} == {}
    assert len(data) >= 75, sorted(set(told) - set(data))


# Called by our daemons on something else than a card, and tested there.
ELSEWHERE = {
    "test_nvml_life.py": ("nvmlInit", "nvmlInit_v2", "nvmlShutdown", "nvmlDeviceGetHandleByIndex"),
    "test_nvml_cards.py": ("nvmlDeviceGetHandleByUUID",),
    "test_nvml_process.py": ("nvmlDeviceGetProcessUtilization",),
    "test_nvml_events.py": (
        "nvmlEventSetCreate",
        "nvmlDeviceRegisterEvents",
        "nvmlEventSetWait",
        "nvmlEventSetFree",
    ),
    "test_nvml_mig.py": (
        "nvmlDeviceGetMigDeviceHandleByIndex",
        "nvmlDeviceGetAttributes_v2",
        "nvmlDeviceGetGpuInstanceId",
        "nvmlDeviceGetComputeInstanceId",
    ),
}


def test_the_list_has_every_function_that_our_daemons_name():
    """A function that somebody adds to a daemon has to be shown to answer here, by one of the tests around this one."""
    named = set()
    for path in REPOSITORY.glob("*/aliquot/**/*.py"):
        if path.relative_to(REPOSITORY).parts[0] != "e2e":
            named |= set(re.findall(r'"(nvml[A-Z]\w+)"', path.read_text()))
    assert len(named) > 20
    swept = set(re.findall(r"\bnvml[A-Z]\w+", USED)) | {f"{name}_v2" for name in re.findall(r"nvmlSystem\w+", USED)}
    tested = {name for names in ELSEWHERE.values() for name in names}
    assert named - swept - tested == set(), "add them to USED, or to ELSEWHERE with the file that tests them"
    for file, names in ELSEWHERE.items():
        text = (Path(__file__).parent / file).read_text()
        assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


def test_the_same_calls_on_a_mig_device_end_well(machine):
    if os.geteuid() != 0:
        pytest.skip("only root may change MIG")
    code = (
        """
gi = nvmlDeviceCreateGpuInstance(card, nvmlDeviceGetGpuInstanceProfileInfo(card, 0).id)
nvmlGpuInstanceCreateComputeInstance(gi, 0)
card = nvmlDeviceGetMigDeviceHandleByIndex(card, 0)
"""
        + USED
        + """
used |= {name: (card,) for name in ("nvmlDeviceGetAttributes_v2", "nvmlDeviceGetGpuInstanceId",
    "nvmlDeviceGetComputeInstanceId", "nvmlDeviceGetDeviceHandleFromMigDeviceHandle")}
result = {name: error_of(globals()[name], *arguments) for name, arguments in used.items()}
"""
    )
    told = machine({"profile": "A100-40", "mig_enabled": True}).nvml(code)
    assert set(told.values()) <= {"Success", "NotSupported", "InvalidArgument"}
    answers = {name for name, error in told.items() if error == "Success" and name.startswith("nvmlDevice")}
    assert answers >= {
        "nvmlDeviceGetName",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetIndex",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetAttributes_v2",
        "nvmlDeviceGetGpuInstanceId",
        "nvmlDeviceGetComputeInstanceId",
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle",
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlDeviceIsMigDeviceHandle",
    }
    # What belongs to the whole card is not a part's to tell.
    assert not answers & {"nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetMigMode"}


def test_the_same_calls_on_an_old_card_end_well(machine):
    code = USED + "\nresult = {name: error_of(globals()[name], *arguments) for name, arguments in used.items()}"
    told = machine({"profile": "T4"}).nvml(code)
    assert set(told.values()) <= {"Success", "NotSupported", "NotFound"}
    # What a T4 lacks: MIG, NVLink, remapped rows.
    assert {name for name, error in told.items() if error == "NotSupported"} == {
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetRowRemapperHistogram",
    }


@pytest.mark.parametrize("flavour", ["550", "525", "470"])
def test_an_old_driver_misses_functions_and_the_rest_answers(machine, flavour):
    code = USED + "\nresult = {name: error_of(globals()[name], *arguments) for name, arguments in used.items()}"
    told = machine({"profile": "A100-40", "count": 2}, flavour=flavour).nvml(code)
    assert set(told.values()) <= {"Success", "FunctionNotFound"}
    missing = {name for name, error in told.items() if error == "FunctionNotFound"}
    assert bool(missing) == (flavour != "550")
    assert "nvmlDeviceGetMemoryInfo" not in missing
