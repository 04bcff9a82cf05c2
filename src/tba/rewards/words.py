"""Answers that are a word or a line in one spelling: found in a completion, compared as text."""

from __future__ import annotations

import re

LONGEST = 20_000
"""Characters of a completion's end that are looked at."""
_MARKS = re.compile(r"####|\\boxed\{|<answer>|answer\s+is\b:?|answer\s*:", re.IGNORECASE)
_ENDS = {"\\boxed{": "}", "<answer>": "</answer>"}


def found_word(completion: str) -> str:
    r"""The answer that a completion gives: after its last `####`, `\boxed{`, `<answer>`, `answer is` or `answer:`, to
    the end of that line or of the mark; without any, its last line that is not blank. Spaces, quotes, emphasis and a
    full stop around it go, and runs of spaces become one. '' if there is nothing.
    """
    text = completion[-LONGEST:]
    marks = list(_MARKS.finditer(text))
    if marks:
        after = text[marks[-1].end() :]
        end = _ENDS.get(marks[-1][0].lower())
        lines = (after.partition(end)[0] if end and end in after else after).strip().splitlines()
        return _bare(lines[0] if lines else "")
    lines = [line for line in text.splitlines() if line.strip()]
    return _bare(lines[-1] if lines else "")


def same_word(completion: str, gold: str) -> bool:
    """Whether the answer that a completion gives is `gold`, letter case aside; nothing is evaluated."""
    given = found_word(completion)
    return bool(given) and given.casefold() == _bare(gold).casefold()


def _bare(text: str) -> str:
    joined = " ".join(text.split()).strip("*`\"' $")
    return joined[:-1].strip("*`\"' $") if joined.endswith(".") and len(joined) > 1 else joined
