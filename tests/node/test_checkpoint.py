# SPDX-License-Identifier: Apache-2.0
"""What was durable stays known, whatever is killed, cut or upgraded."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from aliquot.api.errors import ConflictError, HardwareError, SettingsError
from aliquot.node.checkpoint import WHOLE_STEPS, Checkpoint, Source, read_boot_id
from aliquot.node.checkpoint_format import Content, NewerCheckpointError, encode

CHILD = Path(__file__).parent / "checkpoint_child.py"


class Device(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    share: str | None = None


class Record(msgspec.Struct, frozen=True, kw_only=True):
    state: str
    devices: tuple[Device, ...] = ()


class Record2(msgspec.Struct, frozen=True, kw_only=True):
    """The same, one release later."""

    class Device2(msgspec.Struct, frozen=True, kw_only=True):
        name: str
        share: str | None = None
        cores: int = 0

    state: str
    devices: tuple[Device2, ...] = ()
    namespace: str = ""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "checkpoint.json"


def plain(path: Path, **options: object) -> Checkpoint[dict]:
    """One that writes its file whole each time; the journal has tests of its own."""
    return Checkpoint(path, dict, boot_id="b1", **{"journal_limit": 0, **options})


def reread(path: Path) -> dict[str, dict]:
    with contextlib.closing(plain(path)) as checkpoint:
        return checkpoint.records()


def test_what_was_put_is_read_by_the_next_and_what_was_deleted_is_not(path):
    checkpoint = plain(path)
    assert checkpoint.recovery.source is Source.FRESH
    checkpoint.put("u1", {"state": "started"})
    checkpoint.put("u2", {"state": "completed", "n": [1, 2.5, None, "ü"]})
    checkpoint.put("u1", {"state": "completed"})
    checkpoint.delete("u2")
    assert checkpoint.get("u2") is None
    checkpoint.close()
    assert reread(path) == {"u1": {"state": "completed"}}


def test_b096_deleting_what_was_never_there_succeeds_without_a_write(path):
    wrote: list[str] = []
    checkpoint = plain(path, steps=wrote.append)
    wrote.clear()
    checkpoint.delete("u1")
    assert "write" not in wrote


def test_putting_the_same_again_writes_nothing(path):
    wrote: list[str] = []
    checkpoint = plain(path, steps=wrote.append)
    checkpoint.put("u1", {"a": 1})
    wrote.clear()
    checkpoint.put("u1", {"a": 1})
    assert "write" not in wrote


def test_the_file_is_readable_by_people_and_tools(path):
    plain(path).put("u1", {"a": 1})
    envelope = json.loads(path.read_bytes())
    assert envelope["version"] == "1.0"
    payload = json.loads(envelope["payload"])
    assert payload["claims"] == {"u1": {"a": 1}}
    assert payload["bootID"] == "b1"
    assert path.stat().st_mode & 0o077 == 0


# ---- kills


def run_child(path: Path, changes: list, step: str, passes: int, journal: int = 0) -> list:
    done = subprocess.run(
        [sys.executable, str(CHILD), str(path), json.dumps(changes), step, str(passes), str(journal)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


CHANGES = [["u1", {"s": 1}], ["u2", {"s": 1}], ["u1", None], ["u3", {"s": 1}], ["u2", {"s": 2}]]


def states() -> list[dict]:
    result: list[dict] = [{}]
    for uid, record in CHANGES:
        state = dict(result[-1])
        state.pop(uid, None) if record is None else state.update({uid: record})
        result.append(state)
    return result


@pytest.mark.parametrize("passes", [0, 1, 3])
@pytest.mark.parametrize("step", WHOLE_STEPS[1:])
def test_a_kill_between_any_two_steps_loses_nothing_durable(path, step, passes):
    durable = run_child(path, CHANGES, step, passes)
    assert durable == CHANGES[:passes]
    found = reread(path)
    # Either the change under way counts, or it does not; nothing else is possible.
    assert found in (states()[passes], states()[passes + 1])
    if step == "done":
        assert found == states()[passes + 1]
    # And life goes on: the next process finishes the job.
    with contextlib.closing(plain(path)) as checkpoint:
        for uid, record in CHANGES:
            checkpoint.put(uid, record) if record else checkpoint.delete(uid)
    assert reread(path) == states()[-1]


def test_b091_a_kill_while_the_file_is_locked_frees_it_at_once(path):
    run_child(path, CHANGES, "sync", 1)
    plain(path, lock_timeout_s=0).put("u9", {})


# ---- damage


def test_b089_a_cut_file_is_kept_aside_and_the_previous_one_used(path):
    with contextlib.closing(plain(path)) as checkpoint:
        checkpoint.put("u1", {"device": "gpu-0"})
        checkpoint.put("u2", {"device": "gpu-1"})
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with contextlib.closing(plain(path, now=lambda: 0.0)) as checkpoint:
        assert checkpoint.recovery.source is Source.PREVIOUS
        assert not checkpoint.recovery.complete  # so the caller rebuilds what is missing: u2
        aside = path.with_name("checkpoint.json.corrupt-19700101T000000Z")
        assert checkpoint.recovery.quarantined == (aside,)
        assert aside.read_bytes() == whole[: len(whole) // 2]
        assert checkpoint.records() == {"u1": {"device": "gpu-0"}}
        checkpoint.put("u3", {})
    assert set(reread(path)) == {"u1", "u3"}
    assert aside.exists()


def test_both_files_damaged_is_a_start_from_nothing_that_says_so(path):
    with contextlib.closing(plain(path)) as checkpoint:
        checkpoint.put("u1", {})
        checkpoint.put("u2", {})
    path.write_bytes(b"\0" * 100)
    path.with_name("checkpoint.json.previous").write_bytes(b"{}")
    with contextlib.closing(plain(path, now=lambda: 0.0)) as checkpoint:
        assert checkpoint.recovery.source is Source.NOTHING
        assert not checkpoint.recovery.complete
        assert len(checkpoint.recovery.quarantined) == 2
        assert checkpoint.records() == {}
        checkpoint.put("u3", {})
    assert set(reread(path)) == {"u3"}


@pytest.mark.parametrize("at", [0.0, 0.1, 0.5, 0.9, 0.99])
def test_one_changed_byte_anywhere_is_noticed(path, at):
    with contextlib.closing(plain(path)) as checkpoint:
        checkpoint.put("u1", {"amount": 1234567})
    data = bytearray(path.read_bytes().rstrip())
    index = int(at * (len(data) - 1))
    data[index] ^= 1
    path.write_bytes(data)
    with contextlib.closing(plain(path)) as checkpoint:
        assert checkpoint.recovery.source is Source.NOTHING
        assert checkpoint.recovery.quarantined


def test_a_folder_in_place_of_the_file_is_moved_aside(path):
    path.mkdir(parents=True)
    with contextlib.closing(plain(path)) as checkpoint:
        assert checkpoint.recovery.source is Source.NOTHING
        checkpoint.put("u1", {})
    assert reread(path) == {"u1": {}}


def test_damage_while_running_does_not_make_it_forget(path):
    checkpoint = plain(path)
    checkpoint.put("u1", {"a": 1})
    path.write_bytes(b"garbage")
    checkpoint.put("u2", {"a": 2})
    checkpoint.close()
    assert reread(path) == {"u1": {"a": 1}, "u2": {"a": 2}}
    assert [p.read_bytes() for p in path.parent.glob("*.corrupt-*")] == [b"garbage"]


def test_b096_a_wiped_state_folder_is_made_anew_from_memory(path):
    checkpoint = plain(path)
    checkpoint.put("u1", {"a": 1})
    for file in path.parent.iterdir():
        file.unlink()
    path.parent.rmdir()
    checkpoint.put("u2", {"a": 2})
    checkpoint.close()
    assert reread(path) == {"u1": {"a": 1}, "u2": {"a": 2}}


# ---- upgrades


def test_b087_a_newer_minor_version_is_read_and_its_fields_survive(path):
    newer = Content(
        sequence=4,
        boot_id="b1",
        claims={
            "u1": b'{"state":"completed","namespace":"t","devices":[{"name":"gpu-0","cores":30}]}',
            "u2": b'{"state":"completed","namespace":"t"}',
        },
        other_payload={"slices": b'{"generation":7}'},
        other_envelope={"writer": b'"2.0"'},
    )
    path.parent.mkdir(parents=True)
    path.write_bytes(encode(newer).replace(b'"version":"1.0"', b'"version":"1.9"'))
    with contextlib.closing(Checkpoint(path, Record, boot_id="b1")) as older:
        assert older.get("u1") == Record(state="completed", devices=(Device(name="gpu-0"),))
        older.put("u1", Record(state="started", devices=(Device(name="gpu-0", share="s"),)))
        older.delete("u2")
    with contextlib.closing(Checkpoint(path, Record2, boot_id="b1")) as again:
        assert again.get("u1") == Record2(
            state="started", namespace="t", devices=(Record2.Device2(name="gpu-0", share="s", cores=30),)
        )
        assert again.get("u2") is None
    envelope = json.loads(path.read_bytes())
    assert envelope["writer"] == "2.0"
    assert json.loads(envelope["payload"])["slices"] == {"generation": 7}


def test_b087_an_upgrade_reads_what_the_older_release_wrote(path):
    with contextlib.closing(Checkpoint(path, Record, boot_id="b1")) as older:
        older.put("u1", Record(state="completed", devices=(Device(name="gpu-0"),)))
    with contextlib.closing(Checkpoint(path, Record2, boot_id="b1")) as newer:
        assert newer.get("u1") == Record2(state="completed", devices=(Record2.Device2(name="gpu-0"),))


@pytest.mark.parametrize("damaged_main", [False, True], ids=["main", "previous only"])
def test_b087_a_newer_major_version_is_refused_before_anything_is_touched(path, damaged_main):
    with contextlib.closing(plain(path)) as checkpoint:
        checkpoint.put("u1", {})
        checkpoint.put("u2", {})
    target = path.with_name("checkpoint.json.previous") if damaged_main else path
    # Whatever else such a file holds: only its version has to be where it is.
    target.write_bytes(b'{"version":"2.0","body":[1]}')
    if damaged_main:
        path.write_bytes(b"garbage")
    before = {p.name: p.read_bytes() for p in path.parent.iterdir() if not p.name.endswith(".lock")}
    with pytest.raises(NewerCheckpointError, match=r"has version 2\.0, this release reads up to 1\.x .*start the"):
        plain(path)
    assert {p.name: p.read_bytes() for p in path.parent.iterdir() if not p.name.endswith(".lock")} == before


def test_b099_a_record_that_does_not_read_is_kept_and_can_be_deleted(path):
    with contextlib.closing(plain(path)) as checkpoint:
        checkpoint.put("u1", {"memroyLimit": "4Gi"})
        checkpoint.put("u2", {"state": "completed"})
    with contextlib.closing(Checkpoint(path, Record, boot_id="b1")) as checkpoint:
        assert set(checkpoint.records()) == {"u2"}
        assert "state" in checkpoint.damaged()["u1"].reason
        checkpoint.put("u3", Record(state="started"))
        assert reread(path)["u1"] == {"memroyLimit": "4Gi"}
        checkpoint.delete("u1")
        assert checkpoint.damaged() == {}
    assert set(reread(path)) == {"u2", "u3"}


def test_a_reboot_is_known_until_it_is_accepted(path):
    with contextlib.closing(Checkpoint(path, dict, boot_id="b1")) as checkpoint:
        checkpoint.put("u1", {})
        assert not checkpoint.rebooted
    for _ in range(2):  # a daemon killed before it has put things right learns of it again
        with contextlib.closing(Checkpoint(path, dict, boot_id="b2")) as checkpoint:
            assert checkpoint.rebooted
            checkpoint.put("u2", {"n": os.urandom(4).hex()})
            assert checkpoint.rebooted
    with contextlib.closing(Checkpoint(path, dict, boot_id="b2")) as checkpoint:
        checkpoint.accept_boot()
        assert not checkpoint.rebooted
    with contextlib.closing(Checkpoint(path, dict, boot_id="b2")) as checkpoint:
        assert not checkpoint.rebooted
        assert set(checkpoint.records()) == {"u1", "u2"}


def test_the_boot_id_is_the_kernels(tmp_path):
    assert len(read_boot_id()) == 36
    assert read_boot_id(tmp_path) == ""


# ---- many at once


def test_forty_callers_share_two_writes(path):
    gate, writes = threading.Event(), []

    def steps(step: str) -> None:
        if step == "write":
            writes.append(1)
            gate.wait(10)

    checkpoint = plain(path, steps=steps)
    tickets = [checkpoint.stage("u0", {"n": 0})]
    first = threading.Thread(target=tickets[0].wait)
    first.start()
    staged = threading.Barrier(41)

    def call(n: int) -> None:
        ticket = checkpoint.stage(f"u{n}", {"n": n})
        staged.wait(10)
        ticket.wait()

    threads = [threading.Thread(target=call, args=(n,)) for n in range(1, 41)]
    for thread in threads:
        thread.start()
    staged.wait(10)
    gate.set()
    for thread in [first, *threads]:
        thread.join(10)
    assert len(checkpoint.records()) == 41
    assert len(writes) <= 2
    assert len(reread(path)) == 41


def test_a_staged_change_is_seen_at_once_and_taken_back_when_the_disk_refuses(path):
    broken = threading.Event()

    def steps(step: str) -> None:
        if step == "sync" and broken.is_set():
            raise OSError(28, "No space left on device")

    checkpoint = plain(path, steps=steps)
    checkpoint.put("u1", {"s": "old"})
    broken.set()
    one, two = checkpoint.stage("u1", {"s": "new"}), checkpoint.stage("u2", {})
    assert checkpoint.get("u1") == {"s": "new"}
    with pytest.raises(HardwareError, match=r"cannot be written: .*No space left.*; make room"):
        one.wait()
    with pytest.raises(HardwareError):
        two.wait()
    assert checkpoint.records() == {"u1": {"s": "old"}}
    broken.clear()
    checkpoint.put("u2", {"s": "again"})
    assert checkpoint.records() == {"u1": {"s": "old"}, "u2": {"s": "again"}}
    assert reread(path) == checkpoint.records()


@pytest.mark.parametrize("step", WHOLE_STEPS[1:])
def test_an_error_at_any_step_leaves_what_was_durable(path, step):
    failing = threading.Event()

    def steps(now: str) -> None:
        if now == step and failing.is_set():
            raise OSError(5, "Input/output error")

    checkpoint = plain(path, steps=steps)
    checkpoint.put("u1", {"n": 1})
    checkpoint.put("u1", {"n": 2})
    failing.set()
    with pytest.raises(HardwareError):
        checkpoint.put("u2", {})
    failing.clear()
    assert checkpoint.records() == {"u1": {"n": 2}}
    checkpoint.put("u3", {})
    checkpoint.close()
    assert reread(path) == {"u1": {"n": 2}, "u3": {}}


# ---- two processes


def test_two_daemons_of_a_rolling_update_see_each_others_writes(path):
    old, new = plain(path), plain(path)
    old.put("u1", {"by": "old"})
    with new.session():
        assert new.records() == {"u1": {"by": "old"}}
        new.put("u2", {"by": "new"})
    old.put("u3", {"by": "old"})
    old.delete("u2")
    with new.session():
        assert set(new.records()) == {"u1", "u3"}
    assert set(reread(path)) == {"u1", "u3"}


def test_what_the_other_daemon_took_away_is_written_again(path):
    old, new = plain(path), plain(path)
    old.put("u1", {"a": 1})
    new.delete("u1")  # which it has never seen before
    assert reread(path) == {}
    old.put("u1", {"a": 1})
    assert reread(path) == {"u1": {"a": 1}}


def test_a_write_of_the_other_daemon_right_after_ours_is_kept(path):
    """The moment between giving the file free and telling our callers is the other daemon's to write in."""
    other = plain(path)
    writes: list[int] = []

    def observe(_seconds: float) -> None:
        writes.append(1)
        if len(writes) == 1:
            other.put("theirs", {})

    ours = plain(path, observe=observe)
    ours.stage("one", {}).wait()
    ours.put("two", {})
    assert set(reread(path)) == {"one", "theirs", "two"}


def test_a_session_keeps_the_other_daemon_out_and_names_itself(path):
    old, new = plain(path), plain(path, lock_timeout_s=0.05)
    with old.session(), pytest.raises(ConflictError, match=rf"held by process {os.getpid()} for more than 0\.05 s"):
        new.put("u1", {})
    new.put("u1", {})
    assert new.get("u1") == {}


def test_a_daemon_killed_before_its_last_rename_has_written_for_the_other(path):
    """Main is gone and `.previous` is newer than what the other remembers: it must not be forgotten."""
    other = plain(path)
    other.put("u0", {"n": 0})
    durable = run_child(path, CHANGES, "rename", 3)
    assert len(durable) == 3
    assert not path.exists()
    other.put("u9", {})
    assert other.records() == {"u0": {"n": 0}, **states()[3], "u9": {}}


def test_an_unusable_folder_is_a_setting_to_change(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"state folder .*/file/x cannot be used: .*; make it a writable folder"):
        plain(tmp_path / "file" / "x" / "checkpoint.json")
