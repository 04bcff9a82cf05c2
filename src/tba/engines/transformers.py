"""Batched sampling with a KV cache over any causal LM of transformers; finished rows leave the batch."""

# Shape legend: N rows (prompts x samples), A rows still alive, P prompts, T positions, V vocabulary.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from tba.engines.protocol import Sampling, draw_ids, uniforms
from tba.engines.rows import Sampled
from tba.policy import Policy, copy_in, copy_out
from tba.records import Completion, Prompt


class TransformersEngine:
    """Reads each prompt once, then decodes its completions side by side."""

    def __init__(self, policy: Policy) -> None:
        """Samples with `policy`, which `load` overwrites: give the engine a copy of its own."""
        self._policy = policy
        self._device = next(self._policy.model.parameters()).device
        self.version = 0

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Prompt], *, num_samples: int, sampling: Sampling, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """See `Engine.generate`."""
        uniform_NT = uniforms(seeds, num_samples, sampling.max_new_tokens)
        logits_AV, cache, mask_AT = self._read(prompts, num_samples)
        sampled = Sampled.start(len(prompts) * num_samples, self._policy.stop_ids)
        alive_A = sampled.alive()
        for place in range(sampling.max_new_tokens):
            drawn = draw_ids(logits_AV.cpu(), uniform_NT[alive_A, place], sampling, self._policy.temperature)
            goes_on_A = sampled.append(alive_A, drawn)
            if place + 1 == sampling.max_new_tokens or not bool(goes_on_A.any()):
                break
            id_A = drawn.id_N
            if not bool(goes_on_A.all()):
                kept = goes_on_A.nonzero()[:, 0]
                cache.batch_select_indices(kept.to(self._device))
                mask_AT, alive_A, id_A = mask_AT[kept], alive_A[kept], id_A[kept]
            mask_AT = torch.cat([mask_AT, mask_AT.new_ones(len(mask_AT), 1)], 1)
            logits_AV = self._forward(id_A[:, None], mask_AT, cache)
        return sampled.completions(num_samples, self.version, self._policy.decode)

    def _read(self, prompts: Sequence[Prompt], num_samples: int) -> tuple[Tensor, DynamicCache, Tensor]:
        """Prompts left-padded and read once, then repeated for their completions."""
        lengths = [len(p.tokens) for p in prompts]
        width = max(lengths)
        ids_PT = torch.zeros(len(prompts), width, dtype=torch.long)
        mask_PT = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids_PT[row, width - lengths[row] :] = torch.tensor(prompt.tokens)
            mask_PT[row, width - lengths[row] :] = 1
        cache = DynamicCache()
        logits_PV = self._forward(ids_PT, mask_PT, cache)
        cache.batch_repeat_interleave(num_samples)
        return logits_PV.repeat_interleave(num_samples, 0), cache, mask_PT.repeat_interleave(num_samples, 0)

    def _forward(self, ids_AT: Tensor, mask_AT: Tensor, cache: DynamicCache) -> Tensor:
        """Logits of the position after the last id; `mask_AT` covers everything read so far."""
        position_AT = (mask_AT.cumsum(1) - 1).clamp(min=0)[:, -ids_AT.shape[1] :]
        return self._policy.model(
            input_ids=ids_AT.to(self._device), attention_mask=mask_AT.to(self._device),
            position_ids=position_AT.to(self._device), cache=cache, use_cache=True, logits_to_keep=1,
        ).logits[:, -1]

    def load(self, tensors: Mapping[str, np.ndarray[Any, Any]], version: int) -> None:
        """See `Engine.load`."""
        copy_in(self._policy.model, tensors)
        self.version = version

    def tensors(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """See `Engine.tensors`."""
        return copy_out(self._policy.model)
