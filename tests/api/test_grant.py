# SPDX-License-Identifier: Apache-2.0
"""A grant that exists is well formed; errors repeat only a capped, printable part of foreign words."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.api import errors
from aliquot.api.errors import FOREIGN_TEXT_LIMIT, AliquotError, RequestError, foreign
from aliquot.api.grant import MAX_MEMORY_BYTES, Grant

UUID = "GPU-0a1b2c3d-0000-0000-0000-000000000001"


class TestGrant:
    def test_the_largest_and_the_smallest(self):
        Grant(name="a" * 191, card_uuid=UUID, memory_bytes=MAX_MEMORY_BYTES, core_percent=100, priority=1)
        Grant(name="c", card_uuid=UUID)

    @pytest.mark.parametrize(
        "name", ["", "-a", "a-", "a--b", "A", "1a", "a_b", "a/b", "../x", "a\n", "a.b", "ä", "a" * 192]
    )
    def test_a_name_that_is_no_file_or_device_name_is_refused(self, name):
        with pytest.raises(RequestError, match="at most 191 characters"):
            Grant(name=name, card_uuid=UUID)

    @pytest.mark.parametrize(
        ("field", "value", "named"),
        [
            ("memory_bytes", -1, "memory -1"),
            ("memory_bytes", MAX_MEMORY_BYTES + 1, "4 TiB"),
            ("core_percent", 101, "101 % compute"),
            ("core_percent", -1, "-1 % compute"),
            ("priority", 2, "priority 2"),
            ("physical_bytes", -1, "card memory -1"),
            ("context_overhead_bytes", 1 << 63, "context overhead"),
        ],
    )
    def test_a_size_no_region_can_carry_is_refused_and_named(self, field, value, named):
        with pytest.raises(RequestError, match=named) as refused:
            Grant(name="c-1", card_uuid=UUID, **{field: value})
        assert "grant c-1" in str(refused.value)

    @given(st.integers(-10, 110))
    def test_what_is_stored_and_read_again_is_checked_again(self, percent):
        stored = msgspec.json.encode({"name": "c", "card_uuid": UUID, "core_percent": percent})
        if 0 <= percent <= 100:
            assert msgspec.json.decode(stored, type=Grant).core_percent == percent
        else:
            with pytest.raises((msgspec.ValidationError, RequestError)):
                msgspec.json.decode(stored, type=Grant)


class TestErrors:
    @given(st.text(max_size=600))
    def test_foreign_words_are_one_printable_line_of_bounded_length(self, text):
        shown = foreign(text)
        assert len(shown) <= FOREIGN_TEXT_LIMIT
        assert shown.isprintable()
        assert "  " not in shown

    def test_short_words_are_repeated_whole(self):
        assert foreign("no such device") == "no such device"
        assert foreign("a\n\tb\x1b[0m") == "a b [0m"

    def test_every_class_says_whether_waiting_can_help(self):
        kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, AliquotError)]
        waits = {kind.__name__ for kind in kinds if kind.retryable}
        assert waits == {"ClusterError", "HardwareError", "ConflictError"}
