"""The exact toy engine: no cache, one full forward per token, any model that reads right-padded ids."""

# Shape legend: N rows (prompts x samples), A rows still alive, V vocabulary.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tba.engines.protocol import Pause, Sampling, draw_ids, uniforms
from tba.engines.rows import Sampled
from tba.policy import Policy, copy_in, copy_out
from tba.records import Completion, Prompt


class TableEngine:
    """Samples by reading the whole prefix again for every token."""

    def __init__(self, policy: Policy) -> None:
        """Samples with `policy`, which `load` overwrites: give the engine a copy of its own."""
        self._policy = policy
        self.version = 0
        self.gives_logps = True

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Prompt], *, num_samples: int, sampling: Sampling, seeds: Sequence[int],
        pause: Pause | None = None,
    ) -> list[list[Completion]]:
        """See `Engine.generate`."""
        rows = [p.tokens for p in prompts for _ in range(num_samples)]
        uniform_NT = uniforms(seeds, num_samples, sampling.max_new_tokens)
        sampled = Sampled.start(len(rows), self._policy.stop_ids, sampling.max_new_tokens)
        alive_A = torch.arange(len(rows))
        for place in range(sampling.max_new_tokens):
            if not len(alive_A):
                break
            if pause is not None and place and pause.is_due(place):
                pause.do()  # nothing was kept of the old weights' reading
            ids = sampled.ids
            logits_AV = self._next_logits([rows[n] + ids[n] for n in alive_A.tolist()])
            logits_AV = self._policy.next_logits(logits_AV, torch.full_like(alive_A, place))
            drawn = draw_ids(logits_AV, uniform_NT[alive_A, place], sampling, self._policy.temperature)
            alive_A = alive_A[sampled.append(alive_A, drawn, self.version)]
        return sampled.completions(num_samples, self._policy.decode)

    def _next_logits(self, prefixes: Sequence[tuple[int, ...]]) -> Tensor:
        lengths = torch.tensor([len(p) for p in prefixes])
        ids = torch.zeros(len(prefixes), int(lengths.max()), dtype=torch.long)
        for row, prefix in enumerate(prefixes):
            ids[row, : len(prefix)] = torch.tensor(prefix)
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        logits_NTV = self._policy.model(input_ids=ids, attention_mask=mask).logits
        return logits_NTV[torch.arange(len(prefixes)), lengths - 1]

    def load(self, tensors: Mapping[str, np.ndarray[Any, Any]], version: int) -> None:
        """See `Engine.load`."""
        copy_in(self._policy.model, tensors)
        self.version = version

    def tensors(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """See `Engine.tensors`."""
        return copy_out(self._policy.model)
