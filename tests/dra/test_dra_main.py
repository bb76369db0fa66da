# SPDX-License-Identifier: Apache-2.0
"""The command as users start it: its own process, the real NVML binding over the fake driver, a real API server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import dra_rig
import pytest

from aliquot.dra.exits import Exit
from aliquot.e2e.api import load_manifests, tolerating

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Command:
    """`aliquot-dra-driver` on the rig's node."""

    def __init__(self, rig, fake_root: Path) -> None:
        self.rig = rig
        self.folders = rig.folders
        self.folders.driver = fake_root
        self.config = self.folders.root / "fakegpu" / "config.json"
        self.config.parent.mkdir()
        self.config.write_text(json.dumps({"version": 1, "cards": [{"profile": "Fake24G", "count": 2}]}))
        self.port = free_port()
        self.process = None

    def environment(self) -> dict[str, str]:
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("KUBE", "ALIQUOT", "NODE_NAME", "POD_UID"))}
        return keep | {"FAKEGPU_CONFIG": str(self.config), "PYTHONUNBUFFERED": "1"}

    def arguments(self, *more: str) -> list[str]:
        own = ["--http-port", str(self.port), "--http-address", "127.0.0.1"]
        return [sys.executable, "-m", "aliquot.dra", *self.folders.arguments(), *own, *more]

    def run(self, *more: str, plain: bool = False) -> tuple[int, str, str]:
        """Exit status, standard output and error of a command that ends by itself."""
        argv = [sys.executable, "-m", "aliquot.dra", *more] if plain else self.arguments(*more)
        done = subprocess.run(argv, env=self.environment(), capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout, done.stderr

    def control(self, **settings) -> None:
        """Faults of the fake driver, from now on."""
        path = self.config.with_name(self.config.name + ".control")
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(settings))
        temporary.rename(path)

    def start(self, *more: str) -> Command:
        log = (self.folders.root / "driver.log").open("ab")
        with log:
            self.process = subprocess.Popen(
                self.arguments(*more), env=self.environment(), stdout=log, stderr=subprocess.STDOUT
            )
        dra_rig.wait_for(lambda: self.get("/healthz")[0] == 200, "an answer of /healthz")
        return self

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as err:
            with err:
                return err.code, err.read().decode()
        except OSError:
            return 0, ""

    def log(self) -> list[dict]:
        lines = (self.folders.root / "driver.log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@pytest.fixture
def command(rig, fake_driver_root):
    made = Command(rig, fake_driver_root)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.kill()
        made.process.wait()


def test_the_life_of_a_driver(command):
    """Start, register, ready, a claim, figures, SIGTERM."""
    command.start()
    dra_rig.wait_for(lambda: "kubelet has not asked yet" in command.get("/readyz")[1], "the reason")
    info = dra_rig.wait_for(lambda: command.rig.kubelet.registration_sockets() and command.rig.kubelet.register(), "us")
    assert info.name == "gpu.aliquot.dev"
    dra_rig.wait_for(lambda: command.get("/readyz") == (200, "ok\n"), "readiness")
    (item,) = command.rig.cluster.slices()
    device = item["spec"]["devices"][0]
    assert device["attributes"]["productName"] == {"string": "NVIDIA-Fake24G"}
    claim = command.rig.cluster.claim(
        "c1",
        command.rig.make.result(
            device["name"], share="11111111-1111-4111-8111-111111111111", memory=4 << 30, cores=0, slots=1
        ),
    )
    command.rig.kubelet.prepared(claim)
    spec = command.folders.spec(claim["metadata"]["uid"])
    text = json.dumps(spec)
    assert "libcuda.so.1" in text
    assert "/usr/local/vgpu/libvgpu.so" in text
    command.rig.kubelet.undone(claim)
    status, figures = command.get("/metrics")
    assert status == 200
    for line in (
        'aliquot_dra_claims_total{method="prepare",result="ok"} 1.0',
        'aliquot_dra_claims_total{method="prepare",result="conflict"} 0.0',
        'aliquot_dra_devices{mode="shared"} 2.0',
        "aliquot_dra_ready 1.0",
        "aliquot_dra_registered 1.0",
        "aliquot_checkpoint_claims 0.0",
        'aliquot_dra_loop_errors_total{loop="publish"} 0.0',
    ):
        assert line in figures
    assert command.get("/nothing")[0] == 404
    assert command.end() == Exit.OK
    assert command.rig.kubelet.registration_sockets() == []
    events = [line["event"] for line in command.log()]
    assert "claim prepared" in events
    assert events[-1] == "ended"
    assert [s["metadata"]["uid"] for s in command.rig.cluster.slices()] == [item["metadata"]["uid"]]


def test_b109_a_driver_that_is_loaded_late_is_waited_for(command):
    command.control(faults=[{"function": "nvmlInit*", "code": 9}])
    command.start()
    dra_rig.wait_for(lambda: "load the NVIDIA kernel driver" in command.get("/readyz")[1], "the reason")
    dra_rig.wait_for(command.rig.kubelet.registration_sockets, "the socket")
    command.rig.kubelet.register()
    assert command.get("/readyz")[0] == 503
    assert command.rig.cluster.slices() == []
    command.control()
    dra_rig.wait_for(lambda: command.get("/readyz")[0] == 200, "readiness", 30)
    assert len(command.rig.cluster.slices()[0]["spec"]["devices"]) == 2
    assert command.end() == Exit.OK


def test_b115_a_fatal_fault_taints_and_only_a_verified_recovery_ends_it(command):
    """Within 5 s; a harmless event does not end it; what is prepared stays."""
    command.control(cards=[{"card": 0, "recovery_action": 0}])
    command.start()
    (item,) = dra_rig.wait_for(command.rig.cluster.slices, "the slice")
    device = item["spec"]["devices"][0]
    claim = command.rig.cluster.claim(
        "c1",
        command.rig.make.result(
            device["name"], share="11111111-1111-4111-8111-111111111111", memory=4 << 30, cores=0, slots=1
        ),
    )
    command.rig.kubelet.prepared(claim)

    def tainted() -> list[str]:
        return [d["name"] for s in command.rig.cluster.slices() for d in s["spec"]["devices"] if d.get("taints")]

    fatal = {"id": 1, "card": 0, "xid": 79}
    command.control(cards=[{"card": 0, "recovery_action": 1}], events=[fatal])
    dra_rig.wait_for(lambda: tainted() == [device["name"]], "the taint", 5)
    command.control(cards=[{"card": 0, "recovery_action": 1}], events=[fatal, {"id": 2, "card": 0, "xid": 13}])
    assert "aliquot_card_healthy" in command.get("/metrics")[1]
    dra_rig.wait_for(lambda: any(e["event"] == "card not fit for use" for e in command.log()), "the log line")
    assert tainted() == [device["name"]]
    assert claim["metadata"]["uid"] in command.folders.checkpoint()
    command.rig.kubelet.prepared(claim)
    command.control(cards=[{"card": 0, "recovery_action": 0}], events=[fatal])
    dra_rig.wait_for(lambda: tainted() == [], "recovery", 20)
    assert command.end() == Exit.OK


def test_a_missing_driver_is_one_sentence_and_is_waited_for(command):
    empty = command.folders.root / "empty"
    empty.mkdir()
    command.folders.driver = empty
    command.start("--nvml-library", str(empty / "libnvidia-ml.so.1"))
    dra_rig.wait_for(lambda: "install the NVIDIA driver" in command.get("/readyz")[1], "the reason")
    assert command.get("/healthz")[0] == 200
    assert command.end() == Exit.OK


def test_an_api_server_that_is_away_is_waited_for(command, control_plane):
    away = control_plane.authority.kubeconfig(
        "away", f"https://127.0.0.1:{free_port()}", user="admin", groups=["system:masters"]
    )
    command.folders.kubeconfig = away
    command.start()
    dra_rig.wait_for(lambda: "no answer from https://127.0.0.1" in command.get("/readyz")[1], "the reason")
    (reason,) = (text for text in command.get("/readyz")[1].split(": cannot ") if "no answer" in text)
    assert "Connection refused; see that the API server is up and that this node reaches it there" in reason
    code, out, _ = command.run("--check", "--output", "json")
    about_server = [line for line in json.loads(out) if line["area"] == "api server"]
    assert code == Exit.CHECK_FAILED
    assert [line["outcome"] for line in about_server] == ["failed", "warning"], "one fault, told once"
    assert command.end() == Exit.OK


def test_exit_statuses_and_sentences(command, tmp_path):
    """Waiting cannot help: each ends at once, with one sentence on standard error and its status."""
    newer = tmp_path / "state"
    newer.mkdir()
    (newer / "checkpoint.json").write_text(json.dumps({"version": "9.0", "checksum": "", "payload": ""}))
    busy = socket.socket()
    busy.bind(("127.0.0.1", 0))
    busy.listen(1)
    bad = tmp_path / "bad.json"
    bad.write_text('{"defaults": {"slots": 0}}')
    for arguments, status, says in (
        (["--http-port", "x"], Exit.USAGE, "--http-port 'x' is not a port"),
        (["--http-port", str(busy.getsockname()[1])], Exit.USAGE, "use another address or port"),
        (["--nonsense"], Exit.USAGE, "see aliquot-dra-driver --help"),
        (["--config", str(tmp_path / "missing")], Exit.FILE, "cannot be read"),
        (["--config", str(bad)], Exit.FILE, "defaults.slots is 0; give 1 to 64"),
        (["--extra-edits", str(bad)], Exit.FILE, str(bad)),
        (["--hook-dir", str(tmp_path)], Exit.FILE, "has no libvgpu-strict.so"),
        (["--kubeconfig", str(bad)], Exit.FILE, "bad.json"),
        (["--state-dir", str(newer)], Exit.NEWER_STATE, "version 9.0"),
    ):
        code, out, err = command.run(*arguments)
        assert (code, out) == (status, ""), (arguments, err)
        assert says in err
        assert err.startswith("aliquot-dra-driver: ")
        assert err.count("\n") == 1
    busy.close()
    code, out, err = command.run("--help", plain=True)
    assert code == 0
    assert "exit status:" in out


def test_a_second_instance_ends_and_the_first_goes_on(command):
    command.start()
    dra_rig.wait_for(command.rig.kubelet.registration_sockets, "the socket")
    code, _, err = command.run("--http-port", "0")
    assert code == Exit.HELD
    assert f"process {command.process.pid}" in err
    command.rig.kubelet.register()
    assert command.end() == Exit.OK


def test_check_says_what_works(command):
    code, out, err = command.run("--check", "--output", "json")
    lines = json.loads(out)
    assert (code, err) == (0, "")
    assert {line["outcome"] for line in lines} == {"ok"}
    assert {line["area"] for line in lines} == {
        "hook",
        "driver",
        "kubelet",
        "directory",
        "api server",
        "rights",
        "offer",
    }
    assert any("shared (API server keeps consumable capacity)" in line["text"] for line in lines)
    assert not command.folders.state.exists()
    assert not command.folders.cdi.exists()
    assert command.rig.cluster.slices() == []


def test_check_says_what_does_not_work_and_what_to_do(command):
    shutil.rmtree(command.folders.kubelet)
    plane = command.rig.plane
    command.folders.kubeconfig = plane.kubeconfig_for("nobody")
    command.control(faults=[{"function": "nvmlInit*", "code": 9}])
    code, out, _ = command.run("--check")
    assert code == Exit.CHECK_FAILED
    assert "load the NVIDIA kernel driver" in out
    assert "start kubelet, or give its --root-dir as --kubelet-root" in out
    assert 'our role needs apiGroups ["resource.k8s.io"], resources ["resourceslices"], verbs ["create"]' in out
    assert out.splitlines()[-1].endswith("with a warning")


def test_the_manifests_rights_are_enough_and_the_policy_lets_us(command):
    """With the service account, role and policy of deploy/ and nothing more."""
    plane, api = command.rig.plane, command.rig.cluster.api
    for manifest in ("00-namespace.yaml", "10-rbac.yaml", "30-policy.yaml"):
        for obj in load_manifests(ROOT / "deploy" / manifest):
            with tolerating(409):
                api.create(obj, "aliquot-system")
    pod = api.create(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": command.folders.name, "namespace": "aliquot-system"},
            "spec": {
                "nodeName": command.folders.name,
                "serviceAccountName": "aliquot-dra-driver",
                "containers": [{"name": "c", "image": "none"}],
            },
        }
    )
    token = plane.service_account_token(
        "aliquot-dra-driver",
        "aliquot-system",
        pod={"name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]},
    )
    command.folders.kubeconfig = plane.kubeconfig_with_token(f"driver-{command.folders.name}", token)
    code, out, _ = command.run("--check", "--output", "json")
    assert [line for line in json.loads(out) if line["outcome"] != "ok"] == []
    assert code == 0
    command.start()
    dra_rig.wait_for(command.rig.cluster.slices, "the slice")
    claim = command.rig.cluster.claim(
        "c1",
        command.rig.make.result(
            command.rig.cluster.slices()[0]["spec"]["devices"][0]["name"],
            share="11111111-1111-4111-8111-111111111111",
            memory=4 << 30,
            cores=0,
            slots=1,
        ),
    )
    command.rig.kubelet.prepared(claim)
    assert command.end() == Exit.OK
