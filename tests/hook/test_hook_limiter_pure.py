# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the compute limit by itself: the bucket and the estimates, compiled alone, with times passed in."""

from __future__ import annotations

import ctypes as c
import os
import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
FULL, WAIT = 30_000_000, 2_000_000_000
ALONE, SHARED, PART = range(3)
WORDS = st.integers(0, 2**64 - 1)
# The same values every time, but for a night of `make fuzz`: many more then, and others each night.
MORE = 100 if "ALIQUOT_FUZZ_ROUNDS" in os.environ else 1


class Bucket(c.Structure):
    _fields_ = [
        ("tokens", c.c_int64),
        *[(n, c.c_uint64) for n in ("refilled", "busy", "waiters", "last", "done")],
        ("reserved", c.c_uint64 * 10),
    ]


@pytest.fixture(scope="module")
def pure(tmp_path_factory) -> c.CDLL:
    out = tmp_path_factory.mktemp("pure") / "limiter.so"
    sources = [str(ROOT / "hook" / "src" / f"limiter_{part}.c") for part in ("bucket", "key")]
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-fPIC", "-shared", "-fsanitize=undefined"]
    flags += ["-fsanitize-undefined-trap-on-error", f"-I{ROOT}/hook/src", f"-I{ROOT}/hook/include"]
    subprocess.run(["cc", *flags, "-o", str(out), *sources], check=True, timeout=120)
    library = c.CDLL(str(out))
    library.aq_bucket_take.restype = c.c_bool
    for name in ("aq_key_learn", "aq_key_charge"):
        getattr(library, name).restype = c.c_uint64
    library.aq_key_find.restype = c.c_void_p
    return library


def take(pure: c.CDLL, bucket: Bucket, percent: int, amount: int, now: int) -> int | None:
    """None: taken; else how long to wait."""
    wait = c.c_uint64()
    done = pure.aq_bucket_take(c.byref(bucket), percent, c.c_uint64(amount), c.c_uint64(now), c.byref(wait))
    return None if done else wait.value


@given(st.integers(1, 99), st.integers(1_000, 20_000_000), st.randoms(use_true_random=False))
@settings(max_examples=12 * MORE, deadline=None, derandomize=MORE == 1)
def test_the_rate_is_the_limit_whatever_the_length_and_however_late_one_wakes(pure, percent, length, rng):
    bucket, now, spent, end = Bucket(), 10**12, 0, 10**12 + 20 * 10**9
    start, rounds = now, 0
    while now < end and rounds < 1500:
        rounds += 1
        wait = take(pure, bucket, percent, length, now)
        if wait is None:
            spent += length
        else:
            assert wait <= WAIT + 100_000
            now += wait + rng.randrange(100_000)
    assert spent <= (now - start) * percent / 100 + FULL + length + 1
    # A sleeper's lateness costs nothing, as long as it is less than the bucket holds.
    if length * 100 / percent < WAIT:
        assert spent >= (now - start) * percent / 100 - length - 100_000


@given(WORDS, WORDS, WORDS, st.integers(1, 99), WORDS)
@example(tokens=0, refilled=4004, amount=0, percent=51, now=0)
@example(tokens=-5, refilled=999_999, amount=1, percent=1, now=0)
@settings(max_examples=150 * MORE, deadline=None, derandomize=MORE == 1)
def test_no_word_in_a_bucket_makes_anybody_wait_longer_than_the_bound(pure, tokens, refilled, amount, percent, now):
    bucket = Bucket(tokens=c.c_int64(tokens).value, refilled=refilled)
    for _ in range(4):
        wait = take(pure, bucket, percent, amount, now)
        if wait is None:
            break
        assert wait <= WAIT + 1_200_000
        now = (now + wait) % 2**64
    else:
        pytest.fail("still waiting after four waits")


@given(WORDS, WORDS, st.integers(-(2**63), 2**63 - 1), st.integers(1, 99), WORDS)
@settings(max_examples=150 * MORE, deadline=None, derandomize=MORE == 1)
def test_corrections_never_leave_the_range(pure, tokens, refilled, amount, percent, now):
    bucket = Bucket(tokens=c.c_int64(tokens).value, refilled=refilled)
    pure.aq_bucket_correct(c.byref(bucket), percent, c.c_int64(amount), c.c_uint64(now))
    assert -WAIT // 100 * percent <= bucket.tokens <= FULL


class Entry(c.Structure):
    """struct aq_key."""

    _fields_ = [
        *[(n, c.c_uint64) for n in ("key", "blocks", "estimate", "mean", "low", "streak_ns", "since")],
        *[(n, c.c_uint64) for n in ("lately", "lately_at")],
        ("quick", c.c_uint32),
    ]


class Keys:
    """A table of estimates, and one key in it."""

    def __init__(self, pure: c.CDLL) -> None:
        self.pure = pure
        self.memory = (c.c_uint8 * (1 << 20))()
        self.entry = self.find(0x1230)

    def find(self, key: int, blocks: int = 1) -> c.c_void_p:
        return c.c_void_p(self.pure.aq_key_find(self.memory, c.c_void_p(key), c.c_uint64(blocks), 0))

    def learn(self, ns: int, how: int) -> int:
        return self.pure.aq_key_learn(self.memory, self.entry, c.c_uint64(ns), how)

    def charge(self, entry: c.c_void_p | None = None) -> int:
        return self.pure.aq_key_charge(self.memory, entry or self.entry)

    def settle(self, ns: int, now: int) -> None:
        self.pure.aq_key_settled(self.entry, c.c_uint64(ns), c.c_uint64(now))

    def lately(self) -> int:
        return Entry.from_address(self.entry.value).lately

    def rest(self, running: int) -> int:
        """How many launches go by until the next is measured."""
        self.pure.aq_key_rest(self.entry, running)
        return Entry.from_address(self.entry.value).quick


def test_alone_the_average_counts(pure):
    keys, rng = Keys(pure), random.Random(1)
    for _ in range(400):
        keys.learn(rng.choice([1_000_000, 3_000_000]), ALONE)
    assert 1_600_000 < keys.charge() < 2_400_000


def test_shared_the_least_counts_and_turns_of_others_do_not_raise_it(pure):
    keys, rng = Keys(pure), random.Random(1)
    keys.learn(1_000_000, SHARED)
    for _ in range(400):
        keys.learn(1_000_000 + rng.randrange(1_000_000), SHARED)
    assert keys.charge() == 1_000_000


def test_work_that_has_become_much_longer_is_noticed_when_shared(pure):
    keys = Keys(pure)
    for _ in range(20):
        keys.learn(1_000_000, SHARED)
    for _ in range(20):
        keys.learn(5_000_000, SHARED)
    assert keys.charge() == 5_000_000


def test_a_kernel_that_never_runs_undisturbed_is_charged_the_least_that_was_seen(pure):
    """The rest is the node's to put right; no guess of ours makes it worse."""
    keys, rng = Keys(pure), random.Random(1)
    seen = [15_000_000 + rng.randrange(5_000_000) for _ in range(64)]
    for ns in seen:
        keys.learn(ns, SHARED)
    assert keys.charge() == min(seen)


@given(st.lists(st.tuples(WORDS, st.integers(0, 2)), min_size=1, max_size=60))
@settings(max_examples=150 * MORE, deadline=None, derandomize=MORE == 1)
def test_an_estimate_is_never_above_the_longest_measurement(pure, measurements):
    keys = Keys(pure)
    for ns, how in measurements:
        keys.learn(ns % (1 << 60), how)
    assert keys.charge() <= max(ns % (1 << 60) for ns, _ in measurements)


def test_a_full_set_gives_up_what_was_longest_not_asked_for(pure):
    keys = Keys(pure)
    keys.learn(1_000_000, ALONE)
    for key in range(0x10, 0x10 * 20_000, 0x10):
        keys.find(key)
        keys.find(0x1230)
    assert keys.charge(keys.find(0x1230)) == 1_000_000


MS, HALF = 1_000_000, 500_000_000


def test_what_was_charged_lately_follows_a_better_estimate_as_slowly_as_the_nodes_ratio(pure):
    """The node's ratio is of the second before: an estimate that falls must not be paid by it at once."""
    keys, now = Keys(pure), 10**12
    for _ in range(100):
        now += 20 * MS
        keys.settle(keys.learn(18 * MS, SHARED), now)
    assert keys.lately() == 18 * MS
    seen = []
    for _ in range(150):
        now += 20 * MS
        keys.settle(keys.learn(10 * MS, SHARED), now)
        seen.append(keys.lately())
    assert keys.charge() == 10 * MS, "the estimate itself is better at once"
    assert seen[0] > 17 * MS
    assert seen == sorted(seen, reverse=True)
    assert 13 * MS < seen[HALF // (20 * MS)] < 15 * MS, "half a second later about half of it"
    assert seen[-1] < 10.3 * MS


def test_the_first_measurements_are_averaged_however_quickly_they_come(pure):
    keys, now = Keys(pure), 10**12
    for ns in (20 * MS, 10 * MS, 10 * MS, 10 * MS):
        now += MS
        keys.settle(keys.learn(ns, SHARED), now)
    assert abs(keys.lately() - 12.5 * MS) < MS


def test_other_work_under_the_same_name_counts_at_once(pure):
    keys, now = Keys(pure), 10**12
    for _ in range(50):
        now += 20 * MS
        keys.settle(keys.learn(MS, SHARED), now)
    for _ in range(20):
        now += 20 * MS
        keys.settle(keys.learn(9 * MS, SHARED), now)
    assert keys.lately() == 9 * MS


@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=40))
@settings(max_examples=100 * MORE, deadline=None, derandomize=MORE == 1)
def test_what_was_charged_lately_lies_between_what_was_charged(pure, charges):
    keys = Keys(pure)
    keys.learn(MS, SHARED)
    for ns, now in charges:
        keys.settle(ns % (1 << 60), now)
    seen = [ns % (1 << 60) for ns, _ in charges]
    assert keys.lately() == MS or min(seen) <= keys.lately() <= max(seen)


def test_a_long_queue_is_measured_in_all_its_length(pure):
    """However many launches are queued, those that are measured never run out, and the gaps stay small beside it."""
    for depth in (16, 64, 1024):
        keys = Keys(pure)
        for _ in range(8):
            keys.learn(10 * MS, SHARED)
        running, gaps, queued = 0, [], 0
        while queued < depth:
            running += 1
            gaps.append(keys.rest(running) + 1)
            queued += gaps[-1]
        assert running < 128, (depth, running)
        assert max(gaps) <= max(2, depth // 16), (depth, gaps)


def test_a_turn_of_the_others_in_one_measurement_does_not_count_as_other_work(pure):
    """Alone, by what the node says, but somebody has just come: one launch in twenty has a turn of theirs in it."""
    keys, now = Keys(pure), 10**12
    for i in range(200):
        now += MS
        keys.learn(2_100_000 if i % 20 == 19 else 100_000, ALONE)
        keys.settle(keys.charge(), now)
    assert keys.lately() < 600_000
