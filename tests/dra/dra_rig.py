# SPDX-License-Identifier: Apache-2.0
"""A node for contract tests: folders, a driver installation, the daemon, and a kubelet that is a gRPC client.

The daemon is the real one against a real API server; only the cards come as plain values, so that these tests need
no NVML library. Run as a program it serves one node in a process of its own, which tests kill at chosen steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import grpc
import msgspec

from aliquot.api.grpc.kubelet.dra.v1 import api_pb2 as v1
from aliquot.api.grpc.kubelet.dra.v1 import api_pb2_grpc as v1_grpc
from aliquot.api.grpc.kubelet.dra.v1beta1 import api_pb2 as v1beta1
from aliquot.api.grpc.kubelet.dra.v1beta1 import api_pb2_grpc as v1beta1_grpc
from aliquot.api.grpc.kubelet.pluginregistration.v1 import api_pb2 as registration
from aliquot.api.grpc.kubelet.pluginregistration.v1 import api_pb2_grpc as registration_grpc
from aliquot.dra.cards import View
from aliquot.dra.driver import Driver
from aliquot.dra.settings import Settings, read_settings
from aliquot.node.checkpoint import look
from aliquot.node.inventory import Card, Inventory

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
SHARED = ["gpu-aaaaaaaa-shared", "gpu-bbbbbbbb-shared"]


def wait_for(look: Any, what: str, timeout_s: float = 20.0) -> Any:
    """The first truthy value of `look`, asked often; fails the test after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while True:
        value = look()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what} did not come in {timeout_s} s"
        pause.wait(0.02)


def shared_object(soname: str) -> bytes:
    """An ELF file with a SONAME and nothing else: what discovery looks at."""
    names = b"\0" + soname.encode() + b"\0"
    dynamic_at, text_at = 64 + 2 * 56, 64 + 2 * 56 + 48
    size = text_at + len(names)
    head = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01" + bytes(9), 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0
    )
    load = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, size, size, 4096)
    dynamic = struct.pack("<IIQQQQQQ", 2, 4, dynamic_at, dynamic_at, dynamic_at, 48, 48, 8)
    return head + load + dynamic + struct.pack("<qQqQqQ", 5, text_at, 14, 1, 0, 0) + names


class NodeFolders:
    """The folders of one node below `root`, with a driver installation and hook libraries in them."""

    def __init__(self, root: Path, name: str, kubeconfig: Path) -> None:
        self.root = root
        self.name = name
        self.kubeconfig = kubeconfig
        # Not below `root`: a socket's path may have 107 bytes, and pytest's folders alone can be that long.
        self._short = tempfile.TemporaryDirectory(prefix="node-", dir="/tmp")
        self.kubelet = Path(self._short.name) / "kubelet"
        (self.kubelet / "plugins_registry").mkdir(parents=True)
        self.driver = root / "driver"
        libraries = self.driver / "usr/lib/x86_64-linux-gnu"
        libraries.mkdir(parents=True)
        for stem in ("libcuda", "libnvidia-ml"):
            (libraries / f"{stem}.so.580.1").write_bytes(shared_object(f"{stem}.so.1"))
            (libraries / f"{stem}.so.1").symlink_to(f"{stem}.so.580.1")
        (self.driver / "dev").mkdir()
        for node in ("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1"):
            (self.driver / "dev" / node).symlink_to("/dev/null")
        self.hook = root / "hook"
        self.hook.mkdir()
        shutil.copy(ROOT / "build/hook/libaliquot-region.so", self.hook)
        (self.hook / "libvgpu-strict.so").write_bytes(shared_object("libvgpu.so"))
        self.cdi, self.state, self.run = root / "cdi", root / "state", root / "run"

    def close(self) -> None:
        self._short.cleanup()

    def arguments(self, *more: str) -> list[str]:
        """Flags of the driver on this node."""
        flags = {
            "node-name": self.name,
            "kubeconfig": self.kubeconfig,
            "kubelet-root": self.kubelet,
            "cdi-dir": self.cdi,
            "state-dir": self.state,
            "run-dir": self.run,
            "driver-root": self.driver,
            "hook-dir": self.hook,
            "http-port": 0,
        }
        return [text for flag, value in flags.items() for text in (f"--{flag}", str(value))] + list(more)

    def settings(self, *more: str) -> Settings:
        return read_settings(self.arguments(*more), {})

    def checkpoint(self) -> dict[str, Any]:
        """Claim UID → record, as the files say."""
        return {uid: json.loads(raw) for uid, raw in look(self.state / "checkpoint.json").claims.items()}

    def artefacts(self, uid: str) -> list[str]:
        """Everything on the node that is the claim's, checkpoint aside."""
        found = [path for folder in (self.cdi, self.run) if folder.exists() for path in folder.rglob("*")]
        return sorted(str(path.relative_to(self.root)) for path in found if uid in path.name)

    def spec(self, uid: str) -> dict[str, Any]:
        """The claim's CDI spec."""
        return json.loads((self.cdi / f"gpu.aliquot.dev-claim_{uid}.json").read_bytes())


class FixedCards:
    """Cards as plain values, in the place of the loop that asks NVML."""

    def __init__(self, view: View, changed: Any) -> None:
        self.view = view
        self.outdated = ""
        self._changed = changed

    def run(self, stop: threading.Event) -> None:
        self._changed(self.view)
        stop.wait()

    def set(self, view: View) -> None:
        self.view = view
        self._changed(view)


class Daemon:
    """The real driver on a node, in a thread of this process."""

    def __init__(self, folders: NodeFolders, inventory: Inventory, *more: str, steps: Any = None) -> None:
        self.folders = folders
        self.driver = Driver(folders.settings(*more), steps=steps or (lambda _step: None))
        self.driver.cards = FixedCards(View(inventory=inventory, problem=""), self.driver.cards_changed)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="driver", daemon=True)

    def _run(self) -> None:
        try:
            self.driver.run()
        except BaseException as err:
            self.error = err

    def start(self) -> Daemon:
        self._thread.start()
        wait_for(
            lambda: (
                self.error
                or (
                    (self.driver.publisher.stored.is_set() and self.driver.service_server.intact())
                    and self.driver.registration_server.intact()
                )
            ),
            "serving sockets and stored slices",
        )
        if self.error is not None:
            raise self.error
        return self

    def stop(self) -> None:
        self.driver.stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Kubelet:
    """The kubelet's side of the contract, as a gRPC client."""

    def __init__(self, folders: NodeFolders) -> None:
        self.folders = folders
        self._channels: list[grpc.Channel] = []

    def registration_sockets(self) -> list[Path]:
        return sorted((self.folders.kubelet / "plugins_registry").glob("*.sock"))

    def service_sockets(self) -> list[Path]:
        return sorted((self.folders.kubelet / "plugins" / "gpu.aliquot.dev").glob("*.sock"))

    def channel(self, path: Path) -> grpc.Channel:
        channel = grpc.insecure_channel(f"unix:{path}")
        self._channels.append(channel)
        return channel

    def register(self, path: Path | None = None) -> registration.PluginInfo:
        """Dial, ask, and say that all is well."""
        stub = registration_grpc.RegistrationStub(self.channel(path or self.registration_sockets()[0]))
        info = stub.GetInfo(registration.InfoRequest(), timeout=5)
        stub.NotifyRegistrationStatus(registration.RegistrationStatus(plugin_registered=True), timeout=5)
        return info

    def stub(self, path: Path | None = None, *, beta: bool = False) -> Any:
        channel = self.channel(path or self.service_sockets()[0])
        return (v1beta1_grpc if beta else v1_grpc).DRAPluginStub(channel)

    def prepare(self, *claims: dict[str, Any], timeout_s: float = 45.0, stub: Any = None, beta: bool = False) -> Any:
        messages = v1beta1 if beta else v1
        request = messages.NodePrepareResourcesRequest(claims=[reference(messages, claim) for claim in claims])
        return (stub or self.stub(beta=beta)).NodePrepareResources(request, timeout=timeout_s, wait_for_ready=True)

    def unprepare(self, *claims: dict[str, Any], timeout_s: float = 45.0, stub: Any = None, beta: bool = False) -> Any:
        messages = v1beta1 if beta else v1
        request = messages.NodeUnprepareResourcesRequest(claims=[reference(messages, claim) for claim in claims])
        return (stub or self.stub(beta=beta)).NodeUnprepareResources(request, timeout=timeout_s, wait_for_ready=True)

    def prepared(self, claim: dict[str, Any], **kwargs: Any) -> list[Any]:
        """Devices of one claim; fails the test on an error."""
        answer = self.prepare(claim, **kwargs).claims[claim["metadata"]["uid"]]
        assert answer.error == ""
        return list(answer.devices)

    def refused(self, claim: dict[str, Any], **kwargs: Any) -> str:
        """The error of one claim; fails the test on success."""
        answer = self.prepare(claim, **kwargs).claims[claim["metadata"]["uid"]]
        assert answer.error
        assert not answer.devices
        return answer.error

    def undone(self, claim: dict[str, Any], **kwargs: Any) -> None:
        uid = claim["metadata"]["uid"]
        answer = self.unprepare(claim, **kwargs)
        assert uid in answer.claims
        assert answer.claims[uid].error == ""

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


def reference(messages: Any, claim: dict[str, Any]) -> Any:
    metadata = claim["metadata"]
    return messages.Claim(namespace=metadata["namespace"], uid=metadata["uid"], name=metadata["name"])


class Cluster:
    """Claims at a real API server, allocated by hand as a scheduler would."""

    def __init__(self, api: Any, namespace: str, node: str) -> None:
        self.api = api
        self.namespace = namespace
        self.node = node

    def add_node(self) -> None:
        self.api.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": self.node}})

    def slices(self) -> list[dict[str, Any]]:
        return self.api.list(
            "resource.k8s.io/v1",
            "ResourceSlice",
            fieldSelector=f"spec.driver=gpu.aliquot.dev,spec.nodeName={self.node}",
        )

    def claim(self, name: str, *results: dict[str, Any], config: Any = (), reserved: bool = True) -> dict[str, Any]:
        """A new claim that has been given `results`."""
        requests = dict.fromkeys(result["request"].partition("/")[0] for result in results)
        body = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {"devices": {"requests": [self._request(request, results) for request in requests]}},
        }
        made = self.api.create(body)
        made["apiVersion"], made["kind"] = body["apiVersion"], body["kind"]
        return self.allocate(made, *results, config=config, reserved=reserved)

    def _request(self, name: str, results: Any) -> dict[str, Any]:
        mine = [r for r in results if r["request"].partition("/")[0] == name]
        subs = [r["request"].partition("/")[2] for r in mine]
        if any(subs):
            return {"name": name, "firstAvailable": [{"name": s, "deviceClassName": "share"} for s in ("big", "small")]}
        exactly = {"deviceClassName": "share", "count": len(subs)}
        if any(r.get("adminAccess") for r in mine):
            exactly["adminAccess"] = True
        return {"name": name, "exactly": exactly}

    def allocate(self, claim: dict[str, Any], *results: Any, config: Any = (), reserved: bool = True) -> dict[str, Any]:
        claim["status"] = {
            "allocation": {
                "devices": {"results": [self._result(r) for r in results], "config": list(config)},
                "nodeSelector": None,
            }
        }
        if reserved:
            claim["status"]["reservedFor"] = [{"resource": "pods", "name": "p", "uid": claim["metadata"]["uid"]}]
        stored = self.api.replace_status(claim)
        stored["apiVersion"], stored["kind"] = claim["apiVersion"], claim["kind"]
        return stored

    def _result(self, result: dict[str, Any]) -> dict[str, Any]:
        return {**result, "pool": f"{self.node}/gpu"} if result["pool"] == "n1/gpu" else result

    def deallocate(self, claim: dict[str, Any]) -> dict[str, Any]:
        current = self.api.get(claim["apiVersion"], claim["kind"], claim["metadata"]["name"], self.namespace)
        current["apiVersion"], current["kind"] = claim["apiVersion"], claim["kind"]
        current["status"] = {}
        return self.api.replace_status(current)

    def delete(self, claim: dict[str, Any]) -> None:
        self.api.delete("resource.k8s.io/v1", "ResourceClaim", claim["metadata"]["name"], self.namespace)


@contextlib.contextmanager
def zygote(folders: NodeFolders, inventory: Inventory) -> Iterator[Any]:
    """A process from which daemons of the node are forked quickly, each to be killed at a chosen step."""
    spec = {"arguments": folders.arguments(), "cards": [msgspec.to_builtins(card) for card in inventory.cards]}
    with (folders.root / "zygote.log").open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, __file__, json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        yield Zygote(child)
    finally:
        child.stdin.close()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()


class Zygote:
    """Asks the process for a daemon and hears how it ended."""

    def __init__(self, child: Any) -> None:
        self._child = child

    def _ask(self, **question: Any) -> dict[str, Any]:
        self._child.stdin.write(json.dumps(question) + "\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        assert line, "the zygote ended; see zygote.log"
        return json.loads(line)

    def fork(self, *, die_at: int = 0) -> list[str]:
        """A daemon that serves; it kills itself at the `die_at`-th step after `arm`, 0 for never."""
        return self._ask(do="fork", die_at=die_at)["steps"]

    def end(self) -> dict[str, Any]:
        """Ends the daemon; how it died (signal number) and the steps it made since it served."""
        return self._ask(do="end")


_PR_SET_PDEATHSIG = 1


def _serve(arguments: list[str], inventory: Inventory, die_at: int, ready: int, journal: Path) -> None:
    """In the forked child: serve until told to end, or until the chosen step."""
    # A test that fails ends the zygote; its daemon must not outlive that.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    count = [-1]
    lock = threading.Lock()
    log = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def steps(step: str) -> None:
        with lock:
            if count[0] < 0:
                return
            count[0] += 1
            os.write(log, f"{step}\n".encode())
            if count[0] == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    driver = Driver(read_settings(arguments, {}), steps=steps)
    driver.cards = FixedCards(View(inventory=inventory, problem=""), driver.cards_changed)
    signal.signal(signal.SIGTERM, lambda *_: driver.stop.set())

    def tell() -> None:
        wait_for(
            lambda: (
                driver.service_server.intact()
                and driver.registration_server.intact()
                and driver.publisher.stored.is_set()
                and not driver.rebuild.pending
            ),
            "serving",
            30,
        )
        count[0] = 0
        os.write(ready, b"!")

    threading.Thread(target=tell, daemon=True).start()
    driver.run()


def _zygote() -> None:
    spec = json.loads(sys.argv[1])
    inventory = Inventory(
        cards=tuple(msgspec.convert(card, Card) for card in spec["cards"]), driver_version="580.1", cuda_version=(13, 0)
    )
    journal = Path(spec["arguments"][spec["arguments"].index("--state-dir") + 1]).with_name("steps")
    import kubernetes.client  # noqa: PLC0415  # what is imported before the fork is paid for once
    import kubernetes.config  # noqa: F401, PLC0415

    child = 0
    for line in sys.stdin:
        question = json.loads(line)
        if question["do"] == "fork":
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(reading)
                code = 1
                try:
                    os.dup2(2, 1)
                    _serve(spec["arguments"], inventory, question["die_at"], writing, journal)
                    code = 0
                finally:
                    os._exit(code)
            os.close(writing)
            came = os.read(reading, 1)
            os.close(reading)
            _answer({"steps": ["ready"] if came else []})
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
            _, status = os.waitpid(child, 0)
            steps = journal.read_text().split("\n")[:-1]
            _answer({"signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, "steps": steps})


def _answer(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def with_memory(inventory: Inventory, gib: int) -> Inventory:
    """The same cards with other memory."""
    return replace(inventory, cards=tuple(replace(card, memory_bytes=gib * GIB) for card in inventory.cards))


if __name__ == "__main__":
    _zygote()
