# SPDX-License-Identifier: Apache-2.0
"""The hook library on the node: placed whole, never overwritten, kept while used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aliquot.api.errors import HardwareError, InternalError
from aliquot.node.hook_files import HookFiles


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "libvgpu-strict.so"
    path.write_bytes(b"\x7fELF one")
    return path


def test_install_places_library_and_preload_file(tmp_path, source):
    mask = os.umask(0o077)
    try:
        hook = HookFiles(tmp_path / "state").install(source)
    finally:
        os.umask(mask)
    assert hook.library == tmp_path / "state/hook" / hook.build_id / "libvgpu.so"
    assert hook.library.read_bytes() == source.read_bytes()
    assert hook.preload.read_bytes() == b"/usr/local/vgpu/libvgpu.so\n"
    # Containers of any user map them.
    assert hook.library.stat().st_mode & 0o777 == 0o755
    assert hook.preload.stat().st_mode & 0o777 == 0o644
    assert hook.library.parent.stat().st_mode & 0o005 == 0o005


def test_install_again_touches_nothing(tmp_path, source):
    files = HookFiles(tmp_path / "state")
    one = files.install(source)
    before = one.library.stat()
    assert files.install(source) == one
    assert one.library.stat().st_ino == before.st_ino
    assert one.library.stat().st_mtime_ns == before.st_mtime_ns


def test_a_new_build_stands_beside_the_old_one_and_the_old_goes_when_unused(tmp_path, source):
    files = HookFiles(tmp_path / "state")
    old = files.install(source)
    source.write_bytes(b"\x7fELF two")
    new = files.install(source)
    assert files.builds() == {old.build_id, new.build_id}
    assert files.prune([old.build_id, new.build_id]) == ()
    assert files.prune([new.build_id]) == (old.build_id,)
    assert files.builds() == {new.build_id}
    assert not old.library.exists()
    assert new.library.read_bytes() == b"\x7fELF two"


def test_a_changed_installed_file_is_reported_and_left_alone(tmp_path, source):
    files = HookFiles(tmp_path / "state")
    hook = files.install(source)
    hook.library.write_bytes(b"other")
    with pytest.raises(InternalError, match=r"libvgpu\.so is not what was installed .* drain the node"):
        files.install(source)
    assert hook.library.read_bytes() == b"other"


def test_a_link_in_place_of_the_library_is_not_believed(tmp_path, source):
    files = HookFiles(tmp_path / "state")
    hook = files.install(source)
    hook.library.unlink()
    hook.library.symlink_to(source)
    with pytest.raises(InternalError):
        files.install(source)


def test_what_a_killed_install_left_is_cleared(tmp_path, source):
    files = HookFiles(tmp_path / "state")
    hook = files.install(source)
    left = files.folder / f".new-{'0' * 32}-77"
    left.mkdir()
    (left / "libvgpu.so").write_bytes(b"half")
    assert files.builds() == {hook.build_id}
    files.prune([hook.build_id])
    assert not left.exists()


def test_a_missing_library_is_told_with_the_next_step(tmp_path):
    with pytest.raises(HardwareError, match=r"hook library .*/none\.so cannot be read: .*make hook"):
        HookFiles(tmp_path).install(tmp_path / "none.so")


def test_an_unusable_state_folder_is_told_with_the_next_step(tmp_path, source):
    (tmp_path / "file").write_text("")
    with pytest.raises(HardwareError, match=r"cannot be installed in .*make room on that disk or repair"):
        HookFiles(tmp_path / "file").install(source)
