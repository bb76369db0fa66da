# SPDX-License-Identifier: Apache-2.0
"""Kubernetes quantities: every suffix, rounding up, refusals, and there and back."""

from __future__ import annotations

import contextlib
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aliquot.api import quantity
from aliquot.api.errors import RequestError

amounts = st.integers(0, quantity.MAX)


class TestParse:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("0", 0),
            ("1", 1),
            ("+1", 1),
            ("-0", 0),
            ("007", 7),
            ("1.", 1),
            (".5Ki", 512),
            ("1Ki", 1 << 10),
            ("1Mi", 1 << 20),
            ("4Gi", 4 << 30),
            ("1Ti", 1 << 40),
            ("1Pi", 1 << 50),
            ("1Ei", 1 << 60),
            ("1k", 10**3),
            ("1M", 10**6),
            ("1G", 10**9),
            ("1T", 10**12),
            ("1P", 10**15),
            ("1E", 10**18),
            ("1e3", 1000),
            ("1E3", 1000),
            ("1e+3", 1000),
            ("15e-1", 2),
            ("1.5Gi", 3 << 29),
            ("1500m", 2),
            ("2000m", 2),
            ("1m", 1),
            ("1u", 1),
            ("1n", 1),
            ("0m", 0),
            ("0.0000000000000000000000001", 1),
            ("1e-999999999", 1),
            ("0e999999999", 0),
            ("9223372036854775807", (1 << 63) - 1),
        ],
    )
    def test_what_kubernetes_writes(self, text, value):
        assert quantity.parse(text) == value

    @pytest.mark.parametrize(
        "text",
        [
            "",
            " ",
            "Gi",
            ".",
            "+",
            "1 Gi",
            "1Gi ",
            "1gi",
            "1KI",
            "1K",
            "1e",
            "1e1.5",
            "1Gim",
            "0x10",
            "٣",
            "1_0",
            "NaN",
            "inf",
            "1" * 65,
            "--1",
            "1.2.3",
            "1Gi\n",
            "\x00",
        ],
    )
    def test_what_is_no_quantity_is_refused_by_name(self, text):
        with pytest.raises(RequestError, match=r"quantity|suffix") as refused:
            quantity.parse(text)
        assert len(str(refused.value)) < 400

    @pytest.mark.parametrize("text", ["-1", "-1m", "-0.5Gi"])
    def test_negative_amounts_are_refused(self, text):
        with pytest.raises(RequestError, match="negative"):
            quantity.parse(text)

    @pytest.mark.parametrize("text", ["9223372036854775808", "8Ei", "10E", "1e19", "1e999999999", "9" * 64])
    def test_amounts_beyond_64_bits_are_refused_with_the_limit(self, text):
        with pytest.raises(RequestError, match="9223372036854775807"):
            quantity.parse(text)

    @given(st.text(max_size=80))
    def test_any_text_gives_an_amount_or_a_refusal(self, text):
        with contextlib.suppress(RequestError):
            assert 0 <= quantity.parse(text) <= quantity.MAX

    @given(st.integers(0, 10**15), st.integers(0, 999999999), st.sampled_from([*"numkMGTPE", "", "Ki", "Mi", "Gi"]))
    def test_fractions_round_up_to_the_next_whole(self, whole, thousandth, suffix):
        text = f"{whole}.{thousandth:09d}{suffix}"
        try:
            exact = quantity.parse_exact(text)
        except RequestError:
            return
        assert exact <= quantity.parse(text) < exact + 1

    @given(st.integers(0, 10**6), st.sampled_from(["n", "u", "m", "", "k", "M", "G"]))
    def test_a_suffix_is_an_exponent(self, number, suffix):
        power = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9}[suffix]
        assert quantity.equal(f"{number}{suffix}", f"{number}e{power}")


class TestFormat:
    @given(amounts)
    @example(0)
    @example(quantity.MAX)
    def test_there_and_back(self, amount):
        assert quantity.parse(quantity.format_bytes(amount)) == amount
        assert quantity.parse(quantity.format_count(amount)) == amount

    @given(amounts, amounts)
    def test_order_is_kept(self, one, other):
        texts = quantity.format_bytes(one), quantity.format_bytes(other)
        assert (quantity.parse_exact(texts[0]) < quantity.parse_exact(texts[1])) == (one < other)

    @pytest.mark.parametrize(
        ("amount", "text"),
        [(0, "0"), (1, "1"), (1000, "1000"), (1024, "1Ki"), (1536 << 20, "1536Mi"), (4 << 30, "4Gi"), (1 << 60, "1Ei")],
    )
    def test_bytes_are_written_as_people_do(self, amount, text):
        assert quantity.format_bytes(amount) == text

    @pytest.mark.parametrize(("amount", "text"), [(0, "0"), (100, "100"), (5000, "5k"), (1024, "1024"), (10**18, "1E")])
    def test_counts_are_written_as_people_do(self, amount, text):
        assert quantity.format_count(amount) == text

    @pytest.mark.parametrize("amount", [-1, 1 << 63])
    def test_what_no_quantity_says_is_refused(self, amount):
        with pytest.raises(RequestError, match="9223372036854775807"):
            quantity.format_bytes(amount)


class TestEqual:
    @pytest.mark.parametrize(
        ("one", "other"), [("1024Mi", "1Gi"), ("1", "1000m"), ("0", "0Gi"), ("1e3", "1k"), ("0.5", "500m")]
    )
    def test_the_servers_own_form_is_the_same_amount(self, one, other):
        assert quantity.equal(one, other)

    def test_a_fraction_is_not_rounded_away(self):
        assert not quantity.equal("1", "999m")
        assert quantity.parse_exact("1n") == Fraction(1, 10**9)
