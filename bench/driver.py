# SPDX-License-Identifier: Apache-2.0
"""How fast the driver is ready, what it weighs, and whether it keeps quiet.

    .venv/bin/python bench/driver.py [--rest SECONDS] [--json FILE]

A real API server and the fake GPU driver. Ready = the slice is stored and the registration socket answers, counted
from the start of the process. Weight is the resident set, against an empty process that imports the same modules.
Quiet = requests that write, counted by the API server's own metrics over a minute at rest. Budgets (design.md 7):
ready ≤ 1 s; RSS ≤ 80 MiB and ≤ 15 MiB over the imports; no write. Exit status 1 when one is missed.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "bench"))
from driver_node import BenchNode  # noqa: E402

STARTS = 5
BUDGET_READY_S, BUDGET_RSS_MIB, BUDGET_OVER_IMPORTS_MIB = 1.0, 80.0, 15.0

EMPTY = """
import aliquot.dra.__main__, aliquot.dra.driver, aliquot.dra.check, kubernetes.client, kubernetes.config, sys
import kubernetes.client.rest, kubernetes.config.kube_config, grpc._server
sys.stdout.write("ready\\n"); sys.stdout.flush(); sys.stdin.read()
"""


def rss_of_imports_mib() -> float:
    """An empty process with the driver's imports."""
    with subprocess.Popen([sys.executable, "-c", EMPTY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        status = Path(f"/proc/{child.pid}/status").read_text()
        child.stdin.close()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) / 1024


_COUNT = re.compile(r"^apiserver_request_total\{(?P<labels>[^}]*)\} (?P<count>\S+)$", re.MULTILINE)
_WRITES = ("POST", "PUT", "PATCH", "DELETE", "APPLY")


def writes(node: BenchNode) -> dict[str, float]:
    """Writes that the API server has answered, by what was written; its own housekeeping left out."""
    text = node.plane.api.request("GET", "/metrics")
    found: dict[str, float] = {}
    for match in _COUNT.finditer(text):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', match["labels"]))
        if labels.get("verb") in _WRITES and labels.get("resource") not in ("leases", "endpoints", "endpointslices"):
            key = f"{labels['verb']} {labels.get('resource')}"
            found[key] = found.get(key, 0.0) + float(match["count"])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rest", type=float, default=60.0, help="seconds at rest; default 60")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    (ROOT / "build").mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="bench-driver-", dir=ROOT / "build") as directory,
        BenchNode(Path(directory), start=False) as node,
    ):
        took = []
        for _ in range(STARTS):
            node.plane.api.delete_all("resource.k8s.io/v1", "ResourceSlice")
            node.rig.wait_for(lambda: not node.cluster.slices(), "no slices")
            took.append(node.start())
            if len(took) < STARTS:
                node.stop()
        claims = [node.claim(f"c{n}", n % 2, n, 256 << 20) for n in range(16)]
        for claim in claims:
            node.kubelet.prepared(claim)
        for claim in claims[8:]:
            node.kubelet.undone(claim)
        rss, imports = node.rss_mib(), rss_of_imports_mib()
        node.rest(3.0)
        before, cpu = writes(node), node.cpu_ms()
        node.rest(given.rest)
        after = writes(node)
        cpu = node.cpu_ms() - cpu
    changed = {key: after[key] - before.get(key, 0.0) for key in after if after[key] != before.get(key, 0.0)}
    figures = {
        "ready_s": statistics.median(took),
        "ready_all_s": took,
        "rss_mib": rss,
        "rss_of_imports_mib": imports,
        "rest_s": given.rest,
        "writes_at_rest": changed,
        "cpu_at_rest_percent": cpu / given.rest / 10,
    }
    verdicts = [
        (
            f"ready after {figures['ready_s']:.2f} s (of {', '.join(f'{t:.2f}' for t in took)})",
            figures["ready_s"] <= 1.0,
        ),
        (f"RSS {rss:.1f} MiB with 8 claims prepared", rss <= BUDGET_RSS_MIB),
        (f"{rss - imports:.1f} MiB over the imports ({imports:.1f} MiB)", rss - imports <= BUDGET_OVER_IMPORTS_MIB),
        (f"{sum(changed.values()):.0f} writes in {given.rest:g} s at rest {changed or ''}", not changed),
    ]
    for text, good in verdicts:
        print(f"{'ok' if good else 'MISSED':<7} {text}")
    print(f"{'':<7} {figures['cpu_at_rest_percent']:.2f} % of a CPU at rest")
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2))
    return int(not all(good for _, good in verdicts))


if __name__ == "__main__":
    sys.exit(main())
