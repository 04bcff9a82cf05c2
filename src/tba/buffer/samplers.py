"""Pure functions from what a pool keeps to draws, with the probability of each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from tba.buffer.trees import Ranks, Tree, find, log_add

LARGEST = 1e290
"""Logits beyond it are cut, so that sums of them stay finite."""

HEAVY = 0.5
"""Share of the mass drawn so far beyond which it is taken out of the trees instead of being drawn again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """A prompt that a group is to be drawn from."""

    sampler: str
    prompt: int
    """Its number among the prompts."""
    probability: float
    """Of this prompt, given the sampler and the picks before it."""


def logit(reward: float, temperature: float) -> float:
    """Reward in units of the temperature, cut to what can be summed."""
    return min(max(reward / temperature, -LARGEST), LARGEST)


def draw_uniform(count: int, size: int, rng: np.random.Generator) -> tuple[list[int], list[float]]:
    """`size` distinct places of `count`, in every order equally likely, and each one's probability to come first."""
    moved: dict[int, int] = {}
    places: list[int] = []
    for at, share in enumerate(rng.random(size).tolist()):
        chosen = at + int(share * (count - at))
        places.append(moved.get(chosen, chosen))
        moved[chosen] = moved.get(at, at)
    return places, [1.0 / count] * size


def draw_weighted(
    trees: Sequence[Tree], shifts: Sequence[float], size: int, rng: np.random.Generator
) -> tuple[list[int], list[float]]:
    """Distinct places, one after another in proportion to sum_i exp(trees[i] + shifts[i]) among those left.

    The second list is each one's probability to come first. Drawing again what came before is refused as long
    as it is unlikely; then what came is taken out of the trees until the draw is done.
    """
    total = reduce(log_add, (tree.root + shift for tree, shift in zip(trees, shifts, strict=True)))
    places: list[int] = []
    probabilities: list[float] = []
    taken = 0.0
    out: list[tuple[Tree, int, float]] = []
    while len(places) < size:
        if taken > HEAVY:
            for place in places[len(out) // len(trees) :]:
                for tree in trees:
                    out.append((tree, place, tree[place]))
                    tree.clear(place)
        place = _one(trees, shifts, rng)
        if place in places:
            continue
        weight = reduce(log_add, (tree[place] + shift for tree, shift in zip(trees, shifts, strict=True)))
        places.append(place)
        probabilities.append(math.exp(weight - total))
        taken += probabilities[-1]
    for tree, place, value in out:
        tree.put(place, value)
    return places, probabilities


def _one(trees: Sequence[Tree], shifts: Sequence[float], rng: np.random.Generator) -> int:
    if len(trees) == 1:
        return find(trees[0], rng.random())
    masses = [tree.root + shift for tree, shift in zip(trees, shifts, strict=True)]
    first = math.exp(masses[0] - log_add(masses[0], masses[1]))
    return find(trees[0 if rng.random() < first else 1], rng.random())


def advantage_shifts(logits: Tree, count: int) -> tuple[float, float]:
    """Shifts that make exp(+logit) and exp(-logit) two halves of 2 cosh(logit - mean logit)."""
    mean = logits.root / count
    return -mean, mean


def choose(shares: Mapping[str, float], rng: np.random.Generator) -> str:
    """One of the names, in proportion to its share; at least one share is above zero."""
    left = rng.random() * math.fsum(shares.values())
    chosen = ""
    for name, share in shares.items():
        if share > 0:
            chosen = name
            left -= share
            if left < 0:
                break
    return chosen


def draw_prompt(eligible: Ranks, all_eligible: Sequence[Ranks], rng: np.random.Generator) -> tuple[int, float]:
    """One member of `eligible` that was not drawn before, uniformly, and its probability; hidden from then on.

    Once all of `eligible` have been drawn, all of them may be drawn again, also through the others.
    """
    if not eligible.left:
        for number in list(eligible.hidden):
            for ranks in all_eligible:
                ranks.show(number)
    chance = 1.0 / eligible.left
    number = eligible.nth(int(rng.random() * eligible.left))
    for ranks in all_eligible:
        if number in ranks:
            ranks.hide(number)
    return number, chance


def pick_prompts(
    shares: Mapping[str, float], eligible: Mapping[str, Ranks], unmet: Counter[str], rng: np.random.Generator,
    settle: Callable[[], None] = lambda: None,
) -> Generator[Pick, None, None]:
    """The prompts of a batch, one pick after another, as long as one is eligible; close it when there are enough.

    `eligible` may change between two picks, where trajectories leave as they are drawn. Who picks ahead of drawing is
    asked to `settle` before that matters: a prompt that was picked counts again when all have been.
    `unmet` counts the picks that a sampler without an eligible prompt leaves to the others.
    """
    everything = list({id(ranks): ranks for ranks in eligible.values()}.values())
    try:
        while True:
            if not any(ranks.left for ranks in everything):
                settle()
                if not any(map(len, everything)):
                    return
            name = choose(shares, rng)
            if not eligible[name].left and any(ranks.hidden and not ranks.left for ranks in everything):
                settle()
            if not len(eligible[name]):
                unmet[name] += 1
                name = choose({n: s for n, s in shares.items() if len(eligible[n])}, rng)
            number, chance = draw_prompt(eligible[name], everything, rng)
            yield Pick(sampler=name, prompt=number, probability=chance)
    finally:
        for ranks in everything:
            for number in list(ranks.hidden):
                ranks.show(number)
