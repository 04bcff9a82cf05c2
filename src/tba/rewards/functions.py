"""The scoring boundary: whatever a reward function does becomes a score or a recorded failure."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tba.records import Completion, Prompt

RewardFunction = Callable[[Prompt, Sequence[Completion]], Sequence[Any]]
"""(prompt, its K completions) -> K rewards; None means unscored. Depends on nothing else."""

MAX_DETAIL = 200
"""Characters of a scorer's own message that are kept."""
FULL_MARKS = 1.0
"""Reward of a completion that solves its problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A finite reward and what it is made of."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a completion has no reward."""

    reason: str
    """`raised`, `timeout`, `none`, `non_finite`, `wrong_type` or `wrong_length`; of a reward model `too_long`; of an
    endpoint `unreachable`, `refused`, `overloaded` or `bad_reply`."""
    detail: str = ""


def score_safely(function: RewardFunction, prompt: Prompt, completions: Sequence[Completion]) -> list[Score | Failure]:
    """One outcome per completion, in order; never raises for what `function` does."""
    try:
        name = getattr(function, "__name__", type(function).__name__)
        return judge_returned(function(prompt, completions), len(completions), name)
    except Exception as error:
        # The reward function and the text it reads are the user's: anything may come out of them.
        return [Failure(reason="raised", detail=clip(f"{type(error).__name__}: {error}"))] * len(completions)


def judge_returned(returned: Any, expected: int, name: str) -> list[Score | Failure]:
    """What a reward function returned, as one outcome per completion."""
    if returned is None:
        return [Failure(reason="none", detail=f"{name} returned None")] * expected
    if hasattr(returned, "tolist"):  # arrays and tensors
        returned = returned.tolist()
    if isinstance(returned, (str, bytes)) or not isinstance(returned, Sequence):
        detail = clip(f"{name} returned {type(returned).__name__}; expected a list of {expected} rewards")
        return [Failure(reason="wrong_type", detail=detail)] * expected
    if len(returned) != expected:
        detail = f"{name} returned {len(returned)} rewards for {expected} completions"
        return [Failure(reason="wrong_length", detail=detail)] * expected
    return [_judge_one(value, name) for value in returned]


def _judge_one(value: Any, name: str) -> Score | Failure:
    if isinstance(value, Failure):
        return value
    if isinstance(value, Score):
        outcome = _judge_one(value.reward, name)
        if isinstance(outcome, Failure):
            return outcome
        return Score(reward=outcome.reward, parts={str(key): float(part) for key, part in value.parts.items()})
    if value is None:
        return Failure(reason="none", detail=f"{name} gave None")
    if not isinstance(value, (numbers.Real, bool)):
        return Failure(reason="wrong_type", detail=clip(f"{name} gave {type(value).__name__} {value!r}"))
    number = float(value)
    if not math.isfinite(number):
        return Failure(reason="non_finite", detail=f"{name} gave {number}")
    return Score(reward=number)


def clip(text: str) -> str:
    """The first `MAX_DETAIL` characters of a message."""
    return text if len(text) <= MAX_DETAIL else text[: MAX_DETAIL - 1] + "…"
