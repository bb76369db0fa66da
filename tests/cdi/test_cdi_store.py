# SPDX-License-Identifier: Apache-2.0
"""Spec files on disk: whole or not at all, ours and nobody else's, gone when the claim is."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aliquot.api.errors import ConflictError, InternalError
from aliquot.api.grant import Grant
from aliquot.cdi import codec
from aliquot.cdi.driver_files import CardAddress
from aliquot.cdi.edits import spec_for
from aliquot.cdi.load import load_spec
from aliquot.cdi.model import ContainerEdits, Device, Spec
from aliquot.cdi.scan import scan
from aliquot.cdi.store import SpecStore
from aliquot.cdi.validate import Level

U1 = "0b1c2d3e-0000-4000-8000-000000000001"
U2 = "0b1c2d3e-0000-4000-8000-000000000002"
KIND = "gpu.aliquot.dev/claim"


def claim(uid: str = U1, value: str = "1", size: int = 1) -> Spec:
    """A spec of a claim; `size` makes it long enough that a reader could catch it half written."""
    edits = ContainerEdits(env=tuple(f"N{index}={value}" for index in range(size)))
    return Spec(cdi_version="0.3.0", kind=KIND, devices=(Device(name=f"c-{uid}-gpu-0", container_edits=edits),))


@pytest.fixture
def store(tmp_path: Path) -> SpecStore:
    made = SpecStore(tmp_path / "cdi", also_read=())
    made.prepare()
    return made


def uid(number: int) -> str:
    return f"0b1c2d3e-0000-4000-8000-{number:012x}"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# --- writing ------------------------------------------------------------------------------------------------------


def test_a_file_holds_the_spec_and_everyone_may_read_it(store: SpecStore) -> None:
    old = os.umask(0o077)
    try:
        path = store.write(claim(), U1)
    finally:
        os.umask(old)
    assert path.name == f"gpu.aliquot.dev-claim_{U1}.json"
    assert load_spec(path, Level.STRICT) == claim()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert names(store.directory) == [path.name]


def test_a_second_write_replaces_the_first(store: SpecStore) -> None:
    store.write(claim(value="1"), U1)
    path = store.write(claim(value="2"), U1)
    assert load_spec(path) == claim(value="2")


def test_the_same_content_again_touches_nothing(store: SpecStore) -> None:
    path = store.write(claim(), U1)
    before = path.stat()
    assert store.write(claim(), U1) == path
    after = path.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_file_with_another_mode_or_another_content_is_put_right(store: SpecStore) -> None:
    path = store.write(claim(), U1)
    path.chmod(0o600)
    store.write(claim(), U1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    path.write_text("{}")
    store.write(claim(), U1)
    assert load_spec(path) == claim()


def test_a_link_in_our_place_is_replaced_and_its_target_left_alone(store: SpecStore, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    store.path(U1).symlink_to(victim)
    path = store.write(claim(), U1)
    assert not path.is_symlink()
    assert victim.read_text() == "precious"


def test_a_directory_that_vanished_is_made_again(store: SpecStore) -> None:
    store.directory.rmdir()
    assert load_spec(store.write(claim(), U1)) == claim()
    assert stat.S_IMODE(store.directory.stat().st_mode) == 0o755


def test_b123_at_return_the_name_resolves_in_a_fresh_look_at_the_directories(store: SpecStore, driver: Any) -> None:
    """Whole cards, a MIG instance and a share, all in one claim."""
    table = driver.root / "proc/driver/nvidia-caps/mig-minors"
    table.parent.mkdir(parents=True)
    table.write_text("gpu1/gi2/access 21\ngpu1/gi2/ci0/access 22\n")
    for number in (21, 22):
        driver.node(f"nvidia-caps/nvidia-cap{number}")
    ga, gb, mig = "GPU-aaaaaaaa", "GPU-bbbbbbbb", "MIG-cccccccc"
    files = driver.discover(
        CardAddress(uuid=ga, minor=0),
        CardAddress(uuid=gb, minor=1),
        CardAddress(uuid=mig, minor=1, gpu_instance=2, compute_instance=0),
    )
    grants = [
        Grant(name=f"c-{U1}-gpu-aaaaaaaa", card_uuid=ga),
        Grant(name=f"c-{U1}-gpu-bbbbbbbb", card_uuid=gb),
        Grant(name=f"c-{U1}-gpu-bbbbbbbb-mig-1g-10gb-0", card_uuid=mig),
        Grant(name=f"c-{U1}-gpu-aaaaaaaa-shared-7e57", card_uuid=ga, memory_bytes=4 << 30, core_percent=30),
    ]
    spec = spec_for([(grant, "hook") for grant in grants], files)
    store.write(spec, U1)
    seen = scan([store.directory])
    assert not seen.errors
    assert tuple(seen.devices) == spec.qualified_names() == tuple(f"{KIND}={grant.name}" for grant in grants)


def test_b121_a_device_without_edits_is_never_written(store: SpecStore) -> None:
    empty = msgspec.structs.replace(claim().devices[0], container_edits=ContainerEdits())
    with pytest.raises(InternalError, match="changes nothing"):
        store.write(msgspec.structs.replace(claim(), devices=(empty,)), U1)
    assert names(store.directory) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cdi_version": "0.5.0"}, "exactly '0.3.0'"),
        ({"kind": "gpu.aliquot.dev/other"}, "does not belong"),
        ({"devices": ()}, "at least one"),
    ],
)
def test_a_spec_of_ours_that_is_wrong_is_our_own_mistake_and_not_written(
    store: SpecStore, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InternalError, match=words):
        store.write(msgspec.structs.replace(claim(), **changes), U1)
    assert names(store.directory) == []


def test_a_spec_of_more_than_a_megabyte_is_not_written(store: SpecStore) -> None:
    with pytest.raises(InternalError, match="1048576"):
        store.write(claim(value="x" * (1 << 20)), U1)
    assert names(store.directory) == []


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".", "..", "a\0b", "-x", "a" * 200, "x y"])
def test_an_id_that_is_no_claims_is_refused(store: SpecStore, name: str) -> None:
    for call in (lambda: store.write(claim(), name), lambda: store.remove(name)):
        with pytest.raises(InternalError, match="claim UID"):
            call()


# --- conflicts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
@pytest.mark.parametrize("where", ["same directory", "other directory"])
def test_a_foreign_file_with_a_name_of_ours_is_a_conflict_that_names_it(
    tmp_path: Path, suffix: str, where: str
) -> None:
    other = tmp_path / "etc-cdi"
    other.mkdir()
    store = SpecStore(tmp_path / "cdi", also_read=(other,))
    store.prepare()
    thief = (store.directory if where == "same directory" else other) / f"thief{suffix}"
    thief.write_text(f"kind: {KIND}\ndevices:\n- name: c-{U1}-gpu-0\n")
    with pytest.raises(ConflictError, match=str(thief)):
        store.write(claim(U1), U1)
    store.write(claim(U2), U2)
    thief.unlink()
    store.write(claim(U1), U1)


def test_a_foreign_file_with_a_similar_name_is_no_conflict(store: SpecStore) -> None:
    (store.directory / "near.json").write_text(f'{{"kind": "{KIND}", "name": "c-{U1}-gpu-01", "x": "ac-{U1}-gpu-0"}}')
    (store.directory / "kind.json").write_text(f'{{"kind": "nvidia.com/gpu", "name": "c-{U1}-gpu-0"}}')
    store.write(claim(), U1)


def test_a_foreign_file_is_read_again_when_it_changes(store: SpecStore) -> None:
    path = store.directory / "other.json"
    path.write_text("{}")
    store.write(claim(value="1"), U1)
    path.write_text(f'{{"kind": "{KIND}", "name": "c-{U1}-gpu-0"}}')
    with pytest.raises(ConflictError):
        store.write(claim(value="2"), U1)


# --- removing -----------------------------------------------------------------------------------------------------


def test_removing_twice_or_what_never_was_is_no_error(store: SpecStore) -> None:
    store.write(claim(), U1)
    assert store.remove(U1) is True
    assert store.remove(U1) is False
    assert store.remove(U2) is False
    store.directory.rmdir()
    assert store.remove(U1) is False


def test_b125_only_claim_files_of_ours_without_a_live_claim_are_removed(store: SpecStore) -> None:
    for number in range(101):
        store.write(claim(uid(number)), uid(number))
    keep = {
        "nvidia.yaml": "kind: nvidia.com/gpu\n",
        f"nvidia.com-claim_{U1}.json": codec.encode(msgspec.structs.replace(claim(), kind="nvidia.com/claim")).decode(),
        # Written by hand for our vendor: a plain one, one named like a claim's, one with other devices.
        "gpu.aliquot.dev-claim.json": codec.encode(claim()).decode(),
        "gpu.aliquot.dev-claim_mine.json": '{"cdiVersion": "0.3.0", "kind": "gpu.aliquot.dev/claim"}',
        f"gpu.aliquot.dev-claim_{uid(500)}.json": codec.encode(
            msgspec.structs.replace(
                claim(), devices=(Device(name="by-hand", container_edits=ContainerEdits(env=("A=b",))),)
            )
        ).decode(),
        f"gpu.aliquot.dev-other_{U1}.json": codec.encode(claim()).decode(),
        f"gpu.aliquot.dev-claim_{U1}.json.bak": "x",
        f".gpu.aliquot.dev-other_{U1}.json.abc.tmp": "x",
        "README": "x",
    }
    for name, text in keep.items():
        (store.directory / name).write_text(text)
    (store.directory / f"gpu.aliquot.dev-claim_{uid(600)}.json").mkdir()
    (store.directory / f"gpu.aliquot.dev-claim_{uid(601)}.json").symlink_to("/etc/passwd")
    live = uid(7)
    assert store.sweep({live}) == tuple(uid(number) for number in range(101) if number != 7)
    assert store.list_own() == (live,)
    assert set(names(store.directory)) == {
        *keep,
        f"gpu.aliquot.dev-claim_{live}.json",
        f"gpu.aliquot.dev-claim_{uid(600)}.json",
        f"gpu.aliquot.dev-claim_{uid(601)}.json",
    }
    assert (store.directory / "nvidia.yaml").read_text() == keep["nvidia.yaml"]


def test_a_damaged_claim_file_does_not_stay_for_ever(store: SpecStore) -> None:
    store.path(U1).write_text('{"cdiVersion": "0.3')
    assert store.list_own() == (U1,)
    assert store.sweep(()) == (U1,)


def test_a_missing_directory_holds_nothing(tmp_path: Path) -> None:
    store = SpecStore(tmp_path / "none", also_read=())
    assert store.list_own() == ()
    assert store.sweep(()) == ()
