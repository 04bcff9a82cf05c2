"""Formulas in LaTeX as trees: read by recursive descent, nothing of them is ever run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from tba.rewards.answers.numbers import MAX_DIGITS

Tree = tuple
"""("num", Fraction) | ("var", name) | ("const", name) | (operation, Tree, ...)."""

MAX_TOKENS = 400
MAX_DEPTH = 60

_FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh ln log exp lg max min gcd lcm"
FUNCTIONS = frozenset(re.findall(r"\w+", _FUNCTIONS))
"""Commands that take the formula behind them as their argument."""
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan", "cot": "arccot"}
_LETTERS = """alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi
omega Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega ell"""
_GREEK = frozenset(re.findall(r"\w+", _LETTERS))
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d*)?|\.\d+)|\\(?P<command>[a-zA-Z]+)|(?P<letter>[a-zA-Z]'*)"
    r"|(?P<sign>\*\*|[-+*/^_!|(){}\[\],])|\\(?P<escape>[{}|]))"
)
_CLOSERS = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}


class UnreadableError(ValueError):
    """The text is no formula that is read here."""


def parse(text: str) -> Tree:
    """The tree of a tidied formula.

    Raises:
        UnreadableError: it is none, or beyond `MAX_TOKENS` or `MAX_DEPTH`.
    """
    reader = _Reader(_tokens(text))
    tree = reader.sum(0)
    if reader.here:
        raise UnreadableError(f"{reader.here!r} at token {reader.at} is not expected there")
    return tree


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    at, end = 0, len(text.rstrip())
    while at < end:
        found = _TOKEN.match(text, at)
        if found is None or len(tokens) >= MAX_TOKENS:
            raise UnreadableError(f"character {at} of a formula of {end} is not read here")
        if found["command"] or found["escape"]:
            tokens.append("\\" + (found["command"] or found["escape"]))
        else:
            tokens.append("^" if found["sign"] == "**" else found[0].strip())
        at = found.end()
    if not tokens:
        raise UnreadableError("an empty text is no formula")
    return tokens


class _Reader:
    """A place in a list of tokens; every method reads one kind of thing from there."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = [*tokens, ""]
        self.at = 0
        self.bars = 0
        """Open absolute values: inside one, a bar closes it."""

    @property
    def here(self) -> str:
        return self.tokens[self.at]

    def take(self, expected: str = "") -> str:
        token = self.here
        if not token or (expected and token != expected):
            raise UnreadableError(f"{token!r} at token {self.at} where {expected or 'more'!r} is expected")
        self.at += 1
        return token

    def accept(self, *wanted: str) -> str:
        if self.here and self.here in wanted:
            return self.take()
        return ""

    @staticmethod
    def deeper(depth: int) -> int:
        if depth > MAX_DEPTH:
            raise UnreadableError(f"a formula nested deeper than {MAX_DEPTH} is not read here")
        return depth + 1

    def sum(self, depth: int) -> Tree:
        tree = self.product(self.deeper(depth))
        while sign := self.accept("+", "-"):
            right = self.product(depth + 1)
            tree = ("add", tree, right if sign == "+" else ("neg", right))
        return tree

    def product(self, depth: int) -> Tree:
        if self.accept("-"):
            return ("neg", self.product(self.deeper(depth)))
        if self.accept("+"):
            return self.product(self.deeper(depth))
        tree = self.power(depth)
        while True:
            if self.accept("*", "\\cdot", "\\times"):
                tree = ("mul", tree, self.signed(depth))
            elif self.accept("/"):
                tree = ("div", tree, self.signed(depth))
            elif self.starts_factor():
                tree = self.beside(tree, depth)
            else:
                return tree

    def signed(self, depth: int) -> Tree:
        if self.accept("-"):
            return ("neg", self.power(depth))
        self.accept("+")
        return self.power(depth)

    def beside(self, left: Tree, depth: int) -> Tree:
        """Two factors side by side: a product, but an integer right before a numeric fraction is a mixed number."""
        before, is_digits = self.tokens[self.at - 1], self.here[:1].isdigit()
        if is_digits and (before[:1].isdigit() or left[0] == "frac"):
            raise UnreadableError(f"the number {self.here} directly behind another is not read here")
        right = self.power(depth)
        is_mixed = left[0] == "num" and before.isdigit() and right[0] == "frac" and all(
            part[0] == "num" and part[1].denominator == 1 for part in right[1:]
        )  # fmt: skip
        return ("add" if is_mixed else "mul", left, right)

    def starts_factor(self) -> bool:
        token = self.here
        if token == "|":
            return not self.bars
        return bool(token) and token not in ("+", "-", "*", "/", "^", "_", "!", ")", "]", "}", "\\}", ",", "\\rfloor",
                                             "\\rceil", "\\cdot", "\\times", "\\|")  # fmt: skip

    def power(self, depth: int) -> Tree:
        tree = self.atom(depth + 1)
        while True:
            if self.accept("!"):
                tree = ("factorial", tree)
            elif self.accept("^"):
                if self.accept("\\circ"):
                    tree = ("div", ("mul", tree, ("const", "pi")), ("num", Fraction(180)))
                else:
                    tree = ("pow", tree, self.script(depth))
            else:
                return tree

    def script(self, depth: int) -> Tree:
        """What stands behind `^`: a group, or an atom with its sign; a number is taken whole."""
        if self.accept("-"):
            return ("neg", self.script(self.deeper(depth)))
        tree = self.atom(depth + 1)
        return ("pow", tree, self.script(self.deeper(depth))) if self.accept("^") else tree

    def group(self, depth: int, opener: str = "{") -> Tree:
        self.take(opener)
        bars, self.bars = self.bars, 0
        tree = self.sum(depth + 1)
        self.bars = bars
        self.take(_CLOSERS[opener])
        return tree

    def atom(self, depth: int) -> Tree:
        token = self.here
        if token[:1].isdigit() or token[:1] == ".":
            if len(token) > MAX_DIGITS:
                raise UnreadableError(f"a number of {len(token)} digits is not calculated with")
            return ("num", Fraction(self.take()))
        if token in _CLOSERS:
            return self.group(depth, token)
        if token == "|":
            self.take()
            return self.between(depth, "|", "abs")
        if token[:1].isalpha():
            return self.variable(self.take())
        if token.startswith("\\"):
            return self.command(self.take()[1:], depth)
        raise UnreadableError(f"{token!r} at token {self.at} begins no factor")

    def between(self, depth: int, closer: str, name: str) -> Tree:
        self.bars += 1
        tree = self.sum(depth + 1)
        self.bars -= 1
        self.take(closer)
        return (name, tree)

    def variable(self, name: str) -> Tree:
        if self.here == "_":
            self.take()
            name = f"{name}_{self.subscript()}"
        return ("const", name) if name in ("e", "i") else ("var", name)

    def subscript(self) -> str:
        if not self.accept("{"):
            return self.take()
        parts: list[str] = []
        while not self.accept("}"):
            parts.append(self.take())
        return "".join(parts)

    def command(self, name: str, depth: int) -> Tree:
        if name == "frac":
            return ("frac", self.group(depth), self.group(depth))
        if name == "binom":
            return ("binom", self.group(depth), self.group(depth))
        if name == "sqrt":
            index = self.group(depth, "[") if self.here == "[" else ("num", Fraction(2))
            return ("root", self.group(depth) if self.here == "{" else self.atom(depth + 1), index)
        if name in ("lfloor", "lceil"):
            return self.between(depth, "\\r" + name[1:], name[1:])
        if name == "pi":
            return ("const", "pi")
        if name in _GREEK:
            return self.variable("\\" + name)
        if name in FUNCTIONS:
            return self.function(name, depth)
        raise UnreadableError(f"the command \\{name} is not read here")

    def function(self, name: str, depth: int) -> Tree:
        power: Tree | None = None
        bottom: Tree = ("num", Fraction(10)) if name == "lg" else ("const", "e")
        while self.here in ("^", "_"):
            if self.take() == "_":
                bottom = self.script(depth)
            else:
                power = self.script(depth)
        if power == ("neg", ("num", Fraction(1))) and name in _INVERSE:
            name, power = _INVERSE[name], None
        if name in ("max", "min", "gcd", "lcm"):
            return (name, *self.arguments(depth))
        argument = self.argument(depth)
        tree = ("log", argument, bottom) if name in ("log", "ln", "lg") else (name, argument)
        return tree if power is None else ("pow", tree, power)

    def arguments(self, depth: int) -> list[Tree]:
        opener = self.accept("(", "\\{", "{")
        found = [self.sum(depth + 1)]
        while self.accept(","):
            found.append(self.sum(depth + 1))
        self.take(_CLOSERS.get(opener, ")"))
        return found

    def argument(self, depth: int) -> Tree:
        """Of a function: a bracket, or the factors that follow up to the next operator or function."""
        if self.here in _CLOSERS:
            return self.group(depth, self.here)
        tree = self.power(depth + 1)
        while self.starts_factor() and self.here.lstrip("\\") not in FUNCTIONS and self.here != "(":
            tree = self.beside(tree, depth + 1)
        return tree
