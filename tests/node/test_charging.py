# SPDX-License-Identifier: Apache-2.0
"""What a share was charged beside what NVML saw of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aliquot.api.region_layout import RATIO_ONE
from aliquot.node.charging import WINDOWS, Meter

SECOND = 1_000_000_000
WORDS = st.integers(0, 2**64 - 1)


def meter(*, charged_percent: float, seconds: int = 4, start: int = 10 * SECOND) -> Meter:
    """Read twice a second, charged evenly."""
    one = Meter()
    for half in range(2 * seconds + 1):
        one.read(start + half * SECOND // 2, int(half * SECOND / 2 * charged_percent / 100))
    return one


def test_charged_as_much_as_it_had_changes_nothing():
    one = meter(charged_percent=30)
    one.compare(11 * SECOND, 12 * SECOND, 30.0)
    assert one.ratio() == RATIO_ONE


def test_charged_twice_what_it_had_is_halved():
    one = meter(charged_percent=60)
    one.compare(11 * SECOND, 12 * SECOND, 30.0)
    assert one.ratio() == RATIO_ONE // 2


def test_charged_too_little_pays_more():
    one = meter(charged_percent=20)
    one.compare(11 * SECOND, 12 * SECOND, 30.0)
    assert abs(one.ratio() - RATIO_ONE * 3 // 2) <= 1


def test_windows_need_not_begin_where_it_was_read():
    one = meter(charged_percent=60)
    one.compare(11 * SECOND + 123_456_789, 12 * SECOND + 98_765_432, 30.0)
    assert abs(one.ratio() - RATIO_ONE // 2) <= 1


def test_a_window_that_began_before_it_was_read_tells_nothing():
    one = meter(charged_percent=60)
    one.compare(9 * SECOND, 12 * SECOND, 30.0)
    one.compare(12 * SECOND, 15 * SECOND, 30.0)
    assert one.ratio() == 0


def test_the_latest_windows_count():
    one = meter(charged_percent=50)
    for _ in range(4):
        one.compare(11 * SECOND, 12 * SECOND, 10.0)
    for _ in range(WINDOWS):
        one.compare(12 * SECOND, 13 * SECOND, 50.0)
    assert one.ratio() == RATIO_ONE


def test_idle_alone_and_jumps_begin_anew():
    one = meter(charged_percent=60)
    one.compare(11 * SECOND, 12 * SECOND, 30.0)
    one.alone()
    assert one.ratio() == 0
    one.compare(11 * SECOND, 12 * SECOND, 30.0)
    one.compare(12 * SECOND, 13 * SECOND, 0.0)
    assert one.ratio() == 0, "NVML says nothing of it: no reason to make its launches free"
    one.compare(11 * SECOND, 12 * SECOND, 30.0)
    one.read(15 * SECOND, 2**63)
    assert one.ratio() == 0, "a counter that jumps"


def test_a_share_that_was_hardly_charged_is_not_judged_by_whole_percents():
    one = meter(charged_percent=1)
    one.compare(11 * SECOND, 12 * SECOND, 2.0)
    assert one.ratio() == 0


@given(st.lists(st.tuples(WORDS, WORDS), max_size=40), WORDS, WORDS, st.floats(-1, 1000))
def test_whatever_is_written_there_the_ratio_stays_in_its_bounds(readings, start, end, percent):
    one = Meter()
    for now, done in readings:
        one.read(now, done)
    for _ in range(3):
        one.compare(start, end, percent)
    assert one.ratio() == 0 or RATIO_ONE // 8 <= one.ratio() <= RATIO_ONE * 4
