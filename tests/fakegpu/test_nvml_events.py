# SPDX-License-Identifier: Apache-2.0
"""Events: Xids from the control file to every set that waits, once; cards that are lost, and that come back."""

from __future__ import annotations

import json

WAIT = """
def wait(events, milliseconds=2000):
    try:
        data = nvmlEventSetWait_v2(events, milliseconds)
    except NVMLError as error:
        return type(error).__name__.removeprefix("NVMLError_")
    # By the handle, not by a call: the card may be lost.
    numbers = [ctypes.cast(c, ctypes.c_void_p).value for c in cards]
    index = numbers.index(ctypes.cast(data.device, ctypes.c_void_p).value)
    return [index, data.eventType, data.eventData, data.gpuInstanceId, data.computeInstanceId]

def control(**settings):
    path = os.environ["FAKEGPU_CONFIG"] + ".control"
    with open(path + ".new", "w") as file:
        json.dump(settings, file)
    os.replace(path + ".new", path)

def xid(number, card, code):
    return {"id": number, "card": card, "xid": code}

def listen(*devices):
    events = nvmlEventSetCreate()
    for device in devices:
        nvmlDeviceRegisterEvents(device, nvmlEventTypeXidCriticalError, events)
    return events
"""
NONE = 0xFFFFFFFF


def ready(program) -> None:
    """Waits until the program has said that it listens."""
    assert program.stdout.readline().strip() == "ready"


def test_a_wait_ends_in_time(machine):
    code = (
        WAIT
        + """
events = listen(card)
start = time.monotonic()
told = wait(events, 60)
result = told, 0.05 < time.monotonic() - start < 1
"""
    )
    assert machine().nvml(code) == ["Timeout", True]


def test_an_xid_reaches_every_waiting_set_once(machine):
    host = machine({"count": 2})
    code = (
        "nvmlInit()\ncards = [nvmlDeviceGetHandleByIndex(i) for i in (0, 1)]\n"
        + WAIT
        + """
both, second = listen(*cards), listen(cards[1])
print("ready", flush=True)
result = wait(both, 20000), wait(second, 30), wait(both, 30)
"""
    )
    with host.start(code) as one, host.start(code) as two:
        for program in (one, two):
            ready(program)
        host.control(events=[{"id": 1, "card": 0, "xid": 79}])
        outputs = [program.communicate(timeout=30)[0] for program in (one, two)]
    for output in outputs:
        assert output.strip().splitlines()[-1] == f'[[0, 8, 79, {NONE}, {NONE}], "Timeout", "Timeout"]'


def test_events_of_instances_carry_their_ids(machine):
    host = machine()
    code = (
        WAIT
        + """
events = listen(card)
control(events=[xid(5, 0, 31) | {"gi": 3, "ci": 1}])
result = wait(events)
"""
    )
    assert host.nvml(code) == [0, 8, 31, 3, 1]


def test_events_before_registration_and_of_other_cards_are_not_told(machine):
    host = machine({"count": 2})
    host.control(events=[{"id": 1, "card": 0, "xid": 13}])
    code = (
        WAIT
        + """
events = listen(card)
first = wait(events, 30)
control(events=[xid(1, 0, 13), xid(2, 1, 48), xid(3, 0, 43)])
result = first, wait(events)[2], wait(events, 30)
"""
    )
    assert host.nvml(code) == ["Timeout", 43, "Timeout"]


def test_what_happens_between_a_set_and_its_registration_is_not_told(machine):
    code = (
        WAIT
        + """
events = nvmlEventSetCreate()
other = listen(card)
control(events=[xid(2, 0, 13)])
seen = wait(other)[2]  # by now the event is in the ring, and `events` has not looked
nvmlDeviceRegisterEvents(card, nvmlEventTypeXidCriticalError, events)
control(events=[xid(2, 0, 13), xid(3, 0, 63)])
result = seen, wait(events)[2], wait(events, 30)
"""
    )
    assert machine().nvml(code) == [13, 63, "Timeout"]


def test_types_that_were_not_asked_for_are_not_told(machine):
    code = (
        WAIT
        + """
events = nvmlEventSetCreate()
nvmlDeviceRegisterEvents(card, nvmlEventTypeClock, events)
control(events=[xid(1, 0, 48), xid(2, 0, 0) | {"type": 16}])
result = wait(events)[1], wait(events, 30)
"""
    )
    assert machine().nvml(code) == [16, "Timeout"]


def test_the_first_form_writes_no_instances(machine):
    host = machine()
    code = (
        WAIT
        + """
events = listen(card)
control(events=[xid(1, 0, 31)])
buffer = (ctypes.c_ubyte * 64)(*[0xaa] * 64)
code = ctypes.CDLL("libnvidia-ml.so.1").nvmlEventSetWait(events, buffer, 2000)
result = code, max(i for i, byte in enumerate(buffer) if byte != 0xaa) + 1
"""
    )
    assert host.nvml(code) == [0, 24]


def test_sets_are_checked(machine):
    code = (
        WAIT
        + """
events = listen(card)
nvmlEventSetFree(events)
result = [wait(events, 0), error_of(nvmlEventSetFree, events), error_of(nvmlDeviceRegisterEvents, card, 8, events),
    error_of(nvmlDeviceRegisterEvents, card, 0, nvmlEventSetCreate()),
    error_of(nvmlDeviceRegisterEvents, card, nvmlEventTypeDoubleBitEccError, nvmlEventSetCreate()),
    nvmlDeviceGetSupportedEventTypes(card)]
"""
    )
    assert machine().nvml(code) == [
        "InvalidArgument",
        "InvalidArgument",
        "InvalidArgument",
        "InvalidArgument",
        "NotSupported",
        0x1C,
    ]


def test_a_lost_card_answers_so_everywhere_and_comes_back(machine):
    host = machine({"count": 2})
    code = (
        WAIT
        + """
events = listen(*cards)
def calls(device):
    return [error_of(call, device) for call in (nvmlDeviceGetName, nvmlDeviceGetMemoryInfo, nvmlDeviceGetTemperatureV,
        nvmlDeviceGetComputeRunningProcesses, nvmlDeviceGetUtilizationRates)]
uuid = nvmlDeviceGetUUID(card)
control(cards=[{"card": 0, "lost": True}], events=[xid(1, 0, 79)])
before = wait(events)[2], wait(events, 1000)
handles = error_of(nvmlDeviceGetHandleByIndex, 0), error_of(nvmlDeviceGetHandleByUUID, uuid)
lost = calls(card), calls(cards[1]), *handles, nvmlDeviceGetCount()
control(events=[xid(1, 0, 79)])
while error_of(nvmlDeviceGetHandleByIndex, 0) != "Success":
    time.sleep(0.005)
result = before, lost, calls(card), wait(events, 30)
"""
    )
    before, lost, back, silence = host.nvml(code.replace("nvmlDeviceGetTemperatureV", "nvmlDeviceGetMinorNumber"))
    assert before == [79, "GpuIsLost"]
    assert lost == [["GpuIsLost"] * 5, ["Success"] * 5, "GpuIsLost", "GpuIsLost", 2]
    assert back == ["Success"] * 5
    assert silence == "Timeout"


def test_the_recovery_action_is_a_field(machine):
    host = machine({"count": 2})
    host.control(cards=[{"card": 1, "recovery_action": 4}])
    code = "result = [nvmlDeviceGetFieldValues(c, [NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])[0].value.uiVal for c in cards]"
    assert host.nvml(code) == [0, 4]


def test_more_events_than_the_ring_holds_lose_the_oldest_only(machine):
    """Sixty-four fit into a control file; five of them overrun the ring of 256."""
    host = machine()
    code = (
        "nvmlInit()\ncard = nvmlDeviceGetHandleByIndex(0)\ncards = [card]\n"
        + WAIT
        + """
events = listen(card)
print("ready", flush=True)
sys.stdin.readline()
seen = []
while (told := wait(events, 0)) != "Timeout":
    seen.append(told[2])
result = seen
"""
    )
    with host.start(code) as program:
        ready(program)
        for batch in range(5):
            host.control(events=[{"id": batch * 64 + i + 1, "card": 0, "xid": batch * 64 + i + 1} for i in range(64)])
            host.nvml("nvmlDeviceGetCount()")  # whoever calls takes the file over into the ring
        out, _ = program.communicate("go\n", timeout=30)
    seen = json.loads(out.strip().splitlines()[-1])
    assert seen == list(range(320 - 256 + 1, 321))
