# SPDX-License-Identifier: Apache-2.0
"""Watching the cards over the fake driver: late drivers, failing and returning cards, and what is kept for claims."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from aliquot.dra.cards import find_library

PRELUDE = """
import json, os, sys
from pathlib import Path
from aliquot.api import log
from aliquot.dra.cards import CardWatch, find_library
from aliquot.dra.metrics import Metrics
log.configure(level="error", stream=sys.stderr.buffer)
config, root = Path(os.environ["FAKEGPU_CONFIG"]), Path(sys.argv[1])
told, held, metrics = [], set(), Metrics(version="t")
watch = CardWatch(library=lambda: find_library("", root, ""), held=lambda: frozenset(held), changed=told.append,
                  metrics=metrics)

def control(**settings):
    new = config.with_name("new")
    new.write_text(json.dumps(settings))
    new.rename(config.with_name(config.name + ".control"))

def see():
    import time
    time.sleep(0.005)  # the fake driver looks for changes every 2 ms
    watch.look()
    view = watch.view
    return {
        "cards": [card.uuid for card in view.inventory.cards] if view.inventory else None,
        "sick": dict(view.sick), "problem": view.problem, "told": len(told),
    }

seen = []
"""


@pytest.fixture
def watched(tmp_path, fake_driver_root):
    """Runs code with a CardWatch on a machine of two cards; returns what it saw, look by look."""

    def run(code: str) -> list[dict]:
        config = tmp_path / "config.json"
        config.write_text(json.dumps({"version": 1, "cards": [{"profile": "Fake24G", "count": 2}]}))
        script = PRELUDE + textwrap.dedent(code) + "\nprint(json.dumps(seen))"
        done = subprocess.run(
            [sys.executable, "-c", script, str(fake_driver_root)],
            env=os.environ | {"FAKEGPU_CONFIG": str(config)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_the_first_look_sees_the_cards_and_a_second_tells_nothing(watched):
    first, second = watched("seen = [see(), see()]")
    assert len(first["cards"]) == 2
    assert (first["problem"], first["told"], second["told"]) == ("", 1, 1)


def test_b109_a_driver_that_comes_late_is_opened(watched):
    first, second = watched("""
        control(faults=[{"function": "nvmlInit*", "code": 9}])
        seen.append(see())
        control()
        seen.append(see())
    """)
    assert first["cards"] is None
    assert "load the NVIDIA kernel driver" in first["problem"]
    assert len(second["cards"]) == 2
    assert second["problem"] == ""


def test_b115_a_card_that_fails_while_held_stays_as_sick_and_recovers(watched):
    """dra.md REQ-3: an allocated device never vanishes from its slice; one that nobody holds does."""
    good, bad_free, bad_held, back = watched("""
        seen.append(see())
        uuid = seen[0]["cards"][0]
        control(faults=[{"function": "nvmlDeviceGetUUID", "code": 15, "card": 0}])
        seen.append(see())
        control()
        see()
        held.add(uuid)
        control(faults=[{"function": "nvmlDeviceGetUUID", "code": 15, "card": 0}])
        seen.append(see())
        control()
        seen.append(see())
    """)
    uuid = good["cards"][0]
    assert bad_free["cards"] == good["cards"][1:]
    assert bad_held["cards"] == good["cards"]
    assert list(bad_held["sick"]) == [uuid]
    assert back["cards"] == good["cards"]
    assert back["sick"] == {}


def test_a_driver_that_goes_away_keeps_what_claims_hold(watched):
    before, gone, back = watched("""
        seen.append(see())
        held.add(seen[0]["cards"][1])
        control(faults=[{"function": "nvmlDeviceGetCount*", "code": 9}, {"function": "nvmlInit*", "code": 9}])
        see()  # the call that finds the change is not always hit by it
        seen.append(see())
        see()
        control()
        seen.append(see())
    """)
    assert gone["cards"] == before["cards"][1:]
    assert list(gone["sick"]) == before["cards"][1:]
    assert gone["problem"]
    assert back["cards"] == before["cards"]
    assert (back["sick"], back["problem"]) == ({}, "")


def test_b130_a_driver_that_was_replaced_under_the_loaded_library_needs_another_process(watched):
    """Waiting cannot help this process, so it is not alive; on a node whose driver never fitted it just waits."""
    seen = watched("""
        def outdated():
            return see() | {"outdated": watch.outdated}
        control(faults=[{"function": "nvmlInit*", "code": 18}])
        seen.append(outdated())
        control()
        seen.append(outdated())
        control(faults=[{"function": "nvmlDeviceGetCount*", "code": 9}, {"function": "nvmlInit*", "code": 18}])
        see()  # the call that finds the change is not always hit by it
        see()
        seen.append(outdated())
        control()
        seen.append(outdated())
    """)
    assert [bool(look["outdated"]) for look in seen] == [False, False, True, False]
    assert "restart this daemon" in seen[0]["problem"]
    assert seen[2]["outdated"] == seen[2]["problem"]


def test_one_bad_card_hides_no_other_and_all_bad_is_said(watched):
    one, all_bad = watched("""
        control(faults=[{"function": "nvmlDeviceGetUUID", "code": 15, "card": 1}])
        seen.append(see())
        control(faults=[{"function": "nvmlDeviceGetUUID", "code": 15}])
        seen.append(see())
    """)
    assert len(one["cards"]) == 1
    assert one["problem"] == ""
    assert all_bad["cards"] == []
    assert "none of 2 cards can be used" in all_bad["problem"]


def test_the_library_is_the_configured_one_or_the_driver_roots(tmp_path):
    assert find_library("/x/libnvidia-ml.so.1", Path("/"), "") == Path("/x/libnvidia-ml.so.1")
    assert find_library("", Path("/"), "") is None
    assert find_library("", tmp_path, "") is None
    place = tmp_path / "host/driver/usr/lib64/libnvidia-ml.so.1"
    place.parent.mkdir(parents=True)
    place.touch()
    assert find_library("", Path("/driver"), str(tmp_path / "host")) == place


def test_b118_a_card_of_another_door_is_left_out_until_that_door_lets_go(watched):
    first, second, third = watched("""
        from aliquot.node.ownership import CardOwnership
        state = config.parent / "state"
        other, ours = CardOwnership(state, "aliquot-device-plugin"), CardOwnership(state, "aliquot-dra-driver")
        watch._own = ours.acquire
        uuids = see()["cards"]
        ours.close()
        other.acquire(uuids[0])
        seen.append(see() | {"why": [bad.reason for bad in watch.view.inventory.bad]})
        other.close()
        seen.append(see())
        watch._own = lambda uuid: CardOwnership(state, "third").acquire(uuid)
        seen.append(see())
    """)
    assert len(first["cards"]) == 1
    assert "aliquot-device-plugin" in first["why"][0]
    assert len(second["cards"]) == 2
    assert third["cards"] == []
