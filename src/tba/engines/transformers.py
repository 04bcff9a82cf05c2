"""Batched sampling with a KV cache over any causal LM of transformers; equal prefixes are read once."""

# Shape legend: N rows (prompts x samples), A rows still alive, F distinct prefixes of those, T positions,
# V vocabulary.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tba.engines.cache import RoomyCache
from tba.engines.protocol import Pause, Sampling, draw_ids, uniforms
from tba.engines.reading import Queue, Reading
from tba.engines.rows import Sampled
from tba.head import head_of
from tba.policy import Policy, cache_word, copy_in, copy_out, positions
from tba.records import Completion, Prompt


class TransformersEngine:
    """Reads every distinct prefix once: prompts, and what completions of a prompt still have in common."""

    def __init__(self, policy: Policy, rows: int | None = None) -> None:
        """Samples with `policy`, which `load` overwrites: give the engine a copy of its own.

        At most `rows` completions are under way at a time, those of one prompt at least: prompts take the place of
        what has ended. None: all that are asked for.
        """
        self._policy, self._rows = policy, rows
        self._device = next(self._policy.model.parameters()).device
        self._head = None if policy.dtype == torch.float32 else head_of(policy.model)
        self._cache_word = str(cache_word(policy.model))
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
        sampled = Sampled.start(len(prompts) * num_samples, self._policy.stop_ids, sampling.max_new_tokens)
        queue = Queue(len(prompts), num_samples, self._rows)
        now = self._begin(prompts, queue)
        while True:
            place_A = sampled.length_N[now.alive_A]
            place_F = torch.zeros(len(now.logits_FV), dtype=torch.long).index_copy_(0, now.prefix_A, place_A)
            logits_FV = self._policy.next_logits(now.logits_FV, place_F)
            drawn = draw_ids(
                logits_FV[now.prefix_A], uniform_NT[now.alive_A, place_A], sampling, self._policy.temperature
            )
            goes_on_A = sampled.append(now.alive_A, drawn, self.version)
            if not bool(goes_on_A.any()):
                if not queue.waiting:
                    break
                self._stop(pause, sampled)
                del now
                now = self._begin(prompts, queue)
                continue
            now.alive_A = now.alive_A[goes_on_A]
            id_F, parent_F, now.prefix_A = _branch(now.prefix_A[goes_on_A], drawn.id_N[goes_on_A], logits_FV.shape[1])
            if self._stop(pause, sampled):
                now.forget()  # of the old weights, before there is another
                row_of = dict(zip(now.prefix_A.tolist(), now.alive_A.tolist(), strict=True))
                ids, rows = sampled.ids, [row_of[prefix] for prefix in range(len(id_F))]
                read = [(prompts[row // num_samples].tokens, ids[row]) for row in rows]
                now.logits_FV, now.cache, now.mask_FT = self._read_on(read)
            else:
                now.cache.batch_select_indices(parent_F.to(self._device))
                now.mask_FT = torch.cat([now.mask_FT[parent_F], now.mask_FT.new_ones(len(parent_F), 1)], 1)
                now.logits_FV = self._forward(id_F[:, None], now.mask_FT, now.cache)
            if queue.has_room(len(now.alive_A)):
                now.take_in(self._begin(prompts, queue, len(now.alive_A)))
        return sampled.completions(num_samples, self._policy.decode)

    def _begin(self, prompts: Sequence[Prompt], queue: Queue, alive: int = 0) -> Reading:
        """Reads as many of the prompts that wait as there is room for beside `alive` rows."""
        taken = queue.take(alive)
        logits_FV, cache, mask_FT = self._read([prompts[n].tokens for n in taken])
        samples = queue.num_samples
        return Reading(
            alive_A=torch.arange(taken.start * samples, taken.stop * samples),
            prefix_A=torch.arange(len(taken)).repeat_interleave(samples),
            logits_FV=logits_FV, cache=cache, mask_FT=mask_FT,
        )

    def _stop(self, pause: Pause | None, sampled: Sampled) -> bool:
        """Stops after this step if a stop is due; whether weights were loaded then."""
        return pause is not None and pause.is_due(len(sampled.steps)) and self._loads_in(pause)

    def _loads_in(self, pause: Pause) -> bool:
        """Whether weights were loaded in a stop."""
        before = self._loads
        pause.do()
        return self._loads > before

    def _read(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, RoomyCache, Tensor]:
        """Logits after each prompt, their cache, and the mask of the left-padded prompts."""
        ids_FT, mask_FT = _left_padded(prompts)
        cache = RoomyCache()
        return self._forward(ids_FT, mask_FT, cache), cache, mask_FT

    def _read_on(self, read: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[Tensor, RoomyCache, Tensor]:
        """`_read` of prompts and what each goes on with; equal prompts are read once."""
        number_of = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompt for prompt, _ in read))}
        _, cache, mask_PT = self._read(list(number_of))
        prompt_F = torch.tensor([number_of[prompt] for prompt, _ in read])
        cache.batch_select_indices(prompt_F.to(self._device))
        ids_FT, on_FT = _left_padded([ids for _, ids in read])
        mask_FT = torch.cat([mask_PT[prompt_F], on_FT], 1)
        return self._forward(ids_FT, mask_FT, cache), cache, mask_FT

    def _forward(self, ids_FT: Tensor, mask_FT: Tensor, cache: RoomyCache) -> Tensor:
        """Logits [F, V] of the position after the last id; `mask_FT` covers everything read so far."""
        given = {
            "input_ids": ids_FT.to(self._device), "attention_mask": mask_FT.to(self._device),
            "position_ids": positions(mask_FT)[:, -ids_FT.shape[1] :].to(self._device),
            self._cache_word: cache, "use_cache": True,
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


def _left_padded(rows: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Ids and their mask, [F, longest] each."""
    width = max(map(len, rows))
    ids_FT = torch.zeros(len(rows), width, dtype=torch.long)
    mask_FT = torch.zeros(len(rows), width, dtype=torch.long)
    for row, ids in enumerate(rows):
        ids_FT[row, width - len(ids) :] = torch.tensor(ids)
        mask_FT[row, width - len(ids) :] = 1
    return ids_FT, mask_FT


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
