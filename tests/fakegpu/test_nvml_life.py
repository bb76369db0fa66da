# SPDX-License-Identifier: Apache-2.0
"""The life of the library in a process: initialised, nested, shut down, forked, absent."""

from __future__ import annotations


def test_before_init_everything_is_uninitialized(machine):
    assert machine().python("result = [error_of(nvmlDeviceGetCount), error_of(nvmlShutdown)]") == [
        "Uninitialized",
        "Uninitialized",
    ]


def test_init_nests_and_the_last_shutdown_ends_it(machine):
    # pynvml counts for itself, so the library's own count is asked through ctypes.
    code = """
    lib = ctypes.CDLL("libnvidia-ml.so.1")
    count = ctypes.c_uint()
    steps = [lib.nvmlInit_v2(), lib.nvmlInitWithFlags(0), lib.nvmlInit(), lib.nvmlShutdown(), lib.nvmlShutdown()]
    steps.append(lib.nvmlDeviceGetCount_v2(ctypes.byref(count)))
    steps += [lib.nvmlShutdown(), lib.nvmlDeviceGetCount_v2(ctypes.byref(count)), lib.nvmlShutdown(), lib.nvmlInit_v2()]
    result = steps, count.value
    """
    assert machine().python(code) == [[0, 0, 0, 0, 0, 0, 0, 1, 1, 0], 2]


def test_unknown_init_flags_are_refused(machine):
    code = 'lib = ctypes.CDLL("libnvidia-ml.so.1"); result = [lib.nvmlInitWithFlags(f) for f in (1, 2, 3, 4)]'
    assert machine().python(code) == [0, 0, 0, 2]


def test_without_a_configuration_there_is_no_driver(machine):
    host = machine()
    host.config.unlink()
    assert host.python("result = error_of(nvmlInit)") == "DriverNotLoaded"


def test_a_configuration_that_is_not_understood_is_an_error_with_one_line(machine):
    host = machine()
    host.config.write_text('{"version": 1, "cards": [], "crads": []}')
    with host.start("result = error_of(nvmlInit)") as program:
        out, err = program.communicate(timeout=60)
    assert "Unknown" in out
    assert "crads" in err
    assert len(err.strip().splitlines()) == 1


def test_without_the_library_pynvml_says_so(machine, tmp_path):
    assert machine().python("result = error_of(nvmlInit)", LD_LIBRARY_PATH=str(tmp_path)) == "LibraryNotFound"


def test_no_cards_is_a_driver_without_devices(machine):
    assert machine({"count": 0}).nvml("result = nvmlDeviceGetCount()") == 0


def test_many_cards_have_no_cap_of_eight(machine):
    code = "result = [len(cards), len({nvmlDeviceGetUUID(c) for c in cards}), nvmlDeviceGetMinorNumber(cards[63])]"
    assert machine({"count": 64}).nvml(code) == [64, 64, 63]


def test_handles_are_recognised_and_never_followed(machine):
    code = """
    handle = ctypes.c_void_p
    wrong = [handle(0), handle(0xdeadbeef), handle(ctypes.cast(card, handle).value + 1)]
    result = [error_of(nvmlDeviceGetName, h) for h in wrong] + [error_of(nvmlDeviceGetHandleByIndex, 2)]
    """
    assert machine().nvml(code) == ["InvalidArgument"] * 4


def test_a_forked_child_goes_on_with_everything(machine):
    """Also waiting for events, which hangs in a child of drivers that have threads (cdi.md 4.1)."""
    code = """
    events = nvmlEventSetCreate()
    nvmlDeviceRegisterEvents(card, nvmlEventTypeXidCriticalError, events)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        seen = [nvmlDeviceGetName(card), error_of(nvmlEventSetWait_v2, events, 20), nvmlDeviceGetMemoryInfo(card).total]
        os.write(write, json.dumps(seen).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    result = json.loads(os.read(read, 4096)), nvmlDeviceGetName(card)
    """
    assert machine().nvml(code) == [["NVIDIA-Fake24G", "Timeout", 24 << 30], "NVIDIA-Fake24G"]


def test_a_fork_in_the_middle_of_init_leaves_no_lock_behind(machine):
    """Threads start and stop the library while the process forks; every child must be able to."""
    code = """
    import threading
    lib = ctypes.CDLL("libnvidia-ml.so.1")
    stop = False
    def churn():
        while not stop:
            lib.nvmlInit_v2()
            lib.nvmlShutdown()
    threads = [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads: thread.start()
    codes = []
    for _ in range(30):
        pid = os.fork()
        if pid == 0:
            import signal
            signal.alarm(10)
            os._exit(lib.nvmlInit_v2())
        codes.append(os.waitpid(pid, 0)[1])
    stop = True
    for thread in threads: thread.join()
    result = codes
    """
    assert machine().python(code, PYTHONWARNINGS="ignore") == [0] * 30


def test_the_library_starts_no_thread(machine):
    code = """
    before = len(os.listdir("/proc/self/task"))
    events = nvmlEventSetCreate()
    nvmlDeviceRegisterEvents(card, nvmlEventTypeXidCriticalError, events)
    error_of(nvmlEventSetWait_v2, events, 10)
    result = len(os.listdir("/proc/self/task")) - before
    """
    assert machine().nvml(code) == 0


def test_a_configuration_changed_under_a_program_is_a_version_mismatch(machine):
    """As after an update of the driver whose kernel module could not be unloaded."""
    host = machine()
    code = """
    cu = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    assert (cu.cuInit(0), cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)) == (0, 0)
    print("ready", flush=True)
    sys.stdin.readline()
    """
    with host.start(code) as program:
        assert program.stdout.readline() == "ready\n"
        host.config.write_text('{"cards": [{"count": 5}]}')
        assert host.python("result = error_of(nvmlInit)") == "LibRmVersionMismatch"
        program.communicate("\n", timeout=30)
    assert host.nvml("result = len(cards)") == 5
