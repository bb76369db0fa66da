# SPDX-License-Identifier: Apache-2.0
"""Who may burst and who gives way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aliquot.api.grant import CorePolicy
from aliquot.node.hints import BUSY_NS, VALID_NS, Activity, Advice, advise, is_busy

NOW = 1_000_000_000_000
LATELY, LONG_AGO = NOW - BUSY_NS // 2, NOW - 10 * BUSY_NS


def share(name: str = "a", **changes: object) -> Activity:
    values: dict[str, object] = {
        "name": name,
        "card_uuid": "GPU-a",
        "last_launch_ns": LATELY,
        "processes": 1,
        "core_percent": 50,
        "core_policy": CorePolicy.DEFAULT,
        "priority": 0,
    }
    return Activity(**{**values, **changes})  # type: ignore[arg-type]


BURST = Advice(NOW + VALID_NS, 0)
NOTHING = Advice(0, 0)


def test_alone_on_a_card_it_bursts():
    assert advise([share()], NOW) == {"a": BURST}


def test_two_busy_shares_keep_to_their_limits():
    assert advise([share("a"), share("b")], NOW) == {"a": NOTHING, "b": NOTHING}


def test_the_busy_one_bursts_while_the_other_is_idle_and_the_idle_one_has_to_wait_for_the_next_round():
    assert advise([share("a"), share("b", last_launch_ns=LONG_AGO)], NOW) == {"a": BURST, "b": NOTHING}


def test_shares_of_other_cards_do_not_matter():
    assert advise([share("a"), share("b", card_uuid="GPU-b")], NOW) == {"a": BURST, "b": BURST}


def test_force_never_bursts_and_no_limit_needs_no_burst():
    shares = [
        share("force", core_policy=CorePolicy.FORCE),
        share("off", core_policy=CorePolicy.DISABLE, card_uuid="GPU-b"),
        share("none", core_percent=0, card_uuid="GPU-c"),
        share("all", core_percent=100, card_uuid="GPU-d"),
    ]
    assert set(advise(shares, NOW).values()) == {NOTHING}


def test_a_share_without_a_limit_counts_as_busy_while_it_has_processes():
    neighbour = share("b", core_percent=0, last_launch_ns=0)
    assert advise([share("a"), neighbour], NOW)["a"] == NOTHING
    gone = share("b", core_percent=0, last_launch_ns=0, processes=0)
    assert advise([share("a"), gone], NOW)["a"] == BURST


def test_a_limited_share_that_never_launched_is_idle():
    assert advise([share("a"), share("b", last_launch_ns=0)], NOW)["a"] == BURST


def test_a_dead_share_that_launched_a_moment_ago_is_idle():
    assert not is_busy(share(processes=0), NOW)


def test_a_launch_far_in_the_future_is_no_sign_of_work():
    assert not is_busy(share(last_launch_ns=2**64 - 1), NOW)
    assert is_busy(share(last_launch_ns=NOW + 1), NOW)  # the clock moved on since it was read


def test_low_priority_gives_way_while_high_priority_is_busy():
    low, high = share("low", priority=1), share("high")
    assert advise([low, high], NOW)["low"] == Advice(0, NOW + VALID_NS)
    assert advise([low, high], NOW)["high"].hold_until_ns == 0
    assert advise([low, share("high", last_launch_ns=LONG_AGO)], NOW)["low"] == BURST


def test_equal_priorities_never_hold_each_other():
    assert advise([share("a", priority=1), share("b", priority=1)], NOW) == {"a": NOTHING, "b": NOTHING}


@given(
    st.lists(
        st.builds(
            share,
            st.sampled_from("abcdef"),
            card_uuid=st.sampled_from(["GPU-a", "GPU-b"]),
            last_launch_ns=st.integers(0, 2**64 - 1) | st.integers(NOW - 2 * BUSY_NS, NOW + 2 * BUSY_NS),
            processes=st.integers(0, 3),
            core_percent=st.integers(0, 100),
            core_policy=st.sampled_from(CorePolicy),
            priority=st.integers(0, 1),
        ),
        unique_by=lambda s: s.name,
    )
)
def test_nobody_bursts_beside_a_busy_neighbour(shares: list[Activity]):
    advice = advise(shares, NOW)
    assert advice.keys() == {s.name for s in shares}
    for one in shares:
        neighbours = [o for o in shares if o.card_uuid == one.card_uuid and o is not one]
        if advice[one.name].burst_until_ns:
            assert not any(is_busy(o, NOW) for o in neighbours)
        if advice[one.name].hold_until_ns:
            assert one.priority == 1
            assert any(o.priority == 0 and is_busy(o, NOW) for o in neighbours)
