# SPDX-License-Identifier: Apache-2.0
"""The node's cards as the real pynvml tells them over the fake driver: all of them, whatever one of them does."""

from __future__ import annotations

import shutil
import subprocess

import pytest

GA, GB = "GPU-aaaaaaaa-0000-4000-8000-00000000000a", "GPU-bbbbbbbb-0000-4000-8000-00000000000b"
ONE = {"profile": "Fake24G", "uuid": GA, "serial": "0123456789"}
TWO = {"profile": "Fake24G", "uuid": GB, "minor": 7}

READ = """
    import dataclasses, enum, logging
    from aliquot.api.log import configure
    from aliquot.node.cuda_probe import CudaSizes
    from aliquot.node.inventory import read_inventory
    from aliquot.node.nvml import Nvml
    configure(level="error", stream=sys.stderr.buffer)
    options = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    with Nvml(NVML) as nvml:
        inventory = read_inventory(
            nvml,
            sysfs=Path(options.get("sysfs", "/nowhere")),
            configured_memory=options.get("configured", {}),
            cuda_memory=CudaSizes(CUDA) if options.get("cuda") else None,
        )
    plain = dataclasses.replace(inventory)
    say([{f.name: getattr(c, f.name) for f in dataclasses.fields(c) if f.name not in ("mig", "memory_source")}
         | {"mig": [dataclasses.asdict(m) for m in c.mig], "source": c.memory_source and c.memory_source.value}
         for c in inventory.cards])
    say([dataclasses.asdict(b) for b in inventory.bad])
    say([inventory.driver_version, inventory.cuda_version])
"""


def read(fake, **options: object):
    import json  # noqa: PLC0415

    cards, bad, versions = fake.run(READ, json.dumps(options))
    return cards, bad, versions


def test_a_card_is_read_with_all_that_is_known_of_it(fake):
    fake.cards(ONE, TWO, {"profile": "H200"})
    cards, bad, (driver, cuda) = read(fake)
    assert bad == []
    assert [c["uuid"] for c in cards][:2] == [GA, GB]
    one, two, three = cards
    assert one["serial"] == "0123456789"
    assert (one["index"], one["minor"], two["index"], two["minor"]) == (0, 0, 1, 7)
    assert one["memory_bytes"] == 24 << 30
    assert one["source"] == "nvml"
    assert one["name"] == "NVIDIA-Fake24G"
    assert one["bus_id"] == "0000:01:00.0"
    assert one["numa_node"] == 0
    assert (three["compute_capability"], three["architecture"]) == ([9, 0], "Hopper")
    assert three["multiprocessors"] == 132
    assert three["ecc"] is True
    assert three["reserved_bytes"] > 0
    assert three["mig_capable"] is True
    assert three["mig_enabled"] is False
    assert one["mig_capable"] is False
    assert one["ecc"] is None
    assert driver.count(".") == 2
    assert cuda[0] >= 11


@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceGetHandleByIndex*", "nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo*"],
)
@pytest.mark.parametrize("code", [15, 999])
def test_one_bad_card_never_hides_the_others(fake, function, code):
    fake.cards(ONE, TWO)
    fake.control(faults=[{"function": function, "code": code, "card": 0}])
    cards, bad, _ = read(fake)
    assert [c["uuid"] for c in cards] == [GB]
    assert len(bad) == 1
    assert bad[0]["index"] == 0
    assert f"NVML error {code}" in bad[0]["reason"]


def test_a_lost_card_is_bad_and_named_as_far_as_known(fake):
    fake.cards(ONE, TWO)
    fake.control(cards=[{"card": 1, "lost": True}])
    cards, bad, _ = read(fake)
    assert [c["uuid"] for c in cards] == [GA]
    assert bad[0]["index"] == 1
    assert "reset the card or reboot the node" in bad[0]["reason"]


@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetSerial",
        "nvmlDeviceGetArchitecture",
        "nvmlDeviceGetBrand",
        "nvmlDeviceGetNumGpuCores",
        "nvmlDeviceGetEccMode",
        "nvmlDeviceGetMinorNumber",
        "nvmlDeviceGetPciInfo*",
        "nvmlDeviceGetNumaNodeId",
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetCudaComputeCapability",
        "nvmlSystemGetDriverVersion",
    ],
)
@pytest.mark.parametrize("code", [3, 999])
def test_what_cannot_be_told_is_unknown_and_the_card_is_there(fake, function, code):
    fake.cards(ONE)
    fake.control(faults=[{"function": function, "code": code}])
    cards, bad, _ = read(fake)
    assert bad == []
    assert len(cards) == 1
    assert cards[0]["memory_bytes"] == 24 << 30


def test_whether_a_card_is_split_has_to_be_known(fake):
    fake.cards(ONE, TWO)
    fake.control(faults=[{"function": "nvmlDeviceGetMigMode", "code": 999, "card": 0}])
    cards, bad, _ = read(fake)
    assert [c["uuid"] for c in cards] == [GB]
    assert bad[0]["uuid"] == GA
    fake.control(faults=[{"function": "nvmlDeviceGetMigMode", "code": 3}])
    cards, bad, _ = read(fake)
    assert [c["mig_capable"] for c in cards] == [False, False]


@pytest.mark.parametrize("age", ["470", "525", "550"])
def test_old_drivers_without_newer_symbols_are_read(fake, fake_driver_root, age):
    root = fake_driver_root.with_name(f"fakegpu-{age}")
    if not root.is_dir():
        pytest.skip("the old flavours of the fake driver are not built: make fakegpu")
    fake.nvml = root / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
    fake.cards(ONE, TWO)
    cards, bad, (driver, _) = read(fake)
    assert bad == []
    assert [c["uuid"] for c in cards] == [GA, GB]
    assert driver.startswith(age)


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses"]
)
def test_a_function_that_an_old_driver_has_in_another_version_is_one_clear_sentence(fake, fake_driver_root, function):
    """pynvml says so with an exception that is no NVMLError."""
    root = fake_driver_root.with_name("fakegpu-470")
    if not root.is_dir():
        pytest.skip("the old flavours of the fake driver are not built: make fakegpu")
    program = f"""
        import pynvml
        from aliquot.node.nvml import Nvml, NvmlError
        with Nvml(NVML) as nvml:
            device = nvml.handle("nvmlDeviceGetHandleByIndex", 0)
            try:
                pynvml.{function}(device.value)
            except Exception as e:
                say(type(e).__name__)
            else:
                say("no error")
            say(nvml.optional("{function}", device, default="left out"))
            try:
                nvml.call("{function}", device)
            except NvmlError as e:
                say([str(e), e.code, e.absent, e.driver_gone])
    """
    fake.cards(ONE)
    assert fake.run(program)[0] == "no error", "on a driver of today all is well"
    fake.nvml = root / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
    raised, optional, (text, *rest) = fake.run(program)
    assert raised == "NVMLLibraryMismatchError", "pynvml does otherwise now; this test proves nothing any more"
    assert optional == "left out"
    assert rest == [13, True, False]
    assert text.startswith(f"{function}: NVML error 13 (the driver has no version of it that we know); ")
    assert "older than this function" in text
    assert "\n" not in text


def test_b111_a_name_of_any_length_and_letters_comes_whole(fake):
    name = "NVIDIA Fäke Grafik-Karte mit einem sehr langen Namen für Prüfungen 24 GiB "
    fake.cards({**ONE, "name": name}, TWO)
    cards, bad, _ = read(fake)
    assert bad == []
    assert cards[0]["name"] == name  # trimming is for whoever publishes


def test_b193_memory_unknown_to_nvml_comes_from_cuda_then_from_the_configuration_else_is_none(fake):
    fake.cards({**ONE, "memory_from_nvml": False}, TWO)
    cards, bad, _ = read(fake)
    assert (bad, cards[0]["memory_bytes"], cards[0]["source"]) == ([], None, None)
    cards, _, _ = read(fake, configured={GA: 120 << 30, GB: 1})
    assert (cards[0]["memory_bytes"], cards[0]["source"]) == (120 << 30, "configured")
    assert (cards[1]["memory_bytes"], cards[1]["source"]) == (24 << 30, "nvml")
    cards, _, _ = read(fake, configured={GA: 120 << 30}, cuda=True)
    assert (cards[0]["memory_bytes"], cards[0]["source"]) == (24 << 30, "cuda")
    # CUDA does not answer either: the configuration counts, and nothing breaks.
    fake.control(faults=[{"function": "cuInit", "code": 999}])
    cards, _, _ = read(fake, configured={GA: 120 << 30}, cuda=True)
    assert cards[0]["source"] == "configured"


def test_numa_node_and_pci_root_come_from_the_nodes_sysfs(fake, tmp_path):
    fake.cards(ONE)
    device = tmp_path / "sys/devices/pci0000:3a/0000:3a:00.0/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    link = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    link.parent.mkdir(parents=True)
    link.symlink_to(device)
    cards, _, _ = read(fake, sysfs=str(tmp_path / "sys"))
    assert (cards[0]["numa_node"], cards[0]["pci_root"]) == (1, "pci0000:3a")
    (device / "numa_node").write_text("-1\n")
    assert read(fake, sysfs=str(tmp_path / "sys"))[0][0]["numa_node"] == 0  # then NVML is asked


@pytest.mark.usefixtures("as_root")
def test_b207_mig_instances_made_outside_are_read_with_their_parents(fake):
    fake.cards({"profile": "H200", "mig_enabled": True}, ONE)
    program = """
        import pynvml
        from aliquot.node.nvml import Nvml
        with Nvml(NVML) as nvml:
            device = nvml.handle("nvmlDeviceGetHandleByIndex", 0)
            for profile in (0, 0, 1):  # 1g, 1g, 2g
                info = nvml.call("nvmlDeviceGetGpuInstanceProfileInfo", device, profile)
                instance = nvml.handle("nvmlDeviceCreateGpuInstance", device, info.id)
                compute = nvml.call("nvmlGpuInstanceGetComputeInstanceProfileInfo", instance, profile, 0)
                nvml.call("nvmlGpuInstanceCreateComputeInstance", instance, compute.id)
        say("done")
    """
    assert fake.run(program) == ["done"]
    cards, bad, _ = read(fake)
    assert bad == []
    parent, plain = cards
    assert plain["mig"] == []
    assert len(parent["mig"]) == 3
    assert {m["parent_uuid"] for m in parent["mig"]} == {parent["uuid"]}
    assert all(m["uuid"].startswith("MIG-") for m in parent["mig"])
    assert len({(m["gpu_instance"], m["compute_instance"]) for m in parent["mig"]}) == 3
    assert sorted(m["profile"].partition(".")[0] for m in parent["mig"]) == ["1g", "1g", "2g"]
    assert all(m["memory_bytes"] > 0 and m["multiprocessors"] > 0 for m in parent["mig"])


# ---- the library


def test_a_named_library_is_used_without_any_search_path(fake):
    fake.cards(ONE)
    fake.environment.pop("LD_LIBRARY_PATH", None)
    assert read(fake)[0][0]["uuid"] == GA


def test_without_a_name_the_loader_searches(fake):
    fake.cards(ONE)
    fake.environment["LD_LIBRARY_PATH"] = str(fake.nvml.parent)
    program = """
        from aliquot.node.nvml import Nvml
        with Nvml() as nvml:
            say(nvml.call("nvmlDeviceGetCount"))
    """
    assert fake.run(program) == [1]


OPEN = """
    from aliquot.api.errors import AliquotError
    from aliquot.node.nvml import Nvml, NvmlError
    nvml = Nvml(Path(sys.argv[3]))
    try:
        nvml.open()
        say("opened")
    except AliquotError as e:
        say([type(e).__name__, str(e)])
"""


def test_b079_a_library_that_is_not_there_yet_is_found_later(fake, tmp_path):
    fake.cards(ONE)
    later = tmp_path / "driver" / "libnvidia-ml.so.1"
    program = f"""{OPEN}
    sys.stdin.readline()
    nvml.open()
    say(nvml.call("nvmlDeviceGetCount"))
    """
    process = fake.start(program, later)
    first = process.stdout.readline()
    assert "NvmlError" in first
    assert "is not a file); install the NVIDIA driver, or name the file" in first
    later.parent.mkdir()
    shutil.copy(fake.nvml, later)
    out, _ = process.communicate("\n", timeout=30)
    assert out == "1\n"


def test_a_file_that_is_another_library_is_refused_before_it_is_asked_anything(fake, tmp_path):
    fake.cards(ONE)
    source = tmp_path / "other.c"
    source.write_text("int x;\n")
    other = tmp_path / "libother.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(other), str(source)], check=True)
    (kind, text) = fake.run(OPEN, other)[0]
    assert kind == "HardwareError"
    assert "is not an NVML library: its SONAME is not libnvidia-ml.so.1" in text
    (tmp_path / "text.so").write_text("no library")
    (kind, text) = fake.run(OPEN, tmp_path / "text.so")[0]
    assert "cannot be loaded" in text


def test_a_second_library_in_one_process_is_refused(fake, tmp_path):
    fake.cards(ONE)
    copy = tmp_path / "copy" / "libnvidia-ml.so.1"
    copy.parent.mkdir()
    shutil.copy(fake.nvml, copy)
    program = f"""
    from aliquot.node.nvml import Nvml as First
    First(NVML).open()
    {OPEN}"""
    (kind, text) = fake.run(program, copy)[0]
    assert kind == "HardwareError"
    assert "another libnvidia-ml.so.1 is already loaded" in text


def test_after_a_reopen_old_handles_are_refused_and_new_ones_work(fake):
    fake.cards(ONE)
    program = """
        from aliquot.node.nvml import Nvml, NvmlError
        nvml = Nvml(NVML)
        nvml.open()
        old = nvml.handle("nvmlDeviceGetHandleByIndex", 0)
        seen = nvml.opening
        nvml.reopen(after=seen)
        nvml.reopen(after=seen)  # somebody else's wish, already fulfilled
        say(nvml.opening - seen)
        try:
            nvml.call("nvmlDeviceGetUUID", old)
        except NvmlError as e:
            say(str(e))
        say(nvml.call("nvmlDeviceGetUUID", nvml.handle("nvmlDeviceGetHandleByIndex", 0)))
        nvml.close()
        try:
            nvml.call("nvmlDeviceGetCount")
        except NvmlError as e:
            say([e.driver_gone, e.code])
    """
    once, refused, uuid, closed = fake.run(program)
    assert once == 1
    assert "the handle is from before NVML was opened anew" in str(refused)
    assert uuid == GA
    assert closed == [True, 1]


def test_reopening_waits_for_calls_in_flight(fake):
    fake.cards(ONE)
    fake.control(faults=[{"function": "nvmlDeviceGetName", "slow_us": 300000}])
    program = """
        import threading, time
        from aliquot.node.nvml import Nvml
        nvml = Nvml(NVML)
        nvml.open()
        handle = nvml.handle("nvmlDeviceGetHandleByIndex", 0)
        said = []
        slow = threading.Thread(target=lambda: said.append(nvml.call("nvmlDeviceGetName", handle)))
        slow.start()
        while not nvml._in_flight: time.sleep(0.001)
        nvml.reopen()
        say([said, nvml.opening])
        slow.join()
    """
    assert fake.run(program) == [[["NVIDIA-Fake24G"], 2]]


def test_errors_name_the_function_the_code_and_the_next_step(fake):
    fake.cards(ONE)
    program = """
        from aliquot.node.nvml import Nvml, NvmlError
        with Nvml(NVML) as nvml:
            for function in ("nvmlDeviceGetHandleByUUID", "nvmlDeviceGetNothing"):
                try:
                    nvml.call(function, "GPU-none")
                except NvmlError as e:
                    say([str(e), e.absent])
    """
    (first, absent), (second, unknown) = fake.run(program)
    assert first.startswith("nvmlDeviceGetHandleByUUID: NVML error 6 (Not Found); ")
    assert absent is False
    assert "does not know it" in second
    assert unknown is True
