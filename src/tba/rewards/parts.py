"""Several scorers as one reward: their weighted sum, with what each gave as its part."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tba.preference_settings import RewardSettings
from tba.records import Completion, Prompt
from tba.rewards.functions import Failure, RewardFunction, Score, clip, score_safely
from tba.rewards.sandbox import TimedScorer


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A scorer, its weight, and its name."""

    name: str
    weight: float
    """Reward units per unit of the scorer's score."""
    function: RewardFunction


class WeightedSum:
    """Sum of weight x score over parts, those left out that give None; it is unscored if all do, or one fails.

    The parts are made at the first call, so that who only asks for prompts loads no model.
    """

    def __init__(self, make: Callable[[], Sequence[Part]]) -> None:
        """`make` gives the parts; what it raises is the user's mistake, and is not recorded but raised."""
        self._make = make
        self._parts: Sequence[Part] | None = None
        self._making = threading.Lock()

    @property
    def parts(self) -> Sequence[Part]:
        """The parts, made if they were not yet."""
        with self._making:
            if self._parts is None:
                self._parts = self._make()
            return self._parts

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score | Failure]:
        """One outcome per completion, in order, with the unweighted score of each part."""
        parts = self.parts
        by_part = [score_safely(part.function, prompt, completions) for part in parts]
        return [_summed(parts, outcomes) for outcomes in zip(*by_part, strict=True)]

    def close(self) -> None:
        """Ends what the parts keep open."""
        for part in self._parts or ():
            close = getattr(part.function, "close", None)
            if close is not None:
                close()


def _summed(parts: Sequence[Part], outcomes: Sequence[Score | Failure]) -> Score | Failure:
    scored: dict[str, float] = {}
    silent: list[Failure] = []
    for part, outcome in zip(parts, outcomes, strict=True):
        if isinstance(outcome, Score):
            scored[part.name] = outcome.reward
        elif outcome.reason == "none":
            silent.append(outcome)
        else:
            return Failure(reason=outcome.reason, detail=clip(f"{part.name}: {outcome.detail}"))
    if not scored:
        return silent[0]
    return Score(reward=math.fsum(p.weight * scored[p.name] for p in parts if p.name in scored), parts=scored)


def reward_of(
    rewards: Sequence[RewardSettings], place: str = "task.rewards", *, limit_s: float = 10.0,
    carried: TimedScorer | None = None,
) -> WeightedSum:
    """The reward of the settings, found at `place` of the tree.

    `limit_s` bounds each call of a function, in seconds; functions without a module are those of `carried`.
    """
    return WeightedSum(lambda: [
        Part(name=reward.part, weight=reward.weight,
             function=_scorer_of(reward, f"{place}.{number}", limit_s=limit_s, carried=carried))
        for number, reward in enumerate(rewards)
    ])


def _scorer_of(
    reward: RewardSettings, place: str, *, limit_s: float, carried: TimedScorer | None
) -> RewardFunction:
    if reward.function is not None:
        if carried is not None:
            return partial(carried, name=reward.function)
        return TimedScorer(reward.function, limit_s=limit_s)
    if reward.model is not None:
        from tba.rewards.models import load_scorer

        return load_scorer(reward, place)
    from tba.rewards.endpoint import EndpointScorer

    return EndpointScorer(reward)
