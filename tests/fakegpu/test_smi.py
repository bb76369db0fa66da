# SPDX-License-Identifier: Apache-2.0
"""nvidia-smi and the MPS control: what people read and what scripts parse."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from xml.etree import ElementTree as ET

import pytest

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root may change a card")
PROCESSES = [
    {"card": 0, "pid": 5001, "memory_bytes": "1500MiB", "name": "/usr/bin/a/very/long/path/to/python3.11"},
    {"card": 1, "pid": 5002, "memory_bytes": "2GiB", "type": "M", "name": "nvidia-cuda-mps-server"},
]


def test_the_table_has_straight_edges(machine):
    host = machine({"profile": "A100-40"}, {"profile": "H100"})
    host.control(processes=PROCESSES, cards=[{"card": 0, "gpu_utilization": 100, "ecc_uncorrected": 123456}])
    text = host.run("nvidia-smi").stdout
    lines = [line for line in text.splitlines() if line]
    assert {len(line) for line in lines} == {91}, text
    assert "Driver Version: 580.65.06" in text
    assert "CUDA Version: 13.0" in text
    assert re.search(r"\|   0  NVIDIA A100-SXM4-40GB +On  \|   00000000:01:00.0 Off \| +123456 \|", text)
    assert re.search(r"0MiB /  40960MiB \| +100% +Default \|", text)
    assert re.search(r"\|    0  N/A  N/A +5001      C   \.\.\.ery/long/path/to/python3\.11 +1500MiB \|", text)
    assert re.search(r"\|    1  N/A  N/A +5002      M   nvidia-cuda-mps-server +2048MiB \|", text)


def test_the_table_without_processes(machine):
    assert "No running processes found" in machine().run("nvidia-smi").stdout


def test_list(machine):
    host = machine(
        {"uuid": "GPU-00000000-0000-0000-0000-000000000001"}, {"uuid": "GPU-00000000-0000-0000-0000-000000000002"}
    )
    assert host.run("nvidia-smi", "-L").stdout == (
        "GPU 0: NVIDIA-Fake24G (UUID: GPU-00000000-0000-0000-0000-000000000001)\n"
        "GPU 1: NVIDIA-Fake24G (UUID: GPU-00000000-0000-0000-0000-000000000002)\n"
    )


def test_only_what_is_visible_is_listed(machine):
    host = machine({"count": 4})
    assert len(host.run("nvidia-smi", "-L", FAKEGPU_VISIBLE_DEVICES="2").stdout.splitlines()) == 1


def test_query_gpu_in_all_shapes(machine):
    host = machine({"profile": "A100-40", "count": 2})
    fields = "--query-gpu=index,name,memory.total,memory.used,utilization.gpu,power.limit,mig.mode.current,fan.speed"
    full = host.run("nvidia-smi", fields, "--format=csv").stdout.splitlines()
    columns = ["index", "name", "memory.total [MiB]", "memory.used [MiB]", "utilization.gpu [%]", "power.limit [W]"]
    assert full == [
        ", ".join([*columns, "mig.mode.current", "fan.speed [%]"]),
        "0, NVIDIA A100-SXM4-40GB, 40960 MiB, 0 MiB, 0 %, 400.00 W, Disabled, [N/A]",
        "1, NVIDIA A100-SXM4-40GB, 40960 MiB, 0 MiB, 0 %, 400.00 W, Disabled, [N/A]",
    ]
    bare = host.run("nvidia-smi", fields, "--format=csv,noheader,nounits", "-i", "1").stdout
    assert bare == "1, NVIDIA A100-SXM4-40GB, 40960, 0, 0, 400.00, Disabled, [N/A]\n"


def test_every_field_that_help_names_answers(machine):
    host = machine({"profile": "A100-40"})
    names = re.findall(r'"([a-z_.]+)"', host.run("nvidia-smi", "--help-query-gpu").stdout)
    assert len(names) > 60
    out = host.run("nvidia-smi", "--query-gpu=" + ",".join(names), "--format=csv,noheader").stdout
    values = out.strip().split(", ")
    assert len(values) == len(names)
    assert {name for name, value in zip(names, values, strict=True) if value == "[N/A]"} == {"fan.speed"}


def test_query_compute_apps(machine):
    host = machine({"count": 2})
    host.control(processes=PROCESSES)
    out = host.run("nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv").stdout
    assert out.splitlines() == [
        "pid, process_name, used_memory [MiB]",
        "5001, /usr/bin/a/very/long/path/to/python3.11, 1500 MiB",
        "5002, nvidia-cuda-mps-server, 2048 MiB",
    ]


def test_xml_is_well_formed_and_complete(machine):
    host = machine({"profile": "A100-40", "name": "A<&>100", "count": 2})
    host.control(processes=PROCESSES)
    tree = ET.fromstring(host.run("nvidia-smi", "-q", "-x").stdout)
    assert tree.tag == "nvidia_smi_log"
    assert tree.findtext("attached_gpus") == "2"
    cards = tree.findall("gpu")
    assert [card.get("id") for card in cards] == ["00000000:01:00.0", "00000000:02:00.0"]
    assert cards[0].findtext("product_name") == "A<&>100"
    assert cards[0].findtext("fb_memory_usage/total") == "40960 MiB"
    assert cards[0].findtext("mig_mode/current_mig") == "Disabled"
    assert cards[0].findtext("processes/process_info/pid") == "5001"
    assert cards[0].findtext("processes/process_info/used_memory") == "1500 MiB"


def test_text_query_and_a_file(machine, tmp_path):
    host = machine()
    assert re.search(r"Product Name +: NVIDIA-Fake24G", host.run("nvidia-smi", "-q").stdout)
    path = tmp_path / "log.xml"
    assert host.run("nvidia-smi", "-q", "-x", "-f", str(path)).stdout == ""
    assert ET.parse(path).getroot().tag == "nvidia_smi_log"


def test_topology(machine):
    host = machine(
        {"profile": "A100-40", "pcie_switch": 1, "count": 2},
        {"profile": "A100-40"},
        {"profile": "A100-40", "numa": 1, "root_complex": 1},
        links=[{"cards": [0, 3], "count": 4}],
    )
    rows = [line.split("\t") for line in host.run("nvidia-smi", "topo", "-m").stdout.splitlines()[1:5]]
    assert [row[1:5] for row in rows] == [
        [" X ", "PIX", "PHB", "NV4"],
        ["PIX", " X ", "PHB", "SYS"],
        ["PHB", "PHB", " X ", "SYS"],
        ["NV4", "SYS", "SYS", " X "],
    ]


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--query-gpu=nonsense", "--format=csv"], 2),
        (["--query-gpu=name"], 2),
        (["--nonsense"], 2),
        (["-i"], 2),
        (["-c", "7"], 2),
        (["-i", "9"], 6),
        (["-L", "-i", "GPU-none"], 6),
        (["mig"], 2),
        (["mig", "-lgi"], 6),
        (["mig", "-lgip"], 6),
        (["topo"], 2),
        (["-h"], 0),
    ],
)
def test_exit_status(machine, arguments, status):
    machine().run("nvidia-smi", *arguments, status=status)


def test_without_driver_or_library(machine, tmp_path):
    host = machine()
    host.config.unlink()
    assert "couldn't communicate with the NVIDIA driver" in host.run("nvidia-smi", status=9).stdout
    assert "couldn't find libnvidia-ml.so" in host.run("nvidia-smi", status=12, LD_LIBRARY_PATH=str(tmp_path)).stdout


def test_a_lost_card_does_not_hide_the_others(machine):
    host = machine({"count": 2})
    host.control(cards=[{"card": 0, "lost": True}])
    assert "GPU is lost" in host.run("nvidia-smi").stdout
    listing = host.run("nvidia-smi", "-L").stdout
    assert "gpu 0: GPU is lost" in listing
    assert "GPU 1: NVIDIA-Fake24G" in listing
    out = host.run("nvidia-smi", "--query-gpu=index,name", "--format=csv,noheader", status=15).stdout.splitlines()
    assert out == ["[GPU is lost], [GPU is lost]", "1, NVIDIA-Fake24G"]


@root_only
def test_settings(machine):
    host = machine({"profile": "A100-40", "count": 2})
    assert (
        "Set compute mode to Exclusive_Process for GPU 00000000:02:00.0."
        in host.run("nvidia-smi", "-i", "1", "-c", "3").stdout
    )
    host.run("nvidia-smi", "-pm", "0", "-pl", "300")
    fields = "--query-gpu=compute_mode,persistence_mode,power.limit"
    assert host.run("nvidia-smi", fields, "--format=csv,noheader,nounits").stdout.splitlines() == [
        "Default, Disabled, 300.00",
        "Exclusive_Process, Disabled, 300.00",
    ]


@root_only
def test_mig_from_beginning_to_end(machine):
    host = machine({"profile": "A100-40", "count": 2})
    host.run("nvidia-smi", "-i", "0", "-mig", "1")
    profiles = host.run("nvidia-smi", "mig", "-lgip", "-i", "0").stdout
    assert re.search(r"MIG 3g\.20gb +9 +2/2", profiles)
    made = host.run("nvidia-smi", "mig", "-cgi", "9,1g.5gb", "-C", "-i", "0").stdout
    assert "Successfully created GPU instance ID  1 on GPU  0 using profile MIG 3g.20gb (ID  9)" in made
    assert "Successfully created compute instance ID  0 on GPU  0 GPU instance ID  1" in made
    listing = host.run("nvidia-smi", "-L").stdout
    assert re.findall(r"MIG (\S+) +Device +(\d): \(UUID: MIG-[0-9a-f-]{36}\)", listing) == [
        ("3g.20gb", "0"),
        ("1g.5gb", "1"),
    ]
    table = host.run("nvidia-smi").stdout
    assert {len(line) for line in table.splitlines() if line} == {91}, table
    assert "MIG devices:" in table
    assert re.search(r"\|   0    1   0    0 \|", table)
    gi = host.run("nvidia-smi", "mig", "-lgi").stdout
    assert re.search(r"MIG 3g\.20gb +9 +1 +0:4", gi)
    assert re.search(r"MIG 1g\.5gb +19 +11 +4:1", gi)
    assert re.search(r"0 +11 +MIG 1g\.5gb +0 +0 +0:1", host.run("nvidia-smi", "mig", "-lci").stdout)
    assert "In use by another client" in host.run("nvidia-smi", "mig", "-dgi", "-gi", "1", status=19).stdout
    host.run("nvidia-smi", "mig", "-dci", "-gi", "1")
    host.run("nvidia-smi", "mig", "-dgi", "-gi", "1")
    assert re.search(r"MIG 3g\.20gb +9 +1/2", host.run("nvidia-smi", "mig", "-lgip", "-i", "0").stdout)
    host.run("nvidia-smi", "mig", "-dci")
    host.run("nvidia-smi", "mig", "-dgi")
    host.run("nvidia-smi", "-i", "0", "-mig", "0")


@root_only
def test_compute_instances_by_profile(machine):
    host = machine({"profile": "A100-40", "mig_enabled": True})
    host.run("nvidia-smi", "mig", "-cgi", "3g.20gb")
    assert re.search(r"MIG 2c\.3g\.20gb +1 ", host.run("nvidia-smi", "mig", "-lcip", "-gi", "1").stdout)
    host.run("nvidia-smi", "mig", "-cci", "1c.3g.20gb,1", "-gi", "1")
    names = re.findall(r"MIG (\S+) +Device", host.run("nvidia-smi", "-L").stdout)
    assert names == ["1c.3g.20gb", "2c.3g.20gb"]
    out = host.run("nvidia-smi", "mig", "-cci", "0", "-gi", "1", status=23).stdout
    assert "Insufficient Resources" in out


def test_it_works_on_old_drivers(machine):
    host = machine({"profile": "A100-40"}, flavour="470")
    text = host.run("nvidia-smi").stdout
    assert "470.256.02" in text
    assert "CUDA Version: 11.4" in text
    assert (
        host.run("nvidia-smi", "--query-gpu=memory.used,memory.reserved", "--format=csv,noheader").stdout
        == "424 MiB, [N/A]\n"
    )


def test_it_needs_only_libc(build_dir):
    readelf = shutil.which("readelf")
    assert readelf
    out = subprocess.run(
        [readelf, "-d", str(build_dir / "fakegpu/usr/bin/nvidia-smi")], capture_output=True, text=True, check=True
    )
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", out.stdout))
    assert needed <= {"libc.so.6", "libdl.so.2"}


# ---- MPS ------------------------------------------------------------------------------------------------


def test_mps_control_writes_down_what_it_is_told(machine, tmp_path):
    host, log = machine(), tmp_path / "mps.log"
    environment = host.env(FAKEGPU_MPS_LOG=str(log))
    tool = str(host.root / "usr/bin/nvidia-cuda-mps-control")
    subprocess.run([tool, "-d"], env=environment, check=True, timeout=10)
    text = "set_default_active_thread_percentage 40\n\nget_default_active_thread_percentage\nquit\nnever read\n"
    done = subprocess.run([tool], input=text, env=environment, capture_output=True, text=True, check=True, timeout=10)
    assert done.stdout == "100.0\n"
    assert log.read_text().splitlines() == [
        "start d",
        "command set_default_active_thread_percentage 40",
        "command get_default_active_thread_percentage",
        "command quit",
    ]
    failing = subprocess.run(
        [tool], input="", env=environment | {"FAKEGPU_MPS_EXIT": "3"}, text=True, timeout=10, check=False
    )
    assert failing.returncode == 3
