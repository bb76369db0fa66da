# SPDX-License-Identifier: Apache-2.0
"""What the demo tells: two pods share a card, a third waits, and everything comes back.

Knows the cluster only through `Stage`, and the node only to look at the card from outside. Invariant: each sentence
that claims something is followed by a check of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from aliquot.api.quantity import format_bytes
from aliquot.e2e import install
from aliquot.e2e.api import eventually
from aliquot.e2e.cards import card_table
from aliquot.e2e.demo.screen import Screen
from aliquot.e2e.local.node import Node
from aliquot.e2e.objects import claim_template, from_template, pod, share
from aliquot.e2e.stage import Allocated, Stage

SHARE: Final = "10Gi"
FITTING: Final = "9Gi"
TOO_MUCH: Final = "14Gi"
NODE_CONFIG: Final = {"defaults": {"mode": "auto", "slots": 2}}
"""Where a cluster keeps no shares, two slots of half a card: a claim of `SHARE` fits as often as otherwise, twice."""
_OUT_OF_MEMORY: Final = "CUDA_ERROR_OUT_OF_MEMORY"


def tell(screen: Screen, stage: Stage, node: Node) -> None:
    """The whole story, on an installed cluster with one card."""
    (card,) = card_table(node)
    mode = _mode(stage)
    _introduce(screen, card["name"], card["total_mib"], mode)
    given = _share(screen, stage)
    _see(screen, stage, given)
    _refuse(screen, stage, given["red"])
    _wait(screen, stage, mode)
    _give_back(screen, stage)
    _after(screen, stage, node)


def _mode(stage: Stage) -> str:
    (device, *_) = install.devices(stage.cluster)
    return str(device["attributes"]["mode"]["string"])


def _introduce(screen: Screen, card: str, total_mib: int, mode: str) -> None:
    screen.chapter("The cluster")
    offer = "shares of any size" if mode == "shared" else "two slots of half a card, for this Kubernetes knows no more"
    screen.say(
        f"A node with one card: {card}, {total_mib // 1024} GiB. Aliquot's driver runs there as a DaemonSet and offers "
        f"it to Kubernetes: {offer}."
    )


def _share(screen: Screen, stage: Stage) -> dict[str, Allocated]:
    screen.chapter("Two pods ask for a part of the card")
    names = ("red", "blue")
    stage.create(
        claim_template("ten-gi", share(SHARE)), *(pod(n, claims={"gpu": from_template("ten-gi")}) for n in names)
    )
    screen.table(["pod", "asks for", "how"], [[n, SHARE, "a ResourceClaim from the template ten-gi"] for n in names])
    stage.running(*names)
    given = {n: stage.allocations(n)[0] for n in names}
    screen.say("\nThe scheduler found room for both and the driver prepared them:")
    rows = [
        [n, stage.node_of(n), a.device, format_bytes(a.memory_bytes), a.share_id[:8] or "the whole slot"]
        for n, a in given.items()
    ]
    screen.table(["pod", "node", "device", "memory", "share"], rows)
    screen.check(all(a.memory_bytes >= 10 << 30 for a in given.values()), f"each got at least the {SHARE} it asked for")
    cards = {stage.show(n)[0]["uuid"] for n in names}
    screen.check(len(cards) == 1, "both are on the same card")
    return given


def _see(screen: Screen, stage: Stage, given: dict[str, Allocated]) -> None:
    screen.chapter("What each container sees")
    stage.hold("red", FITTING)
    screen.say(f"red now holds {FITTING}. Each pod runs nvidia-smi:")
    tables = {name: stage.smi(name) for name in given}
    for name, table in tables.items():
        screen.terminal(f"{name}: nvidia-smi", table)
    query = ["--query-gpu=memory.total,memory.used", "--format=csv,noheader,nounits"]
    seen = {n: [int(v) for v in stage.smi(n, *query).split(",")] for n in given}
    totals_right = all(seen[n][0] == a.memory_bytes >> 20 for n, a in given.items())
    screen.check(totals_right, "nvidia-smi shows a card of exactly the share's size")
    screen.check(
        all(stage.show(n)[0]["total"] == a.memory_bytes for n, a in given.items()), "so does CUDA, to the byte"
    )
    screen.check(seen["red"][1] >= 9 * 1024, "red sees the memory it holds")
    screen.check(seen["blue"][1] < 1024, "blue sees nothing of what red holds")
    named = {name: "workload" in table for name, table in tables.items()}
    screen.check(named == {"red": True, "blue": False}, "each sees its own processes and no others")


def _refuse(screen: Screen, stage: Stage, red: Allocated) -> None:
    screen.chapter("One asks for more than its share")
    (answer,) = stage.allocate("red", TOO_MUCH)
    screen.terminal(f"red: a program that asks for {TOO_MUCH}", f"cuMemAlloc({answer['asked']}) = {answer['result']}")
    screen.check(answer["result"] == _OUT_OF_MEMORY, "the program gets CUDA's own out-of-memory error")
    (fits,) = stage.allocate("blue", FITTING)
    screen.check(fits["code"] == 0, f"blue still gets {FITTING}: nothing else broke")
    free = stage.show("red")[0]["free"]
    held = red.memory_bytes - free
    screen.check(held >= 9 << 30, "what red had before it still has")


def _wait(screen: Screen, stage: Stage, mode: str) -> None:
    screen.chapter("A third pod, and no room")
    stage.create(pod("green", claims={"gpu": from_template("ten-gi")}))
    reason = stage.refusal("green")
    screen.table(["pod", "asks for", "state", "reason"], [["green", SHARE, "Pending", reason]])
    left = "4 GiB are left of the card" if mode == "shared" else "both slots are taken"
    screen.check("cannot allocate all claims" in reason, f"it stays Pending with a reason ({left})")


def _give_back(screen: Screen, stage: Stage) -> None:
    screen.chapter("red goes, and its share comes back")
    stage.delete_pod("red")
    stage.running("green")
    (given,) = stage.allocations("green")
    now = {n: stage.allocations(n)[0] for n in ("blue", "green")}
    rows = [[n, a.device, format_bytes(a.memory_bytes)] for n, a in now.items()]
    screen.table(["pod", "device", "memory"], rows)
    screen.check(stage.show("green")[0]["total"] == given.memory_bytes, "green runs with the share that red had")
    (fits,) = stage.allocate("green", FITTING)
    screen.check(fits["code"] == 0, f"and gets {FITTING} of memory")


def _after(screen: Screen, stage: Stage, node: Node) -> None:
    screen.chapter("Everything goes")
    stage.close()
    eventually(lambda: not _left_behind(node), 20, "the end of every trace on the node")
    (card,) = card_table(node)
    screen.table(
        ["card", "memory", "in use", "shares on the node"],
        [[card["name"], f"{card['total_mib']} MiB", f"{card['used_mib']} MiB", str(len(_left_behind(node)))]],
    )
    screen.check(card["used_mib"] == 0, "the card is empty")
    screen.check(not _left_behind(node), "no grant, no usage record and no CDI file is left on the node")


def _left_behind(node: Node) -> list[str]:
    folders: list[tuple[str, Callable[[str], bool]]] = [
        ("/run/aliquot/grants", lambda name: name.startswith("c-")),
        ("/run/aliquot/usage", lambda name: name.startswith("c-")),
        ("/var/run/cdi", lambda name: name.endswith(".json")),
    ]
    return [p.name for folder, ours in folders for p in node.path(folder).glob("*") if ours(p.name)]
