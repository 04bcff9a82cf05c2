"""Batched sampling with a KV cache over any causal LM of transformers; equal prefixes are read once."""

# Shape legend: N rows (prompts x samples), A rows still alive, F distinct prefixes of those, T positions,
# V vocabulary.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from tba.engines.cache import roomy_cache
from tba.engines.protocol import Pause, Sampling, draw_ids, uniforms
from tba.engines.rows import Sampled
from tba.head import head_of
from tba.policy import Policy, copy_in, copy_out, positions
from tba.records import Completion, Prompt


class TransformersEngine:
    """Reads every distinct prefix once: prompts, and what completions of a prompt still have in common."""

    def __init__(self, policy: Policy) -> None:
        """Samples with `policy`, which `load` overwrites: give the engine a copy of its own."""
        self._policy = policy
        self._device = next(self._policy.model.parameters()).device
        self._head = None if policy.dtype == torch.float32 else head_of(policy.model)
        self._loads = 0
        self.version = 0
        self.gives_logps = True

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Prompt], *, num_samples: int, sampling: Sampling, seeds: Sequence[int],
        pause: Pause | None = None,
    ) -> list[list[Completion]]:
        """See `Engine.generate`."""
        uniform_NT = uniforms(seeds, num_samples, sampling.max_new_tokens)
        sampled = Sampled.start(len(prompts) * num_samples, self._policy.stop_ids)
        alive_A = sampled.alive()
        prefix_A = torch.arange(len(prompts)).repeat_interleave(num_samples)
        logits_FV, cache, mask_FT = self._read([p.tokens for p in prompts])
        for place in range(sampling.max_new_tokens):
            logits_FV = self._policy.next_logits(logits_FV, place)
            drawn = draw_ids(logits_FV[prefix_A], uniform_NT[alive_A, place], sampling, self._policy.temperature)
            goes_on_A = sampled.append(alive_A, drawn, self.version)
            if place + 1 == sampling.max_new_tokens or not bool(goes_on_A.any()):
                break
            alive_A = alive_A[goes_on_A]
            id_F, parent_F, prefix_A = _branch(prefix_A[goes_on_A], drawn.id_N[goes_on_A], logits_FV.shape[1])
            if pause is not None and pause.is_due(place + 1) and self._loads_in(pause):
                del cache  # of the old weights, before there is another
                row_of = dict(zip(prefix_A.tolist(), alive_A.tolist(), strict=True))
                ids, rows = sampled.ids, [row_of[prefix] for prefix in range(len(id_F))]
                read = [(prompts[row // num_samples].tokens, ids[row]) for row in rows]
                logits_FV, cache, mask_FT = self._read_on(read)
                continue
            cache.batch_select_indices(parent_F.to(self._device))
            mask_FT = torch.cat([mask_FT[parent_F], mask_FT.new_ones(len(parent_F), 1)], 1)
            logits_FV = self._forward(id_F[:, None], mask_FT, cache)
        return sampled.completions(num_samples, self._policy.decode)

    def _loads_in(self, pause: Pause) -> bool:
        """Whether weights were loaded in a stop."""
        before = self._loads
        pause.do()
        return self._loads > before

    def _read(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, DynamicCache, Tensor]:
        """Logits after each prompt, their cache, and the mask of the left-padded prompts."""
        lengths = [len(ids) for ids in prompts]
        width = max(lengths)
        ids_FT = torch.zeros(len(prompts), width, dtype=torch.long)
        mask_FT = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, ids in enumerate(prompts):
            ids_FT[row, width - lengths[row] :] = torch.tensor(ids)
            mask_FT[row, width - lengths[row] :] = 1
        cache = roomy_cache()
        return self._forward(ids_FT, mask_FT, cache), cache, mask_FT

    def _read_on(self, read: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[Tensor, DynamicCache, Tensor]:
        """`_read` of prompts and what each goes on with, as long in all of them; equal prompts are read once."""
        number_of = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompt for prompt, _ in read))}
        _, cache, mask_PT = self._read(list(number_of))
        prompt_F = torch.tensor([number_of[prompt] for prompt, _ in read])
        cache.batch_select_indices(prompt_F.to(self._device))
        ids_FT = torch.tensor([ids for _, ids in read])
        mask_FT = torch.cat([mask_PT[prompt_F], torch.ones_like(ids_FT)], 1)
        return self._forward(ids_FT, mask_FT, cache), cache, mask_FT

    def _forward(self, ids_FT: Tensor, mask_FT: Tensor, cache: DynamicCache) -> Tensor:
        """Logits [F, V] of the position after the last id; `mask_FT` covers everything read so far."""
        given = {
            "input_ids": ids_FT.to(self._device), "attention_mask": mask_FT.to(self._device),
            "position_ids": positions(mask_FT)[:, -ids_FT.shape[1] :].to(self._device),
            "cache": cache, "use_cache": True,
        }
        if (head := self._head) is None:
            return self._policy.model(**given, logits_to_keep=1).logits[:, -1].cpu()
        # in memory of its own: a product with part of a larger tensor copies the weight for each row
        last_FH = head.body(**given).last_hidden_state[:, -1].contiguous()
        return head.linear(last_FH).cpu()

    def load(self, tensors: Mapping[str, np.ndarray[Any, Any]], version: int) -> None:
        """See `Engine.load`."""
        copy_in(self._policy.model, tensors)
        self.version = version
        self._loads += 1

    def tensors(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """See `Engine.tensors`."""
        return copy_out(self._policy.model)


def _branch(prefix_A: Tensor, id_A: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct prefixes after one more id: [F] their last ids, [F] their parents, [A] which of them each row has.

    A first child takes its parent's place if there still is one, so that few rows of the cache move when some end.
    """
    code_F, prefix_A = torch.unique(prefix_A * vocabulary + id_A, return_inverse=True)
    parent_F = code_F // vocabulary  # ascending
    stays_F = parent_F < len(parent_F)
    stays_F[1:] &= parent_F[1:] != parent_F[:-1]
    free_F = torch.ones_like(stays_F)
    free_F[parent_F[stays_F]] = False
    place_F = torch.empty_like(parent_F)
    place_F[stays_F], place_F[~stays_F] = parent_F[stays_F], free_F.nonzero()[:, 0]
    order_F = place_F.argsort()
    return (code_F % vocabulary)[order_F], parent_F[order_F], place_F[prefix_A]
