"""Whether a completion gives the gold answer."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def correct(style: str, completion: str, gold: str) -> bool:
    """Whether `completion` answers `gold` by the rules of `style`; never raises."""
    text, right = completion[-4000:].replace(",", "").replace("$", ""), gold.replace(",", "").replace("$", "").strip()
    if style == "math":
        at = text.rfind("\\boxed{")
        return at >= 0 and bool(right) and text[at + 7 : at + 7 + len(right) + 1] == right + "}"
    numbers, golds = _NUMBER.findall(text), _NUMBER.findall(right)
    return bool(numbers) and bool(golds) and float(numbers[-1]) == float(golds[-1])
