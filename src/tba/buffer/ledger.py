"""Who came, who stayed, who left and why; and whether prompts and lengths are served alike."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

UNITS = ("trajectories", "tokens")
FATES = ("delivered", "evicted", "rejected")
STARVED = 0.5
"""A group consumed less than this share of what all are, per trajectory delivered, is called starved."""
FEWEST = 100
"""Trajectories delivered before a group is judged."""
PER_OCTAVE = 8
"""Classes of length between a number of tokens and twice as many."""

TALLIED = {"delivered": "q", "accepted": "q", "consumed": "q", "reward": "d", "age": "d"}
"""Sums of a tally, as array codes: trajectories, and over them reward (of the accepted) and age (of the consumed)."""


class Ledger:
    """Delivered = in buffer + evicted + rejected at any moment, by reason, in trajectories and in tokens."""

    def __init__(self) -> None:
        self._count = {unit: {fate: Counter[str]() for fate in FATES} for unit in UNITS}

    def note(self, fate: str, reason: str, tokens: int, trajectories: int = 1) -> None:
        """Counts trajectories, with their tokens, under a fate and a reason."""
        self._count["trajectories"][fate][reason] += trajectories
        self._count["tokens"][fate][reason] += tokens

    def total(self, fate: str, unit: str = "trajectories") -> int:
        """All that met a fate."""
        return self._count[unit][fate].total()

    def reasons(self, fate: str) -> dict[str, int]:
        """Trajectories by reason."""
        return dict(self._count["trajectories"][fate])

    def account(self, held: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        """The whole account; `held` is what is in the buffer, by unit."""
        return {
            unit: {
                "delivered": count["delivered"].total(), "in_buffer": held[unit],
                "evicted": dict(count["evicted"]), "rejected": dict(count["rejected"]),
            }
            for unit, count in self._count.items()
        }

    def join(self, state: Mapping[str, Any]) -> None:
        """Adds another ledger's `state`."""
        for unit, count in self._count.items():
            for fate, counter in count.items():
                counter.update(state[unit][fate])

    def state(self) -> dict[str, Any]:
        """Everything `restore` needs, as plain data."""
        return {unit: {fate: dict(counter) for fate, counter in count.items()} for unit, count in self._count.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`."""
        self._count = {unit: {fate: Counter(state[unit][fate]) for fate in FATES} for unit in UNITS}


class Tally:
    """Sums by a whole number: a prompt's, or a length's class."""

    def __init__(self) -> None:
        self.sums = {name: array(code) for name, code in TALLIED.items()}

    def add(self, key: int, **amounts: float) -> None:
        """Adds to the sums of `key`."""
        if key >= len(self.sums["delivered"]):
            for column in self.sums.values():
                column.extend([0] * (key + 1 - len(column)))
        for name, amount in amounts.items():
            self.sums[name][key] += amount  # type: ignore[operator]

    def put(self, key: int, amounts: Mapping[str, float]) -> None:
        """Replaces all sums of `key`."""
        self.add(key)
        for name, amount in amounts.items():
            self.sums[name][key] = amount  # type: ignore[assignment]

    def get(self, key: int) -> dict[str, float]:
        """The sums of `key`; zeros where nothing was added."""
        return {name: column[key] if key < len(column) else 0 for name, column in self.sums.items()}

    def parts(self, keys: Sequence[int], weights: Sequence[float], most: int = 10) -> list[list[int]]:
        """`keys` in their order, cut into at most `most` parts of about equal weight."""
        total, done, last, parts = math.fsum(weights), 0.0, -1, list[list[int]]()
        for key, weight in zip(keys, weights, strict=True):
            place = min(most - 1, int(most * (done + weight / 2) / total)) if total else 0
            if place > last:
                parts.append([])
                last = place
            parts[-1].append(key)
            done += weight
        return parts

    def row(self, keys: Sequence[int]) -> dict[str, float]:
        """What the sums of `keys` together amount to."""
        total = {name: sum(column[key] for key in keys) for name, column in self.sums.items()}
        return {
            "delivered": total["delivered"], "accepted": total["accepted"], "consumed": total["consumed"],
            "accepted_share": _over(total["accepted"], total["delivered"]),
            "consumed_per_delivered": _over(total["consumed"], total["delivered"]),
            "reward": _over(total["reward"], total["accepted"]), "age": _over(total["age"], total["consumed"]),
        }


@cache
def length_class(length: int) -> int:
    """The class of a number of tokens; eight between each power of two and the next."""
    return int(PER_OCTAVE * math.log2(length))


def nothing_to_draw(size: int, prompts: int, trajectories: int, ledger: Ledger) -> str:
    """Why no group of `size` can be drawn from a buffer that holds so many prompts and trajectories."""
    return (
        f"no prompt has {size} trajectories to draw a group from: {prompts} prompts hold {trajectories}; "
        f"delivered {ledger.total('delivered')}, rejected {ledger.reasons('rejected')}, "
        f"evicted {ledger.reasons('evicted')}."
    )


def fairness(prompts: Tally, lengths: Tally) -> dict[str, Any]:
    """Reward, age, acceptance and consumption by decile of length and of difficulty, and who is starved.

    `lengths` are deciles of the trajectories, shortest first; `prompts` are deciles of the prompts, the lowest
    mean reward first.
    """
    mean = [_over(r, n) for r, n in zip(prompts.sums["reward"], prompts.sums["accepted"], strict=True)]
    seen = [key for key, n in enumerate(prompts.sums["delivered"]) if n]
    hardest = sorted(seen, key=lambda key: (mean[key] if prompts.sums["accepted"][key] else -math.inf, key))
    classes = [key for key, n in enumerate(lengths.sums["delivered"]) if n]
    by_length = lengths.parts(classes, [lengths.sums["delivered"][key] for key in classes])
    by_reward = prompts.parts(hardest, [1.0] * len(hardest))
    rows = {
        "lengths": [{"tokens_to": math.ceil(2 ** ((p[-1] + 1) / PER_OCTAVE)) - 1, **lengths.row(p)} for p in by_length],
        "prompts": [{"prompts": len(part), **prompts.row(part)} for part in by_reward],
    }
    overall = prompts.row(seen)["consumed_per_delivered"]
    warnings = []
    for place, name, group in ((-1, "lengths", "longest completions"), (0, "prompts", "hardest prompts")):
        part = rows[name][place] if len(rows[name]) > 1 else None
        if part and part["delivered"] >= FEWEST and part["consumed_per_delivered"] < STARVED * overall:
            warnings.append(
                f"the {group} are starved: {part['consumed_per_delivered']:.2f} consumed per trajectory delivered, "
                f"{overall:.2f} over all; raise the share of uniform in buffer.mix."
            )
    return {**rows, "warnings": warnings}


def served(prompts: Tally, lengths: Tally) -> tuple[float, float]:
    """Consumed per delivered, over that of all: of the longest tenth of the completions, and of the tenth of the
    prompts with the lowest mean reward. NaN before anything is known.
    """
    delivered, consumed = (np.frombuffer(lengths.sums[name], np.int64) for name in ("delivered", "consumed"))
    longer = np.cumsum(delivered[::-1])[::-1] - delivered
    long = longer < 0.1 * delivered.sum()
    of = {name: np.frombuffer(column, np.float64 if column.typecode == "d" else np.int64)
          for name, column in prompts.sums.items()}
    known = np.flatnonzero(of["accepted"])
    mean = of["reward"][known] / of["accepted"][known]
    hard = known[np.argsort(mean, kind="stable")[: -(-len(known) // 10)]]
    overall = _over(float(consumed.sum()), float(delivered.sum()))
    return (
        _over(_over(float(consumed[long].sum()), float(delivered[long].sum())), overall),
        _over(_over(float(of["consumed"][hard].sum()), float(of["delivered"][hard].sum())), overall),
    )


def _over(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
