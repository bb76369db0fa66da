# SPDX-License-Identifier: Apache-2.0
"""The region layout: equal to the C header in every offset, readable whatever a tenant writes into it."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.api import region, region_layout
from aliquot.api.errors import InternalError, RequestError
from aliquot.api.grant import MAX_MEMORY_BYTES, CorePolicy, Grant

HEADER = Path(__file__).resolve().parents[2] / "hook" / "include" / "region.h"

GRANT = Grant(
    name="c-7b1c2f6e-0000-4000-8000-000000000001-gpu-0a1b2c3d-shared-x1",
    card_uuid="GPU-0a1b2c3d-0000-0000-0000-000000000001",
    card_bus_id="00000000:3b:00.0",
    memory_bytes=4 << 30,
    physical_bytes=80 << 30,
    context_overhead_bytes=300 << 20,
    core_percent=25,
    core_policy=CorePolicy.FORCE,
    priority=1,
    oversubscribe=True,
)

texts = st.text(max_size=31).filter(lambda text: "\0" not in text and len(text.encode("utf-8", "replace")) < 32)
grants = st.builds(
    Grant,
    name=st.from_regex(r"[a-z][a-z0-9]{0,30}(-[a-z0-9]{1,20}){0,5}", fullmatch=True),
    card_uuid=texts.filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text)),
    card_bus_id=texts.filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text)),
    memory_bytes=st.integers(0, MAX_MEMORY_BYTES),
    physical_bytes=st.integers(0, (1 << 63) - 1),
    context_overhead_bytes=st.integers(0, (1 << 63) - 1),
    core_percent=st.integers(0, 100),
    core_policy=st.sampled_from(CorePolicy),
    priority=st.integers(0, 1),
    oversubscribe=st.booleans(),
)


def fields_in_header(text: str) -> dict[str, list[str]]:
    """Names of the fields of every struct of the header, reserved space left out."""
    found = {}
    for match in re.finditer(r"^struct (\w+) \{\n(.*?)^\};", text, re.MULTILINE | re.DOTALL):
        body = re.sub(r"/\*.*?\*/", "", match[2], flags=re.DOTALL)
        names = re.findall(r"(\w+)\s*(?:\[[^;]*\])?;", body)
        found[match[1]] = [name for name in names if not name.startswith("reserved")]
    return found


def constants_in_header(text: str) -> list[str]:
    macros = re.findall(r"^#define (AQ_\w+)[ \t]+\S", text, re.MULTILINE)
    enums = re.findall(r"^\s+(AQ_\w+)\s*=", text, re.MULTILINE)
    return [*macros, *enums]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, int]:
    """Every offset, size and constant as the C compiler sees them."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler: install gcc")
    text = HEADER.read_text(encoding="utf-8")
    lines = []
    for name, fields in fields_in_header(text).items():
        lines.append(f'P("{name}", sizeof(struct {name}));')
        for field in fields:
            lines.append(f'P("{name}.{field}", offsetof(struct {name}, {field}));')
            lines.append(f'P("{name}.{field}/size", sizeof(((struct {name} *)0)->{field}));')
    lines += [f'P("{name}", {name});' for name in constants_in_header(text)]
    folder = tmp_path_factory.mktemp("layout")
    source = folder / "layout.c"
    source.write_text(
        '#include <stdio.h>\n#include "region.h"\n'
        '#define P(name, value) printf("%s %llu\\n", name, (unsigned long long)(value))\n'
        "int main(void)\n{\n" + "\n".join(lines) + "\nreturn 0;\n}\n",
        encoding="utf-8",
    )
    program = folder / "layout"
    subprocess.run([compiler, "-std=c11", "-I", HEADER.parent, "-o", program, source], check=True)
    output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in (line.split() for line in output.splitlines())}


class TestLayoutEqualsHeader:
    def test_every_struct_has_a_table(self):
        assert {layout.name for layout in region_layout.LAYOUTS} == set(
            fields_in_header(HEADER.read_text(encoding="utf-8"))
        )

    @pytest.mark.parametrize("layout", region_layout.LAYOUTS, ids=lambda layout: layout.name)
    def test_offsets_and_sizes(self, layout, compiled):
        expected = {
            key.partition(".")[2]: (offset, compiled[f"{key}/size"])
            for key, offset in compiled.items()
            if key.startswith(f"{layout.name}.") and not key.endswith("/size")
        }
        actual = {name: (offset, struct.calcsize(f"<{code}")) for name, (offset, code) in layout.fields.items()}
        assert actual == expected
        assert layout.size == compiled[layout.name]

    def test_constants(self, compiled):
        elsewhere = {
            "AQ_REGION_MAJOR": region_layout.MAJOR,
            "AQ_REGION_MINOR": region_layout.MINOR,
            "AQ_GRANT_OVERSUBSCRIBE": region_layout.FLAG_OVERSUBSCRIBE,
            "AQ_CORE_DEFAULT": region_layout.CORE_POLICIES.index(CorePolicy.DEFAULT),
            "AQ_CORE_FORCE": region_layout.CORE_POLICIES.index(CorePolicy.FORCE),
            "AQ_CORE_DISABLE": region_layout.CORE_POLICIES.index(CorePolicy.DISABLE),
        }
        constants = {name: value for name, value in compiled.items() if name.startswith("AQ_")}
        assert len(constants) > 25
        mirrored = {name: elsewhere.get(name, getattr(region_layout, name[3:], None)) for name in constants}
        assert mirrored == constants

    def test_the_account_holds_the_largest_grant(self):
        assert (MAX_MEMORY_BYTES >> region_layout.UNIT_SHIFT) == region_layout.WORD_UNIT_MASK


class TestGrant:
    @given(grants, st.integers(0, (1 << 64) - 1))
    def test_a_slot_gives_back_what_was_packed(self, grant, generation):
        assert region.unpack_slot(region.pack_slot(grant, generation)) == (grant, generation)

    def test_checksum_is_crc32_of_all_bytes_before_it(self):
        slot = region.pack_slot(GRANT, 7)
        assert int.from_bytes(slot[-4:], "little") == zlib.crc32(slot[:-4])

    @given(st.integers(0, region_layout.GRANT_SLOT_SIZE * 8 - 1))
    def test_one_flipped_bit_is_noticed(self, bit):
        slot = bytearray(region.pack_slot(GRANT, 7))
        slot[bit // 8] ^= 1 << bit % 8
        assert region.unpack_slot(bytes(slot)) is None

    def test_a_text_that_does_not_fit_is_refused_with_its_limit(self):
        grant = Grant(name="g", card_uuid="GPU-" + "0" * 92)
        with pytest.raises(RequestError, match=r"uuid .* at most 95 bytes"):
            region.pack_slot(grant, 1)
        with pytest.raises(RequestError, match="bus_id"):
            region.pack_slot(Grant(name="g", card_uuid="GPU-0", card_bus_id="0\0"), 1)

    @pytest.mark.parametrize("generation", [-1, 1 << 64])
    def test_an_impossible_generation_is_our_bug(self, generation):
        with pytest.raises(InternalError, match="generation"):
            region.pack_slot(GRANT, generation)

    def test_content_that_is_no_grant_is_not_read_even_with_a_right_checksum(self):
        for field, value in (("core_policy", 3), ("core_percent", 101), ("priority", 2), ("name", b"../etc")):
            slot = bytearray(region.pack_slot(GRANT, 1))
            region_layout.GRANT_SLOT.put(slot, field, value)
            region_layout.GRANT_SLOT.put(slot, "checksum", zlib.crc32(slot[:-4]))
            assert region.unpack_slot(bytes(slot)) is None, field


class TestGrantFile:
    @given(grants, st.integers(1, 9))
    def test_a_file_gives_back_its_grant(self, grant, generation):
        hints = region.Hints(suspended=1, heartbeat_ns=5)
        parsed = region.parse_grant_file(region.pack_grant_file(grant, generation, hints))
        assert parsed == region.GrantFile(grant, generation, hints, region_layout.MINOR)

    def test_a_torn_slot_leaves_the_other(self):
        old, new = GRANT, Grant(name=GRANT.name, card_uuid=GRANT.card_uuid, memory_bytes=1 << 30)
        data = bytearray(region.pack_grant_file(old, 4))
        start = region_layout.GRANT_SLOT0 + region_layout.GRANT_SLOT_SIZE
        data[start : start + 1024] = region.pack_slot(new, 5)
        region_layout.GRANT_FILE.put(data, "selector", 5)
        assert region.parse_grant_file(bytes(data)).grant == new
        data[start + 8] ^= 1
        parsed = region.parse_grant_file(bytes(data))
        assert (parsed.grant, parsed.generation) == (old, 4)

    def test_a_newer_minor_version_is_read_and_another_major_is_not(self):
        data = bytearray(region.pack_grant_file(GRANT))
        region_layout.GRANT_FILE.put(data, "minor", region_layout.MINOR + 1)
        assert region.parse_grant_file(bytes(data)).grant == GRANT
        region_layout.GRANT_FILE.put(data, "major", region_layout.MAJOR + 1)
        assert region.parse_grant_file(bytes(data)) is None

    @given(st.binary(max_size=64), st.integers(0, region_layout.GRANT_FILE_SIZE))
    def test_scribbles_and_truncation_never_raise(self, scribble, at):
        data = bytearray(region.pack_grant_file(GRANT))
        data[at : at + len(scribble)] = scribble
        parsed = region.parse_grant_file(bytes(data[:4096]))
        assert parsed is None or parsed.grant == GRANT
        assert region.parse_grant_file(bytes(data[:at])) is None or at >= region_layout.GRANT_FILE_SIZE


def usage_file(*slots: dict[str, int], **header: int) -> bytearray:
    data = bytearray(region.pack_usage_file())
    for field, value in header.items():
        region_layout.USAGE_FILE.put(data, field, value)
    for index, slot in enumerate(slots):
        for field, value in slot.items():
            base = region_layout.USAGE_HEADER_SIZE + index * region_layout.USAGE_SLOT_SIZE
            region_layout.USAGE_SLOT.put(data, field, value, base)
    return data


def owner(pid: int, start: int = 0, generation: int = 0, state: int = region_layout.OWNER_LIVE) -> int:
    return state | generation << region_layout.OWNER_GENERATION_SHIFT | start << region_layout.OWNER_START_SHIFT | pid


class TestUsage:
    def test_an_empty_file_says_nothing_and_has_no_problem(self):
        usage = region.parse_usage(region.pack_usage_file())
        assert usage == region.Usage(readable=True, minor=region_layout.MINOR)

    def test_a_process_is_read_field_by_field(self):
        word = owner(1234, start=0xDEADBEEF, generation=3)
        charge = 5 << region_layout.WORD_UNIT_BITS | 100
        data = usage_file(
            {},
            {
                "owner": word,
                "charge": charge,
                "pidns": 4026531836,
                "host_pid": 99,
                "context_bytes": 1024,
                "spilled_bytes": 7,
                "launches": 8,
                "device_ns": 9,
            },
            account=77 << region_layout.WORD_UNIT_BITS | 120,
            unsettled=1,
        )
        usage = region.parse_usage(data)
        assert (usage.used_bytes, usage.unsettled, usage.problems) == (120 * 512, True, ())
        assert usage.processes == (
            region.ProcessUsage(
                index=1,
                owner=word,
                pid=1234,
                start_time=0xDEADBEEF,
                live=True,
                pidns=4026531836,
                host_pid=99,
                used_bytes=100 * 512,
                context_bytes=1024,
                spilled_bytes=7,
                launches=8,
                device_ns=9,
            ),
        )

    def test_a_claiming_slot_is_no_live_process(self):
        (process,) = region.parse_usage(usage_file({"owner": owner(5, state=region_layout.OWNER_CLAIMING)})).processes
        assert not process.live

    @pytest.mark.parametrize("state", [0, region_layout.OWNER_LIVE | region_layout.OWNER_CLAIMING])
    def test_a_slot_in_an_impossible_state_is_a_problem(self, state):
        usage = region.parse_usage(usage_file({"owner": owner(5, state=state)}))
        assert usage.problems == ("unknown slot state",)

    @pytest.mark.parametrize(
        ("header", "problem"),
        [
            ({"magic": 0}, "not a usage file"),
            ({"major": 2}, "unknown major version"),
            ({"minor": region_layout.MINOR + 1, "slot_size": 0}, "impossible sizes in header"),
            ({"minor": region_layout.MINOR + 1, "slot_size": 1 << 30}, "impossible sizes in header"),
            ({"minor": region_layout.MINOR + 1, "header_size": 0xFFFFFFFF}, "impossible sizes in header"),
        ],
    )
    def test_an_unreadable_header_is_named(self, header, problem):
        usage = region.parse_usage(usage_file(**header))
        assert (usage.readable, usage.problems, usage.processes) == (False, (problem,), ())

    @pytest.mark.parametrize("change", [{"slot_count": 0}, {"slot_size": 256}, {"header_size": 0}])
    def test_a_changed_header_hides_no_process(self, change):
        usage = region.parse_usage(usage_file({"owner": owner(5), "charge": 3}, **change))
        assert [process.pid for process in usage.processes] == [5]
        assert usage.problems == ("header changed",)

    def test_a_newer_minor_version_may_have_larger_slots(self):
        data = usage_file(minor=region_layout.MINOR + 1, slot_size=256, slot_count=512)
        region_layout.USAGE_SLOT.put(data, "owner", owner(8), region_layout.USAGE_HEADER_SIZE + 256)
        usage = region.parse_usage(data)
        assert [(process.index, process.pid) for process in usage.processes] == [(1, 8)]
        assert (usage.minor, usage.problems) == (region_layout.MINOR + 1, ())

    def test_a_truncated_file_gives_the_slots_that_are_there(self):
        data = usage_file({"owner": owner(5)}, {"owner": owner(6)})
        usage = region.parse_usage(data[: region_layout.USAGE_HEADER_SIZE + region_layout.USAGE_SLOT_SIZE + 60])
        assert [process.pid for process in usage.processes] == [5]
        assert usage.problems == ("file truncated",)

    @given(st.integers(0, region_layout.USAGE_FILE_SIZE))
    def test_any_length_is_survived(self, length):
        usage = region.parse_usage(region.pack_usage_file()[:length])
        assert usage.readable == (length >= region_layout.USAGE_HEADER_SIZE)

    @given(st.lists(st.tuples(st.integers(0, region_layout.USAGE_FILE_SIZE - 64), st.binary(min_size=1, max_size=64))))
    def test_any_scribble_is_survived_and_bounded(self, scribbles):
        data = usage_file({"owner": owner(5), "charge": 3})
        for at, text in scribbles:
            data[at : at + len(text)] = text
        usage = region.parse_usage(bytes(data))
        assert usage.used_bytes <= MAX_MEMORY_BYTES
        assert all(process.used_bytes <= MAX_MEMORY_BYTES for process in usage.processes)
