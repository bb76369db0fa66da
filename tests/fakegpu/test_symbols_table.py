# SPDX-License-Identifier: Apache-2.0
"""The table of the driver's names (hook/symbols): the reader of headers, and what it makes of the real ones."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

SYMBOLS = Path(__file__).parents[2] / "hook/symbols"


@pytest.fixture(scope="module")
def reader():
    """The modules of hook/symbols, which is no package."""
    sys.path.insert(0, str(SYMBOLS))
    try:
        yield {name: importlib.import_module(name) for name in ("preprocess", "declarations", "table", "fetch")}
    finally:
        sys.path.remove(str(SYMBOLS))


@pytest.fixture(scope="module")
def symbols():
    path = SYMBOLS.parents[1] / "build/symbols.json"
    if not path.is_file():
        pytest.skip("the headers were not read yet: make headers")
    return json.loads(path.read_text())


HEADER = """
#define CUDAAPI
#if defined(PER_THREAD) || defined(INTERNAL)
    #define __CUDA_API_PTSZ(api) api ## _ptsz
#else
    #define __CUDA_API_PTSZ(api) api
#endif
#define cuAlloc cuAlloc_v2   /* superseded: "cuAlloc" */
#define cuCopy __CUDA_API_PTSZ(cuCopy)
typedef struct { int (*f)(int a); } CUthing;
static inline CUresult CUDAAPI cuHelper(int x) { return cuAlloc(0, x); }
CUresult CUDAAPI cuAlloc(CUdeviceptr *dptr, size_t size);
CUresult CUDAAPI cuCopy(void *to,
                        const void *from, /* a, b */ CUstream stream);
CUresult CUDAAPI cuCall(void (*callback)(void *, int), char name[16], unsigned int);
#if defined(INTERNAL) && CUDA_V >= 12
    #undef cuAlloc
    CUresult CUDAAPI cuAlloc(CUdeviceptr_v1 *dptr, unsigned int size);
#endif
"""


def names(reader, defined):
    return [one.symbol for one in reader["declarations"].functions(HEADER, defined, mark="CUDAAPI")]


def test_symbols_follow_the_configuration(reader):
    assert names(reader, {}) == ["cuAlloc_v2", "cuCopy", "cuCall"]
    assert names(reader, {"PER_THREAD": ""}) == ["cuAlloc_v2", "cuCopy_ptsz", "cuCall"]
    assert names(reader, {"INTERNAL": "", "CUDA_V": "13"}) == ["cuAlloc_v2", "cuCopy_ptsz", "cuCall", "cuAlloc"]
    assert names(reader, {"INTERNAL": "", "CUDA_V": "11"}) == ["cuAlloc_v2", "cuCopy_ptsz", "cuCall"]


def test_parameters_keep_their_text(reader):
    functions = reader["declarations"].functions(HEADER, {}, mark="CUDAAPI")
    assert [[(p.type, p.name) for p in f.parameters] for f in functions] == [
        [("CUdeviceptr *", "dptr"), ("size_t", "size")],
        [("void *", "to"), ("const void *", "from"), ("CUstream", "stream")],
        [("void (*)(void *, int)", "callback"), ("char *", "name"), ("unsigned int", "")],
    ]


def test_name_map_resolves_macros(reader):
    assert reader["declarations"].name_map(HEADER, {"PER_THREAD": ""}) == {
        "cuAlloc": "cuAlloc_v2",
        "cuCopy": "cuCopy_ptsz",
    }


@pytest.mark.parametrize(
    "text",
    [
        "#if X(\n#endif\n",
        "#if defined(A\n#endif\n",
        "#if 1\n",
        "#endif\n",
        "CUresult CUDAAPI cuFoo(int a) __weird;",
    ],
)
def test_what_it_cannot_read_it_refuses(reader, text):
    with pytest.raises(reader["preprocess"].HeaderError):
        reader["declarations"].functions(text, {}, mark="CUDAAPI")


def test_a_name_without_typedef_is_refused(reader):
    function = reader["declarations"].Function("cuNew", "cuNew", "CUresult", ())
    point = reader["declarations"].EntryPoint("cuOld", 2000, "legacy", ())
    with pytest.raises(reader["preprocess"].HeaderError, match="cuOld"):
        reader["table"].match_entry_points([point], {"cuNew": function}, where="here")


def test_pins_need_versions_and_hashes(reader, tmp_path):
    path = tmp_path / "pins.txt"
    path.write_text("# comment\nnvidia-cuda-runtime>=13\n")
    with pytest.raises(reader["fetch"].MissingError, match="sha256"):
        reader["fetch"].read_pins(path)
    assert {pin.major for pin in reader["fetch"].read_pins()} == {11, 12, 13}


def test_a_wheel_with_another_hash_is_no_wheel(reader, tmp_path):
    pin = reader["fetch"].read_pins()[0]
    (tmp_path / f"{pin.project}.whl").write_bytes(b"not it")
    assert reader["fetch"].cached((pin,), tmp_path) == {}


def test_offline_it_says_in_one_sentence_what_is_missing(tmp_path):
    environment = {"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path), "PIP_NO_INDEX": "1", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(SYMBOLS), "--build", str(tmp_path / "build")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "nvidia-cuda-runtime 13" in done.stderr
    assert "PyPI" in done.stderr


# ---- the real headers -----------------------------------------------------------------------------------


def test_counts_of_functions_and_typedefs_agree(symbols):
    assert {major: counts["cuda.h"] for major, counts in symbols["counts"].items()} == {
        "11": {"functions": 508, "typedefs": 508},
        "12": {"functions": 616, "typedefs": 616},
        "13": {"functions": 685, "typedefs": 685},
    }
    assert [symbols["counts"][major]["nvml.h"]["functions"] for major in ("11", "12", "13")] == [295, 387, 436]


@pytest.mark.parametrize(
    ("name", "version", "flavour", "symbol"),
    [
        ("cuMemAlloc", 2000, "legacy", "cuMemAlloc"),
        ("cuMemAlloc", 3020, "legacy", "cuMemAlloc_v2"),
        ("cuCtxCreate", 11040, "legacy", "cuCtxCreate_v3"),
        ("cuCtxCreate", 12050, "legacy", "cuCtxCreate_v4"),
        ("cuGetProcAddress", 12000, "legacy", "cuGetProcAddress_v2"),
        ("cuMemcpyHtoD", 7000, "ptds", "cuMemcpyHtoD_v2_ptds"),
        ("cuMemcpyAsync", 7000, "ptsz", "cuMemcpyAsync_ptsz"),
        ("cuLaunchKernel", 4000, "legacy", "cuLaunchKernel"),
        ("cuStreamGetCaptureInfo", 12030, "ptsz", "cuStreamGetCaptureInfo_v3_ptsz"),
        ("cuGraphInstantiate", 11000, "legacy", "cuGraphInstantiate_v2"),
    ],
)
def test_known_entry_points(symbols, name, version, flavour, symbol):
    found = [
        row["symbol"]
        for row in symbols["entry_points"]
        if (row["name"], row["version"], row["flavour"]) == (name, version, flavour)
    ]
    assert found == [symbol]


def test_every_entry_point_is_an_exported_function_and_the_other_way_round(symbols):
    functions = {name for name, row in symbols["functions"].items() if row["api"] == "cuda"}
    assert {row["symbol"] for row in symbols["entry_points"]} == functions
    assert all(symbols["functions"][name]["since"] >= 2000 for name in functions)


def test_unversioned_nvml_keeps_its_own_type(symbols):
    parameters = symbols["functions"]["nvmlDeviceGetComputeRunningProcesses"]["parameters"]
    assert parameters[2]["type"] == "nvmlProcessInfo_v1_t *"
    assert symbols["names"]["nvml"]["13"]["legacy"]["nvmlDeviceGetComputeRunningProcesses"].endswith("_v3")
