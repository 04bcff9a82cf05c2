"""Shares of problems solved, with their intervals: pass@k, votes, Wilson, bootstrap over problems."""

# Shape legend: P problems, R resamples.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

Z_95 = 1.959963984540054
"""Standard normal deviate that 95 % lie within."""
RESAMPLES = 2000
"""Times that the problems are drawn anew for a bootstrap interval."""
CHUNK = 1 << 22
"""Draws that a bootstrap holds at once."""

Interval = tuple[float, float]
"""Lower and upper end, 95 %."""


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Unbiased chance that one of k completions is right, from `right` of `samples` (arXiv 2107.03374, eq. 1)."""
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {right} right of {samples} completions.")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def wilson(right: int, total: int, z: float = Z_95) -> Interval:
    """Interval of the chance behind `right` of `total` independent trials (Wilson 1927, without continuity term).

    `(p + z^2/2n +- z sqrt(p (1-p)/n + z^2/4n^2)) / (1 + z^2/n)`
    """
    if not 0 <= right <= total or total == 0:
        raise ValueError(f"{right} right of {total} trials has no interval; give 0 to that many of at least 1.")
    share, weight = right / total, z**2 / total
    centre = (share + weight / 2) / (1 + weight)
    half = math.sqrt(share * (1 - share) * weight + weight**2 / 4) / (1 + weight)
    return (0.0 if right == 0 else centre - half, 1.0 if right == total else centre + half)


def bootstrap(value_P: Sequence[float], seed: int) -> Interval:
    """Interval of the mean over problems: 2.5 % and 97.5 % of the means of `RESAMPLES` draws of P with replacement.

    A problem's completions stay together, so that their likeness does not make the interval too narrow.
    """
    if not value_P:
        raise ValueError(f"the mean of {len(value_P)} problems has no interval; give at least 1.")
    values_P, rng = np.asarray(value_P, dtype=np.float64), np.random.default_rng(seed)
    step = max(1, CHUNK // len(values_P))
    means: list[float] = []
    while len(means) < RESAMPLES:
        size = (min(step, RESAMPLES - len(means)), len(values_P))
        means += values_P[rng.integers(len(values_P), size=size)].mean(1).tolist()
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def kinds(answers: Sequence[str | None], same: Callable[[str, str], bool]) -> list[int | None]:
    """The place of the first answer that each is one with; None where none is given. `same` says which are one."""
    firsts: list[tuple[int, str]] = []
    found: list[int | None] = []
    for place, answer in enumerate(answers):
        known = None if answer is None else next(
            (at for at, first in firsts if first == answer or same(first, answer)), place)
        if known == place and answer is not None:
            firsts.append((place, answer))
        found.append(known)
    return found


def vote_of(kinds: Sequence[int | None], rights: Sequence[bool]) -> float:
    """Chance that the answer given most often is right, ties drawn evenly; 0 if no answer is given.

    `kinds` are as the function of that name gives them; a completion without an answer has no vote.
    """
    votes = Counter(kind for kind in kinds if kind is not None)
    most = max(votes.values(), default=0)
    best = [rights[kind] for kind, count in votes.items() if count == most]
    return sum(best) / len(best) if best else 0.0
