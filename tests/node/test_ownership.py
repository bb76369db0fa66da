# SPDX-License-Identifier: Apache-2.0
"""One card, one door."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest

from aliquot.api.errors import ConflictError, HardwareError, InternalError
from aliquot.node.ownership import CardOwnership

GA, GB = "GPU-aaaaaaaa-0000-4000-8000-00000000000a", "GPU-bbbbbbbb-0000-4000-8000-00000000000b"
HOLD = (
    "import sys; from pathlib import Path; from aliquot.node.ownership import CardOwnership\n"
    "o = CardOwnership(Path(sys.argv[1]), sys.argv[2]); o.acquire(sys.argv[3])\n"
    "print('held', flush=True); sys.stdin.read()"
)


@contextlib.contextmanager
def another_process(state, door, uuid):
    command = [sys.executable, "-c", HOLD, str(state), door, uuid]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def test_b118_the_second_door_is_refused_by_name_and_gets_the_other_card(tmp_path):
    with another_process(tmp_path, "aliquot-dra-driver", GA):
        plugin = CardOwnership(tmp_path, "aliquot-device-plugin")
        with pytest.raises(ConflictError, match=rf"card {GA} is offered by aliquot-dra-driver on this node; one card"):
            plugin.acquire(GA)
        plugin.acquire(GB)
        assert plugin.held() == {GB}
        plugin.close()


def test_b118_switching_doors_needs_the_card_free(tmp_path):
    with another_process(tmp_path, "aliquot-dra-driver", GA) as driver:
        driver.kill()
        driver.wait()
        plugin = CardOwnership(tmp_path, "aliquot-device-plugin")
        with pytest.raises(ConflictError, match="was offered by aliquot-dra-driver, and claim u1 is still on it"):
            plugin.acquire(GA, in_use=lambda uuid: "claim u1" if uuid == GA else None)
        assert plugin.held() == frozenset()
        plugin.acquire(GA, in_use=lambda _uuid: None)
        assert plugin.held() == {GA}
        plugin.close()
    # Back again, and what is left of its own never keeps a door out.
    again = CardOwnership(tmp_path, "aliquot-device-plugin")
    again.acquire(GA, in_use=lambda _uuid: "its own container")
    again.close()


def test_two_daemons_of_one_door_share_a_card_during_a_rolling_update(tmp_path):
    with another_process(tmp_path, "aliquot-dra-driver", GA) as old:
        new = CardOwnership(tmp_path, "aliquot-dra-driver")
        new.acquire(GA)
        new.acquire(GA)
        old.kill()
        old.wait()
        other = CardOwnership(tmp_path, "aliquot-device-plugin")
        with pytest.raises(ConflictError):
            other.acquire(GA)
        new.release(GA)
        new.release(GA)
        other.acquire(GA)
        other.close()


def test_a_kill_leaves_nothing_locked(tmp_path):
    with another_process(tmp_path, "a", GA) as holder:
        holder.kill()
        holder.wait()
        mine = CardOwnership(tmp_path, "b")
        mine.acquire(GA)
        mine.close()


def test_doors_that_race_for_a_card_never_both_get_it(tmp_path):
    program = (
        "import sys; from pathlib import Path; from aliquot.node.ownership import CardOwnership\n"
        "from aliquot.api.errors import ConflictError\n"
        "o = CardOwnership(Path(sys.argv[1]), sys.argv[2]); mark = Path(sys.argv[1]) / 'mark'\n"
        "for _ in range(300):\n"
        "    try: o.acquire(sys.argv[3])\n"
        "    except ConflictError: continue\n"
        "    mark.write_text(sys.argv[2]); assert mark.read_text() == sys.argv[2]; o.release(sys.argv[3])\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path), door, GA]) for door in "ab"]
    assert [child.wait(60) for child in children] == [0, 0]


def test_names_that_are_no_uuid_and_folders_that_are_none(tmp_path):
    with pytest.raises(InternalError, match="is not the UUID of a card"):
        CardOwnership(tmp_path, "a").acquire("../x")
    (tmp_path / "file").write_text("")
    with pytest.raises(HardwareError, match=f"card {GA} cannot be locked in"):
        CardOwnership(tmp_path / "file", "a").acquire(GA)
