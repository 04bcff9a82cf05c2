"""Formulas compared by their values at many digits, within bounds on every intermediate."""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tba.rewards.answers.expressions import Tree

if TYPE_CHECKING:
    from mpmath.ctx_mp import MPContext

DIGITS = 60
"""Of every calculation, besides as many as the longest number in the formula has."""
AGREE = 40
"""Digits to which two values must agree to be one; no pair of short formulas comes that close by chance."""
MAX_BITS = 2_000_000
"""Of the exponent of an intermediate: 2**MAX_BITS is not passed, nor its inverse."""
MAX_ANGLE = 10**12
POINTS = 5
"""Places at which formulas with variables are compared; the last two have negative coordinates too."""


class NoValueError(ValueError):
    """There is none: a division by zero, or something beyond the bounds."""


@lru_cache(maxsize=64)
def _context(thread: int, digits: int) -> MPContext:
    """One per thread, since the precision is the context's."""
    from mpmath.ctx_mp import MPContext

    context = MPContext()
    context.dps = digits
    return context


def variables(tree: Tree) -> frozenset[str]:
    """Names of the variables in it."""
    if tree[0] == "var":
        return frozenset((tree[1],))
    return frozenset().union(*(variables(part) for part in tree[1:] if isinstance(part, tuple)))


def longest(tree: Tree) -> int:
    """Digits of the longest number in it."""
    if tree[0] == "num":
        return len(str(tree[1].numerator)) + len(str(tree[1].denominator))
    return max((longest(part) for part in tree[1:] if isinstance(part, tuple)), default=1)


def place(name: str, point: int) -> Fraction:
    """The value of variable `name` at a point: the same in every formula, between 1/3 and 3 or its negative."""
    drawn = zlib.crc32(f"{point} {name}".encode())
    value = Fraction(1, 3) + Fraction(drawn % 99_991, 37_497)
    return -value if point >= POINTS - 2 and drawn >> 20 & 1 else value


def same_value(left: Tree, right: Tree) -> bool:
    """Whether two formulas have one value wherever both are real (or at all, where neither ever is)."""
    if left == right:
        return True
    names = variables(left) | variables(right)
    digits = DIGITS + longest(left) + longest(right)
    compared = 0
    for point in range(POINTS if names else 1):
        at = {name: place(name, point) for name in names}
        try:
            first, second = evaluate(left, at, digits), evaluate(right, at, digits)
        except NoValueError:
            continue
        if point >= POINTS - 2 and not (first.imag == 0 and second.imag == 0):
            continue
        if not agree(first, second, lambda more, at=at: (evaluate(left, at, more), evaluate(right, at, more)), digits):
            return False
        compared += 1
    return compared >= (2 if names else 1)


def same_ratio(left: Tree, right: Tree, *, is_positive: bool = False) -> bool:
    """Whether `left` is a constant times `right`, not zero (and positive, if asked): equations of the same points."""
    names = variables(left) | variables(right)
    if not names or variables(left) != variables(right):
        return False
    ratio: Any = None
    compared = 0
    for point in range(POINTS):
        at = {name: place(name, point) for name in names}
        try:
            first, second = (evaluate(tree, at, DIGITS) for tree in (left, right))
        except NoValueError:
            continue
        if first == 0 or second == 0:
            return False
        if ratio is None:
            ratio = first / second
        if abs(first / second - ratio) > abs(ratio) / 10**AGREE:
            return False
        compared += 1
    return compared >= 3 and (not is_positive or (ratio.imag == 0 and ratio.real > 0))


def agree(first: Any, second: Any, again: Callable[[int], tuple[Any, Any]], digits: int) -> bool:
    """Whether two values are one to `AGREE` digits; a tiny one that changes with the precision counts as zero."""
    if first == second:
        return True
    small = first.context.mpf(10) ** (-digits // 2)
    if abs(first) < small or abs(second) < small:
        more, others = again(3 * digits)
        first, second = _settled(first, more), _settled(second, others)
        if first == 0 or second == 0:
            return first == second
    return abs(first - second) <= max(abs(first), abs(second)) / 10 ** (digits - DIGITS + AGREE)


def _settled(value: Any, precise: Any) -> Any:
    return precise if abs(value - precise) <= abs(precise) / 10**10 else 0


def evaluate(tree: Tree, at: Mapping[str, Fraction], digits: int) -> Any:
    """Its value, a real or complex number of `digits` digits.

    Raises:
        NoValueError: a division by zero, or an intermediate beyond the bounds.
    """
    context = _context(threading.get_ident(), digits)
    try:
        return _value(tree, at, context)
    except (ArithmeticError, ValueError, OverflowError, NotImplementedError, TypeError) as error:
        raise NoValueError(f"no value: {type(error).__name__} in a formula that begins with {tree[0]}") from error


def _value(tree: Tree, at: Mapping[str, Fraction], context: Any) -> Any:
    kind = tree[0]
    if kind == "num":
        return context.mpf(tree[1].numerator) / tree[1].denominator
    if kind == "var":
        return context.mpf(at[tree[1]].numerator) / at[tree[1]].denominator
    if kind == "const":
        return {"pi": +context.pi, "e": +context.e, "i": context.mpc(0, 1)}[tree[1]]
    value = _OPERATIONS[kind](context, *(_value(part, at, context) for part in tree[1:]))
    if isinstance(value, context.mpc) and value.imag == 0:
        value = value.real
    return bounded(value, context)


def bounded(value: Any, context: Any) -> Any:
    """`value`, if it is finite and neither too large nor too small to go on with."""
    if not context.isfinite(value):
        raise NoValueError(f"a value that is not finite ({type(value).__name__})")
    if value != 0 and abs(context.mag(value)) > MAX_BITS:
        raise NoValueError(f"a value beyond 2 to the power of {MAX_BITS} either way")
    return value


def _power(context: Any, base: Any, exponent: Any) -> Any:
    if base == 0:
        if exponent.imag != 0 or exponent.real <= 0:
            raise NoValueError("zero to a power that is not positive has no value")
        return context.mpf(0)
    if context.mag(exponent) > 40 or abs(exponent) * max(abs(context.mag(base)), 1) > MAX_BITS:
        raise NoValueError(f"a power beyond 2 to the power of {MAX_BITS} either way")
    return context.power(base, exponent)


def _root(context: Any, value: Any, index: Any) -> Any:
    """Odd roots of negative numbers are real."""
    if index == 0:
        raise NoValueError("a root of index zero has no value")
    if value.imag == 0 and value.real < 0 and context.isint(index) and int(index) % 2:
        return -_power(context, -value, 1 / index)
    return _power(context, value, 1 / index)


def _angle(name: str) -> Callable[[Any, Any], Any]:
    def function(context: Any, value: Any) -> Any:
        if abs(value) > MAX_ANGLE:
            raise NoValueError(f"{name} of an angle beyond {MAX_ANGLE} is not calculated")
        return getattr(context, name)(value)

    return function


def _factorial(context: Any, value: Any) -> Any:
    """Between integers the gamma function, so that formulas in n can be compared anywhere."""
    if value.imag != 0 or abs(value) > 100_000:
        raise NoValueError("the factorial of what is not real or beyond 100000 is not calculated")
    return context.factorial(value)


def _binomial(context: Any, upper: Any, lower: Any) -> Any:
    if abs(upper) > 10**6 or abs(lower) > 10**6:
        raise NoValueError("a binomial coefficient beyond a million is not calculated")
    return context.binomial(upper, lower)


def _logarithm(context: Any, value: Any, bottom: Any) -> Any:
    return context.log(value) / context.log(bottom)


def _whole(function: Callable[..., int]) -> Callable[..., Any]:
    def calculate(context: Any, *values: Any) -> Any:
        if not all(context.isint(value) and abs(value) < 10**40 for value in values):
            raise NoValueError("a common divisor or multiple of what are no integers is not calculated")
        return context.mpf(function(*(int(value) for value in values)))

    return calculate


def _extreme(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda context, *values: function(*(value.real for value in values))


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda context, left, right: left + right,
    "neg": lambda context, value: -value,
    "mul": lambda context, left, right: left * right,
    "div": lambda context, upper, lower: upper / lower,
    "frac": lambda context, upper, lower: upper / lower,
    "pow": _power,
    "root": _root,
    "abs": lambda context, value: abs(value),
    "floor": lambda context, value: context.floor(value),
    "ceil": lambda context, value: context.ceil(value),
    "factorial": _factorial,
    "binom": _binomial,
    "log": _logarithm,
    **{name: _angle(name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp")},
    **{f"arc{name}": _angle(f"a{name}") for name in ("sin", "cos", "tan", "cot")},
    "gcd": _whole(math.gcd),
    "lcm": _whole(math.lcm),
    "max": _extreme(max),
    "min": _extreme(min),
}
