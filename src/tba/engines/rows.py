"""Completions as they grow, one id a row and step."""

# Shape legend: N rows of the batch (prompts x samples), A rows still alive.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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

    @staticmethod
    def start(rows: int, stop_ids: frozenset[int]) -> Sampled:
        """`rows` empty completions that end with any of `stop_ids`."""
        return Sampled(stop_ids=torch.tensor(sorted(stop_ids)), alive_N=torch.ones(rows, dtype=torch.bool))

    def alive(self) -> Tensor:
        """[A] numbers of the rows that go on, ascending."""
        return self.alive_N.nonzero()[:, 0]

    def append(self, row_A: Tensor, drawn: Drawn) -> Tensor:
        """Adds one id to each of the rows `row_A`; returns [A] which of them go on."""
        self.steps.append((row_A, drawn))
        goes_on_A = ~torch.isin(drawn.id_N, self.stop_ids)
        self.alive_N[row_A] = goes_on_A
        return goes_on_A

    @property
    def ids(self) -> list[list[int]]:
        """[N] ids drawn so far."""
        found: list[list[int]] = [[] for _ in range(len(self.alive_N))]
        for row_A, drawn in self.steps:
            for row, token in zip(row_A.tolist(), drawn.id_N.tolist(), strict=True):
                found[row].append(token)
        return found

    def completions(
        self, num_samples: int, version: int, decode: Callable[[Sequence[int]], str]
    ) -> list[list[Completion]]:
        """The finished rows, `num_samples` a prompt, in prompt order."""
        ids = self.ids
        logps: list[list[float]] = [[] for _ in ids]
        behaviour: list[list[float]] = [[] for _ in ids]
        for row_A, drawn in self.steps:
            for row, logp in zip(row_A.tolist(), drawn.logp_N.tolist(), strict=True):
                logps[row].append(logp)
            if drawn.behaviour_logp_N is not None:
                for row, logp in zip(row_A.tolist(), drawn.behaviour_logp_N.tolist(), strict=True):
                    behaviour[row].append(logp)
        cut_N = self.alive_N.tolist()
        made = [
            Completion(
                tokens=tuple(ids[n]), text=decode(ids[n]), logps=tuple(logps[n]), version=version,
                finish="length" if cut_N[n] else "stop", behaviour_logps=tuple(behaviour[n]),
            )
            for n in range(len(ids))
        ]
        return [made[at : at + num_samples] for at in range(0, len(made), num_samples)]
