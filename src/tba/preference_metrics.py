"""Win-rate, perplexities, KL in both directions, calibration: pure functions."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from tba import estimates
from tba.estimates import Z_95


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean and its standard error, in the unit of what was averaged."""

    value: float
    error: float
    """NaN of fewer than two independent values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WinRate:
    """How often the first of two scores was higher."""

    wins: int
    ties: int
    losses: int
    unscored: int
    """Pairs without one of the two scores; they are in none of the other numbers."""
    rate: float
    """Wins / (wins + ties + losses): a tie is no win."""
    low: float
    high: float
    """95 % Wilson interval of the rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """A row of a reliability table: predictions of one confidence."""

    low: float
    high: float
    count: int
    confidence: float
    """Mean confidence of the predictions in it; NaN of none."""
    accuracy: float
    """Share of them that are right; NaN of none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """How well the probabilities of preferences, sigmoid(margin), are those of being right."""

    accuracy: float
    """Share of pairs whose preferred one scores higher, strictly."""
    ties: int
    loss: float
    """Mean -log sigmoid(margin), nats per pair."""
    ece: float
    """Expected calibration error: mean over pairs of their bin's |accuracy - confidence|."""
    bins: tuple[Bin, ...]


def wilson(successes: int, trials: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson's interval of a proportion, see `estimates.wilson`; (NaN, NaN) of no trials."""
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials are no proportion.")
    return estimates.wilson(successes, trials, z) if trials else (math.nan, math.nan)


def win_rate(scores: Sequence[float | None], others: Sequence[float | None]) -> WinRate:
    """How often a score is strictly higher than its other (the paper's rule, arXiv 2503.18929, 5.2); None: unscored."""
    pairs = [(a, b) for a, b in zip(scores, others, strict=True) if a is not None and b is not None]
    wins, ties = sum(a > b for a, b in pairs), sum(a == b for a, b in pairs)
    low, high = wilson(wins, len(pairs))
    return WinRate(
        wins=wins, ties=ties, losses=len(pairs) - wins - ties, unscored=len(scores) - len(pairs),
        rate=wins / len(pairs) if pairs else math.nan, low=low, high=high,
    )


def perplexity(logps: Sequence[float], lengths: Sequence[int]) -> float:
    """exp(mean negative log-prob per completion token), over all completions together.

    `logps`: log-prob of each completion, nats, stop token included; `lengths`: its tokens.
    """
    tokens = sum(lengths)
    return _exp(-math.fsum(logps) / tokens) if tokens else math.nan


def perplexity_diluted(
    logps: Sequence[float], lengths: Sequence[int], prompt_lengths: Sequence[int]
) -> float:
    """The paper's perplexity: mean over completions of exp(-logp / (prompt tokens + completion tokens)).

    Only the completion's log-prob is summed, and prompt tokens are divided by too: 30 tokens at 1.5 nats after 350
    give 1.126 where the perplexity is 4.48. For comparison with the paper's tables alone.
    """
    values = [
        _exp(-logp / (length + before))
        for logp, length, before in zip(logps, lengths, prompt_lengths, strict=True)
    ]
    return math.fsum(values) / len(values) if values else math.nan


def mean_with_error(values: Sequence[float], groups: Sequence[Hashable] | None = None) -> Estimate:
    """Mean and its standard error. Values of one group (a prompt's completions) need not be independent.

    The error is that of cluster sampling: sqrt(G / (G-1) sum_g (sum_{i in g} (x_i - mean))^2) / N, which for groups
    of one is the usual standard deviation / sqrt(N).
    """
    if not values:
        return Estimate(value=math.nan, error=math.nan)
    mean = math.fsum(values) / len(values)
    off: dict[Hashable, float] = {}
    for group, value in zip(range(len(values)) if groups is None else groups, values, strict=True):
        off[group] = off.get(group, 0.0) + value - mean
    if len(off) < 2:
        return Estimate(value=mean, error=math.nan)
    squares = math.fsum(o * o for o in off.values())
    return Estimate(value=mean, error=math.sqrt(len(off) / (len(off) - 1) * squares) / len(values))


def sampled_kl(
    logps: Sequence[float], other_logps: Sequence[float], groups: Sequence[Hashable] | None = None
) -> Estimate:
    """KL(p || q) in nats per completion, from completions that p sampled: mean of log p - log q.

    KL(policy || reference) takes completions of the policy, `logps` the policy's; KL(reference || policy) takes
    completions of the reference, `logps` the reference's. Unbiased, and not bounded by 0 on few samples.
    """
    return mean_with_error([a - b for a, b in zip(logps, other_logps, strict=True)], groups)


def calibration(margins: Sequence[float], bins: int) -> Calibration:
    """Accuracy and calibration of preferences, from each pair's margin: score of the preferred minus of the other.

    A pair is predicted with confidence max(p, 1 - p), p = sigmoid(margin), which lies in [1/2, 1]; `bins` of equal
    width divide that. A prediction is right if the margin is positive; a tie is not.
    """
    if bins < 1:
        raise ValueError(f"a reliability table of {bins} rows holds nothing; give 1 or more.")
    confidences = [_sigmoid(abs(margin)) for margin in margins]
    places = [min(bins - 1, int((c - 0.5) * 2 * bins)) for c in confidences]
    rows = []
    for number in range(bins):
        inside = [at for at, place in enumerate(places) if place == number]
        count = len(inside)
        rows.append(Bin(
            low=0.5 + number / (2 * bins), high=0.5 + (number + 1) / (2 * bins), count=count,
            confidence=math.fsum(confidences[at] for at in inside) / count if count else math.nan,
            accuracy=sum(margins[at] > 0 for at in inside) / count if count else math.nan,
        ))
    size = len(margins)
    return Calibration(
        accuracy=sum(m > 0 for m in margins) / size if size else math.nan, ties=sum(m == 0 for m in margins),
        loss=math.fsum(_softplus(-m) for m in margins) / size if size else math.nan,
        ece=math.fsum(r.count * abs(r.accuracy - r.confidence) for r in rows if r.count) / size if size else math.nan,
        bins=tuple(rows),
    )


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _softplus(x: float) -> float:
    """log(1 + e^x)."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _exp(x: float) -> float:
    """e^x, infinite where a float cannot hold it."""
    return math.exp(x) if x < 709 else math.inf
