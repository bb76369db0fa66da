# SPDX-License-Identifier: Apache-2.0
"""The files of grants: made once, changed in place, never replaced, removed whole."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from aliquot.api.errors import HardwareError, InternalError
from aliquot.api.grant import CorePolicy
from aliquot.api.region import parse_grant_file
from aliquot.node import region_library
from aliquot.node.region_library import RegionLibrary
from aliquot.node.regions import Regions

NAME = "c-1-gpu-0"


def test_create_makes_what_a_container_needs(regions: Regions, grant):
    mask = os.umask(0o077)
    try:
        regions.create(grant())
    finally:
        os.umask(mask)
    assert regions.grant(NAME) == grant()
    assert regions.names() == {NAME}
    assert regions.grant_file(NAME).stat().st_mode & 0o777 == 0o444
    # Any user of a container writes its usage file, and nothing else in the folder; nobody else reaches it.
    assert regions.usage_file(NAME).stat().st_mode & 0o777 == 0o666
    assert regions.usage_dir(NAME).stat().st_mode & 0o777 == 0o755
    assert regions.usage_dir(NAME).parent.stat().st_mode & 0o777 == 0o700


def test_create_again_keeps_the_files_and_what_is_in_use(regions: Regions, grant, owner):
    regions.create(grant())
    one = owner(regions.usage_file(NAME))
    one.do("reserve 4096")
    before = (regions.grant_file(NAME).stat().st_ino, regions.usage_file(NAME).stat().st_ino)
    regions.create(grant())
    regions.create(grant(memory_bytes=2 << 30))
    assert (regions.grant_file(NAME).stat().st_ino, regions.usage_file(NAME).stat().st_ino) == before
    assert regions.grant(NAME) == grant(memory_bytes=2 << 30)
    assert regions.usage(NAME).used_bytes == 4096


def test_update_is_seen_through_a_mapping_made_before(regions: Regions, grant):
    regions.create(grant())
    with regions.grant_file(NAME).open("rb") as file:
        seen = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    regions.update(grant(memory_bytes=5 << 30, core_policy=CorePolicy.FORCE, priority=1))
    found = parse_grant_file(seen[:])
    assert found is not None
    assert found.grant == grant(memory_bytes=5 << 30, core_policy=CorePolicy.FORCE, priority=1)
    seen.close()


def test_update_of_a_grant_that_is_not_there_says_so(regions: Regions, grant):
    with pytest.raises(HardwareError, match=rf"grant {NAME}: .*No such file"):
        regions.update(grant())


def test_remove_leaves_nothing_and_may_be_repeated(regions: Regions, grant):
    regions.create(grant())
    (regions.usage_dir(NAME) / "left-by-the-tenant").write_text("x")
    left = regions.grant_file(NAME).with_name(f"{NAME}.123.tmp")
    left.write_text("half a grant")
    regions.remove(NAME)
    regions.remove(NAME)
    assert regions.names() == frozenset()
    assert (
        list(regions.run_dir.rglob("*")) == [regions.run_dir / "grants", regions.run_dir / "usage"] or not left.exists()
    )


def test_remove_does_not_follow_a_tenants_link(regions: Regions, grant, tmp_path):
    keep = tmp_path / "host"
    keep.mkdir()
    (keep / "file").write_text("x")
    regions.create(grant())
    (regions.usage_dir(NAME) / "link").symlink_to(keep)
    shutil.rmtree(regions.usage_dir("c-2-gpu-0"), ignore_errors=True)
    regions.usage_dir("c-2-gpu-0").symlink_to(keep)
    regions.remove(NAME)
    with pytest.raises(HardwareError):
        regions.remove("c-2-gpu-0")
    assert (keep / "file").read_text() == "x"


def test_half_made_and_half_removed_grants_are_named(regions: Regions, grant):
    regions.create(grant("c-1-gpu-0"))
    regions.create(grant("c-2-gpu-0"))
    regions.grant_file("c-1-gpu-0").unlink()
    shutil.rmtree(regions.usage_dir("c-2-gpu-0"))
    (regions.run_dir / "grants" / "Not_Ours.txt").write_text("")
    assert regions.names() == {"c-1-gpu-0", "c-2-gpu-0"}
    assert regions.grants() == {"c-2-gpu-0": grant("c-2-gpu-0")}


def test_b081_empty_folders_in_place_of_files_are_replaced(regions: Regions, grant):
    regions.grant_file(NAME).mkdir()
    regions.usage_file(NAME).mkdir(parents=True)
    regions.create(grant())
    assert regions.grant(NAME) == grant()
    assert regions.usage(NAME).problem is None


def test_a_foreign_file_in_place_of_a_grant_is_left_alone(regions: Regions, grant):
    regions.grant_file(NAME).write_bytes(b"precious" * 1024)
    with pytest.raises(InternalError, match=r"is not a grant file that this release reads .* remove the file"):
        regions.create(grant())
    with pytest.raises(InternalError):
        regions.grant(NAME)
    assert regions.grant_file(NAME).read_bytes() == b"precious" * 1024


def test_a_damaged_usage_file_is_not_made_anew_while_its_grant_lives(regions: Regions, grant):
    """Else a tenant could forget what its processes hold by cutting the file."""
    regions.create(grant())
    os.truncate(regions.usage_file(NAME), 3)
    regions.create(grant())
    assert regions.usage_file(NAME).stat().st_size == 3
    assert regions.usage(NAME).problem == "not a usage file of a version we read"
    regions.remove(NAME)
    regions.create(grant())
    assert regions.usage(NAME).problem is None


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "c-1\n", "UPPER", "x" * 192])
def test_no_name_leads_out_of_the_folders(regions: Regions, name):
    for call in (regions.remove, regions.grant, regions.usage, lambda n: regions.hint(n, suspended=1)):
        with pytest.raises(InternalError, match="is not the name of a grant"):
            call(name)


def test_usage_lists_what_processes_say(regions: Regions, grant, owner):
    regions.create(grant())
    one, two = owner(regions.usage_file(NAME)), owner(regions.usage_file(NAME))
    one.do("reserve 1000")  # charged in units of 512
    two.do("reserve 512")
    usage = regions.usage(NAME)
    assert usage.used_bytes == 1536
    assert {(p.pid, p.used_bytes, p.host_pid) for p in usage.processes} == {(one.pid, 1024, None), (two.pid, 512, None)}
    assert not usage.suspicious


def test_an_unusable_run_folder_is_told_with_the_next_step(tmp_path, region_library):
    (tmp_path / "file").write_text("")
    with pytest.raises(HardwareError, match=r"run folder .* cannot be used: .* make it a folder that root may write"):
        Regions(tmp_path / "file", region_library)


def test_a_library_that_is_none_is_told_with_the_next_step(tmp_path):
    (tmp_path / "x.so").write_text("")
    with pytest.raises(HardwareError, match=r"cannot be loaded: .*make hook"):
        RegionLibrary(tmp_path / "x.so")
    with pytest.raises(HardwareError, match="has no aq_grant_create"):
        RegionLibrary(Path("libc.so.6"))


def test_structures_have_the_c_compilers_layout(tmp_path, repository):
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: apt-get install gcc")
    pairs = [("aq_usage_process", region_library.UsageProcess), ("aq_usage_report", region_library.UsageReport)]
    lines = [
        f'printf("{name} {field} %zu\\n", offsetof(struct {name}, {field}));'
        for name, structure in pairs
        for field, *_ in structure._fields_
    ] + [f'printf("{name} size %zu\\n", sizeof(struct {name}));' for name, _ in pairs]
    source = tmp_path / "layout.c"
    source.write_text(
        f'#include "region_node.h"\n#include <stdio.h>\nint main(void) {{ {" ".join(lines)} return 0; }}\n'
    )
    include = f"-I{repository / 'hook/include'}"
    subprocess.run([compiler, include, str(source), "-o", str(tmp_path / "layout")], check=True)
    printed = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True).stdout
    expected = [
        f"{name} {field} {getattr(structure, field).offset}"
        for name, structure in pairs
        for field, *_ in structure._fields_
    ] + [f"{name} size {ctypes.sizeof(structure)}" for name, structure in pairs]
    assert printed.splitlines() == expected
