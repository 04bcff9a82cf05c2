"""The Engine protocol, and the draw that all of ours share."""

# Shape legend: N rows, V vocabulary.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from tba.records import Completion, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How completions are drawn."""

    max_new_tokens: int
    """Longest completion, tokens, stop token included."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely id."""
    top_p: float = 1.0
    """Nucleus kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Stops between two tokens of a batch that is being sampled, for newer weights to be loaded in."""

    every: int
    """New tokens of each row from one stop to the next; there is none before the first token or after the last."""
    do: Callable[[], None]
    """What is done at a stop; it may call the engine's `load`."""

    def is_due(self, tokens: int) -> bool:
        """Whether to stop after `tokens` new tokens."""
        return tokens % self.every == 0


@runtime_checkable
class Engine(Protocol):
    """Samples completions with the weights last loaded."""

    version: int
    """Version of those weights."""
    gives_logps: bool
    """Whether completions carry the log-prob that each id was drawn with."""

    def generate(
        self, prompts: Sequence[Prompt], *, num_samples: int, sampling: Sampling, seeds: Sequence[int],
        pause: Pause | None = None,
    ) -> list[list[Completion]]:
        """`num_samples` completions per prompt; those of a prompt depend on its seed, not on its neighbours'.

        What `pause` loads samples the tokens after it, as if these weights had read all that came before them:
        each token's log-probs are those of its own version given the prompt and every id before it, whoever
        sampled that id. Completions that straddle a load say the version of each token. Which random number
        draws a token does not depend on loads.
        """
        ...

    def load(self, tensors: Mapping[str, np.ndarray[Any, Any]], version: int) -> None:
        """Copies weights in; the caller may change its tensors afterwards."""
        ...

    def tensors(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """The weights that the next completion would be sampled with."""
        ...


def uniforms(seeds: Sequence[int], num_samples: int, length: int) -> Tensor:
    """[prompts x num_samples, length] float64 in [0, 1): row p x num_samples + k depends on seeds[p] and k."""
    rows = [np.random.Generator(np.random.Philox(key=seed)).random((num_samples, length)) for seed in seeds]
    return torch.from_numpy(np.concatenate(rows)) if rows else torch.empty(0, length, dtype=torch.float64)


def draw_ids(logits_NV: Tensor, uniform_N: Tensor, sampling: Sampling, policy_temperature: float) -> Drawn:
    """One id per row, by inverse transform of `uniform_N`, and its log-probs.

    The log-prob is at the policy's temperature over the full vocabulary; the behaviour log-prob is that of
    the distribution drawn from, and is None where the two agree.
    """
    logits_NV = logits_NV.float()
    logp_NV = (logits_NV / policy_temperature).log_softmax(-1)
    if sampling.temperature == 0:
        id_N = logits_NV.argmax(-1)
        return Drawn(id_N=id_N, logp_N=_at(logp_NV, id_N), behaviour_logp_N=torch.zeros_like(logp_NV[:, 0]))
    same = sampling.temperature == policy_temperature and sampling.top_p >= 1
    drawn_NV = logp_NV if same else _truncated(logits_NV / sampling.temperature, sampling.top_p).log_softmax(-1)
    edge_NV = drawn_NV.double().exp().cumsum(-1)
    target_N1 = (uniform_N * edge_NV[:, -1])[:, None]
    id_N = (edge_NV <= target_N1).sum(-1).clamp(max=logits_NV.shape[-1] - 1)
    behaviour = None if same else _at(drawn_NV, id_N)
    return Drawn(id_N=id_N, logp_N=_at(logp_NV, id_N), behaviour_logp_N=behaviour)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Ids of one position, with their log-probs."""

    id_N: Tensor
    logp_N: Tensor
    """Nats, at the policy's temperature, full vocabulary."""
    behaviour_logp_N: Tensor | None
    """Nats, under the distribution drawn from; None where it is the same."""


def _at(value_NV: Tensor, id_N: Tensor) -> Tensor:
    return value_NV.gather(-1, id_N[:, None])[:, 0]


def _truncated(logits_NV: Tensor, top_p: float) -> Tensor:
    """Logits with everything outside the smallest set of probability `top_p` at minus infinity."""
    if top_p >= 1:
        return logits_NV
    ordered_NV, index_NV = logits_NV.sort(-1, descending=True)
    probability_NV = ordered_NV.softmax(-1)
    outside_NV = probability_NV.cumsum(-1) - probability_NV >= top_p
    return logits_NV.masked_fill(outside_NV.scatter(-1, index_NV, outside_NV), -torch.inf)
