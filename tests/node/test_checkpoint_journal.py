# SPDX-License-Identifier: Apache-2.0
"""The checkpoint's journal: a change is one line, and no kill, cut or second daemon loses or invents one."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aliquot.api.errors import HardwareError
from aliquot.node.checkpoint import APPEND_STEPS, WHOLE_STEPS, Checkpoint, Source, look
from aliquot.node.checkpoint_format import Content, NewerCheckpointError, encode_change, replay

CHILD = Path(__file__).parent / "checkpoint_child.py"
CHANGES = [["u1", {"s": 1}], ["u2", {"s": 1}], ["u1", None], ["u3", {"s": 1}], ["u2", {"s": 2}]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "checkpoint.json"


def journal_of(path: Path) -> Path:
    return path.with_name("checkpoint.json.journal")


def opened(path: Path, **options: object) -> Checkpoint[dict]:
    return Checkpoint(path, dict, boot_id="b1", **options)


def abandoned(checkpoint: Checkpoint[dict]) -> None:
    """As if its process had been killed: nothing is written at the end."""
    checkpoint._file.close()


def said(path: Path) -> dict[str, dict]:
    """What the files say, to somebody who only looks."""
    return {uid: json.loads(raw) for uid, raw in look(path).claims.items()}


def states() -> list[dict]:
    result: list[dict] = [{}]
    for uid, record in CHANGES:
        state = dict(result[-1])
        state.pop(uid, None) if record is None else state.update({uid: record})
        result.append(state)
    return result


def test_the_second_change_is_a_line_and_the_file_stays_as_it_is(path):
    steps: list[str] = []
    checkpoint = opened(path, steps=steps.append)
    checkpoint.put("u1", {"n": 1})
    whole = path.read_bytes()
    steps.clear()
    checkpoint.put("u2", {"n": 2})
    assert steps == list(APPEND_STEPS)
    checkpoint.delete("u1")
    assert path.read_bytes() == whole
    lines = [json.loads(line) for line in journal_of(path).read_bytes().splitlines()]
    assert [json.loads(line["payload"])["claims"] for line in lines] == [{"u2": {"n": 2}}, {"u1": None}]
    assert journal_of(path).stat().st_mode & 0o077 == 0
    assert said(path) == {"u2": {"n": 2}}
    abandoned(checkpoint)
    with contextlib.closing(opened(path)) as again:
        assert again.recovery.source is Source.MAIN
        assert again.records() == {"u2": {"n": 2}}


def test_an_orderly_end_writes_the_file_whole_and_leaves_no_lines(path):
    with contextlib.closing(opened(path)) as checkpoint:
        for uid, record in CHANGES:
            checkpoint.put(uid, record) if record else checkpoint.delete(uid)
    assert json.loads(json.loads(path.read_bytes())["payload"])["claims"] == states()[-1]
    assert journal_of(path).read_bytes() == b""


def test_an_end_while_another_daemon_writes_leaves_the_lines_to_the_next(path):
    checkpoint = opened(path)
    checkpoint.put("u1", {})
    checkpoint.put("u2", {})
    other = opened(path)
    with other.session():
        checkpoint.close()
        other.put("u3", {})
    assert set(said(path)) == {"u1", "u2", "u3"}


def test_an_end_while_a_thread_still_writes_leaves_the_lines_to_the_next(path):
    checkpoint = opened(path)
    checkpoint.put("u1", {})
    checkpoint.put("u2", {})
    whole = path.read_bytes()
    with contextlib.suppress(ValueError), checkpoint.session():  # the lock is gone with the file
        checkpoint.close()
        assert path.read_bytes() == whole
    assert set(said(path)) == {"u1", "u2"}


def test_a_full_journal_makes_the_file_whole_again(path):
    checkpoint = opened(path, journal_limit=2000)
    sizes = []
    for n in range(60):
        checkpoint.put(f"u{n}", {"n": n})
        sizes.append(journal_of(path).stat().st_size)
        assert set(said(path)) == {f"u{m}" for m in range(n + 1)}
    assert max(sizes) <= 2000
    assert sizes.count(0) > 3


@pytest.mark.parametrize("passes", [0, 1, 3])
@pytest.mark.parametrize("step", [*APPEND_STEPS[1:-1], *WHOLE_STEPS[1:]])
@pytest.mark.parametrize("limit", [450, 1 << 20], ids=["two lines", "large"])
def test_a_kill_between_any_two_steps_loses_nothing_durable(path, step, passes, limit):
    done = subprocess.run(
        [sys.executable, str(CHILD), str(path), json.dumps(CHANGES), step, str(passes), str(limit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    durable = len(done.stdout.splitlines())
    assert (done.returncode == 0) <= (durable == len(CHANGES))
    with contextlib.closing(opened(path)) as checkpoint:
        assert checkpoint.records() in (states()[durable], states()[min(durable + 1, len(CHANGES))])
        assert checkpoint.recovery.complete or checkpoint.recovery.source is Source.PREVIOUS
        for uid, record in CHANGES:
            checkpoint.put(uid, record) if record else checkpoint.delete(uid)
    assert said(path) == states()[-1]


@pytest.mark.parametrize("step", APPEND_STEPS[1:])
def test_an_error_at_any_step_leaves_what_was_durable(path, step):
    failing = []

    def steps(now: str) -> None:
        if now in failing:
            raise OSError(28, "No space left on device")

    checkpoint = opened(path, steps=steps)
    checkpoint.put("u1", {"n": 1})
    checkpoint.put("u1", {"n": 2})
    failing.append(step)
    with pytest.raises(HardwareError, match="No space left"):
        checkpoint.put("u2", {})
    failing.clear()
    assert checkpoint.records() == {"u1": {"n": 2}}
    checkpoint.put("u3", {})
    abandoned(checkpoint)
    with contextlib.closing(opened(path)) as again:
        assert again.records() == {"u1": {"n": 2}, "u3": {}}
        assert again.recovery.complete


def test_another_daemon_never_sees_a_line_whose_writing_failed(path):
    failing = []

    def steps(now: str) -> None:
        if now in failing:
            raise OSError(5, "Input/output error")

    checkpoint, other = opened(path, steps=steps), opened(path)
    checkpoint.put("u1", {})
    checkpoint.put("u2", {})
    failing.append("sync append")
    with pytest.raises(HardwareError):
        checkpoint.put("u3", {})
    with other.session():
        assert set(other.records()) == {"u1", "u2"}


def journalled(path: Path) -> bytes:
    """A file with u1, and a journal with u2 and u3; its bytes."""
    checkpoint = opened(path)
    for uid in ("u1", "u2", "u3"):
        checkpoint.put(uid, {"of": uid})
    abandoned(checkpoint)
    return journal_of(path).read_bytes()


def test_b089_a_cut_journal_says_so_and_is_kept_until_the_file_is_whole(path):
    lines = journalled(path)
    journal_of(path).write_bytes(lines[:-10])
    for _ in range(2):  # a daemon that is killed before its first change learns of it again
        checkpoint = opened(path, now=lambda: 0.0)
        assert checkpoint.recovery.source is Source.CUT
        assert not checkpoint.recovery.complete  # so the caller rebuilds what is missing: u3
        assert "ends in the middle of a line" in checkpoint.recovery.reason
        assert set(checkpoint.records()) == {"u1", "u2"}
        assert journal_of(path).read_bytes() == lines[:-10]
        abandoned(checkpoint)
    with contextlib.closing(opened(path, now=lambda: 0.0)) as checkpoint:
        checkpoint.put("u4", {})
        checkpoint.put("u5", {})
    assert set(said(path)) == {"u1", "u2", "u4", "u5"}
    aside = path.with_name("checkpoint.json.journal.corrupt-19700101T000000Z")
    assert aside.read_bytes() == lines[:-10]


@pytest.mark.parametrize("at", [0.0, 0.2, 0.49, 0.51, 0.8, 0.99])
def test_one_changed_byte_anywhere_is_noticed(path, at):
    data = bytearray(journalled(path))
    data[int(at * (len(data) - 2))] ^= 1
    journal_of(path).write_bytes(data)
    with contextlib.closing(opened(path)) as checkpoint:
        assert checkpoint.recovery.source is Source.CUT
        assert checkpoint.get("u1") == {"of": "u1"}


def test_a_missing_line_is_noticed_and_what_came_later_still_counts(path):
    lines = journalled(path).splitlines(keepends=True)
    journal_of(path).write_bytes(lines[1])
    with contextlib.closing(opened(path)) as checkpoint:
        assert checkpoint.recovery.source is Source.CUT
        assert "changes 2 to 2 are missing" in checkpoint.recovery.reason
        assert set(checkpoint.records()) == {"u1", "u3"}


@pytest.mark.parametrize("lost", ["file", "journal", "both"])
def test_what_is_lost_while_running_is_written_again_from_memory(path, lost):
    checkpoint = opened(path)
    checkpoint.put("u1", {})
    checkpoint.put("u2", {})
    for file in (path,) * (lost != "journal") + (journal_of(path),) * (lost != "file"):
        file.unlink()
    checkpoint.put("u3", {})
    checkpoint.put("u4", {})
    abandoned(checkpoint)
    with contextlib.closing(opened(path)) as again:
        assert set(again.records()) == {"u1", "u2", "u3", "u4"}
        assert again.recovery.complete


def test_a_journal_damaged_while_running_does_not_make_it_forget(path):
    checkpoint = opened(path)
    checkpoint.put("u1", {})
    checkpoint.put("u2", {})
    journal_of(path).write_bytes(b"garbage\n")
    checkpoint.put("u3", {})
    abandoned(checkpoint)
    assert set(said(path)) == {"u1", "u2", "u3"}
    assert [p.read_bytes() for p in path.parent.glob("*.journal.corrupt-*")] == [b"garbage\n"]


def test_a_journal_without_its_file_is_no_clean_start(path):
    journalled(path)
    path.unlink()
    with contextlib.closing(opened(path)) as checkpoint:
        assert not checkpoint.recovery.complete
        assert set(checkpoint.records()) == {"u2", "u3"}


def test_lines_older_than_the_file_say_nothing(path):
    """A loss of power may bring back lines that were cleared after the file had been written whole."""
    lines = journalled(path)
    checkpoint = opened(path)
    checkpoint.delete("u2")
    checkpoint.close()
    journal_of(path).write_bytes(lines)
    with contextlib.closing(opened(path)) as again:
        assert again.recovery.source is Source.MAIN
        assert set(again.records()) == {"u1", "u3"}
        again.put("u4", {})
    assert set(said(path)) == {"u1", "u3", "u4"}


def test_b087_a_line_of_a_newer_major_version_is_refused_before_anything_is_touched(path):
    lines = journalled(path)
    journal_of(path).write_bytes(lines + b'{"version":"2.0","body":[1]}\n')
    before = {p.name: p.read_bytes() for p in path.parent.iterdir() if not p.name.endswith(".lock")}
    with pytest.raises(NewerCheckpointError, match=r"version 2\.0"):
        opened(path)
    assert {p.name: p.read_bytes() for p in path.parent.iterdir() if not p.name.endswith(".lock")} == before


def test_a_new_boot_is_a_line_too(path):
    checkpoint = opened(path)
    checkpoint.put("u1", {})
    abandoned(checkpoint)
    after = Checkpoint(path, dict, boot_id="b2")
    after.accept_boot()
    abandoned(after)
    with contextlib.closing(Checkpoint(path, dict, boot_id="b2")) as again:
        assert not again.rebooted
        assert again.records() == {"u1": {}}


def test_two_daemons_append_in_turn(path):
    old, new = opened(path), opened(path)
    for n in range(6):
        (old, new)[n % 2].put(f"u{n}", {"n": n})
    for daemon in (old, new):
        with daemon.session():
            pass
    assert old.records() == new.records() == {f"u{n}": {"n": n} for n in range(6)}
    new.close()  # which empties the journal
    old.put("u6", {})
    abandoned(old)
    assert set(said(path)) == {f"u{n}" for n in range(7)}


def test_two_processes_never_lose_a_change_of_each_other(path):
    program = (
        "import sys; from pathlib import Path; from aliquot.node.checkpoint import Checkpoint\n"
        "c = Checkpoint(Path(sys.argv[1]), dict, boot_id='b', journal_limit=3000)\n"
        "for n in range(60): c.put(f'{sys.argv[2]}-{n}', {'n': n})\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", program, str(path), who]) for who in "ab"]
    assert [child.wait(60) for child in children] == [0, 0]
    assert len(said(path)) == 120


records = st.dictionaries(st.sampled_from("abcde"), st.integers(0, 9).map(lambda n: b"%d" % n), max_size=4)


@settings(max_examples=60)
@given(st.lists(records, min_size=1, max_size=8), st.integers(0, 8), st.integers(0, 200))
def test_replay_gives_the_state_of_some_moment_and_says_when_it_is_not_the_last(versions, start, cut):
    contents = [Content(sequence=n, boot_id="b", claims=claims) for n, claims in enumerate(versions)]
    lines = b""
    for before, after in itertools.pairwise(contents):
        lines += encode_change(after, sorted(before.claims.keys() ^ after.claims.keys() | after.claims.keys()))
    base = contents[min(start, len(contents) - 1)]
    assert replay(base, lines, where="x") == (contents[-1], "")
    if 0 < cut < len(lines):
        found, reason = replay(base, lines[:-cut], where="x")
        assert found in contents[base.sequence :]
        assert reason or lines[:-cut].endswith(b"\n") or found == contents[-1]
