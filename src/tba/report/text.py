"""Untrusted text and numbers, made fit for a reader's eyes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

MAX_TEXT = 4000
"""Characters of one untrusted text that the page carries."""

# What a reader cannot see, or what reorders what the reader sees: controls but tab and newline, soft hyphen,
# zero-width and bidirectional marks, line and paragraph separators, lone surrogates, byte-order marks, tags.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u180e\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\ufeff\ufff0-\ufffb\ufffe\uffff\ud800-\udfff\U000e0000-\U000e0fff]"
)
_IN_SCRIPT = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def visible(value: object, limit: int = MAX_TEXT) -> str:
    r"""Text cut to `limit` characters, with everything unseen as `\uXXXX`. Not yet escaped for HTML."""
    text = value if isinstance(value, str) else str(value)
    shown = _UNSEEN.sub(_escape, text[:limit])
    left = len(text) - limit
    return shown if left <= 0 else f"{shown} [cut here: {count(left)} more characters]"


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"


def script_json(value: Any) -> str:
    """Strict ASCII JSON that can stand inside a `script` element: no `<`, `>` or `&` in it."""
    plain = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&]", lambda match: _IN_SCRIPT[match.group()], plain)


def number(value: object) -> int | float | None:
    """`value` if it is a finite number, else None (also for booleans and numbers beyond a double)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, int):
        return value if abs(value) < 2**63 else None
    return value if math.isfinite(value) else None


def whole(value: object) -> int | None:
    """`value` as an int if it is a number without fraction that a double holds exactly, else None."""
    known = number(value)
    return int(known) if known is not None and abs(known) < 2**53 and known == int(known) else None


def rounded(value: object) -> int | float | None:
    """`value` with six significant digits, which is more than a chart shows."""
    known = number(value)
    return known if known is None or isinstance(known, int) else float(f"{known:.6g}")


def count(value: int) -> str:
    """An integer with its thousands apart."""
    return f"{value:,}"


def figure(value: object) -> str:
    """A number as a reader wants it: four significant digits, whole numbers whole, `not known` otherwise."""
    known = number(value)
    if known is None:
        return "not known"
    if known == int(known) and abs(known) < 1e15:
        return count(int(known))
    if 1e-4 <= abs(known) < 1e6:
        decimals = max(0, 3 - math.floor(math.log10(abs(known))))
        return f"{known:,.{min(decimals, 4)}f}"
    return f"{known:.3e}"


def duration(value: object) -> str:
    """Seconds as hours, minutes and seconds."""
    known = number(value)
    if known is None or known < 0:
        return "not known"
    if known < 60:
        return f"{known:.1f} s"
    minutes, seconds = divmod(round(known), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{count(hours)} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def mapping(value: object) -> Mapping[str, Any]:
    """`value` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}
