"""Two answers compared by what they are made of; what is not read here goes to math-verify."""

from __future__ import annotations

import re
from collections.abc import Callable

from tba.rewards.answers.characters import squeeze, tidy
from tba.rewards.answers.expressions import Tree, UnreadableError, parse
from tba.rewards.answers.extraction import MAX_ANSWER
from tba.rewards.answers.structure import INFINITE, Items, Leaf, Matrix, Node, Relation, Words, places, read
from tba.rewards.answers.units import quantity, same_quantity, split_unit
from tba.rewards.answers.values import same_ratio, same_value

MAX_COMPARED = 400
"""Comparisons of parts that one answer may take: sets are matched pair by pair."""
MAX_SYMBOLIC = 400
"""Characters beyond which no formula is handed to the algebra system."""

Equal = Callable[[str, str], bool]
"""(gold, answer) -> whether the algebra system shows them equal."""

_NAME = re.compile(
    r"(?:\\?[a-zA-Z]+|\\text\{[^{}]*\})'*(?:_(?:\w|\{[^{}]*\}))?'*"
    r"|(?![abcknmtxyz]\()[a-zA-Z]'*(?:_(?:\w|\{[^{}]*\}))?(?:\^\{?(?:-1|\(?\w\)?)\}?)?\([^=]*\)"
    r"|\(\s*[a-z](?:\s*,\s*[a-z])+\s*\)|m?\s*\\angle\s*[A-Z]{1,3}|\\triangle\s*[A-Z]{3}|\|[A-Z]{2}\||\\overline\{[A-Z]{2}\}|\[[A-Z]{3,6}\]"
    r"|\\(?:sin|cos|tan|log|ln)\s*\(?\s*(?:\\?[a-zA-Z]+)\s*\)?|\\(?:max|min|lim|gcd|lcm)\s*\(?[^=]*\)?|\\mathbb\{?[A-Z]\}?\([^=]*\)"
)
_BASED = re.compile(r"([0-9A-F]+)\s*_\s*\{?\s*(?:\\text\{)?\s*(\d+|[a-z]+)\s*\}?\}?")
_CHOICE = re.compile(r"(?:\\text\{)?\s*\(?([A-J])\)?\s*[.:]?\s*\}?")
_CHOSEN = re.compile(r"(?:\\text\{)?\s*(?:\(([A-J])\)|([A-J])(?:[.:)]\s*\}?\s|\)|\}\s*:))")
_READINGS = re.compile(r"(?<![\d,])\d{1,3}(?:,\d{3})+(?![\d,])")


def same_answer(gold: str, answer: str, equal: Equal) -> bool:
    """Whether two answers, as written, are the same; `equal` is asked about formulas that are not read here."""
    if len(gold) > MAX_ANSWER or len(answer) > MAX_ANSWER:
        return "".join(gold.split()) == "".join(answer.split())
    gold, answer = tidy(gold), tidy(answer)
    squeezed = squeeze(gold)
    if squeezed == squeeze(answer):
        return bool(squeezed)
    if not squeezed or not answer:
        return False
    left, right = quantity(gold), quantity(answer)
    if left is not None and right is not None:
        return same_quantity(left, right)
    for one, other in ((gold, answer), (answer, gold)):
        if (letter := _CHOICE.fullmatch(one)) and (chosen := _CHOSEN.match(other)):
            return letter[1] == (chosen[1] or chosen[2])
    # A comma between groups of three digits separates thousands or items: either reading may hold, on both sides.
    return any(
        _Comparison(equal).nodes(read(one), read(other))
        for one, other in dict.fromkeys([(ungrouped(gold), ungrouped(answer)), (gold, answer)])
    )


def ungrouped(text: str) -> str:
    """Without thousands separators; within brackets commas separate items."""
    if not _READINGS.search(text):
        return text
    free = set(places(text, ","))
    return _READINGS.sub(lambda run: run[0].replace(",", "" if run.start() + run[0].find(",") in free else ","), text)


class _Comparison:
    """One comparison of two answers, within a number of parts."""

    def __init__(self, equal: Equal) -> None:
        self._equal = equal
        self._left = MAX_COMPARED

    def nodes(self, gold: Node, answer: Node) -> bool:
        self._left -= 1
        if self._left < 0:
            return False
        if gold == answer:
            return True
        if isinstance(gold, Relation) or isinstance(answer, Relation):
            return self.relations(gold, answer)
        if isinstance(gold, Items) or isinstance(answer, Items):
            return self.items(gold, answer)
        if isinstance(gold, Matrix) or isinstance(answer, Matrix):
            return self.matrices(gold, answer)
        if isinstance(gold, Words) or isinstance(answer, Words):
            return _spelling(gold) == _spelling(answer)
        return self.leaves(gold.text, answer.text)

    def matrices(self, gold: Node, answer: Node) -> bool:
        if not isinstance(gold, Matrix) or not isinstance(answer, Matrix):
            texts = [node.text for node in (gold, answer) if isinstance(node, (Matrix, Leaf))]
            may_ask = len(texts) == 2 and all("\\begin" in text and _is_symbolic(text) for text in texts)
            return may_ask and self._equal(*texts)
        if [len(row) for row in gold.rows] != [len(row) for row in answer.rows]:
            return False
        pairs = zip(gold.rows, answer.rows, strict=True)
        return all(self.nodes(one, other) for left, right in pairs for one, other in zip(left, right, strict=True))

    def items(self, gold: Node, answer: Node) -> bool:
        left, right = _as_items(gold), _as_items(answer)
        kinds = {left.kind, right.kind}
        if kinds == {"tuple"}:
            same_brackets = left.brackets == right.brackets or len(left.items) > 2
            return same_brackets and self.in_order(left.items, right.items)
        if kinds == {"tuple", "list"}:
            return {left.brackets, right.brackets} == {"", "()"} and self.in_order(left.items, right.items)
        if "tuple" in kinds:
            return False
        if "set" in kinds:
            return self.covers(left.items, right.items) and self.covers(right.items, left.items, is_turned=True)
        return len(left.items) == len(right.items) and self.matched(left.items, right.items)

    def in_order(self, gold: tuple[Node, ...], answer: tuple[Node, ...]) -> bool:
        """Items in their order; `x = 2` in a list may stand for the 2 in a tuple."""
        if len(gold) != len(answer):
            return False
        return all(self.nodes(one, other) for one, other in zip(gold, answer, strict=True))

    def matched(self, gold: tuple[Node, ...], answer: tuple[Node, ...]) -> bool:
        """Each item with one of its own on the other side, in any order."""
        left = list(answer)
        for item in gold:
            for at, other in enumerate(left):
                if self.nodes(item, other):
                    del left[at]
                    break
            else:
                return False
        return not left

    def covers(self, these: tuple[Node, ...], those: tuple[Node, ...], *, is_turned: bool = False) -> bool:
        """Whether each of these equals one of those."""
        return all(any(self.nodes(b, a) if is_turned else self.nodes(a, b) for b in those) for a in these)

    def relations(self, gold: Node, answer: Node) -> bool:
        if not isinstance(gold, Relation) or not isinstance(answer, Relation):
            relation, other = (gold, answer) if isinstance(gold, Relation) else (answer, gold)
            assert isinstance(relation, Relation)
            value = _assigned(relation)
            if value is None:
                return False
            return self.nodes(value, other) if relation is gold else self.nodes(other, value)
        if gold.sign != answer.sign:
            return False
        if squeeze(gold.left) == squeeze(answer.left) and self.nodes(gold.right, answer.right):
            return True
        if gold.sign in ("=", "!=") and squeeze(gold.left) == squeeze(answer.right_text):
            return squeeze(gold.right_text) == squeeze(answer.left)
        left, right = (_difference(relation) for relation in (gold, answer))
        if left is not None and right is not None:
            return same_ratio(left, right, is_positive=gold.sign in ("<", "<="))
        return False

    def leaves(self, gold: str, answer: str) -> bool:
        if squeeze(gold) == squeeze(answer):
            return True
        left, right = quantity(gold), quantity(answer)
        if left is not None and right is not None:
            return same_quantity(left, right)
        if INFINITE in gold or INFINITE in answer:
            return False
        if ":" in gold or ":" in answer:
            return self.clocks(gold, answer)
        based = _BASED.fullmatch(gold), _BASED.fullmatch(answer)
        if any(match and match[1].isalnum() and match[1][0].isdigit() for match in based):
            return bool(based[0] and based[1] and based[0].groups() == based[1].groups())
        return self.formulas(gold, answer)

    def clocks(self, gold: str, answer: str) -> bool:
        """Times and ratios, part by part."""
        left, right = gold.split(":"), answer.split(":")
        if len(left) != len(right) or not all([*left, *right]):
            return False
        return all(self.leaves(one, other) for one, other in zip(left, right, strict=True))

    def formulas(self, gold: str, answer: str) -> bool:
        left, right = split_unit(gold), split_unit(answer)
        if left.unit and right.unit and left.unit != right.unit:
            return False
        trees = _tree(left.core, left.power), _tree(right.core, right.power)
        if trees[0] is not None and trees[1] is not None:
            if same_value(trees[0], trees[1]):
                return True
            hundredths = [_tree(f"({one.core})/100", 0) if one.unit == "%" else tree
                          for one, tree in zip((left, right), trees, strict=True)]  # fmt: skip
            is_mixed = (left.unit == "%") != (right.unit == "%")
            return is_mixed and None not in hundredths and same_value(*hundredths)  # type: ignore[arg-type]
        if _is_symbolic(left.core) and _is_symbolic(right.core):
            return self._equal(left.core, right.core)
        return False


def is_name(text: str) -> bool:
    """Whether an equation with this left side says the value of something: `x`, `f(2)`, `AB`, a word, `2+3`."""
    if _NAME.fullmatch(text.strip()) is not None:
        return True
    return not re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", text))


def _assigned(relation: Relation) -> Node | None:
    """The value that an equation gives to a name on one of its sides."""
    if relation.sign != "=":
        return None
    if _NAME.fullmatch(relation.right_text) and not _NAME.fullmatch(relation.left):
        return read(relation.left)
    return relation.right if is_name(relation.left) else None


def _as_items(node: Node) -> Items:
    return node if isinstance(node, Items) else Items("list", (node,))


def _spelling(node: Node) -> str | None:
    if isinstance(node, Words):
        return node.text
    if isinstance(node, Leaf) and re.fullmatch(r"[a-zA-Z][a-zA-Z .'-]*|[a-zA-Z]{2,}[\w .'-]*", node.text):
        return node.text.lower()
    return None


def _tree(text: str, power: int) -> Tree | None:
    try:
        return parse(f"({text})*10^{power}" if power else text)
    except UnreadableError:
        return None


def _difference(relation: Relation) -> Tree | None:
    left, right = _tree(relation.left, 0), _tree(relation.right_text, 0)
    return None if left is None or right is None else ("add", left, ("neg", right))


def _is_symbolic(text: str) -> bool:
    """Whether a text may be mathematics: short, without prose, and not nested beyond what a grammar should be given."""
    bare = re.sub(r"\\(?:begin|end)\{[a-zA-Z]+\}|\\[a-zA-Z]+", "", text)
    return len(text) <= MAX_SYMBOLIC and text.count("{") < 50 and text.isascii() and not re.search(r"[a-zA-Z]{4}", bare)
