# SPDX-License-Identifier: Apache-2.0
"""Kubernetes quantities ("4Gi", "500m", "1e3") to integers and back.

Pure. Never rounds down: a fraction of a byte that was asked for is a whole byte. Never returns a negative number,
nor one that does not fit into the signed 64 bits Kubernetes itself counts in. Invariant: `parse(format_bytes(n)) == n`
and `parse(format_count(n)) == n`. Quantities of the API server are compared as numbers, never as text, because it
answers in a form of its own ("1024Mi" comes back as "1Gi").

Grammar: apimachinery's `resource.Quantity`: digits with at most one dot, then one of the binary suffixes Ki…Ei, one
of the decimal suffixes n u m k M G T P E, or a decimal exponent ("e3", "E-2").
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from aliquot.api.errors import RequestError, foreign

MAX: Final = (1 << 63) - 1
"""Largest value Kubernetes' own arithmetic holds."""

_BINARY: Final = {suffix: 1 << (10 * (power + 1)) for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))}
_DECIMAL: Final = {suffix: 10 ** (3 * (power + 1)) for power, suffix in enumerate(("k", "M", "G", "T", "P", "E"))}
_SCALE: Final[dict[str, Fraction]] = {
    "": Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 10**3),
    **{suffix: Fraction(factor) for suffix, factor in (*_BINARY.items(), *_DECIMAL.items())},
}

_TEXT_LIMIT: Final = 64
"""Characters; the longest sensible quantity has about 30. Keeps a hostile text from costing time or memory."""
_EXPONENT_LIMIT: Final = 64
"""Beyond 10^±64 a number of at most 64 digits is out of range, or a vanishing fraction, whatever it is."""

_QUANTITY: Final = re.compile(
    r"(?P<sign>[+-]?)(?P<whole>[0-9]*)(?:\.(?P<fraction>[0-9]*))?(?:[eE](?P<exponent>[+-]?[0-9]+)|(?P<suffix>[A-Za-z]*))"
)


def parse(text: str) -> int:
    """The quantity as a whole number of its unit (bytes, devices, percent), a fraction rounded up.

    Raises `RequestError` for what is not a quantity, is negative, or is above 2^63 − 1.
    """
    exact = parse_exact(text)
    return -(-exact.numerator // exact.denominator)


def parse_exact(text: str) -> Fraction:
    """The quantity as it stands, unrounded: for comparing two of them. Raises as `parse` does."""
    shown = foreign(text)
    match = _QUANTITY.fullmatch(text) if len(text) <= _TEXT_LIMIT else None
    if match is None or not (match["whole"] or match["fraction"]):
        raise RequestError(f'"{shown}" is not a Kubernetes quantity: write a number such as 4Gi, 512Mi, 500m or 1e9')
    scale = _scale(match["exponent"], match["suffix"])
    if scale is None:
        raise RequestError(
            f'"{shown}" has the unknown suffix "{match["suffix"]}": use one of n u m k M G T P E or Ki Mi Gi Ti Pi Ei'
        )
    whole, fraction = match["whole"] or "", match["fraction"] or ""
    value = Fraction(int(whole + fraction or "0"), 10 ** len(fraction)) * scale
    if value and match["sign"] == "-":
        raise RequestError(f'"{shown}" is negative: an amount is 0 or more')
    if value > MAX:
        raise RequestError(f'"{shown}" is more than {MAX}, the largest amount Kubernetes counts: ask for less')
    return value


def _scale(exponent: str | None, suffix: str | None) -> Fraction | None:
    if exponent is None:
        return _SCALE.get(suffix or "")
    power = max(-_EXPONENT_LIMIT, min(_EXPONENT_LIMIT, int(exponent)))
    return Fraction(10) ** power


def equal(one: str, other: str) -> bool:
    """Whether two quantities are the same number, however written. Raises as `parse` does."""
    return parse_exact(one) == parse_exact(other)


def format_bytes(value: int) -> str:
    """Bytes as the shortest exact binary quantity: 4294967296 → "4Gi", 1536 · 2^20 → "1536Mi", 1000 → "1000".

    Raises `RequestError` for what no quantity can say (negative, above 2^63 − 1).
    """
    return _format(value, _BINARY)


def format_count(value: int) -> str:
    """A number as the shortest exact decimal quantity: 100 → "100", 5000 → "5k". Raises as `format_bytes` does."""
    return _format(value, _DECIMAL)


def _format(value: int, suffixes: dict[str, int]) -> str:
    if not 0 <= value <= MAX:
        raise RequestError(f"{value} is outside 0..{MAX}, what a Kubernetes quantity holds")
    if value:
        for suffix, factor in reversed(suffixes.items()):
            if value % factor == 0:
                return f"{value // factor}{suffix}"
    return str(value)
