"""What an answer is made of: lists, sets, tuples, intervals, matrices, equations, words."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MAX_DEPTH = 8
"""Answers within answers."""
MAX_ITEMS = 60
"""Of one list, set, tuple, union or matrix."""
INFINITE = "\\infty"


@dataclass(frozen=True, slots=True)
class Leaf:
    """A formula, a number with its unit, or a name."""

    text: str


@dataclass(frozen=True, slots=True)
class Words:
    """A word or sentence, in lower case."""

    text: str


@dataclass(frozen=True, slots=True)
class Items:
    """Several answers: `list`, `set`, `union` have no order; `tuple` has, and brackets: an interval is one of two."""

    kind: str
    items: tuple[Node, ...]
    brackets: str = ""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of entries; `text` is how it was written."""

    rows: tuple[tuple[Node, ...], ...]
    text: str = field(compare=False)


@dataclass(frozen=True, slots=True)
class Relation:
    """Two sides, as texts, and what stands between: `=`, `<`, `<=`, `!=`; greater-than is turned round."""

    sign: str
    left: str
    right: Node
    right_text: str


Node = Leaf | Words | Items | Matrix | Relation

_OPEN, _CLOSE = "([{", ")]}"
_EMPTY = re.compile(r"\\emptyset|\\\{\s*\\\}|(?:\\text\{)?\s*(?:no (?:real )?solutions?|none|empty set)[\s.]*\}?", re.I)
_REALS = re.compile(r"\\mathbb\s*\{?R\}?|(?:\\text\{)?\s*all real(?: number)?s\s*\}?", re.I)
_MATRIX = re.compile(
    r"\\begin\{(?P<name>[pbB]?matrix|smallmatrix|array)\}(?:\s*\{[lcr|\s]*\})?(?P<body>.*)\\end\{(?P=name)\}"
)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_JOIN = re.compile(r"\\text\{\s*,?\s*(?:and|or)\s*,?\s*\}|\\(?:lor|vee)(?![a-zA-Z])|,?\s(?:and|or)\s", re.I)
_SIGNS = re.compile(r"\\(?:leq|geq|neq|in|approx|equiv|implies|Rightarrow|to)(?![a-zA-Z])|[<>]=?|!=|=")
_TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_SHORT = {"\\leq": "<=", "\\geq": ">=", "\\neq": "!=", "\\in": "in", "\\approx": "~", "\\equiv": "==",
          "\\implies": "~", "\\Rightarrow": "~", "\\to": "to"}  # fmt: skip
_ABSOLUTE = re.compile(r"\|\s*[a-zA-Z]\s*\|")
_UNEQUAL = re.compile(r"\\(?:leq|geq)(?![a-zA-Z])|[<>]")
_CUP = re.compile(r"\\cup(?![a-zA-Z])")
_BUILDER = re.compile(r"\s*[a-zA-Z]\s*(?:\\in\s*(?:\\mathbb\{R\}|R)\s*)?(?:\\mid|\||:)")
_SIMPLE_NAME = re.compile(r"[a-zA-Z]|\\(?:alpha|beta|gamma|theta|lambda|mu|phi|omega|rho|sigma|tau|epsilon|delta)")


def places(text: str, wanted: str) -> list[int]:
    """Where a character of `wanted` stands outside all brackets; an interval's brackets need not match."""
    found: list[int] = []
    depth = at = 0
    while at < len(text):
        character = text[at]
        if text.startswith(("\\begin", "\\langle"), at):
            depth += 1
        elif text.startswith(("\\end", "\\rangle"), at):
            depth -= 1
        if character == "\\" and text[at + 1 : at + 2] in ("{", "}", "\\"):
            at += 1
            character = text[at] if text[at] != "\\" else ""
        if character and character in _OPEN:
            depth += 1
        elif character and character in _CLOSE:
            depth -= 1
        elif depth == 0 and character and character in wanted:
            found.append(at)
        at += 1
    return found


def cut(text: str, at: list[tuple[int, int]]) -> list[str]:
    """The pieces between the stretches (start, end)."""
    edges = [0, *(edge for stretch in at for edge in stretch), len(text)]
    return [text[start:end].strip() for start, end in zip(edges[::2], edges[1::2], strict=True)]


def outside(text: str, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    """Matches of `pattern` that begin outside all brackets."""
    matches = list(pattern.finditer(text))
    if not matches:
        return []
    free = set(places(text, "".join({match[0][0] for match in matches})))
    return [match for match in matches if match.start() in free]


def read(text: str, depth: int = 0) -> Node:
    """The node of a tidied text."""
    text = _peel(text)
    if depth > 2 * MAX_DEPTH or not text:
        return Leaf(text)
    if _EMPTY.fullmatch(text):
        return Items("set", ())
    if _REALS.fullmatch(text):
        return Items("tuple", (Leaf("-" + INFINITE), Leaf(INFINITE)), "()")
    for reader in (_words, _matrix, _joined, _union, _relation, _bracketed, _plus_minus):
        found = reader(text, depth + 1)
        if found is not None:
            return found
    return Leaf(re.sub(r"^\+\s*(?=\\infty$)", "", text))


def _peel(text: str) -> str:
    text = text.strip(" .,;:")
    while text.startswith("{") and closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip(" .,;:")
    return text


def closing(text: str, at: int) -> int:
    """Where the bracket that opens at `at` closes, or -1."""
    depth = 0
    skip = False
    for place in range(at, len(text)):
        character = text[place]
        if skip:
            skip = False
            if character not in "{}":
                continue
        elif character == "\\":
            skip = True
            continue
        depth += (character in _OPEN) - (character in _CLOSE)
        if depth == 0:
            return place
    return -1


def _words(text: str, depth: int) -> Node | None:
    whole = _TEXT.fullmatch(text)
    if whole is not None:
        inner = whole[1].strip(" .,;:")
        choice = re.fullmatch(r"\(?([A-Z])\)?", inner)
        if choice is not None:
            return Leaf(choice[1])
        if measured := re.fullmatch(r"([-+]?[\d.,/ ]*\d)\s*([a-zA-Z].*)", inner):
            return read(f"{measured[1]}\\text{{{measured[2]}}}", depth)
        parts = [part for part in re.split(r"[,;]|,?\s(?:and|or)\s", inner) if part.strip()]
        if 1 < len(parts) <= MAX_ITEMS:
            return Items("list", tuple(read(f"\\text{{{part}}}", depth) for part in parts))
        return Words(_spelled(inner)) if re.search(r"[a-zA-Z]{2}", inner) else read(inner, depth)
    bare = _TEXT.sub(r" \1 ", text)
    if re.search(r"[\\\d=<>^_+*/{}|]", bare):
        return None
    is_sentence = re.search(r"[a-zA-Z]{2,}\s+[a-zA-Z]{2,}", bare) or re.search(r"[a-zA-Z]{4,}", bare)
    joined = outside(text, _JOIN) or places(text, ",;")
    return Words(_spelled(bare)) if is_sentence and not joined else None


def _spelled(text: str) -> str:
    return re.sub(r"^(?:the|an?) ", "", " ".join(re.sub(r"[^\w\s'-]", " ", text).lower().split()))


def _matrix(text: str, depth: int) -> Node | None:
    found = _MATRIX.fullmatch(text)
    if found is None or "\\begin" in found["body"]:
        return None
    body = re.sub(r"\\\\\s*\[[^\[\]]*\]|\\hline", lambda m: "\\\\" if m[0][1] == "\\" else "", found["body"])
    rows = [row for row in body.replace("\\cr", "\\\\").split("\\\\") if row.strip()]
    if len(rows) > MAX_ITEMS:
        return None
    cells = tuple(tuple(read(cell, depth) for cell in row.split("&")) for row in rows)
    return Matrix(cells, text)


def _joined(text: str, depth: int) -> Node | None:
    """Answers separated by commas, "and" or "or"."""
    words = outside(text, _JOIN)
    stretches = [(match.start(), match.end()) for match in words]
    taken = {at for start, end in stretches for at in range(start, end)}
    stretches += [(at, at + 1) for at in places(text, ",;") if at not in taken]
    parts = [part for part in cut(text, sorted(stretches)) if part] if stretches else []
    if not parts or len(parts) > MAX_ITEMS:
        return None
    items = tuple(read(part, depth) for part in parts)
    if len(items) == 1:
        return items[0]
    if all(isinstance(item, Items) and item.kind == "tuple" and outside(part, _UNEQUAL)
           for item, part in zip(items, parts, strict=True)):  # fmt: skip
        is_and = bool(words) and all("nd" in match[0].lower() for match in words)
        return _meeting(items) if is_and else Items("union", items)
    return Items("list", items)


def _meeting(items: tuple[Node, ...]) -> Node | None:
    """x > 1 and x < 3 as one interval."""
    halves = [item for item in items if isinstance(item, Items)]
    lower = [half for half in halves if half.items[1] == Leaf(INFINITE)]
    upper = [half for half in halves if half.items[0] == Leaf("-" + INFINITE)]
    if len(halves) != 2 or len(lower) != 1 or len(upper) != 1:
        return Items("list", items)
    ends = (lower[0].items[0], upper[0].items[1])
    return Items("tuple", ends, lower[0].brackets[0] + upper[0].brackets[1])


def _union(text: str, depth: int) -> Node | None:
    found = outside(text, _CUP)
    if not found:
        return None
    parts = cut(text, [(match.start(), match.end()) for match in found])
    if member := re.fullmatch(r"[^()\[\]{}]*\\in(?![a-zA-Z])(.*)", parts[0]):
        parts[0] = member[1]
    return Items("union", tuple(read(part, depth) for part in parts)) if len(parts) <= MAX_ITEMS else None


def _relation(text: str, depth: int) -> Node | None:
    found = outside(text, _SIGNS)
    if not found:
        return None
    signs = [_SHORT.get(match[0], match[0]) for match in found]
    sides = cut(text, [(match.start(), match.end()) for match in found])
    if "~" in signs:
        exact, rounded = text[: found[signs.index("~")].start()].strip(), sides[-1]
        return read(exact or rounded, depth)
    if not sides[0] and len(sides) == 2:
        return read(sides[1], depth) if signs == ["="] else None
    if not all(sides):
        return None
    if set(signs) == {"="}:
        return Relation("=", sides[0], read(sides[-1], depth), sides[-1])
    if signs[0] == "in" and len(signs) == 1:
        return read(sides[1], depth)
    interval = _interval(sides, signs, depth)
    if interval is not None or len(signs) > 1:
        return interval
    (sign,) = signs
    if sign in (">", ">="):
        sides, sign = sides[::-1], _TURNED[sign]
    return Relation(sign, sides[0], read(sides[1], depth), sides[1])


def _interval(sides: list[str], signs: list[str], depth: int) -> Node | None:
    """x < 3, 1 < x <= 3 and their mirror images as intervals, if x is the only variable."""
    if not all(sign in _TURNED for sign in signs) or len({sign[0] for sign in signs}) != 1:
        return None
    if signs[0][0] == ">":
        sides, signs = sides[::-1], [_TURNED[sign] for sign in signs[::-1]]
    if len(sides) == 3 and _SIMPLE_NAME.fullmatch(sides[1]):
        brackets = ("[" if signs[0] == "<=" else "(") + ("]" if signs[1] == "<=" else ")")
        return Items("tuple", (read(sides[0], depth), read(sides[2], depth)), brackets)
    if len(sides) != 2:
        return None
    if _ABSOLUTE.fullmatch(sides[0]) and not _has_variable(sides[1]):
        brackets = "[]" if signs[0] == "<=" else "()"
        return Items("tuple", (read(f"-({sides[1]})", depth), read(sides[1], depth)), brackets)
    if _SIMPLE_NAME.fullmatch(sides[0]) and not _has_variable(sides[1]):
        return Items("tuple", (Leaf("-" + INFINITE), read(sides[1], depth)), "(" + ("]" if signs[0] == "<=" else ")"))
    if _SIMPLE_NAME.fullmatch(sides[1]) and not _has_variable(sides[0]):
        return Items("tuple", (read(sides[0], depth), Leaf(INFINITE)), ("[" if signs[0] == "<=" else "(") + ")")
    return None


def _has_variable(text: str) -> bool:
    letters = re.sub(r"\\(?!alpha|beta|theta|lambda)[a-zA-Z]+", "", text)
    return re.search(r"(?<![\\a-zA-Z])[a-df-hj-zA-Z]", letters) is not None


def _bracketed(text: str, depth: int) -> Node | None:
    escaped = text.startswith("\\{")
    if text.startswith("\\langle") and text.endswith("\\rangle"):
        inner, brackets = text[7:-7], "()"
    elif (escaped or text[0] in "([") and closing(text, int(escaped)) == len(text) - 1:
        inner, brackets = (text[2:-2], "{}") if escaped else (text[1:-1], text[0] + text[-1])
    else:
        return None
    if escaped and (condition := _BUILDER.match(inner)):
        return read(inner[condition.end() :], depth)
    parts = cut(inner, [(at, at + 1) for at in places(inner, ",;")])
    if len(parts) > MAX_ITEMS:
        return None
    if escaped:
        return Items("set", tuple(read(part, depth) for part in parts if part))
    if len(parts) == 1:
        return read(inner, depth) if brackets in ("()", "[]") else None
    if not all(parts):
        return None
    items = tuple(read(part, depth) for part in parts)
    if items[0] == Leaf("-" + INFINITE):
        brackets = "(" + brackets[1]
    if items[-1] == Leaf(INFINITE):
        brackets = brackets[0] + ")"
    return Items("tuple", items, brackets)


def _plus_minus(text: str, depth: int) -> Node | None:
    if not re.search(r"\\[pm][mp](?![a-zA-Z])", text):
        return None
    both = [re.sub(r"\\mp(?![a-zA-Z])", other, re.sub(r"\\pm(?![a-zA-Z])", sign, text)) for sign, other in ("+-", "-+")]
    return Items("list", tuple(read(one.strip().lstrip("+"), depth) for one in both))
