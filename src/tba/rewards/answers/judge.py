"""Right or wrong: the one function that training and evaluation ask."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from tba.rewards.answers.characters import tidy
from tba.rewards.answers.comparison import same_answer
from tba.rewards.answers.extraction import MAX_ANSWER, boxed, final_answer, marked
from tba.rewards.answers.paper import paper_number
from tba.rewards.answers.pool import Pool, shared_pool
from tba.rewards.answers.units import Quantity, quantity, same_quantity

STYLES = ("gsm8k", "math", "gsm8k_paper")
"""`gsm8k`: a number behind `####`; `math`: anything in a box; `gsm8k_paper`: the rule of the paper's code."""


def correct(style: str, completion: str, gold: Any, *, pool: Pool | None = None) -> bool:
    """Whether the final answer of `completion` is `gold`; never raises for any text, and takes bounded time.

    `gold` is an answer, or a solution that ends in one behind `####` or in a box; one that is empty or None is never
    met. `pool` judges what needs a computer algebra system: by default one that all callers of this process share.

    Raises:
        ValueError: there is no such style.
    """
    if style not in STYLES:
        close = get_close_matches(str(style), STYLES, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"no answer style named {style!r}; {hint}Known: {', '.join(STYLES)}.")
    if isinstance(gold, (int, float)) and not isinstance(gold, bool):
        gold = str(gold)
    if not isinstance(completion, str) or not isinstance(gold, str):
        return False
    if style == "gsm8k_paper":
        return paper_number(completion) == paper_number(gold)
    answer, wanted = final_answer(style, completion), gold_answer(style, gold)
    if answer is None or not wanted:
        return False
    if style == "gsm8k" and not re.search(r"[\d\\]", wanted[:MAX_ANSWER]):
        return False  # a gold of words is no number
    if style == "gsm8k" and (known := _same_number(wanted, answer)) is not None:
        return known
    return same_answer(wanted, answer, lambda one, other: (pool or shared_pool()).equal(one, other))


def correct_all(
    style: str, completions: Sequence[str], golds: Sequence[Any], *, pool: Pool | None = None
) -> list[bool]:
    """`correct` for each pair, with as many at a time as the pool has processes."""
    chosen = pool or shared_pool()
    with ThreadPoolExecutor(chosen.size) as threads:
        return list(threads.map(lambda pair: correct(style, *pair, pool=chosen), zip(completions, golds, strict=True)))


def gold_answer(style: str, gold: str) -> str | None:
    """The answer in a gold: behind its marker, in its box, or all of it."""
    readers = (marked, boxed) if style == "gsm8k" else (boxed, marked)
    for reader in readers:
        found = reader(gold)
        if found is not None:
            return found
    return gold.strip()


_GLOSS = re.compile(r"(?<=[\w%.])\s*\((?![^()]*=)[^()]*\)")
_MARKS = re.compile(r"\*\*|__|`|^[*_]+|[*_]+$")
_NOT = re.compile(r"\b(?:not|never|neither|nor|no)\b|n't\b|\\neq?\b", re.I)
_LETTERS_NUMBER = re.compile(r"(?<![\w.])[a-zA-Z]+\^?\{?\d+\}?(?![\w/])")
_RUNS = re.compile(
    r"\\frac\{[^{}]*\}\{[^{}]*\}|[-+]?\.\d+"
    r"|[-+]?(?:\\\$)?\d(?:[\d.,:/^{}]|(?<=\d)-(?=\d)|e[-+]?\d| ?\\times ?| ?[x*] ?(?=10\b)|%)*"
)


def _same_number(gold: str, answer: str) -> bool | None:
    """Whether the one number in `answer` is `gold`; None when a formula has to be read instead."""
    if len(answer) > MAX_ANSWER or len(gold) > MAX_ANSWER:
        return None
    wanted = quantity(tidy(gold), takes_words=True)
    if wanted is None:
        return None
    found = one_number(answer)
    if found is None and not re.search(r"[a-zA-Z]{2}", re.sub(r"\\[a-zA-Z]+", "", answer)):
        return None if re.search(r"\d", answer) else False
    return found is not None and same_quantity(wanted, found)


def one_number(answer: str) -> Quantity | None:
    """The number that a line states, with its unit; None if it states none, several, or denies one."""
    text = tidy(_MARKS.sub("", answer.strip()).strip())
    found = quantity(text.rstrip(".,;:? "), takes_words=True)
    if found is not None:
        return found
    bare = _GLOSS.sub("", text)
    text = bare if re.search(r"\d", bare) else text
    if "=" in text:
        text = text.rsplit("=", 1)[1]
    text = text.strip(" .,;:*?")
    found = quantity(text, takes_words=True)
    if found is not None or _NOT.search(text):
        return found
    text = _LETTERS_NUMBER.sub(" ", text)
    runs = [run[0].rstrip(".,:/^{") for run in _RUNS.finditer(text)]
    return quantity(runs[0]) if len(runs) == 1 and re.search(r"[a-zA-Z]{2}", text) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BadGold:
    """A gold answer that does not score full marks against itself."""

    file: str
    line: int
    gold: Any

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: the gold answer {str(self.gold)[:80]!r} is not recognised as itself"


def bad_golds(style: str, golds: Iterable[tuple[str, int, Any]], *, pool: Pool | None = None) -> list[BadGold]:
    """Those of `golds`, given as (file, line, gold), that are wrong against themselves, marked or boxed."""
    return [
        BadGold(file=file, line=line, gold=gold)
        for file, line, gold in golds
        if not correct(style, _stated(style, gold), gold, pool=pool)
    ]


def _stated(style: str, gold: Any) -> str:
    text = "" if gold is None else str(gold)
    if not text.strip() or "####" in text or "\\boxed" in text:
        return text
    return f"$\\boxed{{{text}}}$" if style == "math" else f"#### {text}"
