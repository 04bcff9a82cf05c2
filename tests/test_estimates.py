"""Intervals and votes: known answers, slow twins, and how often an interval holds the truth."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tba import estimates
from tba.estimates import RESAMPLES, bootstrap, kinds, vote_of, wilson


def test_wilson_known_values() -> None:
    # 8 of 10: centre (0.8 + 3.8415/20) / (1 + 3.8415/10), half 1.96 sqrt(0.8 0.2/10 + 3.8415/400) / 1.38415
    assert wilson(8, 10) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    assert wilson(0, 10) == pytest.approx((0.0, 0.277533), abs=1e-6)
    assert wilson(10, 10) == pytest.approx((0.722467, 1.0), abs=1e-6)
    assert wilson(1319, 1319)[0] == pytest.approx(1 / (1 + 1.959964**2 / 1319), abs=1e-9)


@settings(deadline=None)
@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_the_set_of_shares_that_the_count_does_not_refuse(given_: tuple[int, int]) -> None:
    right, total = given_
    low, high = wilson(right, total)
    assert 0.0 <= low <= right / total <= high <= 1.0
    for end in (low, high):
        if 0 < end < 1:  # there the count is 1.96 standard errors away
            error = math.sqrt(end * (1 - end) / total)
            assert abs(right / total - end) == pytest.approx(1.959964 * error, rel=1e-5)
    assert wilson(total - right, total) == pytest.approx((1 - high, 1 - low))


@pytest.mark.parametrize(("right", "total"), [(0, 0), (3, 2), (-1, 2)])
def test_counts_that_are_none_are_refused(right: int, total: int) -> None:
    with pytest.raises(ValueError, match=f"{right} right of {total} trials"):
        wilson(right, total)


def test_bootstrap_against_a_loop() -> None:
    values = [0.0, 0.25, 0.25, 1.0, 0.75, 0.5, 0.0]
    draws = np.random.default_rng(5).integers(7, size=(RESAMPLES, 7))
    means = sorted(math.fsum(values[place] for place in row) / 7 for row in draws)
    at = 0.025 * (RESAMPLES - 1)
    low = means[int(at)] + (at - int(at)) * (means[int(at) + 1] - means[int(at)])
    at = 0.975 * (RESAMPLES - 1)
    high = means[int(at)] + (at - int(at)) * (means[int(at) + 1] - means[int(at)])
    assert bootstrap(values, 5) == pytest.approx((low, high), abs=1e-12)
    assert bootstrap(values, 5) == bootstrap(values, 5) != bootstrap(values, 6)


def test_bootstrap_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [random.Random(3).random() for _ in range(40)]
    whole = bootstrap(values, 2)
    monkeypatch.setattr(estimates, "CHUNK", 40 * 333)
    assert bootstrap(values, 2) == whole


def test_bootstrap_of_equal_values_and_of_none() -> None:
    assert bootstrap([0.25] * 9, 1) == (0.25, 0.25)
    with pytest.raises(ValueError, match="0 problems has no interval"):
        bootstrap([], 1)


def test_problems_not_completions_are_drawn() -> None:
    # 50 problems of 8 completions that agree: half a problem is worth nothing more than the whole
    rng = random.Random(1)
    values = [float(rng.random() < 0.4) for _ in range(50)]
    low, high = bootstrap(values, 1)
    mean = math.fsum(values) / 50
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(mean * (1 - mean) / 50), rel=0.1)


def test_intervals_hold_the_truth_nearly_as_often_as_they_say() -> None:
    rng = random.Random(4)
    held = [0, 0]
    for trial in range(300):
        values = [float(rng.random() < 0.3) for _ in range(60)]
        for place, (low, high) in enumerate((bootstrap(values, trial), wilson(int(sum(values)), 60))):
            held[place] += low <= 0.3 <= high
    assert all(0.90 <= count / 300 <= 0.99 for count in held)


@pytest.mark.parametrize(
    ("answers", "rights", "share"),
    [
        (["7", "8", "7"], [True, False, True], 1.0),
        (["8", "7", "8"], [False, True, False], 0.0),
        (["7", "8"], [True, False], 0.5),
        (["7", "8", "9", "8", "7"], [True, False, False, False, True], 0.5),
        (["7", "8", "9"], [False, False, True], pytest.approx(1 / 3)),
        ([None, None, "7"], [False, False, True], 1.0),
        ([None, None], [False, False], 0.0),
        (["1/2", "0.5", "3", "3", "0.50"], [True, True, False, False, True], 1.0),
    ],
)
def test_votes(answers: list[str | None], rights: list[bool], share: float) -> None:
    halves = {"1/2", "0.5", "0.50"}
    assert vote_of(kinds(answers, lambda one, other: {one, other} <= halves), rights) == share


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([None, "a", "b", "c"]), st.booleans()), min_size=1, max_size=9), st.randoms())
def test_a_vote_does_not_depend_on_the_order(given_: list[tuple[str | None, bool]], rng: random.Random) -> None:
    right_of = {"a": True, "b": False, "c": False, None: False}
    answers = [answer for answer, _ in given_]
    shuffled = rng.sample(answers, len(answers))
    found = [vote_of(kinds(a, lambda one, other: False), [right_of[x] for x in a]) for a in (answers, shuffled)]
    assert found[0] == found[1]
