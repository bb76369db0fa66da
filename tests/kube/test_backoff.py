# SPDX-License-Identifier: Apache-2.0
"""Back-off: full jitter below a doubling bound, instant stop."""

from __future__ import annotations

import random
import threading
import time

from hypothesis import given
from hypothesis import strategies as st

from aliquot.kube.backoff import FLOOR_S, Backoff


class Highest(random.Random):
    """Draws the upper end of every range."""

    def uniform(self, a, b):
        return b


@given(st.integers(0, 2**32))
def test_delays_stay_between_floor_and_doubling_bound(seed):
    backoff = Backoff(0.5, 30.0, rng=random.Random(seed))
    for failures in range(12):
        assert FLOOR_S <= backoff.next_s() <= min(30.0, 0.5 * 2**failures)


def test_the_bound_doubles_to_the_cap_and_begins_again_after_a_reset():
    backoff = Backoff(0.5, 30.0, rng=Highest())
    assert [backoff.next_s() for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    backoff.reset()
    assert backoff.next_s() == 0.5


def test_delays_of_two_that_failed_together_differ():
    one, other = (Backoff(rng=random.Random(seed)) for seed in (1, 2))
    assert [one.next_s() for _ in range(5)] != [other.next_s() for _ in range(5)]


def test_a_million_failures_are_survived():
    backoff = Backoff()
    backoff.failures = 10**6
    assert backoff.next_s() <= 30.0


def test_a_wait_ends_at_once_when_stopped():
    stop = threading.Event()
    backoff = Backoff(600, 600, rng=Highest())
    threading.Timer(0.05, stop.set).start()
    began = time.monotonic()
    assert backoff.wait(stop)
    assert time.monotonic() - began < 30
    assert backoff.wait(stop)  # and does not begin when it already is


def test_a_wait_that_runs_out_says_go_on_and_honours_the_servers_wish():
    asked = []

    def sleep(_stop, seconds):
        asked.append(seconds)
        return False

    backoff = Backoff(1, 1, rng=Highest(), sleep=sleep)
    assert not backoff.wait(threading.Event(), at_least_s=7)
    assert asked == [8]
