"""Win-rate, perplexities, KL, distinct n-grams and calibration, by hand and by slow twins."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.preference_metrics import (
    Estimate,
    WinRate,
    calibration,
    mean_with_error,
    perplexity,
    perplexity_diluted,
    sampled_kl,
    wilson,
    win_rate,
)


def test_a_tie_is_no_win_and_what_is_unscored_is_no_pair() -> None:
    found = win_rate([1.0, 2.0, 0.5, None, 3.0, 3.0], [0.5, 2.0, 0.7, 1.0, None, 1.0])
    # wins: 1 > 0.5 and 3 > 1; one tie; one loss; two pairs lack a score
    assert (found.wins, found.ties, found.losses, found.unscored) == (2, 1, 1, 2)
    assert found.rate == 0.5
    assert (found.low, found.high) == wilson(2, 4)
    nothing = win_rate([None], [1.0])
    assert isinstance(nothing, WinRate)
    assert math.isnan(nothing.rate)
    with pytest.raises(ValueError, match="zip"):
        win_rate([1.0], [])


def test_wilsons_interval_by_hand() -> None:
    # 7 of 10, z = 2: z^2/n = 0.4; middle (0.7 + 0.2)/1.4; half 2 sqrt(0.021 + 0.01)/1.4
    assert wilson(7, 10, 2.0) == pytest.approx((0.9 / 1.4 - 2 * math.sqrt(0.031) / 1.4,
                                                0.9 / 1.4 + 2 * math.sqrt(0.031) / 1.4))  # fmt: skip
    assert wilson(0, 10)[0] == 0.0
    assert wilson(0, 10)[1] == pytest.approx(0.277533, abs=1e-6)  # z^2/(n + z^2) = 3.841459/13.841459
    assert wilson(10, 10) == pytest.approx((1 - 0.277533, 1.0), abs=1e-6)
    assert all(map(math.isnan, wilson(0, 0)))
    with pytest.raises(ValueError, match="4 successes of 3 trials"):
        wilson(4, 3)


@given(st.integers(1, 400), st.data())
def test_wilsons_limits_are_where_the_normal_test_turns(trials: int, data: st.DataObject) -> None:
    """At each limit p the observed share lies z standard deviations away: (share - p)^2 = z^2 p (1-p)/n."""
    successes = data.draw(st.integers(0, trials))
    for limit in wilson(successes, trials, 1.7):
        distance = (successes / trials - limit) ** 2
        assert distance == pytest.approx(1.7**2 * limit * (1 - limit) / trials, abs=1e-9)


def test_both_perplexities_of_the_papers_example() -> None:
    # 30 tokens at 1.5 nats after a prompt of 350: e^1.5, and e^(45/380)
    assert perplexity([-45.0], [30]) == pytest.approx(4.481689, abs=1e-6)
    assert perplexity_diluted([-45.0], [30], [350]) == pytest.approx(1.125718, abs=1e-6)


def test_perplexities_of_several() -> None:
    # together 50 nats over 40 tokens; apart e^(45/380) and e^(5/20)
    assert perplexity([-45.0, -5.0], [30, 10]) == pytest.approx(math.exp(1.25))
    assert perplexity_diluted([-45.0, -5.0], [30, 10], [350, 10]) == pytest.approx(
        (math.exp(45 / 380) + math.exp(0.25)) / 2
    )
    assert math.isnan(perplexity([], []))
    assert math.isnan(perplexity_diluted([], [], []))
    assert perplexity([-1e6], [1]) == math.inf


def test_a_mean_and_its_error_by_hand() -> None:
    # 1, 2, 6: mean 3, squares 4 + 1 + 9 = 14, variance 7, error sqrt(7/3)
    found = mean_with_error([1.0, 2.0, 6.0])
    assert (found.value, found.error) == (3.0, pytest.approx(math.sqrt(7 / 3)))
    # groups {1, 2} and {6}: off by -3 and +3; sqrt(2/1 x 18)/3 = 2
    assert mean_with_error([1.0, 2.0, 6.0], ["a", "a", "b"]) == Estimate(value=3.0, error=2.0)
    assert math.isnan(mean_with_error([1.0, 2.0], ["a", "a"]).error)
    assert math.isnan(mean_with_error([]).value)


def test_copies_within_a_group_make_no_error_smaller() -> None:
    values, groups = [0.3, 1.7, -0.4, 2.2], list("abcd")
    alone = mean_with_error(values, groups)
    copied = mean_with_error(values * 5, groups * 5)
    assert copied.value == pytest.approx(alone.value)
    assert copied.error == pytest.approx(alone.error)
    assert mean_with_error(values * 5).error < 0.5 * alone.error


def test_kl_in_both_directions_is_that_of_the_distributions() -> None:
    p, q = [0.6, 0.3, 0.1], [0.2, 0.3, 0.5]
    forward = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))  # 0.6 ln 3 + 0.1 ln 0.2 = 0.498226
    backward = sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))  # 0.2 ln(1/3) + 0.5 ln 5 = 0.584997
    assert (forward, backward) == (pytest.approx(0.498223, abs=1e-5), pytest.approx(0.584996, abs=1e-5))
    rng = random.Random(3)
    for mine, other, exact in ((p, q, forward), (q, p, backward)):
        drawn = rng.choices(range(3), mine, k=4000)
        found = sampled_kl([math.log(mine[i]) for i in drawn], [math.log(other[i]) for i in drawn])
        assert abs(found.value - exact) < 4 * found.error
        deviation = math.sqrt(sum(a * math.log(a / b) ** 2 for a, b in zip(mine, other, strict=True)) - exact**2)
        assert found.error == pytest.approx(deviation / math.sqrt(4000), rel=0.05)


def test_calibration_by_hand() -> None:
    # sigmoid: 0.2 -> 0.549834, -0.4 -> 0.401312 (confidence 0.598688), 3 -> 0.952574, 0 -> 0.5
    found = calibration([0.2, -0.4, 3.0, 0.0], 2)
    assert (found.accuracy, found.ties) == (0.5, 1)
    first, second = found.bins
    assert (first.low, first.high, first.count) == (0.5, 0.75, 3)
    assert first.confidence == pytest.approx((0.549834 + 0.598688 + 0.5) / 3, abs=1e-6)  # = 0.549507
    assert first.accuracy == pytest.approx(1 / 3)
    assert (second.count, second.accuracy) == (1, 1.0)
    assert second.confidence == pytest.approx(0.952574, abs=1e-6)
    assert found.ece == pytest.approx((3 * (0.549507 - 1 / 3) + (1 - 0.952574)) / 4, abs=1e-5)
    assert found.loss == pytest.approx((0.598139 + 0.913015 + 0.048587 + 0.693147) / 4, abs=1e-5)


def test_probabilities_that_are_right_are_calibrated() -> None:
    """Pairs whose better one wins with probability sigmoid(margin), and margins twice too sure."""
    rng = random.Random(5)
    margins = [abs(rng.gauss(0, 1.5)) for _ in range(20_000)]
    signed = [m if rng.random() < 1 / (1 + math.exp(-m)) else -m for m in margins]
    assert calibration(signed, 10).ece < 0.015
    assert calibration([2 * m for m in signed], 10).ece > 0.05


def test_margins_of_any_size_are_finite() -> None:
    found = calibration([1e4, -1e4], 10)
    assert found.loss == pytest.approx(5000.0)
    assert found.bins[-1].count == 2
    assert math.isnan(calibration([], 3).accuracy)
    with pytest.raises(ValueError, match="table of 0 rows"):
        calibration([1.0], 0)
