# SPDX-License-Identifier: Apache-2.0
"""What the libraries export: exactly their list, for every driver age, loadable with everything bound at once."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

FLAVOURS = ("580", "550", "525", "470")
LIBRARIES = {"cuda": "libcuda", "nvml": "libnvidia-ml"}


def library(build: Path, flavour: str, api: str) -> Path:
    root = build / ("fakegpu" if flavour == "580" else f"fakegpu-{flavour}")
    return next((root / "usr/lib").iterdir()) / f"{LIBRARIES[api]}.so.1"


def exported(path: Path) -> list[str]:
    out = subprocess.run(
        ["nm", "-D", "--defined-only", "--portability", str(path)], capture_output=True, text=True, check=True
    ).stdout
    return sorted(line.split()[0] for line in out.splitlines())


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("api", LIBRARIES)
def test_exports_equal_the_list(build_dir, flavour, api):
    wanted = (build_dir / f"fakegpu-obj/gen/{api}_{flavour}.list").read_text().split()
    assert exported(library(build_dir, flavour, api)) == sorted(wanted)


@pytest.mark.parametrize("api", LIBRARIES)
def test_the_full_flavour_has_every_name_of_the_headers(build_dir, api):
    functions = json.loads((build_dir / "symbols.json").read_text())["functions"]
    public = {name for name, row in functions.items() if row["api"] == api}
    assert public <= set(exported(library(build_dir, "580", api)))


@pytest.mark.parametrize("api", LIBRARIES)
def test_an_older_driver_has_a_part_of_a_younger_one(build_dir, api):
    sets = [set(exported(library(build_dir, flavour, api))) for flavour in FLAVOURS]
    assert all(old < young for young, old in itertools.pairwise(sets))


def test_dates_hide_the_right_names(build_dir):
    old, middle = (set(exported(library(build_dir, flavour, "cuda"))) for flavour in ("470", "525"))
    assert "cuGetProcAddress" in old  # 11.3
    assert "cuGetProcAddress_v2" not in old  # 12.0
    assert "cuGetProcAddress_v2" in middle
    assert {"cuMemAlloc", "cuMemAlloc_v2", "cuCtxCreate_v3"} <= old
    assert "cuCtxCreate_v4" not in middle  # 12.5
    nvml = set(exported(library(build_dir, "470", "nvml")))
    assert {"nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses_v2"} <= nvml
    assert not {"nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetComputeRunningProcesses_v3"} & nvml


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("api", LIBRARIES)
def test_it_loads_with_every_symbol_bound_at_once(build_dir, flavour, api):
    path = library(build_dir, flavour, api)
    code = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW | os.RTLD_GLOBAL)"
    subprocess.run([sys.executable, "-c", code, str(path)], env={"LD_BIND_NOW": "1"}, check=True, timeout=30)


@pytest.mark.parametrize("api", LIBRARIES)
def test_names_sonames_and_links(build_dir, api):
    path = library(build_dir, "580", api)
    dynamic = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True, check=True).stdout
    assert f"soname: [{LIBRARIES[api]}.so.1]" in dynamic.replace("Library soname", "soname")
    assert path.readlink().name == f"{LIBRARIES[api]}.so.580.65.06"
    assert (path.with_suffix("")).readlink().name == f"{LIBRARIES[api]}.so.1"
    needed = {line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "NEEDED" in line}
    loader = {name for name in needed if name.startswith("ld-linux")}  # for thread-local variables
    assert needed - loader <= {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"}


@pytest.mark.parametrize("api", LIBRARIES)
def test_a_library_is_small_and_has_no_means_to_start_a_thread(build_dir, api):
    path = library(build_dir, "580", api)
    out = subprocess.run(["nm", "-D", "--undefined-only", str(path)], capture_output=True, text=True, check=True).stdout
    wanted = {line.split()[-1].partition("@")[0] for line in out.splitlines()}
    assert "pthread_mutex_lock" in wanted  # the list is what it should be
    assert not wanted & {"pthread_create", "thrd_create", "clone", "clone3", "timer_create"}
    assert path.stat().st_size < 4 << 20


@pytest.mark.parametrize("api", LIBRARIES)
def test_nobody_gets_between_the_drivers_own_references(build_dir, api):
    """A preloaded library that exports the same names must not end up in what cuGetProcAddress hands out."""
    path = library(build_dir, "580", api)
    ours = set(exported(path))
    out = subprocess.run(["readelf", "-rW", str(path)], capture_output=True, text=True, check=True).stdout
    bound = {word.split("@")[0] for line in out.splitlines() for word in line.split()}
    assert not ours & bound


def test_a_program_probing_an_old_driver_finds_functions_missing(machine):
    code = """
    result = [
        nvmlSystemGetDriverVersion(),
        nvmlSystemGetCudaDriverVersion(),
        error_of(nvmlDeviceGetMemoryInfo, card, version=nvmlMemory_v2),
        error_of(nvmlDeviceGetComputeRunningProcesses_v3, card),
        nvmlDeviceGetMemoryInfo(card).total,
        nvmlDeviceGetComputeRunningProcesses_v2(card),
    ]
    """
    assert machine(flavour="470").nvml(code) == [
        "470.256.02",
        11040,
        "FunctionNotFound",
        "FunctionNotFound",
        24 << 30,
        [],
    ]


def test_names_nobody_implemented_answer_not_supported(machine):
    code = """
    lib = ctypes.CDLL("libnvidia-ml.so.1")
    before = lib.nvmlDeviceGetVgpuMetadata(None, None, None)
    lib.nvmlInit_v2()
    result = before, lib.nvmlDeviceGetVgpuMetadata(None, None, None), lib.nvmlInternalGetExportTable(None, None)
    """
    assert machine().python(code) == [1, 3, 3]


# What clients of each kind need at the least: the hook, and what is written over go-nvml.
MINIMUM = {
    "cuda": r"""cuInit cuDriverGetVersion cuDeviceGet cuDeviceGet(Count|Name|Attribute|Uuid|Uuid_v2|PCIBusId|ByPCIBusId)
        cuDeviceTotalMem(_v2)? cuCtx(Create|Destroy|Push|Pop)\w* cuCtx(Get|Set)Current cuCtxGetDevice cuCtxSynchronize
        cuDevicePrimaryCtx\w+ cuMemAlloc\w* cuMemFree\w* cuMemGetInfo\w* cuMemCreate cuMemRelease cuMemMap cuMemUnmap
        cuMemAddress\w+ cuMemPool\w+ cuMemExport\w+ cuMemImport\w+ cuArray(3D)?(Create|Destroy)\w*
        cuMipmappedArray(Create|Destroy) cuModule(Load\w*|Unload|GetFunction|GetGlobal\w*) cuLibrary(Load|Get)\w+
        cuLaunch(Kernel|KernelEx|CooperativeKernel|HostFunc)\w* cuGraph(Launch|Instantiate\w*|AddMemAllocNode)
        cuStream(Create\w*|Destroy\w*|Synchronize|Query|WaitEvent)(_ptsz)?
        cuEvent(Create|Destroy|Record|Query|Synchronize) cuEventElapsedTime
        cuGetProcAddress(_v2)? cuGetExportTable cuIpc\w+""",
    "nvml": r"""nvmlInit\w* nvmlShutdown nvmlErrorString nvmlDeviceGetCount(_v2)? nvmlDeviceGetHandleBy\w+
        nvmlDeviceGetPciInfo\w* nvmlDeviceGetMinorNumber nvmlDeviceGetUUID nvmlDeviceGetMigMode nvmlDeviceGetBrand
        nvmlDeviceGetCudaComputeCapability nvmlDeviceGetArchitecture nvmlDeviceGetTopology\w+ nvmlDeviceGetP2PStatus
        nvmlDeviceGetNvLink(State|Version|Capability|RemotePciInfo\w*|RemoteDeviceType) nvmlDeviceRegisterEvents
        nvmlEventSet(Create|Free|Wait|Wait_v2) nvmlDeviceGetSupportedEventTypes nvmlDeviceGetMemoryInfo(_v2)?
        nvmlDeviceGet(Compute|Graphics|MPSCompute)RunningProcesses\w* nvmlDeviceGetProcessUtilization
        nvmlGpuInstance\w*(Create|Destroy)\w* nvmlDeviceCreateGpuInstance\w* nvmlComputeInstanceDestroy""",
}


@pytest.mark.parametrize("api", LIBRARIES)
def test_what_clients_need_at_the_least_is_no_stub(build_dir, api):
    public = exported(library(build_dir, "580", api))
    stubs = set(re.findall(r"fake_stub_\w+\(\"(\w+)\"\)", (build_dir / f"fakegpu-obj/gen/{api}_stubs.c").read_text()))
    for pattern in MINIMUM[api].split():
        found = {name for name in public if re.fullmatch(pattern, name)}
        assert found, pattern
        assert found & stubs == set(), pattern


@pytest.mark.parametrize(("api", "code"), [("nvml", 3), ("cuda", 801)])
def test_every_name_nobody_implemented_can_be_called(machine, build_dir, api, code):
    """Each of them, with the driver up: the code for "not supported", and the process lives on."""
    names = re.findall(r"fake_stub_\w+\(\"(\w+)\"\)", (build_dir / f"fakegpu-obj/gen/{api}_stubs.c").read_text())
    assert len(names) > 50
    program = f"""
    lib = ctypes.CDLL("{LIBRARIES[api]}.so.1")
    assert lib["{"nvmlInit_v2" if api == "nvml" else "cuInit"}"](0) == 0
    result = {{lib[name](None, None, None, None) for name in sys.argv[1:]}}
    result = sorted(result)
    """
    assert machine().python(program, *names) == [code]
