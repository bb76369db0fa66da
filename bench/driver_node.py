# SPDX-License-Identifier: Apache-2.0
"""One node for the benches of the DRA driver: API server, folders, the driver's process, a kubelet as gRPC client."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from aliquot.e2e.control_plane import ControlPlane
from aliquot.e2e.process import free_ports

ROOT = Path(__file__).parents[1]


def _rig() -> Any:
    """The tests' kubelet and claims: one client for tests and benches."""
    spec = importlib.util.spec_from_file_location("dra_rig", ROOT / "tests" / "dra" / "dra_rig.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["dra_rig"] = module
    spec.loader.exec_module(module)
    return module


def percentile(values: Iterable[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def table(rows: Sequence[dict[str, object]]) -> str:
    """Rows of equal keys, numbers with two digits."""
    texts = [list(rows[0])] + [[f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    widths = [max(len(line[column]) for line in texts) for column in range(len(texts[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in texts)


class BenchNode:
    """Everything running, the driver ready; `cards` fake cards of 80 GiB."""

    def __init__(self, directory: Path, *, cards: int = 2, max_shares: int = 10, start: bool = True) -> None:
        self.directory = directory
        self.rig = _rig()
        self._cards = cards
        self._max_shares = max_shares
        self._start = start
        self._shm: Path | None = None
        self.process: subprocess.Popen[bytes] | None = None
        (self.port,) = free_ports(1)

    def __enter__(self) -> Self:
        self.plane = ControlPlane(self.directory / "plane").start()
        self.folders = self.rig.NodeFolders(self.directory / "node", "bench-node", self.plane.kubeconfig)
        # /run is a tmpfs on every node; state and CDI stay on the disk that is to be measured.
        if Path("/dev/shm").is_dir():
            self._shm = Path(tempfile.mkdtemp(prefix="aliquot-bench-", dir="/dev/shm"))
            self.folders.run = self._shm / "run"
        strict = ROOT / "build/hook/libvgpu-strict.so"
        if strict.exists():
            shutil.copy(strict, self.folders.hook)
        fake = self.directory / "fakegpu"
        fake.mkdir()
        self.fake_config = fake / "config.json"
        memory = {"profile": "Fake24G", "count": self._cards}
        self.fake_config.write_text(json.dumps({"version": 1, "cards": [memory]}))
        # The fake driver root has nodes for two cards; the others are links to nothing but a name.
        self._own_driver_root()
        self.config = self.directory / "config.json"
        self.config.write_text(json.dumps({"defaults": {"maxShares": self._max_shares}}))
        self.cluster = self.rig.Cluster(self.plane.api, "default", "bench-node")
        self.cluster.add_node()
        self.kubelet = self.rig.Kubelet(self.folders)
        if self._start:
            self.start()
        return self

    def _own_driver_root(self) -> None:
        root = self.directory / "driver"
        shutil.copytree(ROOT / "build" / "fakegpu" / "usr", root / "usr", symlinks=True)
        shutil.copytree(ROOT / "build" / "fakegpu" / "proc", root / "proc", symlinks=True)
        (root / "dev").mkdir()
        for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{n}" for n in range(self._cards))):
            (root / "dev" / name).symlink_to("/dev/null")
        self.folders.driver = root

    def command(self) -> list[str]:
        own = ["--http-port", str(self.port), "--http-address", "127.0.0.1", "--config", str(self.config)]
        return [sys.executable, "-m", "aliquot.dra", *self.folders.arguments(), *own]

    def environment(self) -> dict[str, str]:
        return os.environ | {"FAKEGPU_CONFIG": str(self.fake_config)}

    def start(self) -> float:
        """Starts the driver, registers as kubelet does; seconds until slice stored and registration answered."""
        started = time.monotonic()
        with (self.directory / "driver.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), env=self.environment(), stdout=log, stderr=subprocess.STDOUT
            )
        self.rig.wait_for(self.kubelet.registration_sockets, "the socket")
        self.kubelet.register()
        self.rig.wait_for(self.cluster.slices, "the slice")
        took = time.monotonic() - started
        self.rig.wait_for(self.ready, "readiness")
        self.devices = [d["name"] for d in self.cluster.slices()[0]["spec"]["devices"]]
        return took

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def claim(self, name: str, card: int, number: int, memory: int) -> dict[str, Any]:
        """A claim with a share of a card."""
        result = {
            "request": "gpu",
            "driver": "gpu.aliquot.dev",
            "pool": "bench-node/gpu",
            "device": self.devices[card],
            "shareID": f"{number:08d}-0000-4000-8000-000000000000",
            "consumedCapacity": {"memory": str(memory), "cores": "0", "slots": "1"},
        }
        return self.cluster.claim(name, result)

    def log(self) -> list[dict[str, Any]]:
        lines = (self.directory / "driver.log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def parts(self) -> dict[str, dict[str, float]]:
        """Claim UID → milliseconds of each part, as the driver's log says."""
        return {line["claim_uid"]: line["milliseconds"] for line in self.log() if line["event"] == "claim prepared"}

    def fsync_floor_ms(self, rounds: int = 50) -> float:
        """What the disk takes for one durable small file: the floor below everything that is durable."""
        folder = self.directory / "floor"
        folder.mkdir()
        took = []
        for number in range(rounds):
            started = time.perf_counter()
            descriptor = os.open(folder / f".{number}", os.O_WRONLY | os.O_CREAT)
            os.write(descriptor, bytes(4096))
            os.fsync(descriptor)
            os.close(descriptor)
            (folder / f".{number}").rename(folder / "file")
            parent = os.open(folder, os.O_RDONLY)
            os.fsync(parent)
            os.close(parent)
            took.append((time.perf_counter() - started) * 1000)
        return percentile(took, 50)

    def cpu_ms(self) -> float:
        """CPU time of the driver's process so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")

    def rss_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) / 1024

    def rest(self, seconds: float) -> None:
        threading.Event().wait(seconds)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process = None

    def __exit__(self, *_: object) -> None:
        self.kubelet.close()
        self.stop()
        self.plane.stop()
        if self._shm is not None:
            shutil.rmtree(self._shm, ignore_errors=True)
