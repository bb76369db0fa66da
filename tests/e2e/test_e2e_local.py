# SPDX-License-Identifier: Apache-2.0
"""The local cluster's promise: whatever ends it, nothing is left on the machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aliquot.e2e.local import run as runs
from aliquot.e2e.local.space import NODE_PATHS, make_space
from aliquot.e2e.place import children
from aliquot.e2e.process import Server, wait_until

pytestmark = pytest.mark.node

if os.geteuid() != 0:
    pytest.skip("namespaces need root", allow_module_level=True)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "aliquot"


@pytest.fixture
def space(own_cache):
    run = runs.start_run()
    made = make_space(run, ["n1", "n2"])
    yield made
    made.close()
    os.close(run.lock)
    run.remove()


def cgroups(run):
    return [p for h in runs._hierarchies() for p in [h / run.cgroup.lstrip("/")] if p.exists()]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_nothing_inside_is_visible_outside(space):
    before = {p: Path(p).exists() for p in NODE_PATHS}
    node = space.node("n1")
    script = "for p in $*; do touch $p/mark; done; touch /etc/mark /var/lib/mark; ip -o link | wc -l"
    done = subprocess.run(
        node.argv(["sh", "-c", script, "x", *NODE_PATHS]), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all((node.path(p) / "mark").exists() for p in NODE_PATHS)
    assert {p: Path(p).exists() for p in NODE_PATHS} == before
    assert not any((Path(p) / "mark").exists() for p in (*NODE_PATHS, "/etc", "/var/lib"))
    node.close()


def test_each_node_has_its_own_folders(space):
    one, two = space.node("n1"), space.node("n2")
    subprocess.run(one.argv(["touch", "/var/lib/kubelet/mark"]), check=True)
    assert one.path("/var/lib/kubelet/mark").exists()
    assert not two.path("/var/lib/kubelet/mark").exists()
    one.close()
    two.close()


def test_server_inside_is_killed_by_its_own_pid(space, tmp_path):
    server = Server("sleeper", ["sleep", "1000"], tmp_path / "log", place=space.inside)
    server.start()
    wait_until(lambda: len(children(server._process.pid)) == 1, 5, "the program inside")
    pid = server.pid
    assert Path(f"/proc/{pid}/comm").read_text() in {"sleep\n", "setpriv\n"}
    server.stop()
    assert not alive(pid)
    assert not server.running


def test_everything_inside_dies_with_the_keeper(space, tmp_path):
    server = Server("sleeper", ["sh", "-c", "sleep 1000 & sleep 1000"], tmp_path / "log", place=space.inside)
    server.start()
    wait_until(lambda: len(children(server._process.pid)) == 1, 5, "the program inside")
    pids = [server.pid, space.inside.pid]
    space.keeper.kill()
    space.keeper.wait()
    wait_until(lambda: not any(map(alive, pids)), 5, "the end of everything inside")
    server.stop()


def test_sweep_leaves_the_living_and_takes_the_dead(own_cache):
    living, dead = runs.start_run(), runs.start_run()
    os.close(dead.lock)
    assert cgroups(dead)
    assert runs.sweep() == [dead.name]
    assert not dead.directory.exists()
    assert not cgroups(dead)
    assert living.directory.exists()
    assert cgroups(living)
    os.close(living.lock)
    assert runs.sweep() == [living.name]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_killed_run_leaves_no_process_and_the_next_one_sweeps_the_rest(own_cache, how):
    code = """
import sys, time
from pathlib import Path
from aliquot.e2e.local.run import start_run
from aliquot.e2e.local.space import make_space
from aliquot.e2e.process import Server
run = start_run()
space = make_space(run, ["n1"])
node = space.node("n1")
Server("sleeper", ["sleep", "1000"], Path(sys.argv[1]), place=node).start()
print(space.inside.pid, node.pid, flush=True)
time.sleep(1000)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(own_cache / "log")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        pids = [int(p) for p in process.stdout.readline().split()]
        assert all(map(alive, pids))
        process.send_signal(how)
        process.wait(10)
    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        pass
    assert not any(map(alive, pids))
    (left,) = [d for d in runs.runs_dir().iterdir() if d.is_dir()]
    assert runs.sweep() == [left.name]
    assert not left.exists()
