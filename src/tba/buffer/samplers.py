"""Pure functions from a pool to draws, with the probability of each."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from tba.buffer.entries import Entry


def draw_uniform(entries: Sequence[Entry], size: int, rng: np.random.Generator) -> tuple[list[int], list[float]]:
    """Places of `size` distinct entries, each set equally likely, and each one's probability to come first."""
    places = rng.choice(len(entries), size=size, replace=False)
    return [int(p) for p in places], [1.0 / len(entries)] * size


def draw_by_reward(
    entries: Sequence[Entry], size: int, rng: np.random.Generator, temperature: float
) -> tuple[list[int], list[float]]:
    """Places drawn one after another without replacement, in proportion to exp(reward / temperature)."""
    rewards = np.array([e.trajectory.reward for e in entries])
    with np.errstate(over="ignore"):  # a reward that far below the best has no chance
        logits = (rewards - rewards.max()) / temperature
    weights = np.exp(logits)
    probabilities = weights / weights.sum()
    places = np.argsort(-(logits + rng.gumbel(size=len(entries))), kind="stable")[:size]
    return [int(p) for p in places], [float(probabilities[p]) for p in places]


def draw_prompt(numbers: list[int], drawn: set[int], rng: np.random.Generator) -> tuple[int, float]:
    """One of the ascending `numbers` that is not in `drawn`, uniformly, and its probability; in
    `drawn` from then on. Once all have been drawn, all may be drawn again.
    """
    taken = sorted(place for number in drawn if (place := _place(numbers, number)) is not None)
    if len(taken) == len(numbers):
        drawn.difference_update(numbers)
        taken = []
    left = len(numbers) - len(taken)
    place = int(rng.integers(left))
    for other in taken:  # the place-th of those not taken
        place += other <= place
    drawn.add(numbers[place])
    return numbers[place], 1.0 / left


def _place(numbers: list[int], number: int) -> int | None:
    """Where `number` is in the ascending `numbers`, or None."""
    place = bisect.bisect_left(numbers, number)
    return place if place < len(numbers) and numbers[place] == number else None
