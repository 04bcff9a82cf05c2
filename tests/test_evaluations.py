"""Evaluations beside training."""

from __future__ import annotations

import threading

import pytest

from tba.evaluate import Evaluation
from tba.evaluations import Beside, EvaluationLateError

FOUND = Evaluation(version=7, metrics={"pass@1": 0.375}, shown=())


def test_one_is_taken_when_it_is_done_and_not_before():
    may_end, asked = threading.Event(), list[object]()

    def evaluate(*arguments: object, **options: object) -> Evaluation:
        asked.append((arguments, options))
        assert may_end.wait(20)
        return FOUND

    beside = Beside(evaluate, limit_s=20)
    assert not beside.is_busy
    assert beside.take(wait=True) is None
    beside.start("tensors", 7, greedy=True)
    assert beside.is_busy
    assert beside.take(wait=False) is None
    may_end.set()
    assert beside.take(wait=True) is FOUND
    assert not beside.is_busy
    assert asked == [(("tensors", 7), {"greedy": True})]


def test_one_that_hangs_is_given_up_and_the_next_is_not_held_up():
    hangs = threading.Event()

    def evaluate(version: int) -> Evaluation:
        if version == 1:
            hangs.wait(60)
        return FOUND

    beside = Beside(evaluate, limit_s=0.05)
    beside.start(1)
    with pytest.raises(EvaluationLateError, match=r"not done within evaluation\.limit_s = 0\.05 s"):
        beside.take(wait=True)
    beside = Beside(evaluate, limit_s=20)
    beside.start(2)
    assert beside.take(wait=True) is FOUND
    hangs.set()


def test_what_an_evaluation_fails_with_is_said_by_who_takes_it():
    def evaluate() -> Evaluation:
        raise ValueError("no prompts")

    beside = Beside(evaluate, limit_s=20)
    beside.start()
    with pytest.raises(ValueError, match="no prompts"):
        beside.take(wait=True)
