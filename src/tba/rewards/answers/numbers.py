"""Numbers in their usual dress: exact values, or nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 1000
"""Digits, or powers of ten, beyond which a number is compared by its digits alone."""

MAX_SHAPED = 200
"""Characters beyond which a number is read as a plain decimal only."""


@dataclass(frozen=True, slots=True)
class Huge:
    """A decimal too long to calculate with: its digits without zeros at either end, times a power of ten."""

    is_negative: bool
    digits: str
    exponent: int


Number = Fraction | Huge

_GROUPED = r"\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d{2})+,\d{3}|\d{1,3}(?:[ ']\d{3})+"
DECIMAL = rf"(?:(?:{_GROUPED}|\d+)(?:\.\d*)?|\.\d+)"
"""Digits with or without thousands separators (three by three, or the Indian way), with or without decimals."""
_POWER = r"10\s*\^\s*(?:\{\s*(?P<braced>[-+]?\s*\d+)\s*\}|(?P<bare>-?\d+))"
_SHAPES = [
    rf"(?P<decimal>{DECIMAL})(?:[eE](?P<short>[-+]?\d+))?",
    rf"(?:(?P<decimal>{DECIMAL})\s*(?:\\times|\\cdot|\*|[xX])\s*)?{_POWER}",
    rf"(?P<upper>{DECIMAL})\s*/\s*(?P<lower>[-+]?{DECIMAL})",
    rf"\\frac\s*\{{\s*(?P<upper>[-+]?\s*{DECIMAL})\s*\}}\s*\{{\s*(?P<lower>[-+]?\s*{DECIMAL})\s*\}}",
    rf"\(\s*(?P<upper>[-+]?\s*{DECIMAL})\s*\)\s*/\s*\(?\s*(?P<lower>[-+]?{DECIMAL})\s*\)?",
    r"(?P<whole>\d+)\s*(?:\\frac\s*\{\s*(?P<upper>\d+)\s*\}\s*\{\s*(?P<lower>\d+)\s*\})",
    r"(?P<whole>\d+)(?: +|-| *\+ *(?=\d+ */))(?P<upper>\d+)\s*/\s*(?P<lower>\d+)",
    r"(?P<fixed>\d*\.\d*)(?:\\overline\s*\{\s*(?P<period>\d+)\s*\}|\((?P<bracket>\d+)\)|\\dot\s*\{?(?P<dotted>\d)\}?)",
    r"(?P<fixed>\d*\.\d*?)(?P<period>\d{1,6}?)(?P=period){2,}(?:\\ldots|\.\.\.)",
]
_NUMBER = [re.compile(rf"(?P<sign>[-+]?)\s*{shape}") for shape in _SHAPES]
_WRAPPED = re.compile(r"\{([^{}]*)\}|\(([^()]*)\)")


def number(text: str) -> Number | None:
    """The value of a text that is one number: decimal, scientific, fraction, mixed or repeating; None for any other."""
    text = text.strip()
    while (wrapped := _WRAPPED.fullmatch(text)) is not None:
        text = (wrapped[1] or wrapped[2] or "").strip()
    if not text or len(text) > 20 * MAX_DIGITS or not any(c.isdigit() for c in text):
        return None
    for shape in _NUMBER if len(text) <= MAX_SHAPED else _NUMBER[:1]:
        found = shape.fullmatch(text)
        if found is not None:
            return _value(found.groupdict())
    return None


def _value(parts: dict[str, str | None]) -> Number | None:
    is_negative = parts["sign"] == "-"
    if "upper" in parts:
        return _fraction(parts, is_negative)
    if "period" in parts:
        return _repeating(parts, is_negative)
    power = re.sub(r"[\s+]", "", parts.get("short") or parts.get("braced") or parts.get("bare") or "0")
    return decimal(parts["decimal"] or "1", power, is_negative)


def decimal(text: str, power: str = "0", is_negative: bool = False) -> Number | None:
    """`text` x 10^`power` in canonical form; None when the power itself is too long to read."""
    if len(power) > 15:
        return None
    whole, _, after = re.sub("[, ']", "", text).partition(".")
    digits = (whole + after).lstrip("0")
    if not digits:
        return Fraction(0)
    kept = digits.rstrip("0")
    exponent = int(power) - len(after) + len(digits) - len(kept)
    if len(kept) > MAX_DIGITS or abs(exponent) > MAX_DIGITS:
        return Huge(is_negative, kept, exponent)
    value = int(kept) * Fraction(10) ** exponent
    return -value if is_negative else value


def _fraction(parts: dict[str, str | None], is_negative: bool) -> Number | None:
    values: list[Fraction] = []
    for name in ("upper", "lower", "whole"):
        text = (parts.get(name) or "0").replace(" ", "")
        value = decimal(text.lstrip("+-"), is_negative=text.startswith("-"))
        if not isinstance(value, Fraction):
            return None
        values.append(value)
    upper, lower, whole = values
    if lower == 0:
        return None
    return -(whole + upper / lower) if is_negative else whole + upper / lower


def _repeating(parts: dict[str, str | None], is_negative: bool) -> Number | None:
    fixed, period = parts["fixed"] or "", parts["period"] or parts.get("bracket") or parts.get("dotted") or ""
    if len(fixed) + len(period) > MAX_DIGITS:
        return None
    start = decimal(fixed) if len(fixed) > 1 else Fraction(0)
    assert isinstance(start, Fraction)
    places = len(fixed.partition(".")[2])
    value = start + Fraction(int(period), 10**places * (10 ** len(period) - 1))
    return -value if is_negative else value
