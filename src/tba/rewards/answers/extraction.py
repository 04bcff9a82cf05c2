"""The final answer of a completion: behind its marker, in its last box, or its last number."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tba.rewards.answers.characters import plain

MAX_TAIL = 20_000
"""Characters at the end of a completion in which an answer without marker or box is looked for."""
MAX_ANSWER = 2_000
"""Characters beyond which an answer is compared as text only."""
MAX_BOXES = 20
"""Empty boxes that are passed over, and boxes that make one list."""

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[\\{}]|[{}]")
_JOINED = re.compile(r"[\s$,;]*(?:,|;|and|or|\\text\s*\{\s*,?\s*(?:and|or)\s*\}|\\(?:quad|qquad|lor|vee))[\s$,;]*")
_BARE = re.compile(r"\\(?:boxed|fbox)\s+([^\s${}\\][^\s${}]{0,200})")
_ANSWER = re.compile(r"\b(?:answer|result)\b(?:[^.\n:=]{0,40}?)(?:\bis\b|:|=)\s*:?", re.I)
_NEGATED = re.compile(
    r"(?:\bnot|n['\u2019]t|\bnever|\bneither|\bnor|\bno longer|\u2260|\\neq?|!=)(?:\s+[a-z]+){0,2}[\s$*\\(:]*$", re.I
)
_RUN = re.compile(
    r"\\[dt]?frac\s*\{[^{}]{1,40}\}\s*\{[^{}]{1,40}\}(?:\s*\\?%)?"
    r"|[-+]?[$€£¥]?[-+]?\.?\d(?:[\d.,:/^]|[eE](?=[-+]?\d)|(?<=[eE])[-+]|[-\u2013](?=\d)|\{,\}|\\!|%|"
    r" ?(?:\\times|[\u00d7*x]) ?10\^?)*(?:\s*\\?%)?"
)


def after_thinking(text: str) -> str:
    """`text` without what stands between `<think>` and `</think>`; nothing follows a mark that stays open."""
    end = text.rfind("</think>")
    if end >= 0:
        text = text[end + len("</think>") :]
    return text.partition("<think>")[0]


@dataclass(frozen=True, slots=True)
class Box:
    """Where a closed box begins and ends, and its contents."""

    start: int
    inner_start: int
    inner_end: int

    def contents(self, text: str) -> str:
        """What it holds."""
        return text[self.inner_start : self.inner_end].strip()


def boxes(text: str) -> list[Box]:
    """Every closed `\\boxed{...}` and `\\fbox{...}`, found in one pass, in the order in which they begin."""
    found: list[Box] = []
    open_at: list[tuple[int, int] | None] = []
    for brace in _BRACES.finditer(text):
        if brace[0] == "}":
            start = open_at.pop() if open_at else None
            if start is not None:
                found.append(Box(*start, brace.start()))
        elif brace[0] == "{" or len(brace[0]) > 2:
            open_at.append((brace.start(), brace.end()) if len(brace[0]) > 2 else None)
    return sorted(found, key=lambda box: box.start)


def boxed(text: str) -> str | None:
    """What the last box that is not empty holds; boxes joined by "and", "or" or a comma make a list.

    None when nothing is boxed; empty when boxes hold nothing or are never closed. Of a box in a box the inner one
    counts. `\\boxed 42` without braces holds what follows, up to a space or a dollar sign.
    """
    if not _BOX.search(text):
        return None
    found = boxes(text)
    empty = 0
    while found and empty < MAX_BOXES and not found[-1].contents(text):
        found.pop()
        empty += 1
    if not found or empty == MAX_BOXES:
        bare = _BARE.findall(text[-MAX_TAIL:])
        return bare[-1] if bare and not found else ""
    last = found.pop()
    parts = [last.contents(text)]
    while found and len(parts) <= MAX_BOXES and found[-1].inner_end < last.start:
        if last.start - found[-1].inner_end > 60 or not _JOINED.fullmatch(text[found[-1].inner_end + 1 : last.start]):
            break
        last = found.pop()
        parts.insert(0, last.contents(text))
    return ", ".join(parts)


def marked(text: str) -> str | None:
    """The line behind the last `####`; the next line if that one is empty."""
    at = text.rfind("####")
    if at < 0:
        return None
    lines = text[at:].lstrip("#").lstrip(" :*\t").lstrip("\n").split("\n", 1)
    return lines[0].strip()


def final_answer(style: str, completion: str) -> str | None:
    """The final answer as it was written, or None.

    `gsm8k` prefers the marker to a box, `math` a box to the marker. Without either: what follows the last "answer is"
    if that holds one number or formula, else the last number; one that is denied ("not 7") is none.
    """
    text = after_thinking(completion)
    readers = (marked, boxed) if style == "gsm8k" else (boxed, marked)
    for reader in readers:
        found = reader(text)
        if found is not None:
            return (boxed(found) if reader is marked else None) or found or None
    return unmarked(text[-MAX_TAIL:], style)


def unmarked(text: str, style: str) -> str | None:
    """The answer of a text without marker or box."""
    if style == "math":
        formulas = list(re.finditer(r"\$\$?([^$]{1,2000})\$\$?|\\\((.{1,2000}?)\\\)|\\\[(.{1,2000}?)\\\]", text, re.S))
        announced = list(_ANSWER.finditer(text))
        if formulas and (last := formulas[-1]) and not re.search(r"\d", text[last.end() :]):
            if announced and last.start() < announced[-1].end():
                return None
            return None if _NEGATED.search(text[: last.start()][-60:]) else next(g for g in last.groups() if g)
    for announced in reversed(list(_ANSWER.finditer(text))):
        line = text[announced.end() :].split("\n", 1)[0]
        sentence = re.split(r"\.(?:\s|$)", line, maxsplit=1)[0]
        runs = list(_RUN.finditer(sentence))
        if len(runs) == 1:
            return None if _NEGATED.search(sentence[: runs[0].start()]) else _trimmed(runs[0][0])
        if runs or sentence.strip(" *:"):
            break
    runs = list(_RUN.finditer(text))
    last = runs[-1] if runs else None
    if last is None or _NEGATED.search(text[max(0, last.start() - 60) : last.start()]):
        return None
    return _trimmed(last[0])


def _trimmed(run: str) -> str:
    return plain(run).strip().rstrip(".,:;/^")
