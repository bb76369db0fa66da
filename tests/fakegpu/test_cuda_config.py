# SPDX-License-Identifier: Apache-2.0
"""The configuration file: what it can say, and that what it cannot say is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

PRELUDE = "from cuda_client import *\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "line 1 column 1: the text ends too early"),
        ("[]", "must be an object"),
        ('{"cards": {}}', '"cards" must be a list of cards'),
        ("{}", '"cards" must be a list of cards'),
        ('{"cards": [], "version": 2}', "version: 2 is not a whole number from 1 to 1"),
        ('{"cards": [{"memry": 5}]}', "cards[0].memry: unknown key"),
        ('{"cards": [{"profile": "T5"}]}', 'cards[0].profile: no profile "T5"; there are Fake24G, T4,'),
        ('{"cards": [{"memory_bytes": "24GB"}]}', 'cards[0].memory_bytes: "24GB" is not a size'),
        ('{"cards": [{"memory_bytes": -1}]}', "cards[0].memory_bytes: -1 is not a whole number"),
        ('{"cards": [{"uuid": "GPU-1"}]}', "cards[0].uuid: must be GPU- and a UUID"),
        (
            '{"cards": [{"uuid": "GPU-aaaaaaaa-0000-4000-8000-00000000000a", "count": 2}]}',
            "cards[0]: uuid, serial and pci name one",
        ),
        ('{"cards": [{"minor": 1}, {}]}', "cards: cards 0 and 1 have the same minor"),
        ('{"cards": [{"pci": "0:1"}]}', "cards[0].pci: must be text such as"),
        ('{"cards": [{"reserved_bytes": "25GiB"}]}', "cards[0]: reserved_bytes is more than memory_bytes"),
        ('{"cards": [{"mig_enabled": true}]}', "cards[0]: mig_enabled on a card without MIG"),
        ('{"cards": [{"compute_capability": 8.6}]}', 'cards[0].compute_capability: must be text such as "8.6"'),
        ('{"cards": [{}], "links": [{"cards": [0, 1]}]}', "links[0].cards[1]: "),
        (
            '{"cards": [{}, {}], "links": [{"cards": [0, 1]}]}',
            "links[0]: a card has no free NVLink left, or none at all",
        ),
        ('{"cards": [], "plain_round": 1000}', "plain_round: must be a power of two from 256 up"),
        ('{"cards": [], "queue_depth": 5000}', "queue_depth: 5000 is not a whole number from 1 to 1024"),
        ('{"cards": [], "p2p": "some"}', 'p2p: must be "all", "nvlink" or "none"'),
        ('{"cards": [{"count": 5000}]}', "cards[0].count: 5000 is not"),
        ('{"cards": [], "x": 1}', "x: unknown key"),
        ('{"cards": []} x', "text after the end of the value"),
        ('{"cards": [' + "[" * 40 + "]" * 40 + "]}", "nested too deep"),
        ('{"a": "\\ud800"}', "half of a surrogate pair"),
    ],
)
def test_what_is_not_understood_is_refused(cuda_machine: Callable[..., Any], text: str, complaint: str) -> None:
    machine = cuda_machine()
    machine.config.write_text(text)
    with machine.start(PRELUDE + "result = cu.cuInit(0)") as program:
        out, err = program.communicate(timeout=30)
    assert json.loads(out.splitlines()[-1]) == 802
    assert err.count("\n") == 1
    assert f"fakegpu: {machine.config}: " in err
    assert complaint in err


def test_seeds_make_uuids_and_serials(cuda_machine: Callable[..., Any]) -> None:
    def uuids(**settings: Any) -> list[str]:
        status = json.loads(cuda_machine({"count": 12}, **settings).tool("fakegpuctl", "status").stdout)
        return [card["uuid"] for card in status["cards"]]

    first = uuids(seed="node-1")
    assert first == uuids(seed="node-1")
    assert len(set(first) | set(uuids(seed="node-2"))) == 24
    assert all(uuid[18] == "4" for uuid in first)  # version 4


def test_defaults_and_counts(cuda_machine: Callable[..., Any]) -> None:
    machine = cuda_machine(
        {"count": 2}, {"memory_bytes": "8GiB"}, defaults={"profile": "T4", "memory_bytes": "4GiB", "reserved_bytes": 0}
    )
    cards = json.loads(machine.tool("fakegpuctl", "status").stdout)["cards"]
    assert [(card["name"], card["memory"] >> 30) for card in cards] == [
        ("Tesla T4", 4),
        ("Tesla T4", 4),
        ("Tesla T4", 8),
    ]


def test_there_is_no_cap_of_eight(cuda_machine: Callable[..., Any]) -> None:
    code = """
expect(cu.cuInit(0))
count = c_int()
expect(cu.cuDeviceGetCount(byref(count)))
start(99)
alloc(MIB)
result = [count.value, used()]
"""
    assert cuda_machine({"count": 100}).python(PRELUDE + code) == [100, 1 << 20]


@pytest.mark.parametrize(
    ("profile", "gib", "sms", "capability"),
    [
        ("Fake24G", 24, 84, (8, 6)),
        ("T4", 14, 40, (7, 5)),
        ("A100-40", 39, 108, (8, 0)),
        ("A100-80", 79, 108, (8, 0)),
        ("H100", 79, 132, (9, 0)),
        ("L40S", 44, 142, (8, 9)),
        ("RTX-PRO-6000", 94, 188, (12, 0)),
    ],
)
def test_profiles(
    cuda_machine: Callable[..., Any], profile: str, gib: int, sms: int, capability: tuple[int, int]
) -> None:
    code = """
expect(cu.cuInit(0))
total = c_size_t()
expect(cu.cuDeviceTotalMem_v2(byref(total), 0))
result = [total.value >> 30, attribute(16), attribute(75), attribute(76)]
"""
    assert cuda_machine({"profile": profile}).python(PRELUDE + code) == [gib, sms, *capability]
