"""Body of a pool's process: formulas that only a computer algebra system reads, by math-verify."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from tba.rewards.answers.pool import MAX_MEMORY
from tba.rewards.child import requests

MAX_POWER = 10_000
"""Largest exponent, factorial or bound of a sum that is calculated with."""
ROUNDING = 15
"""Decimals at which math-verify compares a decimal with something else: 0.333333 is not a third."""


def serve(connection: Connection, limit_s: str) -> None:
    """One bool per pair of texts."""
    restrain()
    equal("\\frac{1}{2}", "\\sqrt{x}")  # loads what the first answer would have to wait for
    for gold, answer in requests(connection, float(limit_s)):
        connection.send(equal(gold, answer))


def restrain() -> None:
    """Bounds memory, forbids writing files, and keeps the parser's own messages off the terminal."""
    import math_verify  # noqa: F401  # before files can no longer be written: importing may write byte code

    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)


def equal(gold: str, answer: str) -> bool:
    """Whether math-verify finds two texts equal; whatever goes wrong inside is a no."""
    import sympy
    from math_verify.grader import verify

    try:
        left, right = read(gold), read(answer)
        if is_dangerous(left) or is_dangerous(right):
            return False
        if isinstance(left, sympy.Symbol) or isinstance(right, sympy.Symbol):
            return bool(left == right)  # math-verify would compare them as texts
        return verify(left, right, float_rounding=ROUNDING, numeric_precision=50, timeout_seconds=None)
    except Exception:
        # Parser and algebra system raise anything for texts that are no mathematics.
        return False


def read(text: str) -> Any:
    """A sympy object: LaTeX through its grammar only, never through Python's."""
    from latex2sympy2_extended.latex2sympy2 import latex2sympy
    from math_verify.grader import should_treat_as_complex

    return latex2sympy(
        text, is_real=not should_treat_as_complex(text), convert_degrees=False, normalization_config=None
    )


def _parts(tree: Any) -> Iterator[Any]:
    import sympy

    return iter(sympy.preorder_traversal(tree))


def is_dangerous(tree: Any) -> bool:
    """Whether evaluating it could take a number beyond all bounds: towers of powers, large factorials, long sums."""
    for node in _parts(tree):
        name = type(node).__name__
        if name == "Pow" and is_large(node.exp):
            return True
        if name in ("factorial", "factorial2", "subfactorial", "gamma", "binomial") and any(map(is_large, node.args)):
            return True
        if name in ("Sum", "Product") and any(is_large(bound) for _, *bounds in node.limits for bound in bounds):
            return True
    return False


def is_large(value: Any) -> bool:
    """Whether it is a number beyond `MAX_POWER`, or a calculation whose size is not seen at once."""
    if value.is_Number:
        return bool(abs(value) > MAX_POWER) and value.is_finite is not False
    steep = ("factorial", "factorial2", "gamma", "binomial")
    return any(
        type(part).__name__ in steep or (part.is_Pow and part.exp.is_Number and abs(part.exp) > 1)
        for part in _parts(value)
    )
