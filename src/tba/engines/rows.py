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
    """Ids and log-probs drawn so far, by row."""

    stop_ids: Tensor
    alive_N: Tensor
    steps: list[tuple[Tensor, Drawn]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Version of the weights that drew each step."""

    @staticmethod
    def start(rows: int, stop_ids: frozenset[int]) -> Sampled:
        """`rows` empty completions that end with any of `stop_ids`."""
        return Sampled(stop_ids=torch.tensor(sorted(stop_ids)), alive_N=torch.ones(rows, dtype=torch.bool))

    def alive(self) -> Tensor:
        """[A] numbers of the rows that go on, ascending."""
        return self.alive_N.nonzero()[:, 0]

    def append(self, row_A: Tensor, drawn: Drawn, version: int) -> Tensor:
        """Adds one id, drawn with the weights `version`, to each of the rows `row_A`; returns [A] which go on."""
        self.steps.append((row_A, drawn))
        self.versions.append(version)
        goes_on_A = ~torch.isin(drawn.id_N, self.stop_ids)
        self.alive_N[row_A] = goes_on_A
        return goes_on_A

    @property
    def ids(self) -> list[tuple[int, ...]]:
        """[N] ids drawn so far."""
        return self._grown(lambda drawn: drawn.id_N)

    def completions(self, num_samples: int, decode: Callable[[Sequence[int]], str]) -> list[list[Completion]]:
        """The finished rows, `num_samples` a prompt, in prompt order."""
        ids, logps = self.ids, self._grown(lambda drawn: drawn.logp_N)
        behaviour = self._grown(lambda drawn: drawn.behaviour_logp_N)
        text_of = {tokens: decode(tokens) for tokens in dict.fromkeys(ids)}
        stamp_of = {length: self._stamp(length) for length in set(map(len, ids))}
        made = [
            Completion(
                tokens=tokens, text=text_of[tokens], logps=logp, version=stamp_of[len(tokens)][0],
                finish="length" if is_cut else "stop", behaviour_logps=behaviour_logp,
                token_versions=stamp_of[len(tokens)][1],
            )
            for tokens, logp, behaviour_logp, is_cut in zip(ids, logps, behaviour, self.alive_N.tolist(), strict=True)
        ]
        return [made[at : at + num_samples] for at in range(0, len(made), num_samples)]

    def _stamp(self, length: int) -> tuple[int, tuple[int, ...]]:
        """The oldest version of a row's tokens, of which there are `length`, and that of each where they differ."""
        own = tuple(self.versions[:length])
        oldest = min(own)
        return oldest, own if max(own) > oldest else ()

    def _grown(self, part: Callable[[Drawn], Tensor | None]) -> list[tuple[Any, ...]]:
        """[N] what each row has of a part of its draws, one entry a step that it was alive for."""
        steps = [(row_A, value_A) for row_A, drawn in self.steps if (value_A := part(drawn)) is not None]
        if not steps:
            return [()] * len(self.alive_N)
        length_N = torch.zeros(len(self.alive_N), dtype=torch.long)
        value_NT = steps[0][1].new_zeros(len(self.alive_N), len(steps))
        for place, (row_A, value_A) in enumerate(steps):
            value_NT[row_A, place] = value_A
            length_N[row_A] += 1
        return [tuple(values[:length]) for values, length in zip(value_NT.tolist(), length_N.tolist(), strict=True)]
