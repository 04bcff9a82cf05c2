"""Completions as they grow, one id a row and step."""

# Shape legend: N rows of the batch (prompts x samples), A rows still alive.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tba.engines.protocol import Drawn
from tba.records import Completion


@dataclass(frozen=True, slots=True)
class Sampled:
    """Ids and log-probs drawn so far, by row; a row that has begun gets one id a step until it ends."""

    stop_ids: Tensor
    longest: int
    """Ids of a row, after which it ends."""
    length_N: Tensor
    """Ids that each row has."""
    has_stopped_N: Tensor
    """Whether its last one was a stop id."""
    steps: list[tuple[Tensor, Drawn]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Version of the weights that drew each step."""

    @staticmethod
    def start(rows: int, stop_ids: frozenset[int], longest: int) -> Sampled:
        """`rows` empty completions that end with any of `stop_ids`, or after `longest` ids."""
        return Sampled(
            stop_ids=torch.tensor(sorted(stop_ids)), longest=longest,
            length_N=torch.zeros(rows, dtype=torch.long), has_stopped_N=torch.zeros(rows, dtype=torch.bool),
        )

    def append(self, row_A: Tensor, drawn: Drawn, version: int) -> Tensor:
        """Adds one id, drawn with the weights `version`, to each of the rows `row_A`; returns [A] which go on."""
        self.steps.append((row_A, drawn))
        self.versions.append(version)
        self.length_N[row_A] += 1
        self.has_stopped_N[row_A] = stops_A = torch.isin(drawn.id_N, self.stop_ids)
        return ~stops_A & (self.length_N[row_A] < self.longest)

    @property
    def ids(self) -> list[tuple[int, ...]]:
        """[N] ids drawn so far."""
        return self._grown(lambda drawn: drawn.id_N)

    def completions(self, num_samples: int, decode: Callable[[Sequence[int]], str]) -> list[list[Completion]]:
        """The finished rows, `num_samples` a prompt, in prompt order."""
        ids, logps = self.ids, self._grown(lambda drawn: drawn.logp_N)
        behaviour = self._grown(lambda drawn: drawn.behaviour_logp_N)
        text_of = {tokens: decode(tokens) for tokens in dict.fromkeys(ids)}
        places = list(zip(self._first_steps(), self.length_N.tolist(), strict=True))
        stamp_of = {place: self._stamp(*place) for place in set(places)}
        made = [
            Completion(
                tokens=tokens, text=text_of[tokens], logps=logp, version=stamp_of[place][0],
                finish="stop" if has_stopped else "length", behaviour_logps=behaviour_logp,
                token_versions=stamp_of[place][1],
            )
            for tokens, logp, behaviour_logp, has_stopped, place in zip(
                ids, logps, behaviour, self.has_stopped_N.tolist(), places, strict=True
            )
        ]
        return [made[at : at + num_samples] for at in range(0, len(made), num_samples)]

    def _first_steps(self) -> list[int]:
        """[N] the step that drew each row's first id."""
        first_N = torch.zeros_like(self.length_N)
        for number, (row_A, _) in reversed(list(enumerate(self.steps))):
            first_N[row_A] = number
        return first_N.tolist()

    def _stamp(self, first: int, length: int) -> tuple[int, tuple[int, ...]]:
        """The oldest version of a row's tokens, `length` from step `first` on, and that of each where they differ."""
        own = tuple(self.versions[first : first + length])
        oldest = min(own)
        return oldest, own if max(own) > oldest else ()

    def _grown(self, part: Callable[[Drawn], Tensor | None]) -> list[tuple[Any, ...]]:
        """[N] what each row has of a part of its draws, one entry a step that it was alive for."""
        steps = [(row_A, value_A) for row_A, drawn in self.steps if (value_A := part(drawn)) is not None]
        if not steps:
            return [()] * len(self.length_N)
        length_N = torch.zeros_like(self.length_N)
        value_NT = steps[0][1].new_zeros(len(length_N), int(self.length_N.max()))
        for row_A, value_A in steps:
            value_NT[row_A, length_N[row_A]] = value_A
            length_N[row_A] += 1
        return [tuple(values[:length]) for values, length in zip(value_NT.tolist(), length_N.tolist(), strict=True)]
