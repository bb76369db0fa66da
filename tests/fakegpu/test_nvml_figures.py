# SPDX-License-Identifier: Apache-2.0
"""Figures of a card: computed, told by the control file, set through NVML; fields, samples, accounting; faults, log."""

from __future__ import annotations

import json
import os
import time

import pytest

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root may set modes")


def test_an_idle_card(machine):
    code = """
    rates = nvmlDeviceGetUtilizationRates(card)
    result = [rates.gpu, rates.memory, nvmlDeviceGetPowerUsage(card), nvmlDeviceGetTemperature(card, 0),
        nvmlDeviceGetPerformanceState(card), nvmlDeviceGetClockInfo(card, NVML_CLOCK_SM),
        nvmlDeviceGetMaxClockInfo(card, NVML_CLOCK_SM), nvmlDeviceGetCurrentClocksThrottleReasons(card)]
    """
    assert machine({"profile": "A100-40"}).nvml(code) == [0, 0, 50000, 30, 8, 210, 1410, 1]


def test_figures_of_the_control_file(machine):
    host = machine({"profile": "A100-40", "count": 2})
    host.control(
        cards=[
            {
                "card": 0,
                "gpu_utilization": 87,
                "memory_utilization": 12,
                "temperature": 71,
                "power_mw": 321000,
                "sm_clock_mhz": 1200,
                "memory_clock_mhz": 1100,
                "fan": 55,
                "encoder_utilization": 4,
                "decoder_utilization": 5,
                "throttle_reasons": 0x44,
            }
        ]
    )
    code = """
    def told(c):
        rates = nvmlDeviceGetUtilizationRates(c)
        return [rates.gpu, rates.memory, nvmlDeviceGetTemperature(c, 0), nvmlDeviceGetPowerUsage(c),
            nvmlDeviceGetClockInfo(c, NVML_CLOCK_GRAPHICS), nvmlDeviceGetClockInfo(c, NVML_CLOCK_MEM),
            nvmlDeviceGetEncoderUtilization(c)[0], nvmlDeviceGetDecoderUtilization(c)[0],
            nvmlDeviceGetCurrentClocksEventReasons(c), nvmlDeviceGetPerformanceState(c)]
    fans = [nvmlDeviceGetFanSpeed(cards[0]), nvmlDeviceGetNumFans(cards[0]), nvmlDeviceGetNumFans(cards[1]),
        error_of(nvmlDeviceGetFanSpeed, cards[1])]
    result = told(cards[0]), told(cards[1])[:3], fans
    """
    first, second, fans = host.nvml(code)
    assert first == [87, 12, 71, 321000, 1200, 1100, 4, 5, 0x44, 0]
    assert second == [0, 0, 30]
    assert fans == [55, 1, 0, "NotSupported"]


def test_the_control_file_is_followed_while_a_program_runs(machine):
    host = machine()
    code = """
    def wait_for(percent):
        while nvmlDeviceGetUtilizationRates(card).gpu != percent:
            time.sleep(0.002)
        return percent
    print("ready", flush=True)
    result = wait_for(33), wait_for(0)
    """
    start = "nvmlInit()\ncard = nvmlDeviceGetHandleByIndex(0)\n"
    with host.start(start + "\n".join(line[4:] for line in code.splitlines())) as program:
        assert program.stdout.readline().strip() == "ready"
        host.control(cards=[{"card": 0, "gpu_utilization": 33}])
        time.sleep(0.1)
        host.control()
        out, _ = program.communicate(timeout=30)
    assert json.loads(out.strip().splitlines()[-1]) == [33, 0]


def test_energy_never_runs_backwards(machine):
    code = """
    readings = []
    for _ in range(20):
        readings.append(nvmlDeviceGetTotalEnergyConsumption(card))
        time.sleep(0.002)
    result = readings == sorted(readings), readings[-1] > readings[0]
    """
    assert machine({"profile": "A100-40"}).nvml(code) == [True, True]


def test_fields(machine):
    host = machine({"profile": "A100-40", "count": 2}, links=[{"cards": [0, 1], "count": 12}])
    host.control(cards=[{"card": 0, "ecc_uncorrected": 3, "remapped_rows": 1, "temperature": 50}])
    code = """
    ids = [NVML_FI_DEV_ECC_CURRENT, NVML_FI_DEV_ECC_DBE_VOL_TOTAL, NVML_FI_DEV_REMAPPED_UNC, NVML_FI_DEV_MEMORY_TEMP,
        NVML_FI_DEV_NVLINK_LINK_COUNT, NVML_FI_DEV_POWER_MAX_LIMIT, NVML_FI_DEV_RETIRED_DBE, 0, 9999,
        (NVML_FI_DEV_NVLINK_GET_STATE, 3)]
    values = nvmlDeviceGetFieldValues(card, ids)
    result = [[v.nvmlReturn, v.value.ullVal if v.nvmlReturn == 0 else None] for v in values], abs(
        values[0].timestamp / 1e6 - time.time()) < 5
    """
    values, fresh = host.nvml(code)
    assert values == [[0, 1], [0, 3], [0, 1], [0, 55], [0, 12], [0, 400000], [3, None], [2, None], [2, None], [0, 1]]
    assert fresh


def test_samples_are_ordered_and_new_once(machine):
    code = """
    kind, samples = nvmlDeviceGetSamples(card, NVML_GPU_UTILIZATION_SAMPLES, 0)
    times = [s.timeStamp for s in samples]
    later = nvmlDeviceGetSamples(card, NVML_GPU_UTILIZATION_SAMPLES, times[-3])[1]
    idle = {s.sampleValue.uiVal for s in samples} == {0}
    result = kind, len(times), times == sorted(times), idle, len(later) in (2, 3)
    """
    assert machine().nvml(code) == [1, 60, True, True, True]


# ---- what can be set ------------------------------------------------------------------------------------


@root_only
def test_modes_are_seen_by_every_process(machine):
    host = machine({"profile": "A100-40"})
    host.nvml(
        """
        nvmlDeviceSetPersistenceMode(card, 0)
        nvmlDeviceSetComputeMode(card, NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)
        nvmlDeviceSetPowerManagementLimit(card, 250000)
        nvmlDeviceSetEccMode(card, 0)
        nvmlDeviceSetAccountingMode(card, 1)
        nvmlDeviceSetApplicationsClocks(card, 1215, 900)
        """
    )
    code = """
    result = [nvmlDeviceGetPersistenceMode(card), nvmlDeviceGetComputeMode(card),
        nvmlDeviceGetPowerManagementLimit(card),
        nvmlDeviceGetEnforcedPowerLimit(card), nvmlDeviceGetEccMode(card), nvmlDeviceGetAccountingMode(card),
        nvmlDeviceGetApplicationsClock(card, NVML_CLOCK_GRAPHICS)]
    """
    assert host.nvml(code) == [0, 3, 250000, 250000, [1, 0], 1, 900]


@root_only
def test_settings_out_of_range_are_refused(machine):
    code = """
    limits = [error_of(nvmlDeviceSetPowerManagementLimit, card, limit) for limit in (99999, 400001)]
    result = [*limits, error_of(nvmlDeviceSetComputeMode, card, 4), error_of(nvmlDeviceSetComputeMode, card, 1),
        error_of(nvmlDeviceSetApplicationsClocks, card, 9999, 900)]
    """
    assert machine({"profile": "A100-40"}).nvml(code) == [
        "InvalidArgument",
        "InvalidArgument",
        "InvalidArgument",
        "NotSupported",
        "InvalidArgument",
    ]


# ---- faults and the log -----------------------------------------------------------------------------------


def test_a_fault_by_function_count_and_card(machine):
    host = machine({"count": 2})
    host.control(
        faults=[
            {"function": "nvmlDeviceGetTemperature", "code": 999, "after": 1, "count": 2},
            {"function": "nvmlDeviceGetPower*", "code": 3, "card": 1},
        ]
    )
    code = """
    heat = [error_of(nvmlDeviceGetTemperature, card, 0) for _ in range(5)]
    power = [[error_of(call, c) for call in (nvmlDeviceGetPowerUsage, nvmlDeviceGetPowerState)] for c in cards]
    result = heat, power
    """
    heat, power = host.nvml(code)
    assert heat == ["Success", "Unknown", "Unknown", "Success", "Success"]
    assert power == [["Success", "Success"], ["NotSupported", "NotSupported"]]


def test_faults_on_init_and_on_names_nobody_implemented(machine):
    host = machine()
    host.control(
        faults=[{"function": "nvmlInit*", "code": 18, "count": 1}, {"function": "nvmlDeviceGetVgpuMetadata", "code": 4}]
    )
    code = """
    lib = ctypes.CDLL("libnvidia-ml.so.1")
    result = lib.nvmlInitWithFlags(0), lib.nvmlInitWithFlags(0), lib.nvmlDeviceGetVgpuMetadata(None, None, None)
    """
    assert host.python(code) == [18, 0, 4]


def test_a_slow_call(machine):
    host = machine()
    host.control(faults=[{"function": "nvmlDeviceGetName", "slow_us": 60000}])
    code = """
    start = time.monotonic()
    name = nvmlDeviceGetName(card)
    result = name, time.monotonic() - start
    """
    name, took = host.nvml(code)
    assert name == "NVIDIA-Fake24G"
    assert 0.06 <= took < 5


def test_the_call_log_keeps_order_and_count(machine, tmp_path):
    log = tmp_path / "calls.log"
    machine().nvml("[nvmlDeviceGetName(c) for c in cards]; nvmlDeviceGetUUID(cards[1])", FAKEGPU_LOG=str(log))
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    names = [call["f"] for call in calls]
    assert names[0] == "nvmlInitWithFlags"
    assert names[-1] == "nvmlShutdown"
    about = [(call["f"], call["a"]) for call in calls if call["f"] in {"nvmlDeviceGetName", "nvmlDeviceGetUUID"}]
    assert about == [("nvmlDeviceGetName", "card=0"), ("nvmlDeviceGetName", "card=1"), ("nvmlDeviceGetUUID", "card=1")]
