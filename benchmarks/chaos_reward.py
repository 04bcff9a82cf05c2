"""Rewards of built-in tasks by scorers that now and then raise, hang, or give NaN."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from functools import cache

from tba.records import Completion, Prompt
from tba.settings import TaskSettings
from tba.tasks.arithmetic import Arithmetic
from tba.tasks.enumerable import Enumerable

HANGS, RAISES = 0.001, 0.01
"""Share of calls."""
NAN = 0.02
"""Share of completions."""
HANG_S = 3600.0


@cache
def _enumerable() -> Enumerable:
    return Enumerable(TaskSettings(name="enumerable", prompts=4, symbols=3), max_new_tokens=3, score_limit_s=1)


@cache
def _arithmetic() -> Arithmetic:
    return Arithmetic(TaskSettings(max_value=1, held_out=1), max_new_tokens=12, score_limit_s=1)


def chance(*parts: object) -> float:
    """A number of [0, 1) that depends on `parts` alone."""
    digest = hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "little") / 2**64


def faulty(prompt: Prompt, completions: Sequence[Completion], rewards: Sequence[float]) -> list[float]:
    """The rewards, or a fault; which, is a function of the prompt and of all its completions together.

    So a completion is unscored in some company and scored in another, and what is learned has the same target.
    """
    asked = (prompt.id, tuple(completion.tokens for completion in completions))
    drawn = chance(*asked)
    if drawn < HANGS:
        time.sleep(HANG_S)
    if drawn < HANGS + RAISES:
        raise RuntimeError(f"no reward for {len(completions)} completions of {prompt.id!r}")
    return [math.nan if chance(*asked, n) < NAN else reward for n, reward in enumerate(rewards)]


def calm_enumerable(prompt: Prompt, completions: Sequence[Completion]) -> Sequence[float]:
    """Of the recipe `enumerable`."""
    return _enumerable().score(prompt, completions)


def calm_arithmetic(prompt: Prompt, completions: Sequence[Completion]) -> Sequence[float]:
    """Of the recipe `arithmetic`."""
    return _arithmetic().score(prompt, completions)


def storm_enumerable(prompt: Prompt, completions: Sequence[Completion]) -> Sequence[float]:
    """The same with faults."""
    return faulty(prompt, completions, calm_enumerable(prompt, completions))


def storm_arithmetic(prompt: Prompt, completions: Sequence[Completion]) -> Sequence[float]:
    """The same with faults."""
    return faulty(prompt, completions, calm_arithmetic(prompt, completions))
