"""Rewards: whatever a scorer does becomes a score or a recorded failure."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support import make_completion, make_prompt
from tba.records import Completion, Prompt
from tba.rewards.functions import MAX_DETAIL, Failure, Score, clip, judge_returned, score_safely
from tba.rewards.sandbox import TimedScorer, load_function

PROMPT = make_prompt("p", answer="4", level=3)
TWO = [make_completion((5, 2), text="4"), make_completion((6, 2), text="5")]


def returns(value: Any) -> Callable[..., Any]:
    def scorer(prompt: Prompt, completions: Sequence[Completion]) -> Any:
        return value

    return scorer


def raises(error: BaseException) -> Callable[..., Any]:
    def scorer(prompt: Prompt, completions: Sequence[Completion]) -> Any:
        raise error

    return scorer


class Rude:
    """A value that objects to being looked at."""

    def __repr__(self) -> str:
        raise RuntimeError("do not look")


class RudeList(Sequence):
    """A list that breaks while it is read."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, place: Any) -> float:
        raise RuntimeError("broken")


class RudeArray:
    """An array that cannot become a list."""

    def tolist(self) -> list[float]:
        raise RuntimeError("sparse")


def judged(function: Callable[..., Any], completions: Sequence[Completion] = TWO) -> list[Any]:
    """Rewards, or reasons."""
    found = score_safely(function, PROMPT, completions)
    return [o.reward if isinstance(o, Score) else o.reason for o in found]


# ---- the boundary -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([0.5, -1], [0.5, -1.0]),
        ((0.5, 0.25), [0.5, 0.25]),
        ([True, False], [1.0, 0.0]),
        ([Fraction(1, 4), np.float32(0.5)], [0.25, 0.5]),
        (np.array([1, 2]), [1.0, 2.0]),
        (torch.tensor([0.5, 0.25]), [0.5, 0.25]),
        (torch.tensor([0.5, 0.25], dtype=torch.bfloat16, requires_grad=True), [0.5, 0.25]),
        ([None, 1.0], ["none", 1.0]),
        ([math.nan, 1.0], ["non_finite", 1.0]),
        ([math.inf, -math.inf], ["non_finite", "non_finite"]),
        (torch.tensor([math.nan, 0.5]), ["non_finite", 0.5]),
        (["1.0", 1.0], ["wrong_type", 1.0]),
        ([[1.0], 1j], ["wrong_type", "wrong_type"]),
        ([Score(reward=0.5), Score(reward=math.nan)], [0.5, "non_finite"]),
        ([Score(reward=None), 1.0], ["none", 1.0]),  # type: ignore[arg-type]
        (None, ["none", "none"]),
        ("ab", ["wrong_type", "wrong_type"]),
        (b"ab", ["wrong_type", "wrong_type"]),
        (1.0, ["wrong_type", "wrong_type"]),
        (np.float64(1.0), ["wrong_type", "wrong_type"]),
        ({0: 1.0, 1: 2.0}, ["wrong_type", "wrong_type"]),
        ({1.0, 2.0}, ["wrong_type", "wrong_type"]),
        (torch.tensor([[0.5], [0.25]]), ["wrong_type", "wrong_type"]),
        ([], ["wrong_length", "wrong_length"]),
        ([1.0], ["wrong_length", "wrong_length"]),
        ([1.0, 0.0, 0.0], ["wrong_length", "wrong_length"]),
        (torch.tensor([0.5, 0.25, 0.0]), ["wrong_length", "wrong_length"]),
    ],
)
def test_whatever_is_returned_is_a_score_or_a_reason(returned: Any, expected: list[Any]) -> None:
    assert judged(returns(returned)) == expected


@pytest.mark.parametrize(
    "returned", [[10**400, 1.0], [Rude(), 1.0], RudeList(), RudeArray()], ids=["huge", "repr", "list", "array"]
)
def test_what_breaks_when_looked_at_is_recorded(returned: Any) -> None:
    assert isinstance(judged(returns(returned))[0], str)


@pytest.mark.parametrize("error", [ValueError("no"), KeyError("x"), MemoryError(), RecursionError(), StopIteration()])
def test_whatever_is_raised_is_recorded(error: Exception) -> None:
    found = score_safely(raises(error), PROMPT, TWO)
    assert found == [Failure(reason="raised", detail=f"{type(error).__name__}: {error}")] * 2


def test_ctrl_c_is_not_swallowed() -> None:
    with pytest.raises(KeyboardInterrupt):
        score_safely(raises(KeyboardInterrupt()), PROMPT, TWO)


def test_parts_come_along() -> None:
    parts = {"right": 1.0, "short": -0.5}
    assert score_safely(returns([Score(reward=0.5, parts=parts), 1]), PROMPT, TWO) == [
        Score(reward=0.5, parts=parts), Score(reward=1.0)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("returned", "expected"),
    [([1.0], [1.0]), ([], ["wrong_length"]), ([1.0, 0.0], ["wrong_length"]), ("x", ["wrong_type"]), (None, ["none"])],
)
def test_one_completion_k05(returned: Any, expected: list[Any]) -> None:
    assert judged(returns(returned), TWO[:1]) == expected


def test_the_message_names_function_and_counts_k05() -> None:
    (failure,) = set(score_safely(returns([1.0, 0.0, 0.5]), PROMPT, TWO))
    assert failure == Failure(reason="wrong_length", detail="scorer returned 3 rewards for 2 completions")


def test_columns_are_passed_k05() -> None:
    seen: list[Any] = []

    def scorer(prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        seen.append((sorted(prompt.columns), [c.text for c in completions]))
        return [float(c.text == prompt.columns["answer"]) for c in completions]

    assert judged(scorer) == [1.0, 0.0]
    assert seen == [(["answer", "level"], ["4", "5"])]


def test_details_are_cut() -> None:
    found = score_safely(raises(ValueError("x" * 5000)), PROMPT, TWO)
    assert {len(o.detail) for o in found if isinstance(o, Failure)} == {MAX_DETAIL}
    assert clip("x" * MAX_DETAIL) == "x" * MAX_DETAIL
    long = judge_returned(["x" * 5000, 1.0], 2, "f")[0]
    assert isinstance(long, Failure)
    assert len(long.detail) == MAX_DETAIL


# ---- finding the function -----------------------------------------------------------------------

SOURCE = """
import os, threading
from tba.rewards.functions import Score

class Odd:
    pass

def right(prompt, completions):
    return [float(c.text == prompt.columns["answer"]) for c in completions]

def moody(prompt, completions):
    if completions[0].text == "hang":
        threading.Event().wait()
    if completions[0].text == "die":
        os._exit(3)
    if completions[0].text == "quit":
        raise SystemExit(3)
    if completions[0].text == "raise":
        raise ValueError("moody")
    if completions[0].text == "odd":
        return [Score(reward=1.0, parts={"odd": Odd()}) for c in completions]
    if completions[0].text == "unsendable":
        return [Score(reward=1.0, parts={"odd": lambda: 0}) for c in completions]
    return [os.getpid() for c in completions]

number = 3
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "moody_rewards.py"
    path.write_text(SOURCE, "utf-8")
    return path


def test_a_function_is_found_in_a_file_and_in_a_module(file: Path) -> None:
    assert load_function(f"{file}:right")(PROMPT, TWO) == [1.0, 0.0]
    assert load_function("math:fsum") is math.fsum


@pytest.mark.parametrize("spec", ["nowhere.py:f", "no_such_module:f", "math:no_such_function", "json.py:f", ":f"])
def test_a_function_that_is_not_there_is_named(spec: str) -> None:
    with pytest.raises(ValueError, match=f"task.reward = '{spec}' cannot be loaded"):
        load_function(spec)


def test_a_module_that_breaks_on_import_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken_rewards.py").write_text("1 / 0\n", "utf-8")
    with pytest.raises(ValueError, match="cannot be loaded: ZeroDivisionError"):
        load_function(f"{tmp_path / 'broken_rewards.py'}:f")


def test_what_is_no_function_is_refused(file: Path) -> None:
    with pytest.raises(ValueError, match="is a int; it must be a function"):
        load_function(f"{file}:number")


# ---- a process of its own -----------------------------------------------------------------------


@pytest.fixture
def scorer(tmp_path: Path) -> Iterator[TimedScorer]:
    (tmp_path / "moody_apart.py").write_text(SOURCE, "utf-8")  # nothing in this process has loaded it
    made = TimedScorer(f"{tmp_path / 'moody_apart.py'}:moody", limit_s=20.0)
    yield made
    made.close()


def call(scorer: TimedScorer, text: str) -> list[Any]:
    completions = [make_completion(text=text), make_completion(text="other")]
    return [o.reward if isinstance(o, Score) else o.reason for o in scorer(PROMPT, completions)]


def test_scores_come_from_one_process_that_is_not_ours(scorer: TimedScorer) -> None:
    first, second = call(scorer, "fine"), call(scorer, "fine")
    assert first == second  # its process id
    assert call(scorer, "raise") == ["raised", "raised"]
    assert call(scorer, "fine") == first  # an exception costs no process
    assert scorer.replaced == 0


@pytest.mark.parametrize("end", ["die", "quit"])
def test_a_process_that_dies_is_recorded_and_replaced(scorer: TimedScorer, end: str) -> None:
    first = call(scorer, "fine")
    assert call(scorer, end) == ["raised", "raised"]
    assert scorer.replaced == 1
    after = call(scorer, "fine")
    assert len(set(after)) == 1
    assert after != first  # another process id


@pytest.mark.parametrize("parts", ["unsendable", "odd"])
def test_parts_that_are_no_numbers_are_recorded(scorer: TimedScorer, parts: str) -> None:
    assert all(isinstance(reason, str) for reason in call(scorer, parts))
    assert isinstance(call(scorer, "fine")[0], float)


def test_a_call_that_hangs_is_ended_at_its_limit_and_the_process_replaced(file: Path) -> None:
    scorer = TimedScorer(f"{file}:moody", limit_s=0.3)
    started = time.perf_counter()
    found = scorer(PROMPT, [make_completion(text="hang"), make_completion(text="other")])
    assert found == [Failure(reason="timeout", detail="no reward within 0.3 s")] * 2
    assert time.perf_counter() - started < 30
    assert scorer.replaced == 1
    scorer._limit_s = 20.0  # the machine may be slow, and this call is to be answered
    assert isinstance(call(scorer, "fine")[0], float)
    scorer.close()
    scorer.close()


def test_a_function_that_is_not_there_is_refused_at_the_first_call(tmp_path: Path) -> None:
    scorer = TimedScorer(f"{tmp_path / 'none.py'}:f", limit_s=5.0)
    with pytest.raises(ValueError, match=r"none\.py:f' cannot be loaded: FileNotFoundError"):
        scorer(PROMPT, TWO)
