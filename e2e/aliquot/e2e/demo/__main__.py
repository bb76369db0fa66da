# SPDX-License-Identifier: Apache-2.0
"""`python -m aliquot.e2e.demo`: builds what is missing, starts a cluster, tells the story, leaves nothing behind.

Exit status: 0 every check held, 1 one did not, 2 something needed is missing, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from aliquot.api.errors import AliquotError
from aliquot.e2e import build
from aliquot.e2e.cards import ONE_CARD, furnish, require_fake_driver
from aliquot.e2e.demo.screen import Screen
from aliquot.e2e.demo.story import NODE_CONFIG, tell
from aliquot.e2e.images.recipes import ROOT, Image, build_images
from aliquot.e2e.install import Settings, install
from aliquot.e2e.local.cluster import LocalCluster, LocalOptions
from aliquot.e2e.local.space import require_root
from aliquot.e2e.stage import Stage
from aliquot.e2e.toolchain import DEFAULT_MINOR, KUBERNETES, MissingPartError, kubernetes

NODE = "node-a"
NAMESPACE = "demo"
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    options = _parse(arguments)
    try:
        require_root()
        require_fake_driver()
        build.build(build.wanted(["cluster"], [options.minor]))
        images = build_images()
        return _run(options, images)
    except (MissingPartError, AliquotError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ndemo: stopped; nothing is left behind", file=sys.stderr)
        return 130


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m aliquot.e2e.demo",
        description="Two pods share one (fake) card on a real Kubernetes, a third waits, and everything comes back.",
    )
    parser.add_argument("--minor", default=DEFAULT_MINOR, choices=list(KUBERNETES), help="Kubernetes minor")
    parser.add_argument("--keep", action="store_true", help="leave the cluster up and say how to use it")
    parser.add_argument(
        "--feature-gates",
        default="",
        metavar="NAME=true,…",
        help="for every part of Kubernetes; with DRAConsumableCapacity=true 1.34 shares as 1.36 does",
    )
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace, images: Sequence[Image]) -> int:
    screen = Screen()
    gates = dict(_gate(text) for text in options.feature_gates.split(",") if text)
    version = kubernetes(options.minor).version
    screen.chapter(f"Starting Kubernetes {version} and containerd in namespaces of their own")
    cluster = LocalCluster(
        LocalOptions(minor=options.minor, nodes=(NODE,), feature_gates=gates, detached=options.keep),
        images,
        prepare_node=lambda node: furnish(node, ONE_CARD),
        keep_logs=ROOT / "build" / "demo-logs",
    )
    kept = False
    try:
        cluster.start()
        screen.progress(f"{NODE} is Ready")
        install(cluster, Settings(node_config=NODE_CONFIG))
        screen.progress("Aliquot is installed from deploy/ and its driver is ready")
        tell(screen, Stage(cluster, NAMESPACE).open(), cluster.node(NODE))
        status = screen.ending()
        if options.keep:
            kept = True
            _explain(screen, cluster)
        return status
    finally:
        if not kept:
            cluster.stop()


def _gate(text: str) -> tuple[str, bool]:
    name, separator, value = text.partition("=")
    if not name or separator != "=" or value not in {"true", "false"}:
        raise MissingPartError(f"--feature-gates: {text!r} is not NAME=true or NAME=false")
    return name, value == "true"


def _explain(screen: Screen, cluster: LocalCluster) -> None:
    """Writes a script that opens a shell in the cluster, and says how to use and how to end it."""
    assert cluster.run is not None
    assert cluster.space is not None
    inside = cluster.node(NODE).inside
    enter = ["nsenter", "--target", str(inside.pid), "--mount", "--net", "--pid", "--root", "--wd=/"]
    path = f"PATH={kubernetes(cluster.minor).folder}:{_SYSTEM_PATH}"
    command = shlex.join([*enter, "env", f"KUBECONFIG={cluster.kubeconfig}", path])
    shell = cluster.run.directory / "shell"
    shell.write_text(f'#!/bin/sh\n[ $# -gt 0 ] || set -- sh -i\nexec {command} "$@"\n')
    shell.chmod(0o755)
    examples = Path("deploy") / "examples"
    screen.chapter("The cluster stays up")
    screen.lines(
        f"A shell on its node, with kubectl:  {shell}\n"
        f"One command:                        {shell} kubectl get resourceslices\n"
        f"Something to try:                   {shell} kubectl apply -f {ROOT / examples / 'share-from-template.yaml'}\n"
        f"What a pod sees:                    {shell} kubectl exec one-share -- nvidia-smi\n"
        f"End it and everything in it:        kill -KILL {cluster.space.keeper.pid}"
    )


if __name__ == "__main__":
    sys.exit(main())
